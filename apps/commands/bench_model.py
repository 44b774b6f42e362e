"""``vidsparse bench model``: whole transformer forwards of published sizes, dense and sparse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vidsparse.apps.bench.machine import device_and_dtype, device_line, header
from vidsparse.apps.bench.model import ModelBench, measure_models
from vidsparse.apps.bench.model_rows import COLUMNS, ModelRow, model_file
from vidsparse.apps.bench.model_settings import EXACT, PLAN, Setting, settings_of
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES
from vidsparse.apps.bench.shown import show_file, shown_rows
from vidsparse.apps.bench.speed_plot import draw_runs
from vidsparse.apps.bench.speed_rows import COLUMNS as SPEED_COLUMNS
from vidsparse.apps.bench.speed_rows import SpeedRow, is_speed_file, speed_file
from vidsparse.apps.bench.targets import added_to
from vidsparse.apps.results.figures import FigurePath
from vidsparse.apps.terminal.bench_options import json_rows_option, model_run_options
from vidsparse.apps.terminal.console import Terminal, verbosity_options
from vidsparse.apps.terminal.options import amount
from vidsparse.errors import OptionError
from vidsparse.masks import parse_tile
from vidsparse.methods import SPARSE_METHODS
from vidsparse.pipelines.speed import SPEEDS

if TYPE_CHECKING:
    import torch


@click.command(
    epilog="""\b
Examples:
  vidsparse bench model --family wan-14b --size 1280x720 --frames 81
  vidsparse bench model --family wan-14b --quantize none --quantize int8 --json rows.json
  vidsparse bench model --family wan-1.3b --device cpu --size 128x128 --frames 9 --layers 1
  vidsparse bench model --family wan-14b --speed exact --speed balanced --json speeds.json
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
@model_run_options
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
@click.option(
    "--speed",
    "speeds",
    multiple=True,
    type=click.Choice(SPEEDS),
    help="Measure whole runs at this --speed of `generate` instead: every kind of step that its "
    "bundle has. Repeat for several.",
)
@click.option(
    "--method",
    type=click.Choice(tuple(SPARSE_METHODS)),
    help="With --speed: run this method at the speeds that leave something out.  [default: the "
    "speed's own]",
)
@click.option(
    "--refresh",
    type=amount,
    metavar="N|SHARE",
    help="With --speed: steps that compute everything and keep what their plan lacks.  [default: "
    "the method's own]",
)
@click.option(
    "--whole",
    is_flag=True,
    help="With --speed: also run all steps one after the other, and say what the projected run is "
    "off by.",
)
@click.option(
    "--plot",
    type=FigurePath(),
    metavar="FILE",
    help="With --speed or its rows: draw what runs are made of.",
)
@click.option("--device", default="cuda", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--dtype", default=None, help="bf16 (default on a GPU), fp16 or fp32.")
@json_rows_option("Also write rows into FILE, whose own rows are kept and not measured again")
@click.option(
    "--show",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Measure nothing: print the rows of FILE, or those of --family and --tile or --speed; "
    "Markdown, where that is not a terminal.",
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
    speeds: tuple[str, ...],
    method: str | None,
    refresh: int | float | None,
    whole: bool,
    plot: str | None,
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

    With --speed a run is what `vidsparse generate --speed` makes of it: compiled blocks, 8-bit
    layers, our kernel in dense steps too, a step cache. Each kind of step is measured as the bundle
    runs it, and a run is put together from as many of each as it has; --whole holds that against
    all steps run one after the other. Stock steps with cuDNN are eager. Their outputs are checked
    against each other on a few blocks at the size of the video.
    """
    if show is not None:
        _show(terminal, Path(show), families or tuple(MODEL_SHAPES), tiles, speeds, plot)
        return
    alone = {"--method": method, "--refresh": refresh, "--whole": whole or None, "--plot": plot}
    without = [name for name, value in alone.items() if value is not None]
    if not speeds and without:
        raise OptionError(f"{without[0]} was given without a speed. Hint: add --speed fast.")
    if speeds and tiles:
        raise OptionError(
            "--tile was given with --speed, whose method has its own. Hint: leave one of them out."
        )
    if speeds and len(set(quantize)) > 1:
        raise OptionError(
            "runs at a speed are measured in one format of q·k. Hint: one --quantize at a time."
        )
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
    if speeds:
        given = {
            "whole": whole, "method": method, "refresh": refresh,
            "computed": computed, "warmup": warmup,
        }  # fmt: skip
        _measure_speeds(terminal, settings, speeds, given, where, kind, json_path, plot)
        return
    terminal.show(device_line(where, kind))
    about = header(where, "diffusers")
    bench = ModelBench(where, kind, terminal.say)
    with (
        added_to(json_path, model_file, {**about, "plan": PLAN}, kind) as file,
        shown_rows(terminal, COLUMNS, about) as show_row,
    ):
        measure_models(bench, settings, show_row, file)


def _measure_speeds(
    terminal: Terminal,
    settings: Sequence[Setting],
    speeds: Sequence[str],
    given: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    json_path: str | None,
    plot: str | None,
) -> None:
    from vidsparse.apps.bench.speeds import SpeedBench, measure_speeds

    benches = [
        SpeedBench(setting=setting, device=device, dtype=dtype, say=terminal.say, **given)
        for setting in settings
    ]
    for bench in benches:
        for speed in speeds:
            bench.check(speed)
    terminal.show(device_line(device, dtype))
    about = header(device, "diffusers", "torchao")
    with (
        added_to(json_path, speed_file, about, dtype) as file,
        shown_rows(terminal, SPEED_COLUMNS, about) as show_row,
    ):
        drawn: list[SpeedRow] = [] if file is None else file.typed(SpeedRow)

        def take(row: SpeedRow) -> None:
            drawn.append(row)
            show_row(row)

        measure_speeds(benches, [speed for speed in SPEEDS if speed in speeds], take, file)
    if plot is not None:
        draw_runs(drawn, Path(plot))


def _show(
    terminal: Terminal,
    path: Path,
    families: Sequence[str],
    tiles: Sequence[str],
    speeds: Sequence[str],
    plot: str | None,
) -> None:
    """Print the rows of either kind of file."""
    if is_speed_file(path):
        runs = speed_file(path)
        chosen = [
            row
            for row in runs.typed(SpeedRow)
            if row.family in families and row.speed in (speeds or SPEEDS)
        ]
        if plot is not None:
            draw_runs(chosen, Path(plot))
        show_file(terminal, runs, chosen, SPEED_COLUMNS)
        return
    file = model_file(path)
    if speeds or plot:
        flag = "--speed" if speeds else "--plot"
        raise OptionError(
            f"{flag} needs rows of runs at a speed, and {path} has rows of steps only. "
            "Hint: docs/benchmarks/speeds-h200.json."
        )
    rows = [
        row
        for row in file.typed(ModelRow)
        if row.family in families and row.tile in (tiles or (row.tile,))
    ]
    show_file(terminal, file, rows, COLUMNS)
