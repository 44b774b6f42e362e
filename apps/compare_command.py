"""``vidsparse compare``: what sparsity costs, measured against dense videos of the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from vidsparse.apps.console import Session, verbosity_options
from vidsparse.apps.jobs import Job, Jobs, prepare
from vidsparse.apps.options import GroupedCommand, request_options
from vidsparse.apps.progress import short, step_bar
from vidsparse.apps.prompts import read_prompts
from vidsparse.apps.report_page import SideBySide, render
from vidsparse.apps.run_folder import RunFolder, write_text
from vidsparse.errors import OptionError
from vidsparse.metrics import Frames, amplified_difference, compare_videos
from vidsparse.report import (
    PromptComparison,
    Report,
    RunFacts,
    format_psnr,
    format_seconds,
    format_share,
    format_spread,
    mean_density_map,
)

if TYPE_CHECKING:
    from vidsparse.pipelines.generate import Generated
    from vidsparse.pipelines.models import LoadedPipeline
    from vidsparse.pipelines.request import GenerateRequest

# what the difference picture is multiplied with: enough to see errors at 35 dB.
GAIN = 4

SAME_KERNEL = (
    "Both sides share seeds, noise and the dense attention: the sparse side's dense steps run the "
    "very kernel of the dense side, so no decibel is lost to another one."
)


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  vidsparse compare prompts.txt
  vidsparse compare prompts.txt --top-p 0.8 --tile 128x128
  vidsparse compare prompts.txt --method spargeattn --order rowmajor
  vidsparse compare prompts.txt --device cuda --batch 8

\b
Files, in outputs/<file>-compare-<method>-<hash of settings>/:
  report.html          one page to look at or send on, with all videos in it
  report.md            the tables
  report.json          every number; identical frames read "psnr": null, "identical": true
  0003-<words>.mp4     dense, sparse and their difference side by side
""",
)
@click.argument("prompts_file", metavar="PROMPTS.txt")
@request_options
@click.option(
    "--batch",
    type=int,
    metavar="N",
    default=1,
    show_default=True,
    help="Prompts made at once, for a GPU with room.",
)
@click.option(
    "--out",
    metavar="FOLDER",
    default="outputs",
    show_default=True,
    help="Where the report's folder is made.",
)
@verbosity_options
@click.pass_obj
def compare(session: Session, /, prompts_file: str, batch: int, out: str, **options: Any) -> None:
    """Make every prompt of PROMPTS.txt dense and sparse, and report how far apart they are.

    PSNR, SSIM and flicker are taken on 8-bit frames before encoding, with the same seeds and the
    same dense attention on both sides.
    """
    from vidsparse.pipelines.request import settings_hash

    if batch < 1:
        raise OptionError(f"batch must be at least 1, got {batch}")
    source = read_prompts(prompts_file)
    jobs = prepare(source, options, session)
    request = jobs.request
    name = f"{source.stem}-compare-{request.method}-{settings_hash(request)}"
    folder = RunFolder(Path(out) / name)
    with folder.claim():
        loaded = jobs.load(session)
        comparison = _Comparison(session, loaded, folder.path)
        chunks = [jobs.jobs[i : i + batch] for i in range(0, len(jobs.jobs), batch)]
        comparison.warm_up(chunks[0])
        for chunk in chunks:
            comparison.run(chunk)
        report = comparison.report(jobs, batch)
        paths = _write(folder.path, report, comparison.videos, request)
    if session.quiet:
        for path in paths:
            click.echo(path)
        return
    _print(report)
    click.echo(f"\nreport: {paths[0]}")


