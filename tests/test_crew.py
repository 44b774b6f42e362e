"""Prompts spread over workers: each is made once, by either engine, and a death costs nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from vidsparse.apps.cli import main
from vidsparse.apps.runs.crew import TRIES, Made, Outcome, Worker, WorkerDied, spread_tasks
from vidsparse.apps.runs.crew_options import CrewOptions, crew_options
from vidsparse.apps.runs.crew_tasks import Generation
from vidsparse.apps.runs.local_workers import LocalWorkers
from vidsparse.errors import OptionError, OutputError, VidsparseError
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.pipelines.video import read_video

# small enough to be made in a second, and large enough that sparse calls leave out a third.
SETTINGS = ["--steps", "4", "--frames", "9", "--size", "96x96", "--device", "cpu", "--top-p", "0.5"]


class MadeUpWorker:
    """A worker whose calls are a function of what is asked."""

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        self._answer, self.killed = answer, False

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            assert not self.killed
            future.set_result(self._answer(name, arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def kill(self) -> None:
        self.killed = True


class MadeUpWorkers:
    """An engine of made-up workers, which counts those it started."""

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        self._answer = answer
        self.started: list[tuple[int, MadeUpWorker]] = []
        self._lock = threading.Lock()

    def start(self, place: int) -> MadeUpWorker:
        with self._lock:
            self.started.append((place, MadeUpWorker(self._answer)))
            return self.started[-1][1]

    def meeting_host(self) -> str | None:
        return None


def tasks(count: int) -> list[tuple[int, Generation]]:
    prompts = [(number, GenerateRequest(prompt=f"p{number}")) for number in range(1, count + 1)]
    return [(number, Generation(request)) for number, request in prompts]


def made_of(prompt: str) -> list[Made]:
    return [Made(prompt.encode(), {"prompt": prompt})]


def plain(name: str, arguments: Any) -> Any:
    return made_of(arguments[0].request.prompt) if name == "make" else "tcp://x:1"


def finished(engine: Any, count: int, **sizes: int) -> dict[int, Outcome]:
    outcomes = list(spread_tasks(engine, tasks(count), **sizes))
    assert len(outcomes) == count
    return {one.number: one for one in outcomes}


def test_every_prompt_is_made_once_and_no_worker_is_left() -> None:
    engine = MadeUpWorkers(plain)
    outcomes = finished(engine, 24, groups=3, size=1)
    assert sorted(outcomes) == list(range(1, 25))
    for number, one in outcomes.items():
        assert one == Outcome(number, made_of(f"p{number}"), None, 0)
    assert len({place for place, _ in engine.started}) == len(engine.started) <= 3
    assert all(worker.killed for _, worker in engine.started)


def test_no_more_groups_are_started_than_there_are_prompts() -> None:
    engine = MadeUpWorkers(plain)
    finished(engine, 2, groups=8, size=2)
    assert len(engine.started) <= 4


def test_a_prompt_whose_worker_died_is_made_again_by_a_new_one() -> None:
    dead: list[str] = []

    def answer(name: str, arguments: Any) -> Any:
        if name == "make" and arguments[0].request.prompt == "p2" and not dead:
            dead.append("p2")
            raise WorkerDied("gone")
        return plain(name, arguments)

    engine = MadeUpWorkers(answer)
    outcomes = finished(engine, 3, groups=1, size=1)
    assert [outcomes[n].deaths for n in (1, 2, 3)] == [0, 1, 0]
    assert all(one.made is not None for one in outcomes.values())
    assert len(engine.started) == 2


def test_a_prompt_that_kills_every_worker_fails_and_the_next_is_made() -> None:
    def answer(name: str, arguments: Any) -> Any:
        if name == "make" and arguments[0].request.prompt == "p1":
            raise WorkerDied("gone")
        return plain(name, arguments)

    outcomes = finished(MadeUpWorkers(answer), 2, groups=1, size=1)
    assert outcomes[1].made is None
    assert isinstance(outcomes[1].error, WorkerDied)
    assert outcomes[1].deaths == TRIES
    assert outcomes[2].made == made_of("p2")


def test_an_error_of_one_prompt_is_its_own_and_the_worker_goes_on() -> None:
    def answer(name: str, arguments: Any) -> Any:
        if name == "make" and arguments[0].request.prompt == "p1":
            raise VidsparseError("too long")
        return plain(name, arguments)

    engine = MadeUpWorkers(answer)
    outcomes = finished(engine, 2, groups=1, size=1)
    assert str(outcomes[1].error) == "too long"
    assert outcomes[2].made == made_of("p2")
    assert len(engine.started) == 1


def test_a_group_in_which_one_fails_is_started_anew() -> None:
    ranks: list[int] = []

    def answer(name: str, arguments: Any) -> Any:
        if name == "load":
            ranks.append(arguments[1])
            assert arguments[2:] == (2, "tcp://x:1", None)
        if name == "make" and arguments[0].request.prompt == "p1":
            raise VidsparseError("one of two")
        return plain(name, arguments)

    engine = MadeUpWorkers(answer)
    outcomes = finished(engine, 2, groups=1, size=2)
    assert (outcomes[1].made, outcomes[2].made) == (None, made_of("p2"))
    assert ranks == [0, 1, 0, 1]


def test_a_model_that_cannot_be_loaded_ends_all_at_once() -> None:
    def answer(name: str, arguments: Any) -> Any:
        if name == "load":
            raise OutputError("no such weights")
        return plain(name, arguments)

    engine = MadeUpWorkers(answer)
    with pytest.raises(OutputError, match="no such weights"):
        finished(engine, 50, groups=2, size=1)
    assert len(engine.started) <= 4
    assert all(worker.killed for _, worker in engine.started)


def test_a_loop_that_is_left_early_leaves_no_worker() -> None:
    engine = MadeUpWorkers(plain)
    outcomes = spread_tasks(engine, tasks(9), groups=2, size=1)
    next(outcomes)
    outcomes.close()
    assert all(worker.killed for _, worker in engine.started)


def test_a_child_that_is_killed_is_told_from_one_that_fails() -> None:
    worker = LocalWorkers(1, "cpu").start(0)
    try:
        assert worker.call("meeting_point", "127.0.0.1").result(60).startswith("127.0.0.1:")
        with pytest.raises(AttributeError):
            worker.call("nothing").result(60)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="signal 9"):
            worker.call("meeting_point", "127.0.0.1").result(60)
    finally:
        worker.kill()


def test_where_a_group_meets_is_taken_from_when_it_is_told() -> None:
    worker = Worker()
    port = int(worker.meeting_point("127.0.0.1").rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("options", "means"),
    [
        ((None, None, None, None), None),
        ((4, None, None, None), None),
        ((4, 4, None, None), None),
        ((1, 1, "local", None), None),
        ((4, 2, None, None), ("local", 4, 2)),
        ((4, None, "local", None), ("local", 4, 1)),
        ((None, None, "ray", None), ("ray", None, 1)),
        ((8, 2, "ray", "auto"), ("ray", 8, 2)),
    ],
)
def test_options_say_how_prompts_are_spread(options: Any, means: Any) -> None:
    found = crew_options(*options)
    assert (found and (found.engine, found.count, found.size)) == means


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((None, 2, None, None), "--gpus-per-video and --engine local need --gpus"),
        ((None, None, "local", None), "--engine local need --gpus, the number of all GPUs"),
        ((5, 2, None, None), "a multiple of --gpus-per-video 2, got 5"),
        ((4, None, None, "auto"), "--engine ray"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        crew_options(*options)


def test_a_cluster_on_cpus_needs_a_number() -> None:
    crew = CrewOptions(engine="ray", address=None, count=None, size=1)
    with (
        pytest.raises(OptionError, match="number of workers"),
        crew.workers(GenerateRequest(prompt="x", device="cpu")),
    ):
        pass


def test_torchrun_and_workers_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="torchrun has started"):
        crew_options(4, 2, None, None)


def test_a_missing_ray_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "p.txt").write_text("a red circle\n", encoding="utf-8")
    words = [str(tmp_path / "p.txt"), *SETTINGS, "--out", str(tmp_path / "out"), "--gpus", "2"]
    done = CliRunner().invoke(main, ["generate", *words, "--engine", "ray"])
    assert done.exit_code == 2
    assert "pip install 'vidsparse[ray]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("*.mp4"))


@pytest.mark.parametrize(
    ("words", "error", "code", "said"),
    [
        (
            "generate",
            WorkerDied("ended by signal 9"),
            1,
            "prompt 0001 failed: 3 workers died on it",
        ),
        (
            "compare",
            WorkerDied("ended by signal 9"),
            1,
            "prompt 0001 cannot be measured: 3 workers",
        ),
        ("generate", OptionError("too wide"), 1, "prompt 0001 failed: too wide"),
        ("compare", OptionError("too wide"), 2, "too wide"),
    ],
)
def test_what_no_worker_can_do_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    error: Exception,
    code: int,
    said: str,
) -> None:
    def answer(name: str, arguments: Any) -> Any:
        if name == "make":
            raise error

    monkeypatch.setattr(
        "vidsparse.apps.runs.local_workers.LocalWorkers", lambda *_: MadeUpWorkers(answer)
    )
    (tmp_path / "p.txt").write_text("a red circle\n", encoding="utf-8")
    asked = [words, str(tmp_path / "p.txt"), *SETTINGS, "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, [*asked, "--gpus", "2", "--engine", "local"])
    assert done.exit_code == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.mp4"))


# --- the real thing ---


# threads share sums in another order, which frames would show.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
PROMPTS = [
    "a large red circle that moves right on a plain black background",
    "a small blue ring that orbits",
    "a green square that moves left",
    "a large yellow star that moves up",
    "a small red ring that moves down",
]


def command(
    folder: Path, *more: str, prompts: int = len(PROMPTS), do: str = "generate"
) -> list[str]:
    (folder / "p.txt").write_text("\n".join(PROMPTS[:prompts]), encoding="utf-8")
    words = [sys.executable, "-m", "vidsparse", do, str(folder / "p.txt"), *SETTINGS]
    return [*words, "--out", str(folder / "out"), *more]


def videos(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in (folder / "out").rglob("*.mp4")}


def invoked(folder: Path, **what: Any) -> Result:
    """``command`` in this process, on one thread: threads share sums in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        done = CliRunner().invoke(main, command(folder, **what)[3:])
    finally:
        torch.set_num_threads(before)
    assert done.exit_code == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    invoked(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_worker_killed_midway_costs_no_video_and_no_frame(
    by_one_process: Path, tmp_path: Path, engine: str
) -> None:
    run = subprocess.Popen(
        command(tmp_path, "--gpus", "2", "--engine", engine),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ONE_THREAD,
    )
    try:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and not videos(tmp_path):
            time.sleep(0.05)
        worker = worker_of(run.pid, engine)
        own = os.getpriority(os.PRIO_PROCESS, run.pid)
        assert os.getpriority(os.PRIO_PROCESS, worker) == own, "others would go before its workers"
        os.kill(worker, signal.SIGKILL)
        out, err = run.communicate(timeout=400)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, err
    assert "was made again: a worker died on it" in err
    assert out.count(".mp4") == len(out.splitlines()) == len(PROMPTS)
    alone = videos(by_one_process)
    assert sorted(videos(tmp_path)) == sorted(alone)
    for name, path in videos(tmp_path).items():
        assert (read_video(path) == read_video(alone[name])).all()
    records = [json.loads(path.with_suffix(".json").read_text()) for path in alone.values()]
    here = [json.loads(p.with_suffix(".json").read_text()) for p in videos(tmp_path).values()]
    keys = ("prompt", "total", "options")
    assert sorted(str([r[k] for k in keys]) for r in records) == sorted(
        str([r[k] for k in keys]) for r in here
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_workers_do_not_import_what_lies_in_the_working_folder(tmp_path: Path, engine: str) -> None:
    # a folder of outputs, say, that has the package's name.
    other = tmp_path / "vidsparse"
    other.mkdir()
    (other / "__init__.py").write_text("raise ImportError('not the package')\n", encoding="utf-8")
    words = command(tmp_path, "--gpus", "2", "--engine", engine, prompts=1)
    done = subprocess.run(
        [words[0], "-P", *words[1:]],
        cwd=tmp_path, env=ONE_THREAD, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(videos(tmp_path)) == 1


def worker_of(pid: int, engine: str) -> int:
    """A worker that has the model: the process of the run with most memory but itself."""
    name = b"multiprocessing.spawn" if engine == "local" else b"ray::Worker"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if name in (folder / "cmdline").read_bytes() and pid in _ancestors(int(folder.name)):
                pages = int((folder / "statm").read_text().split()[1])
                found.append((pages, int(folder.name)))
        except (OSError, IndexError):
            continue
    return max(found)[1]


def _ancestors(pid: int) -> list[int]:
    line: list[int] = []
    while pid > 1:
        line.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return line


def report_of(folder: Path, shown: str) -> dict[str, Any]:
    """The report of prompts that ``compare`` measured there; ``shown`` is what it printed."""
    (path,) = (folder / "out").rglob("report.json")
    assert len(list(path.parent.glob("*.mp4"))) == 2
    assert not list(path.parent.glob("0*.json")), "records that the report holds are removed"
    assert sorted(line[:4] for line in shown.splitlines() if line[:1] == "0") == ["0001", "0002"]
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.slow
def test_workers_measure_what_one_process_measures(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    here, there = (tmp_path_factory.mktemp(name) for name in ("here", "there"))
    alone = report_of(here, invoked(here, prompts=2, do="compare").stdout)
    words = command(there, "--gpus", "2", "--engine", "local", prompts=2, do="compare")
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    spread_out = report_of(there, done.stdout)
    keys = ("number", "prompt", "seed", "psnr", "ssim", "flicker")
    assert [[each[key] for key in keys] for each in alone["prompts"]] == [
        [each[key] for key in keys] for each in spread_out["prompts"]
    ]
    assert all(each["seconds"]["dense"]["denoise"] > 0 for each in spread_out["prompts"])
    assert "side by side by 2 workers" in " ".join(spread_out["notes"])
    assert "stopped" not in " ".join(spread_out["notes"])


@pytest.mark.slow
def test_groups_of_two_make_each_video_together(by_one_process: Path, tmp_path: Path) -> None:
    asked = ("--gpus", "2", "--gpus-per-video", "2", "--engine", "ray")
    words = command(tmp_path, *asked, prompts=2)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "on 2 workers, 2 to a video" in done.stderr
    alone = videos(by_one_process)
    assert sorted(videos(tmp_path)) == sorted(alone)[:2]
    for name, path in videos(tmp_path).items():
        assert json.loads(path.with_suffix(".json").read_text())["processes"] == 2
        pair = [read_video(each).astype(float) for each in (path, alone[name])]
        assert abs(pair[0] - pair[1]).mean() < 0.5
