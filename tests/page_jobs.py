"""The page's queue in tests: jobs that wait to be let through."""

from __future__ import annotations

import threading
import time
from typing import Any

from vidsparse.apps.page.queue import Job, JobQueue, Snapshot

# seconds that a job may take on a busy machine.
PATIENCE = 20


class Gate:
    """Work that says when it began and waits to be let through."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.open = threading.Event()

    def __call__(self, bench: Any, job: Job[Any, Any]) -> str:
        self.began.set()
        while not self.open.wait(0.005):
            job.check()
        return f"by {bench}"


class Bench(str):
    """A device's bench that holds nothing."""

    def free(self) -> None:
        """Give back nothing."""


def queue_of(devices: int = 1, waiting: int = 8) -> JobQueue[Any]:
    """A queue of devices whose benches are texts."""
    return JobQueue([(f"d{i}", Bench(f"bench {i}")) for i in range(devices)], waiting=waiting)


def wait(job: Job[Any, Any]) -> Snapshot:
    """The job's last state."""
    until = time.monotonic() + PATIENCE
    while not (snapshot := job.snapshot()).finished:
        assert time.monotonic() < until, snapshot
        time.sleep(0.002)
    return snapshot
