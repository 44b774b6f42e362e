"""The file that the quality study's rows are kept in, and its Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vidsparse.apps.quality_studies import KNOBS, Configuration
from vidsparse.apps.run_folder import write_text
from vidsparse.errors import OptionError
from vidsparse.metrics import Spread
from vidsparse.report import finite_json, format_number, format_spread

FORMAT = "vidsparse-quality/1"


class RowFile:
    """The rows measured so far, as JSON with one row a line.

    Args:
        path: the file; it need not exist.

    Raises:
        OptionError: it exists and holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if not path.exists():
            return
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError(
                f"{path} cannot be read as JSON: {error}. Hint: give another file with --out."
            ) from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise OptionError(f"{path} holds no quality study. Hint: give another file with --out.")
        self.rows = document["rows"]

    def find(
        self, configuration: Configuration, conditions: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The row of ``configuration`` whose values agree with all of ``conditions``."""
        for row in self.rows:
            same = all(row.get(name) == value for name, value in conditions.items())
            if same and configuration.describes(row):
                return row
        return None

    def put(
        self,
        row: Mapping[str, Any],
        configuration: Configuration,
        conditions: Mapping[str, Any],
        header: Mapping[str, Any],
    ) -> None:
        """Add ``row``, or replace the one of the same kind, and write the file.

        Raises:
            OutputError: the file cannot be written.
        """
        known = self.find(configuration, conditions)
        if known is not None:
            self.rows[self.rows.index(known)] = dict(row)
        else:
            self.rows.append(dict(row))
        head = json.dumps(finite_json({"format": FORMAT, **header}), indent=1, ensure_ascii=False)
        lines = ",\n".join(
            "  " + json.dumps(finite_json(row), ensure_ascii=False, allow_nan=False)
            for row in self.rows
        )
        write_text(self.path, f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


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


def _option_text(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: str(row["options"].get(name, "-"))


def _knob(row: Mapping[str, Any]) -> str:
    name = KNOBS[row["method"]].name
    return f"{name} {row['options'][name]:g}"


def _number(name: str, spec: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: format_number(row.get(name), spec)


_CELLS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "method": lambda row: str(row["method"]),
    **{name: _option_text(name) for name in ("tile", "top_p", "merge", "order", "reuse")},
    "set to": _knob,
    "selected": _number("selected", ".3f"),
    "computed": _number("computed", ".3f"),
    "PSNR dB": lambda row: format_spread(
        Spread(mean=row["psnr_mean"], std=row["psnr_std"], count=row["prompts"]),
        ".2f",
        identical=row["identical"],
    ),
    "SSIM": _number("ssim_mean", ".4f"),
    "Sim-q": _number("sim_q", ".3f"),
    "Sim-k": _number("sim_k", ".3f"),
    "L1": _number("l1", ".4f"),
    "sparsity": _number("sparsity", ".3f"),
}
_QUALITY = ("selected", "computed", "PSNR dB", "SSIM")
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "tiles": ("tile", "top_p", *_QUALITY),
    "merging": ("tile", "top_p", "merge", *_QUALITY),
    "orders": ("method", "order", "top_p", "Sim-q", "Sim-k", "L1", "sparsity", *_QUALITY),
    "equal": ("method", "tile", "set to", "order", *_QUALITY),
    "defaults": ("top_p", "reuse", "order", *_QUALITY),
    "curves": ("method", "tile", "set to", "order", *_QUALITY),
}
