"""What the suite of faults shares: its two forms, and commands in processes that can be killed.

``pytest -m faults`` runs the short form, which continuous integration runs too. The long form,
whose figures are in docs/reliability.md, is ``VIDSPARSE_FAULTS=long pytest -m faults``.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

IS_LONG = os.environ.get("VIDSPARSE_FAULTS") == "long"
SEED = int(os.environ.get("VIDSPARSE_FAULTS_SEED", "0"))

# what the commands on a tiny Wan pipeline import, and the page's, so that each process need not.
_IMPORTED = [
    "vidsparse.apps.cli", "vidsparse.apps.commands.generate", "vidsparse.apps.commands.compare",
    "vidsparse.apps.commands.calibrate", "vidsparse.pipelines.wan", "vidsparse.pipelines.generate",
    "vidsparse.pipelines.calibrate", "vidsparse.pipelines.video", "vidsparse.kernels",
    "diffusers.pipelines.wan.pipeline_wan", "transformers.models.t5.tokenization_t5",
    "transformers.models.umt5.modeling_umt5", "imageio_ffmpeg", "filelock",
    "vidsparse.apps.commands.ui", "vidsparse.apps.page.build",
]  # fmt: skip

# seconds that no command here takes, even on a busy machine.
PATIENCE = 120.0


def form(*, short: int, long: int) -> int:
    """How often a test repeats its fault, in the form that was asked for."""
    return long if IS_LONG else short


def chance(name: str) -> random.Random:
    """Random numbers that are the same in every run of a test; another seed gives others."""
    return random.Random(f"{name} {SEED}")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Args:
        status: its exit code; minus the signal where one ended it.
        said: what it printed on standard error.
        printed: what it printed on standard output.
        seconds: how long it ran.
        hit: whether it was killed by the one who started it.
    """

    status: int
    said: str
    printed: str
    seconds: float
    hit: bool


class Commands:
    """Starts ``vidsparse`` in processes of their own, which share one start of Python.

    A process is forked from one that has imported the libraries, so that what a test waits for is
    the command's own work.

    Args:
        folder: where the commands run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED)

    def start(
        self,
        arguments: Sequence[str],
        printed: Path,
        said: Path,
        setup: Callable[[], object] | None = None,
    ) -> BaseProcess:
        """Start a command whose standard output and standard error go to two files.

        The files are there once this returns, and the command begins.
        """
        files = str(printed), str(said)
        process = self._context.Process(
            target=_command, args=(list(arguments), str(self.folder), *files, setup)
        )
        process.start()
        began = time.monotonic()
        while not said.exists():
            assert process.is_alive(), "the process ended before it began its command"
            assert time.monotonic() - began < PATIENCE, "the process does not start"
            time.sleep(0.002)
        return process

    def serve(
        self,
        arguments: Sequence[str],
        printed: Path,
        said: Path,
        setup: Callable[[], object] | None = None,
    ) -> tuple[BaseProcess, str]:
        """Start ``vidsparse ui``; its process, and the page's address once it is there."""
        process = self.start(arguments, printed, said, setup)
        began = time.monotonic()
        while "\n" not in (told := printed.read_text(encoding="utf-8")):
            if not process.is_alive() or time.monotonic() - began > PATIENCE:
                process.kill()
                raise AssertionError(f"no page opens: {said.read_text(encoding='utf-8')}")
            time.sleep(0.01)
        return process, told.split()[1]

    def run(
        self,
        arguments: Sequence[str],
        *,
        when: Callable[[float], bool] | None = None,
        how: int = signal.SIGKILL,
        setup: Callable[[], object] | None = None,
    ) -> Ended:
        """Run a command to its end.

        Args:
            arguments: of ``vidsparse``.
            when: told how many seconds it has run; the command gets the signal ``how`` once this is
                true.
            how: the signal.
            setup: called in the process before the command.
        """
        self._number += 1
        out, err = (self.folder / f"{name}-{self._number}.txt" for name in ("out", "err"))
        process = self.start(arguments, out, err, setup)
        began, hit = time.monotonic(), False
        while process.is_alive():
            spent = time.monotonic() - began
            if not hit and when is not None and when(spent):
                assert process.pid is not None
                os.kill(process.pid, how)
                hit = True
            if spent > PATIENCE:
                assert process.pid is not None
                # writes where every thread stands.
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)
                process.kill()
                said = err.read_text(encoding="utf-8")
                raise AssertionError(f"{arguments} hangs, {hit and how} sent: {said}")
            process.join(0.002)
        assert process.exitcode is not None
        assert process.pid is not None
        if hit:
            until_left_alone(process.pid)
        printed, said = (file.read_text(encoding="utf-8") for file in (out, err))
        return Ended(process.exitcode, said, printed, time.monotonic() - began, hit)


