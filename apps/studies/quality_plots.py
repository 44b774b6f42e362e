"""PSNR against density, drawn from the rows of quality studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from vidsparse.apps.results.figures import save_figure
from vidsparse.apps.results.row_file import Row
from vidsparse.apps.studies.configurations import TILES
from vidsparse.apps.studies.quality_tables import method_text
from vidsparse.errors import OptionError

# told apart by lightness as well as by hue, and by their marks.
_COLOURS = ("#0a7c74", "#3b6fd6", "#7a4bb5", "#c2571a", "#8a8f2c", "#b03060", "#444444")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")


def draw_curve(rows: Sequence[Row], path: Path) -> None:
    """Tile sizes: one row of panels a size, over selected and over computed density.

    Solid lines are tiles merged by XOR distance, hollow marks the other ways of merging.

    Raises:
        OptionError: there is no row to draw, or no such picture format.
        OutputError: the file cannot be written.
    """

    def draw(panel: Any, rows: Sequence[Row], density: str) -> None:
        for tile, colour, mark in zip(TILES, _COLOURS, _MARKS, strict=False):
            of_tile = [row for row in rows if row["options"]["tile"] == tile]
            swept = [row for row in of_tile if row["study"] == "tiles"]
            _line(panel, swept, density, color=colour, marker=mark, label=tile)
            merged = [row for row in of_tile if row["study"] == "merging"]
            hollow = {"markerfacecolor": "none", "linestyle": "none"}
            name = None if swept else tile
            _line(panel, merged, density, color=colour, marker=mark, label=name, **hollow)

    drawn = [row for row in rows if row["study"] in ("tiles", "merging")]
    _draw(drawn, path, ("selected", "computed"), "tile", draw)


def draw_lines(rows: Sequence[Row], path: Path, label: Callable[[Row], str]) -> None:
    """PSNR over computed density, a panel a size and a line a ``label``.

    Raises:
        OptionError: there is no row to draw, or no such picture format.
        OutputError: the file cannot be written.
    """
    names = list(dict.fromkeys(map(label, rows)))

    def draw(panel: Any, rows: Sequence[Row], density: str) -> None:
        for place, name in enumerate(names):
            own = [row for row in rows if label(row) == name]
            _line(panel, own, density, label=name, **_style(place))

    _draw(rows, path, ("computed",), None, draw)


def draw_seconds(rows: Sequence[Row], path: Path) -> None:
    """PSNR over the seconds of denoising of a video, a panel a size.

    There is a line a method, and one more for a method that also ran by its model's own schedule.

    Raises:
        OptionError: there is no row to draw, or no such picture format.
        OutputError: the file cannot be written.
    """
    # the dense run by another kernel is one point, and what it computes is no method's.
    timed = [row for row in rows if row["study"] == "seconds" and row["computed"] is not None]
    lines = list(dict.fromkeys(map(method_text, timed)))

    def draw(panel: Any, rows: Sequence[Row], seconds: str) -> None:
        for place, name in enumerate(lines):
            own = [row for row in rows if method_text(row) == name]
            _line(panel, own, seconds, label=name, **_style(place))
        panel.axvline(median(row[f"dense_{seconds}"] for row in rows), color="#444444", ls=":")

    _draw(
        timed, path, ("video_seconds",), "method", draw, axis="seconds of denoising (dotted: stock)"
    )


def draw_bars(rows: Sequence[Row], path: Path, axis: str, columns: Mapping[str, str]) -> None:
    """A group of bars for each row's ``case``, a panel a size.

    Args:
        rows: with the numbers of ``columns``.
        path: the picture.
        axis: what the bars measure.
        columns: the name of each bar, and the row's number that it shows.

    Raises:
        OptionError: there is no such picture format.
        OutputError: the file cannot be written.
    """
    sizes = list(dict.fromkeys(row.get("size") for row in rows))
    shown = [row[column] for row in rows for column in columns.values() if row[column]]
    # small bars beside large ones would not be seen.
    log = bool(shown) and max(shown) > 100 * min(shown) > 0

    def draw(panels: Any) -> None:
        for panel, size in zip(panels[0], sizes, strict=True):
            of_size = [row for row in rows if row.get("size") == size]
            width = 0.8 / len(columns)
            for place, (name, column) in enumerate(columns.items()):
                left = [x - 0.4 + width * (place + 0.5) for x in range(len(of_size))]
                heights = [row[column] or 0 for row in of_size]
                panel.bar(left, heights, width, label=name, color=_COLOURS[place])
            cases = [row["case"] for row in of_size]
            panel.set_xticks(range(len(cases)), cases, rotation=30, ha="right", fontsize=8)
            panel.set_ylabel(axis)
            if log:
                panel.set_yscale("log")
            panel.grid(axis="y", alpha=0.25)
            if size is not None:
                panel.set_title(size, fontsize=10)

    _figure(path, (1, len(sizes)), draw)


def _style(place: int) -> dict[str, str]:
    """How the line at a place looks; more lines than colours get other marks, and are dashed."""
    again = place // len(_COLOURS)
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "marker": _MARKS[(place + again) % len(_MARKS)],
        "linestyle": "--" if again else "-",
    }


def _line(panel: Any, rows: Sequence[Row], density: str, **style: Any) -> None:
    points = sorted((row[density], row["psnr_mean"]) for row in rows)
    if points:
        panel.plot(*zip(*points, strict=True), **style)


def _draw(
    rows: Sequence[Row],
    path: Path,
    densities: tuple[str, ...],
    legend: str | None,
    draw: Callable[[Any, Sequence[Row], str], None],
    axis: str | None = None,
) -> None:
    """Write a picture: one row of panels a size, one column a density or what ``axis`` says."""
    # identical videos have no PSNR to draw.
    rows = [row for row in rows if row["psnr_mean"] and row["computed"]]
    if not rows:
        raise OptionError("there are no rows of this study to draw yet")
    sizes = sorted({(row["size"], row["frames"]) for row in rows})
    # a single density puts the sizes side by side.
    flat = len(densities) == 1

    def draw_all(panels: Any) -> None:
        for line, (size, frames) in enumerate(sizes):
            of_size = [row for row in rows if (row["size"], row["frames"]) == (size, frames)]
            for column, density in enumerate(densities):
                panel = panels[0][line] if flat else panels[line][column]
                draw(panel, of_size, density)
                panel.set_xlabel(axis or f"{density} density, sparse calls")
                panel.set_ylabel("PSNR to dense, dB")
                panel.set_title(f"{size}, {frames} frames", fontsize=10)
                panel.grid(alpha=0.25)

    _figure(path, (1, len(sizes)) if flat else (len(sizes), len(densities)), draw_all, legend)


def _figure(
    path: Path, shape: tuple[int, int], draw: Callable[[Any], None], legend: str | None = None
) -> None:
    """Write a picture of ``shape`` panels, which ``draw`` gets as rows of columns.

    Their labels stand above them, under the title ``legend``: inside, they would hide data.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        *shape, figsize=(4.5 * shape[1], 3.6 * shape[0]), squeeze=False, layout="constrained"
    )
    draw(panels)
    named: dict[str, Any] = {}
    for panel in panels.flat:
        handles, labels = panel.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    columns = max(1, min(len(named), 2 * shape[1]))
    figure.set_figheight(figure.get_figheight() + 0.25 * -(-len(named) // columns))
    figure.legend(
        named.values(),
        named,
        title=legend,
        fontsize=8,
        loc="outside upper center",
        ncols=columns,
    )
    save_figure(figure, path)
