"""``vidsparse bench model``: whole transformer forwards of published sizes, dense and sparse."""

from __future__ import annotations

from pathlib import Path

import click

from vidsparse.apps.bench.machine import described, device_and_dtype, header
from vidsparse.apps.bench.model import ModelBench, measure_models
from vidsparse.apps.bench.model_rows import COLUMNS, ModelRow, model_file
from vidsparse.apps.bench.model_settings import EXACT, settings_of
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES
from vidsparse.apps.bench.shown import show_file, shown_rows
from vidsparse.apps.terminal.bench_options import json_rows_option
from vidsparse.apps.terminal.console import Terminal, verbosity_options
from vidsparse.apps.terminal.options import pixel_size
from vidsparse.masks import parse_tile


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
    help="q·k in 8 bits; the product with V stays in 16. Repeat for several.",
)
@click.option(
    "--implementation",
    default="auto",
    show_default=True,
    help="Kernel to run; never replaced by another.",
)
@click.option("--device", default="cuda", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--dtype", default=None, help="bf16 (default on a GPU), fp16 or fp32.")
@json_rows_option("Also write rows into FILE, whose own rows are kept and not measured again")
@click.option(
    "--show",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Measure nothing: print the rows of FILE, or those of --family and --tile; Markdown, "
    "where that is not a terminal.",
)
@verbosity_options
@click.pass_obj
def bench_model(
    terminal: Terminal,
    /,
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

    Ratios are of a whole run, its first steps dense: projected from the measured steps. Papers do
    not say whether a density counts what is selected or what is computed after merging, so each
    row has both readings; where it counts what is selected, the step is projected too, its kernel's
    time in proportion to what it computes.
    """
    if show is not None:
        shown = model_file(Path(show))
        rows = [
            row
            for row in shown.typed(ModelRow)
            if row.family in (families or MODEL_SHAPES) and row.tile in (tiles or (row.tile,))
        ]
        show_file(terminal, shown, rows, COLUMNS)
        return
    settings = settings_of(
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
    where, kind = device_and_dtype(device, dtype)
    terminal.show(described(where, kind))
    file = None if json_path is None else model_file(Path(json_path))
    bench = ModelBench(where, kind, terminal.say)
    with shown_rows(terminal, COLUMNS, header(where, "diffusers")) as show_row:
        measure_models(bench, settings, show_row, file)
