"""``vidsparse bench quality``: how tiles, merging and token orders trade quality for density."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vidsparse.apps.results.figures import FigurePath
from vidsparse.apps.studies.configurations import STUDIES, configurations
from vidsparse.apps.studies.prepare_study import prepare_study
from vidsparse.apps.studies.quality_tables import markdown_tables, quality_file
from vidsparse.apps.terminal.console import Terminal, json_option, verbosity_options
from vidsparse.apps.terminal.study_options import study_options
from vidsparse.apps.terminal.tables import print_markdown


@click.command(
    epilog="""\b
Examples:
  vidsparse bench quality --device cuda --batch 24 --size 256x256 --frames 33
  vidsparse bench quality --device cuda --batch 24 --size 384x384 --frames 49
  vidsparse bench quality --study orders --prompts 4 --limit-rows 3 --out rows.json
  vidsparse bench quality --study seconds --device cuda --batch 1 --seconds seconds.png
  vidsparse bench quality --limit-rows 0 --curve curve.png --table          show what is there

\b
The file holds one row a line and is written after every row; a rerun measures
only what is missing. All its rows are of the same hardware, dtype, weights and
prompts, with SSIM on the same frames.
"""
)
@study_options
@click.option(
    "--study",
    "studies",
    multiple=True,
    type=click.Choice(STUDIES),
    help="Run this study; repeat for several.  [default: all of them]",
)
@click.option(
    "--compile",
    is_flag=True,
    help="Compile the blocks of every row's transformer, but not of the stock pipeline beside it.",
)
@click.option(
    "--samples",
    type=int,
    metavar="N",
    help="Calibration prompts of a preset that --study promises makes.  "
    "[default: the method's number]",
)
@click.option("--limit-rows", type=int, metavar="N", help="Measure at most N missing rows.")
@click.option(
    "--out",
    metavar="FILE",
    default="docs/benchmarks/quality-small.json",
    show_default=True,
    help="The file of rows, made or added to.",
)
@click.option("--overwrite", is_flag=True, help="Measure rows again that are there.")
@click.option("--curve", type=FigurePath(), metavar="PNG", help="Also draw PSNR against density.")
@click.option(
    "--seconds",
    type=FigurePath(),
    metavar="PNG",
    help="Also draw PSNR against seconds of denoising.",
)
@click.option("--table", is_flag=True, help="Also print the file's rows as Markdown tables.")
@json_option
@verbosity_options
@click.pass_obj
def bench_quality(
    terminal: Terminal,
    /,
    prompts_file: str | None,
    studies: tuple[str, ...],
    limit_rows: int | None,
    out: str,
    curve: str | None,
    seconds: str | None,
    table: bool,
    **options: Any,
) -> None:
    """Sweep tile sizes, merging and token orders, each against dense videos of the same seeds.

    Without PROMPTS.txt the bundled model's 24 held-out prompts are used. PSNR and SSIM are taken on
    8-bit frames before encoding. The total is the share of all query-key pairs that were computed,
    dense steps and layers included; the other densities are means over the sparse calls.
    """
    terminal.interrupted = "Interrupted; finished rows are kept."
    file = quality_file(Path(out))
    if limit_rows is None or limit_rows > 0:
        study = prepare_study(terminal, prompts_file, file, options)
        with file.held(make_folder=True):
            study.run_missing(
                list(configurations(studies or STUDIES)),
                limit=limit_rows,
                overwrite=options["overwrite"],
            )
    else:
        file.check_there("name one with --out, or leave --limit-rows out to measure")
    from vidsparse.apps.studies.quality_plots import draw_curve, draw_seconds

    for picture, draw in ((curve, draw_curve), (seconds, draw_seconds)):
        if picture is not None:
            draw(file.rows, Path(picture))
            terminal.show(picture)
    if table and not terminal.json:
        print_markdown(markdown_tables(file.rows))
    terminal.show(str(file.path))
    terminal.answer({"file": str(file.path), "rows": file.rows})
