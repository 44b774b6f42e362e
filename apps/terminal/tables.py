"""Rich's tables for what commands print, and the paragraphs between them.

A terminal gets tables that fit its width; a file or a pipe gets every line whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

INDENT: Final = 2
_PARAGRAPH: Final = 96
_WHOLE_LINES: Final = 10_000
# what parts the cells of a Markdown table, which bars within a cell are not.
_CELLS: Final = re.compile(r"(?<!\\)\|")


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

    A terminal shows it as it grows, a file or a pipe gets it at the end, whatever ends it. Where a
    terminal is too narrow for the first row, every row is a paragraph, as by ``print_table``.
    """
    from rich.live import Live

    console, table = _console(), _titled(columns)
    fits: bool | None = None
    with ExitStack() as shown:
        live: Live | None = None

        def add(row: Sequence[str]) -> None:
            nonlocal fits, live
            table.add_row(*map(_plain, row))
            if fits is None:
                fits = _fit(table, console)
            if not fits:
                console.print(_paragraph_of(columns, row, console.width))
                return
            # a longer row than the first may fold; widths are those that all rows need.
            _fit(table, console)
            if live is None:
                # drawn again for each row and not by a thread: what is timed meanwhile has the
                # machine alone.
                live = Live(table, console=console, auto_refresh=False, vertical_overflow="visible")
                shown.enter_context(live)
            live.refresh()

        yield add


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with titles; a paragraph a row where words would be torn apart."""
    console, table, listed = _console(), _titled(columns), list(rows)
    for row in listed:
        table.add_row(*map(_plain, row))
    if _fit(table, console):
        console.print(table)
        return
    for row in listed:
        console.print(_paragraph_of(columns, row, console.width))


def print_markdown(text: str) -> None:
    """Print Markdown: as it is into a file or a pipe, its tables drawn on a terminal."""
    if not _console().is_terminal:
        click.echo(text)
        return
    for is_table, lines in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        if is_table:
            titles, _, *rows = ([_uncut(cell) for cell in _CELLS.split(line)] for line in lines)
            print_table(titles[1:-1], (row[1:-1] for row in rows))
        else:
            for line in lines:
                click.echo(line)


def _uncut(cell: str) -> str:
    """A cell's text as it was before ``vidsparse.markdown`` wrote it."""
    return cell.strip().replace("\\|", "|").replace("&lt;", "<")


def _fit(table: Table, console: Console) -> bool:
    """Give every column the width that its words need, and more where there is room.

    Rich narrows columns without regard to their longest word, and folds names and numbers in the
    middle.

    Returns:
        False where the terminal is too narrow even for that.
    """
    from rich.measure import Measurement

    whole = console.options.update_width(_WHOLE_LINES)
    for column in table.columns:
        column.width = None
    least, most = [], []
    for column in table.columns:
        texts = [Measurement.get(console, whole, text) for text in (column.header, *column.cells)]
        least.append(max(text.minimum for text in texts))
        most.append(max(text.maximum for text in texts))
    beside = Measurement.get(console, whole, table).maximum - sum(most)
    room = console.width - beside - sum(least)
    if room < 0:
        return False
    wanted = sum(most) - sum(least)
    if wanted > room:
        for column, narrow, wide in zip(table.columns, least, most, strict=True):
            column.width = narrow + (wide - narrow) * room // wanted
    return True


def _paragraph_of(columns: Sequence[str], row: Sequence[str], width: int) -> Group:
    """A row as its first cell and, below it, the others with their titles.

    Rich has no form of a table for a terminal that is narrower than the table's words.
    """
    from rich.console import Group
    from rich.padding import Padding

    first, *others = row
    lines = [""]
    for title, cell in zip(columns[1:], others, strict=True):
        if not cell:
            continue
        part = f"{title} {cell}"
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(longer) <= width - INDENT:
            lines[-1] = longer
        else:
            lines.append(part)
    head = _plain(first)
    head.stylize("bold")
    return Group(head, Padding(_plain("\n".join(lines)), (0, 0, 0, INDENT), expand=False))


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
