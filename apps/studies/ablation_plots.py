"""A picture of each ablation, from the same rows as its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from vidsparse.apps.results.row_file import Row
from vidsparse.apps.studies.configurations import CALIBRATED, DECLARED
from vidsparse.apps.studies.quality_plots import draw_bars, draw_lines
from vidsparse.methods.studied import Ablation

Label = Callable[[Row], str]


def draw_ablations(videos: Sequence[Row], calls: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every ablation that there are rows for, ``folder/NAME.png`` each.

    Args:
        videos: rows of the quality file.
        calls: rows of the single calls' file.
        folder: made where it is missing.

    Raises:
        OutputError: a picture cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, (studies, label) in LINES.items():
        rows = [row for row in videos if row["study"] in studies and label(row)]
        if rows:
            drawn.append(folder / f"{name}.png")
            draw_lines(rows, drawn[-1], label)
    for name, (axis, columns) in _BARS.items():
        rows = [row for row in calls if row["ablation"] == name]
        if rows:
            drawn.append(folder / f"{name}.png")
            draw_bars(rows, drawn[-1], axis, columns)
    return drawn


def _options(*names: str) -> Label:
    return lambda row: " ".join(f"{name} {row['options'][name]}" for name in names)


def _method(row: Row) -> str:
    return f"{row['method']} {row['options']['tile']}"


def _of(ablation: Ablation) -> Label:
    return lambda row: ablation.line_of(row["options"])


def _calibration(row: Row) -> str:
    """The methods that can do without calibration; none for the others."""
    if row["method"] not in CALIBRATED:
        return ""
    return f"{row['method']}, {'calibrated' if row.get('calibrated') else 'one number'}"


LINES: Final[Mapping[str, tuple[tuple[str, ...], Label]]] = {
    "curves": (("curves",), _method),
    "equal": (("equal",), _method),
    "orders": (("orders",), lambda row: f"{row['method']} {row['options']['order']}"),
    "tiles": (("tiles", "merging"), _options("tile", "merge")),
    **{name: ((name,), _of(ablation)) for name, (_, ablation) in DECLARED.items()},
    # beside the points without calibration stands the whole curve of each method.
    "calibration": (("calibration", "curves"), _calibration),
}
"""Studies, and what a line is made of; rows without a label are left out."""

_BARS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "judge-l1": ("L1 to dense", {"with the judge": "l1_with", "without": "l1_without"}),
    "sale-recall": ("recall", {"all tiles": "recall", "judged tiles": "recall_judged"}),
    "held-out": ("share under the bound", {"calls": "calls_under", "heads": "heads_under"}),
    "bsfa-density": ("share of values", {"predicted": "predicted", "measured": "measured"}),
    "lengths": ("mask / dense attention", {"overhead": "share"}),
}
"""What the bars measure, and the columns that are bars, by their names."""
