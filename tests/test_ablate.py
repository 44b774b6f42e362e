"""``vidsparse ablate``: rows of videos and of single calls, tables put into a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from tiny_pipelines import save_tiny_wan

from vidsparse.apps.call_ablations import judge_rows
from vidsparse.apps.cli import main
from vidsparse.apps.marked_page import fill_page
from vidsparse.errors import OptionError
from vidsparse.grid import TokenGrid
from vidsparse.site import CallSite
from vidsparse.statistics import RecordedCall

PAGE = """# Ablations
By hand.
<!-- rows: judge -->
old
<!-- end -->
<!-- rows: judge-l1 -->
<!-- end -->
Also by hand.
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny_wan(tmp_path_factory.mktemp("model") / "tiny")


def _ablate(model: Path, folder: Path, *options: str) -> Result:
    prompts = folder / "p.txt"
    prompts.write_text("a red circle\na blue square\n", encoding="utf-8")
    arguments = ["--frames", "9", "--size", "128x128", "--steps", "3", "--device", "cpu"]
    arguments += ["--batch", "2", "--commit", "c0ffee", "--model", str(model)]
    arguments += ["--out", str(folder / "q.json"), "--calls", str(folder / "c.json"), *options]
    return CliRunner().invoke(main, ["ablate", str(prompts), *arguments])


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
    row = next(row for row in judge_rows([call]) if row["case"] == "rowmajor")
    assert row["filtered"] == row["heads"] == 2
    assert row["l1_filtered_with"] < 0.1 < 0.5 < row["l1_filtered_without"]
    assert row["sparsity_with"] < row["sparsity_without"]


def test_a_page_without_the_place_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    with pytest.raises(OptionError, match="no place for strides"):
        fill_page(page, {"judge": "| a |", "strides": "| b |"})
    assert page.read_text(encoding="utf-8") == PAGE
    with pytest.raises(OptionError, match="cannot be read"):
        fill_page(tmp_path / "none.md", {})


def test_nothing_is_measured_for_a_wrong_name(tiny_model: Path, tmp_path: Path) -> None:
    done = _ablate(tiny_model, tmp_path, "--only", "speed")
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "q.json").exists()
