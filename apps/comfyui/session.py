"""One model's sparse attention in ComfyUI, from the node to the engine.

ComfyUI lets a model's attention be replaced by ``optimized_attention_override`` in its
``transformer_options``. It builds these anew before every forward, and other nodes write into them
as well, so ours is put in at the last moment, by a wrapper around ``apply_model``: into a copy, on
top of whatever override is there. Nothing outlives the forward, and the model that came into the
node is not touched.

The engine, its schedule and its trace are the core's. Here are only the step, the grid, the layer
and the branch as ComfyUI tells them.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.apps.comfyui.layout import ForwardLayout, count_blocks, read_layout
from vidsparse.engine import AttentionEngine
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.methods import Method
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

KEY: Final = "vidsparse"
"""The name of our wrappers and of the session attached to a model."""

OVERRIDE: Final = "optimized_attention_override"

# the values of comfy.patcher_extension.WrappersMP, which are part of its interface.
_APPLY_MODEL, _OUTER_SAMPLE = "apply_model", "outer_sample"

# in the options of a forward that a thread of its own runs on one of several GPUs.
_WORKER: Final = "multigpu_thread_device"

Attention = Callable[..., Tensor]

# sigmas come from tables and through 32 bits.
_SIGMA_SLACK: Final = 1e-4

_CROSS: Final = "cross-attention, which stays dense"
_DEALT: Final = "forwards that ComfyUI deals to several GPUs, which stay dense"
_ELSEWHERE: Final = "attention of other tokens than the video's (text, audio, images)"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSettings:
    """What the node was set to.

    Args:
        method: what chooses the pairs to compute.
        order: token order that tiles are cut in.
        start_percent: where in the denoising sparse attention begins, from 0 to 1 as ComfyUI
            counts it; before it steps are dense.
        end_percent: where it ends.
        min_tokens: calls of fewer tokens are dense.
        part: which transformer of a calibrated preset the model is, from 0.
        schedule: dense layers and the like, as a preset settles them.

    Raises:
        OptionError: a window that is none, or fewer tokens than 0.
    """

    method: Method
    order: str = "hilbert"
    start_percent: float = 0.2
    end_percent: float = 1.0
    min_tokens: int = 0
    part: int = 0
    schedule: Mapping[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.start_percent <= self.end_percent <= 1:
            raise OptionError(
                "start_percent and end_percent must be from 0 to 1, the first no larger, got "
                f"{self.start_percent} and {self.end_percent}"
            )
        if self.min_tokens < 0 or self.part < 0:
            raise OptionError(
                f"min_tokens and part must be from 0, got {self.min_tokens} and {self.part}"
            )


@dataclass(slots=True)
class _Forward:
    """What is known of the forward that runs."""

    layout: ForwardLayout | str
    site: CallSite
    # why no call of this forward can be sparse, whatever its tokens are.
    dense: str | None
    before: Attention | None
    called: Counter[tuple[Any, Any]] = field(default_factory=Counter)


class NodeSession:
    """The sparse attention of one model.

    Args:
        settings: what the node was set to.

    Attributes:
        engine: what runs the attention calls; its trace is that of the last sampling.
        others: calls that are none of the video's self-attention, by what they are.
        window: the steps of the last sampling that may be sparse.
        rising: whether its sigmas rose, as where a video is turned back into noise.

    Raises:
        OptionError: the method lacks calibrated numbers.
    """

    def __init__(self, settings: SessionSettings) -> None:
        self.settings = settings
        self.engine = AttentionEngine(
            settings.method,
            schedule=self._schedule(),
            order=settings.order,
            layers=1,
        )
        self.others: Counter[str] = Counter()
        self.window = range(0)
        self.rising = False
        self._sigmas: Tensor | None = None
        self._values: list[float] = []
        # what the sampler was given, and the sigma that it tells in each step, which may be raised.
        self._churn: Mapping[str, Any] = {}
        self._raised: list[float] = []
        self._step = 0
        self._layers: dict[tuple[Any, Any, int], int] = {}
        self._seen: Counter[tuple[int, str]] = Counter()
        self._forward: _Forward | None = None
        self._outside_graphs: Attention | None = None

    @property
    def ran_sparse(self) -> bool:
        """Whether the last sampling had a sparse call."""
        return any(cell.sparse for cell in self.engine.trace.cells)

    def _schedule(self, first: int = 0, last: int = 0) -> Schedule:
        settled: dict[str, Any] = {**self.settings.schedule}
        settled |= {"dense_steps": first, "dense_last_steps": last}
        method = self.settings.method
        return Schedule(**settled, **(method.of_schedule if isinstance(method, Method) else {}))

    # ---- what ComfyUI calls ----

    def sample(self, executor: Attention, *args: Any, **kwargs: Any) -> Any:
        """The wrapper around one sampling: a new trace, and no plans kept after it."""
        self._sigmas = None
        self._churn = _churn_of([*args, *kwargs.values()])
        self.others.clear()
        self.engine.begin_run(1)
        try:
            return executor(*args, **kwargs)
        finally:
            self.engine.forget()

    def apply_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """The wrapper around one forward of the model.

        Raises:
            UnsupportedError: a sparse call cannot run on these tensors.
        """
        bound = inspect.signature(executor.original).bind(*args, **kwargs)
        given = bound.arguments
        conditions = {**given, **given.get("kwargs", {})}
        options = given.get("transformer_options", {})
        if options.get(_WORKER) is not None:
            # threads of several GPUs would share one engine, with clones of one model.
            self.others[_DEALT] += 1
            return executor(*args, **kwargs)
        forward = self._begin(executor.class_obj, conditions, options)
        # a copy, so that no dictionary of others holds what is ours.
        given["transformer_options"] = {**options, OVERRIDE: self._override()}
        outer, self._forward = self._forward, forward
        self.engine.trace.begin_forward()
        try:
            out = executor(*bound.args, **bound.kwargs)
        finally:
            self._forward = outer
        # nodes that cache steps leave calls out below this.
        self.engine.trace.end_forward(forward.site.part, forward.site.branch)
        return out

    def attend(self, stock: Attention, *args: Any, **kwargs: Any) -> Tensor:
        """The override: one attention call of the model, as ``stock(*args, **kwargs)`` has it.

        ``q``, ``k``, ``v`` are ``[B, S, H * D]``, with ``skip_reshape`` ``[B, H, S, D]``; so is
        the output, with ``skip_output_reshape``.

        Raises:
            UnsupportedError: the sparse call cannot run on these tensors.
        """
        forward = self._forward
        if forward is None:
            # a copy of the options that somebody kept: not a forward of ours.
            return stock(*args, **kwargs)
        before = forward.before

        def dense() -> Tensor:
            return stock(*args, **kwargs) if before is None else before(stock, *args, **kwargs)

        call = dict(zip(("q", "k", "v", "heads", "mask"), args, strict=False)) | kwargs
        if "query" in call:
            call |= {"q": call["query"], "k": call["key"], "v": call["value"]}
        heads, split = call["heads"], call.get("skip_reshape", False)
        what = _stranger(forward.layout, call["q"], call["k"], call["v"], 2 if split else 1)
        if what is not None:
            self.others[what] += 1
            return dense()
        assert isinstance(forward.layout, ForwardLayout)
        q, k, v = (_to_heads(call[name], heads, split) for name in "qkv")
        options = call.get("transformer_options") or {}
        tokens = q.shape[2]
        grid = forward.layout.grid(tokens, options.get("grid_sizes"))
        because = forward.dense or self._unable(call, q, grid)
        site = replace(
            forward.site,
            layer=self._layer(forward, options),
            grid=grid if isinstance(grid, TokenGrid) else TokenGrid(1, 1, tokens),
        )
        kept = call.get("skip_output_reshape", False)
        out = self.engine.attend(
            q,
            k,
            v,
            site,
            lambda *_: _to_heads(dense(), heads, kept),
            # ComfyUI was started with another attention, or a node has set one.
            keep_dense=before is not None or "pytorch" not in getattr(stock, "__name__", ""),
            dense_because=because,
        )
        return out if kept else out.transpose(1, 2).flatten(2)

    # ---- what it tells ----

    def _begin(
        self, model: Any, conditions: Mapping[str, Any], options: Mapping[str, Any]
    ) -> _Forward:
        transformer = _transformer(model)
        sigmas, sigma = options.get("sample_sigmas"), options.get("sigmas")
        step, dense = 0, None
        if not isinstance(sigmas, Tensor) or not isinstance(sigma, Tensor) or len(sigmas) < 2:
            dense = "ComfyUI did not say which step this is"
        else:
            # a copy on another device is no other run.
            if self._sigmas is None or (
                sigmas is not self._sigmas and sigmas.tolist() != self._values
            ):
                self._begin_run(model, sigmas)
            self._sigmas = sigmas
            step = self._step = self._step_at(float(sigma.flatten()[0]))
        branch = _branch(options)
        self._seen[step, branch] += 1
        number = self._seen[step, branch]
        return _Forward(
            layout=read_layout(transformer, conditions.get("x"), conditions),
            site=CallSite(
                layer=0,
                step=step,
                timestep=_timestep(model, conditions.get("t")),
                grid=TokenGrid(1, 1, 1),
                # regions, windows and samplers that run a step twice: each has plans of its own.
                branch=branch if number == 1 else f"{branch} {number}",
                window=number,
                part=self.settings.part,
            ),
            dense=dense,
            before=options.get(OVERRIDE),
        )

    def _step_at(self, now: float) -> int:
        """The step of the forward that is told the sigma ``now``."""
        own, least = self._values[:-1], 0
        if self._raised != own:
            # one that is raised may be higher than those of steps before.
            least = self._step
            for at in range(least, len(own)):
                if math.isclose(self._raised[at], now, rel_tol=_SIGMA_SLACK):
                    return at
        # between two of them for samplers that look ahead.
        if self.rising:
            reached = sum(value <= now * (1 + _SIGMA_SLACK) for value in own)
        else:
            reached = sum(value >= now * (1 - _SIGMA_SLACK) for value in own)
        return max(least, reached - 1)

    def _begin_run(self, model: Any, sigmas: Tensor) -> None:
        self._values = sigmas.tolist()
        steps = len(self._values) - 1
        self.rising = self._values[0] < self._values[-1]
        self._raised, self._step = _raised(self._values[:steps], **self._churn), 0
        sampling = model.model_sampling
        start, end = (
            float(sampling.percent_to_sigma(percent))
            for percent in (self.settings.start_percent, self.settings.end_percent)
        )
        first = sum(value > start * (1 + _SIGMA_SLACK) for value in self._values[:steps])
        last = sum(value < end * (1 - _SIGMA_SLACK) for value in self._values[:steps])
        if self.rising:
            first, last = last, first
        self.engine.schedule = self._schedule(first, last)
        self.engine.layers = count_blocks(_transformer(model))
        self.engine.begin_run(steps)
        self.window = self.engine.schedule.sparse_window(steps)
        self.others.clear()
        self._layers.clear()
        self._seen.clear()

    def _override(self) -> Attention:
        """``attend``, for which a compiled model leaves its graph: planning is python.

        Saying so loads torch's compiler, so it is said where that is loaded.
        """
        if self._outside_graphs is None and "torch._dynamo" in sys.modules:
            self._outside_graphs = torch.compiler.disable(self.attend)  # type: ignore[no-untyped-call]
        return self._outside_graphs or self.attend

    def _layer(self, forward: _Forward, options: Mapping[str, Any]) -> int:
        """The number of the calling layer: newer models name their blocks, others are counted."""
        block = options.get("block_type"), options.get("block_index")
        place = (*block, forward.called[block])
        forward.called[block] += 1
        return self._layers.setdefault(place, len(self._layers))

    def _unable(self, call: Mapping[str, Any], q: Tensor, grid: TokenGrid | str) -> str | None:
        """Why this call of the video's self-attention cannot be sparse, or None."""
        if call.get("mask") is not None:
            return "it has an attention mask"
        scale = call.get("scale")
        if scale is not None and not math.isclose(scale, q.shape[-1] ** -0.5, rel_tol=1e-6):
            return f"its scale is {scale:g}, not 1/sqrt(D)"
        if isinstance(grid, str):
            return grid
        if grid.tokens < self.settings.min_tokens:
            return f"{grid.tokens} tokens are fewer than min_tokens, {self.settings.min_tokens}"
        return None


