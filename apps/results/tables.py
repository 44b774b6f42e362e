"""Tables of rows: columns are named cells, each a function that shows a row as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from vidsparse.markdown import markdown_table

Shown = TypeVar("Shown")
Columns = Mapping[str, Callable[[Shown], str]]
"""A table's columns by their titles."""

CellText = Callable[[Mapping[str, Any]], str]
"""A cell of a table of a file's rows."""


def number(value: float | None, digits: int = 2) -> str:
    """A number for a cell; nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def cells(row: Shown, columns: Columns[Shown]) -> tuple[str, ...]:
    """A row as text, in the order of the columns."""
    return tuple(cell(row) for cell in columns.values())


def markdown(rows: Iterable[Shown], columns: Columns[Shown]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(tuple(columns), (cells(row, columns) for row in rows))
