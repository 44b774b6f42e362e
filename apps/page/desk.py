"""Between the page's events and the queue: submits jobs for a visit and follows them."""

from __future__ import annotations

import html
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import gradio as gr
from gradio.context import LocalContext

from vidsparse.apps.page import draw
from vidsparse.apps.page.host import Host
from vidsparse.apps.page.listeners import Listeners
from vidsparse.apps.page.queue import Job, JobQueue, Snapshot
from vidsparse.apps.page.visits import Visit, Visits
from vidsparse.apps.page.workbench import Workbench
from vidsparse.errors import UnsupportedError, VidsparseError
from vidsparse.logs import logger

# seconds that a job goes on without anybody who ever asked how it does. The page asks at once.
UNHEARD_AFTER = 15.0

# of the queue's places. A visit is begun anew with every page that is opened, so an address counts
# as well; not this machine's own, which is everybody's behind a tunnel or a proxy.
VISITS_SHARE = 1 / 4
ADDRESS_SHARE = 1 / 2


class UnheardError(UnsupportedError):
    """Nobody listens to a job."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What all tabs share."""

    host: Host
    queue: JobQueue[Workbench]
    visits: Visits
    listeners: Listeners = field(default_factory=Listeners)

    def visit(self, request: gr.Request) -> Visit:
        """The visit that an event belongs to."""
        return self.visits.of(request.session_hash or "")

    async def follow(
        self, request: gr.Request, tab: str, job: Job[Workbench, Any]
    ) -> AsyncGenerator[Snapshot, None]:
        """Submit a job and tell how it goes; whoever stops listening, or never does, gives it up.

        Raises:
            QueueFullError: no more jobs can wait, or none of this visitor's.
            UnheardError: nobody came to listen.
        """
        visit = self.visit(request)
        self.queue.submit(job, _shares(request))
        mine = visit.jobs.setdefault(tab, [])
        mine.append(job)
        call = LocalContext.event_id.get(None)
        until = time.monotonic() + UNHEARD_AFTER
        try:
            async with aclosing(job.follow()) as snapshots:
                async for snapshot in snapshots:
                    late = time.monotonic() > until and not snapshot.finished
                    if late and not self.listeners.came(request.session_hash, call):
                        raise UnheardError("nobody listened to this job, so it was given up")
                    yield snapshot
        finally:
            mine.remove(job)
            if not job.snapshot().finished:
                # the page was closed: nobody waits for this any more.
                job.cancel()
                self.queue.forget_cancelled()

    def cancel(self, visit: Visit, tab: str) -> int:
        """Stop what the visit has in the queue for ``tab``; returns how many jobs there were."""
        asked = visit.cancel(tab)
        self.queue.forget_cancelled()
        return asked


def _shares(request: gr.Request) -> dict[str, float]:
    shares = {f"visit {request.session_hash}": VISITS_SHARE}
    host = request.client.host if request.client else ""
    with suppress(ValueError):
        if not ip_address(host).is_loopback:
            shares[f"address {host}"] = ADDRESS_SHARE
    return shares


def complaint(error: Exception) -> str:
    """An error as visitors read it: ours as it is, a defect without its inside."""
    if isinstance(error, VidsparseError):
        return str(error)
    return f"{type(error).__name__}: this is a defect; the log of the page's host says more."


def toast(error: Exception) -> gr.Error:
    """The same as Gradio shows it, and as a client of the interface gets it."""
    # a line, and no traceback: most errors are a visitor's own.
    logger.info("a call was refused: %s", complaint(error))
    return gr.Error(html.escape(complaint(error), quote=False), print_exception=False)


def alert(error: Exception) -> str:
    """The same, to stay on the page."""
    return draw.alert(complaint(error))
