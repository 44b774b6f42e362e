"""Between the page's events and the queue: submits jobs for a visit and follows them."""

from __future__ import annotations

import asyncio
import html
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.context import LocalContext

from vidsparse.apps.page import draw
from vidsparse.apps.page.errands import Errand, Place, Updates
from vidsparse.apps.page.estimates import Estimate, Estimates
from vidsparse.apps.page.host import Host
from vidsparse.apps.page.listeners import Listeners
from vidsparse.apps.page.queue import JobQueue, Snapshot
from vidsparse.apps.page.returns import cookie_name, key_in
from vidsparse.apps.page.visits import Visit, Visits
from vidsparse.apps.page.workbench import Workbench
from vidsparse.errors import UnsupportedError, VidsparseError
from vidsparse.logs import logger

if TYPE_CHECKING:
    from vidsparse.pipelines.request import GenerateRequest

# seconds that a job goes on without anybody who ever asked how it does. The page asks at once.
UNHEARD_AFTER = 15.0

# of the queue's places. A visit is begun anew by whoever shows no key, so an address counts as
# well; not this machine's own, which is everybody's behind a tunnel or a proxy.
VISITS_SHARE = 1 / 4
ADDRESS_SHARE = 1 / 2


# of a tab's Cancel, which is quiet while there is nothing to cancel.
RUNNING, IDLE = gr.update(interactive=True), gr.update(interactive=False)


class UnheardError(UnsupportedError):
    """Nobody listens to a job."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What all tabs share."""

    host: Host
    queue: JobQueue[Workbench]
    visits: Visits
    listeners: Listeners = field(default_factory=Listeners)
    estimates: Estimates = field(default_factory=Estimates)

    def visit(self, request: gr.Request) -> Visit:
        """The visit that an event belongs to."""
        cookies = request.request.headers.get("cookie", "") if request.request else ""
        return self.visits.of(request.session_hash or "", key_in(cookies, self.cookie))

    @property
    def cookie(self) -> str:
        """The name of the cookie that visitors are known by when they come back."""
        return cookie_name(self.host.folder)

    def estimate(self, requests: Sequence[GenerateRequest]) -> Estimate | None:
        """What videos will take that are made one after the other, None while nobody knows."""
        if not requests:
            return None
        return self.estimates.of(requests, self.host.model(requests[0].model).defaults)

    def seconds(self, requests: Sequence[GenerateRequest]) -> float | None:
        """How long they will take, None while nobody knows."""
        found = self.estimate(requests)
        return None if found is None else found.seconds

    async def run(
        self, request: gr.Request, place: Place, ask: Callable[[Visit], Errand]
    ) -> AsyncGenerator[Updates, None]:
        """Submit what ``ask`` makes for the visit, and tell how it goes.

        Args:
            request: of the event.
            place: where it is told.
            ask: makes the errand.

        Raises:
            gr.Error: a value that cannot be used, no place in the queue, or the job failed.
        """
        visit = self.visit(request)
        try:
            errand = ask(visit)
            self.queue.submit(errand.job, _shares(request, visit))
        except Exception as error:
            yield {place.area: alert(error), place.stop: _cancel_update(visit, place)}
            raise toast(error, shown=True) from error
        visit.add(errand)
        logger.info("a job was taken: %s, %d of this visit", place.tab, len(visit.open()))
        async with aclosing(self.tell(request, errand)) as updates:
            async for update in updates:
                yield update

    async def resume(self, request: gr.Request, tab: str) -> AsyncGenerator[Updates, None]:
        """For a page that was opened again: how the tab's last errand ended, and what runs yet."""
        visit = self.visit(request)
        last = visit.last(tab)
        if last is not None:
            failed = last.job.error
            yield {last.place.area: alert(failed) if failed is not None else _ended(last)}
        for errand in visit.open(tab):
            # its own page was told what is wrong with it by an error; this one reads it.
            with suppress(gr.Error):
                async with aclosing(self.tell(request, errand)) as updates:
                    async for update in updates:
                        yield update

    async def tell(self, request: gr.Request, errand: Errand) -> AsyncGenerator[Updates, None]:
        """How an errand goes, as updates of the page, and in the end its result.

        Raises:
            gr.Error: it failed, or nobody came to listen.
        """
        visit, place, drawn = self.visit(request), errand.place, 0
        try:
            async with aclosing(self._follow(request, visit, errand)) as snapshots:
                async for snapshot in snapshots:
                    mine = visit.open(place.tab)
                    if snapshot.finished or not mine:
                        continue
                    update = {place.stop: RUNNING}
                    # of several in one tab, the first tells how all stand.
                    if mine[0] is errand:
                        behind = len(mine) - 1
                        update[place.area] = draw.status(
                            snapshot, warnings=errand.warnings, behind=behind
                        )
                    size, so_far = errand.so_far()
                    if size > drawn:
                        drawn = size
                        update |= so_far()
                    yield update
            if errand.job.error is not None:
                raise errand.job.error
        except Exception as error:
            yield {place.area: alert(error), place.stop: _cancel_update(visit, place)}
            # what the next one says of itself takes the alert's place.
            raise toast(error, shown=not visit.open(place.tab)) from error
        made = errand.job.result
        shown = errand.so_far()[1]() if made is None else errand.show(made)
        # of several that are called off in one place, the last one to stop says so.
        others = [each for each in visit.open(place.tab) if each.place.area is place.area]
        if made is not None or not others:
            shown = {place.area: _ended(errand), **shown}
        yield {place.stop: _cancel_update(visit, place), **shown}

    async def _follow(
        self, request: gr.Request, visit: Visit, errand: Errand
    ) -> AsyncGenerator[Snapshot, None]:
        """An errand's snapshots; whoever stops listening and cannot come back gives it up.

        Raises:
            UnheardError: nobody came to listen. A browser may have been closed or opened anew
                between its click and the answer.
        """
        call = LocalContext.event_id.get(None)
        until = time.monotonic() + UNHEARD_AFTER
        visit.come()
        try:
            async with aclosing(errand.job.follow()) as snapshots:
                async for snapshot in snapshots:
                    late = time.monotonic() > until and not snapshot.finished
                    if late and not self.listeners.came(request.session_hash, call):
                        raise UnheardError("nobody listened to this job")
                    yield snapshot
        finally:
            visit.leave()
            if not visit.returns:
                self._give_up([errand])
            elif not visit.present:
                # a reload closes the page as well: the visitor has a while to come back.
                later = asyncio.get_running_loop().call_later
                later(self.host.limits.away, self._left, visit, visit.times)

    def _left(self, visit: Visit, times: int) -> None:
        # who came back and left again meanwhile has all of the while anew.
        if not visit.present and visit.times == times:
            self._give_up(visit.open())

    def _give_up(self, errands: Sequence[Errand]) -> None:
        for errand in errands:
            if not errand.job.snapshot().finished:
                errand.job.cancel()
        self.queue.forget_cancelled()

    def cancel(self, visit: Visit, tab: str) -> int:
        """Stop what the visit has in the queue for ``tab``; returns how many jobs there were."""
        asked = visit.cancel(tab)
        self.queue.forget_cancelled()
        return asked


