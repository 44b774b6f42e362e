"""The page in a real browser: Chromium, driven by Playwright, on the bundled small model.

The browser is VIDSPARSE_CHROMIUM, or the first of ``chromium`` and ``google-chrome`` on the path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")
pytest.importorskip("playwright", reason="playwright drives the browser")

from page_server import free_port
from playwright import sync_api as playwright
from videos import read_video

from vidsparse.methods import METHODS
from vidsparse.pipelines.calibrate import calibrate
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest

CHROMIUM = os.environ.get("VIDSPARSE_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: set VIDSPARSE_CHROMIUM to one"),
    pytest.mark.timeout(600),
]

PATIENCE = 180_000
# from the start, so slowly that a key pressed after the look at the first frame meets it.
SLOWLY = "(video) => { video.playbackRate = 0.1; video.currentTime = 0; }"
SMALL = {"Steps": 3, "Frames (4k+1)": 5, "Width": 64, "Height": 64}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser") / "out"


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers for BSFA on the bundled model, at the size that these tests use."""
    path = tmp_path_factory.mktemp("presets") / "small-bsfa.json"
    request = GenerateRequest(
        prompt="", method="bsfa", device="cpu", dense_steps=1, steps=3, frames=5, width=64,
        height=64,
    )  # fmt: skip
    settings = {"groups": 1, "fractions": (0.3, 1.0)}
    loaded = load("shapes", device="cpu")
    calibrate(loaded, request, ["a red ball"], path, settings=settings)
    return path


