"""``vidsparse generate --gpus``: several processes make each video, here two on a CPU (gloo)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch.distributed.launcher import api

from vidsparse.apps.cli import main
from vidsparse.apps.runs.team import KEPT_VIDEOS, launch
from vidsparse.apps.terminal.console import Terminal
from vidsparse.pipelines.video import read_video

pytestmark = pytest.mark.slow

PROMPT = "a large red circle that moves right on a plain black background"
# small enough to be made in a second, and large enough that sparse calls leave out a third.
SETTINGS = ["--steps", "2", "--frames", "9", "--size", "96x96", "--device", "cpu", "--top-p", "0.5"]


def words(folder: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "vidsparse", "generate", str(folder / "p.txt")]
    return [*command, *SETTINGS, "--out", str(folder / "out"), *more]


def run(
    folder: Path,
    *more: str,
    python: Sequence[str] = (sys.executable,),
    where: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """The command, given to ``python`` in the working folder ``where``, or in ``folder``."""
    (folder / "p.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    return subprocess.run(
        [*python, *words(folder, *more)[1:]],
        capture_output=True,
        text=True,
        cwd=where or folder,
        timeout=200,
        check=False,
    )


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted((folder / "out").rglob(f"*{suffix}"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder whose video two processes have made, and what they said.

    They were started where a package of our name stands, as a checkout's core does, beside which
    the package's other floors are: only the first is kept from importing it, by ``-P``.
    """
    folder = tmp_path_factory.mktemp("together")
    stray = folder / "started" / "vidsparse"
    stray.mkdir(parents=True)
    (stray / "__init__.py").write_text("raise ImportError('of the folder')", encoding="utf-8")
    python = (sys.executable, "-P")
    return folder, run(folder, "--gpus", "2", python=python, where=stray.parent)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "p.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    # in this process, which has imported already what a new one would.
    done = CliRunner().invoke(main, words(folder)[3:])
    assert done.exit_code == 0, done.output
    return folder


def assert_alike(folder: Path, alone: Path) -> None:
    assert [path.name for path in files(folder, ".mp4")] == [
        path.name for path in files(alone, ".mp4")
    ]
    # fp32 rounding moves a few values by one of 255, and the encoder may then choose otherwise.
    pair = [read_video(files(where, ".mp4")[0]).astype(float) for where in (folder, alone)]
    assert abs(pair[0] - pair[1]).mean() < 0.5


