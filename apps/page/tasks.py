"""The jobs of the page: make a video, compare it with the dense one, look into a cell, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vidsparse.apps.page.queue import Cancelled
from vidsparse.apps.page.queue import Job as QueueJob
from vidsparse.apps.page.workbench import Workbench
from vidsparse.apps.runs.comparison import Comparison, video_quality, write_report
from vidsparse.apps.runs.prepared import PreparedPrompt
from vidsparse.apps.runs.prompts import Prompt
from vidsparse.apps.runs.run_folder import RunFolder, Target
from vidsparse.errors import OutputError, UnsupportedError
from vidsparse.metrics import Frames, VideoQuality, amplified_difference
from vidsparse.report import PromptComparison, Report

if TYPE_CHECKING:
    from vidsparse.pipelines.generate import Generated
    from vidsparse.pipelines.handle import SparseHandle
    from vidsparse.pipelines.request import GenerateRequest
    from vidsparse.probe import CellRecord

Job = QueueJob[Workbench, Any]

# the viewer's second difference panel: dark differences survive the video's encoding in it, and
# the viewer takes the brighter of both panels at the gain asked for.
BRIGHT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """A finished video.

    Args:
        request: as it ran, every default filled in.
        record: of its making, what stands in the JSON file beside it.
        video: the mp4.
        poster: a frame from its middle, JPEG.
    """

    request: GenerateRequest
    record: dict[str, Any]
    video: Path
    poster: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A dense and a sparse video of one request, measured.

    Args:
        dense: the dense side.
        sparse: the sparse side.
        quality: the sparse side against the dense one.
        panels: a video of four panels: dense, sparse; their difference, and that 8 times as bright.
        heads: computed density ``[steps][layers][heads]``; None for a dense cell.
    """

    dense: Clip
    sparse: Clip
    quality: VideoQuality
    panels: Path
    heads: list[list[list[float] | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFiles:
    """The report of one setting, and its files, the page first."""

    request: GenerateRequest
    report: Report
    paths: tuple[Path, ...]


def make_clip(request: GenerateRequest, stem: Path) -> Callable[[Workbench, Job], Clip]:
    """A job that makes one video; its files' names begin with ``stem``."""

    def work(bench: Workbench, job: Job) -> Clip:
        made = bench.generate(request, job, request.method)
        job.say("writing the video")
        _make_folder(stem)
        return _write_clip(made, bench.fit(request), stem, job)

    return work


def compare(request: GenerateRequest, stem: Path) -> Callable[[Workbench, Job], Pair]:
    """A job that makes a video dense and sparse and measures how far apart they are."""

    def work(bench: Workbench, job: Job) -> Pair:
        from vidsparse.apps.runs.comparison import dense_side
        from vidsparse.pipelines.video import write_video

        handles: list[SparseHandle] = []
        dense = bench.dense(request, job, "dense")
        job.check()
        sparse = bench.generate(request, job, request.method, attach=handles.append)
        job.check()
        job.say("measuring")
        fitted = bench.fit(request)
        quality = video_quality(dense.frames, sparse.frames)
        job.check()
        job.say("writing the videos")
        panels = stem.with_name(f"{stem.name}-compare.mp4")
        assert fitted.fps is not None
        _make_folder(stem)
        with _nothing_if_cancelled(stem):
            write_video(_panels(dense.frames, sparse.frames), panels, fitted.fps, job.check)
            return Pair(
                dense=_write_clip(
                    dense, dense_side(fitted), stem.with_name(f"{stem.name}-dense"), job
                ),
                sparse=_write_clip(sparse, fitted, stem, job),
                quality=quality,
                panels=panels,
                heads=handles[0].trace.head_density_map() if handles else [],
            )

    return work


def record_cell(
    request: GenerateRequest, step: int, layer: int
) -> Callable[[Workbench, Job], CellRecord]:
    """A job that runs the request up to ``step`` and records the call of ``layer`` in it.

    Where that step uses the plan of one before, that one is recorded. It raises UnsupportedError
    where the call is dense.
    """

    def work(bench: Workbench, job: Job) -> CellRecord:
        from vidsparse.probe import CellProbe
        from vidsparse.schedule import Schedule

        fitted = bench.fit(request)
        schedule = Schedule(**{each.name: getattr(fitted, each.name) for each in fields(Schedule)})
        assert fitted.steps is not None
        probe = CellProbe(schedule.plan_step(step, fitted.steps), layer)

        def attach(handle: SparseHandle) -> None:
            handle.probe(probe)

        # nothing after the recorded step is wanted: the run ends the way a cancelled one does.
        try:
            bench.generate(
                request,
                job,
                "recording",
                attach=attach,
                until=lambda: probe.record is not None,
            )
        except Cancelled:
            job.check()
        if probe.record is None:
            raise UnsupportedError(
                f"step {step + 1}, layer {layer + 1} made no plan. "
                "Hint: choose a cell that is not dense."
            )
        return probe.record

    return work


def report(
    requests: Sequence[GenerateRequest],
    prompts: Sequence[str],
    folder: Path,
    announce: Callable[[int, list[PromptComparison]], object],
) -> Callable[[Workbench, Job], list[ReportFiles]]:
    """A job that reports on ``prompts`` with each of the settings, as ``vidsparse compare`` does.

    ``announce`` is given the place of the setting and each prompt's comparison when it is there.
    """

    def work(bench: Workbench, job: Job) -> list[ReportFiles]:
        from vidsparse.pipelines.request import settings_hash

        found = []
        for place, request in enumerate(requests):
            target = folder / f"{request.method}-{settings_hash(request)}"
            with RunFolder(target).claim():
                found.append(
                    _one_report(bench, job, request, prompts, target, partial(announce, place))
                )
        return found

    return work


def _one_report(
    bench: Workbench,
    job: Job,
    request: GenerateRequest,
    prompts: Sequence[str],
    folder: Path,
    announce: Callable[[list[PromptComparison]], object],
) -> ReportFiles:
    fitted = bench.fit(request)

    def generate(requests: Sequence[GenerateRequest], label: str) -> list[Generated]:
        return [
            bench.dense(one, job, label)
            if one.method == "dense"
            else bench.generate(one, job, label)
            for one in requests
        ]

    comparison = Comparison(generate, folder)
    prepared = [
        PreparedPrompt(
            prompt=Prompt(number=number, text=text, line=number),
            request=replace(fitted, prompt=text),
        )
        for number, text in enumerate(prompts, 1)
    ]
    job.say("warming up")
    comparison.warm_up(prepared[:1], bench.load_for(request).defaults)
    for each in prepared:
        announce(comparison.run([each]))
    job.check()
    job.say("writing the report")
    made = comparison.report(fitted, 1)
    paths = write_report(folder, made, comparison.videos, fitted)
    return ReportFiles(request=fitted, report=made, paths=tuple(paths))


def _make_folder(stem: Path) -> None:
    """Make the folder for files that are about to be written.

    Raises:
        OutputError: it cannot be made.
    """
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"the output folder {stem.parent} cannot be made: {error.strerror}"
        ) from None


@contextmanager
def _nothing_if_cancelled(stem: Path) -> Iterator[None]:
    """Remove the files whose names begin with ``stem`` where the job is cancelled in the block."""
    try:
        yield
    except Cancelled:
        for path in stem.parent.glob(f"{stem.name}*"):
            path.unlink()
        raise


def _write_clip(made: Generated, request: GenerateRequest, stem: Path, job: Job) -> Clip:
    from PIL import Image

    from vidsparse.pipelines.video import write_video

    video, poster = stem.with_name(f"{stem.name}.mp4"), stem.with_name(f"{stem.name}.jpg")
    assert request.fps is not None
    write_video(made.frames, video, request.fps, job.check)
    Image.fromarray(made.frames[len(made.frames) // 2]).save(poster, quality=88)
    target = Target(video=video, record=video.with_suffix(".json"), finished=False)
    RunFolder(stem.parent).write_record(target, made.record)
    return Clip(request=request, record=made.record, video=video, poster=poster)


def _panels(dense: Frames, sparse: Frames) -> Frames:
    """Two by two, so that a wide video stays within what players decode."""
    above = np.concatenate([dense, sparse], axis=2)
    below = np.concatenate(
        [amplified_difference(dense, sparse, 1), amplified_difference(dense, sparse, BRIGHT)],
        axis=2,
    )
    return np.concatenate([above, below], axis=1)
