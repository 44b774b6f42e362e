"""``vidsparse ablate``: the papers' ablations on `shapes`, one table each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from vidsparse.apps.results.marked_page import fill_page
from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.studies.ablation_tables import tables
from vidsparse.apps.studies.call_ablations import CALL_ABLATIONS, measure_ablation
from vidsparse.apps.studies.configurations import ABLATIONS, configurations
from vidsparse.apps.studies.prepare_study import prepare_study, sizes_of
from vidsparse.apps.studies.quality_tables import quality_file
from vidsparse.apps.terminal.console import Terminal, json_option, verbosity_options
from vidsparse.apps.terminal.study_options import study_options
from vidsparse.apps.terminal.tables import print_markdown


@click.command(
    epilog="""\b
Examples:
  vidsparse ablate --device cuda --batch 24                     all of them, at both sizes
  vidsparse ablate --only judge --prompts 2 --size 256x256 --out rows.json --calls calls.json
  vidsparse ablate --limit-rows 0 --page docs/ablations.md --plots docs/benchmarks/ablations

\b
Both files are written after every row; a rerun measures only what is missing.
All rows of a file are of the same hardware, dtype, weights and prompts, with
SSIM on the same frames.
"""
)
@study_options
@click.option(
    "--only",
    multiple=True,
    type=click.Choice((*ABLATIONS, *CALL_ABLATIONS)),
    help="Run this ablation; repeat for several.  [default: all of them]",
)
@click.option("--limit-rows", type=int, metavar="N", help="Measure at most N missing videos' rows.")
@click.option(
    "--out",
    metavar="FILE",
    default="docs/benchmarks/quality-small.json",
    show_default=True,
    help="The file of the videos' rows, made or added to.",
)
@click.option(
    "--calls",
    metavar="FILE",
    default="docs/benchmarks/ablations-small.json",
    show_default=True,
    help="The file of the single calls' rows, made or added to.",
)
@click.option("--overwrite", is_flag=True, help="Measure rows again that are there.")
@click.option("--page", metavar="FILE", help="Also put the tables into this Markdown page.")
@click.option("--plots", metavar="FOLDER", help="Also draw a picture of each table.")
@json_option
@verbosity_options
@click.pass_obj
def ablate(
    terminal: Terminal,
    /,
    prompts_file: str | None,
    only: tuple[str, ...],
    limit_rows: int | None,
    out: str,
    calls: str,
    overwrite: bool,
    page: str | None,
    plots: str | None,
    **options: Any,
) -> None:
    """Measure what each paper's parts are worth on the model `shapes`.

    Videos are compared with dense ones of the same seeds, as by ``bench quality``; single calls
    are taken from a dense run. Without PROMPTS.txt the 24 held-out prompts are used, and without
    --size both sizes that this model was trained at. Methods that need calibration are calibrated
    first, on other prompts.
    """
    terminal.interrupted = "Interrupted; finished rows are kept."
    videos = quality_file(Path(out))
    keys = frozenset(("ablation", "case"))
    single = RowFile(Path(calls), "vidsparse-ablations/1", "ablations", keys=keys)
    if limit_rows is None or limit_rows > 0:
        with videos.held(make_folder=True), single.held(make_folder=True):
            for size, frames in sizes_of(options):
                one = {**options, "size": size, "frames": frames}
                study = prepare_study(terminal, prompts_file, videos, one)
                study.run_missing(
                    list(configurations(tuple(only or ABLATIONS))),
                    limit=limit_rows,
                    overwrite=overwrite,
                )
                for name in only or CALL_ABLATIONS:
                    if name in CALL_ABLATIONS:
                        measure_ablation(terminal, study, name, single, overwrite=overwrite)
    else:
        # of the two, whoever names one may have that one alone.
        source = click.get_current_context().get_parameter_source
        files = {"out": videos, "calls": single}
        named = [name for name in files if source(name) is not ParameterSource.DEFAULT]
        for name in named or files:
            hint = f"name one with --{name}, or leave --limit-rows out to measure"
            files[name].check_there(hint)
    if plots is not None:
        from vidsparse.apps.studies.ablation_plots import draw_ablations

        for path in draw_ablations(videos.rows, single.rows, Path(plots)):
            terminal.show(str(path))
    written = tables(videos.rows, single.rows)
    if page is not None:
        fill_page(Path(page), written)
        terminal.show(page)
    elif not terminal.json:
        for name, table in written.items():
            print_markdown(f"### {name}\n\n{table}\n")
    terminal.show(out)
    terminal.show(calls)
    terminal.answer({"files": [out, calls], "videos": videos.rows, "calls": single.rows})
