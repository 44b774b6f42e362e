"""Numbers that are turned until whole videos are as wanted: every method, every kind of target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vidsparse
from vidsparse.calibration import CALIBRATORS
from vidsparse.calibration.base import Video
from vidsparse.calibration.target import TRIES, Dial, Search, Target
from vidsparse.pipelines.calibrate import calibrate
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import LoadedPipeline, load
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.presets import load_preset

DIALS = {
    "logarithm": Dial(name="share", start=0.15, least=0.02, most=1.0, scale="logarithm", gain=6.0),
    "rest": Dial(name="top_p", start=0.8, least=0.05, most=0.999, scale="rest", gain=6.0),
    "plain": Dial(name="tau", start=1.0, least=-4.0, most=4.0, scale="plain", gain=-4.0),
    "bound": Dial(name="l1", start=0.05, least=1e-3, most=1.0, scale="logarithm", gain=-8.7),
}
STILL = np.full((4, 64, 64, 3), 128, dtype=np.uint8)

# ---- dials ----


@given(st.sampled_from(sorted(DIALS)), st.floats(-50, 50))
def test_a_dial_stays_within_its_bounds(name: str, place: float) -> None:
    dial = DIALS[name]
    assert dial.least <= dial.number(place) <= dial.most


@given(st.sampled_from(sorted(DIALS)), st.floats(0.05, 0.95))
def test_places_lead_back_to_their_numbers(name: str, share: float) -> None:
    dial = DIALS[name]
    number = dial.least + share * (dial.most - dial.least)
    assert dial.number(dial.place(number)) == pytest.approx(number, rel=1e-3)


def test_where_there_are_few_numbers_the_nearest_is_taken() -> None:
    dial = Dial(
        name="keep", start=0.3, least=0.1, most=0.7, scale="logarithm", gain=4.0,
        only=(0.1, 0.3, 0.7),
    )  # fmt: skip
    assert [dial.number(math.log(x)) for x in (0.01, 0.16, 0.2, 0.4, 0.6)] == [
        0.1, 0.1, 0.3, 0.3, 0.7,
    ]  # fmt: skip


# ---- searches in a world whose videos get better with work ----


def noisy(decibels: float, prompt: int) -> Video:
    """A gray video with noise of that PSNR; some prompts are harder than others."""
    deviation = 255 * 10 ** (-(decibels - prompt) / 20)
    noise = np.random.default_rng(prompt).standard_normal(STILL.shape)
    return (STILL + deviation * noise).round().clip(0, 255).astype(np.uint8)


def run(
    target: Target,
    dial: Dial,
    world: Callable[[float, int], tuple[float, float, float]],
    *,
    prompts: int,
    schedules: int = 1,
) -> Search:
    """A search in a ``world`` that says a try's PSNR, share of pairs and seconds."""
    search = Search(target)
    for prompt in range(prompts):
        search.keep(prompt, STILL, 10.0)
    search.begin(dial.start)
    number = 0
    while number < len(search.looks):
        attempt, first, end = search.looks[number]
        decibels, total, seconds = world(search.tried[attempt], search.schedules[attempt])
        for prompt in range(first, end):
            search.watch(prompt, noisy(decibels, prompt), total=total, seconds=seconds)
        search.go_on(dial, schedules)
        number += 1
    return search


def searched(
    dial: Dial, target: Target, gain: float, start: float = 26.0, prompts: int = 3
) -> Search:
    """Runs a search: PSNR is ``start`` at the dial's start and has that gain; speed falls by it."""

    def world(number: float, schedule: int) -> tuple[float, float, float]:
        decibels = start + gain * (dial.place(number) - dial.place(dial.start))
        return decibels, 10 ** ((decibels - 60) / 40), 10 / (1.5 * 10 ** (-(decibels - start) / 80))

    return run(target, dial, world, prompts=prompts)


@pytest.mark.parametrize("name", DIALS)
@pytest.mark.parametrize("value", [22.0, 27.0, 32.0])
@pytest.mark.parametrize("factor", [0.6, 1.0, 1.8])
def test_a_psnr_is_met_whatever_the_first_guess(name: str, value: float, factor: float) -> None:
    dial = DIALS[name]
    # good enough a world for every dial to reach the highest of these values.
    search = searched(dial, Target("psnr", value), factor * dial.gain, start=26.5)
    measured = search.measured(dial.name)
    assert measured["met"]
    assert value + 0.1 <= measured["psnr"] <= value + 0.7
    assert measured["psnr_worst"] < measured["psnr"]
    assert len(measured["tries"]) <= TRIES
    assert measured["target"] == {"psnr": value}


@pytest.mark.parametrize(("target", "kept"), [(24.85, True), (24.95, False), (25.05, False)])
def test_a_try_has_enough_from_a_tenth_of_a_decibel_above_the_target_on(
    target: float, kept: bool
) -> None:
    dial = DIALS["logarithm"]
    # the three prompts have 26, 25 and 24 dB where the search begins.
    search = searched(dial, Target("psnr", target), dial.gain)
    assert (search.number == dial.start) is kept
    assert search.measured(dial.name)["psnr"] >= target + 0.1


