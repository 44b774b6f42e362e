"""Tasks spread over workers: who does which, and what becomes of one whose worker dies.

A task is a prompt or a batch of them (``crew_tasks``). A worker is a process that holds the model;
several that make each video together are a group. An engine starts workers: on this machine
(``local_workers``) or on a cluster (``ray_workers``). The process that runs the command alone reads
and writes the run's files and shows progress: a worker sends its video as it was encoded, with its
record, so that no disk needs to be shared.
"""

from __future__ import annotations

import gc
import queue
import socket
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from vidsparse.errors import VidsparseError

if TYPE_CHECKING:
    from vidsparse.apps.runs.maker import Maker
    from vidsparse.pipelines.request import GenerateRequest

TRIES: Final = 3
"""How often a task is begun, or a worker started, where workers die."""


class WorkerDied(Exception):
    """A worker's process is gone, and what it was doing with it."""


@dataclass(frozen=True, slots=True)
class Made:
    """A video as it was encoded, and its record."""

    video: bytes
    record: dict[str, Any]


class Task(Protocol):
    """What a group does at a time; it is sent to the workers' processes."""

    @property
    def request(self) -> GenerateRequest:
        """Names the model, and the settings that it is loaded with."""

    def run(self, maker: Maker, *, first: bool, fresh: bool) -> list[Made]:
        """Do it by ``maker``, in every process of a group alike.

        Args:
            maker: has loaded the model.
            first: this process of the group sends what is made; from the others nothing is taken.
            fresh: it is the first task that the process does.
        """


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one task: what it made, or why nothing; ``deaths`` of workers on it."""

    number: int
    made: list[Made] | None
    error: Exception | None
    deaths: int


class Handle(Protocol):
    """A worker, seen from the process that runs the command."""

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        """Have ``Worker.name`` called; the result raises ``WorkerDied`` where it is gone."""

    def kill(self) -> None:
        """End the process, whatever it does."""


class Engine(Protocol):
    """Starts workers."""

    def start(self, place: int) -> Handle:
        """Start the worker that has this place among all, from 0."""

    def meeting_host(self) -> str | None:
        """The host on which the workers of a group meet; None is the first one's own."""


class Worker:
    """What runs in a worker's process; one call at a time."""

    def __init__(self) -> None:
        # as in the command's own process: importing the libraries makes nothing but what stays.
        gc.set_threshold(10_000, *gc.get_threshold()[1:])
        self._maker: Maker | None = None
        self._first = self._fresh = True
        self._store: Any = None

    def meeting_point(self, host: str | None) -> str:
        """An address on which the workers of a group meet here; nobody else gets it from now on."""
        host = host or socket.gethostbyname(socket.gethostname())
        self._store = _shared_store(host, 0, first=True)
        return f"{host}:{self._store.port}"

    def load(
        self,
        request: GenerateRequest,
        rank: int,
        count: int,
        meeting: str | None,
        ring: int | None = None,
    ) -> None:
        """Load the model of ``request``, after meeting the others of a group of ``count``."""
        with _in_words():
            self._load(request, rank, count, meeting, ring)

    def make(self, task: Task) -> list[Made]:
        """Do ``task``; nothing is sent where another of the group sends it."""
        assert self._maker is not None
        fresh, self._fresh = self._fresh, False
        with _in_words():
            return task.run(self._maker, first=self._first, fresh=fresh)

    def _load(
        self, request: GenerateRequest, rank: int, count: int, meeting: str | None, ring: int | None
    ) -> None:
        from vidsparse.apps.runs.maker import Maker
        from vidsparse.apps.runs.prepared import PreparedPrompt, PreparedPrompts
        from vidsparse.apps.runs.prompts import Prompt
        from vidsparse.apps.terminal.console import Terminal
        from vidsparse.pipelines.models import resolve_model

        self._first = rank == 0
        if count > 1:
            import torch.distributed as dist

            assert meeting is not None
            host, _, port = meeting.rpartition(":")
            store = self._store or _shared_store(host, int(port), first=False)
            backend = "nccl" if (request.device or "").startswith("cuda") else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=count)
        one = PreparedPrompt(prompt=Prompt(number=1, text=request.prompt, line=1), request=request)
        prompts = PreparedPrompts(model=resolve_model(request.model), prompts=(one,))
        self._maker = Maker(Terminal(quiet=True), prompts, ring)


