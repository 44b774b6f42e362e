"""What a transformer's blocks take beside attention, by the format of their linear layers.

Attention is taken out: what is left is what ``--linear`` and ``--compile`` change. Blocks are those
of published models with random weights, given what the model gives them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vidsparse.apps.bench.exactness import error_budget
from vidsparse.apps.bench.machine import let_go
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES, Latent
from vidsparse.apps.bench.timing import time_in_turns
from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.results.tables import Columns, number
from vidsparse.dtypes import dtype_name
from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.again import tensors_of
from vidsparse.pipelines.compilation import compile_blocks
from vidsparse.pipelines.linear import quantize_linear
from vidsparse.pipelines.placement import check_linear

OWN: Final = "none"
"""What stands for the model's own format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRow:
    """One kind of block of one model, with its layers in one format.

    Attributes:
        family: the model, as ``bench model`` names it.
        blocks: its list of these blocks.
        tokens: of all samples.
        features: of a token.
        dtype: of the weights.
        linear: format of the large linear layers; ``none`` for the weights' own.
        layers: linear layers in it.
        of: linear layers of the block.
        compiled: whether the block was compiled.
        ms: of the block without attention, the median.
        own_ms: the same with layers in the weights' format, compiled likewise.
        error: of its output against that of the block as it was, not compiled.
    """

    family: str
    blocks: str
    tokens: int
    features: int
    dtype: str
    linear: str
    layers: int
    of: int
    compiled: bool
    ms: float
    own_ms: float
    error: float


