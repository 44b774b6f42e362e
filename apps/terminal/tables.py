"""Rich's tables for what commands print, and the paragraphs between them.

A terminal gets tables that fit its width; a file or a pipe gets every line whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

INDENT: Final = 2
_PARAGRAPH: Final = 96
_WHOLE_LINES: Final = 10_000


def print_pairs(pairs: Iterable[tuple[str, ...]], *, indent: int = 0, first: int = 0) -> None:
    """Print rows of text in columns without titles.

    Args:
        pairs: their cells.
        indent: spaces before each line.
        first: characters that the first column has at least, to match another table's.
    """
    from rich.padding import Padding
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    rows = list(pairs)
    for place in range(max(map(len, rows), default=0)):
        table.add_column(min_width=first if place == 0 else None, overflow="fold")
    for row in rows:
        table.add_row(*map(_plain, row))
    _console().print(Padding(table, (0, 0, 0, indent), expand=False))


def print_paragraph(text: str, *, indent: int = INDENT) -> None:
    """Print text, each line of it indented."""
    from rich.padding import Padding

    console = _console()
    console.width = min(console.width, _PARAGRAPH)
    console.print(Padding(_plain(text), (0, 0, 0, indent), expand=False))


@contextmanager
def growing_table(columns: Sequence[str]) -> Iterator[Callable[[Sequence[str]], None]]:
    """A table to which the value of the block adds rows.

    A terminal shows it as it grows, a file or a pipe gets it at the end, whatever ends it.
    """
    from rich.live import Live

    table = _titled(columns)
    # drawn again for each row and not by a thread: what is timed meanwhile has the machine alone.
    with Live(table, console=_console(), auto_refresh=False, vertical_overflow="visible") as live:

        def add(row: Sequence[str]) -> None:
            table.add_row(*map(_plain, row))
            live.refresh()

        yield add


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with titles."""
    table = _titled(columns)
    for row in rows:
        table.add_row(*map(_plain, row))
    _console().print(table)


def _titled(columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in columns:
        table.add_column(_plain(title), overflow="fold")
    return table


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WHOLE_LINES
    return console


def _plain(text: str) -> Text:
    """Text as it is: square brackets in it are no markup."""
    from rich.text import Text

    return Text(text)
