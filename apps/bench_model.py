"""``vidsparse bench model``: whole transformer forwards of published sizes, dense and sparse."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vidsparse.apps.bench_attention import (
    LOSSY_BUDGET,
    device_and_dtype,
    hardware,
    number,
    versions,
)
from vidsparse.apps.model_shapes import MODEL_SHAPES, Latent, ModelShape
from vidsparse.apps.options import pixel_size
from vidsparse.apps.row_file import RowFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vidsparse.apps.model_forward import Timing

# list lengths from half to one and a half of the mean: heads and rows differ in a real model too.
SKEW = 0.5
TOP_P = 0.9
# layers that the correctness check runs, and latent frames: a kernel is not wrong by the length.
CHECKED_LAYERS = 2
CHECKED_LATENT_FRAMES = 3
EXACT = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model, dense by three kernels and sparse by one; times of one denoising step.

    Attributes:
        family: name in ``MODEL_SHAPES``.
        shape: width x height x frames.
        tokens: of one attention call, text included.
        layers: transformer layers that ran.
        step: what one step is.
        tile: queries x keys.
        asked: density that was asked for.
        computed: density of the plan that the kernel ran.
        warmup: share of steps that stay dense.
        steps: steps of the projected run.
        impl: kernel of the sparse steps, with its 8-bit format.
        dense_ms: stock forwards with cuDNN attention (on a CPU PyTorch's own).
        fa4_ms: the same with FlashAttention-4; None where it is not installed.
        stock_ms: stock forwards with the attention that PyTorch chooses.
        sparse_ms: sparse forwards.
        attention_ms: video self-attention in ``dense_ms``.
        kernel_ms: the sparse kernel in ``sparse_ms``.
        mask_plan_ms: mask, plan and every permutation in ``sparse_ms``.
        peak_gib_dense: peak memory of a step with cuDNN; None on a CPU.
        peak_gib_sparse: the same of a sparse step.
        ratio_cudnn: projected dense run over sparse run, its warm-up by the same dense kernel; None
            on a CPU.
        ratio_fa4: the same against FlashAttention-4.
        ratio_stock: the same against stock.
    """

    family: str
    shape: str
    tokens: int
    layers: int
    step: str
    tile: str
    asked: float
    computed: float
    warmup: float
    steps: int
    impl: str
    dense_ms: float
    fa4_ms: float | None
    stock_ms: float
    sparse_ms: float
    attention_ms: float
    kernel_ms: float
    mask_plan_ms: float
    peak_gib_dense: float | None
    peak_gib_sparse: float | None
    ratio_cudnn: float | None
    ratio_fa4: float | None
    ratio_stock: float

    @property
    def planning_share(self) -> float:
        """Mask, plan and permutation as a share of dense attention."""
        return self.mask_plan_ms / self.attention_ms


def projected_ratio(dense: float, sparse: float, warmup: float, steps: int) -> float:
    """How many times faster a run is whose first steps are dense and whose others are sparse."""
    from vidsparse.schedule import share_or_count

    first = share_or_count(warmup, steps, "warmup")
    return steps * dense / (first * dense + (steps - first) * sparse)


