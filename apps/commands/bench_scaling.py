"""``vidsparse bench scaling``: what rows of few GPUs say of more, and of longer clips."""

from __future__ import annotations

from pathlib import Path

import click

from vidsparse.apps.bench.gpus_cost import Hosts, fit
from vidsparse.apps.bench.gpus_rows import GpusRow, gpus_file
from vidsparse.apps.bench.gpus_scaling import COLUMNS, scaling_rows
from vidsparse.apps.bench.shown import show_file
from vidsparse.apps.terminal.console import Terminal, json_option, verbosity_options
from vidsparse.apps.terminal.options import FiniteRange


@click.command(
    epilog="""\b
Examples:
  vidsparse bench scaling rows.json
  vidsparse bench scaling rows.json --on 8 --on 2x8 --between 50 --seconds 10
"""
)
@click.argument("file", metavar="ROWS.json", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--fit-up-to",
    "most",
    default=2,
    show_default=True,
    type=click.IntRange(min=2, max=1024),
    metavar="N",
    help="Fit on rows of at most N GPUs, and hold the others against what that predicts.",
)
@click.option(
    "--on",
    "asked",
    multiple=True,
    default=("4", "8"),
    show_default=True,
    metavar="N|MxN",
    help="Predict N GPUs, or M machines of N each; repeat for several.",
)
@click.option(
    "--between",
    type=FiniteRange(0.001, 100_000),
    metavar="GB/S",
    help="What a GPU gives to another machine, in 10^9 bytes a second. No row says it.",
)
@click.option(
    "--seconds",
    type=FiniteRange(0.1, 100_000),
    help="Also predict clips of this length, at the model's own rate.",
)
@json_option
@verbosity_options
@click.pass_obj
def bench_scaling(
    terminal: Terminal,
    /,
    file: str,
    most: int,
    asked: tuple[str, ...],
    between: float | None,
    seconds: float | None,
) -> None:
    """Predict steps on more GPUs, and of longer clips, from rows of `bench gpus`.

    A cost model of kernel, mask, exchange and rest is fitted on one GPU and few; rows of more say
    what it is off by. docs/multi-gpu.md says what it assumes.
    """
    hosts = [Hosts.parse(text) for text in dict.fromkeys(asked)]
    measured = gpus_file(Path(file))
    rows = measured.typed(GpusRow)
    model = fit(rows, most)
    links = model.links
    terminal.say(
        f"Fitted on rows of at most {most} GPUs: an exchange takes {links.ms_per_mb:.4g} ms for "
        f"each MB that a GPU gives, and {links.ms_per_call:.4g} ms for each attention call."
    )
    found = scaling_rows(model, rows, most, hosts, seconds=seconds, between=between)
    show_file(terminal, measured, list(found), COLUMNS)
