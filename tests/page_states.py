"""Every state of the page, one after the other: what tests look at, and what the docs show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from page_browser import Latch, held
from page_visitor import SMALL, Visitor
from playwright import sync_api as playwright

WIDTHS = {1440: 1000, 760: 1000, 390: 844}
"""The widths that are looked at, and how high a window is there."""

SCHEMES = ("light", "dark")

# so many steps of so large a video that it runs for as long as it is looked at.
_LONG = {"Steps": 400, "Frames (4k+1)": 17, "Width": 128, "Height": 128}
# milliseconds after which a press of Cancel is one of its own, and some to spare.
DOUBLE_CLICK = 700
_DRAWN = "() => [...document.images].every((image) => image.complete || image.loading === 'lazy')"
_SEEN = "(away) => document.querySelector('vs-fold')?.fold(away)"
# in the place of another visit, with the settings that are there; at once, not by a transition.
_DARK = """(dark) => {
  document.body.classList.toggle("dark", dark);
  if (document.getElementById("at-once")) return;
  const style = Object.assign(document.createElement("style"), { id: "at-once" });
  style.textContent = "* { transition: none !important; }";
  document.head.append(style);
}"""


def looks(page: Any, area: str) -> Iterator[tuple[int, str]]:
    """Show ``area`` at every width, in light and dark, the form folded where it is elsewhere.

    The page's server stands still meanwhile: a state that passes lasts as long as it is looked at.
    """
    in_form = area in ("#form", "#by-hand", ".vs-wrong")
    page.wait_for_function(_DRAWN)
    with held(page.evaluate("new URL('/', location).href")):
        # there and back, so that a window changes its width once less.
        widths = list(WIDTHS.items())
        for scheme, sizes in zip(SCHEMES, (widths, widths[::-1]), strict=True):
            page.emulate_media(color_scheme=scheme)
            page.evaluate(_DARK, scheme == "dark")
            for width, height in sizes:
                page.set_viewport_size({"width": width, "height": height})
                page.evaluate(_SEEN, width <= 900 and not in_form)
                place = page.locator(area).first
                block = "center" if area == ".vs-wrong" else "start"
                place.evaluate(f"(place) => place.scrollIntoView({{ block: '{block}' }})")
                yield width, scheme
    page.evaluate(_SEEN, False)
    page.emulate_media(color_scheme="light")
    page.evaluate(_DARK, False)
    page.set_viewport_size({"width": 1440, "height": WIDTHS[1440]})


def states(
    visitor: Visitor,
    another: Callable[[], Visitor],
    latch: Latch,
    small: Mapping[str, Any] = SMALL,
) -> Iterator[tuple[str, str]]:
    """Bring a newcomer's page into one state after the other.

    Args:
        visitor: has opened the page for the first time, just after it was served, and touched
            nothing.
        another: opens the page once more, for jobs of somebody else's.
        latch: of the page, which is lifted once it has been seen to wait for the model.
        small: settings of the videos that are made.

    Yields:
        What the state is, and the selector of what is to be seen then.
    """
    page = visitor.page
    page.wait_for_selector("#opening vs-viewer[data-ready]")
    yield "as it opens", "body"
    page.click("#generate")
    visitor.see("#generate-status", "Loading the model")
    yield "while the model loads", "#tabs"
    _called_off(visitor, "generate")
    latch.lift()
    yield from _typing(visitor)
    yield from _queue(visitor, another())
    for label, value in small.items():
        visitor.set(label, value)
    yield from _videos(visitor)
    yield from _comparisons(visitor)
    yield from _reports(visitor)
    page.get_by_role("link", name="Studies of every method").click()
    page.wait_for_selector(".vs-study")
    yield "studies of every method", "body"
    page.locator(".vs-study summary").first.click()
    yield "studies: the rows", ".vs-study details"


def _called_off(visitor: Visitor, tab: str, jobs: int = 1) -> None:
    page, status = visitor.page, f"#{tab}-status .vs-status"
    for left in reversed(range(jobs)):
        job = page.locator(status).get_attribute("data-job")
        page.click(f"#cancel-{tab}")
        if left:
            playwright.expect(page.locator(status)).not_to_have_attribute("data-job", job)
            # sooner, the next press would be the second of a double click.
            page.wait_for_timeout(DOUBLE_CLICK)
    playwright.expect(page.locator(f"#cancel-{tab}")).to_be_disabled()
    visitor.see(f"#{tab}-status", "Cancelled")


def _typing(visitor: Visitor) -> Iterator[tuple[str, str]]:
    page = visitor.page
    visitor.prompt("a cat that chases a large red ball")
    playwright.expect(page.locator("#model-card mark")).to_have_text(["cat", "chases"])
    page.locator("#target :is(input, textarea)").fill("35 dB")
    playwright.expect(page.get_by_label("fast", exact=True)).to_be_checked()
    yield "unknown words, and a speed by its quality", "#form"
    for fold in ("By hand", "More of Foresight", "More settings"):
        visitor.unfold(fold)
    page.click("#make-link")
    playwright.expect(page.locator("#link :is(input, textarea)")).to_be_visible()
    yield "all settings, and a link with them", "#by-hand"
    page.click("#preset input")
    page.get_by_role("option", name="shapes-bsfa").click()
    playwright.expect(page.locator("#method input")).to_have_value("BSFA (bsfa)")
    yield "a preset leaves little open", "#by-hand"
    page.click("#preset input")
    page.get_by_role("option", name="none: numbers by hand").click()
    playwright.expect(page.locator("#method input")).to_have_value("Foresight (foresight)")
    page.get_by_label("high", exact=True).check()
    visitor.prompt("a large red ball that moves right on a plain navy background")


def _queue(visitor: Visitor, other: Visitor) -> Iterator[tuple[str, str]]:
    page = visitor.page
    for each in (other, visitor):
        for label, value in _LONG.items():
            each.set(label, value)
    other.page.click("#generate")
    other.see("#generate-status", "step")
    page.click("#generate")
    visitor.see("#generate-status", "1 job before yours")
    yield "waiting in line", "#tabs"
    other.page.click("#cancel-generate")
    visitor.see("#generate-status", "step")
    for behind in ("1 more of yours waits", "2 more of yours wait"):
        page.click("#generate")
        visitor.see("#generate-status", behind)
    visitor.see("#generate-status", "left")
    visitor.see("#generate-outlook", "3 jobs before yours")
    yield "running, with two more in line", "#tabs"
    _called_off(visitor, "generate", jobs=3)
    visitor.see("#generate-outlook", "begins at once")
    yield "cancelled", "#tabs"


def _videos(visitor: Visitor) -> Iterator[tuple[str, str]]:
    page = visitor.page
    visitor.set("Videos", 2)
    page.click("#generate")
    visitor.see("#generate-status", "Your 2 videos are ready")
    visitor.set("Videos", 1)
    page.wait_for_function("document.querySelector('#video video')?.readyState >= 2")
    playwright.expect(page.locator("#history button.thumbnail-item")).to_have_count(2)
    page.get_by_role("button", name="Record").click()
    playwright.expect(page.locator("#record")).to_be_visible()
    yield "videos, what they cost, and the record", "#tabs"
    page.get_by_role("button", name="Record").click()
    page.fill("#search :is(input, textarea)", "no such thing")
    visitor.see("#history", "No video is like that")
    yield "a search that finds nothing", "#search"
    page.fill("#search :is(input, textarea)", "")
    playwright.expect(page.locator("#history button.thumbnail-item")).to_have_count(2)
    width = page.get_by_label("Width", exact=True).input_value()
    visitor.set("Width", 63)
    page.click("#generate")
    playwright.expect(page.locator(".vs-wrong")).to_contain_text("width must be a multiple")
    yield "an error at its field", ".vs-wrong"
    visitor.set("Width", width)
    playwright.expect(page.locator(".vs-wrong")).to_have_count(0)


def _comparisons(visitor: Visitor) -> Iterator[tuple[str, str]]:
    page = visitor.page
    visitor.tab("Compare")
    yield "Compare, before anything", "#tabs"
    page.click("#compare")
    visitor.see("#compare-status", "Both videos are ready")
    page.wait_for_selector("#viewer vs-viewer[data-ready]")
    yield "a comparison", "#tabs"
    share = page.get_by_label("share", exact=True).input_value()
    visitor.set("share", 0.3)
    page.click("#compare")
    visitor.see("#compare-facts", "dense kept from")
    yield "a dense side kept from before", "#tabs"
    visitor.set("share", share)
    page.click("#time-pair")
    visitor.see("#compare-status", "times in turns")
    # of the last step, which is sparse.
    page.locator("#heat vs-heat rect[data-layer='2']").last.click()
    visitor.see("#heat .heads", "head 1")
    page.click("#record-cell")
    visitor.see("#cell-status", "Recorded")
    yield "where attention was sparse, and a cell's map", "#heat"
    page.locator("#viewer").get_by_role("button", name="Wipe").click()
    yield "one over the other, by a wipe", "#viewer"
    page.locator("#viewer").get_by_role("button", name="Flip").click()
    page.locator("#viewer").get_by_role("button", name="Full screen").click()
    page.wait_for_function("document.fullscreenElement")
    yield "one at a time, on the full screen", "#viewer vs-viewer"
    page.locator("#viewer").get_by_role("button", name="Leave full screen").click()
    for side, place in (("A", 0), ("B", 1)):
        page.get_by_label(side, exact=True).click()
        page.get_by_role("option").filter(has_text="seed").nth(place).click()
    page.click("#compare")
    visitor.see("#compare-facts", "as encoded")
    yield "any two videos", "#tabs"
    page.get_by_label("B", exact=True).click()
    page.get_by_role("option").filter(has_text="seed").nth(0).click()
    page.click("#compare")
    visitor.see("#compare-status [role=alert]", "both sides are the same")
    yield "an error that is about no field", "#tabs"


def _reports(visitor: Visitor) -> Iterator[tuple[str, str]]:
    page = visitor.page
    visitor.tab("Report")
    yield "Report, before anything", "#tabs"
    page.click("#vary input")
    page.get_by_role("option", name="share").click()
    page.fill("#over :is(input, textarea)", "0.05, 0.2, 0.6")
    few = {label: page.get_by_label(label, exact=True).input_value() for label in _LONG}
    for label, value in _LONG.items():
        visitor.set(label, value)
    page.click("#report")
    visitor.see("#report-status", "prompt 1 of 2, setting 1 of 3")
    visitor.see("#report-status", "left")
    yield "a report at work", "#tabs"
    _called_off(visitor, "report")
    for label, value in few.items():
        visitor.set(label, value)
    page.click("#report")
    visitor.see("#report-status", "The report is ready")
    yield "a report over two prompts and three settings", "#report-status"