def _command(
    arguments: list[str], folder: str, out: str, err: str, setup: Callable[[], object] | None
) -> None:
    """The body of a process: one command, its output in two files."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    for number, path in ((1, out), (2, err)):
        there = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(there, number)
        os.close(there)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)
    )
    faulthandler.register(signal.SIGUSR1, file=2)
    # what was imported stays: no collection looks through it, nor copies its pages.
    gc.freeze()
    import torch

    from vidsparse.apps.cli import main

    torch.set_num_threads(1)
    if setup is not None:
        setup()
    try:
        main(arguments, prog_name="vidsparse")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


# What is set up in a command's process is defined here and not beside its test: the process reads
# it by the name of its module, and the tests' folders are no packages that it could import.


class Limit:
    """Lets the process have so many megabytes more than it has."""

    def __init__(self, megabytes: int) -> None:
        self._megabytes = megabytes

    def __call__(self) -> None:
        # not on Windows, where these tests are skipped.
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            has = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = has + self._megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


class Encoder:
    """Puts something else in ffmpeg's place, in the process where it is called."""

    def __init__(self, what: str, path: str) -> None:
        self._what = what
        self._path = path

    def __call__(self) -> None:
        bodies = {
            "no program": "this is no program",
            "killed": f"#!/bin/sh\nhead -c 1000 > /dev/null\nkill -{signal.SIGKILL} $$\n",
            # says that all is well, and writes nothing.
            "silent": "#!/bin/sh\ncat > /dev/null\n",
        }
        if self._what in bodies:
            Path(self._path).write_text(bodies[self._what], encoding="utf-8")
            Path(self._path).chmod(0o755)
        os.environ["IMAGEIO_FFMPEG_EXE"] = self._path


def digests(folder: Path, pattern: str) -> dict[str, str]:
    """SHA-256 of the files of a folder, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob(pattern))
    }


def hidden(folder: Path) -> list[str]:
    """Names of hidden files below a folder: what was left half written.

    Locks are nothing of that kind, nor the empty files by which pages take a visitor's numbers.
    """
    found = (path for path in folder.rglob(".*") if not path.name.endswith(".lock"))
    return sorted(path.name for path in found if not path.name[1:].isdigit() or path.stat().st_size)


def until_left_alone(session: int) -> None:
    """Wait for the encoders of a process that was killed: they end by themselves, a moment later.

    Until then they may still begin a file, or write to one. They are told by the session that the
    process began, which was its leader: a process that is just becoming another program has no
    words on its command line.
    """
    last = time.monotonic() + PATIENCE
    while any(of == session for of in _sessions()):
        assert time.monotonic() < last, f"a process of session {session} still runs"
        time.sleep(0.02)


def _sessions() -> Iterator[int]:
    """The sessions of all processes that have not ended."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            # it may have ended since.
            with suppress(OSError):
                # its name comes first, in brackets, and may hold anything.
                stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
                state, _, _, session = stat.rpartition(")")[2].split()[:4]
                if state not in "ZX":
                    yield int(session)
