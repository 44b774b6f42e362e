"""``vidsparse bench quality``: rows as promised, resumed row by row, drawn and tabled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from matplotlib.figure import Figure
from tiny_pipelines import save_tiny_wan

from vidsparse.apps.cli import main
from vidsparse.apps.quality_curve import draw_curve
from vidsparse.apps.quality_studies import STUDIES, Knob, configurations
from vidsparse.apps.quality_study import held_out_prompts

ROOT = Path(__file__).resolve().parents[1]
PROMISED = [
    "method", "options", "size", "selected", "computed", "psnr_mean", "psnr_std", "ssim_mean",
    "prompts", "commit",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny_wan(tmp_path_factory.mktemp("model") / "tiny")


def _quality(model: Path, folder: Path, *options: str) -> Result:
    prompts = folder / "p.txt"
    prompts.write_text("a red circle\na blue square\na red square\n", encoding="utf-8")
    # 384 tokens: three 128-row blocks, enough for tiles to be left out.
    arguments = ["--frames", "9", "--size", "128x128", "--steps", "3", "--device", "cpu"]
    arguments += ["--prompts", "2", "--batch", "2", "--commit", "c0ffee"]
    arguments += ["--model", str(model), "--out", str(folder / "q.json"), *options]
    return CliRunner().invoke(main, ["bench", "quality", str(prompts), *arguments])


def _rows(folder: Path) -> list[dict]:
    return json.loads((folder / "q.json").read_text(encoding="utf-8"))["rows"]


def test_rows_are_written_resumed_drawn_and_tabled(tiny_model: Path, tmp_path: Path) -> None:
    done = _quality(tiny_model, tmp_path, "--study", "tiles", "--limit-rows", "1")
    assert done.exit_code == 0, done.output
    (row,) = _rows(tmp_path)
    assert list(row)[: len(PROMISED)] == PROMISED
    assert row["options"] == {
        "top_p": 0.5, "topk": None, "tile": "16x16", "merge": "xor", "order": "hilbert", "reuse": 1,
        "dense_ends": 0, "dense_steps": 0.24,
    }  # fmt: skip
    assert (row["method"], row["size"], row["prompts"]) == ("fg-attn", "128x128", 2)
    assert row["commit"] == "c0ffee"
    assert 0 < row["selected"] <= row["computed"] <= 1
    assert 5 < row["psnr_mean"] < 100

    done = _quality(tiny_model, tmp_path, "--study", "tiles", "--limit-rows", "1")
    assert "1 of 20 rows are there already" in done.stderr
    first, second = _rows(tmp_path)
    assert first == row
    assert second["options"]["tile"] == "32x32"

    curve = tmp_path / "curve.png"
    shown = _quality(tiny_model, tmp_path, "--limit-rows", "0", "--curve", str(curve), "--table")
    assert shown.exit_code == 0, shown.output
    assert curve.read_bytes().startswith(b"\x89PNG")
    assert "| 32x32 | 0.5 |" in shown.stdout
    assert _rows(tmp_path) == [first, second]


def test_rows_of_merging_alone_are_drawn_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads((ROOT / "docs/benchmarks/quality-small.json").read_text("utf-8"))["rows"]
    named: list[str] = []
    legend = Figure.legend

    def spy(figure: Figure, handles: Any, labels: Any, **options: Any) -> Any:
        named.extend(labels)
        return legend(figure, handles, labels, **options)

    monkeypatch.setattr(Figure, "legend", spy)
    merged = [row for row in rows if row["study"] == "merging"]
    draw_curve(merged, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert set(named) == {row["options"]["tile"] for row in merged}
    # rows of a tile that no colour is for leave an empty picture, not an error.
    other = [{**row, "options": {"tile": "1x1"}} for row in merged]
    draw_curve(other, tmp_path / "other.png")


def test_orders_are_compared_at_equal_computed_density(tiny_model: Path, tmp_path: Path) -> None:
    done = _quality(tiny_model, tmp_path, "--study", "orders", "--limit-rows", "8")
    assert done.exit_code == 0, done.output
    rows = _rows(tmp_path)
    sparge, calibrated = rows[:5], rows[5:]
    assert {row["options"]["order"] for row in sparge} == {
        "hilbert", "rowmajor", "columnmajor", "timemajor", "random",
    }  # fmt: skip
    for row in rows:
        assert row["sparsity"] >= 0
        assert row["l1"] >= 0
        assert 0 <= row["sim_q"] <= 1
        assert 0 <= row["sim_k"] <= 1
    # each order has a top_p of its own; blocks of 3 are coarse, so the density is only near.
    for row in calibrated:
        assert row["target"] == 0.35
        assert row["computed"] == pytest.approx(0.35, abs=0.15)
    # a calibrated row is known again by its target, whatever top_p was found.
    again = _quality(tiny_model, tmp_path, "--study", "orders", "--limit-rows", "1")
    assert "8 of 15 rows are there already" in again.stderr
    assert _rows(tmp_path)[:8] == rows


def test_methods_are_compared_at_equal_selected_density(tiny_model: Path, tmp_path: Path) -> None:
    done = _quality(tiny_model, tmp_path, "--study", "equal", "--table")
    assert done.exit_code == 0, done.output
    rows = _rows(tmp_path)
    assert {(row["method"], row["options"]["tile"]) for row in rows} >= {
        ("fg-attn", "16x16"), ("fg-attn", "128x128"), ("spargeattn", "128x64"),
    }  # fmt: skip
    for row in rows:
        assert (row["aim"], row["target"]) == ("selected", 0.35)
    # 24 x 24 tiles: fine enough to come near. 3 x 3 are not.
    fine = next(row for row in rows if row["options"]["tile"] == "16x16")
    assert fine["selected"] == pytest.approx(0.35, abs=0.02)
    assert f"| fg-attn | 16x16 | top_p {fine['options']['top_p']:g} |" in done.stdout
    again = _quality(tiny_model, tmp_path, "--study", "equal")
    assert "rows are there already" in again.stderr
    assert _rows(tmp_path) == rows


def test_a_plan_that_serves_two_steps_is_another_row(tiny_model: Path, tmp_path: Path) -> None:
    done = _quality(tiny_model, tmp_path, "--study", "defaults", "--limit-rows", "2")
    assert done.exit_code == 0, done.output
    first, second = _rows(tmp_path)
    assert (first["options"]["reuse"], second["options"]["reuse"]) == (1, 2)
    assert first["psnr_mean"] != second["psnr_mean"]
    again = _quality(tiny_model, tmp_path, "--study", "defaults", "--limit-rows", "0", "--table")
    assert "| 0.6 | 2 |" in again.stdout


def test_a_knob_runs_from_the_least_density_to_the_most() -> None:
    falling = Knob("tau", 0.1, 0.001, logarithmic=True)
    assert [falling.at(share) for share in (0, 0.5, 1)] == pytest.approx([0.1, 0.01, 0.001])
    assert Knob("top_p", 0.2, 1.0).at(0.25) == pytest.approx(0.4)


def test_the_study_covers_what_was_promised() -> None:
    everything = list(configurations(STUDIES))
    tiles = [one for one in everything if one.study == "tiles"]
    assert {one.options["tile"] for one in tiles} == {"16x16", "32x32", "64x64", "128x128"}
    assert {one.options["merge"] for one in everything if one.study == "merging"} == {
        "consecutive", "xor-window",
    }  # fmt: skip
    assert len({str(one) for one in everything}) == len(everything)


def test_the_default_prompts_are_the_held_out_ones() -> None:
    prompts = held_out_prompts()
    assert len(set(prompts)) == 24


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--batch 0", "batch must be at least 1"),
        ("--frames 10", "Hint: use 9"),
        ("--study speed", "tiles"),
        ("--limit-rows 0 --curve c.png", "no rows"),
    ],
)
def test_bad_options_write_nothing(
    tiny_model: Path, tmp_path: Path, options: str, words: str
) -> None:
    done = _quality(tiny_model, tmp_path, *options.split())
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "q.json").exists()


def test_a_file_of_something_else_is_not_touched(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text('{"format": "other"}', encoding="utf-8")
    done = _quality(tiny_model, tmp_path, "--limit-rows", "1")
    assert done.exit_code == 2
    assert "holds no quality study" in done.stderr
    assert json.loads((tmp_path / "q.json").read_text()) == {"format": "other"}
