"""Command line options shared by benchmarks of single calls: tensors, device, and where rows go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import click

from vidsparse.apps.terminal.console import answer_in_json
from vidsparse.apps.terminal.options import pixel_size

Command = Callable[..., None]
Decorator = Callable[[Command], Command]

_ANSWER: Final = "-"


def _all_of(*options: Decorator) -> Decorator:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def tensor_options(*, heads: int, head_dim: int) -> Decorator:
    """``--heads``, ``--head-dim`` and ``--dtype``, with a benchmark's own defaults."""
    return _all_of(
        click.option(
            "--heads",
            default=heads,
            show_default=True,
            type=click.IntRange(min=1),
            help="Attention heads.",
        ),
        click.option(
            "--head-dim",
            default=head_dim,
            show_default=True,
            type=click.IntRange(min=8),
            help="Channels of a head.",
        ),
        click.option("--dtype", default=None, help="fp32 (default on a CPU), bf16 or fp16."),
    )


def device_option(command: Command) -> Command:
    """``--device``, the CPU by default."""
    option = click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
    return option(command)


def length_option(command: Command) -> Command:
    """``--seq-len``, Wan's at 1280x720 and 81 frames by default."""
    option = click.option(
        "--seq-len", default=75_600, show_default=True, type=click.IntRange(min=128), help="Tokens."
    )
    return option(command)


def data_options(command: Command) -> Command:
    """``--data`` and what a model's run is to be."""
    options = _all_of(
        click.option(
            "--data",
            metavar="MODEL",
            help="Calls of a dense run of this model (a bundled one, a folder or a hub id) instead "
            "of made-up ones; it says their shape.",
        ),
        click.option(
            "--size", type=pixel_size, metavar="WIDTHxHEIGHT", help="Of that run's video."
        ),
        click.option("--frames", type=int, metavar="N", help="Of that run's video."),
        click.option("--steps", type=int, metavar="N", help="Of that run."),
    )
    return options(command)


def measuring_options(*, repeats: int) -> Decorator:
    """``--repeats``, ``--json`` and ``--show``."""
    return _all_of(
        click.option(
            "--repeats",
            default=repeats,
            show_default=True,
            type=click.IntRange(min=1),
            help="Times that each call is measured, in turns with the others; medians count.",
        ),
        json_rows_option("Also write rows into FILE"),
        click.option(
            "--show",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Measure nothing: print the rows of FILE; Markdown, where that is not a terminal.",
        ),
    )


def json_rows_option(into_file: str) -> Decorator:
    """``--json FILE``, a file for the rows; without FILE the command's answer is JSON.

    Args:
        into_file: what is done with FILE, for the help.
    """

    def remember(ctx: click.Context, _: click.Parameter, value: str | None) -> str | None:
        if value == _ANSWER:
            answer_in_json(ctx)
            return None
        return value

    return click.option(
        "--json",
        "json_path",
        is_flag=False,
        flag_value=_ANSWER,
        type=click.Path(dir_okay=False, allow_dash=True),
        metavar="[FILE]",
        callback=remember,
        help=f"{into_file}; without FILE, print the answer as one line of JSON, for scripts.",
    )
