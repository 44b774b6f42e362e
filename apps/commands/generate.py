"""``vidsparse generate``: a video and a record for every prompt of a file."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from vidsparse.apps.runs.prepared import PreparedPrompt, PreparedPrompts, prepare
from vidsparse.apps.runs.prompts import read_prompts
from vidsparse.apps.runs.run_folder import RunFolder, Target
from vidsparse.apps.runs.team import Team, check_shared, join, launch, silent
from vidsparse.apps.terminal.console import FAILED, Terminal, json_option, verbosity_options
from vidsparse.apps.terminal.options import RequestCommand, request_options
from vidsparse.apps.terminal.progress import plain_bar, short, step_bar
from vidsparse.errors import FolderError, OptionError, OutputError, VidsparseError
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
  vidsparse generate prompts.txt --model path/to/Wan2.1 --gpus 4     each video on four GPUs

\b
Files:
  outputs/<file>-<method>-<hash of settings>/0003-<words>.mp4 and .json
A rerun with the same settings makes only what is missing or was changed since; other settings get
another folder.
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
@click.option(
    "--verify", is_flag=True, help="Read finished videos and make changed ones again, not by size."
)
@click.option(
    "--gpus",
    type=click.IntRange(min=1),
    metavar="N",
    help="Make each video on N GPUs together; with --device cpu, in N processes.",
)
@json_option
@verbosity_options
@click.pass_obj
def generate(
    terminal: Terminal,
    /,
    prompts_file: str,
    out: str,
    overwrite: bool,
    verify: bool,
    gpus: int | None,
    **options: Any,
) -> int:
    """Make a video of every prompt in PROMPTS.txt with sparse attention.

    One prompt a line; blank lines and lines that start with # are skipped; - reads standard input.
    Each video gets a JSON record of its settings, times and densities. Everything is checked before
    the model loads.
    """
    from vidsparse.pipelines.request import settings_hash
    from vidsparse.pipelines.video import require_encoder

    terminal.interrupted = "Interrupted; finished videos are kept."
    team = join(terminal, gpus)
    alone = team is None and gpus in (None, 1)
    if not alone and prompts_file == "-":
        raise OptionError(
            "standard input cannot be read by several processes. Hint: write the prompts to a file."
        )
    source = read_prompts(prompts_file)
    if team is None and not alone:
        assert gpus is not None
        return launch(terminal, prepare(source, options, silent(terminal)).request, gpus)
    prepared = prepare(source, options, terminal)
    if team is not None:
        check_shared(prepared.request, team.count)
        assert prepared.request.device is not None
        team.connect(prepared.request.device)
        if not team.first:
            return _take_part(team, prepared, terminal)
    settings = settings_hash(prepared.request)
    name = f"{source.stem}-{prepared.request.method}-{settings}"
    folder = RunFolder(Path(out) / name, settings)
    targets = _look(terminal, folder, prepared.prompts, verify)
    if not overwrite and all(target.finished for target in targets):
        # nothing is to be made, so a folder that nobody can write to is as good as any.
        with suppress(OutputError), folder.claim():
            pass
        for target in targets:
            _print_kept(terminal, target)
        if team is not None:
            team.tell([])
            team.leave()
        terminal.say(
            f"All {len(targets)} videos are there already. Hint: --overwrite makes them again."
        )
        _answer(terminal, folder, prepared.prompts, targets, {})
        return 0
    require_encoder()
    with folder.claim():
        # until the folder was ours, another run may have made some of them.
        targets = [
            target if target.finished else folder.target(one.prompt, verify=verify)
            for one, target in zip(prepared.prompts, targets, strict=True)
        ]
        waiting: list[tuple[PreparedPrompt, Target]] = []
        for one, target in zip(prepared.prompts, targets, strict=True):
            if overwrite or not target.finished:
                waiting.append((one, target))
            else:
                _print_kept(terminal, target)
        states = {one.prompt.number: "made" for one, _ in waiting}
        if team is not None:
            team.tell([one.prompt.number for one, _ in waiting])
        code = _make_all(terminal, prepared, folder, waiting, states, team)
        if team is not None and code == 0:
            team.leave()
    _answer(terminal, folder, prepared.prompts, targets, states)
    if code == 0:
        _say_next(terminal, prompts_file, prepared.request.method)
    return code


def _take_part(team: Team, prepared: PreparedPrompts, terminal: Terminal) -> int:
    """Compute what the first process makes videos of."""
    from vidsparse.pipelines.generate import generate as run

    try:
        if numbers := team.hear():
            loaded = prepared.load(terminal)
            for one in prepared.prompts:
                if one.prompt.number in numbers:
                    run(loaded, one.request)
        team.leave()
    except Exception:
        team.wait_to_be_ended()
        raise
    return 0


def _say_next(terminal: Terminal, prompts_file: str, method: str) -> None:
    """Say which command shows what the videos lost, with the options that they were made with."""
    if method == "dense" or prompts_file == "-":
        return
    ctx = click.get_current_context()
    words = ["vidsparse", "compare", prompts_file]
    for option in ctx.command.params:
        name = option.name or ""
        given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not isinstance(option, click.Option) or not given or not option.expose_value:
            continue
        if name in ("overwrite", "verify", "gpus"):
            continue
        value = ctx.params[name]
        if option.is_flag:
            words.append((option.opts if value else option.secondary_opts)[0])
        else:
            size = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [option.opts[0], size]
    terminal.say(f"Next, to see what sparsity cost: {shlex.join(words)}")


def _answer(
    terminal: Terminal,
    folder: RunFolder,
    prompts: Sequence[PreparedPrompt],
    targets: Sequence[Target],
    states: Mapping[int, str],
) -> None:
    """What there is now, as JSON: every prompt's files, and whether they were made or kept."""
    videos = [
        {
            "number": one.prompt.number,
            "prompt": one.prompt.text,
            "state": states.get(one.prompt.number, "kept"),
            "video": str(target.video),
            "record": str(target.record),
        }
        for one, target in zip(prompts, targets, strict=True)
    ]
    terminal.answer({"folder": str(folder.path), "videos": videos})


