"""Comparing and reporting in a real browser, and what holds there for keys, screens, visitors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")
pytest.importorskip("playwright", reason="playwright drives the browser")

import gradio
from page_browser import MARKS, commanded
from page_server import served
from page_visitor import PATIENCE
from playwright import sync_api as playwright

from vidsparse.apps.page.build import SHARED_FROM
from vidsparse.pipelines.video import read_video

pytest_plugins = ["page_browser"]
pytestmark = MARKS

# from the start, so slowly that a key pressed after the look at the first frame meets it.
SLOWLY = "(video) => { video.playbackRate = 0.1; video.currentTime = 0; }"

# before any script of the page: how often it asks for the next frame of the screen.
COUNT_FRAMES = """
window.framesAsked = 0;
const ask = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (draw) => (window.framesAsked += 1, ask(draw));
"""
GROWS_STILL = """async () => {
  for (let second = 0; second < 30; second += 1) {
    const before = window.framesAsked;
    await new Promise((done) => setTimeout(done, 1000));
    if (window.framesAsked - before < 5) return true;
  }
  return false;
}"""


@pytest.fixture(scope="module")
def url(out: Path) -> Iterator[str]:
    with commanded(out) as address:
        yield address


def test_compare_plays_in_step_and_shows_where_attention_was_sparse(visit: Any) -> None:
    visitor = visit()
    # its plans serve two steps and its tiles are cut in raster order, unlike the model's own.
    visitor.page.click("#method input")
    visitor.page.get_by_role("option", name="FG-Attn").click()
    visitor.set("top_p", 0.5)
    visitor.tab("Compare")
    visitor.page.click("#compare")
    visitor.see("#compare-status", "Both videos are ready")
    visitor.page.wait_for_selector("#viewer vs-viewer[data-ready]")
    for text in ("PSNR", "SSIM", "Flicker", "Attention computed"):
        visitor.see("#compare-facts", text)

    # the slider goes to a frame, by keyboard as well, and the plots follow.
    slider = visitor.page.locator("#viewer vs-viewer .seek")
    slider.focus()
    slider.press("Home")
    playwright.expect(visitor.page.locator("#viewer vs-viewer .play")).to_have_text("Play")
    visitor.see("#viewer vs-viewer .counter", "frame 1 / 5")
    for _ in range(3):
        slider.press("ArrowRight")
    visitor.see("#viewer vs-viewer .counter", "frame 4 / 5")
    labels = visitor.value(
        "JSON.parse(document.querySelector('#viewer .vs-plot.psnr').dataset.labels)"
    )
    visitor.see("#viewer .vs-plot.psnr .value", labels[3])
    assert (
        visitor.value("document.querySelector('#viewer .vs-plot.ssim .cursor').style.left") == "75%"
    )

    # the difference view multiplies.
    gain = visitor.page.locator("#viewer vs-viewer .times-slider")
    gain.focus()
    gain.press("End")
    visitor.see("#viewer vs-viewer figcaption .times", "8")
    filters = visitor.page.locator("#viewer .stack canvas").evaluate_all(
        "(canvases) => canvases.map((each) => each.style.filter)"
    )
    assert filters == ["brightness(8)", "brightness(1)"]
    painted = visitor.value(
        """() => [...document.querySelectorAll('#viewer vs-viewer canvas')].map((canvas) =>
             canvas.getContext('2d').getImageData(0, 0, 64, 64).data.some((value, place) =>
               place % 4 < 3 && value > 8))"""
    )
    assert painted == [True, True, painted[2], True]

    # a cell of the map, by click and by keys; its heads; and a look inside.
    visitor.page.locator("#heat vs-heat rect[data-step='1'][data-layer='2']").click()
    visitor.see("#heat vs-heat .heads", "step 2, layer 3")
    playwright.expect(visitor.page.locator("#heat vs-heat .head")).to_have_count(4)
    visitor.page.locator("#heat vs-heat svg").press("ArrowRight")
    visitor.see("#heat vs-heat .heads", "step 3, layer 3")
    step = visitor.page.get_by_label("Step", exact=True)
    playwright.expect(step).to_have_value("3")
    # no answer of the server's can come late: it is not asked.
    calls = visitor.calls()
    assert calls > 0
    for key, now in (("Left", "2"), ("Left", "1"), ("Right", "2"), ("Right", "3")):
        visitor.page.locator("#heat vs-heat svg").press(f"Arrow{key}")
        playwright.expect(step).to_have_value(now)
    assert visitor.calls() == calls
    visitor.page.click("#record-cell")
    visitor.see("#cell-status", "Recorded step 2, whose plan serves step 3")
    visitor.see("#cell", "step 2, layer 3, head 1")
    before = visitor.page.locator("#cell img").first.get_attribute("src")
    visitor.page.get_by_label("Hilbert", exact=True).check()
    visitor.see("#cell", "tokens in Hilbert order; tiles were cut in raster order")
    assert visitor.page.locator("#cell img").first.get_attribute("src") != before
    kept = visitor.page.locator("#cell img.kept")
    visitor.page.get_by_label("where the tile was kept").uncheck()
    playwright.expect(kept).to_be_hidden()

    # on a phone, the videos before their figures.
    visitor.page.set_viewport_size({"width": 390, "height": 844})
    top = "document.querySelector('{}').getBoundingClientRect().top".format
    order = f"[{top('#viewer')}, {top('#compare-facts')}, {top('#time-pair')}, {top('#heat')}]"
    places = visitor.value(order)
    assert places == sorted(places)


def test_a_key_stops_the_video_also_where_the_slider_is_there_already(visit: Any) -> None:
    visitor = visit(reduced_motion="no-preference")
    visitor.tab("Compare")
    visitor.page.click("#compare")
    visitor.see("#compare-status", "Both videos are ready")
    button = visitor.page.locator("#viewer vs-viewer .play")
    playwright.expect(button).to_have_text("Pause")
    visitor.value(f"({SLOWLY})(document.querySelector('#viewer vs-viewer').video)")
    visitor.see("#viewer vs-viewer .counter", "frame 1 / 5")
    visitor.page.locator("#viewer vs-viewer .seek").press("Home")
    playwright.expect(button).to_have_text("Play")
    visitor.see("#viewer vs-viewer .counter", "frame 1 / 5")


def test_the_viewer_s_panels_are_the_two_videos_and_their_difference(visit: Any, out: Path) -> None:
    visitor = visit()
    visitor.tab("Compare")
    visitor.page.click("#compare")
    visitor.see("#compare-status", "Both videos are ready")
    source = visitor.page.locator("#viewer vs-viewer").get_attribute("data-src")
    path = Path(re.sub(r"^gradio_api/file=", "", source))
    assert path.is_relative_to(out.resolve())
    panels = read_video(path).astype(int)
    assert panels.shape == (5, 128, 128, 3)
    dense, sparse = panels[:, :64, :64], panels[:, :64, 64:]
    # as close as two lossy videos are.
    assert abs(panels[:, 64:, :64] - abs(dense - sparse)).mean() < 4
    for name, side in (("dense", dense), ("sparse", sparse)):
        (link,) = visitor.page.get_by_role("link", name=f"Download {name}").all()
        assert abs(read_video(visitor.download(link)).astype(int) - side).mean() < 4


def test_report_exports_the_command_line_s_page(visit: Any, tmp_path: Path) -> None:
    visitor = visit(viewport={"width": 1440, "height": 900}, reduced_motion="no-preference")
    visitor.tab("Report")
    playwright.expect(visitor.page.locator("#over")).to_be_hidden()
    playwright.expect(visitor.page.locator("#cancel-report")).to_be_disabled()
    prompts = tmp_path / "two.txt"
    prompts.write_text("# two\na small blue ring\na large red ball\n", encoding="utf-8")
    visitor.page.set_input_files("#prompt-file, input[type=file][accept='.txt']", str(prompts))
    playwright.expect(visitor.page.locator("#prompts textarea")).to_have_value(
        "a small blue ring\na large red ball"
    )
    visitor.page.click("#vary input")
    visitor.page.get_by_role("option", name="share").click()
    visitor.page.fill("#over :is(input, textarea)", "0.1, 0.6")
    visitor.page.click("#report")
    playwright.expect(visitor.page.locator("#cancel-report")).to_be_enabled()
    # how far it is, for those who look elsewhere and those who listen.
    playwright.expect(visitor.page).to_have_title(re.compile(r"^\d+ % .* - vidsparse$"))
    visitor.see("#report-status", "prompt 2 of 2, setting 1 of 2")
    visitor.see("#report-status", "The report is ready")
    playwright.expect(visitor.page).to_have_title("The report is ready - vidsparse")
    playwright.expect(visitor.page.locator("#vs-live")).to_have_text("The report is ready")
    playwright.expect(visitor.page.locator("#cancel-report")).to_be_disabled()
    for area in ("table", "summary"):
        visitor.see(f"#report-{area} caption", "foresight on shapes, 5 frames of 64x64 in 3 steps")
        table = visitor.page.locator(f"#report-{area} .vs-scroll")
        assert table.evaluate("(table) => table.scrollWidth - table.clientWidth") <= 0
    # where it scrolls, its rows are two lines high.
    visitor.page.set_viewport_size({"width": 390, "height": 844})
    rows = visitor.page.locator("#report-summary tbody tr")
    assert max(rows.evaluate_all("(rows) => rows.map((row) => row.offsetHeight)")) < 60
    visitor.page.set_viewport_size({"width": 1440, "height": 900})
    # a ratio of runs of a second each would be noise.
    visitor.see("#report-summary", "too short to time")
    playwright.expect(visitor.page.locator("#report-table tbody tr")).to_have_count(4)
    playwright.expect(visitor.page.locator("#report-summary tbody tr")).to_have_count(2)
    playwright.expect(visitor.page.locator("#report-curve .dot.mean")).to_have_count(2)
    link = visitor.page.get_by_role("link", name="Download the report, one page")
    page = visitor.download(link)
    text = page.read_text("utf-8")
    assert text.count("data:video/mp4;base64,") == 4
    assert "Dense against sparse: Foresight on shapes" in text

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


def test_markup_that_slips_into_the_page_runs_no_script(visit: Any) -> None:
    visitor = visit()
    slip = """() => {
      const place = document.querySelector('#generate-status');
      place.insertAdjacentHTML('beforeend', '<img src="data:," onerror="window.broken = 1">');
      const script = document.createElement('script');
      script.textContent = 'window.broken = 2';
      place.append(script);
    }"""
    visitor.value(slip)
    playwright.expect(visitor.page.locator("#generate-status img")).to_have_count(1)
    visitor.page.wait_for_timeout(300)
    assert visitor.value("window.broken") is None
    # the two are reported from different places of the browser, in either order
    refused = [("event handler" in said, "inline script" in said) for said in visitor.errors]
    assert sorted(refused) == [(False, True), (True, False)]
    visitor.errors.clear()


def test_a_shared_page_works_with_gradio_s_scripts_from_outside(
    chromium: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the tunnel alone is left out; the page is the one that its public address shows.
    public = "https://0123456789abcdef.gradio.live"
    monkeypatch.setattr("gradio.networking.setup_tunnel", lambda *_, **__: public)
    files = Path(gradio.__file__).parent / "templates" / "frontend"

    def from_outside(route: Any) -> None:
        file = files / route.request.url.partition(f"/{gradio.__version__}/")[2]
        if file.is_file():
            route.fulfill(path=file, headers={"Access-Control-Allow-Origin": "*"})
        else:
            route.abort()

    serving = {"share": True, "auth": ("anna", "secret")}
    said: list[str] = []
    with served(("shapes",), out / "shared", serving=serving) as (_, url):
        context = chromium.new_context()
        context.route(f"{SHARED_FROM}/**", from_outside)
        context.add_init_script(COUNT_FRAMES)
        page = context.new_page()
        page.emulate_media(reduced_motion="reduce")
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda line: said.append(line.text))
        page.goto(url)
        page.get_by_label("username").fill("anna")
        page.get_by_label("password").fill("secret")
        page.get_by_role("button", name="Login").click()
        page.locator("#generate").wait_for(timeout=PATIENCE)
        # nor does an open page ask for frames of the screen in which nothing moves.
        assert page.evaluate(GROWS_STILL)
        for tab in ("Compare", "Report", "Generate"):
            page.get_by_role("tab", name=tab).click()
        context.close()
    assert [line for line in said if "Content Security Policy" in line] == []


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
    one.page.close()
    two.see("#generate-status", "Your video is ready")
    two.see("#generate-facts", "seed 9")
    playwright.expect(two.page.locator("#history button.thumbnail-item")).to_have_count(1)


def test_the_keyboard_alone_goes_through_everything(visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    for fold in ("More of Foresight", "More settings"):
        visitor.unfold(fold)
    page.locator("#generate").press("Enter")
    visitor.see("#generate-status", "Your video is ready")
    playwright.expect(page.locator("#history button.thumbnail-item")).to_have_count(1)
    assert visitor.missed_by_tab() == []
    page.get_by_role("tab", name="Compare").press("Enter")
    page.locator("#compare").press("Enter")
    visitor.see("#compare-status", "Both videos are ready")
    page.locator("#heat vs-heat svg").press("Enter")
    page.locator("#record-cell").press("Enter")
    visitor.see("#cell-status", "Recorded")
    page.locator("#viewer").get_by_role("button", name="Wipe").press("Enter")
    assert visitor.missed_by_tab() == []
    page.get_by_role("tab", name="Report").press("Enter")
    playwright.expect(page.locator("#report")).to_be_visible()
    assert visitor.missed_by_tab() == []


@pytest.mark.parametrize("width", [390, 760])
def test_on_a_narrow_screen_the_buttons_are_in_reach_and_the_result_in_view(
    visit: Any, width: int
) -> None:
    visitor = visit(viewport={"width": width, "height": 844})
    page = visitor.page
    visitor.value("scrollTo(0, 0)")
    for tab, button in (("Compare", "#compare"), ("Report", "#report"), ("Generate", "#generate")):
        visitor.tab(tab)
        for top in (0, 100_000):
            visitor.value(f"scrollTo(0, {top})")
            playwright.expect(page.locator(button)).to_be_in_viewport(ratio=1)
    # what was started is shown where one looks.
    visitor.value("scrollTo(0, 0)")
    page.click("#generate")
    playwright.expect(page.locator("#generate-status")).to_be_in_viewport()
    visitor.see("#generate-status", "Your video is ready")
    # the form makes room for the result, and comes back when it is asked for.
    playwright.expect(page.locator("#prompt")).to_be_hidden()
    playwright.expect(page.locator("#video")).to_be_in_viewport()
    page.get_by_role("button", name="Settings", exact=True).click()
    playwright.expect(page.locator("#prompt")).to_be_visible()


def test_a_narrow_screen_is_used_from_side_to_side_and_never_scrolls_sideways(visit: Any) -> None:
    visitor = visit(by_hand=False, viewport={"width": 390, "height": 844})
    box = "document.querySelector('#prompt').getBoundingClientRect()"
    for width in (360, 390, 700, 760, 900):
        visitor.page.set_viewport_size({"width": width, "height": 844})
        left, right = visitor.value(f"[{box}.left, innerWidth - {box}.right]")
        assert 0 <= left <= 24, width
        assert 0 <= right <= 24, width
        for tab in ("Compare", "Report", "Generate"):
            visitor.tab(tab)
            assert visitor.value("document.documentElement.scrollWidth") <= width
    # the end of the page is above the bar that stays at the bottom.
    visitor.value("scrollTo(0, document.documentElement.scrollHeight)")
    gap = "document.querySelector('.vs-run').getBoundingClientRect().top - "
    assert (
        visitor.value(f"{gap} document.querySelector('#foot p').getBoundingClientRect().bottom")
        >= 0
    )


def test_focus_is_seen_in_fields_in_the_dark_as_well(visit: Any) -> None:
    visitor = visit(by_hand=False, color_scheme="dark")
    for label in ("Seed", "Prompt"):
        visitor.page.get_by_label(label, exact=True).focus()
        style = visitor.value(
            "(({ outlineStyle, outlineWidth }) => [outlineStyle, outlineWidth])"
            "(getComputedStyle(document.activeElement))"
        )
        assert style == ["solid", "2px"], label
