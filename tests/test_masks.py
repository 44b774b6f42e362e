"""Pooled statistics and the tile masks made from them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vidsparse
from vidsparse.grid import TokenGrid
from vidsparse.kernels.selection.shares import count_of_share
from vidsparse.masks import (
    choose_tiles,
    parse_tile,
    pooled_mean,
    pooled_scores,
    self_similarity,
    tile_sizes,
    top_p_mask,
)
from vidsparse.methods import FgAttn, SpargeAttn, XAttention
from vidsparse.site import CallSite

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SITE = CallSite(0, 0, 0.0, TokenGrid(1, 1, 1))
LENGTHS = [1, 15, 16, 100, 257]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def brute_tiles(x: Tensor, size: int) -> list[Tensor]:
    """The tokens of each tile in fp64, nothing padded."""
    return list(x.double().split(size, dim=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 8, 16, 128])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_mean_is_over_the_tokens_a_tile_has(tokens: int, size: int, dtype: torch.dtype) -> None:
    # far from zero: a short tile averaged over its padding would be visibly too small.
    x = normal(2, 3, tokens, 8, dtype=dtype) + 4
    expected = torch.stack([t.mean(2) for t in brute_tiles(x, size)], 2)
    got = pooled_mean(x, size)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_bf16_mean_is_not_summed_in_bf16() -> None:
    x = torch.full((1, 1, 128, 1), 1.0, dtype=torch.bfloat16)
    x[0, 0, 0] = 1.0078125
    assert pooled_mean(x, 128).item() == 1 + 0.0078125 / 128


@pytest.mark.parametrize("tokens", LENGTHS)
def test_tile_sizes_add_up_to_the_tokens(tokens: int) -> None:
    sizes = tile_sizes(tokens, 16).tolist()
    assert sum(sizes) == tokens
    assert all(size == 16 for size in sizes[:-1])
    assert 1 <= sizes[-1] <= 16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_cossim_is_the_papers_formula(tokens: int, size: int, dtype: torch.dtype) -> None:
    # a common part of growing weight makes tiles from hardly to very self-similar.
    common = normal(1, 1, 1, 8, seed=1) * torch.linspace(0, 4, tokens)[:, None]
    x = (normal(2, 2, tokens, 8) + common).to(dtype)
    expected = []
    for tile in brute_tiles(x, size):
        gram = tile @ tile.transpose(-1, -2)
        expected.append(gram.mean((-1, -2)) / gram.amax((-1, -2)).abs())
    got = self_similarity(x, size).double()
    torch.testing.assert_close(got, torch.stack(expected, 2), rtol=1e-5, atol=1e-6)


def test_cossim_of_equal_tokens_is_one_and_of_opposite_tokens_zero() -> None:
    equal = torch.ones(16, 4)
    opposite = torch.tensor([1.0, -1.0]).repeat(8)[:, None].expand(16, 4)
    zeros = torch.zeros(16, 4)
    x = torch.cat([equal, opposite, zeros])[None, None]
    assert self_similarity(x, 16).flatten().tolist() == [1.0, 0.0, 1.0]


def test_cossim_does_not_overflow_in_fp16() -> None:
    x = torch.full((1, 1, 16, 64), 300.0, dtype=torch.float16)
    assert self_similarity(x, 16).item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("tokens", [100, 257])
@pytest.mark.parametrize("tile", [(16, 16), (128, 1), (32, 64)])
def test_pooled_scores_are_scaled_products_of_means(tokens: int, tile: tuple[int, int]) -> None:
    q, k = normal(1, 2, tokens, 64), normal(1, 2, tokens, 64, seed=1)
    q_mean = torch.stack([t.mean(2) for t in brute_tiles(q, tile[0])], 2)
    k_mean = torch.stack([t.mean(2) for t in brute_tiles(k, tile[1])], 2)
    expected = q_mean @ k_mean.transpose(-1, -2) / math.sqrt(64)
    got = pooled_scores(q, k, tile).double()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def slow_top_p(weights: list[int], top_p: Fraction) -> list[bool]:
    """The paper's sentence, one tile at a time, in exact arithmetic."""
    kept = [False] * len(weights)
    mass = 0
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        kept[i] = True
        mass += weights[i]
        if mass >= top_p * sum(weights):
            break
    return kept


