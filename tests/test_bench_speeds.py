"""``vidsparse bench model --speed``: whole runs of each speed, put together from measured steps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_models import TINY, shrink
from click.testing import CliRunner, Result
from quick import slow_but

from vidsparse.apps.bench.model_readings import merged_share
from vidsparse.apps.bench.model_settings import EXACT, settings_of
from vidsparse.apps.bench.model_shapes import MODEL_SHAPES
from vidsparse.apps.bench.speed_plot import draw_runs
from vidsparse.apps.bench.speed_rows import COLUMNS, SpeedRow, speed_file
from vidsparse.apps.bench.speeds import SpeedBench
from vidsparse.apps.cli import main
from vidsparse.errors import OptionError
from vidsparse.kernels import dispatch
from vidsparse.pipelines.speed import SPEEDS

PUBLISHED = Path(__file__).parents[1] / "docs" / "benchmarks" / "speeds-h200.json"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published models, shrunk."""
    shrink(monkeypatch)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "model", *arguments])


def measured(file: Path, family: str, *arguments: str, steps: int = 12) -> list[SpeedRow]:
    shape = MODEL_SHAPES[family]
    small = ["--size", "256x192", "--frames", str(2 * shape.frame_factor + shape.frame_rest)]
    where = ["--device", "cpu", "--steps", str(steps), "--json", str(file)]
    result = bench("--family", family, *small, *where, *arguments)
    assert result.exit_code == 0, result.output
    return speed_file(file).typed(SpeedRow)


@pytest.mark.parametrize("family", slow_but(["wan-1.3b"], TINY))
@pytest.mark.usefixtures("tiny")
def test_every_kind_of_step_of_a_speed_is_measured(family: str, tmp_path: Path) -> None:
    asked = ("--speed", "fast", "--speed", "exact", "--whole")
    # where a step is one forward, or none can be left out, fewer of them are dense.
    one, uncached = family in ("hunyuanvideo", "minimax-h3"), family == "ltx-2"
    steps, warmup = (16, 0.08) if one or uncached else (12, 0.12)
    share = 0.09 if one else 0.11
    exact, fast = measured(tmp_path / "rows.json", family, *asked, steps=steps)
    assert (exact.speed, fast.speed) == ("exact", "fast")
    assert (exact.dense_steps, exact.sparse_steps, exact.cached_steps) == (steps, 0, 0)
    assert exact.sparse_ms is exact.computed is exact.cached_ms is None
    assert fast.method == "foresight"
    # the first refresh is the last dense step. Of 16 steps 8 % are two, and 6 % one.
    refreshes = 2 if uncached else 1
    assert (fast.warmup, fast.dense_steps, fast.refresh_steps) == (warmup, 1, refreshes)
    # the step cache leaves a third of the steps out, or a branch of two in steps in turn.
    turns = family.startswith("wan")
    cached = 0 if turns or uncached or family == "minimax-h3" else steps // 3
    halved = 7 if turns else 0
    sparse = steps - 1 - refreshes - cached - halved
    assert (fast.sparse_steps, fast.cached_steps) == (sparse, cached)
    assert fast.halved_steps == halved
    assert fast.cache == ("guidance 3" if turns else "taylorseer" if cached else "none")
    if turns:
        assert fast.halved_ms is not None
        assert fast.halved_kernel_ms is not None
        assert fast.halved_plan_ms is not None
        assert 0 < fast.halved_kernel_ms + fast.halved_plan_ms < fast.halved_ms
    assert fast.asked == share
    # of so few tokens text, means and whole chunks are much more than was asked for.
    assert fast.computed is not None
    assert share <= fast.computed < 0.6
    assert fast.sparse_ms is not None
    assert fast.kernel_ms is not None
    assert fast.mask_plan_ms is not None
    assert 0 < fast.kernel_ms + fast.mask_plan_ms < fast.sparse_ms
    for row in (exact, fast):
        assert row.dense_attention_ms is not None
        assert 0 < row.dense_attention_ms < row.dense_ms
        assert row.error < 1e-6
        assert row.whole_s is not None
        assert row.whole_reference_s is not None
    # a step counts as left out if no block ran in it; how long it took is not judged here, where
    # a step is milliseconds long and other tests have the processor.
    assert (fast.cached_ms or 0) > 0 if cached else fast.cached_ms is None