def _look(
    terminal: Terminal, folder: RunFolder, prompts: Sequence[PreparedPrompt], verify: bool
) -> list[Target]:
    with plain_bar(terminal, "Looking for finished videos") as progress:
        targets = []
        for done, one in enumerate(prompts, 1):
            targets.append(folder.target(one.prompt, verify=verify))
            progress("", done, len(prompts))
    return targets


def _make_all(
    terminal: Terminal,
    prepared: PreparedPrompts,
    folder: RunFolder,
    waiting: Sequence[tuple[PreparedPrompt, Target]],
    states: dict[int, str],
    team: Team | None = None,
) -> int:
    """Make the videos that are waiting; the exit code. ``states`` is told of those that failed."""
    kept = len(prepared.prompts) - len(waiting)
    loaded = prepared.load(terminal)
    failed: list[int] = []
    for place, (one, target) in enumerate(waiting, 1):
        label = f"[{place}/{len(waiting)}] {short(one.prompt.text)}"
        try:
            _make(terminal, loaded, one, folder, target, label)
        except FolderError as error:
            # the next ones would be computed for nothing.
            done = kept + place - 1 - len(failed)
            terminal.complain(
                f"{error}. The run stops at prompt {one.prompt.number:04d}: {done} of "
                f"{len(prepared.prompts)} videos are done. Hint: when the folder can be written "
                "to, run the same command again to make the others."
            )
            for later, _ in waiting[place - 1 :]:
                states[later.prompt.number] = "failed"
            return FAILED
        except Exception as error:
            if team is not None:
                # the others may wait for this process in the middle of a step, for ever.
                team.wait_to_be_ended()
                _print_failure(terminal, one, error)
                return FAILED
            # one prompt's failure must not cost the others theirs.
            failed.append(one.prompt.number)
            states[one.prompt.number] = "failed"
            _print_failure(terminal, one, error)
    made = len(waiting) - len(failed)
    terminal.say(f"{made} made, {kept} there already, {len(failed)} failed: {folder.path}")
    if failed:
        numbers = ", ".join(f"{number:04d}" for number in failed)
        terminal.complain(
            f"{len(failed)} of {len(prepared.prompts)} prompts failed ({numbers}); finished "
            "videos are kept. Hint: run the same command again to make the missing ones."
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
    # an old record stays until then: a video that it does not describe is not finished.
    write_video(made.frames, target.video, one.request.fps)
    folder.write_record(target, made.record)
    if terminal.quiet:
        terminal.show(str(target.video))
        return
    record = made.record
    work = (
        "dense"
        if record["computed"] is None
        else f"{format_share(record['total'])} of attention computed, "
        f"{format_share(record['computed'])} in the sparse calls"
    )
    terminal.show(f"{target.video}  {record['times']['total']:.1f} s, {work}")


def _print_kept(terminal: Terminal, target: Target) -> None:
    terminal.show(str(target.video) if terminal.quiet else f"{target.video}  already there")


def _print_failure(terminal: Terminal, one: PreparedPrompt, error: Exception) -> None:
    if terminal.verbose >= 2:
        traceback.print_exception(error)
    message = " ".join(str(error).split())
    if not isinstance(error, VidsparseError):
        message = f"{type(error).__name__}: {message}"
    terminal.complain(f"prompt {one.prompt.number:04d} failed: {message}")