def _shared_store(host: str, port: int, *, first: bool) -> Any:
    """What the workers of a group tell each other by; the first one has it, on any port for 0."""
    # documented, and not marked as what the package exports.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, is_master=first, wait_for_workers=False)


@contextmanager
def _in_words() -> Iterator[None]:
    """Raise errors of other packages as words: not all of them can be sent to another process."""
    try:
        yield
    except VidsparseError:
        raise
    except Exception as error:
        raise VidsparseError(f"{type(error).__name__}: {' '.join(str(error).split())}") from None


class _Group:
    """Workers that make each video together; started when first needed, and again after a death."""

    def __init__(self, engine: Engine, first: int, count: int, ring: int | None) -> None:
        self._engine, self._first, self._count, self._ring = engine, first, count, ring
        self._handles: list[Handle] = []

    def make(self, task: Task) -> list[Made]:
        """Do ``task``.

        Raises:
            WorkerDied: one of the workers is gone; none is left then.
            _StartError: a worker lives and cannot load the model.
        """
        try:
            if not self._handles:
                self._start(task.request)
            made = self._all([handle.call("make", task) for handle in self._handles])[0]
        except WorkerDied:
            self.kill()
            raise
        except Exception:
            # those of a group that go on would wait for the one that failed, for ever.
            if self._count > 1:
                self.kill()
            raise
        assert isinstance(made, list)
        return made

    def _start(self, request: GenerateRequest) -> None:
        places = range(self._first, self._first + self._count)
        self._handles = [self._engine.start(place) for place in places]
        meeting = None
        if self._count > 1:
            meeting = self._handles[0].call("meeting_point", self._engine.meeting_host()).result()
        loading = [
            handle.call("load", request, rank, self._count, meeting, self._ring)
            for rank, handle in enumerate(self._handles)
        ]
        try:
            self._all(loading)
        except WorkerDied:
            raise
        except Exception as error:
            raise _StartError(error) from error

    @staticmethod
    def _all(calls: Sequence[Future[Any]]) -> list[Any]:
        done, _ = wait(calls, return_when=FIRST_EXCEPTION)
        for call in done:
            call.result()
        return [call.result() for call in calls]

    def kill(self) -> None:
        """End all workers."""
        for handle in self._handles:
            handle.kill()
        self._handles = []


class _StartError(Exception):
    """A worker cannot load the model, and no other could."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def spread_tasks(
    engine: Engine,
    tasks: Sequence[tuple[int, Task]],
    *,
    groups: int,
    size: int,
    ring: int | None = None,
) -> Generator[Outcome, None, None]:
    """Do numbered tasks, all with one model, on ``groups`` groups of ``size`` workers.

    In groups keys and values travel round ``ring`` workers, or as many as the model's heads ask.

    They come as they are finished. A task whose worker dies is done again by another, at most
    ``TRIES`` times in all. However the loop over them ends, no worker is left.

    Raises:
        VidsparseError: no worker can load the model.
        WorkerDied: workers die while they load it.
    """
    waiting: queue.SimpleQueue[tuple[int, Task]] = queue.SimpleQueue()
    for item in tasks:
        waiting.put(item)
    outcomes: queue.SimpleQueue[Outcome | _StartError] = queue.SimpleQueue()
    ending = threading.Event()
    crew = [_Group(engine, place * size, size, ring) for place in range(min(groups, len(tasks)))]

    def work(group: _Group) -> None:
        while not ending.is_set():
            try:
                number, task = waiting.get_nowait()
            except queue.Empty:
                return
            outcomes.put(_attempts(group, number, task, ending))

    threads = [threading.Thread(target=work, args=(group,), daemon=True) for group in crew]
    for thread in threads:
        thread.start()
    try:
        for _ in tasks:
            outcome = outcomes.get()
            if isinstance(outcome, _StartError):
                raise outcome.reason
            yield outcome
    finally:
        ending.set()
        for group in crew:
            with suppress(Exception):
                group.kill()


def _attempts(
    group: _Group, number: int, task: Task, ending: threading.Event
) -> Outcome | _StartError:
    """Begin a task until it is done, fails, or too many workers have died of it."""
    for deaths in range(TRIES):
        try:
            return Outcome(number, group.make(task), None, deaths)
        except WorkerDied as error:
            last = error
            if ending.is_set():
                break
        except _StartError as error:
            return error
        except Exception as error:
            return Outcome(number, None, error, deaths)
    return Outcome(number, None, last, TRIES)
