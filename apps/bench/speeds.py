"""Whole runs of published sizes at each speed: every kind of step that a bundle has, measured."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from vidsparse.apps.bench.exactness import error_budget
from vidsparse.apps.bench.machine import let_go
from vidsparse.apps.bench.model_dense import CUDNN, FA4, STOCK, DenseSteps, refuse_non_finite
from vidsparse.apps.bench.model_forward import (
    Stopwatch,
    Timing,
    first_blocks,
    guidance_cache_with,
    planned_to_order,
    time_step,
)
from vidsparse.apps.bench.model_sequence import measure_each
from vidsparse.apps.bench.model_settings import SKEW, Setting
from vidsparse.apps.bench.speed_rows import DIGITS, SpeedRow
from vidsparse.apps.bench.speed_steps import Asked, sparse_at
from vidsparse.apps.results.row_file import RowFile, rounded
from vidsparse.dtypes import dtype_name
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.methods import SparseMethod, make_method
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.guidance_cache import GuidanceCache
from vidsparse.pipelines.speed import bundle_for, cache_text
from vidsparse.schedule import Action, Schedule
from vidsparse.trace import Cell

if TYPE_CHECKING:
    from vidsparse.pipelines import AcceleratedPipeline

_KINDS: Final[Mapping[str, str]] = {
    Action.DENSE: "dense",
    Action.REPLAN: "sparse",
    Action.REUSE: "sparse",
    Action.REFRESH: "refresh",
}
"""What a step is by the action of its calls."""

# blocks of each kind that are checked, from the first on, beside the last.
_FEW: Final = 2

_IN_EIGHT_BITS: Final = ", q·k in "
"""What comes before a format among a row's parts."""

