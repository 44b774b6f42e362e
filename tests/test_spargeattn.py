"""SpargeAttn's second stage, its numbers by head, and 8 bits; its first stage is in test_masks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import random_qkv
from torch import Tensor

import vidsparse
from vidsparse.engine import AttentionEngine
from vidsparse.grid import TokenGrid
from vidsparse.kernels.dispatch import eight_bits_that_pay
from vidsparse.methods import Numbers, SpargeAttn
from vidsparse.order import ORDERS, token_order
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

GRID = TokenGrid(4, 8, 16)  # 4 query blocks of 128, 8 key blocks of 64
SITE = CallSite(0, 0, 0.0, GRID)


def run(
    method: SpargeAttn, q: Tensor, k: Tensor, v: Tensor, **options: str
) -> tuple[Tensor, AttentionEngine]:
    engine = AttentionEngine(
        method,
        schedule=Schedule(dense_steps=0),
        layers=1,
        **{"order": "rowmajor", **options},  # type: ignore[arg-type]
    )
    return engine.attend(q, k, v, SITE), engine


def leaning(heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Scores that depend on the key block alone: block j has ``-2 j`` for every query."""
    q, k = torch.zeros(1, heads, GRID.tokens, 64), torch.zeros(1, heads, GRID.tokens, 64)
    q[..., 0] = 8
    k[..., 0] = -2.0 * torch.arange(8).repeat_interleave(64)
    return q, k, torch.randn(q.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("lambda_", "skipped"),
    # blocks 6 and 7 are visited first, when nothing larger is known: 7 follows 6 and lies 2 below
    # it; then 0 raises the maximum to 0 and block j lies 2 j below it.
    [(-1.0, [1, 2, 3, 4, 5, 7]), (-5.0, [3, 4, 5]), (-9.9, [5]), (-10.0, []), (-100.0, [])],
)
def test_lambda_skips_pieces_far_below_the_running_maximum(
    lambda_: float, skipped: list[int]
) -> None:
    q, k, v = leaning()
    out, engine = run(SpargeAttn(tau=1, lambda_=lambda_), q, k, v)
    weights = (-2.0 * torch.arange(8)).softmax(0) / 64
    weights[skipped] = 0
    expected = weights.repeat_interleave(64) @ v[0, 0]
    torch.testing.assert_close(out[0, 0], expected.expand_as(out[0, 0]), rtol=1e-4, atol=1e-6)
    summary = engine.trace.summary()
    assert summary.skipped == len(skipped) / 8
    assert summary.sparsity == len(skipped) / 16


@pytest.mark.parametrize("rows", [32, 64, 128])
def test_rows_of_a_piece_decide_together(rows: int) -> None:
    q, k, v = leaning()
    # one query of the first block looks at what the others do not.
    q[0, 0, 40, 0] = -8
    _, engine = run(SpargeAttn(tau=1, lambda_=-5.0, gate_rows=rows), q, k, v)
    pieces = GRID.tokens // rows
    # its piece keeps block 5, 4 below its maximum of 14; the others skip blocks 3 to 5.
    assert engine.trace.summary().skipped == pytest.approx((3 * pieces - 1) / (8 * pieces))


def test_sparsity_counts_products_of_both_stages() -> None:
    q, k, v = leaning()
    # pooled softmax of 0, -2, -4, ...: 0.86, 0.12, 0.016; three blocks reach 0.99.
    _, engine = run(SpargeAttn(tau=0.99, theta=-1, lambda_=-3.0, means=None), q, k, v)
    (cell,) = engine.trace.cells
    assert cell.selected is not None
    assert cell.selected.item() == 3 / 8
    # of the list 0, 1, 2 the last group is 2 alone, visited first: nothing is above it then.
    assert engine.trace.summary().skipped == 0
    _, engine = run(SpargeAttn(tau=0.9999, theta=-1, lambda_=-3.0, means=None), q, k, v)
    # five blocks, 4 visited first; 2 and 3 lie 4 and 6 below 0.
    summary = engine.trace.summary()
    assert (summary.selected, summary.skipped) == (5 / 8, 2 / 8)
    assert summary.sparsity == 1 - (5 + 3) / 16


def numbers(**tables: list[float]) -> Numbers:
    return Numbers(
        {name: torch.tensor(values)[None, None] for name, values in tables.items()},
        video=(GRID.frames, GRID.height, GRID.width),
    )


