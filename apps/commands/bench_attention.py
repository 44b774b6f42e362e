"""``vidsparse bench attention``: sparse against dense attention, checked before it is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from vidsparse.apps.bench.attention import AttentionBench, measure_cases
from vidsparse.apps.bench.attention_cases import DENSE, KERNEL, SUITE, WHOLE, WITH_PLAN, Case
from vidsparse.apps.bench.attention_rows import COLUMNS, AttentionRow, attention_file
from vidsparse.apps.bench.inputs import inputs_of
from vidsparse.apps.bench.machine import device_and_dtype, device_line, header
from vidsparse.apps.bench.shown import show_file, shown_rows
from vidsparse.apps.bench.targets import filled_anew
from vidsparse.apps.results.figures import FigurePath
from vidsparse.apps.terminal.bench_options import (
    TOKENS,
    data_options,
    device_option,
    measuring_options,
    tensor_options,
)
from vidsparse.apps.terminal.console import Terminal, verbosity_options
from vidsparse.apps.terminal.options import FiniteRange
from vidsparse.errors import OptionError, listed


def _parse_tiles(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> Any:
    from vidsparse.masks import parse_tile

    return [parse_tile(text) for text in value]


@click.command(
    epilog="""\b
Examples:
  vidsparse bench attention --device cpu
  vidsparse bench attention --device cuda --seq-len 32768 --heads 16 --head-dim 128
  vidsparse bench attention --device cuda --suite --json rows.json
  vidsparse bench attention --device cpu --data shapes --kept 0.3
  vidsparse bench attention --show docs/benchmarks/attention-h200.json --against cudnn
"""
)
@device_option
@click.option(
    "--suite", is_flag=True, help="The standard cases instead of those given by the options below."
)
@click.option(
    "--seq-len",
    "seq_lens",
    multiple=True,
    default=(8192,),
    show_default=True,
    type=TOKENS,
    help="Tokens; repeat for several.",
)
@tensor_options(heads=4, head_dim=64)
@click.option(
    "--tile",
    "tiles",
    multiple=True,
    default=("128x16",),
    show_default=True,
    metavar="MxN",
    callback=_parse_tiles,
    help="Query rows x keys of a tile; repeat for several.",
)
@click.option(
    "--kept",
    multiple=True,
    default=(0.1, 0.3, 0.5, 1.0),
    show_default=True,
    type=FiniteRange(0, 1, min_open=True),
    help="Share of key chunks in the lists; repeat for several.",
)
@click.option(
    "--skew",
    default=0.0,
    show_default=True,
    type=FiniteRange(0, 1),
    help="How unequal lists are: lengths from kept x (1 - skew) to kept x (1 + skew).",
)
@click.option(
    "--counts",
    type=click.Choice((KERNEL, WITH_PLAN, WHOLE, DENSE)),
    default=WHOLE,
    show_default=True,
    help="What the ratio counts; the dense kernel has no lists, and --kept and --tile do nothing.",
)
@click.option(
    "--implementation",
    "implementations",
    multiple=True,
    help="Kernel to time; repeat for several.  [default: auto]",
)
@click.option("--peers", is_flag=True, help="Also time other sparse kernels that are installed.")
@data_options
@measuring_options(repeats=7)
@click.option(
    "--against",
    metavar="NAME",
    help="With --show: only rows against this dense implementation.",
)
@click.option("--plot", type=FigurePath(), metavar="PNG", help="Also draw the rows.")
@verbosity_options
@click.pass_obj
def bench_attention(
    terminal: Terminal,
    /,
    device: str,
    suite: bool,
    seq_lens: tuple[int, ...],
    heads: int,
    head_dim: int,
    dtype: str | None,
    tiles: list[tuple[int, int]],
    kept: tuple[float, ...],
    skew: float,
    counts: str,
    implementations: tuple[str, ...],
    peers: bool,
    repeats: int,
    json_path: str | None,
    overwrite: bool,
    show: str | None,
    against: str | None,
    plot: str | None,
    **options: Any,
) -> None:
    """Time sparse attention against dense, after checking its output.

    Random q, k, v and random lists: with 128-row tiles the share computed is the share kept. With
    --data both are a model's: a call of its own run, and the tiles that weigh most in it. Every
    ratio is between medians of one run.
    """
    if show is not None:
        shown = attention_file(Path(show))
        rows = shown.typed(AttentionRow)
        if against is not None:
            dense = sorted({row.dense_impl for row in rows})
            rows = [row for row in rows if row.dense_impl == against]
            if not rows:
                raise OptionError(
                    f"{show} has no rows against {against!r}. Hint: choose from {listed(dense)}."
                )
        show_file(terminal, shown, rows, COLUMNS)
    else:
        if against is not None:
            raise OptionError(
                "--against chooses among the rows of a file. Hint: measure with --json FILE, then "
                "--show FILE."
            )
        where, kind = device_and_dtype(device, dtype)
        terminal.show(device_line(where, kind))
        if suite and options["data"] is not None:
            raise OptionError("the suite has shapes of its own. Hint: leave --data out.")
        about = header(where)
        with filled_anew(
            json_path, attention_file, AttentionRow, about, overwrite=overwrite
        ) as file:
            data = None
            if options["data"] is not None:
                data = inputs_of(options, 0, 0, 0, kind, where, terminal.say)
                tokens, heads, head_dim = data.shape
                seq_lens = (tokens,)
            cases: Sequence[Case] = [
                Case(
                    tile=tile,
                    kept=share,
                    seq_len=seq_len,
                    heads=heads,
                    head_dim=head_dim,
                    skew=skew,
                    counts=counts,
                    merge="xor-window",
                    implementations=implementations,
                )
                for seq_len in seq_lens
                for tile in (tiles if counts != DENSE else [(128, 128)])
                for share in (kept if counts != DENSE else (1.0,))
            ]
            if suite:
                cases = [
                    replace(case, implementations=case.implementations or implementations)
                    for case in SUITE
                ]
            bench = AttentionBench(where, kind, repeats, peers, terminal.say, data)
            with shown_rows(terminal, COLUMNS, about) as show_row:
                rows = measure_cases(bench, cases, show_row, file)
    if plot is not None:
        from vidsparse.apps.bench.attention_plot import draw_ratios

        draw_ratios(rows, Path(plot))
        terminal.show(plot)
