"""The command line: what it writes, what it skips, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from filelock import FileLock

from vidsparse.apps.cli import main
from vidsparse.apps.commands.compare import compare
from vidsparse.apps.runs.prompts import SLUG_CHARACTERS, slug
from vidsparse.apps.terminal.console import Terminal
from vidsparse.methods import METHODS
from vidsparse.pipelines import generate as generating
from vidsparse.pipelines import models as modelling
from vidsparse.pipelines.generate import Generated
from vidsparse.pipelines.video import read_video

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = "# a comment\n\na red circle that moves right\n  a blue square that moves left  \n"
SMALL = ("--frames", "5", "--size", "32x32", "--steps", "2", "--device", "cpu")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "two.txt"
    path.write_text(PROMPTS, encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "videos"


class _Machine:
    """Stands in for the model: remembers what was asked for, and draws noise."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.loads = 0
        self.fail_on = ""
        self.before: Callable[[str], object] = lambda prompt: None

    def load(self, ref: Any, **options: Any) -> Any:
        self.loads += 1
        return SimpleNamespace(ref=ref, compile=False, linear="none")

    def generate_batch(
        self,
        loaded: Any,
        requests: Any,
        progress: Any = None,
        ring: int | None = None,
        apart: bool | None = False,
    ) -> list[Generated]:
        return [self.generate(request, progress) for request in requests]

    def generate(self, request: Any, progress: Any) -> Generated:
        if self.fail_on and self.fail_on in request.prompt:
            raise RuntimeError("the kernel\nfell over")
        self.before(request.prompt)
        self.made.append(request.prompt)
        for step in range(1, request.steps + 1):
            progress(step, request.steps, 0.1)
        shape = (request.frames, request.height, request.width, 3)
        frames = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
        record = {
            "prompt": request.prompt,
            "options": request.options(),
            "total": 0.625,
            "selected": 0.25,
            "computed": 0.5,
            "times": {"total": 1.5},
            "notes": [],
        }
        return Generated(frames=frames, record=record)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    stand_in = _Machine()
    monkeypatch.setattr(modelling, "load", stand_in.load)
    monkeypatch.setattr(generating, "generate_batch", stand_in.generate_batch)
    return stand_in


Run = Callable[..., Result]


@pytest.fixture
def generate(tiny_model: Path, prompts: Path, out: Path) -> Run:
    def run(*options: str, file: str | None = None, stdin: bytes | None = None) -> Result:
        arguments = ["generate", file or str(prompts), "--model", str(tiny_model), *SMALL]
        return CliRunner().invoke(main, [*arguments, "--out", str(out), *options], input=stdin)

    return run


