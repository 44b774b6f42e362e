"""Between the page's events and the queue: submits jobs for a visit and follows them."""

from __future__ import annotations

import html
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vidsparse.apps.page import draw
from vidsparse.apps.page.host import Host
from vidsparse.apps.page.queue import Job, JobQueue, Snapshot
from vidsparse.apps.page.visits import Visit, Visits
from vidsparse.apps.page.workbench import Workbench
from vidsparse.errors import VidsparseError


@dataclass(frozen=True, slots=True)
class Desk:
    """What all tabs share."""

    host: Host
    queue: JobQueue[Workbench]
    visits: Visits

    def visit(self, request: gr.Request) -> Visit:
        """The visit that an event belongs to."""
        return self.visits.of(request.session_hash or "")

    async def follow(
        self, visit: Visit, tab: str, job: Job[Workbench, Any]
    ) -> AsyncGenerator[Snapshot, None]:
        """Submit a job and tell how it goes; whoever stops listening gives it up.

        Raises:
            QueueFullError: no more jobs can wait.
        """
        self.queue.submit(job)
        mine = visit.jobs.setdefault(tab, [])
        mine.append(job)
        try:
            async with aclosing(job.follow()) as snapshots:
                async for snapshot in snapshots:
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


def complaint(error: Exception) -> str:
    """An error as visitors read it: ours as it is, a defect without its inside."""
    if isinstance(error, VidsparseError):
        return str(error)
    return f"{type(error).__name__}: this is a defect; the log of the page's host says more."


def toast(error: Exception) -> gr.Error:
    """The same as Gradio shows it, and as a client of the interface gets it."""
    return gr.Error(html.escape(complaint(error), quote=False), print_exception=False)


def alert(error: Exception) -> str:
    """The same, to stay on the page."""
    return draw.alert(complaint(error))