@dataclass(frozen=True, slots=True)
class Variant:
    """One sparse forward: the tile (M, N) of FG-Attn, and the 8-bit format of q·k or None."""

    tile: tuple[int, int]
    quantize: str | None

    @property
    def name(self) -> str:
        """The tile as one types it."""
        return f"{self.tile[0]}x{self.tile[1]}"

    def __str__(self) -> str:
        return f"tile {self.name}" + (f", {self.quantize}" if self.quantize else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What to measure of one model.

    Args:
        family: name in ``MODEL_SHAPES``.
        latent: the video.
        layers: transformer layers, or None for all.
        computed: density of the plan that the kernel runs.
        warmup: share of steps that stay dense.
        steps: steps of the projected run.
        implementation: kernel, or ``auto``.
        sparse: tiles (M, N) of FG-Attn and formats of q·k (``EXACT`` for none), one row each.
    """

    family: str
    latent: Latent
    layers: int | None
    computed: float
    warmup: float
    steps: int
    implementation: str
    sparse: tuple[Variant, ...]

    @property
    def model(self) -> ModelShape:
        """The published model."""
        return MODEL_SHAPES[self.family]

    @property
    def shape(self) -> str:
        """Width x height x frames."""
        return f"{self.latent.width}x{self.latent.height}x{self.latent.frames}"

    def covers(self, row: Row, variant: Variant) -> bool:
        """Whether ``row`` is this setting's, in this variant."""
        return (
            (row.family, row.shape, row.asked, row.warmup, row.steps)
            == (self.family, self.shape, self.computed, self.warmup, self.steps)
            and row.tile == variant.name
            and row.layers == (self.layers or self.model.full_layers())
            and row.impl.partition(" ")[2] == (variant.quantize or "")
            and self.implementation in ("auto", row.impl.partition(" ")[0])
        )


@dataclass(frozen=True, slots=True)
class Bench:
    """Where to measure.

    Args:
        say: where notes go.
    """

    device: torch.device
    dtype: torch.dtype
    say: Callable[[str], None]

    def rows(self, setting: Setting) -> Iterator[Row]:
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
            self._free()
            right = tuple(one for one in setting.sparse if one not in wrong)
            if right:
                model = setting.model.build(setting.layers, self.dtype, self.device)
                try:
                    yield from self._rows(replace(setting, sparse=right), model)
                finally:
                    del model
                    self._free()
        if wrong:
            raise UnsupportedError(next(iter(wrong.values())))

    def _free(self) -> None:
        import torch

        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _random(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _check(self, setting: Setting) -> dict[Variant, str]:
        """Which variants are wrong, and why: at full density, sparse should be dense.

        On a few layers and frames; errors, against fp32 (fp64 where the model is fp32), are of the
        model's output.
        """
        import torch

        shape = setting.model
        frames = min(setting.latent.latent_frames, CHECKED_LATENT_FRAMES)
        latent = shape.latent(
            setting.latent.width, setting.latent.height, (frames - 1) * shape.frame_factor + 1
        )
        layers = min(CHECKED_LAYERS, setting.layers or CHECKED_LAYERS)
        model = shape.build(layers, self.dtype, self.device)
        pipe = shape.pipe(model)
        inputs = shape.inputs(pipe, model, latent, self._random)
        high = torch.float64 if self.dtype == torch.float32 else torch.float32
        # not the model's own .to(), which warns that some of its parts belong in fp32.
        exact_model = torch.nn.Module.to(copy.deepcopy(model), high)
        exact = exact_model(**_cast(inputs, high), return_dict=False)[0].double()
        del exact_model

        def off(out: Tensor) -> float:
            return float((out.double() - exact).norm() / exact.norm())

        stock_error = off(model(**inputs, return_dict=False)[0])
        wrong = {}
        for variant in setting.sparse:
            error = off(self._at_full_density(setting, variant, model, pipe, inputs))
            budget = 2 * stock_error + 4 * torch.finfo(self.dtype).eps
            if variant.quantize is not None:
                budget = max(budget, LOSSY_BUDGET)
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
        from vidsparse.apps.model_forward import Stopwatch, planned_to_order
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
        _refuse_dense_calls(handle.trace.cells)
        return out

    def _rows(self, setting: Setting, model: Any) -> Iterator[Row]:
        from vidsparse.apps.attention_peers import flash_attention_4

        shape = setting.model
        pipe = shape.pipe(model)
        inputs = shape.inputs(pipe, model, setting.latent, self._random)

        def run() -> list[Tensor]:
            return [model(**inputs, return_dict=False)[0] for _ in range(shape.forwards)]

        tokens = _video_tokens(setting)
        dense = partial(self._dense, model, pipe, shape, run, tokens)
        stock = dense("stock", as_stock=True)
        cudnn = dense("cuDNN", cudnn=True) if self.device.type == "cuda" else stock
        fa4 = None
        if self.device.type == "cuda":
            try:
                fa4 = dense("FlashAttention-4", cudnn=True, attention=flash_attention_4)
            except ImportError as error:
                self.say(f"  without FlashAttention-4: not installed ({error.name or error})")
            except Exception as error:  # a foreign kernel may fail in any way it likes.
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self.say(f"  without FlashAttention-4: {reason[:160]}")
        for variant in setting.sparse:
            yield self._sparse(setting, model, pipe, run, (cudnn, fa4, stock), variant)

    def _dense(
        self,
        model: Any,
        pipe: Any,
        shape: ModelShape,
        run: Callable[[], list[Tensor]],
        tokens: int,
        name: str,
        *,
        as_stock: bool = False,
        cudnn: bool = False,
        attention: Any = None,
    ) -> Timing:
        from vidsparse.apps.model_forward import (
            Stopwatch,
            first_blocks,
            measure,
            watched_attention,
        )
        from vidsparse.pipelines import sparsify

        watch = Stopwatch(self.device)
        # stock attention with a mask is kept for `stock`; the others get what our adapter gives.
        ours = sparsify(pipe, "dense") if shape.masked and not as_stock else nullcontext()
        with ours, _cudnn_first(cudnn), watched_attention(watch, tokens, attention):
            with first_blocks(model, shape.blocks, CHECKED_LAYERS):
                run()
            timing, out = measure(run, watch, self.device)
        _refuse_non_finite(out, name)
        self.say(f"  {name}: {timing.ms:.0f} ms, attention {timing.attention_ms:.0f} ms")
        return timing

    def _sparse(
        self,
        setting: Setting,
        model: Any,
        pipe: Any,
        run: Callable[[], list[Tensor]],
        dense: tuple[Timing, Timing | None, Timing],
        variant: Variant,
    ) -> Row:
        import torch

        from vidsparse.apps.model_forward import (
            Stopwatch,
            first_blocks,
            measure,
            planned_to_order,
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
            _cudnn_first(self.device.type == "cuda"),
        ):
            with first_blocks(model, shape.blocks, CHECKED_LAYERS):
                run()
            before = len(handle.trace.cells)
            timing, out = measure(run, watch, self.device)
            handle.trace.resolve()
            cells = handle.trace.cells[before:]
        name = seen.implementation + ("" if variant.quantize is None else f" {variant.quantize}")
        _refuse_dense_calls(cells)
        _refuse_non_finite(out, name)
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
        return Row(
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


def _video_tokens(setting: Setting) -> int:
    """At most as many as the video has: what tells its attention from that to text."""
    latent = setting.latent
    # every family cuts patches of at most 2x2 latent pixels.
    return latent.latent_frames * (latent.latent_height // 2) * (latent.latent_width // 2)


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Floating-point tensors of ``inputs`` in another dtype."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(convert(one) for one in value)
        floating = hasattr(value, "is_floating_point") and value.is_floating_point()
        return value.to(dtype) if floating else value

    return {name: convert(value) for name, value in inputs.items()}


def _cudnn_first(wanted: bool) -> AbstractContextManager[None]:
    """cuDNN attention wherever it can run, PyTorch's own choice where it cannot."""
    if not wanted:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


def _refuse_dense_calls(cells: Sequence[Any]) -> None:
    from vidsparse.errors import UnsupportedError

    for cell in cells:
        if cell.action != "replan":
            raise UnsupportedError(f"an attention call that should be sparse was {cell.action}")


def _refuse_non_finite(out: Sequence[Tensor], name: str) -> None:
    from vidsparse.errors import UnsupportedError

    if not all(bool(x.isfinite().all()) for x in out):
        raise UnsupportedError(f"{name} gave NaN or Inf; no speed is reported for it")


COLUMNS = (
    "model",
    "shape",
    "tokens",
    "tile",
    "computed",
    "warm-up",
    "implementation",
    "cuDNN ms",
    "FA4 ms",
    "stock ms",
    "sparse ms",
    "mask, plan, order",
    "GiB dense",
    "GiB sparse",
    "x cuDNN",
    "x FA4",
    "x stock",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of ``COLUMNS``."""
    part = "" if row.layers == MODEL_SHAPES[row.family].full_layers() else f" ({row.layers} layers)"
    return (
        row.family + part,
        row.shape,
        str(row.tokens),
        row.tile,
        f"{row.computed:.2f}",
        f"{row.warmup:g}",
        row.impl,
        number(row.dense_ms, 0),
        number(row.fa4_ms, 0),
        number(row.stock_ms, 0),
        number(row.sparse_ms, 0),
        f"{row.planning_share:.1%}",
        number(row.peak_gib_dense),
        number(row.peak_gib_sparse),
        number(row.ratio_cudnn),
        number(row.ratio_fa4),
        number(row.ratio_stock),
    )


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def _file(path: str) -> RowFile:
    return RowFile(Path(path), "vidsparse-models/1", "model benchmark")


def _rows_of(file: RowFile) -> list[Row]:
    return [Row(**row) for row in file.rows]


def _rounded(row: Row) -> dict[str, Any]:
    """A row as it is written: no digits that a second run would not give."""
    return {
        name: round(value, 4 if name.startswith("ratio") else 2)
        if isinstance(value, float) and name not in ("asked", "computed", "warmup")
        else value
        for name, value in asdict(row).items()
    }


def _header(device: torch.device) -> dict[str, Any]:
    return {
        "hardware": hardware(device),
        "versions": versions("diffusers"),
        "date": date.today().isoformat(),
        "plan": f"real mask and plan timed; kernel on random lists, skew {SKEW}",
    }


def _settings(
    families: Sequence[str],
    size: tuple[int, int] | None,
    frames: int | None,
    layers: int | None,
    computed: float | None,
    warmup: float | None,
    tiles: Sequence[tuple[int, int]],
    quantize: Sequence[str],
    **common: Any,
) -> list[Setting]:
    """One setting for each family, checked before anything is built."""
    from vidsparse.errors import OptionError

    settings = []
    for family in families:
        model = MODEL_SHAPES[family]
        width, height = size or (model.width, model.height)
        try:
            latent = model.latent(width, height, frames or model.frames)
        except OptionError as error:
            raise OptionError(f"{family}: {error}") from None
        if layers is not None and layers > (full := model.full_layers()):
            raise OptionError(f"{family} has {full} layers, not {layers}")
        settings.append(
            Setting(
                family=family,
                latent=latent,
                layers=layers,
                computed=model.computed if computed is None else computed,
                warmup=model.warmup if warmup is None else warmup,
                sparse=tuple(
                    Variant(tile, None if form == EXACT else form)
                    for tile in tiles or (model.tile,)
                    for form in quantize
                ),
                **common,
            )
        )
    return settings


@contextmanager
def _memory_hint(setting: Setting) -> Iterator[None]:
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


@click.command(
    epilog="""\b
Examples:
  vidsparse bench model --family wan-14b --size 1280x720 --frames 81
  vidsparse bench model --family wan-14b --quantize none --quantize int8 --json rows.json
  vidsparse bench model --family wan-1.3b --device cpu --size 128x128 --frames 9 --layers 1
  vidsparse bench model --show docs/benchmarks/models-h200.json --tile 32x32
"""
)
@click.option(
    "--family",
    "families",
    multiple=True,
    type=click.Choice(tuple(MODEL_SHAPES)),
    help="Model to build; repeat for several.  [default: all]",
)
@click.option(
    "--size",
    metavar="WIDTHxHEIGHT",
    callback=lambda context, parameter, value: None if value is None else pixel_size(value),
    help="Pixels.  [default: as published]",
)
@click.option("--frames", type=click.IntRange(min=1), help="Video frames.  [default: as published]")
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    help="Fewer transformer layers, where memory or time asks for it.  [default: all]",
)
@click.option(
    "--computed",
    type=click.FloatRange(0, 1, min_open=True),
    help="Density that sparse steps compute.  [default: the model's own]",
)
@click.option(
    "--warmup",
    type=click.FloatRange(0, 1),
    help="Share of steps that stay dense.  [default: the model's own]",
)
@click.option(
    "--steps",
    default=50,
    show_default=True,
    type=click.IntRange(min=1),
    help="Steps of the run that ratios are projected to.",
)
@click.option(
    "--tile",
    "tiles",
    multiple=True,
    metavar="MxN",
    help="Of FG-Attn; repeat for several.  [default: the model's own]",
)
@click.option(
    "--quantize",
    multiple=True,
    default=(EXACT,),
    show_default=True,
    type=click.Choice((EXACT, "int8", "fp8")),
    help="8-bit products: q·k, or q·k and the one with V; repeat for several.",
)
@click.option("--implementation", default="auto", show_default=True)
@click.option("--device", default="cuda", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--dtype", default=None, help="bfloat16 (default on a GPU), float16 or float32.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False),
    help="Also write rows here; those that it has already are kept and not measured again.",
)
@click.option(
    "--show",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Measure nothing: print the rows of FILE, or those of --family and --tile, as a Markdown "
    "table.",
)
def model(
    families: tuple[str, ...],
    size: tuple[int, int] | None,
    frames: int | None,
    layers: int | None,
    computed: float | None,
    warmup: float | None,
    steps: int,
    tiles: tuple[str, ...],
    quantize: tuple[str, ...],
    implementation: str,
    device: str,
    dtype: str | None,
    json_path: str | None,
    show: str | None,
) -> None:
    """Time whole transformer forwards of published sizes, dense and sparse.

    Weights are random, made on the device: nothing is downloaded. All forwards of one denoising
    step are measured; only their repetition over the steps is projected. Random q and k make top-p
    keep nearly everything, so order, mask and plan run and are timed on the real q and k, and the
    kernel then runs a random plan of the density given, with lists of half to one and a half of the
    mean length. Dense is stock diffusers with the attention that PyTorch chooses, with cuDNN and
    with FlashAttention-4 where that is installed.
    """
    from vidsparse.masks import parse_tile

    if show is not None:
        rows = [
            row
            for row in _rows_of(_file(show))
            if row.family in (families or MODEL_SHAPES) and row.tile in (tiles or (row.tile,))
        ]
        click.echo(markdown(rows))
        return
    settings = _settings(
        families or tuple(MODEL_SHAPES),
        size,
        frames,
        layers,
        computed,
        warmup,
        steps=steps,
        tiles=tuple(parse_tile(tile) for tile in dict.fromkeys(tiles)),
        implementation=implementation,
        quantize=tuple(dict.fromkeys(quantize)),
    )
    _measure(settings, device, dtype, json_path)


def _measure(
    settings: Sequence[Setting], device: str, dtype: str | None, json_path: str | None
) -> None:
    import torch

    from vidsparse.errors import UnsupportedError

    where, kind = device_and_dtype(device, dtype)
    click.echo(f"{hardware(where)}; torch {torch.__version__}; {kind}")

    def say(text: str) -> None:
        click.echo(text, err=True)

    file = None if json_path is None else _file(json_path)
    rows = [] if file is None else _rows_of(file)
    failed: list[str] = []
    for setting in settings:
        missing = tuple(
            one for one in setting.sparse if not any(setting.covers(row, one) for row in rows)
        )
        if not missing:
            say(f"{setting.family} {setting.shape}: measured already")
            continue
        say(f"{setting.family} {setting.shape}, one step is {setting.model.step}")
        try:
            with _memory_hint(setting):
                for row in Bench(where, kind, say).rows(replace(setting, sparse=missing)):
                    click.echo("  ".join(cells(row)))
                    if file is not None:
                        file.header = _header(where)
                        # what is missing is in no row, so that none is replaced.
                        file.put(_rounded(row), lambda other: False)
        except UnsupportedError as error:
            if len(settings) == 1:
                raise
            # the others are still worth having; the command fails at the end.
            failed.append(f"{setting.family}: {error}")
            say(failed[-1])
    if failed:
        raise UnsupportedError(f"{len(failed)} of {len(settings)} models failed: {failed[0]}")
