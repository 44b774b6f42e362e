"""``vidsparse bench quality``: how tiles, merging and token orders trade quality for density."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vidsparse.apps.console import Session, verbosity_options
from vidsparse.apps.quality_rows import markdown_tables, quality_file
from vidsparse.apps.quality_studies import STUDIES, configurations
from vidsparse.apps.quality_study import prepare_study, study_options


@click.command(
    epilog="""\b
Examples:
  vidsparse bench quality --device cuda --batch 24 --size 256x256 --frames 33
  vidsparse bench quality --device cuda --batch 24 --size 384x384 --frames 49
  vidsparse bench quality --study orders --prompts 4 --limit-rows 3        a quick look on a CPU
  vidsparse bench quality --limit-rows 0 --curve curve.png --table          show what is there

\b
The file holds one row a line and is written after every row; a rerun measures only what is missing.
"""
)
@study_options
@click.option(
    "--study", "studies", multiple=True, type=click.Choice(STUDIES), help="[default: all of them]"
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
@click.option("--curve", metavar="PNG", help="Also draw PSNR against density.")
@click.option("--table", is_flag=True, help="Also print the file's rows as Markdown tables.")
@verbosity_options
@click.pass_obj
def quality(
    session: Session,
    /,
    prompts_file: str | None,
    studies: tuple[str, ...],
    limit_rows: int | None,
    out: str,
    curve: str | None,
    table: bool,
    **options: Any,
) -> None:
    """Sweep tile sizes, merging and token orders, each against dense videos of the same seeds.

    Without PROMPTS.txt the bundled model's 24 held-out prompts are used. PSNR and SSIM are taken on
    8-bit frames before encoding; densities are means over the sparse steps.
    """
    session.interrupted = "Interrupted; finished rows are kept."
    file = quality_file(Path(out))
    if limit_rows is None or limit_rows > 0:
        study = prepare_study(session, prompts_file, file, options)
        study.run_missing(
            list(configurations(studies or STUDIES)),
            limit=limit_rows,
            overwrite=options["overwrite"],
        )
    if curve is not None:
        from vidsparse.apps.quality_curve import draw_curve

        draw_curve(file.rows, Path(curve))
        click.echo(curve)
    if table:
        click.echo(markdown_tables(file.rows))
    click.echo(file.path)