@pytest.mark.usefixtures("tiny")
def test_another_method_and_its_refreshes_are_measured_in_the_place_of_the_speeds_own(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.json"
    (own,) = measured(file, "wan-1.3b", "--speed", "balanced")
    given = ("--speed", "balanced", "--method", "foresight", "--refresh", "3")
    both = measured(file, "wan-1.3b", *given, "--whole", "--computed", "0.2", "--warmup", "0.16")
    assert both[0] == own
    row = both[1]
    # the first refresh is the last dense step.
    assert (row.dense_steps, row.refresh_steps, row.sparse_steps) == (1, 3, 3)
    assert row.halved_steps == 5
    assert row.refresh_ms is not None
    assert row.refresh_attention_ms is not None
    assert row.sparse_ms is not None
    assert 0 < row.refresh_attention_ms < row.refresh_ms
    assert row.sparse_ms > 0
    assert row.halved_ms is not None
    seconds = row.dense_ms + 3 * row.refresh_ms + 3 * row.sparse_ms + 5 * row.halved_ms
    assert row.run_s == pytest.approx(seconds / 1e3)
    assert row.error < 1e-6
    again = measured(file, "wan-1.3b", *given, "--whole", "--computed", "0.2", "--warmup", "0.16")
    assert again == both


@pytest.mark.usefixtures("tiny")
def test_rows_are_kept_and_only_missing_speeds_measured(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    (first,) = measured(file, "wan-1.3b", "--speed", "exact")
    again = measured(file, "wan-1.3b", "--speed", "exact", "--speed", "high")
    assert again[0] == first
    assert [row.speed for row in again] == ["exact", "high"]


@pytest.mark.usefixtures("tiny")
def test_a_row_is_of_one_kernel_and_format(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    (own,) = measured(file, "wan-1.3b", "--speed", "high")
    assert own.impl == "torch"
    assert measured(file, "wan-1.3b", "--speed", "high", "--implementation", "torch") == [own]
    eight_bits = ("--speed", "high", "--quantize", "int8")
    assert measured(file, "wan-1.3b", *eight_bits)[1].impl == "torch int8"
    rows = measured(file, "wan-1.3b", *eight_bits, "--implementation", "reference")
    assert [row.impl for row in rows] == ["torch", "torch int8", "reference int8"]
    # rows of earlier versions say their format among their parts, and no kernel.
    file.write_text(re.sub(r', "impl": "[^"]*"', "", file.read_text()))
    assert [row.impl for row in measured(file, "wan-1.3b", *eight_bits)] == [None] * 3


@pytest.mark.usefixtures("tiny")
def test_a_wrong_kernel_gets_no_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = dispatch.sparse_attention

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, lse = right(*args, **kwargs)
        return out * 1.5, lse

    monkeypatch.setattr("vidsparse.engine.sparse_attention", wrong)
    asked = ["--device", "cpu", "--steps", "12", "--size", "128x128", "--frames", "5"]
    result = bench("--family", "wan-1.3b", *asked, "--speed", "high")
    assert result.exit_code == 2
    assert "no speed is reported for a wrong result" in result.output


@pytest.mark.parametrize(
    ("steps", "warmup", "refreshes", "message"),
    [
        # after the last of these no two steps are left, after one before it there are.
        (50, 14, 20, None),
        (9, 2, 7, "7 refreshes in 9 steps leave no two sparse steps in a row"),
        (50, 6, 4, None),
    ],
)
def test_steps_that_cannot_be_measured_are_refused_before(
    steps: int, warmup: int, refreshes: int, message: str | None
) -> None:
    (setting,) = settings_of(
        ["wan-1.3b"], None, None, None, None, None, (), (EXACT,), steps=steps, implementation="auto"
    )
    bench_of = SpeedBench(
        setting=setting, device=torch.device("cpu"), dtype=torch.float32, say=print,
        warmup=warmup / steps, refresh=refreshes,
    )  # fmt: skip
    if message is None:
        bench_of.check("balanced")
        return
    with pytest.raises(OptionError, match=message):
        bench_of.check("balanced")


def a_row(**changes: Any) -> SpeedRow:
    row = speed_file(PUBLISHED).typed(SpeedRow)[1]
    assert row.method == "fg-attn"
    return replace(row, **changes)


def test_a_run_is_its_steps_of_each_kind() -> None:
    row = a_row(
        steps=10,
        dense_steps=2,
        sparse_steps=5,
        cached_steps=3,
        dense_ms=1000.0,
        sparse_ms=400.0,
        cached_ms=10.0,
        whole_s=4.0,
    )
    assert row.run_s == pytest.approx(4.03)
    assert row.ratio(1500.0) == pytest.approx(15 / 4.03)
    assert row.ratio(None) is None
    assert row.whole_error == pytest.approx(0.0075)


def test_a_step_of_one_branch_counts_as_such_a_step_takes() -> None:
    row = a_row(sparse_steps=20, halved_steps=18, halved_ms=500.0)
    assert row.run_s == pytest.approx(a_row(sparse_steps=20).run_s + 9.0)
    # where kernels take longer, they do so in half of a step.
    parts = [a_row(sparse_steps=n).ratio_if_selected(row.stock_ms) or 0 for n in (0, 1)]
    stock_s = row.steps * row.stock_ms / 1e3
    none, one = (stock_s / ratio for ratio in parts)
    more = one - none - (row.sparse_ms or 0) / 1e3
    selected_s = stock_s / (row.ratio_if_selected(row.stock_ms) or 0)
    assert selected_s == pytest.approx(row.run_s + 29 * more)


@pytest.mark.parametrize(
    ("parts", "cache"),
    [
        ("foresight, compiled blocks", "none"),
        ("foresight, step cache guidance 3", "guidance 3"),
        ("foresight, step cache taylorseer, q·k in int8", "taylorseer"),
    ],
)
def test_a_row_tells_its_step_cache(parts: str, cache: str) -> None:
    assert a_row(parts=parts).cache == cache


def test_the_parts_of_a_run_add_up_to_it() -> None:
    halved = {"halved_ms": 3e3, "halved_kernel_ms": 1e3, "halved_plan_ms": 100.0}
    own = a_row(halved_steps=9, sparse_steps=29, **halved)
    assert sum((own.shares() or {}).values()) == pytest.approx(own.run_s)
    for row in speed_file(PUBLISHED).typed(SpeedRow):
        shares, reference = row.shares(), row.reference_shares()
        assert reference is not None
        assert row.cudnn_ms is not None
        assert sum(reference.values()) == pytest.approx(row.steps * row.cudnn_ms / 1e3)
        if shares is not None:
            assert sum(shares.values()) == pytest.approx(row.run_s)
            assert min(shares.values()) >= 0


def test_a_selected_density_makes_the_run_slower_by_its_kernel_alone() -> None:
    row = a_row()
    share = merged_share("16x16", row.asked or 0)
    assert share is not None
    assert row.kernel_ms is not None
    assert row.computed is not None
    more = row.kernel_ms * (share - (row.asked or 0)) / row.computed
    run_s = row.run_s + row.sparse_steps * more / 1e3
    assert row.ratio_if_selected(row.stock_ms) == pytest.approx(
        row.steps * row.stock_ms / 1e3 / run_s
    )
    exact = a_row(tile=None, asked=None)
    assert exact.ratio_if_selected(exact.stock_ms) == exact.ratio(exact.stock_ms)


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_published_rows_are_of_whole_models_and_right(card: str) -> None:
    rows = speed_file(PUBLISHED.with_name(f"speeds-{card}.json")).typed(SpeedRow)
    assert {row.speed for row in rows} <= set(SPEEDS)
    for row in rows:
        shape = MODEL_SHAPES[row.family]
        assert row.layers == shape.full_layers()
        assert row.shape == f"{shape.width}x{shape.height}x{shape.frames}"
        run = row.dense_steps + row.refresh_steps + row.sparse_steps
        assert run + row.halved_steps + row.cached_steps == row.steps == 50
        assert row.error < 0.03
        # at most a third of a run is left out.
        assert row.cached_steps <= row.steps // 3
        assert row.whole_error is None or abs(row.whole_error) < 0.01


def test_published_rows_are_shown_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "runs.png"
    shown = bench("--show", str(PUBLISHED), "--speed", "fast", "--plot", str(picture))
    assert shown.exit_code == 0, shown.output
    table = [line for line in shown.output.splitlines() if line.startswith("|")]
    fast = [row for row in speed_file(PUBLISHED).typed(SpeedRow) if row.speed == "fast"]
    assert len(table) == 2 + len(fast)
    assert all(line.count("|") == len(COLUMNS) + 1 for line in table)
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_rows_without_parts_are_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is nothing to draw"):
        draw_runs([a_row(reference_linear_ms=None)], tmp_path / "runs.png")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--whole"], "--whole was given without a speed"),
        (["--plot", "runs.png"], "--plot was given without a speed"),
        (["--refresh", "2"], "--refresh was given without a speed"),
        (["--speed", "fast", "--tile", "32x32"], "--tile was given with --speed"),
        (["--speed", "fast", "--quantize", "int8", "--quantize", "fp8"], "one format of q·k"),
        (
            ["--speed", "fast", "--steps", "3", "--family", "wan-1.3b"],
            "3 steps have 0 that stay dense and are no refresh, and 2 after",
        ),
        (
            ["--speed", "fast", "--steps", "12", "--family", "hunyuanvideo"],
            "12 steps have 0 that stay",
        ),
        (["--speed", "fast", "--warmup", "0", "--family", "mochi"], "one dense and three sparse"),
        (["--speed", "quick"], "quick"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], said: str) -> None:
    result = bench(*arguments, "--device", "cpu")
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_files_of_steps_hold_no_speeds() -> None:
    steps = PUBLISHED.with_name("models-h200.json")
    result = bench("--show", str(steps), "--speed", "fast")
    assert result.exit_code == 2
    assert "has rows of steps only" in " ".join(result.output.split())
