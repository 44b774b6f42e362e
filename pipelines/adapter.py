"""What a model family declares, and the way its attention calls reach the engine.

An adapter is a short declaration beside one attention processor; see ``wan.py``. Everything that
is the same for all families is here:

- ``video_attention``, one opaque torch operator. ``torch.compile(fullgraph=True)`` does not look
  inside, so planning, caching and tracing stay ordinary Python. Where a call comes from (pipeline,
  transformer, layer) travels as a small CPU tensor: a Python integer would be a constant of the
  graph, and every layer would compile anew.
- ``Session``, the state of one sparse pipeline. A forward pre-hook on each transformer tells it the
  grid, the step and the guidance branch, which the operator reads when it runs.
- ``SparseProcessor``, the base of the families' processors.

No class and no Python module of the host is changed: only this pipeline's transformers are, and
removal takes all of it back. A session lives as long as the processors that point to it.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from vidsparse.attention import AttentionEngine
from vidsparse.errors import UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.pipelines.families import FAMILIES, Family, supported_pipelines
from vidsparse.site import CallSite


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How one family's pipelines are read and attached to.

    Args:
        family: the classes covered.
        transformers: pipeline attributes that hold a transformer, in the order they denoise.
        attention: matches the module names of video self-attention inside a transformer; group 1
            is the layer number. Cross-attention and text refiners must not match.
        stock_processors: the diffusers processors that ``processor`` stands in for; any other is
            somebody's own and is refused.
        processor: the family's processor class, one for all layers.
        dense: the host's own attention, ``(stock processor, q, k, v) -> out``, all
            ``[B, H, S, D]``.
        grid: reads the token grid from the arguments of a transformer's forward.
        branches: guidance branches in the order of a step's forwards; one entry where guidance
            is batched or distilled. Used where the pipeline does not name the branch itself.
    """

    family: Family
    transformers: tuple[str, ...]
    attention: re.Pattern[str]
    stock_processors: tuple[str, ...]
    processor: type[SparseProcessor]
    dense: Callable[[Any, Tensor, Tensor, Tensor], Tensor]
    grid: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], TokenGrid | None]
    branches: tuple[str, ...]


def find_adapter(pipe: Any) -> Adapter:
    """The adapter for ``pipe``, by the nearest diffusers class it is or derives from.

    Raises:
        UnsupportedError: no family covers it.
    """
    host_classes = [
        cls.__name__ for cls in type(pipe).__mro__ if cls.__module__.split(".")[0] == "diffusers"
    ]
    for family in FAMILIES:
        if host_classes and host_classes[0] in family.pipelines:
            return _load_adapter(family)
    raise UnsupportedError(
        f"{type(pipe).__name__} is not a supported pipeline. "
        f"Hint: sparsify takes {supported_pipelines()}."
    )


def _load_adapter(family: Family) -> Adapter:
    # families import this module for the base class, so they are looked up when first needed.
    from vidsparse.pipelines import wan

    return {wan.ADAPTER.family.name: wan.ADAPTER}[family.name]