@settings(max_examples=200)
@given(
    weights=st.lists(st.integers(0, 20), min_size=1, max_size=24),
    numerator=st.integers(1, 63),
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(weights: list[int], numerator: int) -> None:
    # multiples of 1/64 and small integers are exact in fp32, so ties and crossings are too.
    got = top_p_mask(torch.tensor([weights], dtype=torch.float32), numerator / 64)
    assert got[0].tolist() == slow_top_p(weights, Fraction(numerator, 64))


@pytest.mark.parametrize(
    ("row", "top_p", "kept"),
    [
        ([0.5, 0.25, 0.125, 0.125], 0.5, [1, 0, 0, 0]),  # reached exactly: nothing more
        ([0.5, 0.25, 0.125, 0.125], 0.51, [1, 1, 0, 0]),  # the crossing tile is kept
        ([0.125, 0.125, 0.25, 0.5], 0.8, [1, 0, 1, 1]),  # the earlier of two equals
        ([0.25, 0.25, 0.25, 0.25], 0.75, [1, 1, 1, 0]),
        ([0.97, 0.01, 0.01, 0.01], 0.1, [1, 0, 0, 0]),  # printed Top_Cdf keeps nothing here
        ([0.0, 0.0, 0.0, 0.0], 0.9, [1, 0, 0, 0]),  # no mass at all: still one key tile
        ([1.0, 0.0, 0.0, 0.0], 1.0, [1, 1, 1, 1]),  # 1 is everything, zeros too
    ],
)
def test_top_p_on_rows_with_known_answers(row: list[float], top_p: float, kept: list[int]) -> None:
    assert top_p_mask(torch.tensor([row]), top_p).int().tolist() == [kept]


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999999, 1.0])
@pytest.mark.parametrize("columns", [1, 33, 700])
def test_top_p_reaches_p_and_empties_no_row(columns: int, top_p: float) -> None:
    probabilities = (normal(2, 2, 40, columns) * 3).softmax(-1)
    kept = top_p_mask(probabilities, top_p)
    assert bool(kept.any(-1).all())
    mass = (probabilities.double() * kept).sum(-1) / probabilities.double().sum(-1)
    assert mass.min().item() >= top_p - 1e-6
    if top_p == 1.0:
        assert bool(kept.all())


def test_top_p_is_monotone_in_p() -> None:
    probabilities = (normal(1, 1, 50, 90) * 2).softmax(-1)
    smaller = top_p_mask(probabilities, 0.05)
    for percent in range(10, 105, 5):
        larger = top_p_mask(probabilities, percent / 100)
        assert not bool((smaller & ~larger).any())
        smaller = larger


def test_fg_attn_selects_by_top_p_of_the_pooled_softmax() -> None:
    q, k = normal(1, 2, 100, 16) * 3, normal(1, 2, 100, 16, seed=1) * 3
    got = FgAttn(top_p=0.6, tile=(32, 16)).select(q, k, SITE)
    assert got.shape == (1, 2, 4, 7)
    for h in range(2):
        for i, q_tile in enumerate(q[0, h].double().split(32)):
            scores = [q_tile.mean(0) @ t.mean(0) / 4 for t in k[0, h].double().split(16)]
            row = torch.stack(scores).softmax(0)
            order = row.argsort(descending=True)
            needed = int((row[order].cumsum(0) < 0.6).sum()) + 1
            expected = torch.zeros(7, dtype=torch.bool)
            expected[order[:needed]] = True
            assert torch.equal(got[0, h, i], expected)


# three kinds of block: equal tokens along axis 0 or 1, or tokens that cancel (CosSim 0).
def block(kind: str, size: int = 16) -> Tensor:
    x = torch.zeros(size, 4)
    if kind == "stray":
        x[0::2, 2], x[1::2, 2] = 1.0, -1.0
    else:
        x[:, int(kind)] = 8.0
    return x


