"""When a call is dense, plans, or reuses a plan."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vidsparse
from vidsparse.schedule import Action, Schedule, share_or_count


def row(schedule: Schedule, steps: int, layer: int = 0, layers: int = 1) -> str:
    """One letter a step: d(ense), p(lan), r(euse)."""
    letters = {Action.DENSE: "d", Action.REPLAN: "p", Action.REUSE: "r"}
    return "".join(letters[schedule.decide(s, steps, layer, layers)] for s in range(steps))


@pytest.mark.parametrize(
    ("value", "total", "expected"),
    [
        (0.24, 50, 12),
        (0.24, 20, 5),  # 4.8
        (0.07, 100, 7),  # 7.000000000000001 in binary
        (0.29, 100, 29),  # 28.999999999999996 in binary
        (0.001, 50, 1),
        (0.0, 50, 0),
        (1.0, 50, 50),
        (1, 50, 1),
        (0, 50, 0),
        (99, 50, 50),
    ],
)
def test_decimals_are_shares_rounded_up_and_integers_counts(
    value: float, total: int, expected: int
) -> None:
    assert share_or_count(value, total, "dense_steps") == expected


@given(percent=st.integers(0, 100), total=st.integers(1, 400))
def test_a_share_written_in_percent_rounds_up_exactly(percent: int, total: int) -> None:
    exact = math.ceil(Fraction(percent, 100) * total)
    assert share_or_count(percent / 100, total, "dense_steps") == exact


@pytest.mark.parametrize("bad", [-1, -0.1, 1.5, math.nan, math.inf, -math.inf, True, "0.2", None])
@pytest.mark.parametrize(
    "name", ["dense_steps", "dense_last_steps", "dense_layers", "dense_last_layers"]
)
def test_a_bad_amount_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match=name):
        Schedule(**{name: bad})


def test_a_count_written_with_a_point_gets_the_hint() -> None:
    with pytest.raises(vidsparse.OptionError, match=r"got 12\.0\. Hint: .*: 12\."):
        Schedule(dense_steps=12.0)


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "2"])
def test_reuse_must_be_a_whole_number_from_one(bad: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match="reuse"):
        Schedule(reuse=bad)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dense_steps": 0}, "pppppppppp"),
        ({"dense_steps": 3}, "dddppppppp"),
        ({"dense_steps": 0.24}, "dddppppppp"),
        ({"dense_steps": 2, "dense_last_steps": 0.1}, "ddpppppppd"),
        ({"dense_steps": 1.0}, "dddddddddd"),
        ({"dense_steps": 6, "dense_last_steps": 6}, "dddddddddd"),
        ({"dense_steps": 2, "reuse": 3}, "ddprrprrpr"),
        ({"dense_steps": 3, "dense_last_steps": 1, "reuse": 99}, "dddprrrrrd"),
    ],
)
def test_steps(options: dict[str, Any], expected: str) -> None:
    assert row(Schedule(**options), 10) == expected


def test_the_default_keeps_the_papers_24_percent_dense_and_plans_every_step() -> None:
    assert row(Schedule(), 50) == "d" * 12 + "p" * 38


@pytest.mark.parametrize(
    ("options", "dense"),
    [
        ({"dense_layers": 2}, {0, 1}),
        ({"dense_last_layers": 1}, {9}),
        ({"dense_layers": 0.15, "dense_last_layers": 0.01}, {0, 1, 9}),
        ({"dense_layers": 7, "dense_last_layers": 7}, set(range(10))),
        ({"dense_layers": 1.0}, set(range(10))),
    ],
)
def test_layers_stay_dense_in_every_step(options: dict[str, Any], dense: set[int]) -> None:
    schedule = Schedule(dense_steps=0, **options)
    for layer in range(10):
        expected = "dddd" if layer in dense else "pppp"
        assert row(schedule, 4, layer, 10) == expected


@given(
    first=st.integers(0, 8),
    last=st.integers(0, 8),
    steps=st.integers(1, 12),
    reuse=st.integers(1, 5),
)
def test_a_reused_plan_was_made_less_than_reuse_steps_ago(
    first: int, last: int, steps: int, reuse: int
) -> None:
    letters = row(Schedule(dense_steps=first, dense_last_steps=last, reuse=reuse), steps)
    assert letters[:first] == "d" * min(first, steps)
    assert letters.count("d") == min(steps, first + last)
    for at, letter in enumerate(letters):
        if letter == "r":
            assert "p" in letters[max(0, at - reuse + 1) : at]


def test_the_plan_of_a_step_was_made_in_the_last_one_that_plans() -> None:
    schedule = Schedule(dense_steps=2, dense_last_steps=1, reuse=3)
    assert row(schedule, 9) == "ddprrprrd"
    assert [schedule.plan_step(step, 9) for step in range(9)] == [0, 1, 2, 2, 2, 5, 5, 5, 8]
