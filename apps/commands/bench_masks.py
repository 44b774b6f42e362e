"""``vidsparse bench masks``: what choosing the tiles costs, as a share of dense attention."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from vidsparse.apps.bench.inputs import inputs_of
from vidsparse.apps.bench.machine import device_and_dtype, device_line, header
from vidsparse.apps.bench.masks import CASES, COLUMNS, MaskRow, masks_file, measure_masks
from vidsparse.apps.bench.shown import show_all, show_file
from vidsparse.apps.bench.targets import filled_anew
from vidsparse.apps.terminal.bench_options import (
    TOKENS,
    data_options,
    device_option,
    measuring_options,
    tensor_options,
)
from vidsparse.apps.terminal.console import Terminal, verbosity_options
from vidsparse.errors import OptionError


@click.command(
    epilog="""\b
Examples:
  vidsparse bench masks --device cpu --seq-len 2304 --seq-len 7488 --heads 4 --head-dim 64
  vidsparse bench masks --device cuda --json rows.json
  vidsparse bench masks --device cpu --data shapes
  vidsparse bench masks --show docs/benchmarks/masks-h200.json
"""
)
@device_option
@click.option(
    "--seq-len",
    "lengths",
    multiple=True,
    default=(75_600,),
    show_default=True,
    type=TOKENS,
    help="Tokens; repeat for several.",
)
@tensor_options(heads=8, head_dim=128)
@click.option("--method", "names", multiple=True, help="Only this one; repeat for several.")
@data_options
@measuring_options(repeats=3)
@verbosity_options
@click.pass_obj
def bench_masks(
    terminal: Terminal,
    /,
    device: str,
    lengths: tuple[int, ...],
    heads: int,
    head_dim: int,
    dtype: str | None,
    names: tuple[str, ...],
    repeats: int,
    json_path: str | None,
    overwrite: bool,
    show: str | None,
    **options: Any,
) -> None:
    """Time the methods' masks beside dense attention, after checking them against torch.

    q and k are structured like a video's, in Hilbert order: masks of random ones keep everything.
    With --data they are those of a model's own run.
    """
    if show is not None:
        shown = masks_file(Path(show))
        show_file(terminal, shown, shown.typed(MaskRow), COLUMNS)
        return
    known = dict.fromkeys(name for name, _ in CASES)
    for name in names:
        if name not in known:
            raise OptionError(
                f"{name!r} has no mask to time. Hint: choose from {', '.join(known)}."
            )
    where, kind = device_and_dtype(device, dtype)
    terminal.show(device_line(where, kind))
    about = header(where)
    with filled_anew(json_path, masks_file, MaskRow, about, overwrite=overwrite) as file:
        rows: list[MaskRow] = []
        for tokens in lengths if options["data"] is None else lengths[:1]:
            data = inputs_of(options, tokens, heads, head_dim, kind, where, terminal.say)
            found = measure_masks(names or tuple(known), data, repeats, terminal.say)
            # those of a length are kept, whatever becomes of the next.
            if file is not None:
                file.add(*map(asdict, found))
            rows += found
        show_all(terminal, rows, COLUMNS, about)
