"""``vidsparse bench gates``: what skipping products with V costs and saves, checked first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from vidsparse.apps.bench.exactness import sampled_errors
from vidsparse.apps.bench.gates import CASES, GateRow
from vidsparse.apps.cli import main
from vidsparse.kernels import sparse_attention
from vidsparse.kernels.attention.gates import AbsoluteGate, Gate, RelativeGate
from vidsparse.plan import make_plan

SPARGE = "spargeattn tau=0.5 quantize=none"


def bench(*arguments: str) -> Result:
    small = ("--seq-len", "523", "--heads", "2", "--head-dim", "32", "--repeats", "1")
    return CliRunner().invoke(main, ["bench", "gates", *small, *arguments])


def test_rows_say_what_was_skipped_and_what_it_took(tmp_path: Path) -> None:
    path = tmp_path / "gates.json"
    cases = (f"{SPARGE} lambda_=-6", SPARGE, "bsfa keep=0.3", "bsfa keep=0.7")
    done = bench(*(part for case in cases for part in ("--case", case)), "--json", str(path))
    assert done.exit_code == 0, done.output
    document = json.loads(path.read_text())
    rows = [GateRow(**row) for row in document["rows"]]
    assert tuple(row.case for row in rows) == cases
    assert [row.calibrated for row in rows] == [False, True, True, True]
    assert [row.gate for row in rows] == ["relative 64x64"] * 2 + ["absolute 128x64"] * 2
    for row in rows:
        assert row.ratio == pytest.approx(row.ungated_ms / row.gated_ms)
        assert row.error < 1e-5
        assert 0 <= row.skipped <= row.computed
    _, relative, low, high = rows
    assert relative.skipped > 0
    assert relative.moved > 0
    # of all blocks, those that are always kept among them.
    assert high.skipped < 0.3 < low.skipped < 0.7
    assert high.moved < low.moved
    shown = bench("--show", str(path))
    for row in rows:
        assert f"| {row.case}, calibrated |" in shown.output or not row.calibrated
    assert {"hardware", "versions", "date"} < set(document)


def test_every_case_is_one_that_has_a_gate() -> None:
    assert {case.split()[0] for case in CASES} == {"spargeattn", "bsfa"}


@pytest.mark.parametrize("tokens", [512, 523])
@pytest.mark.parametrize("kind", ["relative", "absolute"])
def test_the_yardstick_skips_what_the_gate_skips(kind: str, tokens: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, tokens, 32, dtype=torch.float64).unbind()
    # some keys that no query looks for, and some that all do.
    k = 4 * k * torch.linspace(0.1, 1, tokens)[torch.arange(tokens) // 64 * 37 % tokens, None]
    tiles = -(-tokens // 32)
    mask = torch.rand(1, 2, tiles, -(-tokens // 64)) < 0.7
    mask[..., 0] = True
    plan = make_plan(mask, (32, 64), tokens, "xor")
    kv_index = plan.kv_index
    gate: Gate = RelativeGate(-1.0, rows=32)
    if kind == "absolute":
        keep = torch.zeros(kv_index.shape, dtype=torch.bool)
        keep[..., 1] = True
        gate = AbsoluteGate(torch.linspace(6, 9, 2 * tiles).view(2, tiles), keep, rows=32)
    skipped = torch.empty_like(plan.kv_count)
    lists = (q, k, v, plan.q_tiles, plan.kv_count, kv_index)
    out, plain = (
        sparse_attention(*lists, tile=plan.tile, implementation="reference", gate=g, skipped=s)[0]
        for g, s in ((gate, skipped), (None, None))
    )
    assert (skipped > 0).any()
    assert sampled_errors(q, k, v, plan, out, gate)[0] < 1e-12
    assert sampled_errors(q, k, v, plan, plain)[0] < 1e-12
    # else the check would pass a kernel that skips nothing.
    assert sampled_errors(q, k, v, plan, plain, gate)[0] > 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--case", "fg-attn"), "fg-attn has no gate. Hint: spargeattn or bsfa."),
        (("--case", "bsfa keep=0.4"), "keep must be one of the fractions"),
        (("--implementation", "fast"), "unknown implementation 'fast'"),
        (("--case", "bsfa", "--implementation", "gluon"), "cannot run here"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2
    assert message in done.output