def _ended(errand: Errand) -> str:
    return draw.status(errand.job.snapshot(), errand.done, errand.warnings)


def _cancel_update(visit: Visit, place: Place) -> Any:
    return RUNNING if visit.open(place.tab) else IDLE


def _shares(request: gr.Request, visit: Visit) -> dict[str, float]:
    shares = {f"visit {visit.folder.name}": VISITS_SHARE}
    host = request.client.host if request.client else ""
    with suppress(ValueError):
        if not ip_address(host).is_loopback:
            shares[f"address {host}"] = ADDRESS_SHARE
    return shares


def cancel_button(elem_id: str) -> gr.Button:
    """A tab's Cancel."""
    return gr.Button("Cancel", elem_id=elem_id, scale=1, interactive=False)


def complaint(error: Exception) -> str:
    """An error as visitors read it: ours as it is, a defect without its inside."""
    if isinstance(error, VidsparseError):
        return str(error)
    return f"{type(error).__name__}: this is a defect; the log of the page's host says more."


def toast(error: Exception, *, shown: bool = False) -> gr.Error:
    """The same as Gradio shows it, and as a client of the interface gets it.

    Where an ``alert`` says it already, ``shown``, Gradio does not say it a second time.
    """
    # a line, and no traceback: most errors are a visitor's own.
    logger.info("a call was refused: %s", complaint(error))
    return gr.Error(
        html.escape(complaint(error), quote=False), print_exception=False, visible=not shown
    )


def alert(error: Exception) -> str:
    """The same, to stay on the page."""
    return draw.alert(complaint(error))
