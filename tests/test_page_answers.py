"""What is written or chosen while an answer of the page's server is due, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")
pytest.importorskip("playwright", reason="playwright drives the browser")

from page_browser import MARKS, commanded, held
from playwright import sync_api as playwright

from vidsparse.apps.page.offers import titled
from vidsparse.apps.page.values import amount_text
from vidsparse.pipelines.family import SCHEDULED
from vidsparse.pipelines.models import resolve_model

pytest_plugins = ["page_browser"]
pytestmark = MARKS

# the schedule's fields as the page calls them, in the order of ``SCHEDULED``.
FIELDS = ("first steps", "first layers", "last layers", "Steps a plan serves", "Refreshes")
CALLS = "**/queue/join*"

# before any script of the page: types a text from the first sight of the prompt until the page has
# asked for the settings to put back, and once more.
TYPE = """
const typing = setInterval(() => {
  const field = document.querySelector("#prompt textarea");
  if (!field) return;
  field.value = "a large red ball";
  field.dispatchEvent(new Event("input", { bubbles: true }));
  if (window.vidsparseRestored === undefined) return;
  clearInterval(typing);
  window.typed = true;
});
"""


@pytest.fixture(scope="module")
def url(out: Path) -> Iterator[str]:
    with commanded(out, "--model", "shapes", "--model", "shapes-joint") as address:
        yield address


@contextmanager
def _late(page: Any, refused: str | None = None) -> Iterator[None]:
    """What the page asks of its server comes there once the block has ended.

    What ``refused`` stands in never does: the page is told so.
    """
    asked: list[Any] = []
    ended = False
    page.route(CALLS, lambda call: call.continue_() if ended else asked.append(call))
    yield
    ended = True
    for call in asked:
        if refused is not None and refused in call.request.post_data:
            call.fulfill(status=500, json={"detail": "refused"})
        else:
            call.continue_()


def test_what_is_typed_before_the_settings_are_back_stays(visit: Any) -> None:
    visitor = visit(by_hand=False)
    visitor.prompt("a small blue ring that orbits")
    visitor.set("Seed", 11)
    visitor.page.click("#make-link")
    link = visitor.page.locator("#link :is(input, textarea)")
    playwright.expect(link).to_have_value(re.compile("#settings="))
    opened = visitor.page.context.new_page()
    opened.add_init_script(TYPE)
    with _late(opened):
        opened.goto(link.input_value())
        opened.wait_for_function("window.typed")
    opened.wait_for_function("window.vidsparseRestored")
    _shows(opened, seed="11", prompt="a large red ball")
    # both are kept, for a window that is new.
    new = visitor.page.context.new_page()
    new.goto(visitor.page.url)
    _shows(new, seed="11", prompt="a large red ball")


def test_what_a_browser_kept_is_asked_for_until_the_server_answers(visit: Any) -> None:
    visitor = visit(by_hand=False)
    page = visitor.page
    visitor.prompt("a small blue ring that orbits")
    visitor.set("Seed", 11)
    visitor.calls_at_rest()
    lost: list[Any] = []

    def busy(call: Any) -> None:
        if len(lost) < 2 and r"\"name\":\"kept\"" in call.request.post_data:
            lost.append(call)
            # as a proxy says it; where there is no answer at all gradio loads the page anew.
            call.fulfill(status=503, json={"detail": "not now"})
        else:
            call.continue_()

    page.route(CALLS, busy)
    page.reload()
    # chosen meanwhile, it waits until they are there.
    page.get_by_label("fast", exact=True).check()
    _shows(page, seed="11", prompt="a small blue ring that orbits")
    assert len(lost) == 2
    playwright.expect(page.get_by_label("fast", exact=True)).to_be_checked()
    visitor.calls_at_rest()
    page.reload()
    _shows(page, seed="11", prompt="a small blue ring that orbits")
    playwright.expect(page.get_by_label("fast", exact=True)).to_be_checked()


@pytest.mark.parametrize("chosen", ["before the refusal", "after it"])
def test_a_model_chosen_before_the_server_is_asked_again_is_answered(
    visit: Any, chosen: str
) -> None:
    visitor = visit(by_hand=False)
    page = visitor.page
    visitor.set("Seed", 11)
    visitor.calls_at_rest()
    refused: list[Any] = []
    asked: list[Any] = []
    late: list[Any] = []

    def busy(call: Any) -> None:
        told = call.request.post_data
        if r"\"name\":\"kept\"" in told:
            # how often it was refused before depends on how long the choice took.
            (late if asked else refused).append(call)
            if chosen == "after it":
                call.fulfill(status=503, json={"detail": "not now"})
        elif r"\"name\":\"model\"" in told:
            asked.append(call)
        else:
            call.continue_()

    page.route(CALLS, busy)
    page.reload()
    page.get_by_label("Model", exact=True).click()
    page.get_by_role("option", name="shapes-joint", exact=True).click()
    if chosen == "before the refusal":
        # behind a question that is not answered yet, the model waits.
        page.wait_for_timeout(1000)
        assert (len(refused), len(asked)) == (1, 0)
        refused[0].fulfill(status=503, json={"detail": "not now"})
    # its answer comes once the page would have asked again for what the browser kept: that is after
    # eight seconds at most.
    page.wait_for_timeout(9000)
    for call in asked:
        call.continue_()
    visitor.see("#model-card", resolve_model("shapes-joint").description)
    steps = str(resolve_model("shapes-joint").defaults.steps)
    playwright.expect(page.get_by_label("Steps", exact=True)).to_have_value(steps)
    visitor.calls_at_rest()
    playwright.expect(page.get_by_label("Model", exact=True)).to_have_value("shapes-joint")
    playwright.expect(page.get_by_label("Steps", exact=True)).to_have_value(steps)
    visitor.see("#model-card", resolve_model("shapes-joint").description)
    assert refused
    assert not late


def test_the_settings_of_a_video_bring_its_model_and_what_is_said_of_it(visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    page.click("#generate")
    visitor.see("#generate-status", "Your video is ready")
    field = page.get_by_label("Model", exact=True)
    field.click()
    page.get_by_role("option", name="shapes-joint", exact=True).click()
    visitor.see("#model-card", resolve_model("shapes-joint").description)
    page.click("#use-settings")
    visitor.see("#model-card", resolve_model("shapes").description)
    playwright.expect(field).to_have_value("shapes")


def _shows(page: Any, *, seed: str, prompt: str) -> None:
    playwright.expect(page.get_by_label("Seed", exact=True)).to_have_value(seed)
    playwright.expect(page.locator("#prompt textarea")).to_have_value(prompt)


@pytest.mark.parametrize("first", [None, "fast"])
def test_a_method_chosen_while_a_model_is_still_due_has_that_model_s_schedule(
    visit: Any, first: str | None
) -> None:
    visitor = visit()
    page = visitor.page
    field = lambda label: page.get_by_label(label, exact=True)  # noqa: E731
    visitor.unfold("More settings")
    for model, method in (("shapes-joint", "sale"), ("shapes", "xattention")):
        visitor.calls_at_rest()
        with held(page.evaluate("new URL('/', location).href")):
            # what is being answered has the model wait for its turn.
            if first:
                field(first).check()
            for label, option in (("Model", model), ("Method", titled(method)[0])):
                field(label).click()
                page.get_by_role("option", name=option, exact=True).click()
        own = resolve_model(model).defaults.with_method(method)
        playwright.expect(field("Steps")).to_have_value(str(own.steps))
        for label, name in zip(FIELDS, SCHEDULED, strict=True):
            value = amount_text(getattr(own, name))
            playwright.expect(field(label), label).to_have_value(value)
        playwright.expect(page.locator("#method input")).to_have_value(titled(method)[0])


def test_what_waits_for_an_answer_that_never_comes_is_answered_all_the_same(visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    tau = page.get_by_label("tau", exact=True)
    visitor.calls_at_rest()
    playwright.expect(tau).to_be_hidden()
    with _late(page, refused=r"\"name\":\"model\""):
        for label, option in (("Model", "shapes-joint"), ("Method", titled("sale")[0])):
            page.get_by_label(label, exact=True).click()
            page.get_by_role("option", name=option, exact=True).click()
    playwright.expect(tau).to_be_visible()


def test_a_model_that_is_merely_left_changes_no_numbers(visit: Any) -> None:
    visitor = visit(by_hand=False)
    page = visitor.page
    model = page.get_by_label("Model", exact=True)
    visitor.set("Steps", 7)
    calls = visitor.calls_at_rest()
    model.focus()
    model.press("Tab")
    model.click()
    page.get_by_role("option", name="shapes", exact=True).click()
    model.press("Tab")
    # its answer would be there.
    page.wait_for_timeout(1500)
    playwright.expect(page.get_by_label("Steps", exact=True)).to_have_value("7")
    assert visitor.calls() == calls
    # another one brings its own.
    model.click()
    page.get_by_role("option", name="shapes-joint", exact=True).click()
    steps = str(resolve_model("shapes-joint").defaults.steps)
    playwright.expect(page.get_by_label("Steps", exact=True)).to_have_value(steps)


def test_a_speed_stays_where_lists_are_merely_left_and_goes_with_its_words_otherwise(
    visit: Any,
) -> None:
    visitor = visit()
    page = visitor.page
    visitor.unfold("More of Foresight")
    by_hand = page.get_by_label("by hand", exact=True)
    page.get_by_label("fast", exact=True).check()
    visitor.see("#speed-facts", "fast: ")
    visitor.calls_at_rest()
    lists = page.locator("#by-hand [role=combobox]:visible, #by-hand input[role=listbox]:visible")
    # the method, the preset and those of the method's own.
    assert lists.count() > 2
    for left in lists.all():
        left.focus()
        left.press("Tab")
    # what is left says so at once.
    page.wait_for_timeout(500)
    playwright.expect(page.get_by_label("fast", exact=True)).to_be_checked()
    visitor.see("#speed-facts", "fast: ")
    # a choice is by hand, also while the speed is still being answered.
    with _late(page):
        page.get_by_label("high", exact=True).check()
        # what it stands for is read at once; its numbers come from the server.
        visitor.see("#speed-facts", "high: ")
        visitor.set("share", 0.3)
        playwright.expect(by_hand).to_be_checked()
        visitor.see("#speed-facts", "The numbers under By hand are what runs.")
    visitor.calls_at_rest()
    playwright.expect(by_hand).to_be_checked()
    visitor.see("#speed-facts", "The numbers under By hand are what runs.")


def test_numbers_stay_where_a_model_is_left_after_a_refusal(visit: Any) -> None:
    visitor = visit(by_hand=False)
    page = visitor.page
    refused: list[Any] = []

    def busy(call: Any) -> None:
        if not refused and r"\"name\":\"speed\"" in call.request.post_data:
            refused.append(call)
            call.fulfill(status=503, json={"detail": "not now"})
        else:
            call.continue_()

    page.route(CALLS, busy)
    page.get_by_label("fast", exact=True).check()
    visitor.calls_at_rest()
    assert len(refused) == 1
    # what would run is not what that speed stands for.
    playwright.expect(page.get_by_label("by hand", exact=True)).to_be_checked()
    visitor.see("#speed-facts", "The numbers under By hand are what runs.")
    visitor.set("Steps", 7)
    model = page.get_by_label("Model", exact=True)
    model.focus()
    model.press("Tab")
    page.wait_for_timeout(1500)
    playwright.expect(page.get_by_label("Steps", exact=True)).to_have_value("7")


def test_what_is_varied_stays_while_it_is_offered_and_takes_its_values_along(visit: Any) -> None:
    visitor = visit(by_hand=False)
    page = visitor.page
    visitor.tab("Report")
    vary, over = page.locator("#vary input"), page.locator("#over :is(input, textarea)")

    def choose(option: str) -> None:
        vary.click()
        page.get_by_role("option", name=option, exact=True).click()

    choose("share")
    over.fill("0.05, 0.2")
    page.get_by_label("fast", exact=True).check()
    visitor.calls_at_rest()
    playwright.expect(vary).to_have_value("share")
    playwright.expect(over).to_have_value("0.05, 0.2")
    choose("nothing")
    playwright.expect(over).to_have_count(0)
    choose("share")
    playwright.expect(over).to_have_value("")
    # dense has no share.
    page.get_by_label("exact", exact=True).check()
    playwright.expect(vary).to_have_value("nothing")
