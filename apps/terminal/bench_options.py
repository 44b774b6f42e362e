"""Command line options shared by benchmarks of single calls: tensors, device, and where rows go."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import click

from vidsparse.apps.terminal.console import answer_in_json
from vidsparse.apps.terminal.options import FiniteRange, pixel_size
from vidsparse.errors import OptionError, listed

Command = Callable[..., int | None]
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
            type=click.IntRange(min=1, max=1024),
            help="Attention heads.",
        ),
        click.option(
            "--head-dim",
            default=head_dim,
            show_default=True,
            type=click.IntRange(min=8, max=1024),
            help="Channels of a head.",
        ),
        click.option("--dtype", default=None, help="fp32 (default on a CPU), bf16 or fp16."),
    )


def device_option(command: Command) -> Command:
    """``--device``, the CPU by default."""
    option = click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
    return option(command)


TOKENS: Final = click.IntRange(min=128, max=100_000_000)


def length_option(command: Command) -> Command:
    """``--seq-len``, Wan's at 1280x720 and 81 frames by default."""
    option = click.option(
        "--seq-len", default=75_600, show_default=True, type=TOKENS, help="Tokens."
    )
    return option(command)


def _refuses_a_run_of_no_model(command: Command) -> Command:
    @wraps(command)
    def run(*arguments: Any, **options: Any) -> int | None:
        given = [f"--{name}" for name in ("size", "frames", "steps") if options[name] is not None]
        if given and options["data"] is None:
            raise OptionError(
                f"{listed(given)} {'is' if len(given) == 1 else 'are'} for a model's run, and none "
                "was asked for. Hint: add --data shapes, or --seq-len for made-up calls."
            )
        return command(*arguments, **options)

    return run


def data_options(command: Command) -> Command:
    """``--data`` and what a model's run is to be, which is refused where there is no model."""
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
    return options(_refuses_a_run_of_no_model(command))


def _says_what_does_not_fit(command: Command) -> Command:
    @wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        # it loads torch, which help does not wait for.
        from vidsparse.pipelines.models import memory_hint

        with memory_hint("these tensors", "try fewer tokens or heads", offloads=False):
            command(*arguments, **options)

    return run


def _overwrites_a_file(command: Command) -> Command:
    @wraps(command)
    def run(*arguments: Any, **options: Any) -> int | None:
        if options["overwrite"] and options["json_path"] is None:
            raise OptionError(
                "--overwrite was given without a file of rows to replace. "
                "Hint: add --json rows.json."
            )
        return command(*arguments, **options)

    return run


def model_run_options(command: Command) -> Command:
    """``--size`` to ``--steps``: a published model's video, and the run that steps come to."""
    decorate = _all_of(
        click.option(
            "--size",
            metavar="WIDTHxHEIGHT",
            callback=lambda context, parameter, value: None if value is None else pixel_size(value),
            help="Pixels.  [default: as published]",
        ),
        click.option(
            "--frames",
            type=click.IntRange(min=1, max=100_000),
            help="Video frames.  [default: as published]",
        ),
        click.option(
            "--layers",
            type=click.IntRange(min=1, max=1000),
            help="Fewer transformer layers, where memory or time asks for it.  [default: all]",
        ),
        click.option(
            "--computed",
            type=FiniteRange(0, 1, min_open=True),
            help="Density that sparse steps compute.  [default: the model's own, or a speed's]",
        ),
        click.option(
            "--warmup",
            type=FiniteRange(0, 1),
            help="Share of steps that stay dense.  [default: the model's own, or a speed's]",
        ),
        click.option(
            "--steps",
            default=50,
            show_default=True,
            type=click.IntRange(min=1, max=100_000),
            help="Steps of the run that ratios are projected to.",
        ),
    )
    return decorate(command)


def measuring_options(*, repeats: int) -> Decorator:
    """``--repeats``, ``--json``, ``--overwrite`` and ``--show``.

    Memory that runs out is said in a sentence, and so is ``--overwrite`` without a file.
    """
    return _all_of(
        _says_what_does_not_fit,
        _overwrites_a_file,
        click.option(
            "--repeats",
            default=repeats,
            show_default=True,
            type=click.IntRange(min=1, max=100_000),
            help="Times that each call is measured, in turns with the others; medians count.",
        ),
        json_rows_option(
            "Also write rows into FILE, which has none yet unless --overwrite is given"
        ),
        click.option(
            "--overwrite", is_flag=True, help="Replace the rows that are in the FILE of --json."
        ),
        click.option(
            "--show",
            type=click.Path(exists=True, dir_okay=False),
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
