"""The tables of the ablations, by the name of their place in ``docs/ablations.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from vidsparse.apps.quality_rows import QUALITY_CELLS, knob_text, option_text
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
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def _text(name: str) -> Cell:
    return lambda row: str(row[name])


def _number(name: str, spec: str) -> Cell:
    return lambda row: format_number(row.get(name), spec)


def _percent(name: str, spec: str = ".1%") -> Cell:
    return lambda row: "-" if row[name] is None else format(row[name], spec)


_METHOD_CELLS: Final[Mapping[str, Cell]] = {
    "method": _text("method"),
    "tile": option_text("tile"),
    "set to": knob_text,
    "order": option_text("order"),
    **QUALITY_CELLS,
}

_OF_VIDEOS: Final[Mapping[str, tuple[tuple[str, ...], Mapping[str, Cell]]]] = {
    "judge": (
        ("judge",),
        {"theta": option_text("theta"), "order": option_text("order"), **QUALITY_CELLS},
    ),
    "stages": (
        ("stages",),
        {
            "tau": option_text("tau"),
            "lambda": option_text("lambda_"),
            # of all products, q·k and p·v, as the paper counts.
            "sparsity": lambda row: format_number(1 - row["computed"], ".3f"),
            **QUALITY_CELLS,
        },
    ),
    "patterns": (
        ("patterns",),
        {"stride": option_text("stride"), "pattern": option_text("pattern"), **QUALITY_CELLS},
    ),
    "strides": (("strides",), {"stride": option_text("stride"), **QUALITY_CELLS}),
    "selections": (("selections",), {"by": knob_text, **QUALITY_CELLS}),
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
            "Sim-q": _number("sim_q", ".3f"),
            "Sim-k": _number("sim_k", ".3f"),
            "L1": _number("l1", ".4f"),
            "sparsity": _number("sparsity", ".3f"),
            **QUALITY_CELLS,
        },
    ),
    "equal": (("equal",), _METHOD_CELLS),
    "calibration": (("calibration",), _METHOD_CELLS),
    "curves": (("curves",), _METHOD_CELLS),
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