def test_two_processes_write_the_video_of_one(together: tuple[Path, Any], alone: Path) -> None:
    folder, done = together
    assert done.returncode == 0, done.stderr
    assert_alike(folder, alone)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def test_torchrun_starts_them_as_well_and_a_ring_makes_the_same(
    tmp_path: Path, alone: Path
) -> None:
    (tmp_path / "p.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    command = [*TORCHRUN, *words(tmp_path, "--ring", "2")[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("0001-") == 1
    assert_alike(tmp_path, alone)
    record = json.loads(files(tmp_path, ".json")[0].read_text(encoding="utf-8"))
    assert (record["processes"], record["ring"]) == (2, 2)
    assert "apart" not in record


def test_what_cannot_be_done_is_said_once_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    command = [*TORCHRUN, *words(tmp_path, "--tile", "nonsense")[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert len([line for line in done.stderr.splitlines() if line.startswith("Error:")]) == 1


def test_processes_import_what_the_first_one_did_whatever_the_working_folder_holds(
    together: tuple[Path, Any],
) -> None:
    folder, done = together
    assert (folder / "started" / "vidsparse" / "__init__.py").is_file()
    assert done.returncode == 0, done.stderr
    assert len(files(folder, ".mp4")) == 1


def test_one_process_prints_and_writes(together: tuple[Path, Any]) -> None:
    folder, done = together
    assert done.stdout.count("0001-") == 1
    assert done.stderr.count("Loading shapes") == 1
    assert len(files(folder, ".mp4")) == len(files(folder, ".json")) == 1


def test_the_record_says_how_many_processes_there_were(together: tuple[Path, Any]) -> None:
    record = json.loads(files(together[0], ".json")[0].read_text(encoding="utf-8"))
    assert record["processes"] == 2
    # Wan's two branches, each by one of them, unless the command says otherwise.
    assert record["apart"]


def test_a_finished_video_is_kept(together: tuple[Path, Any]) -> None:
    before = files(together[0], ".mp4")[0].stat().st_mtime_ns
    done = run(together[0], "--gpus", "2")
    assert done.returncode == 0
    assert "there already" in done.stderr
    assert files(together[0], ".mp4")[0].stat().st_mtime_ns == before


def rank_of(pid: int) -> str | None:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [line[5:].decode() for line in environment if line.startswith(b"RANK=")]
    return found[0] if found else None


def ended(tmp_path: Path, end: Callable[[int, dict[str | None, int]], None]) -> tuple[int, str]:
    """The exit code and the one line of a long run that ``end`` stops, given pids of the ranks."""
    (tmp_path / "p.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    started = subprocess.Popen(
        words(tmp_path, "--gpus", "2", "--steps", "400"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    try:
        # both take part once the first holds the folder's lock and loads the model.
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list(tmp_path.rglob(".vidsparse.lock")):
            time.sleep(0.2)
        time.sleep(3)
        ranks = {rank_of(int(pid)): int(pid) for pid in children.read_text().split()}
        end(started.pid, ranks)
        out, err = started.communicate(timeout=60)
    finally:
        started.kill()
        started.wait()
    assert out == ""
    complaints = [line for line in err.splitlines() if line and not line.startswith("Loading")]
    assert len(complaints) == 1, err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    assert not files(tmp_path, ".json")
    assert not [path for path in (tmp_path / "out").rglob("*") if "mp4" in path.name]
    return started.returncode, complaints[0]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_dies_ends_the_run_with_one_line(tmp_path: Path, rank: str) -> None:
    code, said = ended(tmp_path, lambda _, ranks: os.kill(ranks[rank], signal.SIGKILL))
    assert code == 1
    assert f"process {int(rank) + 1} of 2 died" in said


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize(
    ("end", "code"),
    [
        # Ctrl-C reaches every process of a terminal.
        (lambda pid, _: os.killpg(pid, signal.SIGINT), 130),
        (lambda pid, _: os.kill(pid, signal.SIGTERM), 143),
    ],
    ids=["ctrl-c", "sigterm"],
)
def test_an_interrupted_run_leaves_nothing_half_written_and_says_one_line(
    tmp_path: Path, end: Callable[[int, dict[str | None, int]], None], code: int
) -> None:
    assert ended(tmp_path, end) == (code, "Interrupted; finished videos are kept.")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--tile", "nonsense"], "nonsense"),
        (["--ring", "3"], "--ring 3 does not divide the number of GPUs for each video, 2"),
    ],
)
def test_what_cannot_be_done_is_said_once_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], says: str
) -> None:
    (tmp_path / "p.txt").write_text(f"{PROMPT}\n", encoding="utf-8")
    # in this process, from which others would be started.
    monkeypatch.setattr(
        "vidsparse.apps.commands.generate.launch", lambda *_: pytest.fail("started")
    )
    done = CliRunner().invoke(main, words(tmp_path, "--gpus", "2", *more)[3:])
    assert done.exit_code == 2, done.stderr
    assert done.stderr.count("Error:") == 1
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


def test_torch_that_cannot_be_told_how_long_to_wait_starts_them_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass
    class Older:
        min_nodes: int
        max_nodes: int
        nproc_per_node: int
        run_id: str
        rdzv_backend: str
        rdzv_endpoint: str
        max_restarts: int

    started: list[Older] = []
    monkeypatch.setattr(api, "LaunchConfig", Older)
    monkeypatch.setattr(api, "elastic_launch", lambda config, _: lambda *_: started.append(config))
    terminal = Terminal(quiet=True)
    assert launch(terminal, 3, KEPT_VIDEOS) == 0
    assert [one.nproc_per_node for one in started] == [3]


@pytest.mark.parametrize("command", ["generate", "compare"])
@pytest.mark.parametrize("given", ["-", "pipe"])
def test_what_can_be_read_once_only_is_refused(command: str, given: str, tmp_path: Path) -> None:
    file, name = ("-", "standard input") if given == "-" else (str(tmp_path / "pipe"),) * 2
    if given == "pipe":
        os.mkfifo(file)
    # in this process, from which others would be started.
    done = CliRunner().invoke(main, [command, file, "--gpus", "2", *SETTINGS], input=PROMPT)
    assert done.exit_code == 2, done.output
    assert f"{name} cannot be read by several processes. Hint: write the" in done.stderr
