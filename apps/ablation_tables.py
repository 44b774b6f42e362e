"""The tables of the ablations, by the name of their place in ``docs/ablations.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from vidsparse.apps.quality_rows import (
    ORDER_CELLS,
    QUALITY_CELLS,
    STUDY_CELLS,
    Cell,
    knob_text,
    markdown_table,
    option_text,
)
from vidsparse.apps.row_file import Row
from vidsparse.report import format_number


def tables(videos: Sequence[Row], calls: Sequence[Row]) -> dict[str, str]:
    """Every table that there are rows for, as Markdown.

    Args:
        videos: rows of the quality file.
        calls: rows of the single calls' file.
    """
    found = {}
    for name, (studies, columns) in _OF_VIDEOS.items():
        found[name] = _table([row for row in videos if row["study"] in studies], columns)
    for name, columns in _OF_CALLS.items():
        found[name] = _table([row for row in calls if row["ablation"] == name], columns)
    return {name: table for name, table in found.items() if table is not None}


def _table(rows: Sequence[Row], columns: Mapping[str, Cell]) -> str | None:
    if not rows:
        return None
    if "size" in rows[0]:
        columns = {"size": _text("size"), **columns}
        rows = sorted(rows, key=lambda row: str(row["size"]))
    return markdown_table(rows, columns)


def _text(name: str) -> Cell:
    return lambda row: str(row[name])


def _number(name: str, spec: str) -> Cell:
    return lambda row: format_number(row.get(name), spec)


def _percent(name: str, spec: str = ".1%") -> Cell:
    return lambda row: "-" if row[name] is None else format(row[name], spec)


_OF_VIDEOS: Final[Mapping[str, tuple[tuple[str, ...], Mapping[str, Cell]]]] = {
    **{
        name: ((name,), STUDY_CELLS[name])
        for name in ("judge", "stages", "patterns", "strides", "selections")
    },
    "tiles": (
        ("tiles", "merging"),
        {
            "tile": option_text("tile"),
            "top_p": option_text("top_p"),
            "merging": option_text("merge"),
            **QUALITY_CELLS,
        },
    ),
    "orders": (
        ("orders",),
        {
            "method": _text("method"),
            "order": option_text("order"),
            "set to": knob_text,
            **ORDER_CELLS,
        },
    ),
    **{name: ((name,), STUDY_CELLS[name]) for name in ("equal", "calibration", "curves")},
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
    "sale-recall": {
        "tokens": _text("tokens"),
        "threshold": _text("case"),
        "recall": _percent("recall"),
        "recall of judged tiles": _percent("recall_judged"),
        "selected in full precision": _number("selected", ".3f"),
    },
    "held-out": {
        "method": _text("case"),
        "bound": _number("bound", ".2f"),
        "calls": _text("calls"),
        "calls under it": _percent("calls_under"),
        "heads under it": _percent("heads_under"),
        "L1": _number("l1", ".4f"),
        "worst call": _number("l1_worst", ".3f"),
        "selected": _number("selected", ".3f"),
        "computed": _number("computed", ".3f"),
    },
    "bsfa-density": {
        "keep": _text("case"),
        "predicted": _number("predicted", ".3f"),
        "measured": _number("measured", ".3f"),
        "apart, points": lambda row: f"{100 * row['gap']:+.1f}",
    },
    "lengths": {
        "tokens": lambda row: f"{int(row['case']):,}",
        "mask ms": _number("mask_ms", ".3f"),
        "dense ms": lambda row: f"{row['dense_ms']:.2f} ({row['dense_impl']})",
        "overhead": _percent("share", ".2%"),
    },
}