_PRODUCT: Final = re.compile(r"gemm|nvjet|cutlass|scaled_mm", re.IGNORECASE)
_ATTENTION: Final = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """One measured denoising step: milliseconds, and of what.

    Args:
        ms: all of it.
        attention: the kernel of video self-attention.
        plan: mask, plan, and putting tokens in order and back.
        peak_gib: memory at its highest, weights included; None on a CPU.
    """

    ms: float
    attention: float
    plan: float
    peak_gib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedBench:
    """Measures one model at several speeds.

    The model is changed as ``accelerate`` does for users: rounded weights and compiled blocks stay,
    so that ``speeds`` are to come from the slowest on.

    Args:
        setting: model, video and steps, and density and warm-up where neither they are given nor a
            speed has its own; of its variants the first one's format.
        device: where.
        dtype: of the weights.
        say: where notes go.
        whole: also run all steps of each speed one after the other, to hold against what the
            measured steps come to.
        method: of the speeds that leave something out; their own where None.
        refresh: steps at which it computes everything and keeps what its plan lacks; the speed's
            or the method's own number where None.
        computed: density of sparse steps; None leaves it to the speed.
        warmup: share of steps that stay dense; None leaves it to the speed.
    """

    setting: Setting
    device: torch.device
    dtype: torch.dtype
    say: Callable[[str], None]
    whole: bool = False
    method: str | None = None
    refresh: int | float | None = None
    computed: float | None = None
    warmup: float | None = None

    def asked(self, speed: str) -> Asked:
        """What is measured at ``speed``: what was given, else the speed's own, else the model's."""
        setting = self.setting
        family = next(each for each in FAMILIES if setting.model.pipeline in each.pipelines)
        bundle = bundle_for(
            speed,
            family.defaults.for_transformer(setting.model.config),
            steps=setting.steps,
            device=str(self.device),
            dtype=dtype_name(self.dtype),
            method=None if speed == "exact" else self.method,
        )
        method = make_method(bundle.method, **bundle.method_options)
        own = {
            "refresh": bundle.schedule.get("refresh", method.refresh),
            "computed": method.options().get("share", setting.computed),
            "warmup": bundle.schedule.get("dense_steps", setting.warmup),
        }
        given = {name: getattr(self, name) for name in own}
        own |= {name: value for name, value in given.items() if value is not None}
        return Asked(bundle.method, **own, cache=cache_text(bundle.cache, bundle.cache_threshold))

    def check(self, speed: str) -> None:
        """Raise an ``OptionError`` unless the run has the steps that are measured."""
        steps = self.setting.steps
        asked = self.asked(speed)
        warmup, refreshes = asked.steps(steps)
        # the first refresh is the last dense step.
        dense, sparse = max(0, warmup - bool(refreshes)), steps - warmup
        # what is timed comes after the first, or after a refresh, and has one after it.
        if dense < 1 or sparse < 3:
            raise OptionError(
                f"{self.setting.family}: {steps} steps have {dense} that stay dense and are no "
                f"refresh, and {sparse} after them; a speed is measured on one dense and three "
                "sparse steps. Hint: --steps 50."
            )
        one_branch = asked.cache.startswith("guidance")
        if sparse_at(Schedule(dense_steps=warmup, refresh=refreshes), steps, one_branch) is None:
            raise OptionError(
                f"{self.setting.family}: {refreshes} refreshes in {steps} steps leave no "
                f"{'two sparse steps in a row' if one_branch else 'sparse step'} to be measured. "
                "Hint: fewer refreshes."
            )

    def rows(self, speeds: Sequence[str]) -> Iterator[SpeedRow]:
        """One row for each of ``speeds`` that is right.

        Raises:
            UnsupportedError: a speed cannot run here, or its output is not right. Those before it
                come first.
        """
        torch.manual_seed(0)
        with torch.no_grad():
            model = self.setting.model.build(self.setting.layers, self.dtype, self.device)
            try:
                yield from _Runs(self, model).rows(speeds)
            finally:
                del model
                let_go(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _References:
    """What speeds are held against.

    Args:
        timings: stock steps by their dense kernel.
        linear: milliseconds of matrix products in them; None on a CPU.
        whole: seconds of all stock steps by cuDNN, where they were run.
        few: the output of few blocks.
    """

    timings: Mapping[str, Timing]
    linear: float | None
    whole: float | None
    few: Tensor


class _Runs:
    """The steps of one model."""

    def __init__(self, bench: SpeedBench, model: Any) -> None:
        self.bench, self.setting, self.model = bench, bench.setting, model
        self.shape, self.device, self.say = self.setting.model, bench.device, bench.say
        self.pipe = self.shape.pipe(model)
        # without it a run has no guidance, and two samples would not be taken for its branches.
        self.pipe._guidance_scale = 6.0
        self.pipe.scheduler.set_timesteps(self.setting.steps)
        self.inputs = self.shape.inputs(self.pipe, model, self.setting.latent, self._random)
        self.quantize = self.setting.sparse[0].quantize
        self.tokens = 0
        self.kernel = ""

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.bench.dtype)

    def rows(self, speeds: Sequence[str]) -> Iterator[SpeedRow]:
        references = self._references()
        for speed in speeds:
            # what was compiled for the speed before knows other weights and hooks.
            torch.compiler.reset()
            yield self._row(speed, references)

    def _step(self, at: int, forwards: int | None = None) -> list[Tensor]:
        """All forwards of the denoising step ``at``, or the first, named as pipelines name them."""
        # where a scheduler stands is moved by its step() alone, which wants a run from the start.
        self.pipe.scheduler._step_index = at
        names = ["cond", "uncond"][: self.shape.forwards]
        if self.shape.batch == 2:
            names = ["cond_uncond"]
        named = getattr(self.model, "cache_context", nullcontext)
        out = []
        for name in names[:forwards]:
            with named(name):
                out.append(self.model(**self.inputs, return_dict=False)[0])
        return out

    def _few(self) -> Any:
        return first_blocks(self.model, self.shape.blocks, _FEW, last=True)

    def _references(self) -> _References:
        steps = DenseSteps(
            model=self.model,
            pipe=self.pipe,
            shape=self.shape,
            latent=self.setting.latent,
            device=self.device,
            say=self.say,
        )
        timings = steps.timings(lambda: self._step(0))
        whole = None
        with steps.by(CUDNN if CUDNN in timings else STOCK):
            with self._few():
                few = self._step(0)[0]
            linear = self._linear()
            if self.bench.whole:
                whole = self._all_steps()
        return _References(timings=timings, linear=linear, whole=whole, few=few)

    def _linear(self) -> float | None:
        """Milliseconds of matrix products in a step, by the profiler; None on a CPU.

        One forward of a dense step: the others, and those of sparse steps, have the same products.
        """
        if self.device.type != "cuda":
            return None
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self._step(0, forwards=1)
            torch.cuda.synchronize(self.device)
        products: float = sum(
            event.self_device_time_total / 1e3
            for event in seen.key_averages()
            if _PRODUCT.search(event.key) and not _ATTENTION.search(event.key)
        )
        return products * self.shape.forwards

    def _row(self, speed: str, references: _References) -> SpeedRow:
        from vidsparse.pipelines import accelerate

        setting, timings = self.setting, references.timings
        asked = self.bench.asked(speed)
        options: dict[str, Any] = {}
        if speed != "exact":
            options = {
                "dense_steps": asked.steps(setting.steps)[0],
                "implementation": setting.implementation,
                "method": asked.method,
                "refresh": asked.refresh,
            }
        with accelerate(self.pipe, speed, steps=setting.steps, **options) as pipe:
            self.say(f"  {pipe}")
            with guidance_cache_with(pipe.cache, threshold=1):
                error = self._check(pipe, references.few)
                dense = self._timed(pipe, 0, "dense")
                self._begin(pipe)
                linear = self._linear()
            sparse = refreshed = halved = computed = cached = whole = tile = None
            counts = {"dense": setting.steps}
            if speed != "exact":
                at = self._sparse_step(pipe)
                with (
                    self._to_order(pipe, asked.computed) as watch,
                    guidance_cache_with(pipe.cache, threshold=1),
                ):
                    if self._refreshes(pipe):
                        refreshed = self._timed(pipe, at - 1, "refresh", watch, dense.attention)
                    sparse = self._timed(pipe, at, "sparse", watch)
                    computed = _computed(pipe)
                    if isinstance(pipe.cache, GuidanceCache):
                        halved = self._timed(pipe, at + 1, "sparse", watch, forwards=1)
                assert isinstance(pipe.sparse.method, SparseMethod)
                tile = "x".join(map(str, pipe.sparse.method.tile))
                counts, cached = self._counted(pipe)
            if self.bench.whole:
                whole = self._whole(pipe)
            parts = str(pipe).partition(": ")[2]
        stock, cudnn, fa4 = (timings.get(name) for name in (STOCK, CUDNN, FA4))
        assert stock is not None
        peaks = [kind.peak_gib for kind in (dense, refreshed, sparse) if kind is not None]
        return SpeedRow(
            family=setting.family,
            shape=setting.shape,
            tokens=self.tokens,
            layers=setting.layers or self.shape.full_layers(),
            step=self.shape.step,
            speed=speed,
            parts=parts + (_IN_EIGHT_BITS + self.quantize if self.quantize and sparse else ""),
            method=asked.method if sparse else None,
            refresh=asked.refresh if sparse and asked.refresh else None,
            tile=tile,
            asked=asked.computed if sparse else None,
            computed=computed,
            error=error,
            warmup=asked.warmup,
            steps=setting.steps,
            dense_steps=counts.get("dense", 0),
            sparse_steps=counts.get("sparse", 0),
            halved_steps=counts.get("halved", 0),
            cached_steps=counts.get("left out", 0),
            stock_ms=stock.ms,
            cudnn_ms=cudnn.ms if cudnn else None,
            fa4_ms=fa4.ms if fa4 else None,
            reference_attention_ms=(cudnn or stock).attention_ms,
            reference_linear_ms=references.linear,
            dense_ms=dense.ms,
            dense_attention_ms=dense.attention,
            linear_ms=linear,
            sparse_ms=sparse.ms if sparse else None,
            kernel_ms=sparse.attention if sparse else None,
            mask_plan_ms=sparse.plan if sparse else None,
            halved_ms=halved.ms if halved else None,
            halved_kernel_ms=halved.attention if halved else None,
            halved_plan_ms=halved.plan if halved else None,
            cached_ms=cached,
            peak_gib_stock=stock.peak_gib,
            peak_gib=max((peak for peak in peaks if peak is not None), default=None),
            refresh_steps=counts.get("refresh", 0),
            refresh_ms=refreshed.ms if refreshed else None,
            refresh_attention_ms=refreshed.attention if refreshed else None,
            refresh_plan_ms=refreshed.plan if refreshed else None,
            whole_s=whole,
            whole_reference_s=references.whole,
            impl=f"{self.kernel} {self.quantize or ''}".strip() if sparse else None,
        )

    @contextmanager
    def _to_order(self, pipe: AcceleratedPipeline, density: float) -> Iterator[Stopwatch]:
        """Sparse calls by random plans of ``density``; yields what counts the kernel alone."""
        watch = Stopwatch(self.device)
        method = pipe.sparse.method
        assert isinstance(method, SparseMethod)
        with planned_to_order(
            pipe.sparse.engine,
            watch,
            density=density,
            skew=0.0 if density == 1 or method.equal_heads else SKEW,
            quantize=self.quantize,
        ) as seen:
            yield watch
        self.tokens, self.kernel = max(self.tokens, seen.tokens), seen.implementation

    def _check(self, pipe: AcceleratedPipeline, right: Tensor) -> float:
        """The largest error of few blocks against stock ones: dense, and sparse at full density.

        The video is the whole one, so that what is compiled for it is compiled here.

        Raises:
            UnsupportedError: it is more than rounding explains.
        """
        lossy = pipe.bundle.linear != "none" or self.quantize is not None
        budget = error_budget(0.0, right.dtype, lossy=lossy)
        outs = {}
        self._begin(pipe)
        with self._few():
            outs["dense"] = self._step(0)[0]
            if pipe.bundle.method != "dense":
                at = self._sparse_step(pipe)
                with self._to_order(pipe, 1.0):
                    if self._refreshes(pipe):
                        self._step(at - 1)
                    outs["sparse at full density"] = self._step(at)[0]
        worst = 0.0
        for name, out in outs.items():
            error = float((out.double() - right.double()).norm() / right.double().norm())
            self.say(f"  few blocks, {name}: {error:.1e} off stock ones, budget {budget:.1e}")
            if not error <= budget:
                raise UnsupportedError(
                    f"{self.setting.family} at speed {pipe.bundle.speed}, {name}: off by "
                    f"{error:.2e} from stock, budget {budget:.2e}; no speed is reported for a "
                    "wrong result"
                )
            worst = max(worst, error)
        return worst

    def _begin(self, pipe: AcceleratedPipeline) -> None:
        """Have a step cache begin a run, as a pipeline does."""
        if pipe.cache is not None:
            self.model._reset_stateful_cache()
            # the host lists the hooks it tells of a context once: now, while all blocks are there.
            with self.model.cache_context("cond"):
                pass

    def _refreshes(self, pipe: AcceleratedPipeline) -> tuple[int, ...]:
        return pipe.sparse.engine.schedule.refresh_steps(self.setting.steps)

    def _sparse_step(self, pipe: AcceleratedPipeline) -> int:
        schedule, one_branch = pipe.sparse.engine.schedule, isinstance(pipe.cache, GuidanceCache)
        at = sparse_at(schedule, self.setting.steps, one_branch)
        assert at is not None
        return at

    def _timed(
        self,
        pipe: AcceleratedPipeline,
        at: int,
        kind: str,
        watch: Stopwatch | None = None,
        dense_attention: float = 0.0,
        *,
        forwards: int | None = None,
    ) -> StepKind:
        """The step ``at`` with all blocks: how long it takes and what for.

        Args:
            pipe: at its speed.
            at: the step.
            kind: what it should be: ``dense``, ``sparse`` or ``refresh``.
            watch: counts the kernel of plans.
            dense_attention: milliseconds of dense attention in it, beside the kernel.
            forwards: those of it that are run; None: all.

        Raises:
            UnsupportedError: it is something else, or not finite.
        """
        self._begin(pipe)
        before = [*pipe.sparse.trace.cells]
        timing, out = time_step(
            lambda: self._step(at, forwards), watch or Stopwatch(self.device), self.device
        )
        refuse_non_finite(out, kind)
        # a step that goes back begins a trace anew.
        trace = pipe.sparse.trace
        trace.resolve()
        # those of the check may be of this very step.
        cells = [cell for cell in trace.cells if not any(cell is one for one in before)]
        wrong = [cell.action for cell in cells if _kind(cell) != kind]
        if not cells or wrong:
            raise UnsupportedError(
                f"an attention call that should be {kind} was {wrong[0] if wrong else 'not made'}"
                + "".join(f"; {note}" for note in trace.notes)
            )
        calls = sum(cell.seconds or 0.0 for cell in cells) * 1e3
        attention = calls if watch is None else timing.attention_ms + dense_attention
        branch = "" if forwards is None else ", one branch"
        self.say(
            f"  {kind}{branch}: {timing.ms:.0f} ms, kernel {attention:.0f} ms, "
            f"mask, plan and order {calls - attention:.0f} ms"
        )
        return StepKind(
            ms=timing.ms, attention=attention, plan=calls - attention, peak_gib=timing.peak_gib
        )

    def _counted(self, pipe: AcceleratedPipeline) -> tuple[dict[str, int], float | None]:
        """Steps of each kind in a whole run, and the milliseconds of one that is left out.

        A step that is left out runs no block, so that a run of one block tells both. Branches that
        are left out are those of a run in which what guidance adds changes little.
        """
        steps = self.setting.steps
        if pipe.cache is None:
            decide = pipe.sparse.engine.schedule.decide
            return Counter(_KINDS[decide(at, steps, 0, 1)] for at in range(steps)), None
        times = []
        self._begin(pipe)
        with (
            guidance_cache_with(pipe.cache, steady=math.inf),
            first_blocks(self.model, self.shape.blocks, 1),
            self._to_order(pipe, self.setting.computed),
        ):
            for at in range(steps):
                whole = Stopwatch(self.device)
                with whole.span():
                    self._step(at)
                times.append(whole.milliseconds())
        kinds = {cell.step: _kind(cell) for cell in pipe.sparse.trace.cells}
        ran = pipe.cache.blocks_run()
        kinds |= {at: "left out" for at, share in ran.items() if not share}
        if isinstance(pipe.cache, GuidanceCache):
            kinds |= {at: "halved" for at, share in ran.items() if 0 < share < 1}
        left_out = [times[at] for at, kind in kinds.items() if kind == "left out"]
        return Counter(kinds.values()), sum(left_out) / len(left_out) if left_out else None

    def _whole(self, pipe: AcceleratedPipeline) -> float:
        self._begin(pipe)
        sparse = pipe.bundle.method != "dense"
        ordered = self._to_order(pipe, self.setting.computed) if sparse else nullcontext()
        with guidance_cache_with(pipe.cache, steady=math.inf), ordered:
            return self._all_steps()

    def _all_steps(self) -> float:
        """Seconds of all steps one after the other, from the first to the last."""
        began = time.perf_counter()
        for at in range(self.setting.steps):
            self._step(at)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        self.say(f"  {self.setting.steps} steps in {seconds:.1f} s")
        return seconds


