"""What the page shows beside Gradio's own components, as HTML; every text is escaped."""

from __future__ import annotations

import base64
import io
import math
import urllib.parse
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vidsparse.apps.page.queue import Snapshot
from vidsparse.apps.page.tasks import BRIGHT, Clip, Pair, ReportFiles
from vidsparse.apps.runs.report_page import SHORT_PROMPT, frame_plot, nice_ticks, work_tiles
from vidsparse.report import (
    PromptComparison,
    format_number,
    format_psnr,
    format_seconds,
    format_share,
    format_spread,
    format_total,
)
from vidsparse.work import Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vidsparse.pipelines.request import GenerateRequest
    from vidsparse.probe import CellRecord

ORDER_TITLES = {"hilbert": "Hilbert", "rowmajor": "raster"}

# a cell's map: pooled attention from pale to deep in grey, over it in orange what was kept.
_GREY = ((246, 247, 249), (58, 68, 84))
_ORANGE = ((255, 226, 196), (196, 74, 0))


@cache
def _macros() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("vidsparse.apps.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("fragments.html.j2").module


def alert(text: str) -> str:
    """What went wrong."""
    return str(_macros().alert(text))


def note(text: str) -> str:
    """A remark in small print."""
    return str(_macros().note(text))


def file_url(path: Path) -> str:
    """Where the page serves a file of its folder; relative, so that it holds behind a proxy."""
    return f"gradio_api/file={urllib.parse.quote(str(path))}"


def links(files: Sequence[tuple[str, Path]]) -> str:
    """Downloads: label and file."""
    return str(
        _macros().links(
            [{"label": label, "href": file_url(path), "name": path.name} for label, path in files]
        )
    )


def status(snapshot: Snapshot, done: str = "Done", warnings: Sequence[str] = ()) -> str:
    """How a job stands, with its step and the time left."""
    detail = format_seconds(snapshot.elapsed) if snapshot.elapsed else ""
    if snapshot.state == "waiting":
        ahead = snapshot.ahead
        title = "Waiting"
        detail = f"{ahead} job{'s' if ahead != 1 else ''} before yours" if ahead else "next in line"
    elif snapshot.state == "running":
        title = snapshot.phase[:1].upper() + snapshot.phase[1:]
        parts = [f"step {snapshot.step} / {snapshot.steps}"] if snapshot.steps else []
        if snapshot.stopping:
            within = 0 < snapshot.step < snapshot.steps
            title = "Stopping after this step" if within else "Stopping"
        elif snapshot.left is not None:
            parts.append(f"about {_duration(snapshot.left)} left")
        detail = " · ".join(parts)
    elif snapshot.state == "cancelled":
        title = "Cancelled"
        at = f"at step {snapshot.step} / {snapshot.steps}; " if snapshot.steps else ""
        detail = f"{at}your settings and videos are kept"
    else:
        title = done if snapshot.state == "done" else "Failed"
    running = snapshot.state in ("waiting", "running")
    return str(_macros().status(title, detail, snapshot.done, running, list(warnings)))


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


# ---- generate ----


def clip_facts(clip: Clip, dense_seconds: float | None) -> str:
    """Time, densities and speed of one video."""
    record, times = clip.record, clip.record["times"]
    sparse = record["computed"] is not None
    denoise = times["denoise"]
    speed = {"name": "Speed", "value": "-", "note": "make a dense video of this size to compare"}
    if not sparse:
        speed = {"name": "Speed", "value": "1.00x", "note": "this is the dense run"}
    elif dense_seconds:
        speed |= {
            "value": f"{dense_seconds / denoise:.2f}x",
            "note": f"denoising, last dense run took {format_seconds(dense_seconds)}",
        }
    return str(
        _macros().tiles(
            [
                {
                    "name": "Time",
                    "value": format_seconds(times["total"]),
                    "note": f"{format_seconds(denoise)} denoising, "
                    f"{format_seconds(times['decode'])} decoding",
                },
                *_work(record),
                speed,
                {
                    "name": "Ran on",
                    "value": clip.request.device,
                    "note": f"{record['implementation']}, {clip.request.dtype}",
                },
            ]
        )
    )


def _work(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """The run's share of attention computed, and its split."""
    work = Work.from_json(record["work"])
    return work_tiles(work, record["selected"], record["computed"])


def clip_caption(clip: Clip) -> str:
    """One line under a video of the history."""
    record = clip.record
    sparse = record["computed"] is not None
    share = f"{clip.request.method} {record['total']:.0%}" if sparse else "dense"
    return f"{share} · seed {clip.request.seed} · {clip.record['times']['total']:.1f} s"


def settings_line(request: GenerateRequest) -> str:
    """A request in one line."""
    options = ", ".join(f"{name} {value}" for name, value in request.method_options.items())
    preset = f"preset {Path(request.preset).stem}, " if request.preset else ""
    return (
        f"{request.model}, {request.method}{f' ({options})' if options else ''}, {preset}"
        f"{request.frames} frames of {request.width}x{request.height}, {request.steps} steps, "
        f"seed {request.seed}, {request.order} order"
    )


# ---- compare ----


def viewer(pair: Pair) -> str:
    """Both videos and their difference, in step, with the measures of every frame below."""
    height, width = pair.sparse.request.height, pair.sparse.request.width
    frames = pair.quality.frames
    return str(
        _macros().viewer(
            file_url(pair.panels),
            len(frames),
            pair.sparse.request.fps,
            width,
            height,
            BRIGHT,
            [frame_plot(frames, "psnr"), frame_plot(frames, "ssim")],
            pair.sparse.request.prompt,
        )
    )


def pair_facts(pair: Pair) -> str:
    """What sparsity cost and gained, in five figures."""
    quality, sparse, dense = pair.quality, pair.sparse.record, pair.dense.record
    seconds = [record["times"]["denoise"] for record in (dense, sparse)]
    return str(
        _macros().tiles(
            [
                {
                    "name": "PSNR",
                    "value": format_psnr(quality, " dB"),
                    "note": "over all frames, before encoding",
                },
                {"name": "SSIM", "value": f"{quality.ssim:.4f}", "note": "mean over frames"},
                {
                    "name": "Flicker",
                    "value": "identical"
                    if quality.identical
                    else format_number(quality.flicker, ".2f", " dB"),
                    "note": "PSNR of frame differences",
                },
                *_work(sparse),
                {
                    "name": "Denoising",
                    "value": f"{seconds[0] / seconds[1]:.2f}x" if seconds[1] else "-",
                    "note": f"{format_seconds(seconds[0])} dense, "
                    f"{format_seconds(seconds[1])} sparse",
                },
            ]
        )
    )


def heat(pair: Pair) -> str:
    """Computed density over steps and layers; heads on a click."""
    density = pair.sparse.record["density_map"]
    if not density:
        return note("Dense attention has no density map.")
    cells = [
        {
            "step": step,
            "layer": layer,
            "opacity": f"{value:.3f}",
            "label": f"step {step + 1}, layer {layer + 1}: "
            + ("dense" if value >= 1 else f"{value:.1%} computed"),
        }
        for step, row in enumerate(density)
        for layer, value in enumerate(row)
        if value is not None
    ]
    heads = [
        [None if shares is None else [round(share, 3) for share in shares] for shares in row]
        for row in pair.heads
    ]
    return str(_macros().heat(cells, len(density), max(map(len, density)), heads))


def cell_map(record: CellRecord, head: int, order: str) -> str:
    """One head's pooled attention with its kept tiles drawn over it, along ``order``."""
    maps = record.maps[order]
    # the root shows the many small weights beside the few large ones.
    weights = np.sqrt(maps.weights[head].astype(np.float32))
    opaque = np.where(maps.kept[head], 255, 0).astype(np.uint8)
    kept = np.concatenate([_ramp(weights, *_ORANGE), opaque[..., None]], axis=2)
    own = ORDER_TITLES.get(record.order, record.order)
    shown = ORDER_TITLES.get(order, order)
    rows, keys = record.tile
    where = (
        "Rows are query tiles and columns key tiles, in the order they were cut in"
        if order == record.order
        else f"Rows and columns are tokens in {shown} order; tiles were cut in {own} order"
    )
    return str(
        _macros().cell(
            f"step {record.step + 1}, layer {record.layer + 1}, head {head + 1}: "
            f"{record.selected[head]:.1%} selected, {record.computed[head]:.1%} computed",
            _png(_ramp(weights, *_GREY)),
            _png(kept),
            f"{where}. {record.tokens:,} tokens, tiles of {rows}x{keys}, {record.branch} branch. ",
        )
    )


def _ramp(
    weights: NDArray[np.float32], pale: tuple[int, ...], deep: tuple[int, ...]
) -> NDArray[np.uint8]:
    """Weights in [0, 1] as colours between two, ``[rows, columns, 3]``."""
    low, high = np.asarray(pale, np.float32), np.asarray(deep, np.float32)
    colours: NDArray[np.uint8] = (low + weights[..., None] * (high - low)).astype(np.uint8)
    return colours


def _png(pixels: NDArray[np.uint8]) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


# ---- report ----

_COLUMNS = (
    ("setting", True),
    ("#", False),
    ("prompt", True),
    ("PSNR dB", False),
    ("SSIM", False),
    ("flicker dB", False),
    ("computed, whole run", False),
    ("dense", False),
    ("sparse", False),
)


def report_table(rows: Sequence[tuple[str, PromptComparison]]) -> str:
    """One row for each prompt and setting, as they come in."""
    return str(
        _macros().table(
            [{"name": name, "text": text} for name, text in _COLUMNS],
            [
                (
                    setting,
                    each.number,
                    _short(each.prompt),
                    format_psnr(each.quality),
                    f"{each.quality.ssim:.4f}",
                    "identical"
                    if each.quality.identical
                    else format_number(each.quality.flicker, ".2f"),
                    format_total(each.sparse.work),
                    format_seconds(each.dense.seconds.get("denoise")),
                    format_seconds(each.sparse.seconds.get("denoise")),
                )
                for setting, each in rows
            ],
        )
    )


def report_summary(reports: Sequence[tuple[str, ReportFiles]]) -> str:
    """One row for each setting: means and spreads over the prompts."""
    names = (
        "setting", "PSNR dB", "SSIM", "flicker dB", "computed, whole run", "in sparse calls",
        "selected there", "denoising",
    )  # fmt: skip
    return str(
        _macros().table(
            [{"name": name, "text": not index} for index, name in enumerate(names)],
            [
                (
                    setting,
                    format_spread(made.report.psnr, ".2f", identical=made.report.identical),
                    format_spread(made.report.ssim, ".4f"),
                    format_spread(made.report.flicker, ".2f"),
                    format_total(made.report.work),
                    format_share(made.report.computed),
                    format_share(made.report.selected),
                    format_number(made.report.speedup("denoise"), ".2f", "x"),
                )
                for setting, made in reports
            ],
        )
    )


def report_curve(rows: Sequence[tuple[str, PromptComparison]]) -> str:
    """PSNR over the whole run's share computed: every prompt, and the mean of each setting."""
    points: dict[str, list[tuple[float, float, int]]] = {}
    for setting, each in rows:
        work = each.sparse.work
        if work is not None and each.quality.psnr is not None:
            points.setdefault(setting, []).append((work.total, each.quality.psnr, each.number))
    if not points:
        return ""
    everything = [point for group in points.values() for point in group]
    xs = nice_ticks(min(p[0] for p in everything), max(p[0] for p in everything))
    ys = nice_ticks(min(p[1] for p in everything), max(p[1] for p in everything))

    def place(x: float, y: float, label: str) -> dict[str, Any]:
        return {
            "x": (x - xs[0]) / (xs[-1] - xs[0]),
            "y": 1 - (y - ys[0]) / (ys[-1] - ys[0]),
            "label": label,
        }

    means = sorted(
        (
            place(
                float(np.mean([p[0] for p in group])),
                float(np.mean([p[1] for p in group])),
                f"{setting}: {np.mean([p[1] for p in group]):.2f} dB at "
                f"{np.mean([p[0] for p in group]):.1%} computed",
            )
            for setting, group in points.items()
        ),
        key=lambda point: point["x"],
    )
    return str(
        _macros().curve(
            _ticks(xs, percent=True),
            _ticks(ys, percent=False, down=True),
            [
                place(x, y, f"{setting}, prompt {number}: {y:.2f} dB at {x:.1%} computed")
                for setting, group in points.items()
                for x, y, number in group
            ],
            " ".join(f"{'L' if i else 'M'}{p['x']:.4f} {p['y']:.4f}" for i, p in enumerate(means)),
            means,
            "PSNR against attention computed in the whole run",
        )
    )


def _ticks(values: Sequence[float], *, percent: bool, down: bool = False) -> list[dict[str, Any]]:
    room = values[-1] - values[0]
    step = (values[1] - values[0]) * (100 if percent else 1)
    decimals = max(0, math.ceil(-math.log10(step) - 1e-9))
    found = []
    for value in values:
        at = (value - values[0]) / room
        text = f"{value * 100:.{decimals}f} %" if percent else f"{value:.{decimals}f}"
        found.append({"at": 1 - at if down else at, "label": text})
    return found


def _short(prompt: str) -> str:
    return prompt if len(prompt) <= SHORT_PROMPT else prompt[:SHORT_PROMPT] + "..."
