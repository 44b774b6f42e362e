"""``vidsparse bench gpus``: steps of whole transformers on one GPU and on several together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from vidsparse.apps.bench.gpus_rows import COLUMNS, DIGITS, GpusRow, gpus_file
from vidsparse.apps.bench.gpus_settings import KINDS, Sharing, sharings_of
from vidsparse.apps.bench.machine import device_and_dtype, device_line, header
from vidsparse.apps.bench.model_settings import EXACT, PLAN, Setting, settings_of
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES
from vidsparse.apps.bench.shown import show_file, shown_rows
from vidsparse.apps.bench.targets import added_to
from vidsparse.apps.results.row_file import RowFile, rounded
from vidsparse.apps.runs.team import Team, check_gpus, check_ring, join_team, launch, said_once
from vidsparse.apps.terminal.bench_options import json_rows_option, model_run_options
from vidsparse.apps.terminal.console import Terminal, verbosity_options
from vidsparse.dtypes import dtype_name
from vidsparse.errors import OptionError
from vidsparse.masks import parse_tile
from vidsparse.pipelines.compilation import require_compiler
from vidsparse.pipelines.placement import LINEARS, check_linear


@click.command(
    epilog="""\b
Examples:
  vidsparse bench gpus --gpus 2 --family wan-14b --json rows.json
  vidsparse bench gpus --gpus 4 --family hunyuanvideo --kind even --linear fp8 --json rows.json
  torchrun --nproc-per-node 4 -m vidsparse bench gpus --family wan-14b --json rows.json
  vidsparse bench gpus --gpus 2 --device cpu --family wan-1.3b --size 128x128 --frames 9 --layers 1
  vidsparse bench gpus --show rows.json
