"""``vidsparse bench scaling``: fits of made-up rows, of which it is known what they are made of."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from vidsparse.apps.bench.gpus_cost import Hosts, TwoTerms, fit, fit_two_terms, key_of
from vidsparse.apps.bench.gpus_rows import DIGITS, GpusRow, gpus_file
from vidsparse.apps.bench.gpus_scaling import clip_of, scaling_rows
from vidsparse.apps.cli import main
from vidsparse.apps.results.row_file import rounded
from vidsparse.errors import OptionError

# milliseconds for a megabyte, and for a call.
PER_MB, PER_CALL = 0.004, 0.02
# fixed and divided milliseconds of each part; megabytes of q, k, v and the output in a step.
WAN = {"dense": (40.0, 16000.0), "kernel": (30.0, 6000.0), "mask": (5.0, 290.0)}
REST, VOLUME, CALLS = (120.0, 8000.0), 248_000.0, 80


def made_up(count: int, scale: float = 1.0, **changed: object) -> GpusRow:
    """A row of ``count`` GPUs in a world that is as the model says, all of it ``scale`` times."""

    def part(fixed: float, divided: float, gpus: int) -> float:
        return scale * (fixed + divided / gpus)

    sent = scale * VOLUME * (count - 1) / count**2
    exchange = sent * PER_MB + CALLS * PER_CALL
    ms = {
        gpus: {name: part(*WAN[name], gpus) for name in WAN} | {"rest": part(*REST, gpus)}
        for gpus in (1, count)
    }
    one, many = ms[1], ms[count]
    row = GpusRow(
        family="wan-14b",
        shape="1280x720x81",
        tokens=75600,
        heads=40,
        layers=40,
        calls=CALLS,
        step="two forwards",
        linear="none",
        compiled=False,
        kind="even",
        balance=True,
        processes=count,
        ring=1,
        asked=0.4,
        computed=0.4,
        impl="made up",
        error=0.0,
        warmup=0.24,
        steps=50,
        repeats=1,
        one_dense_ms=one["dense"] + one["rest"],
        one_dense_attention_ms=one["dense"],
        one_sparse_ms=one["kernel"] + one["mask"] + one["rest"],
        one_kernel_ms=one["kernel"],
        one_mask_plan_ms=one["mask"],
        dense_ms=many["dense"] + many["rest"] + exchange,
        dense_attention_ms=many["dense"],
        sparse_ms=many["kernel"] + many["mask"] + many["rest"] + exchange,
        kernel_ms=many["kernel"],
        kernel_mean_ms=many["kernel"],
        mask_plan_ms=many["mask"],
        exchange_ms=exchange,
        exchange_mb=sent,
        busiest=1.0,
        one_peak_gib=None,
        peak_gib=None,
    )
    return replace(row, **changed)  # type: ignore[arg-type]


LARGE = made_up(2)
# other bytes for as many calls, without which latency and bandwidth are one number.
SMALL = made_up(2, 0.25, shape="640x368x81")


def test_a_fit_on_one_and_two_recovers_what_rows_are_made_of() -> None:
    model = fit([LARGE, SMALL], 2)
    assert model.links.ms_per_mb == pytest.approx(PER_MB)
    assert model.links.ms_per_call == pytest.approx(PER_CALL)
    cost = model.videos[key_of(LARGE)]
    assert cost.volume == pytest.approx(VOLUME)
    found = {("dense", "kernel"): WAN["dense"], ("sparse", "kernel"): WAN["kernel"]}
    found |= {("sparse", "mask"): WAN["mask"]}
    found |= {(kind, "rest"): REST for kind in ("dense", "sparse")}
    for (kind, name), (fixed, divided) in found.items():
        part = cost.parts[kind][name]
        assert [part.first, part.second] == pytest.approx([fixed, divided])
    assert cost.parts["dense"]["mask"] == TwoTerms(0.0, 0.0)


@pytest.mark.parametrize("count", [4, 8])
def test_more_gpus_are_predicted(count: int) -> None:
    model = fit([LARGE, SMALL], 2)
    truth = made_up(count)
    found = model.predicted(key_of(LARGE), Hosts(1, count))
    assert found.ring == 1
    assert found.dense.ms == pytest.approx(truth.dense_ms)
    assert found.sparse.ms == pytest.approx(truth.sparse_ms)
    assert found.sparse.exchange == pytest.approx(truth.exchange_ms)
    assert found.run_s == pytest.approx(truth.run_s)


def test_rows_of_one_size_give_a_bandwidth_alone() -> None:
    links = fit([LARGE], 2).links
    assert links.ms_per_call == 0
    assert links.ms_per_mb * LARGE.exchange_mb == pytest.approx(LARGE.exchange_ms)


def test_a_longer_clip_takes_more() -> None:
    model = fit([LARGE, SMALL], 2)
    # 10 seconds at 16 a second.
    shape, stretch = clip_of(LARGE, 10)
    assert (shape, stretch) == ("1280x720x161", 41 / 21)
    short, long = (
        model.predicted(key_of(LARGE), Hosts(1, 4), stretch=each) for each in (1.0, stretch)
    )
    assert long.sparse.kernel == pytest.approx(short.sparse.kernel * stretch**2)
    assert long.sparse.mask == pytest.approx(short.sparse.mask * stretch**2)
    assert long.sparse.rest == pytest.approx(REST[0] + REST[1] / 4 * stretch)
    given = VOLUME * 3 / 16 * PER_MB
    assert long.sparse.exchange == pytest.approx(given * stretch + CALLS * PER_CALL)


def test_heads_that_do_not_share_out_make_a_ring_between_machines() -> None:
    model = fit([LARGE, SMALL], 2)
    hosts = Hosts.parse("2x8")
    with pytest.raises(OptionError, match="--between 50"):
        model.predicted(key_of(LARGE), hosts)
    fast, slow = (model.predicted(key_of(LARGE), hosts, between=rate) for rate in (50.0, 1.0))
    # 40 heads on 16 GPUs: eight of a machine share them, and keys travel between two machines.
    assert fast.ring == 2
    held = VOLUME / 16
    by_heads = held * 7 / 8 * PER_MB
    moved = held * 1.5 / 2 / 50
    latency = 2 * CALLS * PER_CALL
    # keys of half the bytes go round once, in less time than the kernel takes.
    assert held / 2 / 50 < fast.sparse.kernel
    assert fast.sparse.exchange == pytest.approx(by_heads + moved + latency)
    assert fast.dense.exchange == pytest.approx(by_heads + latency)
    left_over = held / 2 - slow.sparse.kernel
    assert left_over > 0
    assert slow.sparse.exchange == pytest.approx(by_heads + held * 0.75 + latency + left_over)


def test_heads_shared_between_machines_exchange_at_both_rates() -> None:
    model = fit([replace(LARGE, heads=48), SMALL], 2)
    (key, *_) = model.videos
    found = model.predicted(key, Hosts(2, 8), between=50.0)
    assert found.ring == 1
    held = VOLUME / 16
    expected = held * 7 / 16 * PER_MB + held / 2 / 50 + CALLS * PER_CALL
    assert found.sparse.exchange == pytest.approx(expected)


def test_what_is_held_out_says_the_error() -> None:
    worse = replace(made_up(4), sparse_ms=made_up(4).sparse_ms * 1.25)
    rows = [LARGE, SMALL, worse]
    found = {
        (row.shape, row.gpus): row
        for row in scaling_rows(fit(rows, 2), rows, 2, [Hosts(1, 4), Hosts(1, 8)])
    }
    two, four, eight = (found[LARGE.shape, gpus] for gpus in "248")
    assert (two.fitted, four.fitted, eight.fitted) == (True, False, False)
    assert two.sparse_error == pytest.approx(0, abs=1e-9)
    assert four.sparse_error == pytest.approx(1 / 1.25 - 1)
    assert four.dense_error == pytest.approx(0, abs=1e-9)
    assert eight.sparse_error is eight.measured_dense_ms is None
    assert len(found) == 6


def test_rings_and_heads_left_in_order_are_not_fitted() -> None:
    ring = replace(LARGE, kind="ring", ring=2, sparse_ms=1e6)
    in_order = replace(LARGE, kind="skewed", balance=False, kernel_ms=1e6)
    apart = replace(LARGE, kind="apart", sparse_ms=1.0)
    assert fit([LARGE, ring, in_order, apart], 2).videos.keys() == {key_of(LARGE)}
    with pytest.raises(OptionError, match="bench gpus --gpus 2"):
        fit([ring, in_order], 2)
    with pytest.raises(OptionError, match="no row of 2 GPUs or fewer"):
        fit([made_up(4)], 2)


def test_no_part_is_negative() -> None:
    # twice as fast on two and more than that: nothing is fixed.
    assert fit_two_terms([(1, 1), (1, 0.5)], [10, 4]).first == 0
    # slower on two: nothing is shared.
    assert fit_two_terms([(1, 1), (1, 0.5)], [4, 10]).second == 0


@pytest.mark.parametrize("text", ["0", "2x", "x8", "2x8x2", "-1", "eight", "9" * 5000, ""])
def test_what_is_no_number_of_gpus_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="no number of GPUs"):
        Hosts.parse(text)


def test_the_command_prints_what_it_predicts(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    gpus_file(path).add(*(rounded(row, DIGITS) for row in (LARGE, SMALL, made_up(4))))
    arguments = ["bench", "scaling", str(path), "--on", "2x8", "--between", "50", "--seconds", "10"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "0.004 ms for each MB" in result.stderr
    lines = [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("| wan")]
    # two videos: what was measured, 2x8, and 10 seconds on one and on 2x8.
    assert [line[5] for line in lines] == ["2", "4", "2x8", "1", "2x8", "2", "2x8", "1", "2x8"]
    answer = CliRunner().invoke(main, [*arguments, "--json"])
    assert len(json.loads(answer.stdout)["rows"]) == len(lines)
    assert CliRunner().invoke(main, [*arguments[:5]]).exit_code == 2


def test_a_file_of_other_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    gpus_file(path).add({**asdict(LARGE), "more": 1})
    result = CliRunner().invoke(main, ["bench", "scaling", str(path)])
    assert result.exit_code == 2
    assert "holds no benchmark of several GPUs" in result.stderr


@pytest.mark.parametrize("option", ["--seconds", "--between"])
def test_no_number_is_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "rows.json").touch()
    told = CliRunner().invoke(
        main, ["bench", "scaling", str(tmp_path / "rows.json"), option, "nan"]
    )
    assert told.exit_code == 2
    assert "nan is not in the range" in told.output
