"""PSNR against density, drawn from the rows of the quality study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vidsparse.apps.quality_studies import TILES
from vidsparse.errors import OptionError

# four tile sizes, told apart by lightness as well as by hue.
_COLOURS = ("#0a7c74", "#3b6fd6", "#7a4bb5", "#c2571a")
_MARKS = ("o", "s", "^", "D")


def draw_curve(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a picture: one row of panels a size, over selected and over computed density.

    Solid lines are tiles merged by XOR distance, hollow marks the other ways of merging.

    Raises:
        OptionError: there is no row to draw, or no such picture format.
        OutputError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from vidsparse.errors import OutputError

    drawn = [
        row
        for row in rows
        if row["study"] in ("tiles", "merging") and row["psnr_mean"] and row["computed"]
    ]
    if not drawn:
        raise OptionError("there are no rows of the tiles study to draw yet")
    sizes = list(dict.fromkeys((row["size"], row["frames"]) for row in drawn))
    figure, panels = plt.subplots(
        len(sizes), 2, figsize=(9, 3.6 * len(sizes)), squeeze=False, layout="constrained"
    )
    for line, (size, frames) in zip(panels, sizes, strict=True):
        for panel, density in zip(line, ("selected", "computed"), strict=True):
            for tile, colour, mark in zip(TILES, _COLOURS, _MARKS, strict=True):
                of_tile = [
                    row
                    for row in drawn
                    if (row["size"], row["frames"], row["options"]["tile"]) == (size, frames, tile)
                ]
                swept = sorted(
                    (row[density], row["psnr_mean"]) for row in of_tile if row["study"] == "tiles"
                )
                if swept:
                    panel.plot(*zip(*swept, strict=True), color=colour, marker=mark, label=tile)
                for row in of_tile:
                    if row["study"] == "merging":
                        hollow = {"markerfacecolor": "none", "color": colour, "linestyle": "none"}
                        panel.plot(row[density], row["psnr_mean"], marker=mark, **hollow)
            panel.set_xlabel(f"{density} density, sparse steps")
            panel.set_ylabel("PSNR to dense, dB")
            panel.set_title(f"{size}, {frames} frames", fontsize=10)
            panel.grid(alpha=0.25)
        line[0].legend(title="tile", fontsize=8)
    try:
        figure.savefig(path, dpi=140)
    except ValueError as error:
        raise OptionError(f"no curve can be written to {path}: {error}") from None
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        plt.close(figure)
