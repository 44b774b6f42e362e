"""What the page shows beside Gradio's own components, as HTML; every text is escaped."""

from __future__ import annotations

import base64
import io
import urllib.parse
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from vidsparse.apps.page.queue import Snapshot
from vidsparse.apps.page.tasks import BRIGHT, Clip, Pair
from vidsparse.apps.runs.curve import curve_points
from vidsparse.apps.runs.report_page import (
    SHORT_PROMPT,
    frame_plot,
    heat_cells,
    schedule_cells,
    schedule_text,
    speed_tile,
    summary_rows,
    work_tiles,
)
from vidsparse.metrics import spread_of
from vidsparse.report import PromptComparison, Report
from vidsparse.speedup import Speedup
from vidsparse.wording import format_number, format_psnr, format_seconds, format_total
from vidsparse.work import Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vidsparse.apps.page.estimates import Estimate
    from vidsparse.apps.page.gallery import Kept
    from vidsparse.pipelines.models import ModelRef
    from vidsparse.pipelines.request import GenerateRequest
    from vidsparse.probe import CellRecord

ORDER_TITLES = {"hilbert": "Hilbert", "rowmajor": "raster"}

# a cell's map: pooled attention from pale to deep in grey, over it in orange what was kept.
_GREY = ((246, 247, 249), (58, 68, 84))
_ORANGE = ((255, 226, 196), (196, 74, 0))