@pytest.mark.parametrize(("target", "met"), [(24.97, True), (25.03, True), (25.15, False)])
def test_what_reaches_the_target_and_no_more_has_met_it(target: float, met: bool) -> None:
    # the only number that there is, with 25 dB, is no more than the nearest.
    only = replace(
        DIALS["logarithm"], least=DIALS["logarithm"].start, most=DIALS["logarithm"].start
    )
    assert searched(only, Target("psnr", target), only.gain).measured("share")["met"] is met


@pytest.mark.parametrize("name", DIALS)
def test_an_ssim_is_met(name: str) -> None:
    dial = DIALS[name]
    measured = searched(dial, Target("ssim", 0.3), dial.gain).measured(dial.name)
    assert measured["met"]
    # what is missing to one is from 0.1 to 0.7 dB less than was asked for.
    assert 1 - 0.7 * 10**-0.01 <= measured["ssim"] <= 1 - 0.7 * 10**-0.07


@pytest.mark.parametrize("name", DIALS)
def test_a_speed_is_met_by_less_work(name: str) -> None:
    dial = DIALS[name]
    search = searched(dial, Target("speed", 1.8), dial.gain)
    measured = search.measured(dial.name)
    assert measured["met"]
    assert 0.99 * 1.8 <= measured["speed"] <= 1.052 * 1.8
    assert measured["psnr"] < 26


def test_what_cannot_be_met_is_said_and_the_nearest_kept() -> None:
    measured = searched(DIALS["rest"], Target("psnr", 60.0), 2.0).measured("top_p")
    assert not measured["met"]
    assert measured["top_p"] > 0.99
    assert measured["psnr"] == max(one["psnr"] for one in measured["tries"])


def test_only_a_try_that_seems_right_is_made_of_all_prompts() -> None:
    dial = DIALS["bound"]
    search = searched(dial, Target("psnr", 32.0), 0.6 * dial.gain, prompts=8)
    measured = search.measured(dial.name)
    assert measured["met"]
    tries = measured["tries"]
    assert len(tries) > 2
    # the first and the last are whole, those between are made of two prompts.
    assert [one.get("prompts") for one in tries] == [None, *[2] * (len(tries) - 2), None]
    assert sum(end - first for _, first, end in search.looks) == 8 + 2 * (len(tries) - 1) + 6
    # the others' means are told by how those two moved.
    along = [dial.place(one[dial.name]) - dial.place(dial.start) for one in tries]
    whole = tries[0]["psnr"]
    for one, far in zip(tries, along, strict=True):
        assert one["psnr"] == pytest.approx(whole + 0.6 * dial.gain * far, abs=0.1)


def test_where_no_number_is_left_the_best_part_is_made_whole() -> None:
    fractions = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
    dial = Dial(
        name="keep", start=0.3, least=0.05, most=0.7, scale="logarithm", gain=4.0, only=fractions
    )
    search = searched(dial, Target("psnr", 29.0), 4 / math.log(2), prompts=8)
    assert search.number == 0.7
    assert search.looks[-1][1:] == (2, 8)


def test_a_number_that_was_as_good_as_tried_is_not_tried_again() -> None:
    dial = DIALS["logarithm"]
    # far too good at next to the least share, where a search ends that was foretold one.
    dial = replace(dial, start=1.0005 * dial.least)
    search = searched(dial, Target("psnr", 20.0), dial.gain, start=30.0)
    assert search.tried == [dial.start]


def test_a_search_goes_on_from_what_was_kept() -> None:
    dial = DIALS["bound"]
    search = searched(dial, Target("psnr", 32.0), 0.6 * dial.gain, prompts=8)
    again = Search(search.target)
    again.restore(search.state())
    assert again.looks == search.looks
    assert again.measured(dial.name) == search.measured(dial.name)


def test_of_few_numbers_the_cheapest_that_meets_the_target_is_kept() -> None:
    fractions = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
    dial = Dial(
        name="keep", start=0.3, least=0.05, most=0.7, scale="logarithm", gain=4.0, only=fractions
    )
    # 26 dB at 0.3, 4 dB for each doubling: 30 dB at 0.6, which there is not.
    search = searched(dial, Target("psnr", 29.0), 4 / math.log(2))
    assert search.number == 0.7


# ---- schedules, each cheaper than the one before ----

# decibels that are lost and pairs that are saved with half of the refreshes, a quarter, and none.
LOST = (0.0, 2.0, 6.0, 14.0)
REFRESHES = (0.2, 0.1, 0.05, 0.0)
SHARE = Dial(name="share", start=0.08, least=0.02, most=1.0, scale="logarithm", gain=4.0)


def work(share: float, schedule: int) -> float:
    """Of a run with three dense steps of twenty."""
    return 0.15 + REFRESHES[schedule] + share * (0.85 - REFRESHES[schedule])


