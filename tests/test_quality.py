"""``vidsparse bench quality``: rows as promised, resumed row by row, drawn and tabled."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from concurrent.futures import Future, wait
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from matplotlib.figure import Figure

from vidsparse.apps.cli import main
from vidsparse.apps.commands import bench_quality
from vidsparse.apps.small_model.prompts import held_out_prompts
from vidsparse.apps.studies import prepare_study, study_presets
from vidsparse.apps.studies.aim import find_density
from vidsparse.apps.studies.configurations import STUDIES, configurations
from vidsparse.apps.studies.quality_plots import draw_curve
from vidsparse.apps.studies.quality_rows import PendingRow
from vidsparse.apps.studies.quality_study import AIM_TRIALS, QualityStudy
from vidsparse.apps.studies.quality_tables import total_of
from vidsparse.methods import SPARSE_METHODS, make_method
from vidsparse.methods.studied import Knob
from vidsparse.pipelines.families import WAN
from vidsparse.pipelines.models import MODELS, resolve_model
from vidsparse.pipelines.speed import bundle_for
from vidsparse.schedule import share_or_count

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[1]
PROMISED = [
    "method", "options", "size", "selected", "computed", "psnr_mean", "psnr_std", "ssim_mean",
    "prompts", "commit",
]  # fmt: skip


def _quality(model: Path, folder: Path, *options: str) -> Result:
    prompts = folder / "p.txt"
    prompts.write_text("a red circle\na blue square\na red square\n", encoding="utf-8")
    # 384 tokens: three 128-row blocks, enough for tiles to be left out.
    arguments = ["--frames", "9", "--size", "128x128", "--steps", "3", "--device", "cpu"]
    arguments += ["--prompts", "2", "--batch", "2", "--commit", "c0ffee"]
    arguments += ["--model", str(model), "--out", str(folder / "q.json"), *options]
    return CliRunner().invoke(main, ["bench", "quality", str(prompts), *arguments])


def _rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "q.json").read_text(encoding="utf-8"))["rows"]


def test_rows_are_written_resumed_drawn_and_tabled(tiny_model: Path, tmp_path: Path) -> None:
    done = _quality(tiny_model, tmp_path, "--study", "tiles", "--limit-rows", "1")
    assert done.exit_code == 0, done.output
    (row,) = _rows(tmp_path)
    assert list(row)[: len(PROMISED)] == PROMISED
    assert row["options"] == {
        "top_p": 0.5, "topk": None, "score": "mass", "tile": "16x16", "merge": "xor", "means": None,
        "plans": "own", "order": "hilbert", "reuse": 1, "refresh": 0, "dense_ends": 0,
        "dense_steps": 0.24,
    }  # fmt: skip
    assert (row["method"], row["size"], row["prompts"]) == ("fg-attn", "128x128", 2)
    assert row["commit"] == "c0ffee"
    assert 0 < row["selected"] <= row["computed"] <= 1
    # one step of three is dense.
    assert row["total"] == pytest.approx(1 / 3 + 2 / 3 * row["computed"])
    assert total_of({**row, "total": None}) == pytest.approx(row["total"])
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


def test_rows_that_are_measured_are_written_where_the_next_one_is_interrupted(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[PendingRow] = []
    ended: list[bool] = []
    measure = QualityStudy._measure

    def measure_two(study: QualityStudy, *given: Any) -> PendingRow:
        if len(begun) == 2:
            wait([future for row in begun for future in row.measured])
            ended.append(True)
            raise KeyboardInterrupt
        begun.append(measure(study, *given))
        return begun[-1]

    # as if metrics took longer than the next row's videos: none is written before the third.
    monkeypatch.setattr(PendingRow, "measured_all", property(lambda _: bool(ended)))
    monkeypatch.setattr(QualityStudy, "_measure", measure_two)
    done = _quality(tiny_model, tmp_path, "--study", "tiles", "--limit-rows", "3")
    assert done.exit_code == 130, done.output
    assert [row["options"]["tile"] for row in _rows(tmp_path)] == ["16x16", "32x32"]


def test_a_row_whose_metrics_were_given_up_or_failed_is_not_measured() -> None:
    there, given_up, failed = (Future[Any]() for _ in range(3))
    there.set_result(None)
    given_up.cancel()
    failed.set_exception(OSError())
    one = next(iter(configurations(("tiles",))))
    assert PendingRow(one, {}, [there]).measured_all
    assert not PendingRow(one, {}, [there, given_up]).measured_all
    assert not PendingRow(one, {}, [there, failed]).measured_all


def test_ssim_of_other_frames_is_not_put_beside_rows(tiny_model: Path, tmp_path: Path) -> None:
    once = ("--study", "tiles", "--limit-rows", "1")
    assert _quality(tiny_model, tmp_path, *once).exit_code == 0
    written = (tmp_path / "q.json").read_bytes()
    done = _quality(tiny_model, tmp_path, *once, "--ssim-every", "1")
    assert done.exit_code == 2, done.output
    assert "on every 4. frame, not" in done.stderr
    assert "Hint: give --ssim-every the number of those rows" in done.stderr
    assert (tmp_path / "q.json").read_bytes() == written


def test_videos_of_another_guidance_are_not_put_beside_rows(
    tiny_model: Path, tmp_path: Path
) -> None:
    given = ("--study", "bundles", "--prompts", "1", "--limit-rows", "1")
    assert _quality(tiny_model, tmp_path, *given, "--guidance", "1").exit_code == 0
    written = (tmp_path / "q.json").read_bytes()
    done = _quality(tiny_model, tmp_path, *given)
    assert done.exit_code == 2, done.output
    assert "holds rows of guidance 1, not of 5. Hint: name another file" in done.stderr
    assert (tmp_path / "q.json").read_bytes() == written
    (row,) = _rows(tmp_path)
    # as models without a card of their own run, in 50 steps.
    assert (row["options"]["share"], row["options"]["dense_steps"]) == (0.11, 6)


def test_the_first_bundles_of_the_study_are_those_of_models_without_a_card() -> None:
    bundle = bundle_for("balanced", WAN.defaults, steps=50, device="cpu", dtype="fp32")
    share = bundle.method_options["share"]
    amounts = {
        name: share_or_count(bundle.schedule[name], 50, name) for name in ("dense_steps", "refresh")
    }
    first, *_ = configurations(("bundles",))
    assert first.options["share"] == share
    assert {"dense_steps": first.dense_steps, "refresh": first.refresh} == amounts


def test_the_total_of_earlier_rows_follows_from_their_fields() -> None:
    rows = json.loads((ROOT / "docs/benchmarks/quality-small.json").read_text("utf-8"))["rows"]
    assert not any("total" in row for row in rows)
    (row,) = [
        row
        for row in rows
        if row["study"] == "defaults"
        and row["size"] == "256x256"
        and row["options"]["top_p"] == 0.8
        and row["options"].get("dense_ends") == 1
    ]
    # 5 of 20 steps, 2 of 8 layers, and 42 % in the rest.
    assert row["computed"] == pytest.approx(0.422, abs=1e-3)
    assert total_of(row) == pytest.approx(0.25 + 0.75 * (0.25 + 0.75 * row["computed"]))
    # the layers of a model that is not at hand are not guessed.
    assert total_of({**row, "model": "owner/name"}) is None
    plain = {**row, "model": "owner/name", "options": {**row["options"], "dense_ends": 0}}
    assert total_of(plain) == pytest.approx(0.25 + 0.75 * row["computed"])


def test_a_stored_total_is_the_one_that_counts() -> None:
    assert total_of({"total": 0.4, "computed": 0.9}) == 0.4


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


@pytest.mark.slow
def test_orders_are_compared_at_equal_computed_density(tiny_model: Path, tmp_path: Path) -> None:
    given = ("--study", "orders", "--limit-rows", "6", "--prompts", "1")
    done = _quality(tiny_model, tmp_path, *given)
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
    # an order has a top_p of its own; blocks of 3 are coarse, so the density is only near.
    (row,) = calibrated
    assert row["target"] == 0.35
    assert row["computed"] == pytest.approx(0.35, abs=0.15)
    # a calibrated row is known again by its target, whatever top_p was found.
    known = [any(map(one.describes, rows)) for one in configurations(("orders",))]
    assert known == [True] * 6 + [False] * 14


@pytest.mark.slow
def test_methods_are_compared_at_equal_selected_density(tiny_model: Path, tmp_path: Path) -> None:
    given = ("--study", "equal", "--prompts", "1")
    done = _quality(tiny_model, tmp_path, *given, "--table")
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
    again = _quality(tiny_model, tmp_path, *given)
    assert f"{len(rows)} of {len(rows)} rows are there already" in again.stderr
    assert _rows(tmp_path) == rows


@pytest.mark.slow
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


# densities that SpargeAttn's videos had at tau (rows of quality-small.json, 256x256); on the calls
# of a dense run it is 0.43 at least.
TAUS = (0.002, 0.158, 0.217, 0.643, 0.869, 1.0)
DENSITIES = (0.184, 0.273, 0.306, 0.584, 0.714, 1.0)


@pytest.mark.parametrize("goal", [0.2, 0.35, 0.7])
@pytest.mark.parametrize("start", [0.002, 0.5, 0.998])
def test_a_density_is_found_from_a_guess_that_is_far_off(goal: float, start: float) -> None:
    tried: list[float] = []

    def measure(tau: float) -> float:
        tried.append(tau)
        return float(np.interp(tau, TAUS, DENSITIES))

    find_density(measure, goal, start=start, tolerance=0.01, trials=AIM_TRIALS)
    assert np.interp(tried[-1], TAUS, DENSITIES) == pytest.approx(goal, abs=0.01)
    # a density that is met ends the search.
    assert tried[0] == start
    assert len(tried) <= AIM_TRIALS


def test_a_density_that_no_number_has_is_come_near_to() -> None:
    tried: list[float] = []

    def measure(place: float) -> float:
        tried.append(place)
        return 0.2 if place < 0.3 else 0.5

    find_density(measure, 0.35, start=0.9, tolerance=0.01, trials=AIM_TRIALS)
    assert len(tried) == AIM_TRIALS
    assert min(abs(place - 0.3) for place in tried) < 0.05


def test_the_study_covers_what_was_promised() -> None:
    everything = list(configurations(STUDIES))
    tiles = [one for one in everything if one.study == "tiles"]
    assert {one.options["tile"] for one in tiles} == {"16x16", "32x32", "64x64", "128x128"}
    assert {one.options["merge"] for one in everything if one.study == "merging"} == {
        "consecutive", "xor-window",
    }  # fmt: skip
    assert len({str(one) for one in everything}) == len(everything)


def test_every_row_goes_with_the_numbers_that_a_model_brings() -> None:
    defaults = resolve_model("shapes").defaults
    for one in configurations(STUDIES):
        if one.method in SPARSE_METHODS and one.aim is None and not one.calibrated:
            settled = {**defaults.method_options.get(one.method, {}), **one.options}
            make_method(one.method, **settled)


@pytest.mark.parametrize("name", MODELS)
def test_the_default_prompts_are_the_held_out_ones(name: str) -> None:
    model = resolve_model(name)
    prompts = held_out_prompts(model)
    assert len(set(prompts)) == 24
    # words that the model knows, each of them
    said = {word for prompt in prompts for word in re.findall(r"\w+", prompt)}
    assert said <= set(model.vocabulary)


def test_the_prompts_of_another_model_are_those_of_shapes(tiny_model: Path) -> None:
    assert held_out_prompts(resolve_model(tiny_model)) == held_out_prompts(resolve_model("shapes"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--batch 0", "batch must be at least 1"),
        ("--frames 10", "Hint: use 9"),
        ("--study speed", "tiles"),
        ("--limit-rows 0 --curve c.png", "there is no file of rows"),
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


def test_the_commit_is_of_the_repository_that_holds_the_code(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "env" / "vidsparse" / "apps" / "studies" / "prepare_study.py"
    code.parent.mkdir(parents=True)
    code.touch()
    author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), *author, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "-m", "something else")
    monkeypatch.setattr(prepare_study, "__file__", str(code))
    once = ("--study", "tiles", "--limit-rows", "1", "--commit", "")
    done = _quality(tiny_model, tmp_path, *once)
    assert done.exit_code == 2, done.output
    assert "git cannot say which code this is" in done.stderr
    git("add", str(code))
    git("commit", "-m", "the code")
    assert _quality(tiny_model, tmp_path, *once).exit_code == 0
    assert _rows(tmp_path)[0]["commit"] == git("rev-parse", "HEAD")


def test_a_file_of_something_else_is_not_touched(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text('{"format": "other"}', encoding="utf-8")
    done = _quality(tiny_model, tmp_path, "--limit-rows", "1")
    assert done.exit_code == 2
    assert "holds no quality study" in done.stderr
    assert json.loads((tmp_path / "q.json").read_text()) == {"format": "other"}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("fresh_dynamo")
def test_rows_of_compiled_blocks_stand_apart_from_those_that_are_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    graphs = torch._dynamo.utils.counters["stats"]
    one = ("--study", "seconds", "--limit-rows", "1", "--prompts", "1", "--table")
    before = graphs["unique_graphs"]
    assert _quality(tiny_model, tmp_path, *one).exit_code == 0
    assert graphs["unique_graphs"] == before
    done = _quality(tiny_model, tmp_path, *one, "--compile")
    assert done.exit_code == 0, done.output
    assert graphs["unique_graphs"] > before
    plain, compiled = _rows(tmp_path)
    assert (plain["method"], compiled["method"]) == ("dense", "dense")
    assert ("compile" in plain, compiled["compile"]) == (False, True)
    # the stock pipeline beside it is the same; the compiler rounds otherwise.
    assert compiled["psnr_mean"] is None or compiled["psnr_mean"] > 60
    titles = [line for line in done.stdout.splitlines() if line.startswith("###")]
    assert [title.endswith(", compiled") for title in titles] == [False, True]
    # each is found again, and the next one is measured.
    again = _quality(tiny_model, tmp_path, *one, "--compile")
    assert "1 of 33 rows are there already." in again.stderr
    assert len(_rows(tmp_path)) == 3


def test_a_method_is_timed_against_the_stock_pipeline(tiny_model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "seconds.png"
    done = _quality(
        tiny_model, tmp_path, "--study", "seconds", "--limit-rows", "3", "--seconds", str(picture),
        "--table",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    dense, *sparse = _rows(tmp_path)
    assert (dense["method"], dense["total"], dense["identical"]) == ("dense", 1.0, 2)
    for row in sparse:
        assert row["speedup"] == pytest.approx(row["dense_video_seconds"] / row["video_seconds"])
        assert row["dense_seconds"] == pytest.approx(2 * row["dense_video_seconds"])
        assert row["options"]["reuse"] == 2
        # as it runs where nobody asks: means stand for what is left out.
        assert row["options"].get("means", 64) is not None
        assert row["target"] == 0.2
    assert len({row["method"] for row in sparse}) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "times stock" in done.stdout

    again = _quality(tiny_model, tmp_path, "--study", "seconds", "--limit-rows", "0")
    assert again.exit_code == 0, again.output
    timed = [one for one in configurations(("seconds",)) if one.method == "dense"]
    assert [one.describes(dense) for one in timed] == [True]


def test_a_row_by_the_card_has_its_schedule_and_numbers(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carded = shutil.copytree(tiny_model, tmp_path / "carded")
    card = {
        "method_options": {"foresight": {"share": 0.9, "fading": 0.3}},
        "schedules": {"foresight": {"dense_steps": 2, "reuse": 1, "refresh": 1}},
    }
    (carded / "vidsparse.json").write_text(json.dumps(card), encoding="utf-8")
    timed = list(configurations(("seconds",)))
    by_card = [one for one in timed if one.by_card]
    assert {one.method for one in by_card} == {"foresight"}
    monkeypatch.setattr(bench_quality, "configurations", lambda studies: iter(by_card[:1]))
    picture = tmp_path / "seconds.png"
    options = ("--study", "seconds", "--table", "--seconds", str(picture))
    done = _quality(carded, tmp_path, *options)
    assert done.exit_code == 0, done.output
    assert "| foresight, model's schedule |" in done.stdout
    assert picture.is_file()
    (row,) = _rows(tmp_path)
    had = row["options"]
    assert (had["fading"], had["dense_steps"], had["reuse"], had["refresh"]) == (0.3, 2, 1, 1)
    # the knob is set for the density, whatever the card's is.
    assert (row["target"], had["share"] < 0.9) == (0.2, True)
    again = _quality(carded, tmp_path, *options)
    assert "1 of 1 rows are there already." in again.stderr
    # the row of the same density with the study's own schedule is another one, either way.
    assert [one.describes(row) for one in timed if one.method == "foresight"].count(True) == 1
    before = {name: value for name, value in row.items() if name != "by_card"}
    assert not any(one.describes(before) for one in by_card)


@pytest.mark.slow
def test_a_promise_is_held_against_prompts_that_its_preset_has_not_seen(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ("a green ring", "a red ball", "a blue square")
    asked: list[int] = []

    def calibration_prompts(_: object, count: int) -> tuple[str, ...]:
        asked.append(count)
        return tuple(islice(cycle(own), count))

    monkeypatch.setattr(study_presets, "calibration_prompts", calibration_prompts)
    presets = tmp_path / "presets"
    given = ("--study", "promises", "--limit-rows", "1", "--table", "--presets", str(presets))
    done = _quality(tiny_model, tmp_path, *given)
    assert done.exit_code == 0, done.output
    (row,) = _rows(tmp_path)
    assert (row["method"], row["promise"], row["calibrated"]) == ("foresight", 32.0, True)
    # what the preset says, which is of other prompts than the row's.
    assert (row["promised"]["prompts"], row["prompts"]) == (8, 2)
    assert row["promised"]["psnr"] != row["psnr_mean"]
    assert row["calibration_seconds"] > 0
    assert "own prompts" in done.stdout
    # presets for other targets are other rows, with presets of their own.
    assert [one.describes(row) for one in configurations(("promises",))] == [True, False, False]
    (preset,) = presets.glob("*-foresight-*-32dB.json")
    told = json.loads(preset.read_text(encoding="utf-8"))
    assert told["schedule"]["refresh"] == row["options"]["refresh"]
    # a promise from another number of prompts is another row, from a preset of its own.
    for more in (["--samples", "2"], ["--overwrite"], ["--overwrite", "--samples", "2"]):
        again = _quality(tiny_model, tmp_path, *given, *more)
        assert again.exit_code == 0, again.output
        assert [row["promised"]["prompts"] for row in _rows(tmp_path)] == [8, 2]
    # what lay there was taken again.
    assert asked == [8, 2]
    assert list(presets.glob("*-32dB-2.json"))
    assert _quality(tiny_model, tmp_path, *given, "--samples", "0").exit_code == 2
    for kind in (".json", ".safetensors"):
        shutil.copy(preset.with_suffix(kind), preset.with_name(f"{preset.stem}-3{kind}"))
    refused = _quality(tiny_model, tmp_path, *given, "--samples", "3")
    assert refused.exit_code == 2
    assert "was made of 8 prompts, not of 3" in refused.stderr
