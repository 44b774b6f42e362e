"""The jobs of the page: make a video, compare it with the dense one, look into a cell, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

from vidsparse.apps.page.queue import Cancelled
from vidsparse.apps.page.queue import Job as QueueJob
from vidsparse.apps.page.workbench import Workbench
from vidsparse.apps.runs.comparison import Comparison, video_quality, write_page, write_tables
from vidsparse.apps.runs.prepared import PreparedPrompt
from vidsparse.apps.runs.prompts import Prompt, slug
from vidsparse.apps.runs.report_page import ReportedSetting
from vidsparse.apps.runs.run_folder import RunFolder, VideoTarget
from vidsparse.errors import OutputError, UnsupportedError
from vidsparse.files import partial_name, put_in_place, unwritten
from vidsparse.metrics import Frames, VideoQuality, amplified_difference
from vidsparse.report import PromptComparison, Report
from vidsparse.speedup import TimedPair, shortest_of

if TYPE_CHECKING:
    from vidsparse.pipelines.generate import Generated
    from vidsparse.pipelines.handle import SparseHandle
    from vidsparse.pipelines.request import GenerateRequest
    from vidsparse.probe import CellRecord

Job = QueueJob[Workbench, Any]

# the viewer's second difference panel: dark differences survive the video's encoding in it, and
# the viewer takes the brighter of both panels at the gain asked for.
BRIGHT = 8

# pairs of runs that a speed is told from: the least that show which of them is unlike the others.
TURNS = 3


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
        dense: the dense side, or the first of two that were chosen.
        sparse: the sparse side, or the second.
        quality: the sparse side against the dense one.
        panels: a video of four panels: dense, sparse; their difference, and that 8 times as bright.
        heads: computed density ``[steps][layers][heads]``; None for a dense cell.
        timed: denoising seconds of both sides, of every time that they were made; none where two
            kept videos are compared.
        names: what the sides are called.
    """

    dense: Clip
    sparse: Clip
    quality: VideoQuality
    panels: Path
    heads: list[list[list[float] | None]]
    timed: tuple[TimedPair, ...]
    names: tuple[str, str] = ("Dense", "Sparse")

    @property
    def name(self) -> str:
        """What a window calls it."""
        return self.panels.stem


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFiles:
    """A report, finished or as far as it came.

    Args:
        request: the first setting, as it ran.
        reports: every setting's name and numbers.
        page: one HTML page with the curve, all settings and all videos.
        archive: a zip of the page, and of each setting's tables and videos in a folder by its name.
        ended: how it ended before all was made, in a sentence; empty for a whole one.
    """

    request: GenerateRequest
    reports: tuple[tuple[str, Report], ...]
    page: Path
    archive: Path
    ended: str = ""


def make_clip(request: GenerateRequest, stem: Path) -> Callable[[Workbench, Job], Clip]:
    """A job that makes one video; its files' names begin with ``stem``."""

    def work(bench: Workbench, job: Job) -> Clip:
        made = bench.generate(request, job, request.method)
        job.say("writing the video")
        make_folder_of(stem)
        return _write_clip(made, bench.fit(request), stem, job)

    return work


def make_clips(
    asked: Sequence[tuple[GenerateRequest, Path]], keep: Callable[[Clip], object]
) -> Callable[[Workbench, Job], list[Clip]]:
    """A job that makes several videos one after the other; ``keep`` is given each when it is there.

    Args:
        asked: every video's request, and how its files' names begin.
        keep: told of every video.
    """

    def work(bench: Workbench, job: Job) -> list[Clip]:
        clips = []
        for number, (request, stem) in enumerate(asked, 1):
            if len(asked) > 1:
                job.at(f"video {number} of {len(asked)}")
            clips.append(make_clip(request, stem)(bench, job))
            keep(clips[-1])
        return clips

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
        make_folder_of(stem)
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
                timed=(_timed(dense, sparse),),
            )

    return work


