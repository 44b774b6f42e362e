"""The page of studies: what each method costs in quality on the bundled models, as measured.

Its rows are part of the package, in ``studies.json``, which the command
``python -m vidsparse.apps.studies.digest`` makes of the committed ones.
"""

from __future__ import annotations

import json
import math
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vidsparse.apps.page import draw
from vidsparse.apps.page.form import Form
from vidsparse.apps.runs.curve import axis, ticks
from vidsparse.errors import OptionError
from vidsparse.files import parse_json
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.wording import format_number

FILE: Final = Path(__file__).parent / "studies.json"

PATH: Final = "studies"

_TITLES: Final[Mapping[str, tuple[str, str]]] = {
    "seconds": (
        "Quality over seconds, all methods",
        "Every method took its turn beside the same dense run. The dotted line is what stock "
        "diffusers took.",
    ),
    "curves": (
        "The papers' methods to the letter",
        "What a method skips is lost here, as in the papers; approximating it by means, the "
        "default today, came later.",
    ),
    "refreshes": (
        "Refreshes",
        "foresight carries what it skips on from step to step, and computes it anew in some steps.",
    ),
    "tiles": ("Tiles", "The same choice of pairs in finer and coarser tiles, the rest lost."),
}
"""What each study shows, and how it is to be read."""

# narrower than this, an axis would count differences that mean nothing. Of seconds it is a share of
# the longest: a video takes a tenth of a second here and half a minute there.
_NARROWEST: Final = {"total": 0.02, "psnr": 1.0}
_NARROWEST_SECONDS: Final = 0.2


def studies_page(form: Form) -> str:
    """The studies as HTML.

    Args:
        form: of this page; rows whose settings it can take have a link that brings them there.
    """
    names = {model.name for model in form.host.models}
    return "".join(_study(form, one, names) for one in parse_json(FILE.read_bytes())["studies"])


def _study(form: Form, study: Mapping[str, Any], models: set[str]) -> str:
    title, text = _TITLES[study["study"]]
    points = [(name, point) for name, line in study["lines"].items() for point in line]
    axes = ["seconds", "total"] if study["dense_seconds"] else ["total"]
    columns = ["method", "set to", "computed", "PSNR", "worst", "SSIM"]
    timed = study["dense_seconds"] is not None
    rows = [
        {
            "cells": [
                name,
                point["set_to"],
                f"{point['total']:.1%}",
                f"{point['psnr']:.1f} ± {format_number(point['std'], '.1f')} dB",
                format_number(point["worst"], ".1f"),
                format_number(point["ssim"], ".4f"),
                *([_seconds(point["seconds"]), f"{point['speedup']:.2f}x"] if timed else []),
            ],
            "link": settings_link(form, point["settings"], models),
        }
        for name, point in points
    ]
    return str(
        draw.macros("studies.html.j2").study(
            f"{title}: {study['model']}, {study['size']}, {study['frames']} frames",
            f"{text} PSNR against the dense video, means over {study['prompts']} prompts, "
            f"{study['steps']} steps{_how(study)}, {study['hardware']}, {study['date']}.",
            [_chart(study, axis) for axis in axes],
            [*columns, *(["seconds", "speed"] if timed else [])],
            rows,
        )
    )


def _how(study: Mapping[str, Any]) -> str:
    """What seconds depend on beside the device: videos made at once, and compiled blocks."""
    together, timed = study["batch"] or 1, study["dense_seconds"] is not None
    words = [f"{together} videos at once"] if together > 1 and timed else []
    words += ["compiled"] if study["compiled"] else []
    return "".join(f", {word}" for word in words)


def _seconds(number: float) -> str:
    """Three digits of it."""
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


def _chart(study: Mapping[str, Any], across: str) -> dict[str, Any]:
    """The study's lines in a unit square, PSNR over ``across``."""
    points = [point for line in study["lines"].values() for point in line]
    values = [point[across] for point in points]
    percent, dense = across == "total", study["dense_seconds"]
    if not percent:
        values.append(dense)
    xs = axis(values, _NARROWEST[across] if percent else _NARROWEST_SECONDS * max(values))
    ys = axis([point["psnr"] for point in points], _NARROWEST["psnr"])

    def at(x: float) -> float:
        return (x - xs[0]) / (xs[-1] - xs[0])

    def text(x: float) -> str:
        return f"{x:.1%} computed" if percent else f"{_seconds(x)} s"

    lines = [
        {
            "name": name,
            "colour": place % 7,
            # more lines than colours: those are dashed.
            "again": place >= 7,
            "path": " ".join(
                f"{'L' if i else 'M'}{dot['x']:.4f} {dot['y']:.4f}" for i, dot in enumerate(dots)
            ),
            "dots": dots,
        }
        for place, (name, line) in enumerate(study["lines"].items())
        for dots in [_dots(name, line, across, at, ys, text)]
    ]
    return {
        "title": "PSNR in dB over "
        + ("the share of the run's attention computed" if percent else "seconds of denoising"),
        "xs": ticks(xs, percent=percent),
        "ys": ticks(ys, percent=False, down=True),
        "lines": lines,
        "mark": None if percent else at(dense),
    }


def _dots(
    name: str,
    line: list[dict[str, Any]],
    across: str,
    at: Callable[[float], float],
    ys: list[float],
    text: Callable[[float], str],
) -> list[dict[str, Any]]:
    return [
        {
            "x": at(point[across]),
            "y": 1 - (point["psnr"] - ys[0]) / (ys[-1] - ys[0]),
            "label": f"{name}, {point['set_to']}: {point['psnr']:.1f} dB, {text(point[across])}",
        }
        for point in sorted(line, key=lambda point: float(point[across]))
    ]


def settings_link(form: Form, settings: Mapping[str, Any] | None, models: set[str]) -> str | None:
    """The address of the form with these settings, None where this page cannot take them."""
    if settings is None or settings["model"] not in models:
        return None
    try:
        # rows are of runs without a step cache, which the model's own may have.
        settings = {"cache": "none", "cache_threshold": None, **settings}
        request = GenerateRequest(prompt="", **settings)
        form.host.limits.check(request)
        made = form.values_of(request)
    except OptionError:
        return None
    own = {*settings, *form.options_of(request.method).values()} - {"method_options"}
    values = {name: value for name, value in made.items() if name in own}
    return "./#settings=" + urllib.parse.quote(json.dumps(values))
