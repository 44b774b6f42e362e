"""Coming back to the page, in a real browser: what a reload, a link or another browser shows."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")
pytest.importorskip("playwright", reason="playwright drives the browser")

from fault_runs import form
from page_browser import MARKS, commanded, log_of
from page_visitor import PATIENCE, Visitor
from playwright import sync_api as playwright

pytest_plugins = ["page_browser"]
pytestmark = MARKS

# whether a window has kept its form with that seed.
KEPT = """(seed) => JSON.parse(sessionStorage.getItem("vidsparse-form"))?.seed === seed"""
TILES = "#history button.thumbnail-item"
# of each: pixels of the caption that are cut off, across and down, and between it and the picture.
CAPTIONS = """() => [...document.querySelectorAll("#history button.thumbnail-item")].map((tile) => {
  const caption = tile.querySelector(".caption-label"), picture = tile.querySelector("img, video");
  return [
    Math.max(0, caption.scrollWidth - caption.clientWidth),
    Math.max(0, caption.scrollHeight - caption.clientHeight),
    Math.round(caption.getBoundingClientRect().top - picture.getBoundingClientRect().bottom),
  ];
})"""


@pytest.fixture(scope="module")
def url(out: Path) -> Iterator[str]:
    with commanded(out) as address:
        yield address


def _reload(visitor: Visitor) -> list[str]:
    """Open the page again; answers what the browser asked before."""
    asked: list[str] = []

    def answer(dialog: Any) -> None:
        asked.append(dialog.type)
        dialog.accept()

    visitor.page.once("dialog", answer)
    visitor.page.reload()
    visitor.page.wait_for_selector("#prompt textarea")
    visitor.page.wait_for_function("window.vidsparseRestored")
    visitor.page.remove_listener("dialog", answer)
    return asked


def test_a_job_goes_on_over_a_reload_and_nothing_is_lost(visit: Any, url: str) -> None:
    visitor, other = visit(), visit()
    page = visitor.page
    # longer than a reload takes, however busy the machine.
    visitor.set("Steps", 15)
    visitor.prompt("a small blue ring that orbits")
    page.click("#generate")
    visitor.see("#generate-status", "step")
    # leaving asks; the job goes on meanwhile, and its progress is told again.
    assert _reload(visitor) == ["beforeunload"]
    visitor.see("#generate-status", "/ 15")
    playwright.expect(page.locator("#cancel-generate")).to_be_enabled()
    visitor.see("#generate-status", "Your video is ready")
    playwright.expect(page.locator(TILES)).to_have_count(1)
    # nothing runs: nothing asks, and everything is there again.
    assert _reload(visitor) == []
    visitor.see("#generate-status", "Your video is ready")
    visitor.see("#generate-facts", "a small blue ring that orbits")
    visitor.see("#history", "a small blue ring that orbits · foresight")
    # a second window of the same browser shows the same; another browser nothing of it.
    second = visitor.page.context.new_page()
    second.goto(url)
    playwright.expect(second.locator(TILES)).to_have_count(1)
    second.close()
    other.page.reload()
    other.page.wait_for_selector("#opening vs-viewer[data-ready]")
    playwright.expect(other.page.locator("#history")).to_be_hidden()


def test_a_page_that_lost_its_server_opens_again_unasked_with_what_was_written(visit: Any) -> None:
    visitor = visit(by_hand=False)
    page, asked = visitor.page, []

    def stay(dialog: Any) -> None:
        asked.append(dialog.type)
        dialog.dismiss()

    page.on("dialog", stay)
    visitor.set("Steps", 400)
    page.click("#generate")
    visitor.see("#generate-status", "step")
    visitor.value("() => { window.before = true; }")
    page.context.set_offline(True)
    # what it would take is asked for at once, and nobody answers.
    visitor.set("Videos", 2)
    playwright.expect(page.get_by_text("Connection to the server was lost")).to_be_visible()
    # gradio answers no event any more, nor keeps what is written.
    visitor.prompt("a small blue ring that orbits")
    visitor.set("Seed", 11)
    page.context.set_offline(False)
    page.wait_for_function("!window.before && window.vidsparseRestored")
    playwright.expect(page.locator("#prompt textarea")).to_have_value(
        "a small blue ring that orbits"
    )
    playwright.expect(page.get_by_label("Seed", exact=True)).to_have_value("11")
    playwright.expect(page.get_by_label("Steps", exact=True)).to_have_value("400")
    # within --away it goes on, and is told.
    visitor.see("#generate-status", "/ 400")
    page.click("#cancel-generate")
    visitor.see("#generate-status", "Cancelled")
    assert asked == []


def test_a_reload_brings_back_the_form_of_its_own_window(visit: Any, url: str) -> None:
    visitor = visit(by_hand=False)
    other = Visitor(visitor.page.context, url, by_hand=False)
    for each, prompt, seed in ((visitor, "a red ball", 11), (other, "a blue ring", 12)):
        each.prompt(prompt)
        each.set("Seed", seed)
        each.page.wait_for_function(KEPT, arg=seed)
    _reload(visitor)
    new = visitor.page.context.new_page()
    new.goto(url)
    # a new window begins with what was kept last.
    for page, prompt, held in (
        (visitor.page, "a red ball", "11"),
        (other.page, "a blue ring", "12"),
        (new, "a red ball", "11"),
    ):
        playwright.expect(page.locator("#prompt textarea")).to_have_value(prompt)
        playwright.expect(page.get_by_label("Seed", exact=True)).to_have_value(held)
    assert other.errors == []


def test_a_comparison_a_report_and_their_tabs_are_there_after_a_reload(visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    visitor.tab("Report")
    page.fill("#prompts textarea", "a red ball\na blue ring")
    visitor.tab("Compare")
    # long enough to be seen at work, however busy the machine.
    visitor.set("Steps", 10)
    page.click("#compare")
    visitor.see("#compare-status", "step")
    _reload(visitor)
    visitor.see("#compare-status", "Both videos are ready")
    page.wait_for_selector("#viewer vs-viewer[data-ready]")
    _reload(visitor)
    page.wait_for_selector("#viewer vs-viewer[data-ready]")
    visitor.see("#compare-facts", "PSNR")
    visitor.tab("Report")
    playwright.expect(page.locator("#prompts textarea")).to_have_value("a red ball\na blue ring")
    visitor.set("Steps", 8)
    page.click("#report")
    visitor.see("#report-status", "prompt 1 of 2")
    _reload(visitor)
    visitor.see("#report-status", "The report is ready")
    playwright.expect(page.locator("#report-table tbody tr")).to_have_count(2)


def test_a_report_that_is_cancelled_keeps_what_is_finished_also_over_a_reload(visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    visitor.tab("Report")
    page.fill("#prompts textarea", "a red ball\na blue ring")
    visitor.set("Steps", 12)
    page.click("#report")
    visitor.see("#report-status", "prompt 2 of 2")
    page.click("#cancel-report")
    visitor.see("#report-status", "Cancelled")
    for reloads in (False, True):
        if reloads:
            _reload(visitor)
        visitor.see("#report-status", "Cancelled")
        visitor.see("#report-summary", "cancelled: 1 of 2 comparisons")
        playwright.expect(page.locator("#report-table tbody tr")).to_have_count(1)
        found = visitor.download(page.get_by_role("link", name="the report, one page"))
        assert "The report was cancelled: 1 of 2" in found.read_text(encoding="utf-8")


def test_a_reload_at_any_moment_loses_nothing(visit: Any, out: Path) -> None:
    visitor, chance = visit(), random.Random(24)
    page = visitor.page

    def logged(words: str) -> int:
        return log_of(out).read_text(encoding="utf-8").count(words)

    # the last one is a comparison, whose tab is open then.
    reloads, made = form(short=4, long=20), 0
    for seed in range(reloads):
        visitor.prompt(f"a red ball and {seed} rings")
        visitor.set("Seed", seed)
        # a comparison's sides are two videos.
        tab, videos = ("Compare", 2) if seed % 4 == 3 else ("Generate", 1)
        made += videos
        visitor.tab(tab)
        words = f"a job was taken: {tab.lower()}"
        taken = logged(words)
        while logged(words) == taken:
            refused = logged("your share of this page")
            page.click(f"#{tab.lower()}")
            # some at once, before the server has heard of it.
            page.wait_for_timeout(chance.uniform(0, 2500) if seed % 4 else 0)
            _reload(visitor)
            until = time.monotonic() + PATIENCE / 1000
            while logged(words) == taken and logged("your share of this page") == refused:
                assert time.monotonic() < until, "the click was lost"
                page.wait_for_timeout(20)
            # a slow machine has more jobs waiting than one visitor may have.
            if logged(words) == taken:
                page.wait_for_timeout(1000)
        # the settings and the open tab as they were.
        playwright.expect(page.get_by_role("tab", name=tab)).to_have_attribute(
            "aria-selected", "true"
        )
        prompt = page.locator("#prompt textarea")
        playwright.expect(prompt).to_have_value(f"a red ball and {seed} rings")
    visitor.see("#compare-status", "Both videos are ready")
    visitor.tab("Generate")
    visitor.see("#generate-status", "Your video is ready")
    playwright.expect(page.locator(TILES)).to_have_count(made)
    captions = page.locator("#history").inner_text()
    assert [seed for seed in range(reloads) if f"seed {seed} ·" not in captions] == []


def test_of_several_jobs_of_one_visitor_cancel_stops_the_one_that_is_shown(visit: Any) -> None:
    visitor = visit()
    page, cancel = visitor.page, visitor.page.locator("#cancel-generate")
    # the first still runs once the third is asked for, however busy the machine. A server that is
    # asked twice at once may take either first.
    for seed, steps, stands in (
        (1, 400, "/ 400"), (2, 4, "1 more of yours waits"), (3, 4, "2 more of yours wait"),
    ):  # fmt: skip
        visitor.set("Steps", steps)
        visitor.set("Seed", seed)
        page.click("#generate")
        visitor.see("#generate-status", stands)
        playwright.expect(cancel).to_have_text("Cancel" if seed == 1 else "Cancel this one")
    cancel.click()
    # those that waited for it are made.
    visitor.see("#generate-facts", "seed 3")
    playwright.expect(page.locator(TILES)).to_have_count(2)
    visitor.see("#history", "seed 2")
    playwright.expect(cancel).to_have_text("Cancel")
    playwright.expect(cancel).to_be_disabled()


KEEP_CLICK = """() => {
  addEventListener("click", (click) => { window.clicked = click.timeStamp; }, true);
}"""
# a tap as a device tells it that does not count clicks, so long after the last one.
TAP = """(button) => {
  const tap = new MouseEvent("click", { bubbles: true, detail: 1 });
  Object.defineProperty(tap, "timeStamp", { value: window.clicked + 300 });
  button.dispatchEvent(tap);
}"""


def test_a_double_click_on_cancel_stops_one_job(visit: Any) -> None:
    visitor, other = visit(), visit()
    page, cancel = visitor.page, visitor.page.locator("#cancel-generate")
    job = page.locator("#generate-status .vs-status")
    other.set("Steps", 400)
    for place, press in enumerate(("mouse", "tap", "key")):
        # it holds the device, so that those of the first visitor wait.
        other.page.click("#generate")
        # not what is left there of its last job, which was called off at a step of 400 as well.
        other.see("#generate-status .vs-status[data-state='running']", "/ 400")
        stopped, kept = 2 * place + 1, 2 * place + 2
        # one after the other: a server that is asked twice at once may take either first.
        for seed, stands in ((stopped, "1 job before yours"), (kept, "1 more of yours waits")):
            visitor.set("Seed", seed)
            page.click("#generate")
            visitor.see("#generate-status", stands)
        first = job.get_attribute("data-job")
        page.evaluate(KEEP_CLICK)
        if press == "key":
            cancel.focus()
            page.keyboard.down("Enter")
        else:
            cancel.click()
        # the second has taken the first one's place, and would be stopped.
        playwright.expect(job).not_to_have_attribute("data-job", first)
        playwright.expect(cancel).to_have_text("Cancel")
        playwright.expect(cancel).to_be_enabled()
        if press == "key":
            page.keyboard.down("Enter")
            page.keyboard.up("Enter")
        elif press == "tap":
            cancel.evaluate(TAP)
        else:
            cancel.hover()
            page.mouse.down(click_count=2)
            page.mouse.up(click_count=2)
        other.page.click("#cancel-generate")
        visitor.see("#generate-facts", f"seed {kept}")
        visitor.see("#history", f"seed {kept}")
        playwright.expect(page.locator(TILES)).to_have_count(place + 1)


def test_the_gallery_is_searched_by_prompt_and_method(visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    for prompt in ("a red ball", "a blue ring"):
        visitor.prompt(prompt)
        page.click("#generate")
        visitor.see("#generate-facts", prompt)
    playwright.expect(page.locator(TILES)).to_have_count(2)
    # captions are whole, and below their pictures.
    for cut, hidden, gap in page.evaluate(CAPTIONS):
        assert (cut, hidden) == (0, 0)
        assert gap >= 0
    page.fill("#search :is(input, textarea)", "blue foresight")
    playwright.expect(page.locator(TILES)).to_have_count(1)
    page.locator(TILES).click()
    visitor.see("#generate-facts", "a blue ring")
    page.fill("#search :is(input, textarea)", "green")
    playwright.expect(page.locator(TILES)).to_have_count(0)
    visitor.see("#history", "No video is like that")
    page.fill("#search :is(input, textarea)", "")
    playwright.expect(page.locator(TILES)).to_have_count(2)


def test_two_kept_videos_are_compared_by_wipe_and_flip(visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    for seed in (1, 2):
        visitor.set("Seed", seed)
        page.click("#generate")
        visitor.see("#generate-facts", f"seed {seed}")
    page.click("#compare-this")
    playwright.expect(page.locator("#side-a input")).to_have_value(re.compile("seed 2"))
    visitor.tab("Generate")
    page.locator(TILES).nth(1).click()
    visitor.see("#generate-facts", "seed 1")
    page.click("#compare-this")
    playwright.expect(page.locator("#side-b input")).to_have_value(re.compile("seed 1"))
    page.click("#compare")
    visitor.see("#compare-facts", "as encoded")
    page.wait_for_selector("#viewer vs-viewer[data-ready]")
    names = page.locator("#viewer figcaption").all_inner_texts()
    assert names[:2] == [f"A: {_made(page, 2)}", f"B: {_made(page, 1)}"]
    for area in ("#time-pair", "#heat"):
        playwright.expect(page.locator(area)).to_be_hidden()

    # one over the other up to a line, by hand and by keys; then one at a time.
    viewer = page.locator("#viewer vs-viewer")
    figures = viewer.locator("figure")
    viewer.get_by_role("button", name="Wipe").click()
    wiper = viewer.locator(".wiper")
    wiper.press("Home")
    line = "(stage) => getComputedStyle(stage).getPropertyValue('--wipe')"
    assert viewer.locator(".stage").evaluate(line) == "0%"
    box = viewer.locator("canvas").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2)
    playwright.expect(wiper).to_have_value("75")
    flip = viewer.get_by_role("button", name="Flip")
    for hidden, shown in ((1, 0), (0, 1), (1, 0)):
        flip.click()
        playwright.expect(figures.nth(hidden)).to_be_hidden()
        playwright.expect(figures.nth(shown)).to_be_visible()
    viewer.get_by_role("button", name="Full screen").click()
    playwright.expect(viewer.get_by_role("button", name="Leave full screen")).to_be_visible()
    viewer.get_by_role("button", name="Leave full screen").click()

    # a kept one beside what the form says now.
    visitor.set("share", 0.6)
    page.click("#side-b input")
    page.get_by_role("option", name="the form's settings").click()
    page.click("#compare")
    playwright.expect(page.locator("#viewer figcaption").nth(1)).to_have_text(
        "B: foresight · seed 2"
    )

    # the same twice is no comparison.
    page.click("#side-b input")
    # of the two with that seed the older, once the newer one is in the list.
    of_seed = page.get_by_role("option").filter(has_text="seed 2 ·")
    playwright.expect(of_seed).to_have_count(2)
    of_seed.last.click()
    page.click("#compare")
    visitor.see("#compare-status [role=alert]", "both sides are the same")


def test_what_is_done_with_a_video_or_a_comparison_is_done_with_the_one_that_is_shown(
    visit: Any, url: str, out: Path
) -> None:
    visitor = visit()
    page = visitor.page
    other = Visitor(page.context, url)
    seed = page.get_by_label("Seed", exact=True)
    # the other window of the same visitor makes the later video, and the later comparison.
    for each, own in ((visitor, 1), (other, 2)):
        each.set("Seed", own)
        each.page.click("#generate")
        each.see("#generate-facts", f"seed {own}")
    visitor.set("Seed", 7)
    page.click("#use-settings")
    playwright.expect(seed).to_have_value("1")
    page.click("#compare-this")
    playwright.expect(page.locator("#side-a input")).to_have_value(re.compile("seed 1"))
    page.click("#side-a input")
    page.get_by_role("option", name="dense, made beside B").click()
    other.tab("Compare")
    # long enough for a window to be opened while it is timed.
    visitor.set("Steps", 10)
    other.set("Steps", 2)
    for each in (visitor, other):
        each.page.click("#compare")
        each.see("#compare-status", "Both videos are ready")
    psnr = page.locator("#compare-facts .vs-tiles div", has_text="PSNR").first
    before = psnr.inner_text()
    # the second one has no such step.
    for each, step, layer in ((visitor, 10, 3), (other, 2, 2)):
        place = f"[data-step='{step - 1}'][data-layer='{layer - 1}']"
        each.page.locator(f"#heat vs-heat rect{place}").click()
        each.page.click("#record-cell")
        each.see("#cell-status", "Recorded")
        each.see("#cell", f"layer {layer}, head 1")
    page.get_by_label("raster", exact=True).check()
    visitor.see("#cell", "tokens in raster order")
    visitor.see("#cell", "layer 3, head 1")
    # a window that is opened meanwhile shows the later one until then.
    frame = page.locator("#viewer vs-viewer .seek")
    frame.press("End")
    page.click("#time-pair")
    visitor.see("#compare-status", "turn 1 of 3")
    _reload(other)
    other.see("#compare-status", "turn")
    other_psnr = other.page.locator("#compare-facts .vs-tiles div", has_text="PSNR").first
    assert other_psnr.inner_text() != before
    for each in (visitor, other):
        each.see("#compare-status", "Timed 3 times in turns")
        each.see("#cell", "layer 3, head 1")
    assert (psnr.inner_text(), other_psnr.inner_text()) == (before, before)
    assert other.page.locator("#viewer vs-viewer").get_attribute("data-key") == page.locator(
        "#viewer vs-viewer"
    ).get_attribute("data-key")
    # what was chosen in the viewer and in the map stays as it was.
    playwright.expect(frame).to_have_value("4")
    visitor.see("#heat .heads", "step 10, layer 3")
    # what is gone is said, and nothing else stands in for it.
    # of all visits' first videos the one that was made last is this visitor's.
    first = (out / "page").glob("*/0001-*.json")
    max(first, key=lambda record: record.stat().st_mtime).unlink()
    visitor.tab("Generate")
    visitor.set("Seed", 7)
    page.click("#use-settings")
    playwright.expect(page.get_by_text("the video that is shown here is gone")).to_be_visible()
    playwright.expect(seed).to_have_value("7")
    assert other.errors == []


def _made(page: Any, seed: int) -> str:
    """How the chosen video of that seed is called."""
    name = page.locator(f"#side-{'ab'[2 - seed]} input").input_value()
    return " · ".join(name.split(" · ")[:2])


def test_a_link_carries_all_settings(visit: Any) -> None:
    visitor, other = visit(), visit()
    page = visitor.page
    visitor.prompt("a large red ball that moves right")
    visitor.set("Seed", 12)
    visitor.set("share", 0.055)
    page.click("#make-link")
    link = page.locator("#link :is(input, textarea)")
    playwright.expect(link).to_have_value(re.compile(r"#settings=%7B"))
    other.page.goto("about:blank")
    other.page.goto(link.input_value())
    playwright.expect(other.page.locator("#prompt textarea")).to_have_value(
        "a large red ball that moves right"
    )
    other.unfold("By hand")
    for label, value in (("Seed", "12"), ("share", "0.055"), ("Width", "64")):
        playwright.expect(other.page.get_by_label(label, exact=True)).to_have_value(value)
    # what is changed then outlives a reload, and the link is gone from the address.
    assert "#" not in other.page.url
    # put into the address of the page as it stands, it is taken as well; nothing is opened anew.
    other.set("Seed", 13)
    other.value("() => { window.before = true; }")
    other.page.goto(link.input_value())
    playwright.expect(other.page.get_by_label("Seed", exact=True)).to_have_value("12")
    assert "#" not in other.page.url
    assert other.value("window.before")
    # one that was cut short says so.
    other.page.goto("about:blank")
    other.page.goto(link.input_value()[:-20])
    playwright.expect(other.page.get_by_text("the link's settings do not fit")).to_be_visible()
