"""What every command shares at the terminal: verbosity, exit codes and one-sentence errors.

Exit codes: 0 done; 1 a part failed or a defect; 2 the input cannot be used; 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from vidsparse.errors import VidsparseError
from vidsparse.logs import logger

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(slots=True)
class Terminal:
    """How one invocation talks to people; the click context's ``obj``.

    Args:
        verbose: how often ``-v`` was given; 2 shows tracebacks.
        quiet: print results only.
        interrupted: what to say after Ctrl-C.
    """

    verbose: int = 0
    quiet: bool = False
    interrupted: str = "Interrupted."

    def set_up_logging(self) -> None:
        """Send the library's log to standard error, as far as ``-v`` and ``-q`` ask for it."""
        level = logging.ERROR if self.quiet else logging.WARNING
        level = {0: level, 1: logging.INFO}.get(self.verbose, logging.DEBUG)
        logger.setLevel(level)
        if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
            logger.addHandler(_StderrHandler())

    def say(self, text: str) -> None:
        """A line for people, on standard error; silent with ``-q``."""
        if not self.quiet:
            click.echo(text, err=True)

    def warn(self, text: str) -> None:
        """A warning, on standard error; silent with ``-q``."""
        if not self.quiet:
            click.echo(f"{click.style('Warning:', fg='yellow')} {text}", err=True)


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to whatever ``sys.stderr`` is at that moment, so that tests can capture it."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def verbosity_options(function: Function) -> Function:
    """Add ``-v`` and ``-q`` to a command; they add up with those before the command's name."""

    def remember_verbose(ctx: click.Context, _: click.Parameter, value: int) -> None:
        terminal = ctx.ensure_object(Terminal)
        terminal.verbose += value
        terminal.set_up_logging()

    def remember_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        terminal = ctx.ensure_object(Terminal)
        terminal.quiet = terminal.quiet or value
        terminal.set_up_logging()

    function = click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        callback=remember_quiet,
        help="Print results only.",
    )(function)
    return click.option(
        "-v",
        "--verbose",
        count=True,
        expose_value=False,
        callback=remember_verbose,
        help="Say more; -vv shows tracebacks.",
    )(function)


def run(terminal: Terminal, body: Callable[[], object]) -> int:
    """Run a command's body and turn whatever it raises into one sentence and an exit code."""
    try:
        code = body()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo(f"\n{terminal.interrupted}", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        return _complain(terminal, _with_hint(error), BAD_INPUT)
    except VidsparseError as error:
        return _complain(terminal, str(error), BAD_INPUT)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        hint = "" if terminal.verbose >= 2 else " Hint: run with -vv for the traceback."
        return _complain(terminal, f"{message}.{hint}" if hint else message, FAILED)
    return code if isinstance(code, int) else 0


def _complain(terminal: Terminal, message: str, code: int) -> int:
    if terminal.verbose >= 2:
        traceback.print_exc()
    click.echo(f"{click.style('Error:', fg='red', bold=True)} {message}", err=True)
    return code


def _with_hint(error: click.ClickException) -> str:
    message = " ".join(error.format_message().split())
    if "Hint:" in message or not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    return f"{message} Hint: {error.ctx.command_path} --help shows what can be given."
