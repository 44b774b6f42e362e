"""``vidsparse bench gates``: what skipping products with V costs and saves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from vidsparse.apps.bench.gates import CASES, COLUMNS, GateRow, gates_file, measure_gates
from vidsparse.apps.bench.machine import device_and_dtype, device_line, header
from vidsparse.apps.bench.shown import show_file, shown_rows
from vidsparse.apps.bench.targets import filled_anew
from vidsparse.apps.terminal.bench_options import (
    device_option,
    length_option,
    measuring_options,
    tensor_options,
)
from vidsparse.apps.terminal.console import Terminal, verbosity_options
from vidsparse.route import check_implementation


@click.command(
    epilog="""\b
Examples:
  vidsparse bench gates --device cpu --seq-len 2304 --heads 4 --head-dim 64
  vidsparse bench gates --device cuda --json rows.json
  vidsparse bench gates --device cuda --case "spargeattn tau=0.5 lambda_=-6" --case "bsfa keep=0.3"
  vidsparse bench gates --show docs/benchmarks/gates-h200.json
"""
)
@device_option
@length_option
@tensor_options(heads=8, head_dim=128)
@click.option(
    "--case",
    "cases",
    multiple=True,
    metavar="'METHOD OPTION=VALUE ...'",
    help="A method with a gate and its options; repeat for several.  [default: a choice of them]",
)
@click.option(
    "--implementation",
    default="auto",
    show_default=True,
    help="Kernel to run; never replaced by another.",
)
@measuring_options(repeats=3)
@verbosity_options
@click.pass_obj
def bench_gates(
    terminal: Terminal,
    /,
    device: str,
    seq_len: int,
    heads: int,
    head_dim: int,
    dtype: str | None,
    cases: tuple[str, ...],
    implementation: str,
    repeats: int,
    json_path: str | None,
    overwrite: bool,
    show: str | None,
) -> None:
    """Time a kernel with its gate and without on the same lists, after checking the gated output.

    q, k and v are structured like a video's, in Hilbert order. A gate whose numbers a case leaves
    open (spargeattn without lambda_, bsfa) is calibrated on other calls of the same kind.
    """
    if show is not None:
        shown = gates_file(Path(show))
        show_file(terminal, shown, shown.typed(GateRow), COLUMNS)
        return
    where, kind = device_and_dtype(device, dtype)
    check_implementation(implementation)
    terminal.show(device_line(where, kind))
    about = header(where)
    with (
        filled_anew(json_path, gates_file, GateRow, about, overwrite=overwrite) as file,
        shown_rows(terminal, COLUMNS, about) as show_row,
    ):
        measured = measure_gates(
            cases or CASES,
            seq_len,
            heads,
            head_dim,
            kind,
            where,
            repeats,
            implementation,
            terminal.say,
        )
        for row in measured:
            show_row(row)
            if file is not None:
                file.add(asdict(row))
