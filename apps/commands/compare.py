"""``vidsparse compare``: what sparsity costs, measured against dense videos of the same seeds."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from vidsparse.apps.runs.comparison import (
    Comparison,
    is_measured,
    is_reported,
    machine_text,
    runs_of,
    stages_of,
    warm_ups,
    write_report,
)
from vidsparse.apps.runs.crew import WorkerDied
from vidsparse.apps.runs.crew_options import CrewOptions, crew_click_options, crew_options
from vidsparse.apps.runs.crew_tasks import Measurement
from vidsparse.apps.runs.maker import Maker
from vidsparse.apps.runs.prepared import PreparedPrompt, PreparedPrompts, prepare
from vidsparse.apps.runs.prompts import read_prompts
from vidsparse.apps.runs.run_folder import RunFolder
from vidsparse.apps.runs.team import (
    Team,
    check_prompts_file,
    check_ring,
    check_shared,
    join_team,
    launch,
    said_once,
    silent,
)
from vidsparse.apps.terminal.console import FAILED, Terminal, json_option, verbosity_options
from vidsparse.apps.terminal.options import (
    RequestCommand,
    batch_option,
    gpus_options,
    request_options,
    without_own_cache,
)
from vidsparse.apps.terminal.progress import short
from vidsparse.apps.terminal.tables import print_pairs, print_table
from vidsparse.errors import FolderError, OptionError
from vidsparse.report import PromptComparison, Report, format_worst, stage_rows
from vidsparse.speedup import FEWEST, shortest_of
from vidsparse.wording import (
    format_psnr,
    format_seconds,
    format_share,
    format_sides,
    format_spread,
    format_total,
)


@click.command(
    cls=RequestCommand,
    epilog="""\b
Examples:
  vidsparse compare prompts.txt
  vidsparse compare prompts.txt --top-p 0.8 --tile 128x128
  vidsparse compare prompts.txt --method spargeattn --order rowmajor
  vidsparse compare prompts.txt --device cuda --batch 8
  vidsparse compare prompts.txt --speed fast --parts
  vidsparse compare prompt.txt --turns 3                            how much faster, and how surely
  vidsparse compare prompts.txt --model path/to/Wan2.1 --gpus 4     each video on four GPUs
  vidsparse compare prompts.txt --gpus 4 --gpus-per-video 1         four prompts at a time

\b
Files, in outputs/<file>-compare-<method>-<hash of settings>-<hash of the rest>/,
where the rest is the prompts, how they are measured, and the machine:
  report.html          one page to look at or send on, with all videos in it
  report.md            the tables
  report.json          every number; "psnr" of identical frames is null
  0003-<words>.mp4     dense, sparse and their difference side by side
