"""Pictures that a video begins with, in a real browser: a press while one is on its way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")
pytest.importorskip("playwright", reason="playwright drives the browser")

from page_browser import MARKS, Latch, commanded
from page_visitor import Visitor
from PIL import Image
from playwright import sync_api as playwright
from tiny_ltx import ltx

pytest_plugins = ["page_browser"]
pytestmark = MARKS

FIRST = "#image input[type=file]"
WAITS = "Waiting for the picture"
UPLOAD = re.compile(r"/gradio_api/upload\?")


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> Latch:
    """The page's server looks at pictures only while it is lifted."""
    path = tmp_path_factory.mktemp("slow") / "looks"
    return Latch(path, holds="vidsparse.apps.page.build.rewrite_image")


@pytest.fixture(scope="module")
def url(out: Path, looks: Latch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A page with a model that makes videos with a picture and without."""
    folder = tmp_path_factory.mktemp("models") / "ltx"
    ltx().save_pretrained(folder)
    with commanded(out, "--model", str(folder), setup=looks) as address:
        yield address


@pytest.fixture
def visitor(visit: Any, looks: Latch) -> Visitor:
    looks.lift()
    visitor: Visitor = visit(newcomer=True)
    for label, value in {"Steps": 3, "Frames (8k+1)": 9, "Width": 64, "Height": 64}.items():
        visitor.set(label, value)
    visitor.prompt("a red ball")
    return visitor


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "first.png"
    Image.new("RGB", (64, 64), "red").save(path)
    return path


@pytest.fixture
def made(out: Path) -> Any:
    """Which pictures the videos begin or end with that a test has made, in their order."""

    def records() -> set[Path]:
        return set(out.glob("page/*/*.json"))

    before = records()

    def images() -> list[list[str]]:
        # by when they were written: a visitor's folder has a random name.
        new = sorted(records() - before, key=lambda path: path.stat().st_mtime_ns)
        return [sorted(json.loads(path.read_text())["images"]) for path in new]

    return images


def pressed_while_sent(page: playwright.Page, picture: Path) -> playwright.Route:
    """Press Generate while the browser sends the picture; what it sends waits to be let go."""
    sends: list[playwright.Route] = []
    page.route(UPLOAD, lambda route: sends.append(route))
    page.set_input_files(FIRST, picture)
    page.wait_for_selector("#image .uploading")
    page.click("#generate")
    return sends[0]


def test_a_video_has_the_picture_that_was_still_being_sent(
    visitor: Visitor, picture: Path, made: Any
) -> None:
    page = visitor.page
    upload = pressed_while_sent(page, picture)
    visitor.see(".vs-waits", WAITS)
    page.wait_for_timeout(500)
    assert made() == []
    upload.continue_()
    visitor.see("#generate-status", "Your video is ready")
    assert made() == [["image"]]
    playwright.expect(page.locator(".vs-waits")).to_have_count(0)


def test_a_video_has_the_picture_that_was_still_being_looked_at(
    visitor: Visitor, picture: Path, looks: Latch, made: Any
) -> None:
    page = visitor.page
    looks.close()
    page.set_input_files(FIRST, picture)
    playwright.expect(page.locator("#image")).to_contain_text("first")
    page.click("#generate")
    page.wait_for_timeout(1500)
    assert made() == []
    looks.lift()
    visitor.see("#generate-status", "Your video is ready")
    assert made() == [["image"]]
    # taken away, it is in no video any more, however soon that is asked for.
    page.locator("#image button[aria-label='Clear']").click()
    page.click("#generate")
    playwright.expect(page.locator("#history button.thumbnail-item")).to_have_count(2)
    assert made() == [["image"], []]


def test_nothing_is_made_with_a_picture_that_is_refused(
    visitor: Visitor, picture: Path, looks: Latch, made: Any
) -> None:
    page = visitor.page
    picture.write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    looks.close()
    page.set_input_files(FIRST, picture)
    playwright.expect(page.locator("#image")).to_contain_text("first")
    page.click("#generate")
    page.wait_for_timeout(300)
    looks.lift()
    playwright.expect(page.locator(".toast-body")).to_contain_text("picture")
    page.wait_for_timeout(1500)
    assert made() == []
    # the next press is about what stands there now.
    page.click("#generate")
    visitor.see("#generate-status", "Your video is ready")
    assert made() == [[]]


def test_nothing_is_made_with_a_picture_that_does_not_arrive(
    visitor: Visitor, picture: Path, made: Any
) -> None:
    page = visitor.page
    upload = pressed_while_sent(page, picture)
    upload.fulfill(status=413, body='{"detail": "the upload is too large"}')
    playwright.expect(page.locator(".toast-body")).to_be_visible()
    page.wait_for_timeout(1500)
    assert made() == []


def test_a_reload_brings_back_the_pictures_and_the_number_of_videos_of_its_own_window(
    visitor: Visitor, url: str, tmp_path: Path
) -> None:
    context = visitor.page.context
    others = [Visitor(context, url, newcomer=True) for _ in range(2)]
    windows = [each.page for each in (visitor, *others)]
    for place, (page, colour) in enumerate(zip(windows, ("red", "blue"), strict=False), 2):
        path = tmp_path / f"{colour}.png"
        Image.new("RGB", (64, 64), colour).save(path)
        page.set_input_files(FIRST, path)
        page.wait_for_function("sessionStorage.getItem('vidsparse-pictures')?.includes('frame')")
        field = page.get_by_label("Videos", exact=True)
        field.fill(str(place))
        field.press("Tab")
        page.wait_for_function(
            "(count) => JSON.parse(sessionStorage.getItem('vidsparse-form'))?.videos === count",
            arg=place,
        )

    def held(page: Any) -> tuple[str, str]:
        page.reload()
        page.wait_for_function("window.vidsparseRestored")
        count = page.get_by_label("Videos", exact=True).input_value()
        shown = page.locator("img[src*='first-frame']")
        if page is windows[-1]:
            # what is put into an upload is looked at by the server first.
            page.wait_for_timeout(2000)
            return count, "one" if shown.count() else ""
        playwright.expect(shown).to_be_visible()
        path = shown.get_attribute("src").partition("/file=")[2]
        return count, str(Image.open(path).getpixel((0, 0)))

    # the last one was open before any picture was chosen, and had none.
    assert [held(page) for page in reversed(windows)] == [
        ("1", ""), ("3", "(0, 0, 255)"), ("2", "(255, 0, 0)"),
    ]  # fmt: skip
    new = context.new_page()
    new.goto(url)
    playwright.expect(new.locator("img[src*='first-frame']")).to_be_visible()
    assert [error for each in others for error in each.errors] == []
