"""``vidsparse generate``: a video and a record for every prompt of a file."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from vidsparse.apps.runs.crew import WorkerDied
from vidsparse.apps.runs.crew_options import CrewOptions, crew_click_options, crew_options
from vidsparse.apps.runs.crew_tasks import Generation
from vidsparse.apps.runs.maker import Maker
from vidsparse.apps.runs.prepared import PreparedPrompt, PreparedPrompts, prepare
from vidsparse.apps.runs.prompts import read_prompts
from vidsparse.apps.runs.run_folder import RunFolder, VideoTarget
from vidsparse.apps.runs.team import (
    KEPT_VIDEOS,
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
    gpus_options,
    request_options,
    without_own_cache,
)
from vidsparse.apps.terminal.progress import plain_bar, short
from vidsparse.errors import FolderError, OutputError, VidsparseError
from vidsparse.wording import format_share

# where videos are made says nothing of what they lost.
_NOT_COMPARED = ("overwrite", "verify")


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
  vidsparse generate prompts.txt --gpus 4 --gpus-per-video 1         four videos at a time
  vidsparse generate prompts.txt --engine ray --address auto         on a Ray cluster

\b
Files:
  outputs/<file>-<method>-<hash of settings>/0003-<words>.mp4 and .json
A rerun with the same settings makes only what is missing or was changed since;
other settings get another folder.
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
@gpus_options
@crew_click_options
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
    gpus_per_video: int | None,
    ring: int | None,
    apart: bool | None,
    engine: str | None,
    address: str | None,
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
    if apart:
        without_own_cache(options)
    crew = crew_options(gpus, gpus_per_video, engine, address, ring, apart)
    team = join_team(terminal, gpus, ring, apart)
    alone = crew is not None or (team is None and gpus in (None, 1))
    if crew is None and team is None:
        check_ring(ring, gpus or 1, apart)
    with said_once(team):
        if not alone:
            check_prompts_file(prompts_file)
        source = read_prompts(prompts_file)
        if team is None and not alone:
            assert gpus is not None
            check_shared(prepare(source, options, silent(terminal)).request, gpus, apart)
            return launch(terminal, gpus, KEPT_VIDEOS)
        prepared = prepare(source, options, terminal)
        if team is not None:
            check_shared(prepared.request, team.count, apart)
    if team is not None:
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
        waiting: list[tuple[PreparedPrompt, VideoTarget]] = []
        for one, target in zip(prepared.prompts, targets, strict=True):
            if overwrite or not target.finished:
                waiting.append((one, target))
            else:
                _print_kept(terminal, target)
        states = {one.prompt.number: "made" for one, _ in waiting}
        if team is not None:
            team.tell([one.prompt.number for one, _ in waiting])
        if crew is not None:
            code = _spread_all(terminal, prepared, folder, waiting, states, crew)
        else:
            code = _make_all(terminal, prepared, folder, waiting, states, team)
        if team is not None and code == 0:
            team.leave()
    _answer(terminal, folder, prepared.prompts, targets, states)
    if code == 0:
        _say_next(terminal, prompts_file, prepared.request.method)
    return code


def _take_part(team: Team, prepared: PreparedPrompts, terminal: Terminal) -> int:
    """Compute what the first process makes videos of."""
    try:
        if numbers := team.hear():
            maker = Maker(terminal, prepared, team.ring, team.apart)
            for one in prepared.prompts:
                if one.prompt.number in numbers:
                    maker([one.request], "")
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
    # as a path it is no option, whatever its name begins with.
    file = prompts_file if not prompts_file.startswith("-") else f"./{prompts_file}"
    words = ["vidsparse", "compare", file]
    for option in ctx.command.params:
        name = option.name or ""
        given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not isinstance(option, click.Option) or not given or not option.expose_value:
            continue
        if name in _NOT_COMPARED:
            continue
        value = ctx.params[name]
        if option.is_flag:
            words.append((option.opts if value else option.secondary_opts)[0])
        else:
            between = "=" if option.multiple else "x"
            for one in value if option.multiple else (value,):
                text = between.join(map(str, one)) if isinstance(one, tuple) else str(one)
                words += [option.opts[0], text]
    terminal.say(f"Next, to see what sparsity cost: {shlex.join(words)}")


def _answer(
    terminal: Terminal,
    folder: RunFolder,
    prompts: Sequence[PreparedPrompt],
    targets: Sequence[VideoTarget],
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
) -> list[VideoTarget]:
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
    waiting: Sequence[tuple[PreparedPrompt, VideoTarget]],
    states: dict[int, str],
    team: Team | None = None,
) -> int:
    """Make the videos that are waiting; the exit code. ``states`` is told which were not made."""
    ring, apart = (None, False) if team is None else (team.ring, team.apart)
    maker = Maker(terminal, prepared, ring, apart)
    failed: list[int] = []
    for place, (one, target) in enumerate(waiting, 1):
        label = f"[{place}/{len(waiting)}] {short(one.prompt.text)}"
        try:
            _make(terminal, maker, one, folder, target, label)
        except FolderError as error:
            return _stopped(terminal, prepared, waiting[place - 1 :], states, error)
        except Exception as error:
            if terminal.ending:
                raise
            if team is not None:
                # the others may wait for this process in the middle of a step, for ever.
                team.wait_to_be_ended()
                _none_of(waiting[place - 1 :], states)
                _print_failure(terminal, one, error)
                return FAILED
            # one prompt's failure must not cost the others theirs.
            failed.append(one.prompt.number)
            states[one.prompt.number] = "failed"
            _print_failure(terminal, one, error)
    return _summed_up(terminal, prepared, folder, len(waiting), failed)


def _spread_all(
    terminal: Terminal,
    prepared: PreparedPrompts,
    folder: RunFolder,
    waiting: Sequence[tuple[PreparedPrompt, VideoTarget]],
    states: dict[int, str],
    crew: CrewOptions,
) -> int:
    """As ``_make_all``, by workers; videos are written in the order in which they are finished."""
    left = {one.prompt.number: (one, target) for one, target in waiting}
    failed: list[int] = []
    tasks = [(one.prompt.number, Generation(one.request)) for one, _ in waiting]
    with crew.doing(terminal, tasks, "Videos") as outcomes:
        for outcome in outcomes:
            one, target = left[outcome.number]
            try:
                if outcome.made is None:
                    assert outcome.error is not None
                    raise outcome.error
                (made,) = outcome.made
                folder.put(target, made.video, made.record)
                _print_made(terminal, target, made.record)
            except FolderError as error:
                return _stopped(terminal, prepared, list(left.values()), states, error)
            except WorkerDied as error:
                failed.append(outcome.number)
                states[outcome.number] = "failed"
                terminal.complain(
                    f"prompt {outcome.number:04d} failed: {outcome.deaths} workers died on it "
                    f"({error})"
                )
            except Exception as error:
                failed.append(outcome.number)
                states[outcome.number] = "failed"
                _print_failure(terminal, one, error)
            del left[outcome.number]
    return _summed_up(terminal, prepared, folder, len(waiting), failed)


def _stopped(
    terminal: Terminal,
    prepared: PreparedPrompts,
    left: Sequence[tuple[PreparedPrompt, VideoTarget]],
    states: dict[int, str],
    error: FolderError,
) -> int:
    """Say that the folder cannot be written to: the next ones would be computed for nothing."""
    _none_of(left, states)
    failed = sum(state == "failed" for state in states.values())
    terminal.complain(
        f"{error}. The run stops at prompt {left[0][0].prompt.number:04d}: "
        f"{len(prepared.prompts) - failed} of {len(prepared.prompts)} videos are done. Hint: when "
        "the folder can be written to, run the same command again to make the others."
    )
    return FAILED


def _none_of(left: Sequence[tuple[PreparedPrompt, VideoTarget]], states: dict[int, str]) -> None:
    """Take it down that a run which ends here makes none of what is left."""
    for one, _ in left:
        states[one.prompt.number] = "failed"


def _summed_up(
    terminal: Terminal,
    prepared: PreparedPrompts,
    folder: RunFolder,
    begun: int,
    failed: Sequence[int],
) -> int:
    """Say how many videos there are now; the exit code."""
    kept = len(prepared.prompts) - begun
    terminal.say(
        f"{begun - len(failed)} made, {kept} there already, {len(failed)} failed: {folder.path}"
    )
    if failed:
        numbers = ", ".join(f"{number:04d}" for number in sorted(failed))
        terminal.complain(
            f"{len(failed)} of {len(prepared.prompts)} prompts failed ({numbers}); finished "
            "videos are kept. Hint: run the same command again to make the missing ones."
        )
        return FAILED
    return 0


def _make(
    terminal: Terminal,
    maker: Maker,
    one: PreparedPrompt,
    folder: RunFolder,
    target: VideoTarget,
    label: str,
) -> None:
    from vidsparse.pipelines.video import write_video

    assert one.request.fps is not None
    (made,) = maker([one.request], label)
    # an old record stays until then: a video that it does not describe is not finished.
    write_video(made.frames, target.video, one.request.fps, sound=made.sound)
    folder.write_record(target, made.record)
    _print_made(terminal, target, made.record)


def _print_made(terminal: Terminal, target: VideoTarget, record: Mapping[str, Any]) -> None:
    if terminal.quiet:
        terminal.show(str(target.video))
        return
    times = record["times"]
    compiling = f" ({times['compile']:.1f} s of it compiling)" if times.get("compile") else ""
    # what was asked for and did not happen.
    missing = "".join(f"; {note}" for note in record["notes"] if note.startswith("without "))
    work = _work_done(record)
    terminal.show(f"{target.video}  {times['total']:.1f} s{compiling}, {work}{missing}")


def _work_done(record: Mapping[str, Any]) -> str:
    """How much of attention was computed, and why more than was asked for, where it was."""
    method = record["options"]["method"]
    reasons = [note for note in record["notes"] if note.startswith("dense:")]
    if record["computed"] is not None:
        shares = (
            f"{format_share(record['total'])} of the run's attention computed "
            f"({format_share(record['computed'])} of a sparse call's)"
        )
        return "; ".join([shares, *(f"some calls were {reason}" for reason in reasons)])
    if method == "dense":
        return "dense"
    why = "; ".join(reasons) or "dense: so are all its steps, or all its layers"
    return f"nothing was sparse, though {method} was asked for: {why}"


def _print_kept(terminal: Terminal, target: VideoTarget) -> None:
    terminal.show(str(target.video) if terminal.quiet else f"{target.video}  already there")


def _print_failure(terminal: Terminal, one: PreparedPrompt, error: Exception) -> None:
    if terminal.verbose >= 2:
        traceback.print_exception(error)
    message = " ".join(str(error).split())
    if not isinstance(error, VidsparseError):
        message = f"{type(error).__name__}: {message}"
    terminal.complain(f"prompt {one.prompt.number:04d} failed: {message}")
