"""SALE: the selection pass held to the printed algorithm, less its misprints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vidsparse
from vidsparse.attention import attend
from vidsparse.grid import TokenGrid
from vidsparse.kernels.tokens.formats import quantize_runs
from vidsparse.kernels.tokens.quantize import quantize_four_bits
from vidsparse.masks import unpack_bits
from vidsparse.methods import Numbers, Sale
from vidsparse.methods import sale as module
from vidsparse.methods.sale import (
    local_tiles,
    reference_area,
    relative_scores,
    relative_scores_mask,
)
from vidsparse.planning import plan_attention
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")


def site(tokens: int, text: int = 0) -> CallSite:
    return CallSite(0, 0, 1.0, TokenGrid(1, 1, tokens - text, text=text))


def drifting(tokens: int, dim: int, *, batch: int = 1, heads: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, tokens, dim, generator=generator).cumsum(2) / 4


def rounded(x: Tensor, runs: list[slice]) -> Tensor:
    """``x`` ``[N, d]`` less its mean, in whole numbers from -7 to 7 for each run, dequantised."""
    x = x - x.mean(0)
    out = torch.empty_like(x)
    for run in runs:
        step = x[run].abs().max() / 7
        out[run] = torch.floor(x[run] / step + 0.5) * step
    return out


def selection_pass(
    Q: Tensor, K: Tensor, tau: float, b_q: int, b_k: int, areas: list[list[int]]
) -> Tensor:
    """Algorithm 1 for one head in fp64: the largest log of P / tau in every block ``[N_q, N_k]``.

    A block stays if that is 0 or more. ``areas`` are the block numbers of each row's I_SL. Its
    line 9, which overwrites m, keeps the running maximum here.
    """
    Q, K = Q.double(), K.double()
    N, d = Q.shape
    blocks = [slice(j, min(j + b_k, N)) for j in range(0, N, b_k)]
    queries = rounded(Q, [slice(i, i + 1) for i in range(N)]) + Q.mean(0)
    # what smoothing took is put back in full precision: q'k' + mean(q)k' + q mean(k).
    keys = rounded(K, blocks)
    estimate = (
        (queries - Q.mean(0)) @ keys.T + Q.mean(0) @ (K - K.mean(0)).T + (Q @ K.mean(0))[:, None]
    ) / math.sqrt(d)
    margins = torch.empty(-(-N // b_q), len(blocks), dtype=torch.float64)
    for i, area in enumerate(areas):
        rows = slice(i * b_q, min((i + 1) * b_q, N))
        m = torch.full((rows.stop - rows.start,), -math.inf, dtype=torch.float64)
        l = torch.zeros_like(m)  # noqa: E741
        for j in area:
            S = Q[rows] @ K[blocks[j]].T / math.sqrt(d)
            m_new = torch.maximum(m, S.amax(1))
            l = l * torch.exp(m - m_new) + torch.exp(S - m_new[:, None]).sum(1)  # noqa: E741
            m = m_new
        for j, block in enumerate(blocks):
            P = torch.exp(estimate[rows, block] - m[:, None]) / l[:, None]
            margins[i, j] = (P / tau).log().max()
    return margins


def check(got: Tensor, margins: Tensor, areas: list[list[int]]) -> None:
    """Blocks are kept by the sign of their margin, but where rounding may have turned it."""
    for i, area in enumerate(areas):
        assert bool(got[i, area].all())
    outside = torch.ones_like(got)
    for i, area in enumerate(areas):
        outside[i, area] = False
    sure = outside & (margins.abs() > 1e-4)
    assert torch.equal(got[sure], margins[sure] >= 0)
    # or the comparison would be empty.
    assert bool((margins[sure] >= 0).any())
    assert bool((margins[sure] < 0).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "text", "tile"), [(1024, 0, (64, 32)), (701, 45, (64, 32)), (333, 3, (16, 8))]
)
def test_the_mask_is_that_of_the_printed_algorithm(
    tokens: int, text: int, tile: tuple[int, int], dtype: torch.dtype
) -> None:
    q, k = (drifting(tokens, 32, batch=2, seed=i).to(dtype) for i in (0, 1))
    sink_from = (tokens - text) // tile[1] if text else None
    got = relative_scores_mask(q, k, 0.05, tile, 64, sink_from)
    area = reference_area(tokens, tile, 64, sink_from)
    areas = [row.nonzero().flatten().tolist() for row in area]
    for b in range(2):
        for h in range(2):
            margins = selection_pass(q[b, h], k[b, h], 0.05, *tile, areas)
            check(got[b, h], margins, areas)


def test_small_chunks_of_rows_give_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = (drifting(701, 32, batch=2, seed=i) for i in (0, 1))
    whole = relative_scores_mask(q, k, 0.05, (64, 32), 64, 18)
    monkeypatch.setattr(module, "ESTIMATES_AT_ONCE", 1)
    assert torch.equal(relative_scores_mask(q, k, 0.05, (64, 32), 64, 18), whole)


# ---- known answers ----


def test_of_equal_scores_each_is_worth_one_in_as_many_as_the_area_holds() -> None:
    # every score is 0, so P = 1 / l for all, and l is the number of tokens in the local area.
    q, k = torch.zeros(1, 1, 2048, 16), torch.ones(1, 1, 2048, 16)
    inner = slice(3, -3)
    everything = Sale(tau=0.99 / 256).select(q, k, site(2048))
    assert bool(everything[:, :, inner].all())
    local = Sale(tau=1.01 / 256).select(q, k, site(2048))
    assert torch.equal(local[0, 0, inner], reference_area(2048, (64, 32), 256, None)[inner])
    # at the ends the area is smaller: 160 tokens around the first tile.
    assert not bool(Sale(tau=1.01 / 160).select(q, k, site(2048))[0, 0, 0, 5:].any())
    assert bool(Sale(tau=0.99 / 160).select(q, k, site(2048))[0, 0, 0].all())


def test_one_strong_key_is_found_for_the_rows_that_want_it() -> None:
    q, k = torch.zeros(1, 1, 1024, 32), torch.zeros(1, 1, 1024, 32)
    k[..., 900, 0] = 8.0
    q[:, :, 70, 0] = 8.0
    # a score of 64 / sqrt(32) = 11.3 against scores of 0 in the local area: e^11.3 / 256.
    mask = Sale(tau=0.5).select(q, k, site(1024))[0, 0]
    beyond = mask & ~reference_area(1024, (64, 32), 256, None)
    assert beyond.nonzero().tolist() == [[1, 900 // 32]]


def test_a_strong_sink_hides_what_the_local_area_would_show() -> None:
    q, k = torch.ones(1, 1, 1024, 32), torch.zeros(1, 1, 1024, 32)
    k[:, :, 400] = 1.0
    k[:, :, 1000] = 2.5
    plain = Sale(tau=0.2).select(q, k, site(1024))[0, 0]
    assert bool(plain[:4, 400 // 32].all())
    with_text = Sale(tau=0.2).select(q, k, site(1024, text=32))[0, 0]
    assert not bool(with_text[:4, 400 // 32].any())
    assert bool(with_text[:, 31].all())


def test_the_local_area_is_centred_on_the_query_tile() -> None:
    first, stop = local_tiles(1024, (64, 32), 256)
    # of tile 4, rows 256 to 319: tokens 160 to 415.
    assert (int(first[4]) * 32, int(stop[4]) * 32) == (160, 416)
    assert (int(first[0]), int(stop[0])) == (0, 5)
    assert (int(first[-1]), int(stop[-1])) == (27, 32)
    # a short last tile of three rows, from 1024 on, still holds its own keys.
    first, stop = local_tiles(1027, (64, 32), 1)
    assert (int(first[-1]), int(stop[-1])) == (32, 33)
    # areas that end inside a tile are rounded outward.
    first, stop = local_tiles(1024, (16, 16), 20)
    assert (int(first[8]), int(stop[8])) == (7, 10)


def test_heads_have_their_own_tau_from_calibrated_numbers() -> None:
    q, k = (drifting(700, 16, heads=3, seed=i) for i in (0, 1))
    taus = (0.5, 0.05, 0.001)
    numbers = Numbers({"tau": torch.tensor(taus).view(1, 1, 3)}, video=(1, 1, 700))
    mask = Sale(numbers=numbers, local=64).select(q, k, site(700))
    for head, tau in enumerate(taus):
        alone = Sale(tau=tau, local=64).select(q, k, site(700))
        assert torch.equal(mask[:, head], alone[:, head])
    assert float(mask[:, 0].float().mean()) < float(mask[:, 2].float().mean())


def test_smoothing_makes_a_common_offset_of_queries_and_keys_harmless() -> None:
    q, k = (drifting(512, 32, seed=i) for i in (0, 1))
    q, k = q - q.mean(2, keepdim=True), k - k.mean(2, keepdim=True)
    bias = 40 * torch.randn(32, generator=torch.Generator().manual_seed(5))
    plain = relative_scores_mask(q.double(), k.double(), 0.05, (64, 32), 64)
    # keys that share an offset change all scores of a row alike, and so nothing.
    shifted = relative_scores_mask(q.double(), k.double() + bias, 0.05, (64, 32), 64)
    assert float((plain != shifted).float().mean()) < 0.01


def test_four_bits_recall_what_full_precision_selects() -> None:
    q, k = (drifting(1500, 64, heads=4, seed=i) for i in (0, 1))
    tau, tile = 0.02, (64, 32)
    scores = q @ k.mT / 8
    area = reference_area(1500, tile, 256, None)
    inside = area.repeat_interleave(64, 0)[:1500].repeat_interleave(32, 1)[:, :1500]
    least = scores.masked_fill(~inside, -math.inf).logsumexp(-1, keepdim=True) + math.log(tau)
    passes = F.pad((scores >= least).float(), (0, -1500 % 32, 0, -1500 % 64))
    exact = F.max_pool2d(passes, tile).bool() | area
    plain = relative_scores(q, k, tile, 256, rounded=False)
    assert torch.equal(plain >= math.log(tau), exact)
    got = relative_scores_mask(q, k, tau, tile, 256)
    assert 0.1 < float(exact.float().mean()) < 0.9
    assert float((got & exact).sum() / exact.sum()) > 0.95


# ---- four bits ----


def test_four_bits_by_hand() -> None:
    x = torch.tensor([[7.0, 3.4], [-3.5, 0.4], [0.2, -0.1]])[None, None]
    by_token, scale, _ = quantize_runs(x, "int4 in int8", 1, None, None, None)
    assert by_token[0, 0].tolist() == [[7, 3], [-7, 1], [7, -3]]
    torch.testing.assert_close(scale[0, 0], torch.tensor([1.0, 0.5, 0.2 / 7]))
    together, scale, _ = quantize_runs(x, "int4 in int8", 2, None, None, None)
    assert together[0, 0].tolist() == [[7, 3], [-3, 0], [7, -3]]
    torch.testing.assert_close(scale[0, 0], torch.tensor([1.0, 0.2 / 7]))


@pytest.mark.parametrize("riding", ["int8", "fp8"])
def test_what_smoothing_takes_is_given_back(riding: str) -> None:
    q, k = (drifting(333, 64, batch=2, seed=i) + 2 for i in (0, 1))
    four = quantize_four_bits(q, k, 32, riding)
    assert float(four.q.float().abs().max()) == 7
    column = four.k_scale.repeat_interleave(32, 2)[:, :, None, :333]
    row = four.q_scale.unsqueeze(-1)
    products = four.q.float() @ four.k.float().mT + four.offset.unsqueeze(2) / row
    estimate = products * row * column + four.shift.unsqueeze(-1)
    exact = q @ k.mT
    # errors of half a step of either operand, over the other.
    room = 0.5 * (
        row * (k - k.mean(2, keepdim=True)).abs().sum(-1)[:, :, None]
        + column * (q - q.mean(2, keepdim=True)).abs().sum(-1)[..., None]
        + row * column * 32
    )
    assert bool(((estimate - exact).abs() <= room * 1.001 + 1e-3).all())


def test_both_carriers_hold_the_same_numbers() -> None:
    q, k = (drifting(100, 64, seed=i) for i in (0, 1))
    in_int8, in_fp8 = (quantize_four_bits(q, k, 32, riding) for riding in ("int8", "fp8"))
    assert torch.equal(in_int8.q.float(), in_fp8.q.float())
    assert torch.equal(in_int8.k.float(), in_fp8.k.float())


# ---- in the engine ----


@pytest.mark.parametrize("text_first", [False, True])
def test_text_is_sink_and_computed_in_full(text_first: bool) -> None:
    grid = TokenGrid(4, 10, 10, text=40, text_first=text_first)
    q, k = (drifting(grid.tokens, 32, batch=2, seed=i) for i in (0, 1))
    plan = plan_attention(Sale(tau=0.9, local=64), q, k, CallSite(0, 0, 1.0, grid))
    bits = unpack_bits(plan.kv_bits, -(-grid.tokens // 32))
    assert bool(bits[..., 400 // 32 :].all())
    assert float(plan.selected.max()) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tiny_tau_is_dense_attention(dtype: torch.dtype) -> None:
    grid = TokenGrid(3, 7, 9, text=5)
    q, k, v = (drifting(grid.tokens, 64, batch=2, seed=i).to(dtype) for i in range(3))
    got = attend(q, k, v, grid, "sale", tau=1e-30)
    dense = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    room = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(got.double(), dense, rtol=room, atol=room)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 0}, r"tau must lie in \(0, 1\], got 0"),
        ({"tau": 1.1}, r"tau must lie in \(0, 1\], got 1.1"),
        ({"local": 0}, "local must be a whole number from 1, got 0"),
        ({"local": 2.5}, "local must be a whole number from 1, got 2.5"),
        ({"local": True}, "local must be a whole number from 1, got True"),
        ({"quantize": "int4"}, "unknown quantize 'int4'"),
        ({"tile": "64x2"}, "tile must be MxN"),
        ({"merge": "hash"}, "unknown merge"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(vidsparse.OptionError, match=message):
        Sale(**options)
