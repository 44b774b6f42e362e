"""The self-contained HTML page of a comparison: videos, plots and tables in one file.

Nothing is loaded from outside: videos are base64 mp4, plots are inline SVG, style and script are in
the page, so it can be mailed or put on any static host.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vidsparse.apps.runs.curve import curve_points, nice_ticks
from vidsparse.metrics import FrameQuality
from vidsparse.report import (
    CONVENTIONS,
    PromptComparison,
    Report,
    format_worst,
    headline,
    plain_text,
    stage_rows,
)
from vidsparse.speedup import Speedup
from vidsparse.wording import (
    format_number,
    format_psnr,
    format_seconds,
    format_share,
    format_sides,
    format_spread,
    format_total,
)
from vidsparse.work import Work

# a title or table row longer than this is cut; the section below it shows the prompt in full.
SHORT_PROMPT = 120

STEP_KINDS = ("dense", "refresh", "sparse", "cached")
"""What a denoising step can have been, as records say it."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedSetting:
    """One of the settings that a page reports on.

    Args:
        label: what sets it apart from the others.
        report: the numbers.
        videos: one per comparison of the report, in its order.
    """

    label: str
    report: Report
    videos: Sequence[SideBySide]


def render(
    settings: Sequence[ReportedSetting],
    *,
    model: str,
    method_title: str,
    fps: float,
    gain: int,
) -> str:
    """The page as text: of one setting, or of several with their curve first.

    Args:
        settings: what is reported on, at least one.
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
    first = settings[0].report
    rows = [(each.label, one) for each in settings for one in each.report.comparisons]
    labels = ", ".join(each.label for each in settings)
    notes = [note for each in settings for note in each.report.notes]
    prompts = len(first.comparisons)
    page: str = environment.get_template("report.html.j2").render(
        title=f"Dense against sparse: {method_title} on {model}",
        lead=f"{prompts} prompt{'s' if prompts != 1 else ''} at {len(settings)} settings: {labels}",
        parts=[_part(place, each) for place, each in enumerate(settings)],
        points=curve_points(rows, f"{method_title} on {model}"),
        summary=summary_rows([(each.label, each.report) for each in settings]),
        fps=fps,
        gain=gain,
        environment=[(name, plain_text(value)) for name, value in first.environment.items()],
        conventions=list(CONVENTIONS.items()),
        notes=list(dict.fromkeys(notes)),
        created=first.created,
    )
    return page


def _part(place: int, each: ReportedSetting) -> dict[str, Any]:
    """What the template draws of one setting."""
    report = each.report
    schedule = schedule_cells([one.sparse.record for one in report.comparisons])
    return {
        "label": each.label,
        "anchor": f"{place + 1}-" if place else "",
        "headline": headline(report),
        "tiles": _tiles(report),
        "clips": [_clip(*pair) for pair in zip(report.comparisons, each.videos, strict=True)],
        "heat": _heat(report.density_map),
        "stages": stage_rows(report),
        "schedule": schedule,
        "schedule_text": schedule_text(schedule),
        "times": _times(report),
        "settings": [(name, plain_text(value)) for name, value in report.settings.items()],
    }


def summary_rows(reports: Sequence[tuple[str, Report]]) -> list[tuple[str, ...]]:
    """A table of means over prompts: the columns' titles, then a row for each setting."""
    rows = [
        (
            setting,
            format_spread(report.psnr, ".2f", identical=report.identical),
            format_spread(report.ssim, ".4f"),
            format_spread(report.flicker, ".2f"),
            format_total(report.work),
            format_share(report.computed),
            str(report.speedup),
        )
        for setting, report in reports
    ]
    titles = (
        "setting", "PSNR dB", "SSIM", "flicker dB", "computed, whole run", "in sparse calls",
        "speed",
    )  # fmt: skip
    return [titles, *rows]


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
    alone = format_sides(report.steadiness("flickering"))
    tiles[2]["note"] += f"; PSNR of frame differences. Temporal flickering as in VBench: {alone}"
    if worst := format_worst(report):
        tiles[0]["note"] += f"; worst {worst}"
    if report.promise is not None:
        tiles[0]["note"] += f"; promised {report.promise}"
    tiles += work_tiles(report.work, report.selected, report.computed)
    dense, sparse = report.seconds("dense", "denoise"), report.seconds("sparse", "denoise")
    return [*tiles, speed_tile(report.speedup, dense, sparse)]