def test_calibrated_numbers_are_each_heads_own() -> None:
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32, heads=3)
    singles = [
        SpargeAttn(tau=0.3, theta=-1.0, lambda_=-1.0, tile=(64, 64)),
        SpargeAttn(tau=1.0, theta=0.0, lambda_=-100.0, tile=(64, 64)),
        SpargeAttn(tau=0.6, theta=0.02, lambda_=-3.0, tile=(64, 64)),
    ]
    own = numbers(
        tau=[m.tau or 0 for m in singles],
        theta=[m.theta for m in singles],
        lambda_=[m.lambda_ or 0 for m in singles],
    )
    together, engine = run(SpargeAttn(tile=(64, 64), numbers=own), q, k, v)
    (cell,) = engine.trace.cells
    for head, method in enumerate(singles):
        alone, one = run(method, *(x[:, head : head + 1] for x in (q, k, v)))
        torch.testing.assert_close(together[:, head], alone[:, 0], rtol=1e-5, atol=1e-6)
        assert cell.computed is not None
        assert cell.computed[0, head].item() == pytest.approx(one.trace.summary().computed)


def test_heads_planned_apart_find_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32, heads=3)
    method = SpargeAttn(numbers=numbers(tau=[0.2, 1.0, 0.5], theta=[-1.0, -1.0, -1.0]))
    whole, _ = run(method, q, k, v)
    monkeypatch.setattr("vidsparse.planning.MASK_TILES", 1)
    assert torch.equal(run(method, q, k, v)[0], whole)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_gives_dense_attention_at_full_numbers(order: str) -> None:
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32)
    out, _ = run(SpargeAttn(tau=1, lambda_=-1000.0), q, k, v, order=order)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    method = SpargeAttn(tau=0.5, theta=-1, lambda_=-2.0, quantize="int8")
    got, _ = run(method, q, k, v, order=order)
    permutation = token_order(order, GRID)
    straight, _ = run(method, *(permutation.apply(x) for x in (q, k, v)))
    torch.testing.assert_close(permutation.apply(got), straight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", ["int8", "fp8"])
def test_8_bits_change_the_output_a_little(bits: str) -> None:
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32)
    method = SpargeAttn(tau=0.7, theta=-1)
    plain, _ = run(dataclasses.replace(method, quantize="none"), q, k, v)
    rounded, _ = run(dataclasses.replace(method, quantize=bits), q, k, v)
    error = (rounded - plain).norm() / plain.norm()
    assert 1e-4 < error < 0.1
    # 8 bits are emulated on a cpu: auto leaves them out.
    assert torch.equal(run(method, q, k, v)[0], plain)


def test_8_bits_pay_where_the_kernel_that_runs_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vidsparse.kernels import dispatch

    able = {"triton": ("int8", None), "gluon": (None,), "torch": ("int8", "fp8", None)}

    def only(*names: str) -> None:
        def reason(name: str, quantize: str | None) -> str | None:
            return None if name in names and quantize in able[name] else "cannot"

        for name in dispatch.IMPLEMENTATIONS:

            def answering(*call: Any, name: str = name) -> str | None:
                return reason(name, call[4])

            monkeypatch.setitem(
                dispatch._KNOWN, name, dispatch._KNOWN[name]._replace(reason=answering)
            )

    def answer(implementation: str = "auto", head_dim: int = 128) -> str | None:
        return eight_bits_that_pay(implementation, "cpu", torch.float16, head_dim)

    only("torch")
    assert answer() is None
    only("triton", "torch")
    assert (answer(), answer("torch")) == ("int8", None)
    assert answer(head_dim=64) is None
    # a faster kernel without 8 bits is not given up for a slower one that has them.
    only("gluon", "triton", "torch")
    assert (answer(), answer("triton")) == (None, "int8")


@pytest.mark.parametrize("bad", [0, 0.5, math.nan, "-5", True])
def test_lambda_is_negative_or_none(bad: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match="lambda must be a negative number or none"):
        SpargeAttn(lambda_=bad)


def test_other_options_are_checked() -> None:
    with pytest.raises(vidsparse.OptionError, match="gate_rows must be one of 32, 64, 128"):
        SpargeAttn(gate_rows=16)
    with pytest.raises(vidsparse.OptionError, match="unknown quantize 'int4'"):
        SpargeAttn(quantize="int4")


def test_a_gate_that_never_closes_is_none() -> None:
    # minus infinity has no place in a record, which would never be read again.
    assert SpargeAttn(lambda_=-math.inf).options()["lambda_"] is None
