"""Runs of ``vidsparse generate`` that something cuts short: a signal, a full disk, an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from prompt_runs import PROMPTS, SMALL, Machine, Run, video_names

from vidsparse.apps.terminal.console import Terminal, _endable

pytest_plugins = ["prompt_runs"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "videos"


def test_an_overwrite_that_fails_keeps_the_old_video_and_its_record(
    generate: Run, machine: Machine, out: Path, ffmpeg: Callable[[str], None]
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
    generate: Run, machine: Machine, prompts: Path, out: Path
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
    generate: Run, machine: Machine, prompts: Path, out: Path, ffmpeg: Callable[[str], None]
) -> None:
    _many(prompts, 6)
    full = "cat > /dev/null; echo 'clip.mp4: No space left on device' >&2; exit 228"
    machine.before = lambda text: ffmpeg(full) if text.endswith("4") else None
    done = generate()
    assert done.exit_code == 1
    assert len(machine.made) == 4
    assert "No space left on device. The run stops at prompt 0004: 3 of 6" in done.stderr
    assert len(video_names(out)) == 3


def test_the_next_run_clears_what_a_killed_one_left(
    generate: Run, machine: Machine, out: Path
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


def test_ten_thousand_prompts_are_looked_at_in_seconds(
    generate: Run, machine: Machine, prompts: Path
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
    signum: signal.Signals, status: int, generate: Run, machine: Machine, out: Path
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
    assert video_names(out) == ["0001-a-red-circle-that-moves-right.mp4"]


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
    machine: Machine,
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
    assert video_names(out) == ["0001-a-red-circle-that-moves-right.mp4"]


def test_a_prompt_that_fails_costs_the_others_nothing(
    generate: Run, machine: Machine, out: Path
) -> None:
    machine.fail_on = "red"
    done = generate()
    assert done.exit_code == 1
    assert "prompt 0001 failed: RuntimeError: the kernel fell over" in done.stderr
    assert "run the same command again" in done.stderr
    assert "Traceback" not in done.output
    assert video_names(out) == ["0002-a-blue-square-that-moves-left.mp4"]
    machine.fail_on = ""
    assert generate().exit_code == 0
    assert machine.made == ["a blue square that moves left", "a red circle that moves right"]


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


def test_a_second_sigterm_that_comes_as_the_first_is_handled_shows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    terminal = Terminal()
    # what Python says of a signal whose handler has gone meanwhile.
    late = SimpleNamespace(exc_value=OSError("Signal 15 ignored due to race condition"))
    with _endable(terminal):
        sys.unraisablehook(late)
        terminal.ending = True
        sys.unraisablehook(late)
    assert shown == [late]


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
