"""The self-contained HTML page of a comparison: videos, plots and tables in one file.

Nothing is loaded from outside: videos are base64 mp4, plots are inline SVG, style and script are in
the page, so it can be mailed or put on any static host.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vidsparse.metrics import FrameQuality
from vidsparse.report import (
    CONVENTIONS,
    PromptComparison,
    Report,
    format_number,
    format_psnr,
    format_seconds,
    format_share,
    format_total,
    headline,
    plain_text,
)
from vidsparse.work import Work

# a title or table row longer than this is cut; the section below it shows the prompt in full.
SHORT_PROMPT = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySide:
    """One prompt's encoded picture: dense, sparse and difference next to each other.

    Args:
        mp4: the file's bytes, H.264.
        width: pixels of all three together.
        height: pixels.
    """

    mp4: bytes
    width: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tick:
    y: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    x: float
    width: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FramePlot:
    """One measure over a video's frames, as SVG in a unit square; what the templates draw."""

    kind: str
    title: str
    range: str
    path: str
    ticks: Sequence[_Tick]
    same: Sequence[_Span]
    labels: Sequence[str]


def render(
    report: Report,
    videos: Sequence[SideBySide],
    *,
    model: str,
    method_title: str,
    fps: float,
    gain: int,
) -> str:
    """The page as text.

    Args:
        report: the numbers.
        videos: one per comparison of the report, in its order.
        model: the model's name, as a reader knows it.
        method_title: the method's name, as its paper spells it.
        fps: frames a second of the videos.
        gain: the factor that the difference picture was multiplied with.
    """
    # jinja costs a tenth of a second: only a command that writes a page pays it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("vidsparse.apps.runs", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
    )
    page: str = environment.get_template("report.html.j2").render(
        model=model,
        method_title=method_title,
        headline=headline(report),
        tiles=_tiles(report),
        clips=[_clip(each, video) for each, video in zip(report.comparisons, videos, strict=True)],
        fps=fps,
        gain=gain,
        heat=_heat(report.density_map),
        times=_times(report),
        settings=[(name, plain_text(value)) for name, value in report.settings.items()],
        environment=[(name, plain_text(value)) for name, value in report.environment.items()],
        conventions=list(CONVENTIONS.items()),
        notes=list(report.notes),
        created=report.created,
    )
    return page


def _tiles(report: Report) -> list[dict[str, str]]:
    prompts = len(report.comparisons)
    over = f"± std over {prompts} prompts" if prompts > 1 else "one prompt"
    spreads = [
        ("PSNR", report.psnr, ".2f", " dB", report.identical),
        ("SSIM", report.ssim, ".4f", "", 0),
        ("Flicker", report.flicker, ".2f", " dB", 0),
    ]
    tiles = []
    for name, value, spec, unit, identical in spreads:
        # the tile's big figure is the mean alone; its spread goes below, where it stays readable.
        mean = format_number(
            value.mean, spec, unit, missing="identical" if report.identical else "-"
        )
        note = f"± {value.std:{spec}} over {prompts} prompts" if value.std is not None else over
        if identical:
            note += f", {identical} identical left out"
        tiles.append({"name": name, "value": mean, "note": note})
    tiles[2]["note"] += "; PSNR of frame differences"
    if report.promise is not None:
        tiles[0]["note"] += f"; promised {report.promise}"
    tiles += work_tiles(report.work, report.selected, report.computed)
    dense, sparse = report.seconds("dense", "denoise"), report.seconds("sparse", "denoise")
    tiles.append(
        {
            "name": "Denoising",
            "value": format_number(report.speedup("denoise"), ".2f", "x"),
            "note": f"{format_seconds(dense)} dense, {format_seconds(sparse)} sparse; "
            f"{format_share(report.dense_step_share)} of steps dense",
        }
    )
    return tiles


def work_tiles(
    work: Work | None, selected: float | None, computed: float | None
) -> list[dict[str, str]]:
    """What a run computed of its attention, in figures: the total first, then its split.

    Args:
        work: of the run, None where its record does not count it.
        selected: share that the method chose in the sparse calls, None where there were none.
        computed: share that was computed there.
    """
    if work is None:
        return [{"name": "Attention computed", "value": "-", "note": "not counted in this record"}]
    if computed is None:
        return [{"name": "Attention computed", "value": format_total(work), "note": work.split}]
    known = "of dense attention, beside that; " if work.selection is not None else ""
    return [
        {
            "name": "Attention computed",
            "value": format_total(work),
            "note": f"{work.split}. These computed {format_share(computed)} of their pairs and "
            f"selected {format_share(selected)}",
        },
        {
            "name": "Selection",
            "value": format_number(work.selection, ".1%", missing="unknown"),
            "note": f"{known}{work.selection_source}",
        },
    ]