def install(model: Any, session: NodeSession) -> Any:
    """A clone of ComfyUI's ``model`` that runs by ``session``; the model itself stays as it is.

    Raises:
        UnsupportedError: this ComfyUI is too old for it.
    """
    clone = model.clone()
    if not hasattr(clone, "add_wrapper_with_key") or not hasattr(clone, "set_attachments"):
        raise UnsupportedError(
            "this ComfyUI knows no wrappers of models. Hint: update it, to 0.3.60 at least."
        )
    for kind, wrapper in ((_APPLY_MODEL, session.apply_model), (_OUTER_SAMPLE, session.sample)):
        # a second node takes the place of the first.
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    clone.set_attachments(KEY, session)
    return clone


def session_of(model: Any) -> NodeSession | None:
    """The session that ``install`` gave the model, or the one it was cloned from; None for none."""
    found = getattr(model, "attachments", {}).get(KEY)
    return found if isinstance(found, NodeSession) else None


def _churn_of(given: Iterable[Any]) -> dict[str, float]:
    """What the sampler among ``given`` was told of noise to add anew before each step."""
    names = ("s_churn", "s_tmin", "s_tmax")
    for one in given:
        options = getattr(one, "extra_options", None)
        if isinstance(options, Mapping):
            return {name: float(options[name]) for name in names if name in options}
    return {}


