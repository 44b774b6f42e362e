"""The tables of the ablations, by the name of their place in ``docs/ablations.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from vidsparse.apps.quality_rows import QUALITY_CELLS, option_text
from vidsparse.apps.row_file import Row
from vidsparse.report import format_number

Cell = Callable[[Row], str]


def tables(videos: Sequence[Row], calls: Sequence[Row]) -> dict[str, str]:
    """Every table that there are rows for, as Markdown.

    Args:
        videos: rows of the quality file.
        calls: rows of the single calls' file.
    """
    found = {}
    for name, (studies, columns) in _OF_VIDEOS.items():
        rows = [row for row in videos if row["study"] in studies]
        if rows:
            found[name] = _table(rows, {"size": _text("size"), **columns})
    for name, columns in _OF_CALLS.items():
        rows = [row for row in calls if row["ablation"] == name]
        if rows:
            found[name] = _table(rows, {"size": _text("size"), **columns})
    return found


def _table(rows: Sequence[Row], columns: Mapping[str, Cell]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def _text(name: str) -> Cell:
    return lambda row: str(row[name])


def _number(name: str, spec: str) -> Cell:
    return lambda row: format_number(row.get(name), spec)


_OF_VIDEOS: Final[Mapping[str, tuple[tuple[str, ...], Mapping[str, Cell]]]] = {
    "judge": (
        ("judge",),
        {"theta": option_text("theta"), "order": option_text("order"), **QUALITY_CELLS},
    ),
}

_OF_CALLS: Final[Mapping[str, Mapping[str, Cell]]] = {
    "judge-l1": {
        "order": _text("case"),
        "L1 with": _number("l1_with", ".4f"),
        "L1 without": _number("l1_without", ".4f"),
        "sparsity with": _number("sparsity_with", ".3f"),
        "sparsity without": _number("sparsity_without", ".3f"),
        "heads": _text("heads"),
        "filtered": _text("filtered"),
        "L1 filtered, with": _number("l1_filtered_with", ".4f"),
        "L1 filtered, without": _number("l1_filtered_without", ".4f"),
    },
}