def speed_tile(speedup: Speedup, dense: float | None, sparse: float | None) -> dict[str, str]:
    """The tile "Denoising": the ratio where there is one, else why not, and both times.

    Args:
        speedup: what the times tell.
        dense: mean seconds of the dense side.
        sparse: mean seconds of the sparse side.
    """
    times = f"{format_seconds(dense)} dense, {format_seconds(sparse)} sparse"
    if speedup.ratio is None:
        return {"name": "Denoising", "value": "-", "note": f"{speedup}: {times}"}
    note = f"{speedup.range}; {times}"
    return {"name": "Denoising", "value": f"{speedup.ratio:.2f}x", "note": note}


def work_tiles(
    work: Work | None, selected: float | None, computed: float | None, *, brief: bool = False
) -> list[dict[str, str]]:
    """What a run computed of its attention, in figures: the total first, then its split.

    Args:
        work: of the run, None where its record does not count it.
        selected: share that the method chose in the sparse calls, None where there were none.
        computed: share that was computed there.
        brief: say nothing of what has no figure.
    """
    if work is None:
        return [{"name": "Attention computed", "value": "-", "note": "not counted in this record"}]
    if computed is None:
        return [{"name": "Attention computed", "value": format_total(work), "note": work.split}]
    note = (
        f"{work.split}. These computed {format_share(computed)} of their pairs and selected "
        f"{format_share(selected)}"
    )
    if work.selection is None and not brief:
        # no tile for what has no figure.
        note += f". What choosing cost: {work.selection_source}"
    tiles = [{"name": "Attention computed", "value": format_total(work), "note": note}]
    if work.selection is not None:
        tiles.append(
            {
                "name": "Selection",
                "value": f"{work.selection:.1%}",
                "note": f"of dense attention, beside that; {work.selection_source}",
            }
        )
    return tiles


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


def schedule_cells(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the denoising steps of ``runs`` were, to be drawn in a row.

    Args:
        runs: their records; those of versions that did not tell draw nothing.

    Returns:
        For each step its place, the kind that most runs had there, and a label.
    """
    told = [record["steps"] for record in runs if record.get("steps")]
    cells = []
    for step, own in enumerate(zip(*told, strict=False)):
        kinds = Counter(one["kind"] for one in own)
        kind, count = kinds.most_common(1)[0]
        label = f"step {step + 1}: {kind}"
        if count < len(own):
            label += f" in {count} of {len(own)} runs"
        if kind == "cached":
            run = sum(one["blocks"] for one in own) / len(own)
            label += f", {run:.1%} of the blocks run"
        cells.append({"step": step, "kind": kind, "label": label})
    return cells


def schedule_text(cells: Sequence[Mapping[str, Any]]) -> str:
    """How many steps there are of each kind, in words."""
    kinds = Counter(cell["kind"] for cell in cells)
    return ", ".join(f"{kinds[kind]} {kind}" for kind in STEP_KINDS if kinds[kind])


def heat_cells(density_map: Sequence[Sequence[float | None]]) -> list[dict[str, Any]]:
    """What a density map shows: a cell for every step and layer that has a density."""
    return [
        {
            "step": step,
            "layer": layer,
            "opacity": f"{min(value, 1):.3f}",
            "label": f"step {step + 1}, layer {layer + 1}: {_computed(value)}",
        }
        for step, row in enumerate(density_map)
        for layer, value in enumerate(row)
        if value is not None
    ]


def _computed(share: float) -> str:
    if share > 1:
        return f"refresh, all and {share - 1:.1%} beside it computed"
    return "dense" if share == 1 else f"{share:.1%} computed"


def _heat(density_map: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    return {
        "steps": len(density_map),
        "layers": max((len(row) for row in density_map), default=0),
        "cells": heat_cells(density_map),
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