def _raised(
    sigmas: Sequence[float], *, s_churn: float = 0.0, s_tmin: float = 0.0, s_tmax: float = math.inf
) -> list[float]:
    """The sigma that each step's first forward is told, by Algorithm 2 of Karras et al. (2022).

    That is what a sampler's noise raises its own to (``s_churn``, between ``s_tmin`` and
    ``s_tmax``).
    """
    most = min(s_churn / len(sigmas), 2**0.5 - 1) if s_churn > 0 else 0.0
    return [value * (1 + most) if s_tmin <= value <= s_tmax else value for value in sigmas]


def _to_heads(x: Tensor, heads: int, split: bool) -> Tensor:
    """``[B, H, S, D]`` from ``[B, S, H * D]``, unless it is ``split`` into heads already."""
    return x if split else x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _stranger(
    layout: ForwardLayout | str, q: Tensor, k: Tensor, v: Tensor, axis: int
) -> str | None:
    """What a call is that is none of the video's self-attention; None where it is one.

    ``axis`` is that of the tokens.
    """
    if isinstance(layout, str):
        return layout
    tokens = q.shape[axis]
    if tokens != k.shape[axis]:
        return _CROSS
    if not q.shape == k.shape == v.shape:
        return "keys or values have other heads than queries"
    # references and guides that a model has cut off leave whole frames fewer.
    if tokens < math.prod(layout.video) and isinstance(layout.grid(tokens), str):
        return _ELSEWHERE
    if tokens in layout.contexts:
        return "as many tokens as the text or image has: it cannot be told from cross-attention"
    return None


def _transformer(model: Any) -> Any:
    """The model's transformer, as it is beneath ``torch.compile`` where a node has compiled it."""
    return getattr(model.diffusion_model, "_orig_mod", model.diffusion_model)


def _branch(options: Mapping[str, Any]) -> str:
    """The guidance branches of a forward: one of them, or both in one batch."""
    names = {0: "conditional", 1: "unconditional"}
    kinds = dict.fromkeys(options.get("cond_or_uncond") or (0,))
    return "+".join(names.get(kind, f"branch {kind}") for kind in kinds)


def _timestep(model: Any, sigma: Any) -> float:
    """The model's timestep at ``sigma``, which calibrated numbers go by."""
    if not isinstance(sigma, Tensor):
        return 0.0
    return float(model.model_sampling.timestep(sigma).flatten()[0])
