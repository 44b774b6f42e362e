"""The file of the quality study, and its Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from vidsparse.apps.quality_studies import KNOBS
from vidsparse.apps.row_file import Row, RowFile
from vidsparse.metrics import Spread
from vidsparse.report import format_number, format_spread

Cell = Callable[[Row], str]


def quality_file(path: Path) -> RowFile:
    """The rows of quality studies in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, "vidsparse-quality/1", "quality study")


def markdown_tables(rows: Sequence[Row]) -> str:
    """The rows as Markdown, one table for each size and study."""
    lines: list[str] = []
    for size, frames, study in dict.fromkeys(map(_place, rows)):
        own = [row for row in rows if _place(row) == (size, frames, study)]
        table = markdown_table(own, STUDY_CELLS[study])
        lines += [f"### {size}, {frames} frames: {study}", "", table, ""]
    return "\n".join(lines)


def _place(row: Row) -> tuple[str, int, str]:
    return row["size"], row["frames"], row["study"]


def markdown_table(rows: Iterable[Row], columns: Mapping[str, Cell]) -> str:
    """A table with a column for each of ``columns``, whose cells show a row."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def option_text(name: str) -> Cell:
    """The table cell that shows one of a row's options."""
    return lambda row: str(row["options"].get(name, "-"))


def knob_text(row: Row) -> str:
    """The table cell that says how a method selects: its knob, or what stands in its place."""
    knob = KNOBS.get(row["method"])
    names = ("keep", "topk", "blocks") if knob is None else (knob.name, "topk", "blocks")
    words = ["calibrated"] if row.get("calibrated") else []
    words += [
        f"{name} {row['options'][name]:g}" for name in names if row["options"].get(name) is not None
    ]
    return ", ".join(words)


def _number(name: str, spec: str) -> Cell:
    return lambda row: format_number(row.get(name), spec)


QUALITY_CELLS: Final[Mapping[str, Cell]] = {
    "selected": _number("selected", ".3f"),
    "computed": _number("computed", ".3f"),
    "PSNR dB": lambda row: format_spread(
        Spread(mean=row["psnr_mean"], std=row["psnr_std"], count=row["prompts"]),
        ".2f",
        identical=row["identical"],
    ),
    "SSIM": _number("ssim_mean", ".4f"),
}
"""What every row has: densities and distance to dense."""

_METHOD_CELLS: Final[Mapping[str, Cell]] = {
    "method": lambda row: str(row["method"]),
    "tile": option_text("tile"),
    "set to": knob_text,
    "order": option_text("order"),
    **QUALITY_CELLS,
}

ORDER_CELLS: Final[Mapping[str, Cell]] = {
    "Sim-q": _number("sim_q", ".3f"),
    "Sim-k": _number("sim_k", ".3f"),
    "L1": _number("l1", ".4f"),
    "sparsity": _number("sparsity", ".3f"),
    **QUALITY_CELLS,
}
"""What rows of token orders have, as SpargeAttn's tables 4 and 9."""

STUDY_CELLS: Final[Mapping[str, Mapping[str, Cell]]] = {
    "tiles": {"tile": option_text("tile"), "top_p": option_text("top_p"), **QUALITY_CELLS},
    "merging": {
        "tile": option_text("tile"),
        "top_p": option_text("top_p"),
        "merge": option_text("merge"),
        **QUALITY_CELLS,
    },
    "orders": {
        "method": lambda row: str(row["method"]),
        "order": option_text("order"),
        "top_p": option_text("top_p"),
        **ORDER_CELLS,
    },
    "equal": _METHOD_CELLS,
    "defaults": {
        "top_p": option_text("top_p"),
        "reuse": option_text("reuse"),
        "dense_ends": option_text("dense_ends"),
        "order": option_text("order"),
        **QUALITY_CELLS,
    },
    "curves": _METHOD_CELLS,
    "calibration": _METHOD_CELLS,
    "judge": {"theta": option_text("theta"), "order": option_text("order"), **QUALITY_CELLS},
    "stages": {
        "tau": option_text("tau"),
        "lambda": option_text("lambda_"),
        # of all products, q·k and p·v, as the paper counts.
        "sparsity": lambda row: format_number(1 - row["computed"], ".3f"),
        **QUALITY_CELLS,
    },
    "patterns": {
        "stride": option_text("stride"),
        "pattern": option_text("pattern"),
        **QUALITY_CELLS,
    },
    "strides": {"stride": option_text("stride"), **QUALITY_CELLS},
    "selections": {"by": knob_text, **QUALITY_CELLS},
}
"""The columns of each study's table, by its name."""