def _kind(cell: Cell) -> str:
    return _KINDS.get(cell.action, "dense")


def _computed(pipe: AcceleratedPipeline) -> float:
    shares = [cell.computed.mean() for cell in pipe.sparse.trace.cells if cell.computed is not None]
    return round(torch.stack(shares).mean().item(), 4)


def measure_speeds(
    benches: Sequence[SpeedBench],
    speeds: Sequence[str],
    show: Callable[[SpeedRow], None],
    file: RowFile | None = None,
) -> None:
    """Measure one model after the other, each speed unless the file has it.

    Args:
        benches: at least one.
        speeds: of ``SPEEDS``, in its order.
        show: given each row as soon as it is there.
        file: held, with its header; each row is added to it.

    Raises:
        as ``measure_models``.
    """
    known = [] if file is None else file.typed(SpeedRow)
    by_setting = {id(bench.setting): bench for bench in benches}

    def rows_of(setting: Setting) -> Iterator[SpeedRow] | None:
        bench = by_setting[id(setting)]
        missing = [
            speed for speed in speeds if not any(_covers(row, bench, speed) for row in known)
        ]
        return bench.rows(missing) if missing else None

    def take(row: SpeedRow) -> None:
        show(row)
        if file is not None:
            file.add(rounded(row, DIGITS))

    measure_each([bench.setting for bench in benches], rows_of, take, benches[0].say)


def _covers(row: SpeedRow, bench: SpeedBench, speed: str) -> bool:
    setting, asked = bench.setting, bench.asked(speed)
    told = (row.family, row.shape, row.speed, row.steps)
    same = (
        told == (setting.family, setting.shape, speed, setting.steps)
        and row.layers == (setting.layers or setting.model.full_layers())
        and (row.whole_s is not None or not bench.whole)
    )
    if not same or speed == "exact":
        return same
    measured = Asked(row.method or "", row.refresh or 0, row.asked or 0.0, row.warmup, row.cache)
    kernel, _, eight_bits = (row.impl or "").partition(" ")
    if row.impl is None:
        eight_bits = row.parts.partition(_IN_EIGHT_BITS)[2]
    return (
        (row.method, row.asked, row.cache) == (asked.method, asked.computed, asked.cache)
        and measured.steps(row.steps) == asked.steps(row.steps)
        and eight_bits == (setting.sparse[0].quantize or "")
        and setting.implementation in ("auto", kernel)
    )
