"""Whose jobs the page's desk gives up: those of visitors who left for good, and no others."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")

import gradio as gr
import numpy as np
from page_jobs import Gate, queue_of
from PIL import Image

from vidsparse.apps.page import desk as desks
from vidsparse.apps.page import draw
from vidsparse.apps.page.desk import Desk
from vidsparse.apps.page.errands import Errand, Place
from vidsparse.apps.page.host import Host, Limits
from vidsparse.apps.page.listeners import Ears
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.visits import Visits
from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.models import resolve_model

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


def test_every_window_has_the_pictures_that_were_handed_in_there(
    desk: Desk, tmp_path: Path
) -> None:
    from vidsparse.apps.page.build import image_taker

    model = replace(resolve_model("shapes"), image_class="WanImageToVideoPipeline")
    desk = replace(desk, host=replace(desk.host, models=(model,)))
    take = image_taker(desk, "image")
    pictures = [tmp_path / f"{colour}.png" for colour in ("red", "blue")]
    windows = [_request(desk, name) for name in ("first", "second", "later", "script")]

    def colours() -> list[Any]:
        shown = [desk.images(window).get("image") for window in windows]
        return [each and Image.open(each).getpixel((0, 0)) for each in shown]

    for window, picture, colour in zip(windows, pictures, ("red", "blue"), strict=False):
        Image.new("RGB", (8, 8), colour).save(picture)
        list(take(window, str(picture)))
    red, blue = (255, 0, 0), (0, 0, 255)
    assert colours() == [red, blue, None, None]
    # a page that is opened again begins with the last ones, and has its own from then on.
    desk.last_images(windows[2])
    list(take(windows[1], None))
    assert colours() == [red, None, blue, None]


def test_a_picture_that_the_page_hands_in_itself_is_kept_as_it_is_and_written_once(
    desk: Desk, tmp_path: Path
) -> None:
    from vidsparse.apps.page.build import image_taker

    model = replace(resolve_model("shapes"), image_class="WanImageToVideoPipeline")
    limits = replace(desk.host.limits, upload=1)
    desk = replace(desk, host=replace(desk.host, models=(model,), limits=limits))
    take, window = image_taker(desk, "image"), _request(desk, "first")
    folder = desk.visit(window).folder
    noise = np.random.default_rng(0).integers(0, 256, (800, 800, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "upload.jpg", quality=70)
    list(take(window, str(tmp_path / "upload.jpg")))
    (kept,) = folder.glob("*.png")
    # more than may be handed in.
    assert kept.stat().st_size > 2**20
    # as gradio hands in what a reload or the settings of a video put into the upload.
    copy = tmp_path / "copy.png"
    shutil.copy(kept, copy)
    for name in ("first", "opened anew"):
        again = _request(desk, name)
        *_, shown = take(again, str(copy))
        assert desk.images(again) == {"image": kept}
        assert (shown["visible"], shown["value"]) == (True, str(kept))
    assert list(folder.glob("*.png")) == [kept]
    # one that is not the visit's own is looked at like any other.
    with copy.open("ab") as file:
        file.write(b"x")
    with pytest.raises(gr.Error, match="at most 1 MB"):
        list(take(window, str(copy)))
    assert desk.images(window) == {}


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


async def _told(desk: Desk, request: Any, errand: Errand, told: list[dict[Any, Any]]) -> None:
    """Hear what is told of an errand until it has ended."""
    async with aclosing(desk.tell(request, errand)) as updates:
        async for update in updates:
            told.append(update)


def test_cancel_stops_the_job_that_a_window_shows_and_no_other(desk: Desk) -> None:
    one, other = _request(desk, "one"), _request(desk, "other")
    errands = [_submitted(desk, one) for _ in range(3)]
    elsewhere = _submitted(desk, other)

    def stopped() -> list[bool]:
        return [each.job.stopping() for each in (*errands, elsewhere)]

    told: list[list[dict[Any, Any]]] = [[], [], [], []]

    async def visit() -> None:
        each = zip((one, one, one, other), (*errands, elsewhere), told, strict=True)
        telling = [asyncio.create_task(_told(desk, *those)) for those in each]
        while not (told[3] and "2 more of yours wait" in told[0][-1]["area"]):
            await asyncio.sleep(0.05)
        first, second, _ = (draw.status(each.job.snapshot()) for each in errands)
        desk.cancel(one, "generate", first, None)
        await telling[0]
        assert stopped() == [True, False, False, False]
        # what stands beside each tab's jobs can be asked for anew.
        labels = [(each["value"], each["interactive"]) for each in desk.cancels(one)]
        assert labels == [("Cancel this one", True), ("Cancel", False), ("Cancel", False)]
        assert desk.cancels(other)[0]["value"] == "Cancel"
        # drawn before the first had ended, and of another tab.
        desk.cancel(one, "generate", first, None)
        desk.cancel(one, "compare", second)
        desk.cancel(other, "generate", second)
        assert stopped() == [True, False, False, False]
        # a script is shown nothing.
        desk.cancel(one, "generate", None)
        await telling[1]
        assert stopped() == [True, True, False, False]
        desk.cancel(other, "generate", draw.status(elsewhere.job.snapshot()))
        await telling[3]
        assert stopped() == [True, True, False, True]
        desk.cancel(one, "generate", draw.status(errands[2].job.snapshot()))
        await asyncio.gather(*telling)

    asyncio.run(visit())
    # a window tells of its own jobs alone.
    assert told[0][-2]["stop"]["value"] == "Cancel this one"
    assert "before yours" in told[3][0]["area"]
    assert told[3][0]["stop"]["value"] == "Cancel"
    # what comes after one that was called off takes its place at once.
    ends = [each[-1]["area"] for each in told]
    for said, follower in zip(ends, (*errands[1:], None, None), strict=True):
        assert "Cancelled" in said if follower is None else follower.job.id in said
    assert not told[2][-1]["stop"]["interactive"]
    assert not any(each["interactive"] for each in desk.cancels(one))
    assert desk.cancel(one, "generate") == draw.note("Nothing is running.")


def test_a_failed_job_s_error_keeps_no_frames_of_those_who_were_told(desk: Desk) -> None:
    request = _request(desk, "first")

    def fail(bench: Any, job: Job[Any, Any]) -> None:
        raise UnsupportedError("too small")

    errand = Errand(place=PLACE, job=Job(fail), done="Done", show=lambda _: {})
    desk.queue.submit(errand.job)
    for _ in range(2):
        told: list[dict[Any, Any]] = []
        with pytest.raises(gr.Error, match="too small"):
            asyncio.run(_told(desk, request, errand, told))
        assert "too small" in told[-1]["area"]
        assert errand.job.error is not None
        assert errand.job.error.__traceback__ is None


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


def test_a_job_goes_on_while_its_visitor_has_another_window_open(desk: Desk) -> None:
    request = _request(desk, "first")
    desk.listeners.come("first")
    errand = _submitted(desk, request)
    place = "/gradio_api/heartbeat/second"
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": place}
    scope["headers"] = [(b"cookie", f"{desk.cookie}={'k' * 43}".encode())]
    nothing: Any = None
    stopping: list[bool] = []

    async def open_window(*_: Any) -> None:
        await _listen(desk, request, errand, 0.1)
        await asyncio.sleep(1.5 * AWAY)
        stopping.append(errand.job.stopping())

    async def visit() -> None:
        ears = Ears(open_window, desk.listeners, desk.window)
        await ears(scope, nothing, nothing)
        # who closes the last one has a while to come back.
        for seconds in (0.5 * AWAY, AWAY):
            await asyncio.sleep(seconds)
            stopping.append(errand.job.stopping())

    asyncio.run(visit())
    assert stopping == [False, False, True]


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


def test_a_window_that_is_loaded_again_has_its_own_pictures_by_their_names(
    desk: Desk, tmp_path: Path
) -> None:
    window = _request(desk, "loaded again")
    folder = desk.visit(window).folder
    folder.mkdir()
    for name in ("0001-first-frame", "0002-last-frame"):
        (folder / f"{name}.png").touch()
    (tmp_path / "secret.png").touch()
    desk.keep_images(_request(desk, "other"), {"image": folder / "0002-last-frame.png"})
    # also where the server has forgotten them.
    own = {"image": "0001-first-frame", "last_image": "0002-last-frame"}
    paths = {name: folder / f"{stem}.png" for name, stem in own.items()}
    assert desk.last_images(window, own) == desk.images(window) == paths
    # a window without any has none, whatever another one has; nor is there any of another folder.
    for names in ({}, {"image": ""}, {"image": "../secret"}, {"image": ["0001-first-frame"]}):
        assert desk.last_images(window, names) == {}
    # a new one begins with those of the window that was used last.
    desk.last_images(window, {"image": "0002-last-frame"})
    assert desk.last_images(_request(desk, "new")) == {"image": folder / "0002-last-frame.png"}