def compare_sides(
    sides: tuple[Clip | GenerateRequest, Clip | GenerateRequest],
    names: tuple[str, str],
    stem: Path,
) -> Callable[[Workbench, Job], Pair]:
    """A job that compares two videos, of which those that are only asked for are made first.

    Both are looked at as they were encoded, since of a kept one there is nothing else.
    """

    def work(bench: Workbench, job: Job) -> Pair:
        from vidsparse.pipelines.video import read_video, write_video

        make_folder_of(stem)
        clips = []
        for number, side in enumerate(sides, 1):
            if not isinstance(side, Clip):
                made = bench.generate(side, job, side.method)
                own = stem.with_name(f"{stem.name}-{number}")
                side = _write_clip(made, bench.fit(side), own, job)
            clips.append(side)
        one, other = clips
        job.check()
        job.say("measuring")
        frames = read_video(one.video), read_video(other.video)
        quality = video_quality(*frames)
        job.check()
        job.say("writing the video")
        panels = stem.with_name(f"{stem.name}-compare.mp4")
        assert other.request.fps is not None
        write_video(_panels(*frames), panels, other.request.fps, job.check)
        return Pair(
            dense=one, sparse=other, quality=quality, panels=panels, heads=[], timed=(), names=names
        )

    return work


def make_in_turns(pair: Pair) -> Callable[[Workbench, Job], Pair]:
    """A job that makes both videos of a comparison again, in turns, and keeps the times."""

    def work(bench: Workbench, job: Job) -> Pair:
        from vidsparse.apps.runs.comparison import dense_side

        request, timed = pair.sparse.request, []
        for turn in range(TURNS):
            job.at(f"turn {turn + 1} of {TURNS}")
            dense = bench.generate(dense_side(bench.fit(request)), job, "dense")
            job.check()
            timed.append(_timed(dense, bench.generate(request, job, request.method)))
            job.check()
        return replace(pair, timed=tuple(timed))

    return work


def _timed(dense: Generated, sparse: Generated) -> TimedPair:
    return TimedPair(
        dense=dense.record["times"]["denoise"],
        sparse=sparse.record["times"]["denoise"],
        kept=dense.record.get("kept"),
        shortest=shortest_of(sparse.record),
    )


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
        schedule = Schedule.of(fitted, reach=fitted.method_options.get("reach"))
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
    settings: Sequence[tuple[str, GenerateRequest]],
    prompts: Sequence[str],
    folder: Path,
    announce: Callable[[str, list[PromptComparison]], object],
    keep: Callable[[ReportFiles], object] = lambda _: None,
) -> Callable[[Workbench, Job], ReportFiles]:
    """A job that reports on ``prompts`` with each of the settings, as ``vidsparse compare`` does.

    Every prompt is made dense and then with one setting after the other, so that all are timed
    beside the same dense run. ``announce`` is given the setting's name and each prompt's comparison
    when it is there. A job that is cancelled or fails reports on those that it has made by then.

    Args:
        settings: names, each another, and what they stand for.
        prompts: texts.
        folder: for the page, the zip, and a folder for each setting.
        announce: told of every comparison.
        keep: given the report, also one that ended early.
    """

    def work(bench: Workbench, job: Job) -> ReportFiles:
        with ExitStack() as held:
            sides = []
            for number, (label, request) in enumerate(settings, 1):
                own = folder / f"{number}-{slug(label)}"
                held.enter_context(RunFolder(own).claim())
                sides.append(_Side(bench, job, label, request, prompts, own))
            for side in sides:
                job.say("warming up")
                side.warm_up()
            try:
                for place in range(len(prompts)):
                    for number, side in enumerate(sides, 1):
                        many = f", setting {number} of {len(sides)}" if len(sides) > 1 else ""
                        job.at(f"prompt {place + 1} of {len(prompts)}{many}")
                        announce(side.label, side.run(place))
                        job.check()
            except Exception as error:
                made = [side for side in sides if side.made]
                how = "was cancelled" if isinstance(error, Cancelled) else "ended by an error"
                count = sum(side.made for side in made)
                ended = f"The report {how}: {count} of {len(prompts) * len(sides)} comparisons"
                # what ended the job is the news, and not that its folder cannot be written to.
                with suppress(OutputError):
                    if made:
                        keep(_write_files(folder, made, f"{ended} were made."))
                raise
            job.at("")
            job.say("writing the report")
            files = _write_files(folder, sides)
            keep(files)
            return files

    return work