def _clip(each: PromptComparison, video: SideBySide) -> dict[str, Any]:
    short = each.prompt if len(each.prompt) <= SHORT_PROMPT else each.prompt[:SHORT_PROMPT] + "..."
    frames = each.quality.frames
    plots = [frame_plot(frames, "psnr"), frame_plot(frames, "ssim")]
    return {
        "number": each.number,
        "prompt": each.prompt,
        "short": short,
        "seed": each.seed,
        "psnr": format_psnr(each.quality),
        "psnr_unit": format_psnr(each.quality, " dB"),
        "ssim": f"{each.quality.ssim:.4f}",
        "flicker": _flicker(each, ""),
        "flicker_unit": _flicker(each, " dB"),
        "total": format_total(each.sparse.work),
        "dense_seconds": format_seconds(each.dense.seconds.get("denoise")),
        "sparse_seconds": format_seconds(each.sparse.seconds.get("denoise")),
        "frames": len(frames),
        "video": base64.b64encode(video.mp4).decode("ascii"),
        "wide": video.width,
        "high": video.height,
        "plots": plots,
    }


def _flicker(each: PromptComparison, unit: str) -> str:
    return (
        "identical" if each.quality.identical else format_number(each.quality.flicker, ".2f", unit)
    )


def frame_plot(frames: Sequence[FrameQuality], kind: str) -> FramePlot:
    """The plot of ``kind``, "psnr" or "ssim", over a video's frames."""
    values: list[float | None] = [frame.psnr if kind == "psnr" else frame.ssim for frame in frames]
    spec, unit = (".2f", " dB") if kind == "psnr" else (".4f", "")
    known = [value for value in values if value is not None]
    ticks = nice_ticks(min(known), max(known)) if known else []
    low, high = (ticks[0], ticks[-1]) if ticks else (0.0, 1.0)
    step = 1 / max(1, len(frames) - 1)
    commands, pen = [], "M"
    for index, value in enumerate(values):
        if value is None:
            pen = "M"
            continue
        commands.append(f"{pen}{index * step:.5f} {1 - (value - low) / (high - low):.4f}")
        pen = "L"
    # a lone point draws nothing without a length: the round line cap makes it a dot.
    path = " ".join(commands) + ("h0" if len(commands) == 1 else "")
    decimals = max(0, math.ceil(-math.log10(ticks[1] - ticks[0]) - 1e-9)) if ticks else 0
    labels = [
        "identical" if frame.identical and kind == "psnr" else format_number(value, spec, unit)
        for frame, value in zip(frames, values, strict=True)
    ]
    exact = [frame.identical and kind == "psnr" for frame in frames]
    return FramePlot(
        kind=kind,
        title="PSNR per frame, dB" if kind == "psnr" else "SSIM per frame",
        range=f"{min(known):{spec}} to {max(known):{spec}}" if known else "all identical",
        path=path,
        ticks=[
            _Tick(y=round(1 - (tick - low) / (high - low), 4), label=f"{tick:.{decimals}f}")
            for tick in ticks
        ],
        same=_spans(exact, step),
        labels=labels,
    )


def _spans(flags: Sequence[bool], step: float) -> list[_Span]:
    """Where runs of True lie along an axis from 0 to 1, half a step wide on both sides."""
    spans, start = [], None
    for index, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = index
        elif not flag and start is not None:
            low, high = max(0.0, (start - 0.5) * step), min(1.0, (index - 0.5) * step)
            spans.append(_Span(x=round(low, 5), width=round(high - low, 5)))
            start = None
    return spans


def nice_ticks(low: float, high: float) -> list[float]:
    """Three to five round values that enclose ``low`` to ``high``."""
    # matplotlib takes a quarter of a second: only what draws a plot pays it.
    from matplotlib.ticker import MaxNLocator

    # equal values get room below: an SSIM of 1 has nothing above it.
    low = min(low, high - 1e-3)
    locator = MaxNLocator(nbins=3, steps=[1, 2, 5, 10], min_n_ticks=1)
    return [float(tick) for tick in locator.tick_values(low, high)]


def _heat(density_map: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    cells = [
        {
            "step": step,
            "layer": layer,
            "opacity": f"{value:.3f}",
            "label": f"step {step + 1}, layer {layer + 1}: "
            + ("dense" if value >= 1 else f"{value:.1%} computed"),
        }
        for step, row in enumerate(density_map)
        for layer, value in enumerate(row)
        if value is not None
    ]
    return {
        "steps": len(density_map),
        "layers": max((len(row) for row in density_map), default=0),
        "cells": cells,
    }


def _times(report: Report) -> dict[str, Any]:
    sides = ("dense", "sparse")
    phases = [
        phase
        for phase in dict.fromkeys(
            key
            for each in report.comparisons
            for run in (each.dense, each.sparse)
            for key in run.seconds
        )
        if any(report.seconds(side, phase) is not None for side in sides)
    ]
    return {
        "phases": phases,
        "rows": [
            {
                "name": side,
                "cells": [format_seconds(report.seconds(side, phase)) for phase in phases],
            }
            for side in sides
        ],
    }
