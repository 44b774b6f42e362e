"""Progress at the terminal: one bar per video while it is made, nothing where nobody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vidsparse.apps.terminal.console import Terminal

if TYPE_CHECKING:
    from rich.progress import Progress

StepCallback = Callable[[int, int, Any], None]


@contextmanager
def step_bar(terminal: Terminal, label: str, compiles: bool = False) -> Iterator[StepCallback]:
    """Show a bar for one denoising run; the value is the callback ``(step, steps, latency)``.

    ``step`` counts finished steps from 1. The bar is gone when the block ends, and absent with
    ``-q`` or where standard error is no terminal. It says when the model is compiled, if it
    ``compiles``: a step that takes a minute for a second's work looks like one that hangs.
    """
    with _bar(terminal, "{task.fields[phase]}") as progress:
        phase = "preparing"
        task = progress.add_task(label, total=None, phase=phase)

        def advance(step: int, steps: int, _: Any = None) -> None:
            nonlocal phase
            phase = f"step {step}/{steps}" if step < steps else "decoding"
            progress.update(task, total=steps, completed=step, phase=phase)

        def tell(running: bool) -> None:
            progress.update(task, phase=f"{phase}, compiling" if running else phase)

        with _watched(tell) if compiles else nullcontext():
            yield advance


def _watched(tell: Callable[[bool], None]) -> AbstractContextManager[object]:
    from vidsparse.pipelines.compilation import compilations

    return compilations(tell)


@contextmanager
def plain_bar(terminal: Terminal, label: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for anything that counts; the value is the callback ``(what, done, total)``.

    Without a word for ``what`` only every hundredth call is shown.
    """
    with _bar(terminal, "{task.percentage:>3.0f}%") as progress:
        task = progress.add_task(label, total=None)

        def advance(what: str, done: int, total: int) -> None:
            # drawing is slower than what may be counted.
            if what or done % 100 == 0 or done == total:
                text = f"{label}: {what}" if what else label
                progress.update(task, description=text, total=total, completed=done)

        yield advance


def _bar(terminal: Terminal, figures: str) -> Progress:
    """A bar with a label before it and ``figures`` behind, a pattern of Rich's."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(
        # a prompt may hold square brackets: they are text here, not markup.
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn(figures),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        disable=terminal.quiet or not console.is_terminal,
    )


def short(text: str, width: int = 44) -> str:
    """A prompt cut to fit before a bar."""
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."
