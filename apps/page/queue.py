"""The queue of the page: every device works on one job at a time, the others wait their turn.

A job is done by exactly one device and ends in exactly one of three states: done, cancelled or
failed. Whoever follows it is woken by its changes.

Gradio's own queue (6.31) is not enough here. Its ``concurrency_id`` gives several events one line
and one limit, first come first served, and it drops the waiting events of a page that was closed.
What a device needs beside that:

- *A place, not a count.* The limit says how many events run at once. Nothing says on which device,
  and each step of an event runs in whatever thread of a pool is free; a loaded model and the room
  that its kernels reuse stay with one thread here.
- *Held until it is free.* Gradio cancels an event's task. The thread that it waits for goes on,
  unheard, and the place is given away at once: the next event would run beside it on the same
  device. Here a job that was asked to stop does so at the end of its step, and only then the device
  takes the next one.
- *Heard after the page was closed.* A running function learns of it at its next ``yield``, which a
  denoising run does not reach before its end. Here whoever stops following gives the job up.
- *A state to draw.* An event that waits has run nothing, so it cannot say where it stands. Here a
  job tells from the moment of its submission how many are before it, those that run included, then
  its step and the time left.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Literal, Protocol, TypeVar

from vidsparse.errors import UnsupportedError, VidsparseError
from vidsparse.logs import logger


class Bench(Protocol):
    """What a device's jobs work with."""

    def free(self) -> None:
        """Give back memory that nothing holds any more."""


Result = TypeVar("Result")
Equipment = TypeVar("Equipment", bound=Bench)
State = Literal["waiting", "running", "done", "cancelled", "failed"]

# progress is shown this often at most; the end of a job is shown at once.
SHOWN_EVERY = 0.2
# and this often at least, since a listener that has gone is noticed when it is told something.
SHOWN_AT_LEAST_EVERY = 1.0


class QueueFullError(UnsupportedError):
    """No more jobs can wait."""


