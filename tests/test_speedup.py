"""When two sides' times tell a ratio, and what is said where they do not."""

from __future__ import annotations

import pytest

from vidsparse.speedup import SHORT_ON_GPU, Speedup, TimedPair


def _pairs(*seconds: tuple[float, float], kept: str | None = None) -> list[TimedPair]:
    return [TimedPair(dense=dense, sparse=sparse, kept=kept) for dense, sparse in seconds]


def test_a_ratio_comes_with_its_range() -> None:
    found = Speedup.of(_pairs((10.0, 5.0), (12.0, 4.0)))
    assert found.ratio == pytest.approx(22 / 9)
    assert (found.least, found.most, found.pairs) == (2.0, 3.0, 2)
    assert str(found) == "2.44x (2.00 to 3.00 over 2 pairs)"


def test_a_dense_run_kept_from_earlier_makes_no_ratio() -> None:
    fresh, kept = _pairs((10.0, 5.0), (10.0, 5.0)), _pairs((10.0, 5.0), kept="14:05")
    found = Speedup.of(fresh + kept)
    assert found.ratio is None
    assert str(found) == "dense kept from 14:05"


def test_one_pair_has_no_range_and_so_no_ratio() -> None:
    assert str(Speedup.of(_pairs((10.0, 5.0)))) == "timed once"
    assert Speedup.of(_pairs((10.0, 5.0))).to_json()["ratio"] is None


def test_pairs_of_different_machines_have_no_ratio() -> None:
    one, other = (TimedPair(dense=10.0, sparse=5.0, machine=each) for each in ("one", "other"))
    assert str(Speedup.of([one, one, other])) == "measured on different machines"
    assert Speedup.of([one, one]).ratio == 2.0


@pytest.mark.parametrize("short", [(2.9, 10.0), (10.0, 2.9)])
def test_a_run_of_under_three_seconds_is_too_short_to_time(short: tuple[float, float]) -> None:
    assert str(Speedup.of(_pairs((10.0, 5.0), short))) == "too short to time"


def test_what_is_too_short_to_time_is_a_pair_s_own() -> None:
    quick = [TimedPair(dense=2.0, sparse=1.0, shortest=SHORT_ON_GPU)] * 2
    assert Speedup.of(quick).ratio == 2.0
    assert Speedup.of([*quick, *_pairs((2.0, 1.0))]).why == "too short to time"


def test_runs_of_unknown_time_are_no_pairs() -> None:
    assert str(Speedup.of([TimedPair(dense=None, sparse=4.0)])) == "not timed"
    assert str(Speedup.of([])) == "not timed"
