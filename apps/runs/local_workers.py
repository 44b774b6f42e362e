"""Workers on this machine, one for each GPU, or as many as asked for on a CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

from vidsparse.apps.runs.crew import Worker, WorkerDied

_PATIENCE: Final = 5.0


class LocalWorkers:
    """An engine whose workers are children of this process.

    Args:
        count: how many there will be.
        device: what they compute on.
    """

    def __init__(self, count: int, device: str) -> None:
        self._count = count
        self._cuda = device.startswith("cuda")

    def start(self, place: int) -> LocalWorker:
        """Start one that sees the GPU of its place alone, or takes its share of the processors."""
        if self._cuda:
            given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            own = given[place] if place < len(given) and given[0] else str(place)
            return LocalWorker({"CUDA_VISIBLE_DEVICES": own})
        threads = str(max(1, (os.cpu_count() or 1) // self._count))
        return LocalWorker({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)})

    def meeting_host(self) -> str | None:
        """Workers of a group meet on this machine."""
        return "127.0.0.1"


class LocalWorker:
    """One child process and the pipe to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # a copy of this process would share its threads and its GPU.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(environment)))
        self._process.daemon = True
        self._process.start()
        theirs.close()
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[Any] | None = None

    @property
    def pid(self) -> int | None:
        """Number of the process."""
        return self._process.pid

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        """Have ``Worker.name`` called."""
        self._last = self._thread.submit(self._exchange, name, arguments)
        return self._last

    def _exchange(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            self._pipe.send((name, arguments))
            failed, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            raise WorkerDied(how) from None
        if failed:
            raise value
        return value

    def kill(self) -> None:
        """End the process; calls that wait for it raise ``WorkerDied``."""
        if self._last is None or self._last.done():
            # idle, so that it can leave by itself and clear up behind itself.
            with suppress(OSError):
                self._pipe.send(None)
                self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()
        self._thread.shutdown(wait=True)
        self._pipe.close()


def _serve(pipe: Connection, environment: Mapping[str, str]) -> None:
    """The child's whole life: calls from the pipe until it closes."""
    # before torch is loaded, which reads them.
    os.environ.update(environment)
    # Ctrl-C reaches every process of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker()
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            call = None
        if call is None:
            return
        name, arguments = call
        try:
            answer = (False, getattr(worker, name)(*arguments))
        except Exception as error:
            answer = (True, error)
        pipe.send(answer)