@dataclass(frozen=True, slots=True)
class _Call:
    """What a model gives a block."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def of(self, block: nn.Module) -> Any:
        return block(*self.args, **self.kwargs)

    @property
    def video(self) -> Tensor:
        """Its tokens, ``[B, S, D]``."""
        return next(tensors_of((self.args, dict(self.kwargs))))


def measure_linear(
    family: str,
    latent: Latent,
    formats: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    *,
    compiled: bool,
) -> Iterator[LinearRow]:
    """Check, then time one block of each kind of a published model, formats in turns.

    Args:
        family: name in ``MODEL_SHAPES``.
        latent: the video.
        formats: of linear layers, beside the weights' own, which is always there.
        dtype: of the weights.
        device: where.
        repeats: times that each block is measured.
        compiled: whether blocks are compiled; the weights' own format is then measured both ways.

    Raises:
        OptionError: weights of this dtype cannot be put into a format.
        UnsupportedError: torchao is missing, the device cannot run a format, the model has no layer
            large enough for one, or an output is not right.
    """
    for name in formats:
        check_linear(name, str(device), dtype_name(dtype))
    shape = MODEL_SHAPES[family]
    torch.manual_seed(0)
    # blocks of one class are one piece of code to the compiler, which takes few forms of it.
    torch.compiler.reset()

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=dtype)

    with torch.no_grad(), _without_attention():
        # one of each kind, so that none is a first or last one that stays as it is.
        own = shape.build(len(shape.blocks), dtype, device)
        inputs = shape.inputs(shape.pipe(own), own, latent, random)
        calls = _calls(own, shape.blocks, inputs)
        wanted = [(OWN, False), *((name, compiled) for name in (OWN, *formats))]
        models = {
            variant: _variant(own, shape.pipe, *variant, device)
            for variant in dict.fromkeys(wanted)
        }
        try:
            for blocks, call in calls.items():
                yield from _rows(family, blocks, call, models, device, repeats)
        finally:
            del own, models, calls, inputs
            let_go(device)


def _rows(
    family: str,
    blocks: str,
    call: _Call,
    models: Mapping[tuple[str, bool], Any],
    device: torch.device,
    repeats: int,
) -> Iterator[LinearRow]:
    chosen = {variant: getattr(model, blocks)[0] for variant, model in models.items()}
    right = list(tensors_of(call.of(chosen[OWN, False])))
    errors = {}
    for (linear, compiled), block in chosen.items():
        outs = list(tensors_of(call.of(block)))
        off = sum(
            float((out.double() - own.double()).square().sum())
            for out, own in zip(outs, right, strict=True)
        )
        error = (off / sum(float(own.double().square().sum()) for own in right)) ** 0.5
        budget = error_budget(0.0, right[0].dtype, lossy=linear != OWN)
        if not error <= budget:
            raise UnsupportedError(
                f"{blocks} of {family} with layers in {linear}: off by {error:.2e}, budget "
                f"{budget:.2e}; no time is reported for a wrong result"
            )
        errors[linear, compiled] = error

    def run(block: nn.Module) -> Callable[[], Any]:
        return lambda: call.of(block)

    named = {f"{linear} {compiled}": run(block) for (linear, compiled), block in chosen.items()}
    ms = time_in_turns(named, device, repeats)
    batch, tokens, features = call.video.shape
    for (linear, compiled), block in chosen.items():
        layers = [one for one in block.modules() if isinstance(one, nn.Linear)]
        before = chosen[OWN, False].modules()
        yield LinearRow(
            family=family,
            blocks=blocks,
            tokens=batch * tokens,
            features=features,
            dtype=dtype_name(call.video.dtype),
            linear=linear,
            layers=0 if linear == OWN else _changed(layers, before),
            of=len(layers),
            compiled=compiled,
            ms=ms[f"{linear} {compiled}"],
            own_ms=ms[f"{OWN} {compiled}"],
            error=errors[linear, compiled],
        )


def _changed(layers: Sequence[nn.Linear], before: Iterator[nn.Module]) -> int:
    own = (one for one in before if isinstance(one, nn.Linear))
    return sum(
        type(one.weight) is not type(was.weight) or one.weight.dtype != was.weight.dtype
        for one, was in zip(layers, own, strict=True)
    )


def _variant(
    own: nn.Module,
    pipe_of: Callable[[Any], Any],
    linear: str,
    compiled: bool,
    device: torch.device,
) -> Any:
    if (linear, compiled) == (OWN, False):
        return own
    model = copy.deepcopy(own)
    pipe = pipe_of(model)
    if linear != OWN:
        quantize_linear(pipe, linear, device=str(device), edges=0)
    if compiled:
        compile_blocks(pipe)
    return model


def _calls(model: Any, kinds: Mapping[str, str], inputs: Mapping[str, Any]) -> dict[str, _Call]:
    """What the first block of each kind is given, by the name of its list."""
    found: dict[str, _Call] = {}
    hooks = []
    for name in kinds:

        def keep(
            block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name
        ) -> None:
            found[name] = _Call(args, kwargs)

        first = getattr(model, name)[0]
        hooks.append(first.register_forward_pre_hook(keep, with_kwargs=True))
    model(**inputs, return_dict=False)
    for hook in hooks:
        hook.remove()
    return found


@torch.library.custom_op("vidsparse::no_attention", mutates_args=())
def no_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What stands in attention's place: queries ``[B, H, S, D]``, a key and a value added.

    A compiler does not look inside, and so leaves nothing out of what makes keys and values.
    """
    return q + (k[:, :1, :1] + v[:, :1, :1])


@no_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@contextmanager
def _without_attention() -> Iterator[None]:
    def instead(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        made: Tensor = no_attention(query, key, value)
        return made

    with mock.patch.object(F, "scaled_dot_product_attention", instead):
        yield


def linear_file(path: Path) -> RowFile:
    """The rows of this bench in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, "vidsparse-linear/1", "benchmark of linear layers")


COLUMNS: Final[Columns[LinearRow]] = {
    "model": lambda row: row.family,
    "blocks": lambda row: row.blocks,
    "tokens x features": lambda row: f"{row.tokens:,} x {row.features:,}",
    "linear": lambda row: row.dtype if row.linear == OWN else row.linear,
    "of its layers": lambda row: "" if row.linear == OWN else f"{row.layers} of {row.of}",
    "compiled": lambda row: "yes" if row.compiled else "no",
    "ms": lambda row: number(row.ms),
    "of its own": lambda row: number(row.ms / row.own_ms),
    "error": lambda row: f"{row.error:.1e}",
}
"""The table's columns."""
