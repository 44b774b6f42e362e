"""``vidsparse compare`` on a tiny pipeline: the same seeds on both sides, and a full report."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from vidsparse.apps.cli import main
from vidsparse.apps.runs.comparison import Comparison, warm_ups
from vidsparse.apps.runs.prepared import PreparedPrompt
from vidsparse.apps.runs.prompts import Prompt
from vidsparse.pipelines.models import resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve
from vidsparse.pipelines.video import read_video
from vidsparse.schedule import Schedule

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = ["report.html", "report.json", "report.md"]
SIDES = ("dense", "sparse")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "pair.txt"
    path.write_text("a red circle\na <b>blue</b> square | moves\n", encoding="utf-8")
    return path


def _compare(model: Path, prompts: Path, *options: str) -> Result:
    # 32 latent tokens a frame of 3: two tiles of 16 for every 128-row block to choose from.
    arguments = ["--model", str(model), "--frames", "9", "--size", "64x64", "--steps", "4"]
    out = prompts.parent / "o"
    return CliRunner().invoke(
        main, ["compare", str(prompts), *arguments, "--device", "cpu", "--out", str(out), *options]
    )


def _document(prompts: Path) -> dict[str, Any]:
    (path,) = (prompts.parent / "o").glob("*/report.json")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


class Killed(BaseException):
    pass


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], set[int]]:
    """The prompts that are measured, by number, and those that the process dies at."""
    measured: list[int] = []
    deadly: set[int] = {2}
    measure = Comparison._measure

    def watch(self: Comparison, one: Any, *videos: Any) -> Any:
        if one.prompt.number in deadly:
            raise Killed
        measured.append(one.prompt.number)
        return measure(self, one, *videos)

    monkeypatch.setattr(Comparison, "_measure", watch)
    return measured, deadly


def test_a_killed_compare_goes_on_where_it_was(
    tiny_model: Path, prompts: Path, watched: tuple[list[int], set[int]]
) -> None:
    measured, deadly = watched
    options = ("--top-p", "0.3", "--dense-steps", "1")
    with pytest.raises(Killed):
        _compare(tiny_model, prompts, *options)
    (folder,) = (prompts.parent / "o").iterdir()
    assert (folder / "0001-a-red-circle.json").exists()
    assert not (folder / "report.json").exists()

    deadly.clear()
    done = _compare(tiny_model, prompts, *options)
    assert done.exit_code == 0, done.output
    assert measured == [1, 2]
    continued = _document(prompts)
    assert any("1 of 2 prompts were measured by an earlier" in one for one in continued["notes"])
    assert not list(folder.glob("0*.json"))

    # a comparison that came to its end is measured anew, and says the same.
    assert _compare(tiny_model, prompts, *options).exit_code == 0
    assert measured == [1, 2, 1, 2]
    again = _document(prompts)
    for one, other in zip(continued["prompts"], again["prompts"], strict=True):
        for name in ("prompt", "seed", "psnr", "ssim", "flicker", "frames", "work", "selected"):
            assert one[name] == other[name]
    assert continued["density_map"] == again["density_map"]


@pytest.mark.parametrize("at", ["0002-a-b-blue-b-square-moves.mp4", "0002", "report.html"])
def test_a_full_disk_stops_a_compare_that_goes_on_later(
    at: str, tiny_model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if target.name.startswith(at):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as disk:
        disk.setattr("vidsparse.files.os.replace", full)
        ended = _compare(tiny_model, prompts)
    assert ended.exit_code == 1, ended.output
    (said,) = [line for line in ended.stderr.splitlines() if "Error:" in line]
    assert "cannot be written: No space left on device. The run stops here" in said
    assert said.count("Hint:") == 1
    assert said.endswith("run the same command again to go on.")
    done = _compare(tiny_model, prompts)
    assert done.exit_code == 0, done.output
    assert "Going on where an earlier run was stopped." in done.stderr


@pytest.mark.parametrize(
    "damage",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("video", "record")), "batch"],
)
def test_a_killed_compare_trusts_nothing_that_changed(
    damage: str, tiny_model: Path, prompts: Path, watched: tuple[list[int], set[int]]
) -> None:
    measured, deadly = watched
    with pytest.raises(Killed):
        _compare(tiny_model, prompts)
    (folder,) = (prompts.parent / "o").iterdir()
    record, video = folder / "0001-a-red-circle.json", folder / "0001-a-red-circle.mp4"
    if damage == "video":
        video.write_bytes(video.read_bytes()[:-100])
    elif damage == "record":
        record.write_text(record.read_text("utf-8").replace('"psnr": ', '"psnr": 1'), "utf-8")
    deadly.clear()
    done = _compare(tiny_model, prompts, *(("--batch", "2") if damage == "batch" else ()))
    assert done.exit_code == 0, done.output
    assert measured == [1, 1, 2]


def test_a_killed_compare_goes_on_after_another_prompt_was_edited(
    tiny_model: Path, prompts: Path, watched: tuple[list[int], set[int]]
) -> None:
    measured, deadly = watched
    with pytest.raises(Killed):
        _compare(tiny_model, prompts)
    deadly.clear()
    prompts.write_text("a red circle\na green ring\n", encoding="utf-8")
    done = _compare(tiny_model, prompts)
    assert done.exit_code == 0, done.output
    assert measured == [1, 2]
    (report,) = (prompts.parent / "o").glob("*/report.json")
    videos = sorted(path.name for path in report.parent.glob("*.mp4"))
    assert videos == ["0001-a-red-circle.mp4", "0002-a-green-ring.mp4"]
    # what the stopped run has left is no reason to measure no more.
    done = _compare(tiny_model, prompts)
    assert done.exit_code == 0, done.output
    assert measured == [1, 2, 1, 2]


@pytest.mark.parametrize("other", ["prompts", "batch"])
def test_a_report_stays_where_another_one_is_made(
    other: str, tiny_model: Path, prompts: Path
) -> None:
    assert _compare(tiny_model, prompts).exit_code == 0
    (first,) = (prompts.parent / "o").iterdir()
    written = {path.name: path.read_bytes() for path in first.iterdir()}
    if other == "prompts":
        prompts.write_text("a red circle\na green ring\n", encoding="utf-8")
    done = _compare(tiny_model, prompts, *(("--batch", "2") if other == "batch" else ()))
    assert done.exit_code == 0, done.output
    assert {path.name: path.read_bytes() for path in first.iterdir()} == written
    (second,) = {*(prompts.parent / "o").iterdir()} - {first}
    assert sorted(path.name for path in second.glob("report.*")) == FILES


def test_a_prompt_measured_with_other_threads_is_measured_anew(
    tiny_model: Path, prompts: Path, watched: tuple[list[int], set[int]]
) -> None:
    measured, deadly = watched
    with pytest.raises(Killed):
        _compare(tiny_model, prompts)
    deadly.clear()
    torch.set_num_threads(2)
    done = _compare(tiny_model, prompts)
    assert done.exit_code == 0, done.output
    assert measured == [1, 1, 2]
    document = _document(prompts)
    assert document["environment"]["device"].endswith(", 2 threads")
    threads = [one[side]["device"]["threads"] for one in document["prompts"] for side in SIDES]
    assert threads == [2] * 4


def test_prompts_measured_on_different_machines_have_no_ratio(
    tiny_model: Path,
    prompts: Path,
    watched: tuple[list[int], set[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # workers that prompts are spread over say where they ran in their records only.
    monkeypatch.setattr("vidsparse.apps.commands.compare.machine_text", lambda _: "workers")
    with pytest.raises(Killed):
        _compare(tiny_model, prompts)
    watched[1].clear()
    torch.set_num_threads(2)
    done = _compare(tiny_model, prompts)
    assert done.exit_code == 0, done.output
    assert watched[0] == [1, 2]
    assert "no ratio: measured on different machines" in done.stdout
    document = _document(prompts)
    assert document["summary"]["speedup"]["why"] == "measured on different machines"
    assert re.search(r", 1 threads and .*, 2 threads$", document["environment"]["device"])


def test_compare_reports_what_sparsity_cost(tiny_model: Path, prompts: Path) -> None:
    done = _compare(tiny_model, prompts, "--top-p", "0.3", "--dense-steps", "1")
    assert done.exit_code == 0, done.output
    (folder,) = (prompts.parent / "o").iterdir()
    assert folder.name.startswith("pair-compare-fg-attn-")
    videos = ["0001-a-red-circle.mp4", "0002-a-b-blue-b-square-moves.mp4"]
    assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == videos + FILES
    # dense, sparse and difference next to each other.
    assert read_video(folder / videos[0]).shape == (9, 64, 192, 3)

    document = _document(prompts)
    summary = document["summary"]
    assert summary["prompts"] == 2
    assert 0 < summary["selected"] <= summary["computed"] < 1
    assert summary["dense_step_share"] == 0.25
    # the dense step counts in full.
    assert summary["total"] == pytest.approx(0.25 + 0.75 * summary["computed"])
    assert f"computed    {summary['total']:.1%} of the run's attention: 25.0% dense" in done.stdout
    alone = summary["flickering"]
    words = f"flickering  {alone['dense']:.4f} dense, {alone['sparse']:.4f} sparse, as in VBench"
    assert words in done.stdout
    assert 0 < summary["smoothness"]["sparse"] <= 1
    assert 5 < summary["psnr"]["mean"] < 90
    assert summary["psnr"]["count"] == 2
    assert [len(each["frames"]) for each in document["prompts"]] == [9, 9]
    # one dense step of four, two layers.
    assert [len(row) for row in document["density_map"]] == [2] * 4
    assert document["density_map"][0] == [1.0, 1.0]
    assert document["density_map"][1][0] < 1
    for each in document["prompts"]:
        assert each["seed"] == each["dense"]["seed"] == each["sparse"]["seed"] == 0
        assert each["dense"]["options"]["method"] == "dense"
        assert each["seconds"]["dense"]["denoise"] > 0
    printed = [line.split()[:2] for line in done.stdout.splitlines()]
    assert ["PSNR", f"{summary['psnr']['mean']:.2f}"] in printed
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("data:video/mp4;base64,") == 2
    assert "http://" not in page
    assert "https://" not in page


def test_a_full_mask_costs_rounding_only(tiny_model: Path, prompts: Path) -> None:
    assert _compare(tiny_model, prompts, "--top-p", "1", "--dense-steps", "0").exit_code == 0
    summary = _document(prompts)["summary"]
    assert summary["computed"] == 1.0
    assert summary["identical"] == 2 or summary["psnr"]["mean"] > 60


def test_dense_against_dense_is_identical_and_says_so(tiny_model: Path, prompts: Path) -> None:
    done = _compare(tiny_model, prompts, "--method", "dense")
    assert done.exit_code == 0, done.output
    document = _document(prompts)
    assert document["summary"]["identical"] == 2
    assert [(each["psnr"], each["identical"]) for each in document["prompts"]] == [(None, True)] * 2
    assert "identical" in done.stdout


def test_a_batch_measures_the_same(tiny_model: Path, prompts: Path) -> None:
    options = ("--top-p", "0.3", "--dense-steps", "1")
    _compare(tiny_model, prompts, *options)
    done = _compare(tiny_model, prompts, *options, "--batch", "2")
    assert done.exit_code == 0, done.output
    paths = (prompts.parent / "o").glob("*/report.json")
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    single, batched = (
        each["summary"] for each in sorted(reports, key=lambda each: each["settings"]["batch"])
    )
    assert batched["psnr"]["mean"] == pytest.approx(single["psnr"]["mean"], abs=0.5)
    assert batched["ssim"]["mean"] == pytest.approx(single["ssim"]["mean"], abs=0.01)


def test_quiet_prints_the_reports_only(tiny_model: Path, prompts: Path) -> None:
    done = _compare(tiny_model, prompts, "-q")
    assert sorted(Path(line).name for line in done.stdout.splitlines()) == FILES
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--batch 0", "batch must be"),
        ("--turns 0", "turns must be"),
        ("--frames 10", "Hint: use 9"),
        ("--overwrite", "No such"),
    ],
)
def test_bad_options_write_nothing(
    tiny_model: Path, prompts: Path, options: str, words: str
) -> None:
    done = _compare(tiny_model, prompts, *options.split())
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (prompts.parent / "o").exists()


def test_compare_s_answer_in_json_is_its_summary(tiny_model: Path, prompts: Path) -> None:
    done = _compare(tiny_model, prompts, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["summary"] == _document(prompts)["summary"]
    assert [Path(each).name for each in answer["files"]] == [
        "report.html", "report.md", "report.json",
    ]  # fmt: skip


@pytest.mark.slow
def test_parts_are_switched_on_one_after_the_other(wide_model: Path, prompts: Path) -> None:
    options = (
        "--top-p",
        "0.3",
        "--dense-steps",
        "1",
        "--linear",
        "int8",
        "--cache",
        "first-block",
        "--cache-threshold",
        "0.5",
    )
    done = _compare(wide_model, prompts, *options, "--steps", "8", "--parts")
    assert done.exit_code == 0, done.output
    document = _document(prompts)
    stages = document["summary"]["stages"]
    assert [stage["name"] for stage in stages] == [
        "sparse attention (fg-attn)", "linear layers in int8", "step cache (first-block)",
    ]  # fmt: skip
    # the last is the run itself, whatever else the report says of it.
    assert stages[-1]["psnr"] == document["summary"]["psnr"]
    assert stages[-1]["seconds"] == document["summary"]["seconds"]["sparse"]["denoise"]
    assert stages[-1]["worst"] == document["summary"]["worst"]["psnr"]
    assert all(stage["worst"] <= stage["psnr"]["mean"] for stage in stages)
    assert "prompt " in done.stdout.split("worst", 1)[1].splitlines()[0]
    means = [stage["psnr"]["mean"] for stage in stages]
    assert len(set(means)) == 3
    # one part alone is what a run with it alone has.
    assert _compare(wide_model, prompts, *options[:4], "--steps", "8").exit_code == 0
    alone, whole = sorted(
        (json.loads(path.read_text("utf-8")) for path in (prompts.parent / "o").glob("*/*.json")),
        key=lambda each: len(each["summary"]["stages"]),
    )
    assert alone["summary"]["stages"] == []
    assert alone["summary"]["psnr"] == whole["summary"]["stages"][0]["psnr"]
    for words in ("linear layers in int8", "step cache (first-block)", f"{means[1]:.2f}"):
        assert words in done.stdout
        for name in ("report.html", "report.md"):
            (text,) = (
                path.read_text("utf-8")
                for path in (prompts.parent / "o").glob(f"*/{name}")
                if "linear layers" in path.read_text("utf-8")
            )
            assert words in text


@pytest.mark.slow
def test_parts_of_a_killed_compare_are_kept(
    wide_model: Path, prompts: Path, watched: tuple[list[int], set[int]]
) -> None:
    measured, deadly = watched
    options = ("--linear", "int8", "--parts")
    with pytest.raises(Killed):
        _compare(wide_model, prompts, *options)
    deadly.clear()
    assert _compare(wide_model, prompts, *options).exit_code == 0
    assert measured == [1, 2]
    assert [len(each["stages"]) for each in _document(prompts)["prompts"]] == [2, 2]


@pytest.mark.parametrize("batch", [1, 2])
def test_both_sides_in_turns_tell_a_speed_that_outlives_a_kill(
    tiny_model: Path,
    prompts: Path,
    watched: tuple[list[int], set[int]],
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
) -> None:
    # a tiny pipeline's runs are far too short.
    monkeypatch.setattr("vidsparse.speedup.SHORT", 0.0)
    _, deadly = watched
    options = ("--batch", str(batch), "--turns", "3")
    with pytest.raises(Killed):
        _compare(tiny_model, prompts, *options)
    deadly.clear()
    done = _compare(tiny_model, prompts, *options)
    assert done.exit_code == 0, done.output
    document = _document(prompts)
    one, other = document["prompts"]
    assert (len(one["turns"]), len(other["turns"])) == (3, 3)
    for each in (one, other):
        for side, taken in zip(("dense", "sparse"), zip(*each["turns"], strict=True), strict=True):
            found = each["seconds"][side]
            assert found["denoise"] == pytest.approx(sum(taken) / 3)
            assert found["total"] > found["denoise"]
            assert len(set(taken)) == 3
    # the prompts of a batch are made at once, and are one pair in each turn.
    assert document["summary"]["speedup"]["pairs"] == 6 // batch
    assert (one["turns"] == other["turns"]) == (batch == 2)
    dense, sparse = (sum(seconds) for seconds in zip(*one["turns"], *other["turns"], strict=True))
    assert document["summary"]["denoise_speedup"] == pytest.approx(dense / sparse)
    assert f"over {6 // batch} pairs)" in done.stdout
    assert any("made 3 times in turns" in note for note in document["notes"])


def test_parts_run_once_and_the_last_of_them_in_every_turn(
    wide_model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vidsparse.speedup.SHORT", 0.0)
    prompts.write_text("a red circle\n", encoding="utf-8")
    done = _compare(wide_model, prompts, "--linear", "int8", "--parts", "--turns", "2")
    assert done.exit_code == 0, done.output
    summary = _document(prompts)["summary"]
    attention, linear = summary["stages"]
    assert attention["speedup"]["why"] == "timed once"
    assert linear["speedup"] == summary["speedup"]
    assert linear["speedup"]["pairs"] == 2
    assert re.search(r"timed +dense, then sparse, 2 times in turns; the first", done.stdout)


def test_a_run_of_one_part_is_not_taken_apart(tiny_model: Path, prompts: Path) -> None:
    done = _compare(tiny_model, prompts, "--parts")
    assert done.exit_code == 2
    assert "this one differs in sparse attention (fg-attn) only" in done.stderr
    assert not (prompts.parent / "o").exists()


def test_compare_says_which_side_ran_when_and_how_sure_the_speed_is(
    tiny_model: Path, prompts: Path
) -> None:
    printed = _compare(tiny_model, prompts).stdout
    # a tiny pipeline's runs are far too short.
    assert re.search(r"speed +no ratio: too short to time; a ratio takes 2 pairs", printed)
    assert re.search(r"timed +dense, then sparse, in turns; .* began at \d\d:\d\d:\d\d", printed)


@pytest.mark.parametrize("last", [0, 5])
def test_the_untimed_steps_before_a_sparse_run_are_sparse(last: int) -> None:
    defaults = resolve_model("shapes").defaults
    request = GenerateRequest(
        prompt="x", model="shapes", device="cpu", method="fg-attn", dense_last_steps=last
    )
    prompt = Prompt(number=1, text="x", line=1)
    prepared = PreparedPrompt(prompt=prompt, request=resolve(request, defaults))
    _, (sparse,) = warm_ups([prepared], defaults, False)
    assert sparse.steps == 2
    assert Schedule.of(sparse).sparse_window(2) == range(2)
