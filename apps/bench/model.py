"""Whole transformer forwards of published sizes, dense and sparse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vidsparse.apps.bench.exactness import error_budget
from vidsparse.apps.bench.machine import let_go
from vidsparse.apps.bench.model_checks import (
    CHECKED_LAYERS,
    exact_output,
    refuse_dense_calls,
    to_check,
)
from vidsparse.apps.bench.model_readings import projected_ratio
from vidsparse.apps.bench.model_rows import DIGITS, ModelRow
from vidsparse.apps.bench.model_sequence import measure_each
from vidsparse.apps.bench.model_settings import SKEW, TOP_P, Setting, Variant
from vidsparse.apps.results.row_file import RowFile, rounded

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vidsparse.apps.bench.model_forward import Timing


@dataclass(frozen=True, slots=True)
class ModelBench:
    """Where to measure.

    Args:
        say: where notes go.
    """

    device: torch.device
    dtype: torch.dtype
    say: Callable[[str], None]

    def rows(self, setting: Setting) -> Iterator[ModelRow]:
        """Check, then measure one model; one row for each variant that is right.

        Raises:
            UnsupportedError: something cannot run here, or an output is not right. Where other
                variants are, their rows come first.
        """
        import torch

        from vidsparse.errors import UnsupportedError

        torch.manual_seed(0)
        with torch.no_grad():
            wrong = self._check(setting)
            let_go(self.device)
            right = tuple(one for one in setting.sparse if one not in wrong)
            if right:
                model = setting.model.build(setting.layers, self.dtype, self.device)
                try:
                    yield from self._rows(replace(setting, sparse=right), model)
                finally:
                    del model
                    let_go(self.device)
        if wrong:
            raise UnsupportedError(next(iter(wrong.values())))

    def _random(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _check(self, setting: Setting) -> dict[Variant, str]:
        """Which variants are wrong, and why: at full density, sparse should be dense.

        On a few layers and frames; errors, against fp32 (fp64 where the model is fp32), are of the
        model's output.
        """
        shape, (layers, latent) = setting.model, to_check(setting)
        model = shape.build(layers, self.dtype, self.device)
        pipe = shape.pipe(model)
        inputs = shape.inputs(pipe, model, latent, self._random)
        exact = exact_output(model, inputs, self.dtype)

        def off(out: Tensor) -> float:
            return float((out.double() - exact).norm() / exact.norm())

        stock_error = off(model(**inputs, return_dict=False)[0])
        wrong = {}
        for variant in setting.sparse:
            error = off(self._at_full_density(setting, variant, model, pipe, inputs))
            budget = error_budget(stock_error, self.dtype, lossy=variant.quantize is not None)
            self.say(
                f"  {layers} layers at full density, {variant}: error {error:.1e}, "
                f"stock {stock_error:.1e}"
            )
            if not error <= budget:
                wrong[variant] = (
                    f"{setting.family}, {variant}: sparse attention at full density is off by "
                    f"{error:.2e} from dense, budget {budget:.2e}; no speed is reported for a "
                    "wrong result"
                )
        return wrong

    def _at_full_density(
        self, setting: Setting, variant: Variant, model: Any, pipe: Any, inputs: dict[str, Any]
    ) -> Tensor:
        from vidsparse.apps.bench.model_forward import Stopwatch, planned_to_order
        from vidsparse.pipelines import sparsify

        with (
            sparsify(
                pipe,
                "fg-attn",
                top_p=1.0,
                tile=variant.tile,
                dense_steps=0,
                implementation=setting.implementation,
            ) as handle,
            planned_to_order(
                handle.engine,
                Stopwatch(self.device),
                density=1.0,
                skew=0.0,
                quantize=variant.quantize,
            ),
        ):
            out: Tensor = model(**inputs, return_dict=False)[0]
        refuse_dense_calls(handle.trace.cells)
        return out

    def _rows(self, setting: Setting, model: Any) -> Iterator[ModelRow]:
        from vidsparse.apps.bench.model_dense import CUDNN, FA4, STOCK, DenseSteps

        shape = setting.model
        pipe = shape.pipe(model)
        inputs = shape.inputs(pipe, model, setting.latent, self._random)

        def run() -> list[Tensor]:
            return [model(**inputs, return_dict=False)[0] for _ in range(shape.forwards)]

        steps = DenseSteps(
            model=model,
            pipe=pipe,
            shape=shape,
            latent=setting.latent,
            device=self.device,
            say=self.say,
        )
        found = steps.timings(run)
        stock = found[STOCK]
        dense = found.get(CUDNN, stock), found.get(FA4), stock
        for variant in setting.sparse:
            yield self._sparse(setting, model, pipe, run, dense, variant)

    def _sparse(
        self,
        setting: Setting,
        model: Any,
        pipe: Any,
        run: Callable[[], list[Tensor]],
        dense: tuple[Timing, Timing | None, Timing],
        variant: Variant,
    ) -> ModelRow:
        import torch

        from vidsparse.apps.bench.model_dense import cudnn_first, refuse_non_finite
        from vidsparse.apps.bench.model_forward import (
            Stopwatch,
            first_blocks,
            planned_to_order,
            time_step,
        )
        from vidsparse.pipelines import sparsify

        shape, watch = setting.model, Stopwatch(self.device)
        with (
            sparsify(
                pipe,
                "fg-attn",
                top_p=TOP_P,
                tile=variant.tile,
                dense_steps=0,
                implementation=setting.implementation,
            ) as handle,
            planned_to_order(
                handle.engine,
                watch,
                density=setting.computed,
                skew=SKEW,
                quantize=variant.quantize,
            ) as seen,
            cudnn_first(self.device.type == "cuda"),
        ):
            with first_blocks(model, shape.blocks, CHECKED_LAYERS):
                run()
            before = len(handle.trace.cells)
            timing, out = time_step(run, watch, self.device)
            handle.trace.resolve()
            cells = handle.trace.cells[before:]
        name = seen.implementation + ("" if variant.quantize is None else f" {variant.quantize}")
        refuse_dense_calls(cells)
        refuse_non_finite(out, name)
        calls = sum(cell.seconds or 0.0 for cell in cells) * 1e3
        real = torch.stack([x.mean() for x in seen.real]).mean().item()
        cudnn, fa4, stock = dense
        ratio = partial(
            projected_ratio, sparse=timing.ms, warmup=setting.warmup, steps=setting.steps
        )
        self.say(
            f"  {name}, tile {variant.name}: {timing.ms:.0f} ms, kernel "
            f"{timing.attention_ms:.0f} ms; the real plan (top_p {TOP_P} on random q and k) would "
            f"compute {real:.2f}"
        )
        computed = [cell.computed.mean() for cell in cells if cell.computed is not None]
        return ModelRow(
            family=setting.family,
            shape=setting.shape,
            tokens=seen.tokens,
            layers=setting.layers or shape.full_layers(),
            step=shape.step,
            tile=variant.name,
            asked=setting.computed,
            computed=round(torch.stack(computed).mean().item(), 4),
            warmup=setting.warmup,
            steps=setting.steps,
            impl=name,
            dense_ms=cudnn.ms,
            fa4_ms=None if fa4 is None else fa4.ms,
            stock_ms=stock.ms,
            sparse_ms=timing.ms,
            attention_ms=cudnn.attention_ms,
            kernel_ms=timing.attention_ms,
            mask_plan_ms=calls - timing.attention_ms,
            peak_gib_dense=cudnn.peak_gib,
            peak_gib_sparse=timing.peak_gib,
            ratio_cudnn=ratio(cudnn.ms) if self.device.type == "cuda" else None,
            ratio_fa4=None if fa4 is None else ratio(fa4.ms),
            ratio_stock=ratio(stock.ms),
        )


def measure_models(
    bench: ModelBench,
    settings: Sequence[Setting],
    show: Callable[[ModelRow], None],
    file: RowFile | None = None,
) -> None:
    """Measure one model after the other, each variant unless the file has it.

    Args:
        bench: where.
        settings: at least one.
        show: given each row as soon as it is there.
        file: held, with its header; each row is added to it.

    Raises:
        UnsupportedError: a model cannot run or is not right. Where there are others, their rows
            come first.
        OptionError: the file holds something else.
        OutputError: it cannot be written.
    """
    known = [] if file is None else file.typed(ModelRow)

    def rows_of(setting: Setting) -> Iterator[ModelRow] | None:
        missing = tuple(
            one for one in setting.sparse if not any(setting.covers(row, one) for row in known)
        )
        return bench.rows(replace(setting, sparse=missing)) if missing else None

    def take(row: ModelRow) -> None:
        show(row)
        if file is not None:
            file.add(rounded(row, DIGITS))

    measure_each(settings, rows_of, take, bench.say)
