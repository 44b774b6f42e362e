"""PSNR over the share of attention computed at several settings, as page and reports draw it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vidsparse.report import PromptComparison

# narrower than this in share or dB, an axis would count differences that mean nothing.
_NARROWEST = 0.02, 1.0

# of the plot's sides: names of points that are nearer would be printed over each other.
_NEAR = 0.1, 0.08


def curve_points(rows: Sequence[tuple[str, PromptComparison]], about: str) -> dict[str, Any] | None:
    """Every prompt and the mean of each setting, placed in a unit square for ``curve.html.j2``.

    Args:
        rows: the setting's name and one prompt's comparison.
        about: model and size, for the title.

    Returns:
        None where no prompt has both a PSNR and a share.
    """
    points: dict[str, list[tuple[float, float, int]]] = {}
    for setting, each in rows:
        work = each.sparse.work
        if work is not None and each.quality.psnr is not None:
            points.setdefault(setting, []).append((work.total, each.quality.psnr, each.number))
    if not points:
        return None
    everything = [point for group in points.values() for point in group]
    xs, ys = (
        axis([point[place] for point in everything], narrowest)
        for place, narrowest in enumerate(_NARROWEST)
    )

    def place(x: float, y: float, label: str, name: str = "") -> dict[str, Any]:
        return {
            "x": (x - xs[0]) / (xs[-1] - xs[0]),
            "y": 1 - (y - ys[0]) / (ys[-1] - ys[0]),
            "label": label,
            "name": name,
        }

    means = sorted(
        (
            place(
                x := float(np.mean([point[0] for point in group])),
                y := float(np.mean([point[1] for point in group])),
                f"{setting}: {y:.2f} dB at {x:.1%} computed",
                setting,
            )
            for setting, group in points.items()
        ),
        key=lambda point: float(point["x"]),
    )
    return {
        "title": f"PSNR against attention computed in the whole run: {about}",
        "xs": ticks(xs, percent=True),
        "ys": ticks(ys, percent=False, down=True),
        "dots": [
            place(x, y, f"{setting}, prompt {number}: {y:.2f} dB at {x:.1%} computed")
            for setting, group in points.items()
            for x, y, number in group
        ],
        "path": " ".join(
            f"{'L' if i else 'M'}{point['x']:.4f} {point['y']:.4f}" for i, point in enumerate(means)
        ),
        "means": _named_apart(means),
    }


def _named_apart(means: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points with one name for all that lie together, at the first of them."""
    found: list[dict[str, Any]] = []
    for point in means:
        apart = (
            (each, abs(each["x"] - point["x"]), abs(each["y"] - point["y"]))
            for each in found
            if each["name"]
        )
        first = next((each for each, x, y in apart if x < _NEAR[0] and y < _NEAR[1]), None)
        if first is None:
            found.append({**point})
            continue
        # "share 0.1, 0.3": the option once.
        option = f"{first['name'].split(' ')[0]} "
        first["name"] += f", {point['name'].removeprefix(option)}"
        found.append({**point, "name": ""})
    return found


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to five round values that enclose ``low`` to ``high``."""
    # matplotlib takes a quarter of a second: only what draws a plot pays it.
    from matplotlib.ticker import MaxNLocator

    # equal values get room below: an SSIM of 1 has nothing above it.
    low = min(low, high - 1e-3)
    locator = MaxNLocator(nbins=3, steps=[1, 2, 5, 10], min_n_ticks=1)
    return [float(tick) for tick in locator.tick_values(low, high)]


def axis(values: Sequence[float], narrowest: float) -> list[float]:
    """Round values around these, of which a single one lies between two of them.

    Args:
        values: what is drawn.
        narrowest: the least from the first to the last tick.
    """
    low, high = min(values), max(values)
    room = max(0.0, narrowest - (high - low)) / 2
    return nice_ticks(low - room, high + room)


def ticks(values: Sequence[float], *, percent: bool, down: bool = False) -> list[dict[str, Any]]:
    """Where an axis has its ticks, from 0 to 1 (from 1 to 0 if ``down``), and what stands there."""
    room = values[-1] - values[0]
    step = (values[1] - values[0]) * (100 if percent else 1)
    decimals = max(0, math.ceil(-math.log10(step) - 1e-9))
    found = []
    for value in values:
        at = (value - values[0]) / room
        text = f"{value * 100:.{decimals}f} %" if percent else f"{value:.{decimals}f}"
        found.append({"at": 1 - at if down else at, "label": text})
    return found
