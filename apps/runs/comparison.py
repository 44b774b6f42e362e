"""Dense and sparse videos of the same seeds, measured: what ``compare`` and the page share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from vidsparse.apps.runs.crew import Made
from vidsparse.apps.runs.prepared import PreparedPrompt
from vidsparse.apps.runs.prompts import slug
from vidsparse.apps.runs.report_page import ReportedSetting, SideBySide, render
from vidsparse.apps.runs.run_folder import RunFolder
from vidsparse.apps.terminal.progress import short
from vidsparse.files import parse_json, write_text
from vidsparse.metrics import (
    FrameQuality,
    Frames,
    VideoQuality,
    amplified_difference,
    compare_videos,
)
from vidsparse.pipelines.linear import LinearFacts
from vidsparse.report import Promise, PromptComparison, Report, RunFacts, Stage, mean_density_map
from vidsparse.work import Work

if TYPE_CHECKING:
    from vidsparse.pipelines.family import Defaults
    from vidsparse.pipelines.generate import Generated
    from vidsparse.pipelines.request import GenerateRequest

Generate = Callable[[Sequence["GenerateRequest"], str], "list[Generated]"]
"""Makes the videos of a batch of requests; the text says which, for a progress bar."""

# the file of a report that is written after all others.
_LAST = "report.json"

# what the difference picture is multiplied with: enough to see errors at 35 dB.
GAIN = 4

SAME_KERNEL = (
    "Both sides share seeds, noise and the dense attention: the sparse side's dense steps run the "
    "very kernel of the dense side, so no decibel is lost to another one."
)
AGAINST_STOCK = (
    "Both sides are dense: the first is the stock pipeline, the second runs by the dense kernel "
    "that was asked for, or that `auto` takes on this device."
)


class Comparison:
    """Runs both sides chunk by chunk and keeps the numbers; frames live for one chunk only.

    Args:
        generate: makes the videos; None where all are measured already or come by ``take``.
        folder: where the side-by-side videos go; it exists.
        kept: the same folder, where what was measured is to outlive this process: each prompt gets
            a record, from which a run with the same settings goes on. ``forget`` removes them.
        parts: whether to switch the parts of the sparse side on one after the other, each measured.
        turns: how often both sides are made in turns; of all but the first only the time is taken,
            so that ``generate`` must make every video anew.
    """

    def __init__(
        self,
        generate: Generate | None,
        folder: Path,
        kept: RunFolder | None = None,
        *,
        parts: bool = False,
        turns: int = 1,
    ) -> None:
        self.videos: list[SideBySide] = []
        self._generate = generate
        self._folder = folder
        self._kept = kept
        self._parts = parts
        self._turns = turns
        self.taken: set[int] = set()
        self._restored = 0
        self._records: list[Path] = []
        self._comparisons: list[PromptComparison] = []
        self._maps: list[list[list[float | None]]] = []

    def warm_up(self, chunk: Sequence[PreparedPrompt], defaults: Defaults) -> None:
        """Run two steps of both sides untimed: a process's first call pays for its set-up.

        A GPU and the compiler prepare for one shape, so they get the true one, and presets and
        keyframes fit no other; on a CPU a few frames do.
        """
        assert self._generate is not None
        for requests in warm_ups(chunk, defaults, self._parts):
            self._generate(requests, "warm-up")

    def take(self, one: PreparedPrompt, made: Made) -> PromptComparison:
        """Put in its place what a worker measured of a prompt; ``run`` takes it from there.

        Raises:
            OutputError: the folder cannot be written to.
        """
        assert self._kept is not None
        self._kept.put(self._kept.target(one.prompt), made.video, made.record)
        self.taken.add(one.prompt.number)
        return _as_recorded(one, made.record)

    def run(self, chunk: Sequence[PreparedPrompt]) -> list[PromptComparison]:
        """Make a chunk dense and sparse, measure it, and encode the side-by-side videos.

        A chunk that ``is_measured`` is taken from its records.
        """
        if self._kept is not None and is_measured(self._kept, chunk):
            found = [self._restore(one) for one in chunk]
            self._comparisons += found
            self._restored += len({one.prompt.number for one in chunk} - self.taken)
            return found
        assert self._generate is not None
        runs = runs_of(chunk, self._parts, self._turns)
        once = len(runs) - 2 * (self._turns - 1)
        (side, requests), *before, (name, whole) = runs[:once]
        dense = self._generate(requests, _label(chunk, side))
        stages: list[list[Stage]] = [[] for _ in chunk]
        for part, requests in before:
            made = self._generate(requests, _label(chunk, part))
            for found_so_far, reference, other in zip(stages, dense, made, strict=True):
                quality = video_quality(reference.frames, other.frames)
                found_so_far.append(_stage(part, quality, run_facts(other.record)))
        sparse = self._generate(whole, _label(chunk, name))
        # a list a prompt: dense, sparse, dense, sparse.
        seconds = [
            [*pair]
            for pair in zip(denoising_seconds(dense), denoising_seconds(sparse), strict=True)
        ]
        for place, (part, requests) in enumerate(runs[once:]):
            turn = f"{part}, turn {place // 2 + 2} of {self._turns}"
            made = self._generate(requests, _label(chunk, turn))
            for taken, more in zip(seconds, denoising_seconds(made), strict=True):
                taken.append(more)
        found = [
            self._measure(one, reference, other, name, earlier, _pairs(taken))
            for one, reference, other, earlier, taken in zip(
                chunk, dense, sparse, stages, seconds, strict=True
            )
        ]
        self._comparisons += found
        return found

    def report(self, request: GenerateRequest, batch: int, workers: str | None = None) -> Report:
        """Everything measured, as one value.

        Args:
            request: holds the settings of all prompts.
            batch: how many prompts were made at once.
            workers: who measured what came by ``take``.
        """
        records = [each.sparse.record for each in self._comparisons]
        record = records[0]
        same = AGAINST_STOCK if request.method == "dense" else SAME_KERNEL
        notes = [same, "Both sides ran two untimed steps before the first prompt."]
        if (linear := record["linear"]) is not None and linear["layers"]:
            notes.append(
                f"The sparse side has {LinearFacts(**linear)}; the dense side has them all in the "
                "model's own format."
            )
        notes += _cache_notes(records)
        if (processes := record.get("processes", 1)) > 1:
            notes.append(f"Every video of both sides was made by {processes} processes together.")
        if self._turns > 1:
            notes.append(
                f"Both sides were made {self._turns} times in turns, and their seconds of "
                "denoising are means over them. All else is of the first turn."
            )
        if batch > 1:
            notes.append(f"Times are those of batches of {batch}, divided by the batch's size.")
        if workers is not None:
            notes.append(
                f"Prompts were measured side by side by {workers}, each after two such steps of "
                "its own."
            )
        if self._restored:
            notes.append(
                f"{self._restored} of {len(self._comparisons)} prompts were measured by an earlier "
                "process, which was stopped."
            )
        for each in self._comparisons:
            for note in each.sparse.record["notes"]:
                what = "Some calls" if note.startswith("dense:") else "The sparse side"
                notes.append(f"{what} ran {note}.")
        return Report(
            settings={**request.options(), "batch": batch},
            environment=_environment(records),
            comparisons=self._comparisons,
            density_map=mean_density_map(self._maps),
            notes=list(dict.fromkeys(notes)),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            promise=_promise(request),
        )

    def _measure(
        self,
        one: PreparedPrompt,
        dense: Generated,
        sparse: Generated,
        part: str,
        earlier: Sequence[Stage],
        turns: Sequence[tuple[float, float]],
    ) -> PromptComparison:
        density_map = sparse.record["density_map"]
        if density_map:
            self._maps.append(density_map)
        self.videos.append(self._side_by_side(one, dense.frames, sparse.frames))
        quality = video_quality(dense.frames, sparse.frames)
        sides = _both_sides(dense.record, sparse.record, turns)
        found = PromptComparison(
            number=one.prompt.number,
            prompt=one.prompt.text,
            seed=one.request.seed,
            quality=quality,
            **sides,
            # a page keeps dense videos; a command makes every one anew.
            kept=dense.record.get("kept"),
            stages=(*earlier, _stage(part, quality, sides["sparse"])) if self._parts else (),
        )
        if self._kept is not None:
            target = self._kept.target(one.prompt)
            video = self.videos[-1]
            record = {
                "prompt": found.prompt,
                "quality": asdict(found.quality),
                "picture": [video.width, video.height],
                "stages": [asdict(stage) for stage in found.stages],
                "turns": found.turns,
                "dense": dense.record,
                "sparse": sparse.record,
            }
            self._kept.write_record(target, record)
            self._records.append(target.record)
        return found

    def _restore(self, one: PreparedPrompt) -> PromptComparison:
        """What the record of a measured prompt says."""
        assert self._kept is not None
        target = self._kept.target(one.prompt)
        self._records.append(target.record)
        record = parse_json(target.record.read_bytes())
        if record["sparse"]["density_map"]:
            self._maps.append(record["sparse"]["density_map"])
        width, height = record["picture"]
        self.videos.append(SideBySide(mp4=target.video.read_bytes(), width=width, height=height))
        return _as_recorded(one, record)

    def forget(self) -> None:
        """Remove the records: the report holds everything, and the next run measures anew."""
        for path in self._records:
            path.unlink(missing_ok=True)

    def _side_by_side(self, one: PreparedPrompt, dense: Frames, sparse: Frames) -> SideBySide:
        from vidsparse.pipelines.video import write_video

        frames = np.concatenate([dense, sparse, amplified_difference(dense, sparse, GAIN)], axis=2)
        name = f"{one.prompt.number:04d}-{slug(one.prompt.text)}.mp4"
        path = self._folder / name if self._kept is None else self._kept.target(one.prompt).video
        assert one.request.fps is not None
        write_video(frames, path, one.request.fps)
        return SideBySide(mp4=path.read_bytes(), width=frames.shape[2], height=frames.shape[1])


def _environment(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Device and versions of all runs; where they differ, every one."""
    each = [{"device": device_name(one["device"]), **one["versions"]} for one in records]
    found: dict[str, Any] = {}
    for name, value in each[0].items():
        values = list(dict.fromkeys(one.get(name) for one in each))
        found[name] = value if len(values) == 1 else " and ".join(map(str, values))
    return found