class Cancelled(VidsparseError):
    """The job was asked to stop, and did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A job at one moment.

    Args:
        job: its id.
        state: where it is in its life.
        ahead: jobs that come before it, while it waits.
        phase: what is going on, in words.
        done: share of its denoising steps that are finished, in [0, 1].
        step: finished steps of the video that is being made.
        steps: that it takes, 0 while unknown.
        elapsed: seconds since a device took it.
        left: seconds that its remaining steps will take, None while unknown.
        stopping: it has been asked to stop and runs still.
        place: which of several videos that is for, in words, or empty.
        wait: seconds until a device takes it, None while unknown.
        loading: it waits for a device that is being made ready.
    """

    job: str
    state: State
    ahead: int
    phase: str
    done: float
    step: int
    steps: int
    elapsed: float
    left: float | None
    stopping: bool
    place: str = ""
    wait: float | None = None
    loading: bool = False

    @property
    def finished(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ("done", "cancelled", "failed")


class Job(Generic[Equipment, Result]):
    """One piece of work, its progress, and in the end its result.

    Args:
        work: what to do with the device's bench; it tells this job how far it is.
        parts: videos it makes, to tell the time left.
        expected: seconds that it will take, None where nobody knows.
        readies: it makes a device ready and is nobody's: others wait for it, and do not count it.
    """

    def __init__(
        self,
        work: Callable[[Equipment, Job[Equipment, Result]], Result],
        *,
        parts: int = 1,
        expected: float | None = None,
        readies: bool = False,
    ) -> None:
        self.readies = readies
        self.id = secrets.token_hex(4)
        self.result: Result | None = None
        self.error: Exception | None = None
        self.device = ""
        self.counts: frozenset[str] = frozenset()
        self._work = work
        self._parts = parts
        self._expected = expected
        self._wait: Callable[[], float | None] = lambda: None
        self._part = 0
        self._state: State = "waiting"
        self._ahead = 0
        self._loading = False
        self._phase = "waiting"
        self._place = ""
        self._step = self._steps = 0
        # of the last video that had any: what the next one, too, is expected to take.
        self._usual_steps = 0
        self._step_seconds: list[float] = []
        self._after_steps = 0.0
        self._began = self._ended = 0.0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._watchers: set[Callable[[], object]] = set()

    # ---- for the work ----

    def say(self, phase: str) -> None:
        """Say what is going on."""
        with self._lock:
            self._phase = phase
        self._changed()

    def at(self, place: str) -> None:
        """Say which of several videos the work has come to, for everything that follows."""
        with self._lock:
            self._place = place
        self._changed()

    def begin_part(self, phase: str) -> None:
        """The next video begins."""
        with self._lock:
            self._part += 1
            self._step = self._steps = 0
            self._phase = phase
        self._changed()

    def advance(self, step: int, steps: int, seconds: float) -> None:
        """A denoising step of the current video is finished."""
        with self._lock:
            self._step, self._steps, self._usual_steps = step, steps, steps
            self._step_seconds.append(seconds)
        self._changed()

    def expect_after_steps(self, seconds: float) -> None:
        """Say how long a video takes after its last step, to tell the time left."""
        with self._lock:
            self._after_steps = seconds

    def stopping(self) -> bool:
        """Whether it should stop as soon as it can."""
        return self._stop.is_set()

    def check(self) -> None:
        """Stop here if asked to.

        Raises:
            Cancelled: it was.
        """
        if self.stopping():
            raise Cancelled("cancelled")

    # ---- for everybody else ----

    def cancel(self) -> None:
        """Ask it to stop: at once while it waits, when the work next looks while it runs."""
        self._stop.set()
        with self._lock:
            if self._state == "waiting":
                self._state = "cancelled"
        self._changed()

    def snapshot(self) -> Snapshot:
        """How it stands."""
        # the queue has a lock of its own, under which it asks this job: never both at once.
        return self._now(self._wait() if self._state == "waiting" else None)

    def _now(self, wait: float | None) -> Snapshot:
        with self._lock:
            until = self._ended or time.monotonic()
            known = self._usual_steps * max(self._parts, self._part)
            finished = self._usual_steps * max(0, self._part - 1) + self._step
            left = None
            if self._state == "running" and self._step_seconds:
                mean = sum(self._step_seconds) / len(self._step_seconds)
                videos = max(self._parts, self._part) - self._part + 1
                left = mean * (known - finished) + self._after_steps * videos
            return Snapshot(
                job=self.id,
                state=self._state,
                ahead=self._ahead,
                phase=self._phase,
                done=1.0 if self._state == "done" else finished / known if known else 0.0,
                step=self._step,
                steps=self._steps,
                elapsed=until - self._began if self._began else 0.0,
                left=left,
                stopping=self._stop.is_set() and self._state == "running",
                place=self._place,
                wait=wait,
                loading=self._loading and self._state == "waiting",
            )

    def remaining(self) -> float | None:
        """Seconds until it ends, once a device has taken it; None while unknown."""
        now = self._now(None)
        if now.left is not None or self._expected is None:
            return now.left
        return max(0.0, self._expected - now.elapsed)

    async def follow(self) -> AsyncGenerator[Snapshot, None]:
        """Snapshots as it goes on, the finished one last."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        self._watchers.add(wake)
        try:
            while True:
                woken.clear()
                snapshot = self.snapshot()
                yield snapshot
                if snapshot.finished:
                    return
                until = time.monotonic() + SHOWN_EVERY
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), SHOWN_AT_LEAST_EVERY)
                while True:
                    # cleared before the look: a change after it ends the wait.
                    woken.clear()
                    rest = until - time.monotonic()
                    if rest <= 0 or self.snapshot().finished:
                        break
                    with suppress(TimeoutError):
                        await asyncio.wait_for(woken.wait(), rest)
        finally:
            self._watchers.discard(wake)

    # ---- for the queue ----

    def run(self, bench: Equipment, device: str) -> None:
        """Do the work and keep its result or error; does nothing if it was cancelled before."""
        with self._lock:
            if self._state != "waiting":
                return
            self._state, self.device = "running", device
            self._began = time.monotonic()
            self._phase = "preparing"
        self._changed()
        state: State = "failed"
        try:
            self.result = self._work(bench, self)
            state = "done"
        except Cancelled:
            state = "cancelled"
        except Exception as error:
            self.error = error
            if not isinstance(error, VidsparseError):
                logger.exception("a job of the page failed")
            _let_go(error)
        if state == "failed":
            # not sooner: while the error is looked at, it holds what the job had in hand. A device
            # that has failed for good says so again here, and the next job will hear it.
            with suppress(Exception):
                bench.free()
        with self._lock:
            self._state, self._ended = state, time.monotonic()
        self._changed()

    def waits_by(self, wait: Callable[[], float | None]) -> None:
        """Who is asked how long it will wait."""
        self._wait = wait

    def moved_to(self, ahead: int, *, loading: bool) -> None:
        """Jobs before it have gone, or a device is ready."""
        with self._lock:
            if (self._ahead, self._loading) == (ahead, loading):
                return
            self._ahead, self._loading = ahead, loading
        self._changed()

    def _changed(self) -> None:
        for wake in tuple(self._watchers):
            try:
                wake()
            except RuntimeError:
                # its event loop has closed; nobody looks any more.
                self._watchers.discard(wake)


def _let_go(error: BaseException) -> None:
    """Keep an error's words alone, which are read long after its job.

    The frames that it and those that led to it arose in hold all that they worked on, which may be
    most of a device's memory.
    """
    led = [error]
    while led:
        each = led.pop()
        led += filter(None, (each.__cause__, each.__context__))
        each.__traceback__ = each.__cause__ = each.__context__ = None


class JobQueue(Generic[Equipment]):
    """First come, first served, one thread for each device.

    Args:
        benches: device name to what its jobs work with.
        waiting: jobs that may wait at once.
    """

    def __init__(self, benches: Sequence[tuple[str, Equipment]], *, waiting: int) -> None:
        self._most = waiting
        self._jobs: list[Job[Equipment, object]] = []
        self._running: list[Job[Equipment, object]] = []
        self._arrived = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=pair, name=f"page-{pair[0]}", daemon=True)
            for pair in benches
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, job: Job[Equipment, Result], shares: Mapping[str, float] = MappingProxyType({})
    ) -> Job[Equipment, Result]:
        """Put a job at the end.

        Args:
            job: what to do.
            shares: whom it counts against, and which share of the waiting places each may have in
                jobs that wait or run; at least one job.

        Raises:
            QueueFullError: too many wait already, or too many of the same.
        """
        with self._arrived:
            self._forget_cancelled()
            for name, share in shares.items():
                mine = sum(name in each.counts for each in self._jobs + self._running)
                if mine >= max(1, int(share * self._most)):
                    raise QueueFullError(
                        f"{mine} jobs of yours are waiting or running already, which is your share "
                        "of this page. Hint: wait for one of them, or cancel it."
                    )
            job.counts = frozenset(shares)
            if self._closed or len(self._jobs) >= self._most:
                raise QueueFullError(
                    f"{len(self._jobs)} jobs are waiting already, which is all that this page "
                    "takes. Hint: try again in a moment."
                )
            self._jobs.append(job)  # type: ignore[arg-type]
            job.waits_by(lambda: self.outlook(job)[1])  # type: ignore[arg-type]
            self._renumber()
            self._arrived.notify()
        return job

    def outlook(self, job: Job[Equipment, object] | None = None) -> tuple[int, float | None]:
        """How many jobs a device has to finish before it takes ``job``, or one more, and seconds.

        The seconds are None where nobody knows how long one of them will take.
        """
        with self._arrived:
            waiting = [each for each in self._jobs if not each.stopping()]
            if job in waiting:
                waiting = waiting[: waiting.index(job)]
            before = [*self._running, *waiting]
            free = len(self._threads) - len(before)
        if free > 0:
            return 0, 0.0
        count = sum(not each.readies for each in before)
        left = [each.remaining() for each in before]
        known = [each for each in left if each is not None]
        # devices share what is before it; with as many jobs as devices the first to end makes room.
        if len(known) < len(left):
            return count, None
        shared = sum(known) / len(self._threads)
        return count, min(known) if len(before) == len(self._threads) else shared

    def forget_cancelled(self) -> None:
        """Let the others move up where a waiting job was cancelled."""
        with self._arrived:
            self._forget_cancelled()

    def close(self) -> None:
        """Cancel everything and wait until the devices are free."""
        with self._arrived:
            self._closed = True
            for job in self._jobs + self._running:
                job.cancel()
            self._jobs.clear()
            self._arrived.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self, device: str, bench: Equipment) -> None:
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = self._jobs.pop(0)
                self._running.append(job)
                self._renumber()
            job.run(bench, device)
            with self._arrived:
                self._running.remove(job)
                self._renumber()

    def _forget_cancelled(self) -> None:
        self._jobs = [job for job in self._jobs if not job.stopping()]
        self._renumber()

    def _renumber(self) -> None:
        loading = any(job.readies for job in self._running)
        ahead = sum(not job.readies for job in self._running)
        for job in self._jobs:
            job.moved_to(ahead, loading=loading)
            ahead += not job.readies