def with_schedules(target: Target, lost: Sequence[float] = LOST, prompts: int = 8) -> Search:
    """A search where PSNR is 34 dB at a share of 0.08 with all refreshes, 4 dB more at e times."""

    def world(share: float, schedule: int) -> tuple[float, float, float]:
        total = work(share, schedule)
        return 34 + 4 * math.log(share / SHARE.start) - lost[schedule], total, 10 * total

    return run(target, SHARE, world, prompts=prompts, schedules=len(lost))


def best_work(value: float, lost: Sequence[float]) -> float:
    """The least total at which that world has a mean PSNR of ``value``, prompts' mean being 3.5."""
    totals = []
    for schedule, fewer in enumerate(lost):
        share = max(SHARE.least, SHARE.start * math.exp((value + 3.5 - 34 + fewer) / 4))
        if share <= 1:
            totals.append(work(share, schedule))
    return min(totals)


@pytest.mark.parametrize("value", [20.0, 24.0, 28.0, 32.0, 36.0])
@pytest.mark.parametrize("lost", [LOST, (0.0, 9.0, 12.0, 14.0), (0.0, 0.5, 1.0, 1.5)])
def test_the_schedule_of_least_work_that_meets_the_target_is_kept(
    value: float, lost: Sequence[float]
) -> None:
    search = with_schedules(Target("psnr", value), lost)
    measured = search.measured("share", [{"refresh": n} for n in (4, 2, 1, 0)])
    assert measured["met"]
    assert measured["psnr"] >= value + 0.1
    # within what 0.2 dB more, 5 % of a share, costs.
    assert measured["total"] <= best_work(value + 0.2, lost) + 0.02
    kept = measured["tries"][search.best]
    assert kept["refresh"] == (4, 2, 1, 0)[search.schedule]
    assert "prompts" not in kept
    # one schedule more than helps is tried, on two prompts of eight.
    assert sum(end - first for _, first, end in search.looks) <= 8 + 6 + 2 * 11


@pytest.mark.parametrize("number", [0.0, 1.0])
def test_a_search_may_begin_at_the_end_of_what_a_method_takes(number: float) -> None:
    # a share of nothing has no logarithm, nor has what one of everything leaves.
    for scale in ("rest", "logarithm"):
        dial = Dial(name="x", start=number, least=0.05, most=0.999, scale=scale, gain=6.0)
        assert dial.number(dial.place(dial.start)) == (0.05 if number == 0 else 0.999)


def test_a_speed_is_sought_with_the_schedule_that_was_asked_for() -> None:
    assert set(with_schedules(Target("speed", 3.0)).schedules) == {0}


def test_a_search_over_schedules_goes_on_from_what_was_kept() -> None:
    search = with_schedules(Target("psnr", 26.0))
    assert len(set(search.schedules)) > 1
    again = Search(search.target)
    again.restore(search.state())
    assert (again.looks, again.schedules) == (search.looks, search.schedules)
    assert again.schedule == search.schedule


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(("psnr", 4), ("psnr", math.nan), ("psnr", "32")),
        *(("ssim", 1.0), ("speed", 0.5), ("speed", True)),
    ],
)  # fmt: skip
def test_targets_that_mean_nothing_are_refused(kind: Any, value: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match=f"target_{kind} must lie between"):
        Target(kind, value)


# ---- on a pipeline ----

PROMPTS = ["a red circle", "a blue square that moves left"]
MORE: dict[str, dict[str, Any]] = {"foresight": {"probes": 1}, "bsfa": {"groups": 2}}


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedPipeline:
    return load(tiny_model, device="cpu")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CALIBRATORS)
def test_what_a_preset_promises_is_what_it_makes(
    name: str, loaded: LoadedPipeline, tmp_path: Path
) -> None:
    request = GenerateRequest(
        prompt="", method=name, frames=9, width=64, height=64, steps=4, guidance=3.0,
        dense_steps=1, dense_layers=1, order="rowmajor", device="cpu",
    )  # fmt: skip
    settings = {"target_psnr": 30.0, **MORE.get(name, {})}
    calibrate(loaded, request, PROMPTS, tmp_path / "p", settings=settings)
    preset = load_preset(tmp_path / "p")
    promised = preset.measured
    assert promised["target"] == {"psnr": 30.0}
    divided = CALIBRATORS[name].divides_layers
    assert preset.schedule["dense_layers"] == (0 if divided else 1)
    made = GenerateRequest(
        prompt=PROMPTS[1], seed=1, preset=str(tmp_path / "p"), model=loaded.ref.location,
        steps=4, guidance=3.0, device="cpu",
    )  # fmt: skip
    sparse = generate(loaded, made)
    assert sparse.record["work"]["dense_layers"] == (0 if divided else pytest.approx(0.375))
    dense = generate(
        loaded,
        GenerateRequest(
            prompt=PROMPTS[1], seed=1, method="dense", model=loaded.ref.location, frames=9,
            width=64, height=64, steps=4, guidance=3.0, device="cpu",
        ),
    )  # fmt: skip
    found = vidsparse.metrics.psnr(dense.frames, sparse.frames)
    # the worse of two: no video is worse than what was promised of the worst.
    assert found is None or found >= promised["psnr_worst"] - 0.01
