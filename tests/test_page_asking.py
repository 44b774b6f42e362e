"""The form in a real browser: what is asked for, what is made of it, and what is said of errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")
pytest.importorskip("playwright", reason="playwright drives the browser")

from page_browser import MARKS, commanded, held
from page_visitor import SMALL
from playwright import sync_api as playwright

from vidsparse.methods import METHODS
from vidsparse.pipelines.calibrate import calibrate
from vidsparse.pipelines.models import load, resolve_model
from vidsparse.pipelines.request import GenerateRequest

pytest_plugins = ["page_browser"]
pytestmark = MARKS


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
    with commanded(out, "--preset", str(preset.parent)) as address:
        yield address


def test_the_page_is_understood_before_anything_runs(visit: Any) -> None:
    visitor = visit(by_hand=False, viewport={"width": 1440, "height": 900})
    page = visitor.page
    # a finished comparison, in step, with what it cost.
    page.wait_for_selector("#opening vs-viewer[data-ready]")
    # numbers set below the first screen have led there.
    page.evaluate("scrollTo(0, 0)")
    playwright.expect(page.locator("#opening vs-viewer canvas").first).to_be_in_viewport()
    # no tile makes its row tall.
    heights = "[...document.querySelectorAll('#opening .vs-tiles div')].map((e) => e.offsetHeight)"
    assert max(visitor.value(heights)) < 200
    for words in ("the same video, dense and sparse", "PSNR", "Attention computed", "Denoising"):
        visitor.see("#opening", words)
    assert page.locator("#opening vs-heat rect[data-step]").count() > 100
    playwright.expect(page.locator("#cancel-generate")).to_be_disabled()

    # what the model is and knows; words that it does not know are marked as they are typed.
    visitor.see("#model-card", "33 frames of 256x256 in 20 steps")
    # the page asks how loading goes.
    visitor.see("#generate-outlook", "Up to about")
    calls = visitor.calls_at_rest()
    marks = page.locator("#model-card mark")
    playwright.expect(marks).to_have_count(0)
    page.locator("#prompt textarea").fill("A red cat")
    playwright.expect(marks).to_have_text(["cat"])
    page.locator("#prompt textarea").fill("a red ball")
    playwright.expect(marks).to_have_count(0)
    assert visitor.calls() == calls

    # one control for quality and speed, in the command line's words; the numbers follow it.
    visitor.see("#speed-facts", "high: foresight (share 0.08)")
    visitor.see("#speed-facts", "43.4 dB on shapes")
    share = page.get_by_label("share", exact=True)
    playwright.expect(share).to_be_hidden()
    page.get_by_label("balanced", exact=True).check()
    visitor.see("#speed-facts", "balanced: foresight (share 0.08, unconditional_every 10)")
    visitor.unfold("By hand")
    playwright.expect(share).to_have_value("0.08")
    visitor.unfold("More of Foresight")
    playwright.expect(page.get_by_label("slope", exact=True)).to_have_value("0.5")
    # a quality chooses the fastest speed that has it, and goes when another choice is made.
    target = page.locator("#target input, #target textarea")
    playwright.expect(target).to_have_value("")
    target.fill("40")
    playwright.expect(page.get_by_label("high", exact=True)).to_be_checked()
    playwright.expect(share).to_have_value("0.08")
    target.fill("99")
    visitor.see("#speed-facts", "no speed was measured to give 99 dB on shapes")
    target.fill("33 dB")
    playwright.expect(page.get_by_label("fast", exact=True)).to_be_checked()
    playwright.expect(target).to_have_value("33 dB")
    visitor.set("share", 0.06)
    playwright.expect(page.get_by_label("by hand", exact=True)).to_be_checked()
    playwright.expect(target).to_have_value("")
    # so does a field that is emptied: what it stands for then is no number of the speed's.
    page.get_by_label("high", exact=True).check()
    visitor.see("#speed-facts", "high")
    visitor.unfold("More settings")
    page.get_by_label("first steps", exact=True).press("Control+a")
    page.get_by_label("first steps", exact=True).press("Delete")
    playwright.expect(page.get_by_label("by hand", exact=True)).to_be_checked()
    # sizes and lengths by name fill in the numbers, which are by hand again once they are changed.
    for name, option in (("Size", "portrait"), ("Length", "half")):
        page.get_by_label(name, exact=True).click()
        page.get_by_role("option", name=option).click()
    for label, value in (("Width", "224"), ("Height", "288"), ("Frames (4k+1)", "17")):
        playwright.expect(page.get_by_label(label, exact=True)).to_have_value(value)
    for label, number in SMALL.items():
        visitor.set(label, number)
    for name in ("Size", "Length"):
        playwright.expect(page.get_by_label(name, exact=True)).to_have_value("by hand")
    seed = page.get_by_label("Seed", exact=True)
    page.click("#dice")
    playwright.expect(seed).not_to_have_value("0")
    page.get_by_label("exact", exact=True).check()
    playwright.expect(page.locator("#method input")).to_have_value("Dense attention (dense)")

    # a video of one's own takes the place of the comparison.
    page.click("#generate")
    visitor.see("#generate-status", "Your video is ready")
    playwright.expect(page.locator("#opening vs-viewer")).to_have_count(0)


def test_settings_outlive_a_reload_and_ctrl_enter_runs(visit: Any) -> None:
    visitor = visit()
    page = visitor.page
    visitor.prompt("a small blue ring that orbits")
    visitor.set("Seed", 11)
    visitor.set("share", 0.06)
    # nobody reloads in the same moment, which on a busy machine is before the page hears of it.
    page.wait_for_function(
        "() => Object.values(JSON.parse(sessionStorage['vidsparse-form'])).includes(0.06)"
    )
    page.reload()
    playwright.expect(page.locator("#prompt textarea")).to_have_value(
        "a small blue ring that orbits"
    )
    visitor.unfold("By hand")
    for label, value in {"Seed": "11", "share": "0.06", **SMALL}.items():
        playwright.expect(page.get_by_label(label, exact=True)).to_have_value(str(value))
    playwright.expect(page.get_by_label("by hand", exact=True)).to_be_checked()
    page.locator("#prompt textarea").press("Control+Enter")
    visitor.see("#generate-status", "Your video is ready")
    visitor.see("#generate-facts", "seed 11")

    # an error is said once, and what is shown from before steps back.
    visitor.set("Width", 63)
    page.locator("#prompt textarea").press("Control+Enter")
    visitor.see("#generate-status [role=alert]", "width must be a multiple of")
    said = page.get_by_text("width must be a multiple of").filter(visible=True)
    playwright.expect(said).to_have_count(1)
    shade = page.locator("#generate-facts").evaluate("(facts) => getComputedStyle(facts).filter")
    assert shade == "grayscale(1)"


def test_the_studies_are_a_page_of_their_own_whose_rows_can_be_run(visit: Any) -> None:
    visitor = visit(by_hand=False)
    page = visitor.page
    visitor.prompt("a small blue ring that orbits")
    visitor.set("Seed", 11)
    visitor.calls_at_rest()
    page.get_by_role("link", name="Studies of every method").click()
    first = page.locator(".vs-study").first
    playwright.expect(first.locator("h2")).to_contain_text("Quality over seconds, all methods")
    playwright.expect(first.locator("figure")).to_have_count(2)
    # rows of models that this page does not have cannot be run.
    runnable = page.locator(".vs-study", has=page.get_by_role("link", include_hidden=True)).first
    runnable.locator("summary").click()
    row = runnable.get_by_role("row").filter(has_text="foresight").first
    share = row.locator("td").nth(1).inner_text().removeprefix("share ")
    row.get_by_role("link").click()
    visitor.unfold("By hand")
    playwright.expect(page.get_by_label("share", exact=True)).to_have_value(share)
    playwright.expect(page.get_by_label("Frames (4k+1)", exact=True)).to_have_value("33")
    # what the link does not name is as the visitor wrote it, and is kept.
    written = page.locator("#prompt textarea"), page.get_by_label("Seed", exact=True)
    for _ in range(2):
        for field, value in zip(written, ("a small blue ring that orbits", "11"), strict=True):
            playwright.expect(field).to_have_value(value)
        visitor.calls_at_rest()
        page.reload()
    page.get_by_role("link", name="Studies of every method").click()
    page.get_by_role("link", name="Make videos").click()
    page.wait_for_selector("#generate")


def test_generate_shows_a_video_its_cost_and_how_to_get_it_again(visit: Any) -> None:
    visitor = visit()
    visitor.prompt("a large red ball that moves right")
    visitor.set("Seed", 4)
    visitor.page.click("#generate")
    visitor.see("#generate-status", "Your video is ready")
    for text in ("Attention computed", "selected", "denoising", "torch, fp32", "seed 4"):
        visitor.see("#generate-facts", text)
    video = "document.querySelector('#video video')"
    # where less motion is asked for it does not begin by itself.
    visitor.page.wait_for_function(f"{video}?.readyState === 4 && {video}.paused")
    visitor.page.get_by_label("play-pause-replay-button").click()
    visitor.page.wait_for_function(f"!{video}.paused")
    assert visitor.value(f"{video}.videoWidth") == 64

    # a dense one beside it gives the speed of the next.
    visitor.page.click("#method input")
    visitor.page.get_by_role("option", name="Dense attention").click()
    playwright.expect(visitor.page.get_by_label("share", exact=True)).to_be_hidden()
    visitor.set("Seed", 5)
    visitor.page.click("#generate")
    visitor.see("#generate-facts", "seed 5")

    # the history leads back to the first, with all its settings.
    tiles = visitor.page.locator("#history button.thumbnail-item")
    playwright.expect(tiles).to_have_count(2)
    tiles.nth(1).click()
    visitor.see("#generate-facts", "seed 4")
    visitor.page.click("#use-settings")
    playwright.expect(visitor.page.get_by_label("Seed", exact=True)).to_have_value("4")
    playwright.expect(visitor.page.locator("#method input")).to_have_value("Foresight (foresight)")
    playwright.expect(visitor.page.get_by_label("share", exact=True)).to_be_visible()

    page = visitor.page
    file = visitor.download(page.get_by_role("link", name="Download video"))
    assert file.read_bytes()[4:8] == b"ftyp"
    record = json.loads(
        visitor.download(page.get_by_role("link", name="Download record")).read_text("utf-8")
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
    for label in ("tile", "Frames (4k+1)", "Width", "Height", "share"):
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
    playwright.expect(page.locator("#method input")).to_have_value("Foresight (foresight)")
    playwright.expect(field("Width")).to_be_visible()
    with held(page.evaluate("new URL('/', location).href")):
        page.click("#use-settings")
        field("Seed").fill("7")
    playwright.expect(page.locator("#method input")).to_have_value("BSFA (bsfa)")
    playwright.expect(page.locator("#preset input")).to_have_value("small-bsfa (bsfa)")
    playwright.expect(field("Seed")).to_have_value("7")
    playwright.expect(field("keep")).to_have_value("0.3")
    playwright.expect(field("Width")).to_be_hidden()


def _choose(page: Any, choice: str) -> None:
    """Choose a speed, method or preset by its name, or type a value into a field."""
    control, _, name = choice.partition(" ")
    if control == "type":
        label, _, value = name.rpartition(" ")
        page.get_by_label(label, exact=True).fill(value)
    elif control == "speed":
        page.get_by_label(name, exact=True).check()
    else:
        page.click(f"#{control} input")
        # names of presets hold those of methods.
        page.get_by_role("option", name=re.compile(f"^{name}")).click()


def test_while_the_server_is_slow_the_last_choice_counts_and_what_is_typed_stays(
    visit: Any,
) -> None:
    visitor = visit()
    page = visitor.page
    field = lambda label: page.get_by_label(label, exact=True)  # noqa: E731

    def choose(choices: str) -> None:
        visitor.calls_at_rest()
        with held(page.evaluate("new URL('/', location).href")):
            for choice in choices.split(", "):
                _choose(page, choice)
        visitor.calls_at_rest()

    def shows(choices: str, method: str, preset: str) -> None:
        expect = playwright.expect
        expect(page.locator("#method input"), choices).to_have_value(re.compile(method))
        expect(page.locator("#preset input"), choices).to_have_value(preset)

    none = "none: numbers by hand"
    for choices, ends_method, ends_preset in (
        ("preset small-bsfa, preset none", "Foresight", none),
        # its frames and size stay, which the model's own presets are not for.
        ("preset small-bsfa, method SALE", "SALE", none),
        ("method SALE, preset small-bsfa", "BSFA", "small-bsfa (bsfa)"),
        ("method SALE, method XAttention", "XAttention", none),
        ("method SALE, method FG-Attn", "FG-Attn", none),
        ("preset small-bsfa, speed fast", "Foresight", none),
        ("speed fast, preset small-bsfa", "BSFA", "small-bsfa (bsfa)"),
    ):
        # as the page opens.
        _choose(page, "speed high")
        shows(choices, "Foresight", none)
        choose(choices)
        shows(choices, ends_method, ends_preset)
        # what is shown goes with it.
        playwright.expect(field("Width"), choices).to_be_visible(visible=ends_preset == none)

    # what is typed after a choice stays, and the rest of the answer is there: the numbers of a
    # speed, and of a method whose schedule a later one leaves alone as it was written by hand.
    visitor.unfold("More settings")
    _choose(page, "speed high")
    shows("high", "Foresight", none)
    playwright.expect(field("share")).to_have_value("0.08")
    choose("speed fast, type share 0.5")
    shows("a share", "Foresight", none)
    playwright.expect(field("share")).to_have_value("0.5")
    playwright.expect(field("by hand").first).to_be_checked()
    choose("method XAttention, type first steps 5, method FG-Attn")
    shows("steps", "FG-Attn", none)
    playwright.expect(field("first steps")).to_have_value("5")
    # a method's own preset leaves a video to who is asking for it, and the hand in its field.
    for label, value in {"Frames (4k+1)": 33, "Width": 256, "Height": 256}.items():
        visitor.set(label, value)
    choose("method SALE, type Width 128")
    shows("a video", "SALE", none)
    playwright.expect(field("Width")).to_have_value("128")
    playwright.expect(field("Width")).to_be_focused()
    # one that was chosen itself is for one video alone.
    choose("preset small-bsfa, type Width 96")
    shows("a preset", "BSFA", "small-bsfa (bsfa)")
    playwright.expect(field("Width")).to_be_hidden()
    _choose(page, "preset none")
    playwright.expect(field("Width")).to_have_value("64")


def test_cancel_stops_within_a_step_and_the_device_is_free(visit: Any) -> None:
    visitor = visit()
    visitor.set("Steps", 400)
    visitor.page.click("#generate")
    # said with what stands there where it does not come.
    playwright.expect(visitor.page.locator("#generate-status")).to_contain_text(
        re.compile(r"step [1-9]\d* / 400 .*about", re.DOTALL)
    )
    visitor.page.click("#cancel-generate")
    visitor.see("#generate-status", "Cancelled")
    visitor.see("#generate-status", "your settings and videos are kept")
    # it is no longer one that the next would wait for, at the look after it has stopped.
    visitor.see("#generate-outlook", "begins at once")
    playwright.expect(visitor.page.get_by_label("Steps", exact=True)).to_have_value("400")
    visitor.set("Steps", 2)
    visitor.page.click("#generate")
    visitor.see("#generate-status", "Your video is ready")


def test_bad_input_is_said_clearly_and_nothing_runs(visit: Any) -> None:
    visitor = visit()
    for prompt, label, value, words in (
        ("", "Seed", 0, "there is no prompt"),
        ("a " * 6000, "Seed", 0, "at most 10,000 characters"),
        ("a ball", "Width", 63, "width must be a multiple of"),
        ("a ball", "Steps", 401, "steps can be at most 400 on this page"),
        ("a ball", "share", 2, "share must lie in"),
    ):
        before = visitor.page.get_by_label(label, exact=True).input_value()
        visitor.prompt(prompt)
        visitor.set(label, value)
        visitor.page.click("#generate")
        visitor.see("#generate-status [role=alert]", words)
        visitor.set(label, before)
    playwright.expect(visitor.page.locator("#history")).to_be_hidden()


def test_a_prompt_is_text_and_never_markup(visit: Any) -> None:
    visitor = visit()
    visitor.prompt("<img src=x onerror='window.broken = 1'> dragon")
    visitor.page.click("#generate")
    visitor.see("#generate-status", "shapes never learned img, src")
    visitor.see("#generate-status", "Your video is ready")
    visitor.see("#generate-facts", "<img src=x onerror=")
    assert visitor.value("window.broken") is None


def test_tab_leaves_no_list_open(visit: Any) -> None:
    page = visit().page
    page.locator("#method input").focus()
    options = page.locator("li[role=option]")
    playwright.expect(options).to_have_count(len(METHODS))
    # on past the preset, whose list opens and closes as well: none, the host's and the model's.
    page.keyboard.press("Tab")
    playwright.expect(options).to_have_count(2 + len(resolve_model("shapes").defaults.presets))
    page.keyboard.press("Tab")
    playwright.expect(options).to_have_count(0)
    page.locator("#method input").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#method input")).to_have_value("Sol-Attn (sol-attn)")
    playwright.expect(page.get_by_label("tau", exact=True)).to_be_visible()


def test_an_error_is_said_once_and_at_its_field(visit: Any) -> None:
    visitor = visit(by_hand=False)
    page, wrong = visitor.page, visitor.page.locator(".vs-wrong")
    alert = page.locator("#generate-status .vs-alert")
    visitor.prompt("a red ball")
    visitor.set("Steps", -3)
    page.click("#generate")
    playwright.expect(wrong).to_have_text("steps must be at least 1, got -3")
    steps = page.get_by_label("Steps", exact=True)
    playwright.expect(steps).to_be_focused()
    playwright.expect(steps).to_have_attribute("aria-invalid", "true")
    playwright.expect(steps).to_have_attribute("aria-describedby", wrong.get_attribute("id"))
    playwright.expect(alert).to_be_hidden()
    # what is changed is no longer wrong.
    visitor.set("Steps", 3)
    playwright.expect(wrong).to_have_count(0)
    playwright.expect(alert).to_be_visible()
    # a field in a fold.
    visitor.unfold("More settings")
    visitor.set("Frames a second", 900)
    page.get_by_role("button", name="More settings").click()
    page.click("#generate")
    playwright.expect(wrong).to_contain_text("fps must lie between 1 and 240")
    playwright.expect(page.get_by_label("Frames a second", exact=True)).to_be_focused()
    # one of the report's own list of prompts, and not of the form's prompt.
    visitor.set("Frames a second", 8)
    visitor.tab("Report")
    page.fill("#prompts textarea", " ")
    page.click("#report")
    playwright.expect(wrong).to_contain_text("there are no prompts")
    playwright.expect(page.locator("#prompts textarea")).to_be_focused()
    page.fill("#prompts textarea", "a red ball")
    # an error of no field stays where it was.
    visitor.tab("Compare")
    page.get_by_label("A", exact=True).click()
    page.get_by_role("option", name="the form's settings").click()
    page.click("#compare")
    visitor.see("#compare-status", "both sides are the same")
    playwright.expect(wrong).to_have_count(0)
    playwright.expect(page.locator("#compare-status .vs-alert")).to_be_visible()
    assert visitor.errors == []


def test_a_finished_job_is_no_longer_waited_for(visit: Any) -> None:
    visitor = visit(by_hand=False)
    visitor.prompt("a red ball")
    visitor.page.click("#generate")
    visitor.see("#generate-facts", "denoising")
    # at once, and not when the page looks again.
    line = visitor.page.locator("#generate-outlook")
    playwright.expect(line).to_contain_text("begins at once", timeout=2_000)