"""
)
@click.option(
    "--gpus",
    type=click.IntRange(min=2, max=1024),
    metavar="N",
    help="GPUs that make a video together; with --device cpu, processes. Under torchrun, as many "
    "as it started.",
)
@click.option(
    "--family",
    "families",
    multiple=True,
    default=("wan-14b", "hunyuanvideo"),
    show_default=True,
    type=click.Choice(tuple(MODEL_SHAPES)),
    help="Model to build; repeat for several.",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    default=KINDS,
    show_default=True,
    type=click.Choice(KINDS),
    help="Even heads, shared out as far as they go; the same with keys in a ring; heads whose "
    "density rises from 0.05 to 0.6, dealt by work and in order; even heads with guidance branches "
    "apart, where a model has two. Repeat for several.",
)
@click.option(
    "--ring",
    type=click.IntRange(min=1),
    metavar="R",
    help="GPUs that keys travel round in kind ring.  [default: all]",
)
@model_run_options
@click.option("--tile", metavar="MxN", help="Of FG-Attn.  [default: the model's own]")
@click.option(
    "--quantize",
    default=EXACT,
    show_default=True,
    type=click.Choice((EXACT, "int8", "fp8")),
    help="q·k in 8 bits.",
)
@click.option(
    "--linear",
    default="none",
    show_default=True,
    type=click.Choice(LINEARS),
    help="Number format of linear layers.",
)
@click.option("--compile", "compiled", is_flag=True, help="Compile blocks, on one GPU and on all.")
@click.option(
    "--implementation",
    default="auto",
    show_default=True,
    help="Kernel to run; never replaced by another.",
)
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    # a step each, of the 50 that the scheduler has.
    type=click.IntRange(min=1, max=40),
    help="Times that each kind of step is measured, in turns with the others; medians count.",
)
@click.option("--device", default="cuda", show_default=True, help="cpu or cuda.")
@click.option("--dtype", default=None, help="bf16 (default on a GPU), fp16 or fp32.")
@json_rows_option("Also write rows into FILE, whose own rows are kept and not measured again")
@click.option(
    "--show",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Measure nothing: print the rows of FILE; Markdown, where that is not a terminal.",
)
@verbosity_options
@click.pass_obj
def bench_gpus(
    terminal: Terminal,
    /,
    gpus: int | None,
    families: tuple[str, ...],
    kinds: tuple[str, ...],
    ring: int | None,
    size: tuple[int, int] | None,
    frames: int | None,
    layers: int | None,
    computed: float | None,
    warmup: float | None,
    steps: int,
    tile: str | None,
    quantize: str,
    linear: str,
    compiled: bool,
    implementation: str,
    repeats: int,
    device: str,
    dtype: str | None,
    json_path: str | None,
    show: str | None,
) -> int:
    """Time one video's denoising steps on one GPU and on several that make it together.

    Weights are random, as in `bench model`. Every process holds the whole model. Dense and sparse
    steps are timed on the first GPU alone and on all, in turns; of several processes the slowest
    counts. The exchange of a step is sent once more with nothing else, and a whole run is put
    together from the steps. First all processes together are held against one, on few layers and a
    short video with the same plans; nothing is timed where they differ by more than rounding.
    """
    if show is not None:
        shown = gpus_file(Path(show))
        show_file(terminal, shown, shown.typed(GpusRow), COLUMNS)
        return 0
    team = join_team(terminal, gpus, ring)
    with said_once(team):
        settings = settings_of(
            tuple(dict.fromkeys(families)),
            size,
            frames,
            layers,
            computed,
            warmup,
            steps=steps,
            tiles=() if tile is None else (parse_tile(tile),),
            implementation=implementation,
            quantize=(quantize,),
        )
        where, kind = device_and_dtype(device, dtype)
        check_linear(linear, device, dtype_name(kind))
        if compiled:
            require_compiler(device)
        if team is None:
            if json_path is not None:
                # what is no such file is known before processes start.
                gpus_file(Path(json_path))
            if gpus is None:
                raise OptionError("a video is to be made by several GPUs together. Hint: --gpus 2.")
            check_ring(ring, gpus)
            check_gpus(device, gpus)
            return launch(terminal, gpus, "rows that were written are kept.")
        # what imports the hosts, which rows that are shown again do without.
        from vidsparse.apps.bench.gpus import GpusBench

        team.connect(device)
        terminal.show(device_line(where, kind))
        bench = GpusBench(
            device=where,
            dtype=kind,
            repeats=repeats,
            linear=linear,
            compiled=compiled,
            say=terminal.say,
        )
        about = {**header(where, "diffusers", "torchao"), "plan": PLAN}
        # the others may be on machines that do not have the file.
        with (
            added_to(json_path if team.first else None, gpus_file, about, kind) as file,
            shown_rows(terminal, COLUMNS, header(where, "diffusers")) as show_row,
        ):
            for setting in settings:
                sharings = sharings_of(kinds, ring, team.count, setting.model.forwards)
                missing = _missing(team, setting, sharings, linear, compiled, file)
                if not missing:
                    terminal.say(f"{setting.family} {setting.shape}: measured already")
                    continue
                terminal.say(f"{setting.family} {setting.shape}, one step is {setting.model.step}")
                rows = bench.rows(setting, missing)
                if not team.first:
                    continue
                for row in rows:
                    show_row(row)
                if file is not None and rows:
                    file.add(*(rounded(row, DIGITS) for row in rows))
    team.leave()
    return 0


def _missing(
    team: Team,
    setting: Setting,
    sharings: Sequence[Sharing],
    linear: str,
    compiled: bool,
    file: RowFile | None,
) -> list[Sharing]:
    """What the file has no rows of; every process hears it of the first."""
    if not team.first:
        # the file may be on another machine.
        return [sharings[place] for place in team.hear()]
    known = [] if file is None else file.typed(GpusRow)
    places = [
        place
        for place, sharing in enumerate(sharings)
        if not any(sharing.covers(row, setting, linear, compiled, team.count) for row in known)
    ]
    team.tell(places)
    return [sharings[place] for place in places]
