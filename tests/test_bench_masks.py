"""``vidsparse bench masks``: every method is timed, wrong masks are refused, rows are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from vidsparse.apps.bench.masks import CASES, MaskRow, measure_masks, unlike
from vidsparse.apps.cli import main
from vidsparse.grid import TokenGrid
from vidsparse.masks import pack_bits
from vidsparse.methods import FgAttn, SparseMethod
from vidsparse.site import CallSite


def bench(*arguments: str) -> Result:
    small = ("--seq-len", "512", "--heads", "2", "--head-dim", "32", "--repeats", "1")
    return CliRunner().invoke(main, ["bench", "masks", *small, *arguments])


def test_every_case_has_a_row_and_a_share_of_the_same_dense_time(tmp_path: Path) -> None:
    path = tmp_path / "masks.json"
    done = bench("--json", str(path))
    assert done.exit_code == 0, done.output
    document = json.loads(path.read_text())
    rows = [MaskRow(**row) for row in document["rows"]]
    assert [row.method for row in rows] == [name for name, _ in CASES]
    assert len({row.dense_ms for row in rows}) == 1
    for row in rows:
        assert row.share == pytest.approx(row.mask_ms / row.dense_ms)
        assert 0 < row.selected <= 1
    shown = bench("--show", str(path))
    for row in rows:
        assert f"| {row.method} | {row.options} | {row.tile} |" in shown.output
        assert " ".join((row.method, row.options, row.tile)).split() in [
            line.split()[: len(row.options.split()) + 2] for line in done.output.splitlines()
        ]
    assert {"hardware", "versions", "date"} < set(document)


def test_rows_of_a_length_are_kept_where_the_next_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "masks.json"
    measured: list[Any] = []

    def interrupted(names: Any, data: Any, *rest: Any) -> list[MaskRow]:
        if measured:
            raise KeyboardInterrupt
        measured.append(data)
        return measure_masks(names, data, *rest)

    monkeypatch.setattr("vidsparse.apps.commands.bench_masks.measure_masks", interrupted)
    done = bench("--seq-len", "256", "--method", "fg-attn", "--json", str(path))
    assert done.exit_code == 130
    rows = json.loads(path.read_text())["rows"]
    assert {(row["method"], row["seq_len"]) for row in rows} == {("fg-attn", 512)}


def test_one_method_alone() -> None:
    done = bench("--method", "xattention")
    assert done.exit_code == 0, done.output
    assert "xattention" in done.output
    assert "spargeattn" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "nearest"), "'nearest' has no mask to time. Hint: choose from fg-attn"),
        (("--dtype", "int8"), "unknown dtype 'int8'. Hint: choose from fp32, bf16, fp16."),
        # as everywhere: torch's own names are none of ours.
        (("--dtype", "float32"), "unknown dtype 'float32'. Hint: choose from fp32, bf16, fp16."),
        (("--json", "/nowhere/rows.json"), "cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def made_by_kernels(flipped: int) -> mock._patch[object]:
    """Kernels whose mask is torch's, but for the first so-many tiles."""

    def words(
        method: SparseMethod, q: Tensor, k: Tensor, v: Tensor, site: CallSite
    ) -> tuple[Tensor, Tensor]:
        mask = method.select(q, k, site, v=v)
        mask.view(-1)[:flipped] ^= True
        return pack_bits(mask), mask.sum(-1).int() * method.tile[1]

    return mock.patch("vidsparse.apps.bench.masks.words_of", words)


def test_tiles_in_which_kernels_and_torch_differ_are_counted() -> None:
    q, k, v = torch.randn(3, 1, 2, 512, 32)
    site = CallSite(0, 0, 0.0, TokenGrid(1, 1, 512))
    assert unlike(FgAttn(), q, k, v, site) is None
    for flipped in (0, 7):
        with made_by_kernels(flipped):
            assert unlike(FgAttn(), q, k, v, site) == pytest.approx(flipped / 32**2)


def test_no_time_is_reported_for_a_wrong_mask() -> None:
    with made_by_kernels(7):
        done = bench("--method", "fg-attn")
    assert done.exit_code == 2
    assert "no time is reported for a wrong result" in done.output


def test_masks_are_made_of_a_model_s_own_calls(tmp_path: Path) -> None:
    path = tmp_path / "masks.json"
    run = ("--data", "shapes", "--size", "128x128", "--frames", "9", "--steps", "3")
    done = bench(*run, "--method", "fg-attn", "--json", str(path))
    assert done.exit_code == 0, done.output
    rows = [MaskRow(**row) for row in json.loads(path.read_text())["rows"]]
    assert {row.seq_len for row in rows} == {192}
    assert {row.data.split(",")[0] for row in rows} == {"shapes"}
    # finer tiles choose less of what a trained model looks at.
    by_tile = {row.tile: row.selected for row in rows}
    assert by_tile["16x16"] < by_tile["128x128"]
