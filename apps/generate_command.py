"""``vidsparse generate``: a video and a record for every prompt of a file."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import click

from vidsparse.apps.console import FAILED, Session, verbosity_options
from vidsparse.apps.jobs import Job, prepare
from vidsparse.apps.options import GroupedCommand, request_options
from vidsparse.apps.progress import short, step_bar
from vidsparse.apps.prompts import read_prompts
from vidsparse.apps.run_folder import RunFolder, Target
from vidsparse.report import format_share


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  vidsparse generate prompts.txt
  vidsparse generate prompts.txt --top-p 0.8 --tile 32x32 --seed 7
  vidsparse generate prompts.txt --method spargeattn --tau 0.95 --theta 0.4
  vidsparse generate prompts.txt --method dense              the stock pipeline, to compare with
  echo "a small blue ring that orbits" | vidsparse generate -
  vidsparse generate prompts.txt --model path/to/Wan2.1 --device cuda --offload model

\b
Files:
  outputs/<file>-<method>-<hash of settings>/0003-<words>.mp4 and .json
A rerun with the same settings makes only what is missing; other settings get another folder.
""",
)
@click.argument("prompts_file", metavar="PROMPTS.txt")
@request_options
@click.option(
    "--out",
    metavar="FOLDER",
    default="outputs",
    show_default=True,
    help="Where the run's folder is made.",
)
@click.option("--overwrite", is_flag=True, help="Make finished videos again.")
@verbosity_options
@click.pass_obj
def generate(
    session: Session, /, prompts_file: str, out: str, overwrite: bool, **options: Any
) -> int:
    """Make a video of every prompt in PROMPTS.txt with sparse attention.

    One prompt a line; blank lines and lines that start with # are skipped; - reads standard input.
    Each video gets a JSON record of its settings, times and densities. Everything is checked before
    the model loads.
    """
    from vidsparse.pipelines.request import settings_hash

    session.interrupted = "Interrupted; finished videos are kept."
    source = read_prompts(prompts_file)
    jobs = prepare(source, options, session)
    name = f"{source.stem}-{jobs.request.method}-{settings_hash(jobs.request)}"
    folder = RunFolder(Path(out) / name)
    with folder.claim():
        targets = {job.prompt.number: folder.target(job.prompt) for job in jobs.jobs}
        waiting = [j for j in jobs.jobs if overwrite or not targets[j.prompt.number].finished]
        kept = len(jobs.jobs) - len(waiting)
        for job in jobs.jobs:
            if job not in waiting:
                _print_kept(session, targets[job.prompt.number])
        if not waiting:
            session.say(f"All {kept} videos are there already. Hint: --overwrite makes them again.")
            return 0
        loaded = jobs.load(session)
        failed = []
        for place, job in enumerate(waiting, 1):
            try:
                _make(
                    session, loaded, job, folder, targets[job.prompt.number],
                    f"[{place}/{len(waiting)}] {short(job.prompt.text)}",
                )  # fmt: skip
            except Exception as error:
                # one prompt's failure must not cost the others theirs.
                failed.append(job.prompt.number)
                _print_failure(session, job, error)
    made = len(waiting) - len(failed)
    session.say(f"{made} made, {kept} there already, {len(failed)} failed: {folder.path}")
    if failed:
        numbers = ", ".join(f"{number:04d}" for number in failed)
        click.echo(
            f"Error: {len(failed)} of {len(jobs.jobs)} prompts failed ({numbers}); finished videos "
            "are kept. Hint: run the same command again to make the missing ones.",
            err=True,
        )
        return FAILED
    return 0


def _make(
    session: Session, loaded: Any, job: Job, folder: RunFolder, target: Target, label: str
) -> None:
    from vidsparse.pipelines.generate import generate as run
    from vidsparse.pipelines.video import write_video

    assert job.request.fps is not None
    with step_bar(session, label) as progress:
        made = run(loaded, job.request, progress=progress)
    # the old record goes first: an interrupted overwrite must not pass for a finished video.
    target.record.unlink(missing_ok=True)
    write_video(made.frames, target.video, job.request.fps)
    folder.write_record(target, made.record)
    if session.quiet:
        click.echo(target.video)
        return
    record = made.record
    density = (
        "dense"
        if record["computed"] is None
        else f"density {format_share(record['selected'])} selected, "
        f"{format_share(record['computed'])} computed"
    )
    click.echo(f"{target.video}  {record['times']['total']:.1f} s, {density}")


def _print_kept(session: Session, target: Target) -> None:
    click.echo(target.video if session.quiet else f"{target.video}  already there")


def _print_failure(session: Session, job: Job, error: Exception) -> None:
    if session.verbose >= 2:
        traceback.print_exception(error)
    message = " ".join(f"{type(error).__name__}: {error}".split())
    click.echo(f"Error: prompt {job.prompt.number:04d} failed: {message}", err=True)
