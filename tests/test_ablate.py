"""``vidsparse ablate``: rows of videos and of single calls, tables put into a page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from vidsparse.apps.cli import main
from vidsparse.apps.results.marked_page import fill_page
from vidsparse.apps.small_model.prompts import calibration_prompts, held_out_prompts
from vidsparse.apps.studies import call_ablations, study_presets
from vidsparse.apps.studies.call_ablations import difference_rows
from vidsparse.apps.studies.call_meters import ErrorMeter, recall_rows
from vidsparse.apps.studies.prepare_study import sizes_of
from vidsparse.calls import RecordedCall
from vidsparse.errors import OptionError, OutputError
from vidsparse.grid import TokenGrid
from vidsparse.methods import FgAttn, Sale, SpargeAttn
from vidsparse.methods.sale import relative_scores, relative_scores_mask
from vidsparse.pipelines.models import MODELS, ModelRef, resolve_model
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = """# Ablations
By hand.
<!-- rows: judge -->
old
<!-- end -->
<!-- rows: judge-l1 -->
<!-- end -->
Also by hand.
"""


def _ablate(model: Path, folder: Path, *options: str) -> Result:
    prompts = folder / "p.txt"
    prompts.write_text("a red circle\na blue square\n", encoding="utf-8")
    arguments = ["--frames", "9", "--size", "128x128", "--steps", "3", "--device", "cpu"]
    arguments += ["--batch", "2", "--commit", "c0ffee", "--model", str(model)]
    arguments += ["--out", str(folder / "q.json"), "--calls", str(folder / "c.json"), *options]
    return CliRunner().invoke(main, ["ablate", str(prompts), *arguments])


@pytest.mark.slow
def test_rows_are_measured_once_and_put_into_the_page(tiny_model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    only = ("--only", "judge", "--only", "judge-l1")
    done = _ablate(tiny_model, tmp_path, *only, "--page", str(page))
    assert done.exit_code == 0, done.output
    videos = json.loads((tmp_path / "q.json").read_text(encoding="utf-8"))["rows"]
    # the model's own order and the random one, each with and without.
    assert [(row["options"]["theta"], row["options"]["order"]) for row in videos] == [
        (0.3, "hilbert"), (-1.0, "hilbert"), (0.3, "random"), (-1.0, "random"),
    ]  # fmt: skip
    calls = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert len(calls["rows"]) == 5
    assert calls["model"]["weights_hash"]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Ablations\nBy hand.\n")
    assert text.endswith("Also by hand.\n")
    assert "old" not in text
    assert "| 128x128 | -1.0 | random |" in text
    assert "| 128x128 | timemajor |" in text

    again = _ablate(tiny_model, tmp_path, *only)
    assert "4 of 4 rows are there already" in again.stderr
    assert "judge-l1 is there already" in again.stderr
    assert "### judge-l1" in again.stdout


@pytest.mark.slow
def test_calibrated_methods_are_held_to_their_word_on_other_prompts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[int] = []

    def few(model: ModelRef, count: int) -> tuple[str, ...]:
        wanted.append(count)
        return ("a green ring", "a red ball")

    monkeypatch.setattr(study_presets, "calibration_prompts", few)
    only = ("sale-recall", "held-out", "bsfa-density", "calibration")
    flags = [word for name in only for word in ("--only", name)]
    presets = tmp_path / "presets"
    plots = tmp_path / "plots"
    flags += ["--presets", str(presets)]
    done = _ablate(tiny_model, tmp_path, *flags, "--plots", str(plots))
    assert done.exit_code == 0, done.output
    files = sorted(presets.iterdir())
    assert [path.name for path in files if path.suffix == ".json"] == [
        f"tiny-{name}-128x128x9-3.json"
        for name in ("bsfa", "foresight", "sale", "spargeattn", "xattention")
    ]
    for path in files[::2]:
        measured = json.loads(path.read_text(encoding="utf-8"))["measured"]
        assert measured["prompts"] == 2
        # noise that no video of the study starts from.
        assert measured["seed"] == 1000
    assert sorted(wanted) == [5, 5, 5, 8, 16]
    videos = json.loads((tmp_path / "q.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["method"], row["calibrated"]) for row in videos] == [
        (name, calibrated)
        for calibrated in (False, True)
        for name in ("spargeattn", "xattention", "sale", "foresight")
    ]
    # what each head has of its own is no option.
    taus = [row["options"]["tau"] for row in videos if row["method"] != "foresight"]
    assert taus == [0.9, 0.9, 0.004, None, None, None]
    shares = [row["options"]["share"] for row in videos if row["method"] == "foresight"]
    assert shares == [0.15, None]
    rows = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))["rows"]
    of = {name: [row for row in rows if row["ablation"] == name] for name in only[:3]}
    assert len(of["held-out"]) == 6
    for row in of["held-out"]:
        # two videos, one sparse step of two, two layers and two guidance branches.
        assert row["calls"] == 8
        assert row["prompts"] == 2
        assert 0 <= row["heads_under"] <= 1
    assert [row["case"] for row in of["bsfa-density"]] == [
        "0.05",
        "0.1",
        "0.2",
        "0.3",
        "0.5",
        "0.7",
    ]
    for row in of["bsfa-density"]:
        assert row["gap"] == pytest.approx(row["measured"] - row["predicted"])
        assert 0 < row["measured"] <= 1
    assert [row["case"] for row in of["sale-recall"]] == ["tau 0.004", "tau 0.02", "calibrated"]
    assert sorted(path.name for path in plots.iterdir()) == sorted(f"{name}.png" for name in only)

    made = {path: path.stat().st_mtime_ns for path in files}
    (tmp_path / "c.json").unlink()
    again = _ablate(tiny_model, tmp_path, *flags)
    assert again.exit_code == 0, again.output
    assert "8 of 8 rows are there already" in again.stderr
    assert "Calibrating" not in again.stderr
    assert {path: path.stat().st_mtime_ns for path in files} == made

    # numbers of another model are not taken for this one's.
    document = json.loads(files[0].read_text(encoding="utf-8"))
    document["model"]["weights_hash"] = "another"
    files[0].write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "c.json").unlink()
    refused = _ablate(tiny_model, tmp_path, "--only", "bsfa-density", "--presets", str(presets))
    assert refused.exit_code == 2
    assert "other weights" in refused.stderr


def test_masks_over_length_belong_to_no_size(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_ablations, "LENGTHS", {"cpu": (256, 512)})
    done = _ablate(tiny_model, tmp_path, "--only", "lengths", "--plots", str(tmp_path / "plots"))
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))["rows"]
    assert [row["case"] for row in rows] == ["256", "512"]
    for row in rows:
        assert "size" not in row
        assert row["share"] == pytest.approx(row["mask_ms"] / row["dense_ms"])
    assert "| tokens | mask ms |" in done.stdout
    assert (tmp_path / "plots" / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_size_the_bundled_model_is_studied_at_both_of_its_own() -> None:
    asked = {"model": "shapes", "size": None, "frames": None}
    assert sizes_of(asked) == (((256, 256), 33), ((384, 384), 49))
    assert sizes_of({**asked, "frames": 17}) == ((None, 17),)
    assert sizes_of({**asked, "model": "other"}) == ((None, None),)


def test_recall_is_the_share_of_full_precisions_tiles() -> None:
    generator = torch.Generator().manual_seed(0)
    grid = TokenGrid(1, 16, 64)
    q, k, v = (torch.randn(1, 2, grid.tokens, 32, generator=generator) for _ in range(3))
    # one direction that all keys have much of: it eats most of what four bits can tell apart.
    k[..., 0] += 20 * torch.randn(grid.tokens, generator=generator)
    call = RecordedCall(q=q, k=k, v=v, site=CallSite(0, 0, 0.0, grid))
    tile, tau = (64, 32), 0.5
    exact = relative_scores(q, k, tile, 256, rounded=False)
    rounded = relative_scores_mask(q, k, tau, tile, 256)
    wanted, judged = exact >= math.log(tau), exact < torch.inf
    (row,) = recall_rows([call], {"a": Sale(tau=tau)}, "rowmajor")
    assert row["recall"] == pytest.approx(float((wanted & rounded).sum() / wanted.sum()))
    of_judged = float((wanted & rounded & judged).sum() / (wanted & judged).sum())
    assert row["recall_judged"] == pytest.approx(of_judged)
    assert 0 < row["recall_judged"] < row["recall"] < 1
    # nothing is judged where the local area is everything.
    (row,) = recall_rows([call], {"a": Sale(tau=tau, local=4096)}, "rowmajor")
    assert (row["recall"], row["recall_judged"]) == (1, None)


@pytest.mark.parametrize("name", MODELS)
def test_calibration_keeps_off_the_held_out_prompts(name: str) -> None:
    model = resolve_model(name)
    prompts = calibration_prompts(model, 16)
    assert len(set(prompts)) == 16
    assert not set(prompts) & set(held_out_prompts(model))
    # those of five are the first of those of sixteen.
    assert calibration_prompts(model, 5) == prompts[:5]


@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("shapes", r"^a (small|medium|large) .* moves (?:left|right|up|down) on a (\w+) "),
        ("scenes", r"^(a .*? over (?:a|the) [^,]+), [^,]+, (?!as )[^,]+((?:, as .*)?)$"),
    ],
)
def test_prompts_to_calibrate_with_are_of_the_kinds_of_the_held_out_ones(
    name: str, traits: str
) -> None:
    model = resolve_model(name)

    def kinds(prompts: Sequence[str]) -> list[tuple[str, ...]]:
        return [re.findall(traits, prompt)[0] for prompt in prompts]

    held_out = held_out_prompts(model)
    # size and texture of bodies in straight motion; camera, ground and light over two bodies.
    assert len(set(kinds(held_out))) > 10
    prompts = calibration_prompts(model, 48)
    assert kinds(prompts) == kinds(held_out) * 2
    assert len(set(prompts)) == 48
    assert not set(prompts) & set(held_out)


def test_errors_are_counted_by_video_and_by_head() -> None:
    grid = TokenGrid(1, 16, 32)
    q = torch.zeros(2, 2, grid.tokens, 16)
    k = torch.zeros_like(q)
    # the second video's second head looks at one key that top-p of pooled tiles leaves out.
    q[1, 1], k[1, 1, 300] = 4, 1
    v = torch.ones_like(q)
    v[:, :, 300] = 200
    call = RecordedCall(q=q, k=k, v=v, site=CallSite(0, 0, 0.0, grid))
    everything = ErrorMeter(case="all", method=FgAttn(topk=1.0), order="rowmajor", bound=0.01)
    dropping = FgAttn(topk=0.5, means=None)
    half = ErrorMeter(case="half", method=dropping, order="rowmajor", bound=0.01)
    for meter in (everything, half):
        meter.see(call)
        meter.see(call)
    row = everything.row()
    assert (row["calls"], row["calls_under"], row["heads_under"]) == (4, 1, 1)
    assert row["l1_worst"] < 1e-5
    assert row["selected"] == row["computed"] == 1
    row = half.row()
    assert row["selected"] == pytest.approx(0.5)
    assert row["calls_under"] < 1
    assert row["l1_worst"] >= row["l1"] > 0.01


def test_the_judge_matters_where_a_block_has_no_one_mean() -> None:
    # two kinds of keys take turns: their mean says nothing, so only the judge keeps their blocks.
    generator = torch.Generator().manual_seed(0)
    grid = TokenGrid(1, 16, 64)
    q = torch.randn(1, 2, 1, 16, generator=generator).expand(1, 2, grid.tokens, 16) * 2
    k = 0.1 * torch.randn(1, 2, grid.tokens, 16, generator=generator)
    k[:, :, 256:512] += torch.tensor([1.0, -1.0]).repeat(128).unsqueeze(1) * q[:, :, 256:512]
    k[:, :, :64] += 0.5 * q[:, :, :64]
    v = torch.randn(1, 2, grid.tokens, 16, generator=generator)
    call = RecordedCall(q=q.contiguous(), k=k, v=v, site=CallSite(0, 0, 0.0, grid))
    methods = {"with": SpargeAttn(means=None), "without": SpargeAttn(means=None, theta=-1)}
    rows = difference_rows([call], methods, telling=0.05)
    row = next(row for row in rows if row["case"] == "rowmajor")
    assert row["filtered"] == row["heads"] == 2
    assert row["l1_filtered_with"] < 0.1 < 0.5 < row["l1_filtered_without"]
    assert row["sparsity_with"] < row["sparsity_without"]


def test_a_page_without_the_place_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    with pytest.raises(OptionError, match="no place for strides"):
        fill_page(page, {"judge": "| a |", "strides": "| b |"})
    assert page.read_text(encoding="utf-8") == PAGE


def test_a_page_that_cannot_be_read_is_said_with_a_hint(tmp_path: Path) -> None:
    said = r"none\.md cannot be read: No such file .*\. Hint: --page takes a Markdown file"
    with pytest.raises(OptionError, match=said):
        fill_page(tmp_path / "none.md", {})
    (tmp_path / "latin.md").write_bytes(b"\xe9t\xe9")
    with pytest.raises(OptionError, match=r"latin\.md cannot be read: .*utf-8.* Hint: --page"):
        fill_page(tmp_path / "latin.md", {})


def test_a_page_that_cannot_be_written_is_said_without_another_options_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr("vidsparse.files.os.replace", full)
    with pytest.raises(OutputError, match=r"page\.md cannot be written: No space left") as said:
        fill_page(page, {"judge": "| a |"})
    assert "--out" not in str(said.value)
    assert page.read_text(encoding="utf-8") == PAGE
    assert list(tmp_path.iterdir()) == [page]


def test_a_file_named_wrong_is_not_shown_as_one_without_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = Path("rows.json")
    rows.write_text('{"format": "vidsparse-quality/1", "rows": []}', encoding="utf-8")
    for files, missing in (
        ((), "docs/benchmarks/quality-small.json"),
        (("--out", "typo.json"), "typo.json. Hint: name one with --out"),
        (("--out", "rows.json", "--calls", "typo.json"), "typo.json. Hint: name one with --calls"),
    ):
        done = CliRunner().invoke(main, ["ablate", "--limit-rows", "0", *files])
        assert done.exit_code == 2, done.output
        assert f"there is no file of rows {missing}" in " ".join(done.stderr.split())
    # whoever has the videos' rows alone can look at them.
    shown = CliRunner().invoke(main, ["ablate", "--limit-rows", "0", "--out", "rows.json"])
    assert shown.exit_code == 0, shown.output


def test_nothing_is_measured_for_a_wrong_name(tiny_model: Path, tmp_path: Path) -> None:
    done = _ablate(tiny_model, tmp_path, "--only", "speed")
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "q.json").exists()
