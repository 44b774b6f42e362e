"""``vidsparse generate``: a video and a record for every prompt of a file."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import click

from vidsparse.apps.runs.prepared import PreparedPrompt, prepare
from vidsparse.apps.runs.prompts import read_prompts
from vidsparse.apps.runs.run_folder import RunFolder, Target
from vidsparse.apps.terminal.console import FAILED, Terminal, verbosity_options
from vidsparse.apps.terminal.options import RequestCommand, request_options
from vidsparse.apps.terminal.progress import short, step_bar
from vidsparse.report import format_share


@click.command(
    cls=RequestCommand,
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
    terminal: Terminal, /, prompts_file: str, out: str, overwrite: bool, **options: Any
) -> int:
    """Make a video of every prompt in PROMPTS.txt with sparse attention.

    One prompt a line; blank lines and lines that start with # are skipped; - reads standard input.
    Each video gets a JSON record of its settings, times and densities. Everything is checked before
    the model loads.
    """
    from vidsparse.pipelines.request import settings_hash

    terminal.interrupted = "Interrupted; finished videos are kept."
    source = read_prompts(prompts_file)
    prepared = prepare(source, options, terminal)
    name = f"{source.stem}-{prepared.request.method}-{settings_hash(prepared.request)}"
    folder = RunFolder(Path(out) / name)
    with folder.claim():
        targets = {one.prompt.number: folder.target(one.prompt) for one in prepared.prompts}
        waiting = [
            one for one in prepared.prompts if overwrite or not targets[one.prompt.number].finished
        ]
        kept = len(prepared.prompts) - len(waiting)
        for one in prepared.prompts:
            if one not in waiting:
                _print_kept(terminal, targets[one.prompt.number])
        if not waiting:
            terminal.say(
                f"All {kept} videos are there already. Hint: --overwrite makes them again."
            )
            return 0
        loaded = prepared.load(terminal)
        failed = []
        for place, one in enumerate(waiting, 1):
            try:
                _make(
                    terminal, loaded, one, folder, targets[one.prompt.number],
                    f"[{place}/{len(waiting)}] {short(one.prompt.text)}",
                )  # fmt: skip
            except Exception as error:
                # one prompt's failure must not cost the others theirs.
                failed.append(one.prompt.number)
                _print_failure(terminal, one, error)
    made = len(waiting) - len(failed)
    terminal.say(f"{made} made, {kept} there already, {len(failed)} failed: {folder.path}")
    if failed:
        numbers = ", ".join(f"{number:04d}" for number in failed)
        click.echo(
            f"Error: {len(failed)} of {len(prepared.prompts)} prompts failed ({numbers}); finished "
            "videos are kept. Hint: run the same command again to make the missing ones.",
            err=True,
        )
        return FAILED
    return 0


def _make(
    terminal: Terminal,
    loaded: Any,
    one: PreparedPrompt,
    folder: RunFolder,
    target: Target,
    label: str,
) -> None:
    from vidsparse.pipelines.generate import generate as run
    from vidsparse.pipelines.video import write_video

    assert one.request.fps is not None
    with step_bar(terminal, label) as progress:
        made = run(loaded, one.request, progress=progress)
    # the old record goes first: an interrupted overwrite must not pass for a finished video.
    target.record.unlink(missing_ok=True)
    write_video(made.frames, target.video, one.request.fps)
    folder.write_record(target, made.record)
    if terminal.quiet:
        click.echo(target.video)
        return
    record = made.record
    work = (
        "dense"
        if record["computed"] is None
        else f"{format_share(record['total'])} of attention computed, "
        f"{format_share(record['computed'])} in the sparse calls"
    )
    click.echo(f"{target.video}  {record['times']['total']:.1f} s, {work}")


def _print_kept(terminal: Terminal, target: Target) -> None:
    click.echo(target.video if terminal.quiet else f"{target.video}  already there")


def _print_failure(terminal: Terminal, one: PreparedPrompt, error: Exception) -> None:
    if terminal.verbose >= 2:
        traceback.print_exception(error)
    message = " ".join(f"{type(error).__name__}: {error}".split())
    click.echo(f"Error: prompt {one.prompt.number:04d} failed: {message}", err=True)
