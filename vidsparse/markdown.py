"""Markdown tables, the same in reports, on pages of measurements and in model cards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[str] = ()
) -> str:
    """A table as Markdown that GitHub and mkdocs read.

    A cell is text: bars and angle brackets in it show as such, line breaks become spaces. Cells are
    not padded, so that one row more changes one line of a page.

    Args:
        columns: their titles.
        rows: their cells, as many as there are columns.
        numbers: titles of the columns that are aligned to the right.
    """
    from tabulate import DataRow, TableFormat, tabulate

    right = set(numbers)
    # tabulate rules by column number only.
    rule = "|" + "".join("---:|" if title in right else "---|" for title in columns)
    cells = DataRow("| ", " | ", " |")
    compact = TableFormat(
        lineabove=None,
        linebelowheader=lambda widths, alignments: rule,
        linebetweenrows=None,
        linebelow=None,
        headerrow=cells,
        datarow=cells,
        padding=0,
        with_header_hide=None,
    )
    table: str = tabulate(
        [[_cell(text) for text in row] for row in rows],
        [_cell(title) for title in columns],
        tablefmt=compact,
        stralign=None,
        numalign=None,
        disable_numparse=True,
    )
    return table


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
