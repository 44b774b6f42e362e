"""``vidsparse bench calls``: whole attention calls of methods, in time and in error."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from vidsparse.apps.bench.calls import CASES, COLUMNS, CallRow, calls_file, measure_calls_of
from vidsparse.apps.bench.inputs import inputs_of
from vidsparse.apps.bench.machine import device_and_dtype, device_line, header
from vidsparse.apps.bench.shown import show_all, show_file
from vidsparse.apps.bench.targets import filled_anew
from vidsparse.apps.terminal.bench_options import (
    data_options,
    device_option,
    length_option,
    measuring_options,
    tensor_options,
)
from vidsparse.apps.terminal.console import Terminal, verbosity_options


@click.command(
    epilog="""\b
Examples:
  vidsparse bench calls --device cpu --seq-len 2304 --heads 4 --head-dim 64
  vidsparse bench calls --device cuda --json rows.json
  vidsparse bench calls --device cuda --case "foresight share=0.1" --case "fg-attn top_p=0.5"
  vidsparse bench calls --device cpu --data shapes --case "fg-attn top_p=0.8"
  vidsparse bench calls --show docs/benchmarks/calls-h200.json
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
    help="A method and its options; repeat for several.  [default: a sweep of the methods]",
)
@data_options
@measuring_options(repeats=3)
@verbosity_options
@click.pass_obj
def bench_calls(
    terminal: Terminal,
    /,
    device: str,
    seq_len: int,
    heads: int,
    head_dim: int,
    dtype: str | None,
    cases: tuple[str, ...],
    repeats: int,
    json_path: str | None,
    overwrite: bool,
    show: str | None,
    **options: Any,
) -> None:
    """Time whole attention calls, order and mask and plan included, and say what they err by.

    q, k and v are structured like a video's: functions of a token's place with noise; or, with
    --data, those of a model's own run. The error is relative to dense attention, so that methods
    can be compared at equal time.
    """
    if show is not None:
        shown = calls_file(Path(show))
        show_file(terminal, shown, shown.typed(CallRow), COLUMNS)
        return
    where, kind = device_and_dtype(device, dtype)
    terminal.show(device_line(where, kind))
    about = header(where)
    with filled_anew(json_path, calls_file, CallRow, about, overwrite=overwrite) as file:
        data = inputs_of(options, seq_len, heads, head_dim, kind, where, terminal.say)
        rows = measure_calls_of(cases or CASES, data, repeats, terminal.say)
        show_all(terminal, rows, COLUMNS, about)
        if file is not None:
            file.add(*map(asdict, rows))
