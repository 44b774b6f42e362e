"""What a model family declares, and the processor that stands in for the host's.

An adapter is a short declaration beside one attention processor; see ``wan.py``. Processors send
their calls to the session of their pipeline (``session.py``) by an opaque operator
(``operators.py``), and around it where a gradient is asked for outside a compiled graph, so that
dense ones have the stock one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from vidsparse.errors import UnsupportedError
from vidsparse.order import wants_gradient
from vidsparse.pipelines.branches import BRANCHES_ARE_APART, Halves
from vidsparse.pipelines.copies import PROCESSOR_COPIED
from vidsparse.pipelines.family import Family
from vidsparse.pipelines.layout import Layout
from vidsparse.pipelines.operators import Attends, dense_video_attention, video_attention
from vidsparse.pipelines.parallel import Shares, check_parallel


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How one family's pipelines are read and attached to.

    Args:
        family: the classes covered.
        transformers: pipeline attributes that hold a transformer, in the order they denoise.
        attention: matches the module names of video self-attention inside a transformer, whose
            layers are numbered in the order of its modules. Cross-attention, text refiners and
            audio must not match. A group named ``block`` matches the transformer block, where that
            is not the module's parent.
        stock_processors: the diffusers processors that ``processor`` replaces; a pipeline with any
            other is refused.
        processor: the family's processor class, one for all layers.
        layout: reads the token layout from a transformer and the arguments of its forward, by
            name. For a forward that cannot be sparse it returns the reason, in words for the trace,
            or None if the arguments are not those that the family's pipelines pass.
        branches: guidance branches in the order of a step's forwards; one entry if guidance is
            batched or distilled. Used where the pipeline does not name the branch itself.
        stacked: whether a forward with guidance whose branch is not named has both branches in its
            batch, the conditional one last.
        shares: how the sequence is divided among several processes.
        tiled: whether a step may have more forwards than branches, each for a part of the video.
        outputs: the transformer's last modules: one for the video, and one for each other output
            (sound).
    """

    family: Family
    transformers: tuple[str, ...] = ("transformer",)
    attention: re.Pattern[str]
    stock_processors: tuple[str, ...]
    processor: type[SparseProcessor]
    layout: Callable[[Any, Mapping[str, Any]], Layout | str | None]
    branches: tuple[str, ...] = ("conditional",)
    stacked: bool = False
    shares: Shares
    tiled: bool = False
    outputs: tuple[str, ...] = ("proj_out",)

    @property
    def takes_turns(self) -> bool:
        """Whether a step with guidance has one forward for each branch, the conditional first."""
        return self.branches == ("conditional", "unconditional") and not self.tiled


def transformers_of(pipe: Any, adapter: Adapter) -> list[nn.Module]:
    """The pipeline's transformers, each as it is beneath ``torch.compile``, and once."""
    found: list[nn.Module] = []
    for name in adapter.transformers:
        component = getattr(pipe, name, None)
        one = getattr(component, "_orig_mod", component)
        # whoever lacks the memory for two stages has one model in both places.
        if one is not None and not any(one is other for other in found):
            found.append(one)
    if not found:
        raise UnsupportedError(
            f"this {type(pipe).__name__} has no transformer. "
            "Hint: load the whole pipeline; load_components() does that of a modular one."
        )
    return found


def attention_modules(transformer: nn.Module, adapter: Adapter) -> list[tuple[str, Any]]:
    """The modules of video self-attention, by name, in the order of their layers."""
    return [
        (name, module)
        for name, module in transformer.named_modules()
        if adapter.attention.fullmatch(name)
    ]


def transformer_blocks(transformer: nn.Module, adapter: Adapter) -> list[nn.Module]:
    """The blocks around every video self-attention, in the order they run."""
    pattern = adapter.attention
    names = (name for name, _ in attention_modules(transformer, adapter))
    if "block" in pattern.groupindex:
        names = (pattern.sub(r"\g<block>", name) for name in names)
    else:
        names = (name.rpartition(".")[0] for name in names)
    return [transformer.get_submodule(name) for name in names]


def is_stock(processor: Any, adapter: Adapter) -> bool:
    """Whether ``processor`` is one of the host's that the adapter stands in for."""
    return type(processor).__name__ in adapter.stock_processors


class PipelineState(Attends, Protocol):
    """What a processor needs of its pipeline's session."""

    id: int
    adapter: Adapter
    halves: Halves | None

    @property
    def active(self) -> bool:
        """Whether its transformers attend through it."""

    def undo_parallel(self, config: Any) -> None:
        """Take back a parallel configuration that was refused."""


class SparseProcessor:
    """Base of the families' processors: replaces one stock processor.

    Args:
        stock: diffusers' processor; dense calls go through it, and removal puts it back.
        session: the pipeline's state.
        part: which of the pipeline's transformers.
        layer: which layer of it.
    """

    def __init__(self, stock: Any, session: PipelineState, part: int, layer: int) -> None:
        self.stock = stock
        self.session = session
        self.address = torch.tensor([session.id, part, layer], dtype=torch.int64, device="cpu")

    # the host sets these two on whatever processor it finds; they belong to the stock one, so that
    # dense calls follow them and removal loses nothing.
    @property
    def _attention_backend(self) -> Any:
        return self.stock._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.stock._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return getattr(self.stock, "_parallel_config", None)

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        try:
            check_parallel(config, self.session.adapter.shares)
            if config is not None and self.session.halves is not None:
                raise UnsupportedError(BRANCHES_ARE_APART)
        except UnsupportedError:
            self.session.undo_parallel(config)
            raise
        if hasattr(self.stock, "_parallel_config"):
            self.stock._parallel_config = config

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of one call, ``[B, S, H, D]``; dense where diffusers passes a mask.

        Raises:
            UnsupportedError: the call is sparse and needs a gradient.
        """
        out: Tensor
        if not wants_gradient(q, k, v):
            out = video_attention(q, k, v, self.address, mask)
            return out
        if torch.compiler.is_compiling():
            if mask is not None:
                raise self.unexpected("with a mask, compiled and with gradients")
            out, _ = dense_video_attention(q, k, v, self.address)
            return out
        _, part, layer = self.address.tolist()
        return self.session.attend(q, k, v, part, layer, mask)

    def unexpected(self, what: str) -> UnsupportedError:
        """The error for a call that this family's pipelines never make.

        ``what`` completes "was called", such as "with a mask".
        """
        family = self.session.adapter.family.name
        return UnsupportedError(
            f"sparse attention in {family} was called {what}. "
            "Hint: this version of diffusers may be too new; please report it."
        )

    # copies and files of a block, or of a processor alone.
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(PROCESSOR_COPIED)
