"""Whole transformer forwards of published sizes, dense and sparse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vidsparse.apps.bench.exactness import error_budget
from vidsparse.apps.bench.machine import header, let_go
from vidsparse.apps.bench.model_readings import projected_ratio
from vidsparse.apps.bench.model_rows import DIGITS, ModelRow
from vidsparse.apps.bench.model_settings import Setting, Variant
from vidsparse.apps.bench.model_shapes import Latent
from vidsparse.apps.results.row_file import RowFile, rounded

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vidsparse.apps.bench.model_forward import Timing

# list lengths from half to one and a half of the mean: heads and rows differ in a real model too.
SKEW = 0.5
TOP_P = 0.9
PLAN = f"real mask and plan timed; kernel on random lists, skew {SKEW}"
# layers that the correctness check runs, and latent frames: a kernel is not wrong by the length.
CHECKED_LAYERS = 2
CHECKED_LATENT_FRAMES = 3


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


def to_check(setting: Setting) -> tuple[int, Latent]:
    """Layers and latent of what is checked before ``setting`` is timed: few, and short."""
    shape, whole = setting.model, setting.latent
    frames = shape.frames_of(min(whole.latent_frames, CHECKED_LATENT_FRAMES))
    latent = shape.latent(whole.width, whole.height, frames)
    return min(CHECKED_LAYERS, setting.layers or CHECKED_LAYERS), latent


def exact_output(model: Any, inputs: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """What a model of ``dtype`` should give: by fp32, or by fp64 where it is in fp32."""
    import torch

    high = torch.float64 if dtype == torch.float32 else torch.float32
    # not the model's own .to(), which warns that some of its parts belong in fp32.
    exact_model = torch.nn.Module.to(copy.deepcopy(model), high)
    out: Tensor = exact_model(**_cast(inputs, high), return_dict=False)[0]
    return out.double()


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Floating-point tensors of ``inputs`` in another dtype."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(convert(one) for one in value)
        floating = hasattr(value, "is_floating_point") and value.is_floating_point()
        return value.to(dtype) if floating else value

    return {name: convert(value) for name, value in inputs.items()}


def refuse_dense_calls(cells: Sequence[Any]) -> None:
    """Raise an ``UnsupportedError`` where a call of a sparse step was dense."""
    from vidsparse.errors import UnsupportedError

    for cell in cells:
        # a guidance branch may go by the plan of the one before it.
        if cell.action not in ("replan", "reuse"):
            raise UnsupportedError(f"an attention call that should be sparse was {cell.action}")


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
        file: each row is added to it.

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
            file.header = {**header(bench.device, "diffusers"), "plan": PLAN}
            file.add(rounded(row, DIGITS))

    measure_each(settings, rows_of, take, bench.say)


def measure_each(
    settings: Sequence[Setting],
    rows_of: Callable[[Setting], Iterator[Any] | None],
    take: Callable[[Any], None],
    say: Callable[[str], None],
) -> None:
    """Measure one model after the other; one that fails does not keep the others from it.

    Args:
        settings: at least one.
        rows_of: measures as it is gone through; None where nothing is missing.
        take: given each row as soon as it is there.
        say: where notes go.

    Raises:
        UnsupportedError: a model cannot run or is not right. Where there are others, their rows
            come first.
    """
    from vidsparse.errors import UnsupportedError

    failed: list[str] = []
    for setting in settings:
        rows = rows_of(setting)
        if rows is None:
            say(f"{setting.family} {setting.shape}: measured already")
            continue
        say(f"{setting.family} {setting.shape}, one step is {setting.model.step}")
        try:
            with memory_hint(setting):
                for row in rows:
                    take(row)
        except UnsupportedError as error:
            if len(settings) == 1:
                raise
            # the others are still worth having; the command fails at the end.
            failed.append(f"{setting.family}: {error}")
            say(failed[-1])
    if failed:
        raise UnsupportedError(f"{len(failed)} of {len(settings)} models failed: {failed[0]}")


@contextmanager
def memory_hint(setting: Setting) -> Iterator[None]:
    """Turn what torch says where memory is short into a sentence with a hint."""
    import torch

    from vidsparse.errors import UnsupportedError

    try:
        yield
    except torch.OutOfMemoryError as error:
        layers = setting.layers or setting.model.full_layers()
        raise UnsupportedError(
            f"{setting.family} at {setting.shape} does not fit the device: {error}. "
            f"Hint: --layers {max(1, layers // 2)}."
        ) from None
