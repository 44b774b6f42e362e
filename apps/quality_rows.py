"""What the quality study measures, and the file its rows are kept in.

Three studies, each FG-Attn's with 24 % of the steps dense unless it says otherwise:

- ``tiles``: square tiles of four sizes, ``top_p`` swept, so that curves can be compared.
- ``merging``: the same fine tiles merged into 128-row blocks in other ways than by XOR distance.
- ``orders``: token orders. FG-Attn's ``top_p`` is set for each order so that all of them compute
  the same density; SpargeAttn's numbers are the same for all, as in its Tables 4 and 9.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vidsparse.apps.run_folder import write_text
from vidsparse.errors import OptionError
from vidsparse.metrics import Spread
from vidsparse.order import ORDERS
from vidsparse.report import finite_json, format_number, format_spread

FORMAT = "vidsparse-quality/1"
STUDIES = ("tiles", "merging", "orders")

TILES = ("16x16", "32x32", "64x64", "128x128")
TOP_P = (0.5, 0.65, 0.8, 0.9, 0.95)
# a 128-row tile is a block of its own: there is nothing to merge.
MERGED_TILES = ("16x16", "32x32", "64x64")
MERGES = ("consecutive", "xor-window")
MERGED_TOP_P = (0.65, 0.9)
COMPUTED_TARGETS = (0.35, 0.55)


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One row to measure.

    Args:
        study: the study it belongs to.
        method: the method's name.
        options: the method's own numbers; without ``top_p`` where a target is given.
        order: token order.
        target: computed density that ``top_p`` is to be set for, or None.
    """

    study: str
    method: str
    options: Mapping[str, Any]
    order: str = "hilbert"
    target: float | None = None

    def describes(self, row: Mapping[str, Any]) -> bool:
        """Whether ``row`` was measured with this configuration, whatever the calibration found."""
        mine = {**self.options, "order": self.order}
        return (row["study"], row["method"], row["target"]) == (
            self.study,
            self.method,
            self.target,
        ) and all(row["options"].get(name) == value for name, value in mine.items())

    def __str__(self) -> str:
        own = " ".join(f"{name}={value}" for name, value in self.options.items())
        aim = f" computed={self.target}" if self.target is not None else ""
        return f"{self.study}: {self.method} {own}{aim} {self.order}"


def configurations(studies: tuple[str, ...]) -> Iterator[Configuration]:
    """The rows of ``studies``, the most telling first within each."""
    if "tiles" in studies:
        for top_p in TOP_P:
            for tile in TILES:
                options = {"top_p": top_p, "tile": tile, "merge": "xor"}
                yield Configuration(study="tiles", method="fg-attn", options=options)
    if "merging" in studies:
        for top_p in MERGED_TOP_P:
            for tile in MERGED_TILES:
                for merge in MERGES:
                    options = {"top_p": top_p, "tile": tile, "merge": merge}
                    yield Configuration(study="merging", method="fg-attn", options=options)
    if "orders" in studies:
        for order in ORDERS:
            yield Configuration(study="orders", method="spargeattn", options={}, order=order)
        for target in COMPUTED_TARGETS:
            for order in ORDERS:
                yield Configuration(
                    study="orders",
                    method="fg-attn",
                    options={"tile": "16x16", "merge": "xor"},
                    order=order,
                    target=target,
                )


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


def _number(name: str, spec: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: format_number(row.get(name), spec)


_CELLS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "method": lambda row: str(row["method"]),
    **{name: _option_text(name) for name in ("tile", "top_p", "merge", "order")},
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
}