""",
)
@click.argument("prompts_file", metavar="PROMPTS.txt")
@request_options
@batch_option
@click.option(
    "--parts",
    is_flag=True,
    help="Also switch the parts of the sparse side on one after the other: attention, linear "
    "layers, step cache. The report says what each cost and brought.",
)
@click.option(
    "--turns",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Make both sides N times in turns, parts once: the speed is told with its range, also of "
    "one prompt.",
)
@gpus_options
@crew_click_options
@click.option(
    "--out",
    metavar="FOLDER",
    default="outputs",
    show_default=True,
    help="Where the report's folder is made.",
)
@json_option
@verbosity_options
@click.pass_obj
def compare(
    terminal: Terminal,
    /,
    prompts_file: str,
    batch: int,
    parts: bool,
    turns: int,
    gpus: int | None,
    ring: int | None,
    apart: bool | None,
    gpus_per_video: int | None,
    engine: str | None,
    address: str | None,
    out: str,
    **options: Any,
) -> int:
    """Make every prompt of PROMPTS.txt dense and sparse, and report how far apart they are.

    PSNR, SSIM and flicker are taken on 8-bit frames before encoding, with the same seeds and the
    same dense attention on both sides. A run that was stopped goes on with the same command.
    """
    from vidsparse.pipelines.request import settings_hash
    from vidsparse.pipelines.video import require_encoder

    terminal.interrupted = "Interrupted; the same command goes on from the last measured prompt."
    if apart:
        without_own_cache(options)
    crew = crew_options(gpus, gpus_per_video, engine, address, ring, apart)
    team = join_team(terminal, gpus, ring, apart)
    several = crew is None and (team is not None or gpus not in (None, 1))
    with said_once(team):
        if crew is None and team is None:
            check_ring(ring, gpus or 1, apart)
        for name, number in (("batch", batch), ("turns", turns)):
            if number < 1:
                raise OptionError(f"{name} must be at least 1, got {number}")
        if several:
            check_prompts_file(prompts_file)
        source = read_prompts(prompts_file)
        starts = several and team is None
        prepared = prepare(source, options, silent(terminal) if starts else terminal)
        request = prepared.request
        if parts and len(stages_of(request)) < 2:
            raise OptionError(
                "--parts needs a run that differs from its dense side in several parts; this one "
                f"differs in {stages_of(request)[0][0]} only. "
                "Hint: --speed fast, --linear or --cache add others."
            )
        if several:
            check_shared(request, gpus or 1 if team is None else team.count, apart)
    if starts:
        assert gpus is not None
        return launch(
            terminal, gpus, "what was measured is kept. Hint: run the same command again."
        )
    chunks = [prepared.prompts[i : i + batch] for i in range(0, len(prepared.prompts), batch)]
    if team is not None:
        assert request.device is not None
        team.connect(request.device)
        if not team.first:
            return _take_part(team, prepared, chunks, parts, turns, terminal)
    settings = settings_hash(request)
    measured = f"{settings}, batches of {batch}" + (", part by part" if parts else "")
    measured += f", in {turns} turns" if turns > 1 else ""
    if team is not None:
        # times are of so many, and may differ within rounding.
        measured += f", by {team}"
    if crew is not None:
        measured += f", {crew}"
    else:
        # workers may run elsewhere, and their records say where.
        assert request.device is not None
        measured += f", on {machine_text(request.device)}"
    alike = f"{source.stem}-compare-{request.method}-{settings}"
    folder = RunFolder(Path(out) / f"{alike}-{_own_hash(prepared, measured)}", measured)
    require_encoder()
    try:
        with folder.claim():
            # what a run was stopped at is of use, too, once its file was edited. a comparison that
            # came to its end before is measured anew, though, and not by that again.
            if not is_reported(folder):
                for path in sorted(Path(out).glob(f"{glob.escape(alike)}-*")):
                    for one in prepared.prompts:
                        folder.take_over(one.prompt, RunFolder(path, measured))
            missing = [at for at, chunk in enumerate(chunks) if not is_measured(folder, chunk)]
            if len(missing) < len(chunks):
                terminal.say("Going on where an earlier run was stopped.")
            if team is not None:
                team.tell(missing)
            maker = _maker(terminal, prepared, team) if missing and crew is None else None
            comparison = Comparison(maker, folder.path, kept=folder, parts=parts, turns=turns)
            if maker is not None:
                terminal.say("Warming up ...")
                comparison.warm_up(chunks[missing[0]], maker.defaults)
            if missing and crew is not None:
                waiting = [chunks[at] for at in missing]
                if not _spread(terminal, crew, comparison, waiting, parts, turns):
                    return FAILED
            for chunk in chunks:
                for each in comparison.run(chunk):
                    if each.number not in comparison.taken:
                        _print_measured(terminal, each)
            if team is not None:
                team.leave()
            workers = None if crew is None else str(crew)
            report = comparison.report(prepared.request, batch, workers)
            paths = write_report(folder.path, report, comparison.videos, request)
            comparison.forget()
    except FolderError as error:
        terminal.complain(
            f"{error}. The run stops here, and what was measured is kept. Hint: when the folder "
            "can be written to, run the same command again to go on."
        )
        return FAILED
    if terminal.quiet:
        for path in paths:
            terminal.show(str(path))
        files = [str(path) for path in paths]
        terminal.answer({"files": files, "summary": report.to_json()["summary"]})
        return 0
    _print(report)
    terminal.show(f"\nreport: {paths[0]}")
    return 0


def _own_hash(prepared: PreparedPrompts, measured: str) -> str:
    """Eight hex digits over what a report is of: no other one may come to stand in its place."""
    text = json.dumps([measured, [one.prompt.text for one in prepared.prompts]])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _maker(terminal: Terminal, prepared: PreparedPrompts, team: Team | None) -> Maker:
    """What makes the videos of a batch, by all processes of ``team``."""
    if team is None:
        return Maker(terminal, prepared)
    return Maker(terminal, prepared, team.ring, team.apart)


def _spread(
    terminal: Terminal,
    crew: CrewOptions,
    comparison: Comparison,
    waiting: Sequence[Sequence[PreparedPrompt]],
    parts: bool,
    turns: int,
) -> bool:
    """Have chunks measured by workers; whether all were. What is measured is kept at once."""
    chunks = {chunk[0].prompt.number: chunk for chunk in waiting}
    tasks = [(number, Measurement(tuple(chunk), parts, turns)) for number, chunk in chunks.items()]
    with crew.doing(terminal, tasks, "Comparisons") as outcomes:
        for outcome in outcomes:
            if isinstance(outcome.error, WorkerDied):
                terminal.complain(
                    f"prompt {outcome.number:04d} cannot be measured: {outcome.deaths} workers "
                    f"died on it ({outcome.error}). What was measured is kept. "
                    "Hint: run the same command again."
                )
                return False
            if outcome.made is None:
                assert outcome.error is not None
                raise outcome.error
            for one, made in zip(chunks[outcome.number], outcome.made, strict=True):
                _print_measured(terminal, comparison.take(one, made))
    return True


def _print_measured(terminal: Terminal, each: PromptComparison) -> None:
    if not terminal.quiet:
        terminal.show(
            f"{each.number:04d}  PSNR {format_psnr(each.quality, ' dB')}, "
            f"SSIM {each.quality.ssim:.4f}  {short(each.prompt)}"
        )


def _take_part(
    team: Team,
    prepared: PreparedPrompts,
    chunks: Sequence[Sequence[PreparedPrompt]],
    parts: bool,
    turns: int,
    terminal: Terminal,
) -> int:
    """Compute what the first process measures."""
    try:
        if missing := [chunks[at] for at in team.hear()]:
            maker = _maker(terminal, prepared, team)
            for requests in warm_ups(missing[0], maker.defaults, parts):
                maker(requests, "warm-up")
            for chunk in missing:
                for name, requests in runs_of(chunk, parts, turns):
                    maker(requests, name)
        team.leave()
    except Exception:
        team.wait_to_be_ended()
        raise
    return 0


def _print(report: Report) -> None:
    dense, sparse = report.seconds("dense", "denoise"), report.seconds("sparse", "denoise")
    rows = [
        ("PSNR", format_spread(report.psnr, ".2f", " dB", report.identical)),
        *([("worst", worst)] if (worst := format_worst(report)) else []),
        *([("promised", str(report.promise))] if report.promise else []),
        ("SSIM", format_spread(report.ssim, ".4f")),
        ("flicker", format_spread(report.flicker, ".2f", " dB")),
        ("flickering", f"{format_sides(report.steadiness('flickering'))}, as in VBench"),
        ("smoothness", format_sides(report.steadiness("smoothness"))),
        *_work_rows(report),
        ("denoising", f"{format_seconds(dense)} dense, {format_seconds(sparse)} sparse"),
        ("speed", _speed(report)),
        ("timed", _when(report)),
    ]
    click.echo()
    print_pairs(rows)
    if stages := stage_rows(report):
        titles, *parts = stages
        click.echo()
        print_table(titles, parts)


def _speed(report: Report) -> str:
    """The ratio and how sure it is, or why there is none."""
    speedup = report.speedup
    if speedup.ratio is not None:
        return str(speedup)
    least = shortest_of(report.comparisons[0].sparse.record)
    need = f"{FEWEST} pairs of runs (a batch is one) of {least:g} s or more a side"
    hint = ". Hint: --turns 3" if speedup.why == "timed once" else ""
    return f"no ratio: {speedup}; a ratio takes {need} on one machine{hint}"


def _when(report: Report) -> str:
    """Which side ran when."""
    began = sorted(
        datetime.fromisoformat(run.record["began"]).astimezone()
        for each in report.comparisons
        for run in (each.dense, each.sparse)
    )
    first, last = (f"{each:%H:%M:%S}" for each in (began[0], began[-1]))
    if turns := len(report.comparisons[0].turns):
        # records are those of the first turn.
        return f"dense, then sparse, {turns} times in turns; the first run began at {first}"
    return f"dense, then sparse, in turns; the first run began at {first}, the last at {last}"


def _work_rows(report: Report) -> list[tuple[str, str]]:
    """The whole run's share first, then where it was computed and what the method chose."""
    work = report.work
    if work is None:
        return []
    rows = [("computed", f"{format_total(work)} of the run's attention: {work.split}")]
    if report.computed is not None:
        rows.append(
            (
                "sparse",
                f"{format_share(report.selected)} selected, {format_share(report.computed)} "
                f"computed in the sparse calls; {work.selection_text}",
            )
        )
    return rows