class _Side:
    """One setting of a report, and its comparisons as far as they are made."""

    def __init__(
        self,
        bench: Workbench,
        job: Job,
        label: str,
        request: GenerateRequest,
        prompts: Sequence[str],
        folder: Path,
    ) -> None:
        self.label, self.folder, self.made = label, folder, 0
        self.request = bench.fit(request)
        self._defaults = bench.load_for(request).defaults

        def generate(requests: Sequence[GenerateRequest], label: str) -> list[Generated]:
            # a warm-up is no video to keep.
            return [
                bench.dense(one, job, label)
                if one.method == "dense" and label != "warm-up"
                else bench.generate(one, job, label)
                for one in requests
            ]

        self._comparison = Comparison(generate, folder)
        self._prepared = [
            PreparedPrompt(
                prompt=Prompt(number=number, text=text, line=number),
                request=replace(self.request, prompt=text),
            )
            for number, text in enumerate(prompts, 1)
        ]

    def warm_up(self) -> None:
        self._comparison.warm_up(self._prepared[:1], self._defaults)

    def run(self, place: int) -> list[PromptComparison]:
        found = self._comparison.run([self._prepared[place]])
        self.made += len(found)
        return found

    def report(self, ended: str) -> ReportedSetting:
        report = self._comparison.report(self.request, 1)
        report = replace(report, notes=[*filter(None, [ended]), *report.notes])
        # one that was not measured to the end has a video by then and no numbers.
        videos = self._comparison.videos[: self.made]
        return ReportedSetting(label=self.label, report=report, videos=videos)


def _write_files(folder: Path, sides: Sequence[_Side], ended: str = "") -> ReportFiles:
    """Write tables of every setting, one page of all, and a zip of everything.

    ``ended`` is how a report ended before all was made.
    """
    made = [(side, side.report(ended)) for side in sides]
    request, page = sides[0].request, folder / "report.html"
    write_page(page, [setting for _, setting in made], request)
    for side, setting in made:
        write_tables(side.folder, setting.report)
    archive = folder / f"{folder.name}.zip"
    beside = [path for side, _ in made for path in sorted(side.folder.glob("[!.]*"))]
    _zip(archive, folder, [page, *beside])
    return ReportFiles(
        request=request,
        reports=tuple((each.label, each.report) for _, each in made),
        page=page,
        archive=archive,
        ended=ended,
    )


def _zip(archive: Path, folder: Path, paths: Sequence[Path]) -> None:
    """Write files of ``folder`` into a zip that unpacks to a folder of the same name.

    Raises:
        OutputError: it cannot be written.
    """
    partial = partial_name(archive)
    try:
        with ZipFile(partial, "x", ZIP_DEFLATED) as file:
            for path in paths:
                file.write(path, path.relative_to(folder.parent))
        put_in_place(partial, archive)
    except OSError as error:
        raise unwritten(archive, error) from None
    finally:
        partial.unlink(missing_ok=True)


def make_folder_of(stem: Path) -> None:
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
    write_video(made.frames, video, request.fps, job.check, sound=made.sound)
    Image.fromarray(made.frames[len(made.frames) // 2]).save(poster, quality=88)
    target = VideoTarget(video=video, record=video.with_suffix(".json"), finished=False)
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