def machine_text(device: str) -> str:
    """This machine in words, with the versions of all packages that a run's record names."""
    from vidsparse.pipelines.records import machine_facts

    facts = machine_facts(device)
    versions = [f"{name} {version}" for name, version in facts["versions"].items() if version]
    return f"{device_name(facts['device'])}, {', '.join(versions)}"


def is_measured(folder: RunFolder, chunk: Sequence[PreparedPrompt]) -> bool:
    """Whether an earlier run that did not come to its end has measured the chunk."""
    return all(folder.target(one.prompt).finished for one in chunk)


def is_reported(folder: RunFolder) -> bool:
    """Whether an earlier run came to its end there."""
    return (folder.path / _LAST).exists()


def _as_recorded(one: PreparedPrompt, record: Mapping[str, Any]) -> PromptComparison:
    """A prompt's numbers, of what ``Comparison`` wrote when it was measured."""
    quality = dict(record["quality"])
    frames = tuple(FrameQuality(**frame) for frame in quality.pop("frames"))
    return PromptComparison(
        number=one.prompt.number,
        prompt=one.prompt.text,
        seed=one.request.seed,
        quality=VideoQuality(frames=frames, **quality),
        # records of earlier versions hold no turns.
        **_both_sides(record["dense"], record["sparse"], record.get("turns", ())),
        stages=tuple(Stage(**stage) for stage in record["stages"]),
    )


