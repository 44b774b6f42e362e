"""What the page says of a run before it starts: seconds, memory, and the place in the queue."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")
pytest.importorskip("playwright", reason="playwright drives the browser")

import gradio as gr
from page_browser import MARKS, commanded, held
from page_host import host_of, values_of
from page_jobs import Gate, queue_of, wait
from playwright import sync_api as playwright

from vidsparse.apps.page import draw
from vidsparse.apps.page.compare_tab import DENSE, FORM, CompareTab, made_for
from vidsparse.apps.page.desk import Desk
from vidsparse.apps.page.estimates import Estimate, Estimates, Took
from vidsparse.apps.page.form import Form
from vidsparse.apps.page.generate_tab import MOST_VIDEOS, GenerateTab, count_of
from vidsparse.apps.page.outlook import Outlook
from vidsparse.apps.page.queue import Job
from vidsparse.apps.page.report_tab import ReportTab
from vidsparse.apps.page.visits import Visits
from vidsparse.apps.page.workbench import WARM_UP_SIDES, Workbench
from vidsparse.apps.runs.comparison import dense_side
from vidsparse.errors import OptionError
from vidsparse.pipelines.models import resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve

pytest_plugins = ["page_browser"]


def needs_browser(test: Any) -> Any:
    for mark in MARKS:
        test = mark(test)
    return test


GIB = 2**30
DEFAULTS = resolve_model("shapes").defaults


def asked(**changes: Any) -> GenerateRequest:
    own = {"frames": 33, "width": 256, "height": 256, "steps": 20, "device": "cpu"}
    given = {**own, "cache": "none", **changes}
    return resolve(GenerateRequest(prompt="", model="shapes", **given), DEFAULTS)


def loaded(room: int | None = 8 * GIB) -> Estimates:
    """Estimates of a page that has loaded ``shapes`` into one GiB."""
    estimates = Estimates()
    ref = resolve_model("shapes")
    has = SimpleNamespace(ref=ref, pipe=SimpleNamespace(transformer=None))
    estimates.loaded(has, GIB, room)  # type: ignore[arg-type]
    return estimates


def took(step: float = 1.0, memory: int | None = 2 * GIB) -> Took:
    return Took(step=step, beside=2.0, memory=memory)


def seconds(estimates: Estimates, *requests: GenerateRequest) -> float:
    found = estimates.of(requests, DEFAULTS)
    assert found is not None
    return found.seconds


def test_nothing_is_told_before_anything_was_measured() -> None:
    assert Estimates().of([asked()], DEFAULTS) is None
    assert loaded().of([asked()], DEFAULTS) is None


def test_a_video_of_the_same_kind_is_told_as_it_was() -> None:
    estimates = loaded()
    estimates.add(asked(), took())
    found = estimates.of([asked(seed=9)], DEFAULTS)
    assert found == Estimate(
        seconds=22.0, memory=2 * GIB, room=8 * GIB, basis="alike",
        size="33 frames of 256x256, foresight",
    )  # fmt: skip
    # steps of attention, not what stands beside them.
    assert seconds(estimates, asked(steps=40)) == pytest.approx(42)
    assert seconds(estimates, asked(), asked()) == pytest.approx(44)


def test_a_larger_video_takes_more_than_its_share_of_pixels_and_says_what_it_is_told_from() -> None:
    estimates = loaded()
    estimates.add(asked(), took())
    larger = estimates.of([asked(width=512)], DEFAULTS)
    assert larger is not None
    assert larger.seconds > 2 * 22
    assert larger.seconds < 4 * 22
    assert larger.memory == GIB + 2 * GIB
    assert (larger.basis, larger.size) == ("other", "33 frames of 256x256, foresight")


def test_the_nearest_video_counts_and_the_warm_up_only_where_there_is_no_other() -> None:
    estimates = loaded()
    small = asked(width=64, height=64, frames=5)
    estimates.add(small, took(step=0.01, memory=None), warm_up=True)
    first = estimates.of([asked()], DEFAULTS)
    assert first is not None
    assert (first.basis, first.memory) == ("warm-up", None)
    estimates.add(asked(width=384), took(step=3.0))
    second = estimates.of([asked()], DEFAULTS)
    assert second is not None
    assert second.basis == "other"
    assert second.seconds < 20 * 3.0 + 2
    # another method of the very size is nearer than the same method of another.
    estimates.add(asked(method="dense"), took(step=1.5))
    assert seconds(estimates, asked()) == pytest.approx(20 * 1.5 + 2)


def test_two_sizes_of_the_warm_up_tell_what_of_a_step_is_the_same_for_any_size() -> None:
    def first_guess(*steps: tuple[int, float], **changes: Any) -> float:
        estimates = loaded()
        for side, step in steps:
            request = asked(width=side, height=side, frames=5)
            of_steps = Took(step=step, beside=0.0, memory=None)
            estimates.add(request, of_steps, warm_up=True)
        return seconds(estimates, asked(**changes)) / 20

    one_size = first_guess((128, 0.4))
    # what both sizes have in common does not grow.
    assert one_size / 4 < first_guess((64, 0.2), (128, 0.4)) < 0.7 * one_size
    # where the larger one hardly took longer, or more than its share, it is told from it alone.
    assert first_guess((64, 0.39), (128, 0.4)) == pytest.approx(one_size)
    assert first_guess((64, 0.01), (128, 0.4)) == pytest.approx(one_size)
    # a size between both takes a time between both, whichever is nearer.
    for side in (80, 112):
        between = {"width": side, "height": side, "frames": 5}
        assert 0.2 < first_guess((64, 0.2), (128, 0.4), **between) < 0.4


@pytest.mark.slow
def test_the_warm_up_takes_steps_of_two_sizes_and_decodes_the_small_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vidsparse.pipelines import generate as module

    made, ended, generate = [], [], module.generate

    def watched(has: Any, request: GenerateRequest, *given: Any, **more: Any) -> Any:
        made.append(request.width)
        try:
            return generate(has, request, *given, **more)
        except module.GenerationCancelled:
            ended.append(request.width)
            raise

    monkeypatch.setattr(module, "generate", watched)
    estimates = Estimates()
    has = Workbench("cpu", estimates=estimates).load("shapes")
    small, large = (side * has.defaults.size_factor for side in WARM_UP_SIDES)
    assert (made, ended) == ([small, large], [large])
    guess = estimates.of([asked()], has.defaults)
    assert guess is not None
    assert guess.basis == "warm-up"
    assert guess.size.startswith(f"{has.defaults.few_frames} frames of {large}x{large}")


def test_new_measurements_move_the_mean_and_the_most_memory_stays() -> None:
    estimates = loaded()
    estimates.add(asked(), took(step=1.0, memory=3 * GIB))
    estimates.add(asked(), took(step=2.0, memory=2 * GIB))
    found = estimates.of([asked()], DEFAULTS)
    assert found is not None
    assert found.seconds == pytest.approx(20 * 1.5 + 2)
    assert found.memory == 3 * GIB


@pytest.mark.parametrize(
    ("changes", "factor", "words"),
    [
        # guidance off is one forward a step instead of two.
        ({"guidance": 1.0}, 0.5, "foresight, with guidance"),
        ({"cache": "taylorseer", "cache_threshold": 3}, 1.0, "foresight, no step cache"),
        ({"method_options": {"share": 0.9}}, 1.0, "33 frames of 256x256, foresight"),
        ({"dense_steps": 0.9}, 1.0, "33 frames of 256x256, foresight"),
        ({"refresh": 0}, 1.0, "33 frames of 256x256, foresight"),
        ({"reuse": 5}, 1.0, "33 frames of 256x256, foresight"),
        ({"order": "rowmajor"}, 1.0, "33 frames of 256x256, foresight"),
    ],
)
def test_what_changes_the_time_of_a_step_makes_videos_of_another_kind(
    changes: dict[str, Any], factor: float, words: str
) -> None:
    estimates = loaded()
    estimates.add(asked(), took())
    other = asked(**changes)
    told = estimates.of([other], DEFAULTS)
    assert told is not None
    assert told.basis == "other"
    assert told.seconds == pytest.approx(20 * factor + 2)
    assert told.size.endswith(words)
    # measured, it is told from its own, and does not change what the first is told from.
    estimates.add(other, took(step=9.0))
    assert seconds(estimates, other) == pytest.approx(20 * 9 + 2)
    assert seconds(estimates, asked()) == pytest.approx(22)
    first = estimates.of([asked()], DEFAULTS)
    assert first is not None
    assert first.basis == "alike"


def test_a_cached_video_is_told_from_a_cached_one_and_says_where_it_is_not() -> None:
    estimates = loaded()
    cached = asked(cache="taylorseer", cache_threshold=3)
    estimates.add(cached, took(step=0.5))
    told = estimates.of([asked()], DEFAULTS)
    assert told is not None
    assert told.size == "33 frames of 256x256, foresight, cache taylorseer 3"
    estimates.add(asked(method="dense"), took(step=4.0))
    assert seconds(estimates, asked()) == pytest.approx(20 * 4 + 2)
    # with a cache the method matters less than whether there is one.
    assert seconds(estimates, replace(cached, method="dense", method_options={})) == (
        pytest.approx(20 * 0.5 + 2)
    )


def test_a_dense_video_is_the_same_whatever_a_method_would_have_done() -> None:
    estimates = loaded()
    estimates.add(dense_side(asked(dense_steps=3, reuse=4)), took())
    told = estimates.of([dense_side(asked(dense_steps=9, order="rowmajor"))], DEFAULTS)
    assert told is not None
    assert told.basis == "alike"


def test_guidance_that_is_distilled_into_the_weights_makes_no_second_forward() -> None:
    estimates = Estimates()
    ref = resolve_model("shapes")
    own = replace(ref, defaults=replace(ref.defaults, embedded=True))
    has = SimpleNamespace(ref=own, pipe=SimpleNamespace(transformer=None))
    estimates.loaded(has, GIB, None)  # type: ignore[arg-type]
    estimates.add(asked(), took())
    assert seconds(estimates, asked(guidance=1.0)) == pytest.approx(22)


def test_another_model_is_not_told_from_this_one() -> None:
    estimates = loaded()
    estimates.add(asked(), took())
    assert estimates.of([replace(asked(), model="shapes-joint")], DEFAULTS) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a process holds")
def test_what_a_process_holds_is_told_where_the_system_says_it() -> None:
    # in a process of its own: this one's other threads take memory and give it back meanwhile.
    code = (
        "from vidsparse.apps.page.estimates import Memory\n"
        "memory = Memory('cpu')\n"
        "memory.begin()\n"
        "before = memory.now(), memory.most()\n"
        "block = bytearray(64 * 2**20)\n"
        "print([*before, memory.most(), memory.room()])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    now, most, more, room = json.loads(run.stdout)
    assert more >= most + 32 * 2**20
    assert room > now


# --- the queue ---


def expecting(gate: Gate, expected: float | None) -> Job[Any, Any]:
    return Job(gate, expected=expected)


def test_a_free_device_takes_a_job_at_once() -> None:
    queue = queue_of(devices=2)
    assert queue.outlook() == (0, 0.0)
    gate = Gate()
    job = queue.submit(expecting(gate, 100.0))
    assert gate.began.wait(20)
    assert queue.outlook() == (0, 0.0)
    gate.open.set()
    wait(job)
    queue.close()


def test_jobs_before_a_job_add_up_and_one_that_nobody_can_tell_makes_the_wait_unknown() -> None:
    queue = queue_of()
    gates = [Gate() for _ in range(3)]
    jobs = [
        queue.submit(expecting(gate, expected))
        for gate, expected in zip(gates, (100.0, 50.0, None), strict=True)
    ]
    assert gates[0].began.wait(20)
    second, third = jobs[1].snapshot(), jobs[2].snapshot()
    assert (second.ahead, third.ahead) == (1, 2)
    assert 90 < (second.wait or 0) <= 100
    assert 140 < (third.wait or 0) <= 150
    assert queue.outlook() == (3, None)
    # one that is called off is not waited for.
    jobs[1].cancel()
    queue.forget_cancelled()
    assert 90 < (jobs[2].snapshot().wait or 0) <= 100
    for gate in gates:
        gate.open.set()
    for job in jobs:
        wait(job)
    assert jobs[0].snapshot().wait is None
    queue.close()


# --- the words ---


def told(**changes: Any) -> Estimate:
    return replace(
        Estimate(seconds=75.0, memory=GIB, room=8 * GIB, basis="alike", size="x"), **changes
    )


def test_the_line_says_time_memory_and_place() -> None:
    line = draw.outlook(told(), 3, 0, 0.0)
    assert "About 75 s for 3 videos" in line
    assert "1.0 of 8.0 GiB memory" in line
    assert "begins at once" in line
    waiting = draw.outlook(told(memory=None), 1, 2, 30.0)
    assert "2 jobs before yours, begins in about 30 s" in waiting
    assert "GiB" not in waiting
    assert "1 job before yours" in draw.outlook(None, 1, 1, None)
    loading = draw.outlook(None, 1, 0, None)
    assert "once the model is loaded" in loading
    assert "begins at once" not in loading
    # so small a video takes more for each of its tokens.
    assert "Up to about 75 s" in draw.outlook(told(basis="warm-up"), 1, 0, 0.0)


def test_more_memory_than_there_is_stands_out() -> None:
    line = draw.outlook(told(memory=9 * GIB), 1, 0, 0.0)
    assert "more than there is" in line
    assert "much" in line
    assert "more than there is" not in draw.outlook(told(), 1, 0, 0.0)


def test_a_comparison_makes_the_sides_that_are_not_kept() -> None:
    request = asked()
    assert [one.method for one in made_for(DENSE, FORM, request)] == ["dense", "foresight"]
    assert made_for(FORM, "kept 1", request) == [request]
    assert made_for("kept 1", "kept 2", request) == []


@pytest.mark.parametrize("videos", [0, MOST_VIDEOS + 1, "many", None])
def test_a_number_of_videos_that_is_none_is_refused(videos: object) -> None:
    with pytest.raises(OptionError, match="videos must be"):
        count_of(videos)


@pytest.mark.parametrize("vary", ["nothing", "share"])
def test_a_model_that_starts_from_a_picture_is_told_without_one(tmp_path: Path, vary: str) -> None:
    model = replace(resolve_model("shapes"), image_class="WanImageToVideoPipeline", text_class=None)
    host = replace(host_of(tmp_path), models=(model,))
    desk = Desk(host, queue_of(), Visits(tmp_path), estimates=loaded())
    with gr.Blocks(), gr.Tab() as shown:
        form = Form(desk.host)
        generate = GenerateTab(desk, form)
        compare = CompareTab(desk, form, generate, shown)
        outlook = Outlook(desk, form, generate, compare, ReportTab(desk, form))
    desk.queue.close()
    desk.estimates.add(asked(), took())
    asks = {"prompt_lines": "a ball", "vary": vary, "over": "" if vary == "nothing" else "0.1"}
    told = outlook.tell(videos=1, side_a=DENSE, side_b=FORM, **asks, **values_of(form))
    lines = [line for line in told.values() if isinstance(line, str)]
    assert ["About" in line for line in lines] == [True] * 3


# --- in a browser ---


@pytest.fixture(scope="module")
def url(out: Path) -> Iterator[str]:
    with commanded(out, "--model", "shapes", "--model", "shapes-joint") as address:
        yield address


@needs_browser
def test_the_line_follows_the_settings_and_learns_from_what_was_made(visit: Any) -> None:
    visitor = visit()
    page, line = visitor.page, visitor.page.locator("#generate-outlook")
    playwright.expect(line).to_contain_text(re.compile("once the model is loaded|warm-up"))
    visitor.prompt("a red ball")
    page.click("#generate")
    visitor.see("#generate-facts", "a red ball")
    visitor.set("Frames (4k+1)", 9)
    playwright.expect(line).to_contain_text("from 5 frames of 64x64")
    visitor.set("Frames (4k+1)", 5)
    playwright.expect(line).to_contain_text("from videos of this kind made here")
    playwright.expect(line).to_contain_text("begins at once")
    visitor.set("Videos", 4)
    playwright.expect(line).to_contain_text("for 4 videos")
    visitor.set("Steps", 100_000)
    # the button says what is wrong; there is nothing to expect.
    playwright.expect(line).to_have_text("")
    # another model brings its own numbers, but for what is typed before it answers.
    with held(page.evaluate("new URL('/', location).href")):
        page.get_by_label("Model", exact=True).click()
        page.get_by_role("option", name="shapes-joint").click()
        visitor.set("Steps", 7)
    visitor.see("#model-card", "shapes-joint")
    playwright.expect(page.get_by_label("Width", exact=True)).to_have_value("256")
    playwright.expect(page.get_by_label("Steps", exact=True)).to_have_value("7")
    playwright.expect(line).to_contain_text("once the model is loaded")
    assert visitor.errors == []
