"""The tables of the ablations, by the name of their place in ``docs/ablations.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from vidsparse.apps.results.row_file import Row
from vidsparse.apps.results.tables import CellText, Columns, markdown
from vidsparse.apps.studies.configurations import DECLARED
from vidsparse.apps.studies.quality_tables import (
    ORDER_COLUMNS,
    QUALITY_COLUMNS,
    STUDY_COLUMNS,
    knob_text,
    number_text,
    option_text,
)


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


def _table(rows: Sequence[Row], columns: Columns[Row]) -> str | None:
    if not rows:
        return None
    if "size" in rows[0]:
        columns = {"size": _text("size"), **columns}
        rows = sorted(rows, key=lambda row: str(row["size"]))
    return markdown(rows, columns)


def _text(name: str) -> CellText:
    return lambda row: str(row[name])


def _percent(name: str, spec: str = ".1%") -> CellText:
    return lambda row: "-" if row[name] is None else format(row[name], spec)


_OF_VIDEOS: Final[Mapping[str, tuple[tuple[str, ...], Columns[Row]]]] = {
    **{name: ((name,), STUDY_COLUMNS[name]) for name in DECLARED},
    "tiles": (
        ("tiles", "merging"),
        {
            "tile": option_text("tile"),
            "top_p": option_text("top_p"),
            "merging": option_text("merge"),
            **QUALITY_COLUMNS,
        },
    ),
    "orders": (
        ("orders",),
        {
            "method": _text("method"),
            "order": option_text("order"),
            "set to": knob_text,
            **ORDER_COLUMNS,
        },
    ),
    **{name: ((name,), STUDY_COLUMNS[name]) for name in ("equal", "calibration", "curves")},
}

_OF_CALLS: Final[Mapping[str, Columns[Row]]] = {
    "judge-l1": {
        "order": _text("case"),
        "L1 with": number_text("l1_with", ".4f"),
        "L1 without": number_text("l1_without", ".4f"),
        "sparsity with": number_text("sparsity_with", ".3f"),
        "sparsity without": number_text("sparsity_without", ".3f"),
        "heads": _text("heads"),
        "filtered": _text("filtered"),
        "L1 filtered, with": number_text("l1_filtered_with", ".4f"),
        "L1 filtered, without": number_text("l1_filtered_without", ".4f"),
    },
    "sale-recall": {
        "tokens": _text("tokens"),
        "threshold": _text("case"),
        "recall": _percent("recall"),
        "recall of judged tiles": _percent("recall_judged"),
        "selected in full precision": number_text("selected", ".3f"),
    },
    "held-out": {
        "method": _text("case"),
        "bound": number_text("bound", ".2f"),
        "calls": _text("calls"),
        "calls under it": _percent("calls_under"),
        "heads under it": _percent("heads_under"),
        "L1": number_text("l1", ".4f"),
        "worst call": number_text("l1_worst", ".3f"),
        "selected": number_text("selected", ".3f"),
        "computed": number_text("computed", ".3f"),
    },
    "bsfa-density": {
        "keep": _text("case"),
        "predicted": number_text("predicted", ".3f"),
        "measured": number_text("measured", ".3f"),
        "apart, points": lambda row: f"{100 * row['gap']:+.1f}",
    },
    "lengths": {
        "tokens": lambda row: f"{int(row['case']):,}",
        "mask ms": number_text("mask_ms", ".3f"),
        "dense ms": lambda row: f"{row['dense_ms']:.2f} ({row['dense_impl']})",
        "overhead": _percent("share", ".2%"),
    },
}
