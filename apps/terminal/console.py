"""What every command shares at the terminal: verbosity, exit codes and one-sentence errors.

Exit codes: 0 done; 1 a part failed or a defect; 2 the input cannot be used, or results cannot be
printed; 130 interrupted by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from vidsparse.errors import VidsparseError
from vidsparse.logs import logger
from vidsparse.pipelines.quiet import quiet_imports

FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 1, 2, 130, 143

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(slots=True)
class Terminal:
    """How one invocation talks to people; the click context's ``obj``.

    Args:
        verbose: how often ``-v`` was given; 2 shows tracebacks.
        quiet: print results only.
        interrupted: what to say after Ctrl-C; nothing where somebody else says it.
        ending: whether Ctrl-C or SIGTERM came.
        terminated: whether SIGTERM came.
        json: print the command's answer as one JSON document and no other result.
    """

    verbose: int = 0
    quiet: bool = False
    interrupted: str = "Interrupted."
    ending: bool = False
    terminated: bool = False
    json: bool = False

    def set_up_logging(self) -> None:
        """Send the library's log to standard error, as far as ``-v`` and ``-q`` ask for it."""
        level = logging.ERROR if self.quiet else logging.WARNING
        level = {0: level, 1: logging.INFO}.get(self.verbose, logging.DEBUG)
        logger.setLevel(level)
        if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
            logger.addHandler(_StderrHandler())
        if level > logging.DEBUG:
            quiet_imports()

    def say(self, text: str) -> None:
        """A line for people, on standard error; silent with ``-q``."""
        if not self.quiet:
            self.put(text, err=True)

    def show(self, text: str) -> None:
        """A line of results, on standard output. Where nobody can read it, work goes on."""
        if not self.json:
            self.put(text, err=False)

    def answer(self, value: Any) -> None:
        """The command's answer as one line of JSON, where ``--json`` asks for it."""
        if self.json:
            # numpy comes with it, which help does not wait for.
            from vidsparse.files import finite_json

            text = json.dumps(finite_json(value), ensure_ascii=False, allow_nan=False)
            self.put(text, err=False)

    def complain(self, text: str) -> None:
        """An error, on standard error."""
        self.put(f"{click.style('Error:', fg='red', bold=True)} {text}", err=True)

    def warn(self, text: str) -> None:
        """A warning, on standard error; silent with ``-q``."""
        if not self.quiet:
            self.put(f"{click.style('Warning:', fg='yellow')} {text}", err=True)

    def put(self, text: str, *, err: bool) -> None:
        """Print, and go on where that fails."""
        stream = sys.stderr if err else sys.stdout
        try:
            click.echo(text, err=err)
        except (OSError, ValueError) as error:
            _drop(stream)
            if not err:
                self.say(f"Standard output cannot be written to ({_why(error)}); work goes on.")


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


def answer_in_json(context: click.Context) -> None:
    """Let the command print its answer as JSON, and nothing beside it."""
    terminal = context.ensure_object(Terminal)
    terminal.json = terminal.quiet = True
    terminal.set_up_logging()


def json_option(function: Function) -> Function:
    """Add ``--json`` to a command, which then gives ``Terminal.answer`` what it would print."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            answer_in_json(ctx)

    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Print the answer as one line of JSON, for scripts.",
    )(function)


def run(terminal: Terminal, body: Callable[[], object]) -> int:
    """Run a command's body and turn whatever it raises into one sentence and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        # a letter that the terminal does not know is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with _endable(terminal):
        code = _run(terminal, body)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as error:
        return _cannot_print(terminal, error)
    return code


def _run(terminal: Terminal, body: Callable[[], object]) -> int:
    try:
        code = body()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _interrupted(terminal)
    except Exception as error:
        # libraries make errors of their own of an interrupt: files that cannot be read, say.
        if terminal.ending:
            logger.info("while the command was ended: %s", error)
            return _interrupted(terminal)
        return _failed(terminal, error)
    return code if isinstance(code, int) else 0


def _interrupted(terminal: Terminal) -> int:
    # even with -q: it is why nothing more comes.
    if terminal.interrupted:
        terminal.put(f"\n{terminal.interrupted}", err=True)
    return TERMINATED if terminal.terminated else INTERRUPTED


def _failed(terminal: Terminal, error: Exception) -> int:
    if isinstance(error, click.ClickException):
        return _complain(terminal, _with_hint(error), BAD_INPUT)
    if isinstance(error, VidsparseError):
        return _complain(terminal, str(error), BAD_INPUT)
    if isinstance(error, OSError) and _while_printing(error):
        return _cannot_print(terminal, error)
    message = " ".join(f"{type(error).__name__}: {error}".split())
    hint = "" if terminal.verbose >= 2 else " Hint: run with -vv for the traceback."
    return _complain(terminal, f"{message}.{hint}" if hint else message, FAILED)


@contextmanager
def _endable(terminal: Terminal) -> Iterator[None]:
    """Note that Ctrl-C came, and let SIGTERM do the same; a second SIGTERM ends the process."""
    came = signal.SIGINT

    def end(signum: int, _: object) -> None:
        nonlocal came
        came = signal.Signals(signum)
        terminal.ending = True
        if signum == signal.SIGTERM:
            signal.signal(signum, signal.SIG_DFL)
            terminal.terminated = True
        raise KeyboardInterrupt

    def unraisable(ignored: sys.UnraisableHookArgs) -> None:
        """Interrupt once more where Python has dropped it, since it came while an object went."""
        # who asks twice at once, as `timeout` does, has the second come while the first is handled.
        if terminal.ending and _came_too_late(ignored.exc_value):
            return
        dropped = isinstance(ignored.exc_value, KeyboardInterrupt) and came in ours
        if not dropped or not hasattr(signal, "pthread_kill"):
            reported(ignored)
            return
        signal.signal(came, end)
        # in here it would be dropped again. a signal of the thread's own ends its waiting, too.
        again = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), came))
        again.daemon = True
        again.start()

    usual: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    # whoever started us may have them ignored, or handle them.
    ours = {signum: how for signum, how in usual.items() if signal.getsignal(signum) is how}
    if threading.current_thread() is not threading.main_thread():
        ours = {}
    for signum in ours:
        signal.signal(signum, end)
    reported, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        yield
    finally:
        sys.unraisablehook = reported
        for signum, how in ours.items():
            signal.signal(signum, how)


def _came_too_late(error: BaseException | None) -> bool:
    """Whether Python says of a signal that nobody handled it any more."""
    return isinstance(error, OSError) and "ignored due to race condition" in str(error)


def _while_printing(error: OSError) -> bool:
    """Whether ``error`` came of printing, which click and rich do for us."""
    # a stream that failed forgets what it could not write: asking it tells nothing.
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not {"click", "rich"}.isdisjoint(Path(frames[-1].filename).parts)


def _drop(stream: Any) -> None:
    """Let all that ``stream`` is yet given go nowhere; Python would complain again at its end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _cannot_print(terminal: Terminal, error: Exception) -> int:
    _drop(sys.stdout)
    return _complain(terminal, f"standard output cannot be written to: {_why(error)}.", BAD_INPUT)


def _complain(terminal: Terminal, message: str, code: int) -> int:
    if terminal.verbose >= 2:
        traceback.print_exc()
    terminal.complain(message)
    return code


def _with_hint(error: click.ClickException) -> str:
    message = " ".join(error.format_message().split())
    if "Hint:" in message or not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    return f"{message} Hint: {error.ctx.command_path} --help shows what can be given."
