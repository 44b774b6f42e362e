"""How a benchmark's command shows its rows: as a table while they come, or as JSON at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from vidsparse.apps.results.row_file import RowFile
from vidsparse.apps.results.tables import Columns, cells, markdown
from vidsparse.apps.terminal.console import Terminal
from vidsparse.apps.terminal.tables import growing_table, print_markdown, print_table

RowT = TypeVar("RowT")


@contextmanager
def shown_rows(
    terminal: Terminal, columns: Columns[RowT], header: Mapping[str, Any]
) -> Iterator[Callable[[RowT], None]]:
    """Show each row that the value of the block is given.

    Args:
        terminal: says whether the answer is JSON, which comes once the block has ended well.
        columns: of the table.
        header: what the answer says of all rows: hardware, versions and date.
    """
    rows: list[RowT] = []
    if terminal.json:
        yield rows.append
        _answer(terminal, header, rows)
        return
    with growing_table(tuple(columns)) as add:
        yield lambda row: add(cells(row, columns))


def show_all(
    terminal: Terminal, rows: Sequence[RowT], columns: Columns[RowT], header: Mapping[str, Any]
) -> None:
    """As ``shown_rows``, where all rows are there."""
    if terminal.json:
        _answer(terminal, header, rows)
    else:
        print_table(tuple(columns), (cells(row, columns) for row in rows))


def show_file(
    terminal: Terminal, file: RowFile, rows: Iterable[RowT], columns: Columns[RowT]
) -> None:
    """Show rows that were measured before.

    Args:
        terminal: says whether the answer is JSON.
        file: that they are from.
        rows: all of them, or a choice.
        columns: of the table.
    """
    if terminal.json:
        _answer(terminal, file.header, rows)
    else:
        print_markdown(markdown(rows, columns))


def _answer(terminal: Terminal, header: Mapping[str, Any], rows: Iterable[Any]) -> None:
    terminal.answer({**header, "rows": [asdict(row) for row in rows]})
