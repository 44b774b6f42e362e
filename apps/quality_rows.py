"""The file of the quality study, and its Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vidsparse.apps.quality_studies import KNOBS
from vidsparse.apps.row_file import RowFile
from vidsparse.metrics import Spread
from vidsparse.report import format_number, format_spread


def quality_file(path: Path) -> RowFile:
    """The rows of quality studies in ``path``, which need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """
    return RowFile(path, "vidsparse-quality/1", "quality study")


def markdown_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, one table for each size and study."""
    lines: list[str] = []
    groups = dict.fromkeys((row["size"], row["frames"], row["study"]) for row in rows)
    for size, frames, study in groups:
        columns = _COLUMNS[study]
        lines += [f"### {size}, {frames} frames: {study}", ""]
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in rows:
            if (row["size"], row["frames"], row["study"]) == (size, frames, study):
                cells = [_CELLS[column](row) for column in columns]
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def option_text(name: str) -> Callable[[Mapping[str, Any]], str]:
    """The table cell that shows one of a row's options."""
    return lambda row: str(row["options"].get(name, "-"))


def knob_text(row: Mapping[str, Any]) -> str:
    """The table cell that says how a method selects: its knob, or what stands in its place."""
    knob = KNOBS.get(row["method"])
    names = ("keep", "topk", "blocks") if knob is None else (knob.name, "topk", "blocks")
    words = ["calibrated"] if row.get("calibrated") else []
    words += [
        f"{name} {row['options'][name]:g}" for name in names if row["options"].get(name) is not None
    ]
    return ", ".join(words)


def _number(name: str, spec: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: format_number(row.get(name), spec)


QUALITY_CELLS: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
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

_CELLS: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "method": lambda row: str(row["method"]),
    **{
        name: option_text(name)
        for name in ("tile", "top_p", "merge", "order", "reuse", "dense_ends")
    },
    **{name: option_text(name) for name in ("tau", "theta", "stride", "pattern")},
    "lambda": option_text("lambda_"),
    "set to": knob_text,
    **QUALITY_CELLS,
    "Sim-q": _number("sim_q", ".3f"),
    "Sim-k": _number("sim_k", ".3f"),
    "L1": _number("l1", ".4f"),
    "sparsity": _number("sparsity", ".3f"),
}
_QUALITY = tuple(QUALITY_CELLS)
_METHODS = ("method", "tile", "set to", "order", *_QUALITY)
_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "tiles": ("tile", "top_p", *_QUALITY),
    "merging": ("tile", "top_p", "merge", *_QUALITY),
    "orders": ("method", "order", "top_p", "Sim-q", "Sim-k", "L1", "sparsity", *_QUALITY),
    "equal": _METHODS,
    "defaults": ("top_p", "reuse", "dense_ends", "order", *_QUALITY),
    "curves": _METHODS,
    "calibration": _METHODS,
    "judge": ("theta", "order", *_QUALITY),
    "stages": ("tau", "lambda", *_QUALITY),
    "patterns": ("stride", "pattern", *_QUALITY),
    "strides": ("stride", *_QUALITY),
    "selections": ("set to", *_QUALITY),
}
