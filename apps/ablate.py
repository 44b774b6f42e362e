"""``vidsparse ablate``: the papers' ablations on `shapes`, one table each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from vidsparse.apps.ablation_tables import tables
from vidsparse.apps.call_ablations import CALL_ABLATIONS, Calls
from vidsparse.apps.console import Session, verbosity_options
from vidsparse.apps.marked_page import fill_page
from vidsparse.apps.quality_rows import quality_file
from vidsparse.apps.quality_studies import ABLATIONS, configurations
from vidsparse.apps.quality_study import Study, prepare_study, study_options
from vidsparse.apps.row_file import Row, RowFile

STUDIED: Final = "shapes"
TRAINED: Final = (((256, 256), 33), ((384, 384), 49))
"""Sizes and frames that this model was trained at."""


@click.command(
    epilog="""\b
Examples:
  vidsparse ablate --device cuda --batch 24                     all of them, at both sizes
  vidsparse ablate --only judge --prompts 2 --size 256x256      one of them, a quick look on a CPU
  vidsparse ablate --limit-rows 0 --page docs/ablations.md --plots docs/benchmarks/ablations

\b
Both files are written after every row; a rerun measures only what is missing.
"""
)
@study_options
@click.option(
    "--only",
    multiple=True,
    type=click.Choice((*ABLATIONS, *CALL_ABLATIONS)),
    help="[default: all of them]",
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
@verbosity_options
@click.pass_obj
def ablate(
    session: Session,
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
    are taken from a dense run. Without PROMPTS.txt the 24 held-out prompts are used, and without a
    size both that this model was trained at. Methods that need calibration get it, on other
    prompts.
    """
    session.interrupted = "Interrupted; finished rows are kept."
    videos = quality_file(Path(out))
    single = RowFile(Path(calls), "vidsparse-ablations/1", "ablations")
    if limit_rows is None or limit_rows > 0:
        for size, frames in sizes_of(options):
            one = {**options, "size": size, "frames": frames}
            study = prepare_study(session, prompts_file, videos, one)
            study.run_missing(
                list(configurations(tuple(only or ABLATIONS))),
                limit=limit_rows,
                overwrite=overwrite,
            )
            for name in only or CALL_ABLATIONS:
                if name in CALL_ABLATIONS:
                    _measure_calls(session, study, name, single, overwrite)
    if plots is not None:
        from vidsparse.apps.ablation_plots import draw_ablations

        for path in draw_ablations(videos.rows, single.rows, Path(plots)):
            click.echo(path)
    written = tables(videos.rows, single.rows)
    if page is not None:
        fill_page(Path(page), written)
        click.echo(page)
    else:
        for name, table in written.items():
            click.echo(f"### {name}\n\n{table}\n")
    click.echo(out)
    click.echo(calls)


def sizes_of(options: Mapping[str, Any]) -> Sequence[tuple[tuple[int, int] | None, int | None]]:
    """Sizes and frames to study: those asked for, or both that `shapes` was trained at."""
    asked = options["size"], options["frames"]
    return TRAINED if options["model"] == STUDIED and asked == (None, None) else (asked,)


def _measure_calls(
    session: Session, study: Study, name: str, file: RowFile, overwrite: bool
) -> None:
    ablation = CALL_ABLATIONS[name]
    where: dict[str, Any] = {"ablation": name}
    if ablation.calls is not Calls.MADE_UP:
        where |= study.conditions()
    if ablation.calls is Calls.RECORDED:
        where["prompts"] = study.recorded_prompts

    def same(row: Row, case: str | None = None) -> bool:
        there = all(row.get(key) == value for key, value in where.items())
        return there and case in (None, row["case"])

    if file.find(same) is not None and not overwrite:
        session.say(f"{name} is there already.")
        return
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.header = study.header()
    # all or none: a part would be taken for the whole by the next run.
    for row in list(ablation.rows(study)):
        file.put({**where, "commit": study.commit, **row}, partial(same, case=row["case"]))
        session.say(f"{name}: {row['case']}")