@pytest.fixture(scope="module")
def url(out: Path, preset: Path) -> Iterator[str]:
    """The page as the command serves it."""
    command = [sys.executable, "-m", "vidsparse", "ui", "--port", str(free_port())]
    with subprocess.Popen(
        [*command, "--out", str(out), "--max-steps", "400", "--preset", str(preset.parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # no sandbox: continuous integration runs as root, and the only page is our own.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        playwright.expect.set_options(timeout=PATIENCE)
        yield browser
        browser.close()


class Visitor:
    """A browser window of its own, and everything it asked for or complained of."""

    def __init__(self, chromium: Any, url: str, **options: Any) -> None:
        self.context = chromium.new_context(accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)
        self.page.goto(url)
        self.page.wait_for_selector("#generate")
        for label, value in SMALL.items():
            self.set(label, value)

    def _hear(self, said: Any) -> None:
        # what the page's own policy forbids it is missed by somebody.
        if "Content Security Policy" in said.text:
            self.errors.append(said.text)

    def set(self, label: str, value: object) -> None:
        field = self.page.get_by_label(label, exact=True)
        field.fill(str(value))
        field.press("Tab")

    def prompt(self, text: str) -> None:
        self.page.fill("#prompt textarea", text)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def see(self, area: str, text: str) -> None:
        playwright.expect(self.page.locator(area)).to_contain_text(text)

    def calls(self) -> int:
        """How often the page has called a function of the server's."""
        return sum(url.split("?")[0].endswith("/queue/join") for url in self.asked)

    def value(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture
def visit(chromium: Any, url: str) -> Iterator[Any]:
    opened: list[Visitor] = []

    def open_page(**options: Any) -> Visitor:
        opened.append(Visitor(chromium, url, **options))
        return opened[-1]

    yield open_page
    for visitor in opened:
        visitor.context.close()
        assert visitor.errors == []


def _download(visitor: Visitor, link: Any) -> Path:
    with visitor.page.expect_download() as waiting:
        link.click()
    return Path(waiting.value.path())


def test_generate_shows_a_video_its_cost_and_how_to_get_it_again(visit: Any) -> None:
    visitor = visit()
    visitor.prompt("a large red ball that moves right")
    visitor.set("Seed", 4)
    visitor.page.click("#generate")
    visitor.see("#generate-status", "Your video is ready")
    for text in ("Attention computed", "selected", "denoising", "torch, fp32", "seed 4"):
        visitor.see("#generate-facts", text)
    visitor.page.wait_for_function("document.querySelector('#video video')?.readyState >= 2")
    assert visitor.value("document.querySelector('#video video').videoWidth") == 64

    # a dense one beside it gives the speed of the next.
    visitor.page.click("#method input")
    visitor.page.get_by_role("option", name="Dense attention").click()
    playwright.expect(visitor.page.get_by_label("top p", exact=True)).to_be_hidden()
    visitor.set("Seed", 5)
    visitor.page.click("#generate")
    visitor.see("#generate-facts", "this is the dense run")

    # the history leads back to the first, with all its settings.
    tiles = visitor.page.locator("#history button.thumbnail-item")
    playwright.expect(tiles).to_have_count(2)
    tiles.nth(1).click()
    visitor.see("#generate-facts", "last dense run took")
    visitor.page.click("#use-settings")
    playwright.expect(visitor.page.get_by_label("Seed", exact=True)).to_have_value("4")
    playwright.expect(visitor.page.locator("#method input")).to_have_value("FG-Attn (fg-attn)")
    playwright.expect(visitor.page.get_by_label("top p", exact=True)).to_be_visible()

    page = visitor.page
    video = _download(visitor, page.get_by_role("link", name="Download video"))
    assert video.read_bytes()[4:8] == b"ftyp"
    record = json.loads(
        _download(visitor, page.get_by_role("link", name="Download record")).read_text("utf-8")
    )
    assert (record["seed"], record["prompt"]) == (4, "a large red ball that moves right")


def test_a_preset_settles_what_it_was_calibrated_for(visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    field = lambda label: page.get_by_label(label, exact=True)  # noqa: E731
    page.click("#preset input")
    page.get_by_role("option", name="small-bsfa").click()
    playwright.expect(page.locator("#method input")).to_have_value("BSFA (bsfa)")
    visitor.see("#preset", "settles tile 128x64, rowmajor order, 5 frames of 64x64")
    for label in ("tile", "Frames (4k+1)", "Width", "Height", "top p"):
        playwright.expect(field(label)).to_be_hidden()
    playwright.expect(field("keep")).to_be_visible()
    page.click("#generate")
    visitor.see("#generate-facts", "preset small-bsfa")
    visitor.see("#generate-facts", "shapes, bsfa (keep 0.3, tile 128x64)")

    # one of its fractions is no other: the message says which there are.
    visitor.set("keep", 0.4)
    page.click("#generate")
    visitor.see("#generate-status [role=alert]", "0.3, 1), got 0.4")

    # a method that does nothing without a preset leaves with it, and comes back with it.
    page.click("#preset input")
    page.get_by_role("option", name="none: numbers by hand").click()
    playwright.expect(page.locator("#method input")).to_have_value("FG-Attn (fg-attn)")
    playwright.expect(field("Width")).to_be_visible()
    page.click("#use-settings")
    playwright.expect(page.locator("#method input")).to_have_value("BSFA (bsfa)")
    playwright.expect(page.locator("#preset input")).to_have_value("small-bsfa (bsfa)")
    playwright.expect(field("keep")).to_have_value("0.3")
    playwright.expect(field("Width")).to_be_hidden()


def test_cancel_stops_within_a_step_and_the_device_is_free(visit: Any) -> None:
    visitor = visit()
    visitor.set("Steps", 400)
    visitor.page.click("#generate")
    visitor.page.wait_for_function(
        "/step [1-9]\\d* \\/ 400 · about/.test("
        "document.querySelector('#generate-status').innerText)"
    )
    visitor.page.click("#cancel-generate")
    visitor.see("#generate-status", "Cancelled")
    visitor.see("#generate-status", "your settings and videos are kept")
    playwright.expect(visitor.page.get_by_label("Steps", exact=True)).to_have_value("400")
    visitor.set("Steps", 2)
    visitor.page.click("#generate")
    visitor.see("#generate-status", "Your video is ready")


def test_compare_plays_in_step_and_shows_where_attention_was_sparse(visit: Any) -> None:
    visitor = visit()
    visitor.set("top p", 0.5)
    visitor.tab("Compare")
    visitor.page.click("#compare")
    visitor.see("#compare-status", "Both videos are ready")
    visitor.page.wait_for_selector("vs-viewer[data-ready]")
    for text in ("PSNR", "SSIM", "Flicker", "Attention computed"):
        visitor.see("#compare-facts", text)

    # the slider goes to a frame, by keyboard as well, and the plots follow.
    slider = visitor.page.locator("vs-viewer .seek")
    slider.focus()
    slider.press("Home")
    playwright.expect(visitor.page.locator("vs-viewer .play")).to_have_text("Play")
    visitor.see("vs-viewer .counter", "frame 1 / 5")
    for _ in range(3):
        slider.press("ArrowRight")
    visitor.see("vs-viewer .counter", "frame 4 / 5")
    labels = visitor.value("JSON.parse(document.querySelector('.vs-plot.psnr').dataset.labels)")
    visitor.see(".vs-plot.psnr .value", labels[3])
    assert visitor.value("document.querySelector('.vs-plot.ssim .cursor').style.left") == "75%"

    # the difference view multiplies.
    gain = visitor.page.locator("vs-viewer .times-slider")
    gain.focus()
    gain.press("End")
    visitor.see("vs-viewer figcaption .times", "8")
    filters = visitor.value(
        "[...document.querySelectorAll('vs-viewer .stack canvas')].map((each) => each.style.filter)"
    )
    assert filters == ["brightness(8)", "brightness(1)"]
    painted = visitor.value(
        """() => [...document.querySelectorAll('vs-viewer canvas')].map((canvas) =>
             canvas.getContext('2d').getImageData(0, 0, 64, 64).data.some((value, place) =>
               place % 4 < 3 && value > 8))"""
    )
    assert painted == [True, True, painted[2], True]

    # a cell of the map, by click and by keys; its heads; and a look inside.
    visitor.page.locator("vs-heat rect[data-step='1'][data-layer='2']").click()
    visitor.see("vs-heat .heads", "step 2, layer 3")
    playwright.expect(visitor.page.locator("vs-heat .head")).to_have_count(4)
    visitor.page.locator("vs-heat svg").press("ArrowRight")
    visitor.see("vs-heat .heads", "step 3, layer 3")
    step = visitor.page.get_by_label("Step", exact=True)
    playwright.expect(step).to_have_value("3")
    # no answer of the server's can come late: it is not asked.
    calls = visitor.calls()
    assert calls > 0
    for key, now in (("Left", "2"), ("Left", "1"), ("Right", "2"), ("Right", "3")):
        visitor.page.locator("vs-heat svg").press(f"Arrow{key}")
        playwright.expect(step).to_have_value(now)
    assert visitor.calls() == calls
    visitor.page.click("#record-cell")
    # the bundled model's plans serve two steps.
    visitor.see("#cell-status", "Recorded step 2, whose plan serves step 3")
    visitor.see("#cell", "step 2, layer 3, head 1")
    before = visitor.page.locator("#cell img").first.get_attribute("src")
    visitor.page.get_by_label("Hilbert", exact=True).check()
    visitor.see("#cell", "tokens in Hilbert order; tiles were cut in raster order")
    assert visitor.page.locator("#cell img").first.get_attribute("src") != before
    kept = visitor.page.locator("#cell img.kept")
    visitor.page.get_by_label("where the tile was kept").uncheck()
    playwright.expect(kept).to_be_hidden()


def test_a_key_stops_the_video_also_where_the_slider_is_there_already(visit: Any) -> None:
    visitor = visit()
    visitor.tab("Compare")
    visitor.page.click("#compare")
    visitor.see("#compare-status", "Both videos are ready")
    button = visitor.page.locator("vs-viewer .play")
    playwright.expect(button).to_have_text("Pause")
    visitor.value(f"({SLOWLY})(document.querySelector('vs-viewer').video)")
    visitor.see("vs-viewer .counter", "frame 1 / 5")
    visitor.page.locator("vs-viewer .seek").press("Home")
    playwright.expect(button).to_have_text("Play")
    visitor.see("vs-viewer .counter", "frame 1 / 5")


def test_the_viewer_s_panels_are_the_two_videos_and_their_difference(visit: Any, out: Path) -> None:
    visitor = visit()
    visitor.tab("Compare")
    visitor.page.click("#compare")
    visitor.see("#compare-status", "Both videos are ready")
    source = visitor.page.locator("vs-viewer").get_attribute("data-src")
    path = Path(re.sub(r"^gradio_api/file=", "", source))
    assert path.is_relative_to(out.resolve())
    panels = read_video(path).astype(int)
    assert panels.shape == (5, 128, 128, 3)
    dense, sparse = panels[:, :64, :64], panels[:, :64, 64:]
    # as close as two lossy videos are.
    assert abs(panels[:, 64:, :64] - abs(dense - sparse)).mean() < 4
    for name, side in (("dense", dense), ("sparse", sparse)):
        (link,) = visitor.page.get_by_role("link", name=f"Download {name}").all()
        assert abs(read_video(_download(visitor, link)).astype(int) - side).mean() < 4


def test_report_exports_the_command_line_s_page(visit: Any, tmp_path: Path) -> None:
    visitor = visit()
    visitor.tab("Report")
    prompts = tmp_path / "two.txt"
    prompts.write_text("# two\na small blue ring\na large red ball\n", encoding="utf-8")
    visitor.page.set_input_files("#prompt-file, input[type=file][accept='.txt']", str(prompts))
    playwright.expect(visitor.page.locator("#prompts textarea")).to_have_value(
        "a small blue ring\na large red ball"
    )
    visitor.page.click("#vary input")
    visitor.page.get_by_role("option", name="top_p").click()
    visitor.page.fill("#over :is(input, textarea)", "0.3, 0.9")
    visitor.page.click("#report")
    visitor.see("#report-status", "The report is ready")
    playwright.expect(visitor.page.locator("#report-table tbody tr")).to_have_count(4)
    playwright.expect(visitor.page.locator("#report-summary tbody tr")).to_have_count(2)
    playwright.expect(visitor.page.locator("#report-curve .dot.mean")).to_have_count(2)
    link = visitor.page.get_by_role("link", name="report.html (top_p 0.3)")
    page = _download(visitor, link)
    text = page.read_text("utf-8")
    assert text.count("data:video/mp4;base64,") == 2
    assert "Dense against sparse: FG-Attn on shapes" in text

    # and it works from a file, by keys: its first video stands still on the frame asked for.
    visitor.page.goto(page.rename(tmp_path / "report.html").as_uri())
    clip = visitor.page.locator(".clip").first
    clip.scroll_into_view_if_needed()
    playwright.expect(clip.locator(".play")).to_have_text("Pause")
    clip.locator("video").evaluate(SLOWLY)
    playwright.expect(clip.locator(".counter")).to_have_text("frame 1 / 5")
    for key, frame in (("Home", 1), ("ArrowRight", 2), ("End", 5)):
        clip.locator("input[type=range]").press(key)
        playwright.expect(clip.locator(".counter")).to_have_text(f"frame {frame} / 5")
        playwright.expect(clip.locator(".play")).to_have_text("Play")


@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ("", {}, "there is no prompt"),
        ("a " * 6000, {}, "at most 10,000 characters"),
        ("a ball", {"Width": 63}, "width must be a multiple of"),
        ("a ball", {"Steps": 401}, "steps can be at most 400 on this page"),
        ("a ball", {"top p": 2}, "top_p must lie in"),
    ],
)
def test_bad_input_is_said_clearly_and_nothing_runs(
    visit: Any, prompt: str, changes: dict[str, int], words: str
) -> None:
    visitor = visit()
    visitor.prompt(prompt)
    for label, value in changes.items():
        visitor.set(label, value)
    visitor.page.click("#generate")
    visitor.see("#generate-status [role=alert]", words)
    playwright.expect(visitor.page.locator("#history")).to_be_hidden()


def test_a_prompt_is_text_and_never_markup(visit: Any) -> None:
    visitor = visit()
    visitor.prompt("<img src=x onerror='window.broken = 1'> dragon")
    visitor.page.click("#generate")
    visitor.see("#generate-status", "shapes never learned img, src")
    visitor.see("#generate-status", "Your video is ready")
    visitor.see("#generate-facts", "<img src=x onerror=")
    assert visitor.value("window.broken") is None


def test_two_visitors_share_the_device_and_nothing_else(visit: Any) -> None:
    one, two = visit(), visit()
    one.set("Steps", 400)
    one.page.click("#generate")
    one.see("#generate-status", "step")
    two.set("Seed", 9)
    two.page.click("#generate")
    two.see("#generate-status", "1 job before yours")
    # a cancel of one's own does not reach the other.
    two.page.click("#cancel-generate")
    two.see("#generate-status", "Cancelled")
    one.see("#generate-status", "left")
    two.page.click("#generate")
    two.see("#generate-status", "1 job before yours")
    # closing the window gives the device away.
    one.context.close()
    two.see("#generate-status", "Your video is ready")
    two.see("#generate-facts", "seed 9")
    playwright.expect(two.page.locator("#history button.thumbnail-item")).to_have_count(1)


def test_nothing_is_loaded_from_outside(visit: Any, url: str) -> None:
    visitor = visit()
    visitor.page.click("#generate")
    visitor.see("#generate-status", "Your video is ready")
    for tab in ("Compare", "Report"):
        visitor.tab(tab)
    outside = [
        each for each in visitor.asked if not each.startswith((url, "data:", "blob:", "about:"))
    ]
    assert outside == []
    assert len(visitor.asked) > 10


def test_the_keyboard_alone_makes_a_video(visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    page.locator("#prompt textarea").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        if (
            visitor.value("document.activeElement.id || document.activeElement.closest('[id]')?.id")
            == "generate"
        ):
            break
    else:
        raise AssertionError("tabbing never came to Generate")
    outline = visitor.value("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.keyboard.press("Enter")
    visitor.see("#generate-status", "Your video is ready")


def test_tab_leaves_no_list_open(visit: Any) -> None:
    page = visit().page
    page.locator("#method input").focus()
    options = page.locator("li[role=option]")
    playwright.expect(options).to_have_count(len(METHODS))
    # on past the preset, whose list opens and closes as well.
    page.keyboard.press("Tab")
    playwright.expect(options).to_have_count(2)
    page.keyboard.press("Tab")
    playwright.expect(options).to_have_count(0)
    page.locator("#method input").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#method input")).to_have_value("SpargeAttn (spargeattn)")
    playwright.expect(page.get_by_label("tau", exact=True)).to_be_visible()


def test_on_a_narrow_screen_the_buttons_are_always_in_reach(visit: Any) -> None:
    visitor = visit(viewport={"width": 390, "height": 844})
    visitor.value("scrollTo(0, 0)")
    for tab, button in (("Compare", "#compare"), ("Report", "#report"), ("Generate", "#generate")):
        visitor.tab(tab)
        for top in (0, 100_000):
            visitor.value(f"scrollTo(0, {top})")
            playwright.expect(visitor.page.locator(button)).to_be_in_viewport(ratio=1)
    # what was started is shown where one looks.
    visitor.value("scrollTo(0, 0)")
    visitor.page.click("#generate")
    playwright.expect(visitor.page.locator("#generate-status")).to_be_in_viewport()
    visitor.see("#generate-status", "Your video is ready")


def test_a_narrow_screen_scrolls_down_and_never_sideways(visit: Any) -> None:
    visitor = visit(viewport={"width": 360, "height": 740})
    visitor.tab("Compare")
    visitor.page.click("#compare")
    visitor.see("#compare-status", "Both videos are ready")
    for tab in ("Generate", "Compare", "Report"):
        visitor.tab(tab)
        assert visitor.value("document.documentElement.scrollWidth") <= 360