def _videos(out: Path) -> list[str]:
    return sorted(path.name for path in out.rglob("*.mp4"))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "--help"], []])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from vidsparse.apps.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as stop:\n"
        "    heavy = {'torch', 'diffusers', 'rich', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "    sys.exit(str(heavy) if heavy else stop.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("count", "said"),
    [("9" * 400, "--gpus"), ("1000", "starts 1000 processes, and this machine has room for")],
)
def test_no_more_processes_are_started_than_a_machine_has_room_for(
    count: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("a red circle\n", encoding="utf-8")
    given = ["generate", str(tmp_path / "p.txt"), "--device", "cpu", "--gpus", count]
    done = CliRunner().invoke(main, [*given, "--out", str(tmp_path / "o")])
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("command", ["generate", "compare"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--gpus", "2", "--ring", "2"], "GPUs for each guidance branch, 1"),
        (["--gpus", "3"], "3 GPUs for each video are no two halves"),
        ([], "1 GPUs for each video are no two halves"),
        (["--gpus", "4", "--gpus-per-video", "2"], "leave --gpus-per-video and --engine out"),
        (["--gpus", "2", "--cache", "taylorseer"], "does not work with the step cache taylorseer"),
    ],
)
def test_what_guidance_branches_apart_cannot_do_is_said(
    command: str, given: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("a red circle\n", encoding="utf-8")
    words = [command, str(tmp_path / "p.txt"), "--device", "cpu", "--apart", *given]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "o")])
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_a_command_keeps_what_libraries_say_of_themselves_off_standard_error() -> None:
    pytest.importorskip("torchao")
    code = (
        "import sys\n"
        "from vidsparse.apps.cli import main\n"
        "try:\n"
        "    main(['methods'])\n"
        "except SystemExit:\n"
        # as a command does that records calls of a model, or builds one.
        "    from diffusers import WanPipeline\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_that_wait_leave_their_core() -> None:
    # it must stand in the environment before torch is imported, and a user's own choice stays.
    code = (
        "import os, sys\n"
        "from vidsparse.apps.cli import main\n"
        "try:\n"
        "    main(['--version'])\n"
        "except SystemExit:\n"
        "    print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for own, policy in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment | own
        )
        assert done.stdout.splitlines()[-1] == f"{policy} False"


def test_module_and_version() -> None:
    command = [sys.executable, "-m", "vidsparse", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("vidsparse ")


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_help_groups_options_by_method_and_shows_examples(command: str) -> None:
    text = CliRunner().invoke(main, [command, "--help"], terminal_width=100).output
    fg, rest = text.split("Options of --method spargeattn (SpargeAttn)")
    fg = fg.split("Options of --method fg-attn (FG-Attn)")[1]
    sparge = rest.split("How to run")[0]
    assert "--top-p" in fg
    assert "16x16" in fg
    assert "--tau" in sparge
    assert "128x64" in sparge
    assert "--top-p" not in sparge
    assert f"vidsparse {command} prompts.txt" in text


def options_of(
    command: click.Command, name: str = "vidsparse"
) -> Iterator[tuple[str, click.Option]]:
    """Every option of ``command`` and those below it, with the name of its command."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            yield from options_of(below, f"{name} {each}")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield name, parameter


def test_every_option_says_what_it_is() -> None:
    told = [(name, option.opts[0], option.help or "") for name, option in options_of(main)]
    assert len(told) > 100
    # a default alone is no help.
    silent = [(name, flag) for name, flag, text in told if not text.split("[default")[0].strip()]
    assert silent == []


def test_every_option_of_the_issue_is_there() -> None:
    text = CliRunner().invoke(main, ["generate", "--help"], terminal_width=100).output
    flags = (
        "--model --method --top-p --tile --order --dense-steps --dense-last-steps --dense-layers "
        "--dense-last-layers --reuse --merge --steps --frames --size --fps --guidance "
        "--negative-prompt --seed --device --dtype --offload --speed --linear --cache "
        "--cache-threshold --compile --lora --implementation "
        "--out --overwrite --tau --theta --verbose --quiet"
    )
    assert [flag for flag in flags.split() if flag not in text] == []


def test_generate_writes_a_video_and_a_record_for_every_prompt(generate: Run, out: Path) -> None:
    done = generate()
    assert done.exit_code == 0, done.output
    names = ["0001-a-red-circle-that-moves-right", "0002-a-blue-square-that-moves-left"]
    assert _videos(out) == [f"{name}.mp4" for name in names]
    (folder,) = out.iterdir()
    assert folder.name.startswith("two-fg-attn-")

    for name, prompt in zip(names, PROMPTS.split("\n")[2:], strict=False):
        record = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        assert record["prompt"] == prompt.strip()
        assert record["options"]["method_options"] == {
            "top_p": 0.9,
            "topk": None,
            "score": "mass",
            "tile": "16x16",
            "merge": "xor-window",
            "means": 64,
            "plans": "shared",
        }
        assert 0 < record["selected"] <= record["computed"] <= 1
        assert read_video(folder / f"{name}.mp4").shape == (5, 32, 32, 3)
    assert str(folder / f"{names[0]}.mp4") in done.stdout


def test_a_run_in_which_nothing_was_sparse_says_so(generate: Run) -> None:
    done = generate("--dense-steps", "1.0", file="-", stdin=b"a red circle")
    assert done.exit_code == 0, done.output
    assert "nothing was sparse, though fg-attn was asked for: dense: so are all its" in done.stdout
    asked = generate("--method", "dense", file="-", stdin=b"a red circle")
    assert "nothing was sparse" not in asked.stdout


def test_calls_that_fell_back_are_named_with_the_reason(
    generate: Run, machine: _Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = machine.generate

    def fallen(*args: Any) -> Generated:
        made = make(*args)
        made.record["notes"].append("dense: the host has a mask for this call")
        return made

    monkeypatch.setattr(machine, "generate", fallen)
    done = generate()
    assert "in the sparse calls; some calls were dense: the host has a mask" in done.stdout


def test_a_rerun_makes_nothing_and_loads_nothing(
    generate: Run, machine: _Machine, out: Path
) -> None:
    assert generate().exit_code == 0
    assert (machine.loads, len(machine.made)) == (1, 2)
    again = generate()
    assert again.exit_code == 0
    assert (machine.loads, len(machine.made)) == (1, 2)
    assert again.stdout.count("already there") == 2


def test_overwrite_makes_everything_again(generate: Run, machine: _Machine) -> None:
    generate()
    assert generate("--overwrite").exit_code == 0
    assert len(machine.made) == 4


def test_other_settings_get_another_folder(generate: Run, machine: _Machine, out: Path) -> None:
    generate()
    generate("--seed", "1")
    generate("--method", "spargeattn", "--tau", "0.5")
    assert len(machine.made) == 6
    assert len(list(out.iterdir())) == 3


def test_a_missing_video_or_record_is_made_again(
    generate: Run, machine: _Machine, out: Path
) -> None:
    generate()
    next(out.rglob("0001-*.mp4")).unlink()
    next(out.rglob("0002-*.json")).write_text("{ broken", encoding="utf-8")
    generate()
    assert machine.made[2:] == machine.made[:2]


def test_a_video_that_was_cut_short_is_made_again(
    generate: Run, machine: _Machine, out: Path
) -> None:
    generate()
    whole = next(out.rglob("0001-*.mp4"))
    data = whole.read_bytes()
    whole.write_bytes(data[:1000])
    generate()
    assert machine.made[2:] == machine.made[:1]
    assert whole.read_bytes() == data


def test_verify_finds_a_changed_byte_that_the_size_does_not_tell(
    generate: Run, machine: _Machine, out: Path
) -> None:
    generate()
    changed = next(out.rglob("0002-*.mp4"))
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    generate()
    assert len(machine.made) == 2
    generate("--verify")
    assert machine.made[2:] == machine.made[1:2]


def test_a_record_that_was_edited_is_of_no_finished_video(
    generate: Run, machine: _Machine, out: Path
) -> None:
    generate()
    record = next(out.rglob("0001-*.json"))
    value = json.loads(record.read_text(encoding="utf-8"))
    value["options"]["seed"] = 7
    record.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    generate()
    assert machine.made[2:] == machine.made[:1]


def test_a_pair_from_another_run_is_no_finished_video(
    generate: Run, machine: _Machine, out: Path
) -> None:
    import shutil

    generate("--seed", "1")
    (one,) = out.iterdir()
    generate()
    (two,) = set(out.iterdir()) - {one}
    for path in one.glob("0001-*"):
        shutil.copy(path, two)
    generate()
    assert machine.made[4:] == machine.made[:1]


def test_an_overwrite_that_fails_keeps_the_old_video_and_its_record(
    generate: Run, machine: _Machine, out: Path, ffmpeg: Callable[[str], None]
) -> None:
    generate()
    before = {path: path.read_bytes() for path in out.rglob("0*")}
    ffmpeg("cat > /dev/null; exit 1")
    done = generate("--overwrite")
    assert done.exit_code == 1
    assert "prompt 0001 failed" in done.stderr
    assert "ffmpeg ended with exit code 1" in done.stderr
    assert {path: path.read_bytes() for path in out.rglob("0*")} == before


def _many(prompts: Path, count: int) -> None:
    text = "\n".join(f"a red circle {number}" for number in range(1, count + 1))
    prompts.write_text(text, encoding="utf-8")


def test_a_folder_that_is_gone_ends_the_run_at_once(
    generate: Run, machine: _Machine, prompts: Path, out: Path
) -> None:
    import shutil

    _many(prompts, 6)
    machine.before = lambda text: shutil.rmtree(out) if text.endswith("3") else None
    done = generate()
    assert done.exit_code == 1
    assert len(machine.made) == 3
    assert "The run stops at prompt 0003: 2 of 6 videos are done." in done.stderr
    assert "No such file or directory" in done.stderr
    assert "Traceback" not in done.output
    # and nothing is still locked.
    machine.before = lambda text: None
    assert generate().exit_code == 0


def test_a_disk_that_is_full_ends_the_run_at_once(
    generate: Run, machine: _Machine, prompts: Path, out: Path, ffmpeg: Callable[[str], None]
) -> None:
    _many(prompts, 6)
    full = "cat > /dev/null; echo 'clip.mp4: No space left on device' >&2; exit 228"
    machine.before = lambda text: ffmpeg(full) if text.endswith("4") else None
    done = generate()
    assert done.exit_code == 1
    assert len(machine.made) == 4
    assert "No space left on device. The run stops at prompt 0004: 3 of 6" in done.stderr
    assert len(_videos(out)) == 3


def test_the_next_run_clears_what_a_killed_one_left(
    generate: Run, machine: _Machine, out: Path
) -> None:
    generate()
    (folder,) = out.iterdir()
    left = [".0001-a-red.mp4.0123abcd.tmp", ".0002-a.json.abc_de01.tmp", ".0001-a-0123abcd.mp4"]
    for name in left:
        (folder / name).write_bytes(b"half")
    (folder / "notes.tmp").write_bytes(b"mine")
    assert generate().exit_code == 0
    names = {path.name for path in folder.iterdir()}
    assert not names & set(left)
    assert "notes.tmp" in names


def test_a_finished_run_needs_no_folder_that_can_be_written_to(
    generate: Run, machine: _Machine, out: Path
) -> None:
    generate()
    (folder,) = out.iterdir()
    (folder / ".vidsparse.lock").unlink(missing_ok=True)
    # no lock can be taken here, by root neither.
    (folder / ".vidsparse.lock").mkdir()
    folder.chmod(0o555)
    done = generate()
    folder.chmod(0o755)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("already there") == 2
    assert generate("--overwrite").exit_code == 2


def test_a_negative_prompt_that_is_no_text_is_refused(generate: Run, out: Path) -> None:
    # how Python hands over a byte of the command line that is no UTF-8.
    _assert_refused(generate("--negative-prompt", "grey\udcff"), out, "no Unicode text")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_folder_whose_name_is_no_text_costs_no_video(
    generate: Run, machine: _Machine, tiny_model: Path, tmp_path: Path, out: Path
) -> None:
    import shutil

    strange = tmp_path / "model-\udcff"
    shutil.copytree(tiny_model, strange)
    done = generate("--model", str(strange))
    assert done.exit_code == 0, done.output
    assert generate("--model", str(strange)).exit_code == 0
    assert len(machine.made) == 2


def test_ten_thousand_prompts_are_looked_at_in_seconds(
    generate: Run, machine: _Machine, prompts: Path
) -> None:
    _many(prompts, 10_000)
    # of the processor, which other tests want too.
    began = time.process_time()

    def first(text: str) -> None:
        raise KeyboardInterrupt

    machine.before = first
    assert generate().exit_code == 130
    assert time.process_time() - began < 10


@contextmanager
def usual(signum: signal.Signals) -> Iterator[None]:
    """Have a signal do what it does in a program of its own."""
    before = signal.getsignal(signum)
    signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signum, before)


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_that_a_library_turns_into_an_error_still_ends_the_run(
    signum: signal.Signals, status: int, generate: Run, machine: _Machine, out: Path
) -> None:
    def second(text: str) -> None:
        if "square" in text:
            try:
                signal.raise_signal(signum)
            except KeyboardInterrupt:
                raise OSError("cannot read the weights") from None

    machine.before = second
    with usual(signum):
        done = generate()
    assert done.exit_code == status, done.output
    assert done.stderr.rstrip().endswith("Interrupted; finished videos are kept.")
    assert "weights" not in done.stderr
    assert _videos(out) == ["0001-a-red-circle-that-moves-right.mp4"]


class _Going:
    """What is interrupted while it goes, where Python drops the interrupt."""

    def __init__(self, signum: signal.Signals) -> None:
        self._signum = signum

    def __del__(self) -> None:
        signal.raise_signal(self._signum)


@pytest.mark.skipif(os.name != "posix", reason="sends signals")
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_that_comes_while_an_object_goes_is_not_lost(
    signum: signal.Signals,
    status: int,
    generate: Run,
    machine: _Machine,
    out: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def second(text: str) -> None:
        if "square" in text:
            going = _Going(signum)
            del going
            time.sleep(10)
            unheard.append(text)

    unheard: list[str] = []
    machine.before = second
    with usual(signum):
        done = generate()
    assert not unheard
    assert done.exit_code == status, done.output
    assert done.stderr.rstrip().endswith("Interrupted; finished videos are kept.")
    assert "ignored" not in done.stderr + capfd.readouterr().err
    assert _videos(out) == ["0001-a-red-circle-that-moves-right.mp4"]


def test_an_edited_line_is_made_under_its_new_name_and_the_old_file_stays(
    generate: Run, machine: _Machine, prompts: Path, out: Path
) -> None:
    generate()
    prompts.write_text(PROMPTS.replace("red circle", "red square"), encoding="utf-8")
    generate()
    assert machine.made[2:] == ["a red square that moves right"]
    assert [name[:16] for name in _videos(out)] == [
        "0001-a-red-circl",
        "0001-a-red-squar",
        "0002-a-blue-squa",
    ]


def test_an_edit_behind_the_end_of_the_name_keeps_both_files(
    generate: Run, machine: _Machine, prompts: Path, out: Path
) -> None:
    long = "a red circle that moves right over a plain and very grey background"
    prompts.write_text(f"{long} slowly", encoding="utf-8")
    generate()
    prompts.write_text(f"{long} quickly", encoding="utf-8")
    generate()
    generate()
    assert machine.made == [f"{long} slowly", f"{long} quickly"]
    assert len(_videos(out)) == 2


def test_a_prompt_that_fails_costs_the_others_nothing(
    generate: Run, machine: _Machine, out: Path
) -> None:
    machine.fail_on = "red"
    done = generate()
    assert done.exit_code == 1
    assert "prompt 0001 failed: RuntimeError: the kernel fell over" in done.stderr
    assert "run the same command again" in done.stderr
    assert "Traceback" not in done.output
    assert _videos(out) == ["0002-a-blue-square-that-moves-left.mp4"]
    machine.fail_on = ""
    assert generate().exit_code == 0
    assert machine.made == ["a blue square that moves left", "a red circle that moves right"]


def test_quiet_prints_paths_only(generate: Run, machine: _Machine, out: Path) -> None:
    done = generate("-q")
    assert [Path(line).name for line in done.stdout.splitlines()] == _videos(out)
    assert done.stderr == ""


def test_standard_input(generate: Run, machine: _Machine, out: Path) -> None:
    done = generate(file="-", stdin="a red circle\r\nein grüner Ring".encode())
    assert done.exit_code == 0, done.output
    assert machine.made == ["a red circle", "ein grüner Ring"]
    assert next(out.iterdir()).name.startswith("stdin-fg-attn-")


def test_a_second_run_in_one_folder_is_refused(generate: Run, machine: _Machine, out: Path) -> None:
    generate()
    (folder,) = out.iterdir()
    with FileLock(folder / ".vidsparse.lock"):
        done = generate("--overwrite")
    assert done.exit_code == 2
    assert str(folder) in done.stderr
    assert len(machine.made) == 2


def test_no_method_takes_a_flag_of_the_request() -> None:
    from vidsparse.apps.terminal.options import MethodOption
    from vidsparse.methods import METHODS

    command = main.get_command(click.Context(main), "generate")
    assert command is not None
    shared = [one for one in command.params if not isinstance(one, MethodOption)]
    flags = {flag for one in shared for flag in (*one.opts, *one.secondary_opts)}
    assert "--steps" in flags
    for name, cls in METHODS.items():
        for field in cls.option_fields():
            assert field.metadata["flag"] not in flags, f"{field.name} of {name}"


def test_words_the_model_lacks_are_named(
    machine: _Machine, tiny_model: Path, tmp_path: Path, prompts: Path, out: Path
) -> None:
    model = tmp_path / "worded"
    model.symlink_to(tiny_model)
    card = {"vocabulary": ["a", "red", "blue", "circle", "that", "moves", "left", "right"]}
    (tiny_model / "vidsparse.json").write_text(json.dumps(card), encoding="utf-8")
    try:
        done = CliRunner().invoke(
            main, ["generate", str(prompts), "--model", str(model), *SMALL, "--out", str(out)]
        )
    finally:
        (tiny_model / "vidsparse.json").unlink()
    assert done.exit_code == 0
    assert "prompt 2" in done.stderr
    assert "square" in done.stderr
    assert "prompt 1" not in done.stderr


def test_the_bar_counts_steps_on_a_terminal(
    generate: Run, machine: _Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rich takes this for a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    text = generate().stderr
    assert "a red circle that moves right" in text
    assert "decoding" in text


def _assert_refused(done: Result, out: Path, words: str) -> None:
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.output
    assert words in done.stderr
    assert done.stdout == ""
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no prompt"),
        (b"# only\n\n   \n# comments", "holds no prompt"),
        (b"a red circle\n\xff\xfe broken", "not UTF-8 text (line 2"),
        ("a red circle".encode("utf-16"), "not UTF-8"),
        (b"fine\n" + b"x" * 10_001, "line 2"),
        (b"nul \0 inside", "NUL"),
    ],
)
def test_bad_prompt_files(
    generate: Run, prompts: Path, out: Path, content: bytes, words: str
) -> None:
    prompts.write_bytes(content)
    _assert_refused(generate(), out, words)


def test_a_prompt_of_just_ten_thousand_characters_is_taken(
    generate: Run, machine: _Machine, prompts: Path
) -> None:
    prompts.write_text("x" * 10_000, encoding="utf-8")
    assert generate().exit_code == 0


def test_missing_prompt_file(generate: Run, out: Path, tmp_path: Path) -> None:
    _assert_refused(generate(file=str(tmp_path / "none.txt")), out, "there is no prompt file")


def test_a_prompt_file_without_a_name(out: Path) -> None:
    _assert_refused(CliRunner().invoke(main, ["generate", ""]), out, "has no name")


@pytest.mark.skipif(os.name != "posix", reason="closes a descriptor with a shell")
def test_a_closed_standard_input_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m vidsparse generate - <&-', sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: standard input is closed. Hint: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_is_no_prompt_file(generate: Run, out: Path, tmp_path: Path) -> None:
    _assert_refused(generate(file=str(tmp_path)), out, "is a folder")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--frames 8", "Hint: use 9"),
        ("--size 32x33", "multiple of 16"),
        ("--size 32", "WIDTHxHEIGHT"),
        ("--size 0x32", "at least 1"),
        ("--steps 0", "steps must be at least 1"),
        ("--seed abc", "not a valid integer"),
        ("--seed -1", "seed must be"),
        ("--fps 0", "fps must be at least 0.1"),
        ("--fps 1e-300", "fps must be at least 0.1"),
        ("--fps 1e20", "fps must be at most 1000"),
        ("--guidance 1e300", "guidance must be at most 100"),
        ("--steps 100000", "steps must be at most 1,000"),
        ("--size 16000x16000", "width must be at most 8,192"),
        ("--fps fast", "not a number"),
        ("--guidance -1", "guidance"),
        ("--method nearest", "fg-attn, spargeattn"),
        ("--method nearest --tau 0.5", "unknown method"),
        ("--tile 5x16", "Hint: 16x16"),
        ("--tile big", "MxN"),
        ("--top-p 0", "(0, 1]"),
        ("--top-p 1.5", "(0, 1]"),
        ("--top-p nan", "(0, 1]"),
        ("--top-p most", "cannot be 'most'"),
        ("--tau 0.5", "option of spargeattn, xattention, sale and sol-attn, not of fg-attn"),
        ("--method spargeattn --top-p 0.5", "option of fg-attn, not of spargeattn"),
        ("--top-p 0.5 --topk 0.3", "selects by top_p or by topk"),
        ("--topk some", "cannot be 'some'"),
        ("--method xattention --stride 3", "stride must be one of 4, 8, 16, 64"),
        ("--method xattention --blocks 1.5", "--blocks cannot be '1.5'"),
        ("--method sale --local 0", "local must be"),
        (f"--method sale --local {10**25}", "local must be below 2^31"),
        (f"--method xattention --blocks {10**25}", "blocks must be below 2^31"),
        (f"--frames {10**400}", "frames must be at most 10,000"),
        (
            "--method dense --tile 16x16",
            "not of dense. Hint: add --method fg-attn",
        ),
        ("--merge nicely", "xor"),
        ("--order spiral", "hilbert"),
        ("--dense-steps 1.5", "dense_steps"),
        ("--dense-steps few", "neither a count"),
        ("--reuse 0", "reuse"),
        ("--refresh 1.5", "refresh"),
        ("--device tpu", "cpu, cuda"),
        ("--dtype fp64", "fp32"),
        ("--dtype fp16", "fp32 or bf16"),
        ("--offload disk", "none, model, group"),
        ("--linear int4", "none, fp8, int8"),
        ("--linear fp8 --device cpu", "compute capability 8.9"),
        ("--cache teacache", "none, first-block, taylorseer"),
        ("--cache-threshold 0.1", "without a cache"),
        ("--speed ludicrous", "exact, high, balanced, fast"),
        ("--implementation magic", "auto"),
        ("--nonsense", "No such option"),
        ("--model nowhere", "there is no model"),
        ("--model ~nobody-here/model", "cannot be the folder of a model"),
        (f"--model {'x' * 5000}", "cannot be the folder of a model: File name too long"),
    ],
)
def test_bad_options(generate: Run, out: Path, options: str, words: str) -> None:
    _assert_refused(generate(*options.split()), out, words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_cuda_asked_for_and_absent(generate: Run, out: Path, device: str) -> None:
    _assert_refused(generate("--device", device), out, "no CUDA device")


@pytest.mark.parametrize("index", [None, "not json", "[]", '{"_class_name": "FluxPipeline"}'])
def test_a_folder_without_a_known_pipeline(
    generate: Run, out: Path, tmp_path: Path, index: str | None
) -> None:
    folder = tmp_path / "strange"
    folder.mkdir()
    if index is not None:
        (folder / "model_index.json").write_text(index, encoding="utf-8")
    _assert_refused(generate("--model", str(folder)), out, "")


def test_an_output_folder_that_cannot_be(generate: Run, machine: _Machine, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way", encoding="utf-8")
    _assert_refused(generate("--out", str(blocked)), blocked / "x", "cannot be written to")
    assert machine.loads == 0


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_output_folder(generate: Run, machine: _Machine, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    _assert_refused(generate("--out", str(closed)), closed / "x", "cannot be written to")


def test_a_model_that_does_not_load_leaves_nothing(
    generate: Run, tiny_model: Path, tmp_path: Path, out: Path
) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    next((broken / "transformer").glob("*.safetensors")).write_bytes(b"no weights")
    done = generate("--model", str(broken))
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert list(out.iterdir()) == []


def test_no_command_of_that_name() -> None:
    done = CliRunner().invoke(main, ["genrate"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "Error: there is no command 'genrate'. Hint: did you mean generate?\n"


def test_defects_say_how_to_get_a_traceback(
    generate: Run, machine: _Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fall_over(*_: Any, **__: Any) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(modelling, "load", fall_over)
    done = generate()
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: KeyError: 'surprise'. Hint: run with -vv for the traceback."
    )
    assert "Traceback" not in done.output
    assert "Traceback" in generate("-vv").stderr


def test_verbose_shows_the_traceback_of_bad_input_too(generate: Run) -> None:
    done = generate("--steps", "0", "-v", "-v")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr


def test_exit_code_of_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vidsparse", "generate", str(tmp_path / "none.txt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_keeps_finished_videos_and_leaves_no_partial_file(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "many.txt").write_text("a red circle\n" * 200, encoding="utf-8")
    command = [sys.executable, "-m", "vidsparse", "generate", "many.txt", "--out", "o"]
    command += ["--model", str(tiny_model), *SMALL]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that puts the tests in the background has them ignore this signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("o/*/0002-*.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.rstrip().endswith("Interrupted; finished videos are kept.")
    assert "Traceback" not in stderr
    (folder,) = (tmp_path / "o").iterdir()
    files = {path.name for path in folder.iterdir()} - {".vidsparse.lock"}
    assert all(name.endswith((".mp4", ".json")) and not name.startswith(".") for name in files)
    assert {f"{name[:4]}" for name in files} >= {"0001", "0002"}
    for record in folder.glob("*.json"):
        json.loads(record.read_text(encoding="utf-8"))
        assert record.with_suffix(".mp4").stat().st_size > 0
    # the signal may fall between a record and its line.
    assert 0 <= len(list(folder.glob("*.json"))) - stdout.count(".mp4") <= 1


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="sends SIGTERM")
def test_sigterm_ends_as_ctrl_c_does(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("a red circle\n" * 200, encoding="utf-8")
    command = [sys.executable, "-m", "vidsparse", "generate", "many.txt", "--out", "o"]
    process = subprocess.Popen(
        [*command, "--model", str(tiny_model), *SMALL],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("o/*/0001-*.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    assert stderr.splitlines()[-1] == "Interrupted; finished videos are kept."
    assert "Traceback" not in stderr
    hidden = [path.name for path in tmp_path.glob("o/*/.*")]
    assert [name for name in hidden if name != ".vidsparse.lock"] == []


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_results_that_cannot_be_printed_cost_no_video(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text(PROMPTS, encoding="utf-8")
    command = [sys.executable, "-m", "vidsparse", "generate", "two.txt", "--out", "o"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "--model", str(tiny_model), *SMALL],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert "Standard output cannot be written to (No space left on device)" in done.stderr
    assert "2 made, 0 there already, 0 failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert len(list(tmp_path.glob("o/*/*.mp4"))) == 2


@pytest.mark.slow
def test_letters_that_the_terminal_does_not_know_cost_no_video(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("a red кольцо\n", encoding="utf-8")
    command = [sys.executable, "-m", "vidsparse", "generate", "one.txt", "--out", "o"]
    done = subprocess.run(
        [*command, "--model", str(tiny_model), *SMALL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert done.returncode == 0, done.stderr
    assert "0001-a-red-\\u043a" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_that_cannot_be_printed_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vidsparse", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == (
        "Error: standard output cannot be written to: No space left on device.\n"
    )


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A Red/Circle: moves... right!", "a-red-circle-moves-right"),
        ("../../etc/passwd", "etc-passwd"),
        ("ein grüner Ring", "ein-grüner-ring"),
        ("?!", "prompt"),
        ("x" * 500, "x" * SLUG_CHARACTERS),
        ("word " * 50, "-".join(["word"] * 9)),
    ],
)
def test_slugs(prompt: str, name: str) -> None:
    assert slug(prompt) == name


@pytest.fixture
def bundled(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model in place of the bundled one."""
    import shutil

    folder = tmp_path / "bundled"
    shutil.copytree(tiny_model, folder)
    card = {
        "description": "draws moving shapes",
        "license": "CC0",
        "vocabulary": ["red", "circle"],
        "example_prompts": ["a red circle"],
    }
    (folder / "vidsparse.json").write_text(json.dumps(card), encoding="utf-8")
    monkeypatch.setattr(modelling, "MODELS", {"shapes": folder})
    return folder


def test_doctor_finds_what_runs_and_why_the_rest_does_not(bundled: Path) -> None:
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "generate will work here." in done.output
    for words in ("torch", "ffmpeg", "Kernels on cpu", "fp32", "bf16", "not triton", "shapes"):
        assert words in done.output


def test_doctor_without_a_model_says_so_and_fails(bundled: Path) -> None:
    (bundled / "model_index.json").unlink()
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    assert "Problem: the files of the bundled model" in done.output


def test_json_is_all_that_goes_to_standard_output(generate: Run, machine: _Machine) -> None:
    done = generate("--json")
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert [each["state"] for each in answer["videos"]] == ["made", "made"]
    for each in answer["videos"]:
        assert Path(each["video"]).is_file()
        assert Path(each["record"]).is_file()
    again = json.loads(generate("--json").stdout)
    assert [each["state"] for each in again["videos"]] == ["kept", "kept"]
    assert again["folder"] == answer["folder"]


def test_json_says_which_prompt_failed(generate: Run, machine: _Machine) -> None:
    machine.fail_on = "blue"
    done = generate("--json")
    assert done.exit_code == 1
    assert [each["state"] for each in json.loads(done.stdout)["videos"]] == ["made", "failed"]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("doctor", {"sections", "problems"}),
        ("models", {"bundled", "families"}),
    ],
)
def test_what_lists_things_has_a_json_form(bundled: Path, command: str, names: set[str]) -> None:
    done = CliRunner().invoke(main, [command, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout).keys() == names


def test_methods_in_json_name_every_option() -> None:
    document = json.loads(CliRunner().invoke(main, ["methods", "--json"]).stdout)
    assert [each["name"] for each in document] == list(METHODS)
    options = {each["name"]: {one["flag"] for one in each["options"]} for each in document}
    assert "--top-p" in options["fg-attn"]


def test_generate_says_which_command_shows_what_it_cost(
    generate: Run, machine: _Machine, prompts: Path
) -> None:
    said = generate("--top-p", "0.3", "--overwrite").stderr
    (line,) = [line for line in said.splitlines() if line.startswith("Next")]
    command = shlex.split(line.partition(": ")[2])
    assert command[:3] == ["vidsparse", "compare", str(prompts)]
    assert command[command.index("--top-p") + 1] == "0.3"
    assert "--overwrite" not in command
    # it can be given as it stands.
    compare.make_context("compare", command[2:], obj=Terminal())
    assert "Next" not in generate("--method", "dense").stderr


def test_shells_complete_commands_and_options() -> None:
    asked = {"COMP_WORDS": "vidsparse generate --spe", "COMP_CWORD": "2"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("vidsparse"))],
        env={**os.environ, **asked, "_VIDSPARSE_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["plain,--speed"]


def test_methods_lists_papers_and_defaults() -> None:
    done = CliRunner().invoke(main, ["methods"])
    assert done.exit_code == 0
    for words in ("fg-attn", "spargeattn", "--top-p P", "[default: 16x16]", "2502.18137"):
        assert words in done.output


def test_models_lists_words_prompts_and_families(bundled: Path) -> None:
    done = CliRunner().invoke(main, ["models"])
    assert done.exit_code == 0, done.output
    for words in ("draws moving shapes", "red, circle", "a red circle", "WanPipeline", "CC0"):
        assert words in done.output


@pytest.mark.slow
def test_libraries_say_nothing_while_a_model_is_loaded(tiny_model: Path) -> None:
    # a process of its own: they speak when they are first imported.
    code = (
        "import sys; from vidsparse.pipelines.models import load; load(sys.argv[1], device='cpu')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