def _cache_notes(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a step cache left out, and how old plans came to be by it."""
    steps = [step for record in records for step in record["steps"]]
    cached = [step for step in steps if step["kind"] == "cached"]
    if not cached:
        return []
    notes = [
        f"{len(cached)} of the sparse side's {len(steps)} steps left blocks out by its step cache: "
        "of their attention nothing was computed."
    ]
    options = records[0]["options"]
    if options["refresh"] and options["method_options"].get("reach") is None:
        # plans serve from one refresh to the next, whatever a cache leaves out between.
        return notes
    reuse = options["reuse"]
    oldest = max((record["oldest_plan"] or 0) for record in records)
    if oldest >= reuse:
        notes.append(
            f"A plan serves {reuse} steps that are run, so that one still served {oldest} steps "
            "after its own."
        )
    return notes


def _promise(request: GenerateRequest) -> Promise | None:
    """What the request's preset says of the quality; None where it says nothing of such videos."""
    from vidsparse.pipelines.request import runs_as_calibrated
    from vidsparse.presets import load_preset

    if request.preset is None:
        return None
    preset = load_preset(request.preset)
    measured = preset.measured
    if not {"psnr", "total", "prompts", "denoising_steps"} <= measured.keys():
        return None
    if not runs_as_calibrated(request, preset):
        return None
    return Promise(
        psnr=measured["psnr"],
        std=measured.get("psnr_std"),
        total=measured["total"],
        prompts=measured["prompts"],
        steps=measured["denoising_steps"],
    )


def video_quality(dense: Frames, sparse: Frames) -> VideoQuality:
    """The sparse video against the dense one, frames shared out over threads."""
    # scikit-image's filters release the interpreter lock.
    with ThreadPoolExecutor() as pool:
        return compare_videos(dense, sparse, pool=pool)


def dense_side(request: GenerateRequest) -> GenerateRequest:
    """What a request is compared with: itself with method dense, by the same dense kernel.

    One whose method is dense already is compared with the stock pipeline. Linear layers are in the
    model's own format, and no step is cached.
    """
    plain = replace(request, speed=None, linear="none", cache="none", cache_threshold=None)
    if request.method == "dense":
        return replace(plain, dense_kernel="stock")
    return replace(plain, method="dense", method_options={}, preset=None)


def stages_of(request: GenerateRequest) -> list[tuple[str, GenerateRequest]]:
    """What sets a request apart from its ``dense_side``, a part after the other.

    Returns:
        Each part in words, and the request with it and all parts before it; the last is ``request``
        itself.
    """
    found = []
    plain = replace(request, speed=None, linear="none", cache="none", cache_threshold=None)
    if request.method != "dense":
        found.append((f"sparse attention ({request.method})", plain))
    elif request.dense_kernel != "stock":
        found.append((f"dense attention ({request.dense_kernel})", plain))
    if request.linear != "none":
        found.append((f"linear layers in {request.linear}", replace(plain, linear=request.linear)))
    if request.cache != "none":
        found.append((f"step cache ({request.cache})", request))
    if not found:
        return [(request.method, request)]
    return [*found[:-1], (found[-1][0], request)]


def runs_of(
    chunk: Sequence[PreparedPrompt], parts: bool, turns: int = 1
) -> list[tuple[str, list[GenerateRequest]]]:
    """The runs of a chunk in their order, each with its name: the dense side, then the sparse one.

    With ``parts`` the parts of the sparse side come before it, one after the other. All ``turns``
    but the first are the two sides alone.
    """
    whole = [one.request for one in chunk]
    dense = ("dense", [dense_side(request) for request in whole])
    if parts:
        columns = zip(*(stages_of(request) for request in whole), strict=True)
        others = [(column[0][0], [each for _, each in column]) for column in columns]
    else:
        others = [(whole[0].method, whole)]
    return [dense, *others, *[dense, others[-1]] * (turns - 1)]


def warm_ups(
    chunk: Sequence[PreparedPrompt], defaults: Defaults, parts: bool
) -> list[list[GenerateRequest]]:
    """Two steps of each of the runs of a chunk, on a CPU of a few frames where that will do."""
    request = chunk[0].request
    frames = request.frames
    # neither a preset nor keyframes fit a shorter video.
    whole = request.compile or request.preset is not None or request.keyframes
    if request.device == "cpu" and not whole:
        frames = defaults.few_frames
    (_, dense), *others = runs_of(chunk, parts)
    bare: dict[str, Any] = {"dense_steps": 0, "dense_last_steps": 0}
    sparse = [[replace(one, **bare) for one in requests] for _, requests in others]
    return [[replace(one, steps=2, frames=frames) for one in side] for side in (dense, *sparse)]


def write_report(
    folder: Path, report: Report, videos: Sequence[SideBySide], request: GenerateRequest
) -> list[Path]:
    """Write the three forms of the report into ``folder``; return their paths, the page first.

    Raises:
        OutputError: the folder cannot be written to.
    """
    page = folder / "report.html"
    one = ReportedSetting(label=request.method, report=report, videos=videos)
    write_page(page, [one], request)
    return [page, *write_tables(folder, report)]


def write_page(path: Path, settings: Sequence[ReportedSetting], request: GenerateRequest) -> None:
    """Write the page of one or several settings; ``request`` is any of them.

    Raises:
        OutputError: it cannot be written.
    """
    from vidsparse.methods import METHODS

    assert request.fps is not None
    page = render(
        settings,
        model=Path(request.model).name or request.model,
        method_title=METHODS[request.method].title,
        fps=request.fps,
        gain=GAIN,
    )
    write_text(path, page, hint="")


def write_tables(folder: Path, report: Report) -> list[Path]:
    """Write the report as Markdown and as JSON into ``folder``; return their paths.

    Raises:
        OutputError: the folder cannot be written to.
    """
    texts = {"report.md": report.to_markdown(), _LAST: report.to_json_text()}
    for name, text in texts.items():
        write_text(folder / name, text, hint="")
    return [folder / name for name in texts]


def _stage(name: str, quality: VideoQuality, facts: RunFacts) -> Stage:
    return Stage(
        name=name,
        psnr=quality.psnr,
        ssim=quality.ssim,
        seconds=facts.seconds.get("denoise"),
        total=facts.work.total if facts.work else None,
    )


def _label(chunk: Sequence[PreparedPrompt], side: str) -> str:
    first, last = chunk[0].prompt, chunk[-1].prompt
    if first is last:
        return f"{first.number} {side}: {short(first.text)}"
    return f"{first.number}-{last.number} {side}"


def run_facts(record: dict[str, Any]) -> RunFacts:
    """What one record says of its run's cost."""
    # loading happens once for both sides and says nothing about either.
    seconds = {
        phase: value if value is None else value / record["batch"]
        for phase, value in record["times"].items()
        if phase != "load"
    }
    return RunFacts(
        seconds=seconds,
        selected=record["selected"],
        computed=record["computed"],
        dense_step_share=record["dense_step_share"],
        implementation=record["implementation"],
        record=record,
        work=Work.from_json(record.get("work")),
    )


def denoising_seconds(made: Sequence[Generated]) -> list[float]:
    """Seconds of denoising of each video, those of a batch shared out evenly."""
    return [one.record["times"]["denoise"] / one.record["batch"] for one in made]


def _pairs(seconds: Sequence[float]) -> Sequence[tuple[float, float]]:
    """Pairs of dense and sparse ones, if there is more than one."""
    pairs = list(zip(seconds[::2], seconds[1::2], strict=True))
    return pairs if len(pairs) > 1 else ()


def _both_sides(
    dense: dict[str, Any], sparse: dict[str, Any], turns: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """What a prompt's records say of both sides, their seconds of denoising those of all turns."""
    sides = {}
    for place, (name, record) in enumerate((("dense", dense), ("sparse", sparse))):
        facts = run_facts(record)
        if turns:
            # all else was taken in the first turn.
            more = fmean(each[place] for each in turns) - turns[0][place]
            seconds = dict(facts.seconds)
            for phase in ("denoise", "total"):
                if (taken := seconds.get(phase)) is not None:
                    seconds[phase] = taken + more
            facts = replace(facts, seconds=seconds)
        sides[name] = facts
    return {**sides, "turns": tuple((each[0], each[1]) for each in turns)}


def device_name(device: dict[str, Any]) -> str:
    """A record's device as people read it."""
    threads = f", {device['threads']} threads" if device["threads"] else ""
    return f"{device['name']}{threads}"