class _Comparison:
    """Runs both sides chunk by chunk and keeps the numbers; frames live for one chunk only."""

    def __init__(self, session: Session, loaded: LoadedPipeline, folder: Path) -> None:
        self.videos: list[SideBySide] = []
        self._session = session
        self._loaded = loaded
        self._folder = folder
        self._comparisons: list[PromptComparison] = []
        self._maps: list[list[list[float | None]]] = []

    def warm_up(self, chunk: Sequence[Job]) -> None:
        """Run two steps of both sides untimed: a process's first call pays for its set-up.

        A GPU and the compiler prepare for one shape, so they get the true one; on a CPU a few
        frames do.
        """
        self._session.say("Warming up ...")
        request = chunk[0].request
        frames = request.frames
        if request.device == "cpu" and not request.compile:
            frames = self._loaded.defaults.frame_factor + 1
        for side in (_dense, lambda one: replace(one, dense_steps=0)):
            self._generate(
                [replace(side(job.request), steps=2, frames=frames) for job in chunk], "warm-up"
            )

    def run(self, chunk: Sequence[Job]) -> None:
        """Make a chunk dense and sparse, measure it, and encode the side-by-side videos."""
        dense = self._generate([_dense(job.request) for job in chunk], _label(chunk, "dense"))
        method = chunk[0].request.method
        sparse = self._generate([job.request for job in chunk], _label(chunk, method))
        for job, reference, other in zip(chunk, dense, sparse, strict=True):
            self._measure(job, reference, other)

    def report(self, jobs: Jobs, batch: int) -> Report:
        """Everything measured, as one value."""
        record = self._comparisons[0].sparse.record
        notes = [SAME_KERNEL, "Both sides ran two untimed steps before the first prompt."]
        if batch > 1:
            notes.append(f"Times are those of batches of {batch}, divided by the batch's size.")
        for each in self._comparisons:
            notes += [f"Some calls ran {note}." for note in each.sparse.record["notes"]]
        return Report(
            settings={**jobs.request.options(), "batch": batch},
            environment={"device": _device_name(record["device"]), **record["versions"]},
            comparisons=self._comparisons,
            density_map=mean_density_map(self._maps),
            notes=list(dict.fromkeys(notes)),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _generate(self, requests: list[GenerateRequest], label: str) -> list[Generated]:
        from vidsparse.pipelines.generate import generate_batch

        with step_bar(self._session, label) as progress:
            return generate_batch(self._loaded, requests, progress=progress)

    def _measure(self, job: Job, dense: Generated, sparse: Generated) -> None:
        # scikit-image's filters release the interpreter lock: threads share out the frames.
        with ThreadPoolExecutor() as pool:
            quality = compare_videos(dense.frames, sparse.frames, pool=pool)
        self._comparisons.append(
            PromptComparison(
                number=job.prompt.number,
                prompt=job.prompt.text,
                seed=job.request.seed,
                quality=quality,
                dense=_facts(dense.record),
                sparse=_facts(sparse.record),
            )
        )
        density_map = sparse.record["density_map"]
        if density_map:
            self._maps.append(density_map)
        self.videos.append(self._side_by_side(job, dense.frames, sparse.frames))
        if not self._session.quiet:
            click.echo(
                f"{job.prompt.number:04d}  PSNR {format_psnr(quality, ' dB')}, "
                f"SSIM {quality.ssim:.4f}  {short(job.prompt.text)}"
            )

    def _side_by_side(self, job: Job, dense: Frames, sparse: Frames) -> SideBySide:
        from vidsparse.apps.prompts import slug
        from vidsparse.pipelines.video import write_video

        frames = np.concatenate([dense, sparse, amplified_difference(dense, sparse, GAIN)], axis=2)
        path = self._folder / f"{job.prompt.number:04d}-{slug(job.prompt.text)}.mp4"
        assert job.request.fps is not None
        write_video(frames, path, job.request.fps)
        return SideBySide(mp4=path.read_bytes(), width=frames.shape[2], height=frames.shape[1])


def _dense(request: GenerateRequest) -> GenerateRequest:
    return replace(request, method="dense", method_options={}, preset=None)


def _label(chunk: Sequence[Job], side: str) -> str:
    first, last = chunk[0].prompt, chunk[-1].prompt
    if first is last:
        return f"{first.number} {side}: {short(first.text)}"
    return f"{first.number}-{last.number} {side}"


def _facts(record: dict[str, Any]) -> RunFacts:
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
    )


def _device_name(device: dict[str, Any]) -> str:
    threads = f", {device['threads']} threads" if device["threads"] else ""
    return f"{device['name']}{threads}"


def _write(
    folder: Path, report: Report, videos: Sequence[SideBySide], request: GenerateRequest
) -> list[Path]:
    """Write the three forms of the report; answers their paths, the page first."""
    from vidsparse.methods import METHODS

    assert request.fps is not None
    page = render(
        report,
        videos,
        model=Path(request.model).name or request.model,
        method_title=METHODS[request.method].title,
        fps=request.fps,
        gain=GAIN,
    )
    texts = {
        "report.html": page,
        "report.md": report.to_markdown(),
        "report.json": report.to_json_text(),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _print(report: Report) -> None:
    dense, sparse = report.seconds("dense", "denoise"), report.seconds("sparse", "denoise")
    rows = [
        ("PSNR", format_spread(report.psnr, ".2f", " dB", report.identical)),
        ("SSIM", format_spread(report.ssim, ".4f")),
        ("flicker", format_spread(report.flicker, ".2f", " dB")),
        (
            "density",
            f"{format_share(report.selected)} selected, {format_share(report.computed)} computed "
            f"in the sparse steps; {format_share(report.dense_step_share)} of steps dense",
        ),
        ("denoising", f"{format_seconds(dense)} dense, {format_seconds(sparse)} sparse"),
    ]
    click.echo()
    for name, value in rows:
        click.echo(f"{name:<10} {value}")