@cache
def macros(name: str = "fragments.html.j2") -> Any:
    """The macros of a template, which escape what they are given."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loaders = [
        PackageLoader("vidsparse.apps.page", "."),
        PackageLoader("vidsparse.apps.runs", "templates"),
    ]
    environment = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(name).module


def head(studies: str = "", back: str = "") -> str:
    """What both pages begin with, and where the other one is."""
    return str(macros().head(studies, back))


def alert(text: str) -> str:
    """What went wrong."""
    return str(macros().alert(text))


def note(text: str) -> str:
    """A remark in small print."""
    return str(macros().note(text))


def fold() -> str:
    """What the form is folded away with on narrow screens."""
    return str(macros().fold())


def file_url(path: Path) -> str:
    """Where the page serves a file of its folder; relative, so that it holds behind a proxy."""
    return f"gradio_api/file={urllib.parse.quote(str(path))}"


def links(files: Sequence[tuple[str, Path]]) -> str:
    """Downloads: label and file."""
    return str(
        macros().links(
            [{"label": label, "href": file_url(path), "name": path.name} for label, path in files]
        )
    )


def status(
    snapshot: Snapshot, done: str = "Done", warnings: Sequence[str] = (), behind: int = 0
) -> str:
    """How a job stands: which video of how many, its step, the time gone and the time left.

    ``behind`` more of the visitor's wait for it.
    """
    parts = [snapshot.place] if snapshot.place else []
    running = snapshot.state in ("waiting", "running")
    if snapshot.state == "waiting":
        ahead = snapshot.ahead
        title = "Loading the model" if snapshot.loading and not ahead else "Waiting"
        parts = [_before(ahead) if ahead else "yours is next"]
        if snapshot.wait:
            parts.append(f"begins in about {_duration(snapshot.wait)}")
    elif snapshot.state == "running":
        title = snapshot.phase[:1].upper() + snapshot.phase[1:]
        if snapshot.steps:
            parts.append(f"step {snapshot.step} / {snapshot.steps}")
        if snapshot.elapsed >= 1:
            parts.append(f"{_duration(snapshot.elapsed)} so far")
        if snapshot.stopping:
            within = 0 < snapshot.step < snapshot.steps
            title = "Stopping after this step" if within else "Stopping"
        elif snapshot.left is not None:
            parts.append(f"about {_duration(snapshot.left)} left")
    elif snapshot.state == "cancelled":
        title = "Cancelled"
        at = f"at step {snapshot.step} / {snapshot.steps}; " if snapshot.steps else ""
        parts = [f"{at}your settings and videos are kept"]
    else:
        title = done if snapshot.state == "done" else "Failed"
        parts = [format_seconds(snapshot.elapsed)] if snapshot.elapsed else []
    # loading, warming up and writing have no steps: a bar that stands at nothing would look stuck.
    busy = snapshot.state == "running" and not snapshot.steps
    busy |= snapshot.loading and not snapshot.ahead
    if behind:
        parts.append(f"{behind} more of yours wait{'s' if behind == 1 else ''}")
    detail, finished = " · ".join(parts), snapshot.state == "done"
    return str(
        macros().status(
            snapshot.job, title, detail, snapshot.done, running, finished, busy, list(warnings)
        )
    )


def _before(jobs: int) -> str:
    return f"{jobs} job{'s' if jobs != 1 else ''} before yours"


def outlook(estimate: Estimate | None, videos: int, ahead: int, wait: float | None) -> str:
    """What is to be expected of videos that are not asked for yet: time, memory and the queue."""
    many = f" for {videos} videos" if videos > 1 else ""
    if estimate is None:
        parts, basis = ["Time is told once the model is loaded"], ""
    else:
        # so small a video takes more for each of its tokens.
        about = "Up to about" if estimate.basis == "warm-up" else "About"
        parts = [f"{about} {_duration(estimate.seconds)}{many}"]
        basis = {
            "alike": "from videos of this kind made here",
            "other": f"from {estimate.size}, made here",
            "warm-up": "a first guess from the warm-up",
        }[estimate.basis]
        if estimate.memory is not None:
            parts.append(_memory(estimate.memory, estimate.room))
    if ahead:
        after = f", begins in about {_duration(wait)}" if wait is not None else ""
        parts.append(f"{_before(ahead)}{after}")
    elif estimate is not None:
        parts.append("begins at once")
    much = bool(estimate and estimate.memory and estimate.room and estimate.memory > estimate.room)
    return str(macros().outlook(" · ".join(parts), basis, much))


def _memory(needed: int, room: int | None) -> str:
    of = f" of {room / 2**30:.1f}" if room else ""
    return f"{needed / 2**30:.1f}{of} GiB memory"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def model_card(model: ModelRef) -> str:
    """What a model is, its default size, and what it knows; marks other words of the prompt."""
    defaults = model.defaults
    size = (
        f"{defaults.frames} frames of {defaults.width}x{defaults.height} in {defaults.steps} steps"
    )
    return str(
        macros().model_card(
            Path(model.name).name, model.description, model.license, size, list(model.vocabulary)
        )
    )


# ---- generate ----


def clip_facts(clip: Clip) -> str:
    """Time and densities of one video."""
    record, times = clip.record, clip.record["times"]
    return str(
        macros().tiles(
            [
                {
                    "name": "Time",
                    "value": format_seconds(times["total"]),
                    "note": f"{format_seconds(times['denoise'])} denoising, "
                    f"{format_seconds(times['decode'])} decoding",
                },
                *_work(record),
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
    return work_tiles(work, record["selected"], record["computed"], brief=True)


def kept_caption(kept: Kept) -> str:
    """What stands under a kept video: what it shows, and how it was made."""
    return f"{_short(kept.prompt)} · {kept_name(kept)} · {kept.seconds:.1f} s"


def kept_choice(kept: Kept) -> str:
    """A kept video in a list to choose from: what tells it from others of its prompt first."""
    return f"{kept_name(kept)} · {_short(kept.prompt)}"


def kept_name(kept: Kept) -> str:
    """A kept video among others of its prompt."""
    share = kept.method if kept.total is None else f"{kept.method} {kept.total:.0%}"
    return f"{share} · seed {kept.seed}"


def about_report(request: GenerateRequest, prompts: int) -> str:
    """What a report is about, in one line: model, method, size and number of prompts."""
    return (
        f"{request.method} on {Path(request.model).name}, {request.frames} frames of "
        f"{request.width}x{request.height} in {request.steps} steps, "
        f"{prompts} prompt{'s' if prompts != 1 else ''}"
    )


def settings_line(request: GenerateRequest) -> str:
    """A request in one line."""
    options = ", ".join(
        f"{name} {value}" for name, value in request.method_options.items() if value is not None
    )
    preset = f"preset {Path(request.preset).stem}, " if request.preset else ""
    return (
        f"{request.model}, {request.method}{f' ({options})' if options else ''}, {preset}"
        f"{request.frames} frames of {request.width}x{request.height}, {request.steps} steps, "
        f"seed {request.seed}, {request.order} order"
    )


# ---- compare ----


def viewer(pair: Pair, source: str | None = None, facts: str = "") -> str:
    """Both videos and their difference, in step, with the measures of every frame below.

    ``source`` is the address of their video, where the page does not serve it as a file; ``facts``,
    markup, stand right below the videos.
    """
    height, width = pair.sparse.request.height, pair.sparse.request.width
    frames = pair.quality.frames
    return str(
        macros().viewer(
            pair.panels.name,
            source or file_url(pair.panels),
            len(frames),
            pair.sparse.request.fps,
            width,
            height,
            BRIGHT,
            [frame_plot(frames, "psnr"), frame_plot(frames, "ssim")],
            pair.sparse.request.prompt,
            pair.names,
            Markup(facts),
        )
    )


def opening(pair: Pair) -> str:
    """The finished comparison that the page opens with, whole."""
    video = base64.b64encode(pair.panels.read_bytes()).decode("ascii")
    request, device = pair.sparse.request, pair.sparse.record["device"]
    about = (
        f"Made before: {settings_line(request)}; on {device['name']}, {device['threads']} threads"
    )
    return "".join(
        (
            str(macros().opening(request.prompt)),
            # the videos first, which say what it is about.
            viewer(pair, f"data:video/mp4;base64,{video}", pair_facts(pair)),
            str(macros().title("Where attention was sparse")),
            heat(pair),
            note(f"{about}."),
        )
    )


def pair_facts(pair: Pair) -> str:
    """What sparsity cost and gained, or how far two chosen videos are apart, in five figures."""
    if pair.timed:
        seconds = [
            spread_of([getattr(each, side) for each in pair.timed]).mean
            for side in ("dense", "sparse")
        ]
        sides = [
            *_work(pair.sparse.record),
            speed_tile(Speedup.of(pair.timed), *seconds),
        ]
        measured = "over all frames, before encoding"
    else:
        sides = [
            _side_tile(*each) for each in zip(pair.names, (pair.dense, pair.sparse), strict=True)
        ]
        measured = "over all frames, as encoded"
    quality = pair.quality
    flicker = "identical" if quality.identical else format_number(quality.flicker, ".2f", " dB")
    return str(
        macros().tiles(
            [
                {"name": "PSNR", "value": format_psnr(quality, " dB"), "note": measured},
                {"name": "SSIM", "value": f"{quality.ssim:.4f}", "note": "mean over frames"},
                {"name": "Flicker", "value": flicker, "note": "PSNR of frame differences"},
                *sides,
            ]
        )
    )


def _side_tile(name: str, clip: Clip) -> dict[str, str]:
    """What one of two chosen videos took."""
    record = clip.record
    share = "all attention" if record["computed"] is None else f"{record['total']:.1%} of attention"
    return {"name": name, "value": format_seconds(record["times"]["total"]), "note": share}


def heat(pair: Pair) -> str:
    """Computed density over steps and layers; heads on a click."""
    density = pair.sparse.record["density_map"]
    if not density:
        return note("Dense attention has no density map.")
    heads = [
        [None if shares is None else [round(share, 3) for share in shares] for shares in row]
        for row in pair.heads
    ]
    steps = schedule_cells([pair.sparse.record])
    drawn = macros().heat(
        pair.panels.name, heat_cells(density), len(density), max(map(len, density)), heads
    )
    return f"{drawn}{macros().steps(steps, schedule_text(steps))}"


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
        macros().cell(
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
    ("computed", False),
    ("dense / sparse", False),
)


def report_table(rows: Sequence[tuple[str, PromptComparison]], about: str) -> str:
    """One row for each prompt and setting, as they come in."""
    caption = (
        f"Every prompt: {about}. Computed is of the whole run's attention; dense / sparse are "
        "seconds of denoising."
    )
    return str(
        macros().table(
            caption,
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
                    _both_times(each),
                )
                for setting, each in rows
            ],
        )
    )


def _both_times(each: PromptComparison) -> str:
    """Denoising seconds of both sides, and since when a dense one has been kept."""
    times = " / ".join(
        format_number(run.seconds.get("denoise"), ".2f") for run in (each.dense, each.sparse)
    )
    return times if each.kept is None else f"{times}, dense kept from {each.kept}"


def report_summary(reports: Sequence[tuple[str, Report]], about: str) -> str:
    """One row for each setting: means and spreads over the prompts."""
    titles, *rows = summary_rows(reports)
    names = [{"name": name, "text": not place} for place, name in enumerate(titles)]
    return str(macros().table(f"Means over prompts: {about}", names, rows))


def report_curve(rows: Sequence[tuple[str, PromptComparison]], about: str) -> str:
    """PSNR over the whole run's share computed: every prompt, and the mean of each setting."""
    points = curve_points(rows, about)
    return "" if points is None else str(macros("curve.html.j2").curve(points, "vs-curve"))


def _short(prompt: str) -> str:
    return prompt if len(prompt) <= SHORT_PROMPT else prompt[:SHORT_PROMPT] + "..."
