"""Between the page's events and the queue: submits jobs for a visit and follows them."""

from __future__ import annotations

import asyncio
import html
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.context import LocalContext

from vidsparse.apps.page import draw
from vidsparse.apps.page.errands import Errand, Place, Updates
from vidsparse.apps.page.estimates import Estimate, Estimates
from vidsparse.apps.page.fields import IMAGES
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


# those that have jobs.
TABS = ("generate", "compare", "report")


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

    def images(self, request: gr.Request) -> Mapping[str, Path]:
        """The pictures handed in in the window that asks, or by the script's session."""
        return self.visit(request).images.get(_window(request)) or {}

    def keep_images(self, request: gr.Request, images: Mapping[str, Path]) -> None:
        """Remember pictures for the window that asks, and for the one that is opened next."""
        self.visit(request).images.put(_window(request), images)

    def last_images(self, request: gr.Request, names: object = None) -> Mapping[str, Path]:
        """As ``images``, of a window that has just been opened.

        Args:
            request: of the event.
            names: of the pictures that the same window had before it was opened again, as the
                browser kept them. A new one has none, and begins with its visitor's last ones.
        """
        visit = self.visit(request)
        if isinstance(names, Mapping):
            there = {path.stem: path for path in visit.folder.glob("*.png")}
            own = {name: there.get(str(names.get(name))) for name in IMAGES}
            self.keep_images(request, {name: path for name, path in own.items() if path})
        elif visit.images.get(_window(request)) is None:
            self.keep_images(request, visit.images.last or {})
        return self.images(request)

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
            mine = self._told(request, place.tab)
            yield {place.area: alert(error), place.stop: _cancel_update(mine)}
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
        mine = visit.open(tab)
        # the first says how many wait for it.
        for errand in mine:
            errand.windows.add(_window(request))
        for errand in mine:
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
        errand.windows.add(_window(request))
        try:
            async with aclosing(self._follow(request, visit, errand)) as snapshots:
                async for snapshot in snapshots:
                    mine = self._told(request, place.tab)
                    if snapshot.finished or not mine:
                        continue
                    update = {place.stop: _cancel_update(mine)}
                    # of several in one tab of a window, the first tells how all stand.
                    if mine[0] is errand:
                        update[place.area] = _standing(mine, snapshot)
                    size, so_far = errand.so_far()
                    if size > drawn:
                        drawn = size
                        update |= so_far()
                    yield update
            failed = errand.job.error
        except Exception as error:
            failed = error
        if failed is not None:
            mine = self._told(request, place.tab)
            # what was finished before is not lost with what was not.
            _, so_far = errand.so_far()
            yield {place.area: alert(failed), place.stop: _cancel_update(mine), **so_far()}
            # what the next one says of itself takes the alert's place. The error itself is not
            # raised: it is kept, and would keep the frames of everyone who is told of it.
            raise toast(failed, shown=not mine)
        made = errand.job.result
        shown = errand.so_far()[1]() if made is None else errand.show(made)
        mine = self._told(request, place.tab)
        # where one was called off, the next one is at once what Cancel stops.
        follows = made is None and mine and mine[0].place.area is place.area
        said = _standing(mine, mine[0].job.snapshot()) if follows else _ended(errand)
        yield {place.stop: _cancel_update(mine), place.area: said, **shown}

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
            self._leave(visit)
            if not visit.returns:
                self._give_up([errand])

    @contextmanager
    def window(self, session: str, cookies: str) -> Iterator[None]:
        """A page of a browser is open: what another one asked for goes on as long.

        Args:
            session: Gradio's, of the page.
            cookies: the browser's; a script has none, and what it asks for ends with its session.
        """
        key = key_in(cookies, self.cookie)
        if key is None:
            yield
            return
        visit = self.visits.of(session, key)
        visit.come()
        try:
            yield
        finally:
            self._leave(visit)

    def _leave(self, visit: Visit) -> None:
        visit.leave()
        if visit.returns and not visit.present:
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

    def _told(self, request: gr.Request, tab: str) -> list[Errand]:
        """What waits or runs for a tab and is told in the window that asks, in order."""
        mine = self.visit(request).open(tab)
        return [errand for errand in mine if _window(request) in errand.windows]

    def cancel(self, request: gr.Request, tab: str, *areas: Any) -> Any:
        """Stop the job that a tab shows, or the first one for who is shown nothing.

        What has ended since it was drawn is stopped already: no other stands in for it.

        Args:
            request: of the event.
            tab: its name.
            areas: what the tab says of its jobs, as it was drawn, None for a script's call.

        Returns:
            The update of the area that says how they stand.
        """
        mine = self._told(request, tab)
        if not mine:
            return draw.note("Nothing is running.")
        drawn = [area for area in areas if isinstance(area, str) and area]
        shown = [each for each in mine if any(each.job.id in area for area in drawn)]
        for errand in shown[:1] if drawn else mine[:1]:
            errand.job.cancel()
        self.queue.forget_cancelled()
        return gr.skip()

    def cancels(self, request: gr.Request) -> list[Any]:
        """The updates of every tab's Cancel, in the order of ``TABS``."""
        return [_cancel_update(self._told(request, tab)) for tab in TABS]


def _ended(errand: Errand) -> str:
    return draw.status(errand.job.snapshot(), errand.done, errand.warnings)


def _standing(mine: Sequence[Errand], first: Snapshot) -> str:
    """How the first of several stands, and how many wait for it."""
    return draw.status(first, warnings=mine[0].warnings, behind=len(mine) - 1)


def _window(request: gr.Request) -> str:
    """The name of the window, or a script's session, that an event comes from."""
    return request.session_hash or ""


def _cancel_update(mine: Sequence[Errand]) -> Any:
    """A tab's Cancel, which is quiet while there is nothing to cancel, and stops one of several."""
    label = "Cancel this one" if len(mine) > 1 else "Cancel"
    return gr.update(value=label, interactive=bool(mine))


def _shares(request: gr.Request, visit: Visit) -> dict[str, float]:
    shares = {f"visit {visit.folder.name}": VISITS_SHARE}
    host = request.client.host if request.client else ""
    with suppress(ValueError):
        if not ip_address(host).is_loopback:
            shares[f"address {host}"] = ADDRESS_SHARE
    return shares


def cancel_button(elem_id: str) -> gr.Button:
    """A tab's Cancel."""
    return gr.Button(
        "Cancel",
        elem_id=elem_id,
        # the page's script lets one press of it stop one job.
        elem_classes="vs-cancel",
        scale=1,
        interactive=False,
    )


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
