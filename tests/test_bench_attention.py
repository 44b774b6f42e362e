"""``vidsparse bench attention``: lists as asked for, wrong kernels refused, rows kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import vidsparse.kernels
from vidsparse.apps.bench.attention import AttentionBench
from vidsparse.apps.bench.attention_cases import PLANNING, SUITE, Case, random_mask, structured_qk
from vidsparse.apps.bench.attention_peers import Offer, Peer, ready
from vidsparse.apps.bench.attention_rows import COLUMNS, AttentionRow
from vidsparse.apps.cli import main
from vidsparse.grid import TokenGrid

SMALL = Case(counts="kernel", tile=(128, 16), kept=0.3, seq_len=1000, heads=2, head_dim=64)
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "attention", *arguments])


@pytest.mark.parametrize("skew", [0.0, 0.8])
def test_lists_have_the_mean_length_asked_for_and_the_spread(skew: float) -> None:
    mask = random_mask(replace(SMALL, seq_len=16_000, skew=skew), CPU)
    lengths = mask.sum(-1).float()
    assert mask.shape == (1, 2, 125, 1000)
    assert lengths.mean().item() == pytest.approx(300, abs=1)
    assert lengths.min().item() == pytest.approx(300 * (1 - skew), abs=1)
    assert lengths.max().item() == pytest.approx(300 * (1 + skew), abs=1)


def test_no_list_is_empty_however_little_is_kept() -> None:
    assert bool(random_mask(replace(SMALL, kept=0.001, skew=1), CPU).any(-1).all())


def test_structured_queries_look_at_their_neighbours() -> None:
    torch.manual_seed(0)
    grid = TokenGrid(4, 16, 16)
    q, k = structured_qk(grid, 3, 64, torch.float32, CPU)
    scores = ((q @ k.transpose(-1, -2)) / 8).view(3, 4, 16, 16, 4, 16, 16)
    same = torch.einsum("ntyxtyx->ntyx", scores).mean((1, 2, 3))
    beside = torch.einsum("ntyxtyx->ntyx", scores[:, :, :, 1:, :, :, :-1]).mean((1, 2, 3))
    corners = scores[:, :, 0, 0, :, -1, -1].mean((1, 2))
    assert bool((same > 7).all())
    assert bool((beside > corners + 1).all())
    assert bool((corners.abs() < 1).all())


def test_the_suite_measures_every_case_at_a_length_beside_it() -> None:
    cases = set(SUITE)
    assert len(cases) == len(SUITE)
    shorter = {replace(case, seq_len=case.seq_len - 16) for case in SUITE}
    assert 2 * len(cases & shorter) == len(SUITE)


def test_a_peer_that_is_absent_or_fails_is_named_with_its_reason() -> None:
    def missing() -> Peer:
        raise ModuleNotFoundError("No module named 'nobody'", name="nobody")

    def broken() -> torch.Tensor:
        raise RuntimeError("no kernel image\nand much more")

    def offers() -> Iterator[Offer]:
        yield "nobody", missing
        yield "broken", lambda: Peer("broken", broken)
        yield "fine", lambda: Peer("fine", lambda: torch.ones(1))

    peers, absent = ready(offers())
    assert [peer.name for peer in peers] == ["fine"]
    assert absent == {
        "nobody": "not installed (nobody)",
        "broken": "RuntimeError: no kernel image",
    }


def test_a_wrong_kernel_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vidsparse.kernels.sparse_attention

    def wrong(*arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*arguments, **options)  # type: ignore[arg-type]
        return out * 1.001, lse

    monkeypatch.setattr(vidsparse.kernels, "sparse_attention", wrong, raising=False)
    result = bench("--seq-len", "512", "--kept", "0.5", "--repeats", "1")
    assert result.exit_code != 0
    assert "no speed is reported for a wrong result" in result.output


@pytest.mark.parametrize(
    ("counts", "mask", "plan"),
    [
        ("kernel", False, False),
        ("kernel and plan", False, True),
        ("kernel, plan and mask", True, True),
    ],
)
def test_the_ratio_counts_what_the_case_says(counts: str, mask: bool, plan: bool) -> None:
    rows = AttentionBench(CPU, torch.float32, 1, False, print).rows(replace(SMALL, counts=counts))
    for row in rows:
        assert (row.mask_ms is not None, row.plan_ms is not None) == (mask, plan)
        total = (row.ms or 0) + (row.mask_ms or 0) + (row.plan_ms or 0)
        assert row.ratio == pytest.approx(row.dense_ms / total)
        assert row.error is not None
        assert row.error < 1e-5


def test_planning_is_a_row_without_a_kernel() -> None:
    case = replace(SMALL, counts=PLANNING, tile=(16, 16))
    (row,) = AttentionBench(CPU, torch.float32, 1, False, print).rows(case)
    assert (row.ms, row.impl) == (None, "plan_attention")
    assert row.ratio == pytest.approx(row.dense_ms / (row.plan_ms or 0))


def test_rows_are_written_shown_as_a_table_and_drawn(tmp_path: Path) -> None:
    file, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    arguments = ["--seq-len", "512", "--seq-len", "500", "--kept", "0.5", "--repeats", "1"]
    result = bench(*arguments, "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["seq_len"] for row in rows] == [512, 500]
    shown = bench("--show", str(file), "--plot", str(picture))
    assert shown.exit_code == 0, shown.output
    table = [line for line in shown.output.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert all(line.count("|") == len(COLUMNS) + 1 for line in table)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    (dense,) = {row["dense_impl"] for row in json.loads(file.read_text())["rows"]}
    against = bench("--show", str(file), "--against", dense)
    assert against.output == bench("--show", str(file)).output
    nobody = bench("--show", str(file), "--against", "nobody")
    assert nobody.exit_code == 2
    assert f"has no rows against 'nobody'. Hint: choose from {dense}." in nobody.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "cudnn"], "among the rows of a file"),
        (["--plot", "rows.foo"], "must end in its format, got 'rows.foo'. Hint: .png"),
        (["--plot", "rows"], "must end in its format"),
        (["--plot", f"{__file__}/rows.png"], "is no folder for it"),
    ],
)
def test_what_a_run_could_not_end_with_is_refused_before_it(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vidsparse.apps.commands.bench_attention.measure_cases", None)
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_files_from_before_formats_had_names_are_read(tmp_path: Path) -> None:
    named = ROOT / "docs" / "benchmarks" / "attention-h200.json"
    document = json.loads(named.read_text(encoding="utf-8"))
    assert document.pop("format") == "vidsparse-attention/1"
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    assert bench("--show", str(file)).output == bench("--show", str(named)).output


def test_lists_of_a_model_s_own_call_are_those_that_weigh_most_in_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    run = ("--data", "shapes", "--size", "128x128", "--frames", "9", "--steps", "3")
    done = bench(*run, "--kept", "0.4", "--tile", "64x16", "--repeats", "1", "--json", str(path))
    assert done.exit_code == 0, done.output
    row, *_ = (AttentionRow(**row) for row in json.loads(path.read_text())["rows"])
    assert (row.seq_len, row.heads, row.head_dim) == (192, 4, 64)
    assert row.data.startswith("shapes, 128x128, 9 frames")
    assert 0.3 < row.kept < 0.7


def test_the_suite_has_shapes_of_its_own() -> None:
    done = bench("--suite", "--data", "shapes")
    assert done.exit_code == 2
    assert "the suite has shapes of its own" in done.stderr


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for text in (
        '{"rows": [{"tile": "16x16"}]}',
        '{"format": "vidsparse-masks/1", "rows": []}',
        '{"rows": 3}',
        "[]",
    ):
        file.write_text(text)
        result = bench("--show", str(file))
        assert result.exit_code == 2
        assert "holds no attention benchmark" in result.output
