"""Steps of one model on one GPU and on several that make the video together.

Every process has the whole model on a GPU of its own. The first one alone times steps on one GPU,
while the others wait; then all take their share of the same step. Kinds of step take turns, so that
drift hits all alike. Before anything is timed, what all give together is held against what one
gives, on few layers and a short video, by the very plans.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vidsparse.apps.bench.exactness import error_budget
from vidsparse.apps.bench.gpus_rows import GpusRow
from vidsparse.apps.bench.machine import let_go
from vidsparse.apps.bench.model_checks import (
    CHECKED_LAYERS,
    exact_output,
    refuse_dense_calls,
    to_check,
)
from vidsparse.apps.bench.model_dense import cudnn_first, refuse_non_finite
from vidsparse.apps.bench.model_forward import (
    Stopwatch,
    first_blocks,
    planned_to_order,
    time_step,
)
from vidsparse.apps.bench.model_sequence import layers_hint
from vidsparse.apps.bench.model_settings import SKEW, TOP_P, Setting
from vidsparse.apps.bench.traffic import Traffic
from vidsparse.errors import UnsupportedError
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.compilation import compile_blocks
from vidsparse.pipelines.handle import SparseHandle, attention_shape
from vidsparse.pipelines.linear import quantize_linear
from vidsparse.pipelines.quiet import quiet_hosts

if TYPE_CHECKING:
    from vidsparse.apps.bench.gpus_settings import Sharing
    from vidsparse.apps.bench.model_shapes import ModelShape


@dataclass(frozen=True, slots=True)
class _Step:
    """One measured step: of one process, or the slowest of all.

    Args:
        ms: all of it.
        attention: milliseconds of the sparse kernel, or of dense calls.
        mean: the same, the mean of all processes.
        plan: milliseconds of attention calls beside the kernel.
        peak_gib: memory at its highest, the most of any process; 0 on a CPU.
        computed: mean density of sparse calls.
        busiest: pairs of the process that has most, over the mean of all.
    """

    ms: float
    attention: float
    mean: float
    plan: float
    peak_gib: float
    computed: float
    busiest: float


class _Steps:
    """One kind of step: dense or by plans, on this process's GPU alone or shared with all.

    Args:
        name: for notes.
        shape: the model.
        pipe: with a transformer of its own, whose weights all share.
        inputs: of a forward.
        handle: of its attention.
        watch: counts the sparse kernel; None where steps are dense.
        sharing: how it is shared; None where this process is alone.
    """

    def __init__(
        self,
        name: str,
        shape: ModelShape,
        pipe: Any,
        inputs: Mapping[str, Any],
        handle: SparseHandle,
        watch: Stopwatch | None,
        sharing: Sharing | None,
    ) -> None:
        self.name, self.pipe, self.handle, self.sharing = name, pipe, handle, sharing
        self._shape, self._inputs, self._watch = shape, inputs, watch
        self._at = 0

    @property
    def sparse(self) -> bool:
        """Whether its calls go by plans."""
        return self._watch is not None

    def run(self) -> list[Tensor]:
        """The next denoising step, all its forwards."""
        # where a scheduler stands is moved by its step() alone, which wants a run from the start.
        self.pipe.scheduler._step_index = self._at
        self._at += 1
        model = self.pipe.transformer
        return [model(**self._inputs, return_dict=False)[0] for _ in range(self._shape.forwards)]

    def warm_up(self) -> None:
        """Compile and choose what a step needs, deal heads, and make the plans of the last deal."""
        self._run_few()
        if self.sparse and self.sharing is not None and self.sharing.balance:
            self.run()
            self._run_few()

    def _run_few(self) -> None:
        with first_blocks(self.pipe.transformer, self._shape.blocks, CHECKED_LAYERS):
            self.run()

    def timed(self, device: torch.device) -> list[float]:
        """The next step as the numbers that processes tell each other."""
        timing, out = time_step(self.run, self._watch or Stopwatch(device), device)
        refuse_non_finite(out, self.name)
        self.handle.trace.resolve()
        cells = [cell for cell in self.handle.trace.cells if cell.step == self._at - 1]
        calls = sum(cell.seconds or 0.0 for cell in cells) * 1e3
        pairs = [cell.computed.mean(0) for cell in cells if cell.computed is not None]
        if self.sparse:
            refuse_dense_calls(cells)
        kernel = timing.attention_ms if self.sparse else calls
        load = float(torch.stack(pairs).sum()) if pairs else 0.0
        computed = float(torch.stack(pairs).mean()) if pairs else 1.0
        return [timing.ms, kernel, calls - kernel, timing.peak_gib or 0.0, load, computed]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusBench:
    """Measures one model on one GPU and on all that ``torch.distributed`` has been started for.

    Args:
        device: this process's.
        dtype: of the weights.
        repeats: steps of each kind that are timed.
        linear: format of linear layers, or ``none``.
        compiled: blocks are compiled.
        say: where notes go.
    """

    device: torch.device
    dtype: torch.dtype
    repeats: int
    linear: str
    compiled: bool
    say: Callable[[str], None]

    def rows(self, setting: Setting, sharings: Sequence[Sharing]) -> list[GpusRow]:
        """Check, then measure; a row for each of ``sharings``, the same in every process.

        All processes must call.

        Raises:
            UnsupportedError: something cannot run here, or an output is not right.
        """
        torch.manual_seed(0)
        with (
            quiet_hosts(),
            torch.no_grad(),
            layers_hint(setting),
            cudnn_first(self.device.type == "cuda"),
        ):
            errors = self._check(setting, sharings)
            let_go(self.device)
            try:
                return self._measured(setting, sharings, errors)
            finally:
                let_go(self.device)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _check(self, setting: Setting, sharings: Sequence[Sharing]) -> list[float]:
        """The largest error of all processes together against one, dense and sparse, of each way.

        Twice what one process errs by is allowed: both may, each in its own direction.

        Raises:
            UnsupportedError: it is more.
        """
        shape, (layers, latent) = setting.model, to_check(setting)
        model = shape.build(layers, self.dtype, self.device)
        inputs = shape.inputs(shape.pipe(model), model, latent, self._random)
        exact = exact_output(model, inputs, self.dtype)
        stock = model(**inputs, return_dict=False)[0]
        stock_error = float((stock.double() - exact).norm() / exact.norm())
        del exact, stock

        def output(sharing: Sharing, sparse: bool, how: Sharing | None) -> Tensor:
            with self._steps(setting, model, inputs, sharing, sparse, how) as steps:
                if how is not None and how.balance:
                    # heads are dealt by what they computed in a step before.
                    steps.run()
                return steps.run()[0].double()

        worst = dict.fromkeys(sharings, 0.0)
        for sharing in sharings:
            for sparse in (False, True):
                alone = output(sharing, sparse, None)
                off = float((output(sharing, sparse, sharing) - alone).norm() / alone.norm())
                error = max(each for (each,) in _told([off], self.device))
                lossy = sparse and setting.sparse[0].quantize is not None
                budget = error_budget(stock_error, self.dtype, lossy=lossy)
                kind = "sparse" if sparse else "dense"
                self.say(f"  {sharing}, few layers, {kind}: {error:.1e} off one process")
                if not error <= budget:
                    raise UnsupportedError(
                        f"{setting.family}, {sharing}, {kind}: {dist.get_world_size()} processes "
                        f"are off by {error:.2e} from one, budget {budget:.2e}; no speed is "
                        "reported for a wrong result"
                    )
                worst[sharing] = max(worst[sharing], error)
        return list(worst.values())

    @contextmanager
    def _steps(
        self,
        setting: Setting,
        model: Any,
        inputs: Mapping[str, Any],
        heads_as: Sharing,
        sparse: bool,
        sharing: Sharing | None,
    ) -> Iterator[_Steps]:
        """Steps of ``model``, of which a copy that shares its weights is changed.

        Args:
            setting: what it is.
            model: stock.
            inputs: of a forward.
            heads_as: says how dense each head is.
            sparse: by plans.
            sharing: with all processes; alone where None.
        """
        variant = setting.sparse[0]
        pipe = setting.model.pipe(_twin(model))
        if self.compiled:
            compile_blocks(pipe)
        # without it a run has no guidance, of which the branches could be apart.
        pipe._guidance_scale = 6.0
        options: dict[str, Any] = {"method": "dense"}
        if sparse:
            options = {
                "method": "fg-attn",
                "top_p": TOP_P,
                "tile": variant.tile,
                "dense_steps": 0,
                "implementation": setting.implementation,
            }
        watch = Stopwatch(self.device) if sparse else None
        with ExitStack() as stack:
            handle = stack.enter_context(sparsify(pipe, **options))
            if sharing is not None:
                handle.parallelize(ring=sharing.ring, balance=sharing.balance, apart=sharing.apart)
            if watch is not None:
                heads = attention_shape(pipe)[2]
                density = heads_as.densities(setting.computed, heads)
                stack.enter_context(
                    planned_to_order(
                        handle.engine,
                        watch,
                        density=density,
                        skew=SKEW,
                        quantize=variant.quantize,
                    )
                )
            how = f"{heads_as.heads} heads on one" if sharing is None else str(sharing)
            name = f"{'sparse' if sparse else 'dense'}, {how}"
            yield _Steps(name, setting.model, pipe, inputs, handle, watch, sharing)

    def _measured(
        self, setting: Setting, sharings: Sequence[Sharing], errors: Sequence[float]
    ) -> list[GpusRow]:
        shape = setting.model
        model = shape.build(setting.layers, self.dtype, self.device)
        pipe = shape.pipe(model)
        if self.linear != "none":
            quantize_linear(pipe, self.linear, device=str(self.device))
        inputs = shape.inputs(pipe, model, setting.latent, self._random)
        with ExitStack() as stack:

            def steps(heads_as: Sharing, sparse: bool, sharing: Sharing | None) -> _Steps:
                return stack.enter_context(
                    self._steps(setting, model, inputs, heads_as, sparse, sharing)
                )

            dense = steps(sharings[0], False, None)
            by_heads = {one.heads: one for one in sharings}
            alone = {heads: steps(one, True, None) for heads, one in by_heads.items()}
            # of those that differ in heads alone, dense steps are the same.
            shared: dict[tuple[int | None, bool], _Steps] = {}
            for one in sharings:
                if (one.ring, one.apart) not in shared:
                    shared[one.ring, one.apart] = steps(one, False, one)
            together = [steps(one, True, one) for one in sharings]
            kinds = [dense, *shared.values(), *alone.values(), *together]
            for kind in kinds:
                if kind.sharing is not None or dist.get_rank() == 0:
                    kind.warm_up()
            traffic = {kind: Traffic() for kind in together}
            found = self._in_turns(kinds, traffic)
            exchange = {kind: self._exchange(traffic[kind]) for kind in together}
            return [
                self._row(
                    setting,
                    sharing,
                    error,
                    kind,
                    exchange[kind],
                    (found[dense], found[alone[sharing.heads]]),
                    (found[shared[sharing.ring, sharing.apart]], found[kind]),
                )
                for sharing, error, kind in zip(sharings, errors, together, strict=True)
            ]

    def _in_turns(
        self, kinds: Sequence[_Steps], traffic: Mapping[_Steps, Traffic]
    ) -> dict[_Steps, _Step]:
        """Medians of each kind of step; the last one's exchanges are noted in ``traffic``."""
        found: dict[_Steps, list[_Step]] = {one: [] for one in kinds}
        for turn in range(self.repeats):
            for one in kinds:
                # all begin together.
                _told([0.0], self.device)
                numbers = [0.0] * 6
                if one.sharing is not None or dist.get_rank() == 0:
                    with ExitStack() as stack:
                        if turn + 1 == self.repeats and one in traffic:
                            stack.enter_context(traffic[one].recorded())
                        numbers = one.timed(self.device)
                told = _told(numbers, self.device)
                found[one].append(_slowest(told if one.sharing is not None else told[:1]))
        medians = {one: _median(measured) for one, measured in found.items()}
        for one, step in medians.items():
            self.say(f"  {one.name}: {step.ms:.0f} ms, kernel {step.attention:.0f} ms")
        return medians

    def _exchange(self, traffic: Traffic) -> tuple[float, float]:
        """Milliseconds and megabytes of a step's exchanges, of the process with the most."""
        times = []
        for turn in range(self.repeats + 1):
            watch = Stopwatch(self.device)
            _told([0.0], self.device)
            with watch.span():
                traffic.replay()
            slowest = max(ms for (ms,) in _told([watch.milliseconds()], self.device))
            if turn:  # the first makes what is sent.
                times.append(slowest)
        traffic.forget()
        sent = max(count for (count,) in _told([float(traffic.sent)], self.device))
        return statistics.median(times), sent / 1e6

    def _row(
        self,
        setting: Setting,
        sharing: Sharing,
        error: float,
        steps: _Steps,
        exchange: tuple[float, float],
        alone: tuple[_Step, _Step],
        together: tuple[_Step, _Step],
    ) -> GpusRow:
        (one_dense, one_sparse), (dense, sparse) = alone, together
        cells = steps.handle.trace.cells
        last = [cell for cell in cells if cell.step == cells[-1].step]
        assert last[0].computed is not None
        variant, cuda = setting.sparse[0], self.device.type == "cuda"
        heads = attention_shape(steps.pipe)[2]
        return GpusRow(
            family=setting.family,
            shape=setting.shape,
            tokens=round((last[0].pairs / last[0].computed.numel()) ** 0.5),
            heads=heads,
            layers=setting.layers or setting.model.full_layers(),
            calls=len(last),
            step=setting.model.step,
            linear=self.linear,
            compiled=self.compiled,
            kind=sharing.kind,
            balance=sharing.balance,
            processes=dist.get_world_size(),
            ring=steps.handle.ring,
            asked=sum(sharing.densities(setting.computed, heads)) / heads,
            computed=sparse.computed,
            impl=last[0].implementation + (f" {variant.quantize}" if variant.quantize else ""),
            error=error,
            warmup=setting.warmup,
            steps=setting.steps,
            repeats=self.repeats,
            one_dense_ms=one_dense.ms,
            one_dense_attention_ms=one_dense.attention,
            one_sparse_ms=one_sparse.ms,
            one_kernel_ms=one_sparse.attention,
            one_mask_plan_ms=one_sparse.plan,
            dense_ms=dense.ms,
            dense_attention_ms=dense.attention,
            sparse_ms=sparse.ms,
            kernel_ms=sparse.attention,
            kernel_mean_ms=sparse.mean,
            mask_plan_ms=sparse.plan,
            exchange_ms=exchange[0],
            exchange_mb=exchange[1],
            busiest=sparse.busiest,
            one_peak_gib=max(one_dense.peak_gib, one_sparse.peak_gib) if cuda else None,
            peak_gib=max(dense.peak_gib, sparse.peak_gib) if cuda else None,
            tile=variant.name,
        )


def _twin(model: nn.Module) -> Any:
    """A copy of ``model`` that has the same weights, and hooks and processors of its own."""
    weights = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(one): one for one in weights})


def _told(numbers: Sequence[float], device: torch.device) -> list[list[float]]:
    """What every process says, by process, once all have said something; waits."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    received = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(received, own)
    return [one.tolist() for one in received]


def _slowest(told: Iterable[Sequence[float]]) -> _Step:
    """One step of the processes that say such numbers as ``_Steps.timed``."""
    ms, attention, plan, peak, load, computed = zip(*told, strict=True)
    mean = statistics.mean(load)
    return _Step(
        ms=max(ms),
        attention=max(attention),
        mean=statistics.mean(attention),
        plan=max(plan),
        peak_gib=max(peak),
        computed=statistics.mean(computed),
        busiest=max(load) / mean if mean else 1.0,
    )


def _median(measured: Sequence[_Step]) -> _Step:
    names: Final = _Step.__slots__
    return _Step(
        **{name: statistics.median(getattr(one, name) for one in measured) for name in names}
    )