class Session:
    """The running state of one sparse pipeline.

    Args:
        pipe: the diffusers pipeline; held weakly, so a session never keeps a model in memory.
        adapter: its family.
        engines: what computes attention, one for each transformer: a two-stage model's second
            transformer must not reuse the plans of the first. They share the trace of a run.
    """

    def __init__(self, pipe: Any, adapter: Adapter, engines: tuple[AttentionEngine, ...]) -> None:
        self.id = next(_SESSION_IDS)
        self.adapter = adapter
        self.engines = engines
        self.stock: dict[tuple[int, int], Any] = {}
        self._pipe = weakref.ref(pipe)
        self._watches: list[Callable[[], object]] = []
        self._site: CallSite | None = None
        self._context: str | None = None
        self._timesteps: Any = None
        self._timestep_values: list[float] = []
        self._forwards_in_step = 0
        _SESSIONS[self.id] = self

    @property
    def active(self) -> bool:
        """Whether the pipeline's forwards are followed."""
        return bool(self._watches)

    def watch(self, part: int, transformer: nn.Module) -> None:
        """Follow the forwards of ``transformer``, the pipeline's ``part``-th."""
        session = self

        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            session._observe(part, module, args, kwargs)

        # outside the graph: the grid and the step are read by python before each forward.
        eager = torch.compiler.disable(observe)  # type: ignore[no-untyped-call]
        hook = transformer.register_forward_pre_hook(eager, with_kwargs=True)
        self._watches.append(hook.remove)
        self._watch_context(transformer)

    def unwatch(self) -> None:
        """Leave the transformers as they were before ``watch``."""
        while self._watches:
            self._watches.pop()()

    def _watch_context(self, transformer: nn.Module) -> None:
        """Learn the guidance branch from the host's own announcement, ``cache_context(name)``."""
        stock = getattr(type(transformer), "cache_context", None)
        if stock is None or "cache_context" in vars(transformer):
            return
        session, reference = self, weakref.ref(transformer)

        @contextmanager
        def cache_context(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
            with stock(reference(), name, *args, **kwargs):
                session._context = name
                try:
                    yield
                finally:
                    session._context = None

        def forget() -> None:
            if (module := reference()) is not None:
                vars(module).pop("cache_context", None)

        # on this one module, not on its class; once deleted, the class's own shows again.
        vars(transformer)["cache_context"] = cache_context
        self._watches.append(forget)

    def _observe(
        self, part: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        pipe = self._pipe()
        if pipe is None:
            raise UnsupportedError(
                "the pipeline that was made sparse no longer exists, but its transformer still "
                "runs. Hint: call restore() on the pipeline in use, then sparsify() it."
            )
        grid = self.adapter.grid(module, args, kwargs)
        if grid is None:
            self._site = None
            return
        step, steps, timesteps = _denoising_position(pipe)
        last = self._site.step if self._site is not None else -1
        # every pipeline call sets new timesteps; a step that goes back covers loops that do not.
        if step < last or (step == 0 and timesteps is not self._timesteps) or last < 0:
            self._begin_run(steps, timesteps)
        if step != last:
            self._forwards_in_step = 0
        self._site = CallSite(
            layer=0,
            step=step,
            timestep=self._timestep_values[step - steps],
            grid=grid,
            branch=self._branch(),
            part=part,
        )
        self._forwards_in_step += 1

    def _begin_run(self, steps: int, timesteps: Any) -> None:
        self._timesteps = timesteps
        self._timestep_values = timesteps.tolist()
        self._forwards_in_step = 0
        for engine in self.engines:
            engine.begin_run(steps)
            engine.trace = self.engines[0].trace

    def _branch(self) -> str:
        if self._context is not None:
            return "unconditional" if self._context.startswith("uncond") else "conditional"
        branches = self.adapter.branches
        return branches[self._forwards_in_step % len(branches)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, part: int, layer: int) -> Tensor:
        """One attention call, ``[B, S, H, D]`` in and out (the host's layout)."""
        dense = partial(self.adapter.dense, self.stock[part, layer])
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self._site is None:
            out = dense(q, k, v)
        else:
            site = replace(self._site, layer=layer)
            out = self.engines[part].attend(q, k, v, site, dense)
        return out.transpose(1, 2).contiguous()


def _denoising_position(pipe: Any) -> tuple[int, int, Any]:
    """The step about to run (from 0), how many this run has, and the scheduler's timesteps."""
    scheduler = pipe.scheduler
    if not hasattr(scheduler, "step_index") or getattr(scheduler, "timesteps", None) is None:
        raise UnsupportedError(
            f"{type(scheduler).__name__} does not say which step it is at (step_index). "
            "Hint: use a flow-matching Euler or UniPC scheduler."
        )
    timesteps = scheduler.timesteps
    total = len(timesteps)
    steps = total
    if getattr(pipe, "current_timestep", None) is not None:
        # within a call of the pipeline. video-to-video runs the end of the list only, and its
        # first step counts as 0; outside a call this number is left over from the last one.
        steps = min(total, getattr(pipe, "num_timesteps", total))
    index = scheduler.step_index
    step = 0 if index is None else int(index) - (total - steps)
    return min(max(step, 0), steps - 1), steps, timesteps


_SESSION_IDS: Final = itertools.count()
_SESSIONS: Final[weakref.WeakValueDictionary[int, Session]] = weakref.WeakValueDictionary()


# a graph capture would record one plan's kernels and replay them for every step.
@torch.library.custom_op(
    "vidsparse::video_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def video_attention(q: Tensor, k: Tensor, v: Tensor, address: Tensor) -> Tensor:
    """Attention of one call, ``[B, S, H, D]``; ``address`` holds session, transformer, layer."""
    session, part, layer = address.tolist()
    return _SESSIONS[session].attend(q, k, v, part, layer)


@video_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, address: Tensor) -> Tensor:
    return q.new_empty(q.shape)


class SparseProcessor:
    """Base of the families' processors: stands in for one stock processor.

    Args:
        stock: the host's processor; dense calls go through it, removal puts it back.
        session: the pipeline's state.
        part: which of the pipeline's transformers.
        layer: which layer of it.
    """

    def __init__(self, stock: Any, session: Session, part: int, layer: int) -> None:
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
    def _parallel_config(self) -> None:
        return None

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        if config is not None:
            raise parallel_unsupported()

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseProcessor:
        raise UnsupportedError(
            "a sparse pipeline cannot be copied, because the copy would share its state. "
            "Hint: remove() the handle, copy, then sparsify() both."
        )


def parallel_unsupported() -> UnsupportedError:
    """The error for pipelines under context parallelism."""
    return UnsupportedError(
        "sparse attention does not run under context parallelism yet: each process holds only a "
        "part of the tokens. Hint: run the pipeline without enable_parallelism()."
    )