def sequence(kinds: list[str]) -> Tensor:
    return torch.cat([block(kind) for kind in kinds])[None, None]


def test_spargeattn_computes_rows_and_columns_of_stray_blocks() -> None:
    q = sequence(["0", "1", "stray"])
    k = sequence(["0", "1", "stray"])
    # score of like blocks: 64 / sqrt(4) = 32, so each row's top-cdf is its like block alone.
    got = SpargeAttn(tau=0.9, theta=0.5, tile=(16, 16)).select(q, k, SITE)
    assert got[0, 0].int().tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 1]]


def test_spargeattn_leaves_stray_columns_out_of_the_softmax() -> None:
    # a stray column with the largest pooled score would take all mass if it stayed in.
    stray = torch.zeros(16, 4)
    stray[0, 0] = 1600.0
    k = torch.cat([block("1"), block("1"), stray])[None, None]
    q = sequence(["0", "0", "0"])
    method = SpargeAttn(tau=0.9, theta=0.2, tile=(16, 16))
    # what is left is a tie of columns 0 and 1, and 0.9 needs both.
    assert bool(method.select(q, k, SITE).all())
    assert (
        SpargeAttn(tau=0.9, theta=-1, tile=(16, 16)).select(q, k, SITE)[0, 0].int().tolist()
        == [[0, 0, 1]] * 3
    )


def test_spargeattn_keeps_the_block_that_crosses_tau() -> None:
    q, k = sequence(["0"]), sequence(["0", "1", "1"])
    method = SpargeAttn(tau=0.5, theta=0.5, tile=(16, 16))
    assert method.select(q, k, SITE)[0, 0].int().tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("tau", [0.1, 0.9, 1.0])
def test_spargeattn_computes_everything_when_every_block_is_stray(tau: float) -> None:
    stray = sequence(["stray"] * 3)
    alike = sequence(["0", "1", "0"])
    method = SpargeAttn(tau=tau, theta=0.5, tile=(16, 16))
    for q, k in ((stray, stray), (alike, stray), (stray, alike)):
        assert bool(method.select(q, k, SITE).all())


def test_spargeattn_with_the_lowest_theta_judges_no_block() -> None:
    q, k = normal(1, 2, 100, 16), normal(1, 2, 100, 16, seed=1)
    judged_none = SpargeAttn(tau=0.7, theta=-1, tile=(16, 16)).select(q, k, SITE)
    assert torch.equal(judged_none, FgAttn(top_p=0.7, tile=(16, 16)).select(q, k, SITE))


@pytest.mark.parametrize("text", ["16x16", "16X16", " 16 x 16 "])
def test_a_tile_reads_queries_x_keys(text: str) -> None:
    assert parse_tile(text) == (16, 16)
    assert parse_tile("128x64") == (128, 64)


@pytest.mark.parametrize("text", ["", "16", "16x", "x16", "16x16x16", "-16x16", "1.5x16", "axb"])
def test_what_is_no_tile_gets_the_form(text: str) -> None:
    with pytest.raises(vidsparse.OptionError, match="MxN"):
        parse_tile(text)


@pytest.mark.parametrize("text", ["8x16", "256x16", "16x2", "16x256", "0x0"])
def test_a_tile_without_a_kernel_is_refused(text: str) -> None:
    with pytest.raises(vidsparse.OptionError, match=r"M \(queries\) in 16, 32, 64, 128"):
        parse_tile(text)


@given(
    hundredths=st.integers(1, 100),
    tiles=st.integers(1, 400),
)
def test_a_share_of_tiles_is_rounded_up_from_what_it_is_in_decimals(
    hundredths: int, tiles: int
) -> None:
    share = Fraction(hundredths, 100)
    assert count_of_share(float(share), tiles) == math.ceil(share * tiles)


def test_a_share_keeps_no_tile_more_than_it_says() -> None:
    scores = torch.randn(4, 100)
    assert (choose_tiles(scores, None, 0.07).sum(-1) == 7).all()
    assert XAttention(tau=None, topk=0.28).count(25 * 128) == 7
    # of the least share one tile is left.
    assert count_of_share(1e-9, 3) == 1
