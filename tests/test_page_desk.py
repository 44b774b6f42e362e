"""Whose jobs the page's desk gives up: those of visitors who left for good, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")

from page_jobs import Gate, queue_of

from vidsparse.apps.page import desk as desks
from vidsparse.apps.page.desk import Desk
from vidsparse.apps.page.errands import Errand, Place
from vidsparse.apps.page.host import Host, Limits
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.visits import Visits

AWAY = 1
PLACE = Place("generate", "area", "stop")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    host = Host(models=(), folder=tmp_path, devices=("cpu",), limits=Limits(away=AWAY))
    queue = queue_of()
    yield Desk(host, queue, Visits(tmp_path))
    queue.close()


def _request(desk: Desk, session: str, key: str | None = "k" * 43) -> Any:
    headers = {"cookie": f"{desk.cookie}={key}"} if key else {}
    return SimpleNamespace(
        session_hash=session, request=SimpleNamespace(headers=headers), client=None
    )


def _submitted(desk: Desk, request: Any) -> Errand:
    errand = Errand(place=PLACE, job=Job(Gate()), done="Done", show=lambda _: {})
    desk.queue.submit(errand.job)
    desk.visit(request).add(errand)
    return errand


async def _listen(desk: Desk, request: Any, errand: Errand, seconds: float) -> None:
    """Follow an errand on a page that is closed then."""

    async def follow() -> None:
        async with aclosing(desk.tell(request, errand)) as updates:
            async for _ in updates:
                pass

    listening = asyncio.create_task(follow())
    await asyncio.wait({listening}, timeout=seconds)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


def test_who_comes_back_and_leaves_again_has_the_whole_while_anew(desk: Desk) -> None:
    request = _request(desk, "first")
    desk.listeners.come("first")

    async def visit() -> tuple[bool, bool]:
        errand = _submitted(desk, request)
        await _listen(desk, request, errand, 0.1)
        await asyncio.sleep(0.6 * AWAY)
        # opened again, and closed before the first while is over.
        await _listen(desk, request, errand, 0.1)
        await asyncio.sleep(0.6 * AWAY)
        kept = not errand.job.stopping()
        await asyncio.sleep(AWAY)
        return kept, errand.job.stopping()

    assert asyncio.run(visit()) == (True, True)


@pytest.mark.parametrize("key", ["k" * 43, None])
def test_a_job_that_nobody_listens_to_waits_for_those_who_can_come_back(
    desk: Desk, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desks, "UNHEARD_AFTER", 0.1)
    request = _request(desk, "closed at once", key)

    async def visit() -> tuple[bool, bool]:
        errand = _submitted(desk, request)
        # a browser was closed, or opened anew, between its click and the answer.
        await _listen(desk, request, errand, 5)
        kept = not errand.job.stopping()
        await asyncio.sleep(1.5 * AWAY)
        return kept, errand.job.stopping()

    assert asyncio.run(visit()) == (key is not None, True)
