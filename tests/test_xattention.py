"""XAttention: sums held to the printed algorithm, selections to answers known beforehand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import vidsparse
from vidsparse.attention import attend
from vidsparse.grid import TokenGrid
from vidsparse.methods import Numbers, XAttention
from vidsparse.methods import xattention as module
from vidsparse.methods.xattention import STRIDES, block_sums, query_turn, whole_groups
from vidsparse.planning import plan_attention
from vidsparse.site import CallSite

pytestmark = pytest.mark.usefixtures("one_thread")


def site(tokens: int, text: int = 0) -> CallSite:
    return CallSite(0, 0, 1.0, TokenGrid(1, 1, tokens - text, text=text))


def drifting(tokens: int, dim: int, *, batch: int = 1, heads: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, tokens, dim, generator=generator).cumsum(2) / 5


def algorithm_1(Q: Tensor, K: Tensor, B: int, S: int) -> Tensor:
    """Lines 1 to 12 for one head as printed, in fp64: block sums ``[N_B, N_B]``.

    L is a multiple of B, as there. The softmax is over all keys: attention looks both ways.
    """
    L, d_h = Q.shape
    N_B = L // B
    rows = []
    for b in range(N_B):
        Q_slice = Q[b * B : (b + 1) * B, :]
        Q_reshaped = []
        for i in range(S - 1, -1, -1):
            Q_reshaped.append(Q_slice[i::S, :])
        K_reshaped = []
        for i in range(S):
            K_reshaped.append(K[i::S, :])
        product = torch.cat(Q_reshaped, 1).double() @ torch.cat(K_reshaped, 1).double().T
        A_approx = torch.softmax(product / (math.sqrt(d_h) * S), -1)
        rows.append(torch.stack([block.sum() for block in A_approx.split(B // S, 1)]))
    return torch.stack(rows)


def find_blocks(row: list[float], tau: float) -> set[int]:
    """The fewest blocks that hold tau of a row's sum; among equals the first."""
    chosen: set[int] = set()
    for block in sorted(range(len(row)), key=lambda j: -row[j]):
        if sum(row[j] for j in chosen) >= tau * sum(row):
            break
        chosen.add(block)
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stride", STRIDES)
def test_block_sums_are_those_of_the_printed_algorithm(stride: int, dtype: torch.dtype) -> None:
    q, k = (drifting(512, 32, batch=2, seed=i).to(dtype) for i in (0, 1))
    got = block_sums(q, k, (128, 128), stride)
    for b in range(2):
        for h in range(2):
            expected = algorithm_1(q[b, h], k[b, h], 128, stride) / (128 // stride)
            torch.testing.assert_close(got[b, h].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tau", [0.3, 0.9])
def test_each_row_keeps_the_fewest_blocks_that_hold_tau(tau: float) -> None:
    q, k = (drifting(1024, 32, seed=i) for i in (0, 1))
    mask = XAttention(tau=tau).select(q, k, site(1024))
    for h in range(2):
        sums = algorithm_1(q[0, h], k[0, h], 128, 8).tolist()
        chosen = [set(row.nonzero().flatten().tolist()) for row in mask[0, h]]
        assert chosen == [find_blocks(row, tau) for row in sums]


@pytest.mark.parametrize("stride", [4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 3, 130, 331, 700])
def test_short_groups_repeat_their_tokens_and_short_tiles_have_fewer_groups(
    tokens: int, stride: int
) -> None:
    q, k = (drifting(tokens, 16, seed=i) for i in (0, 1))
    got = block_sums(q, k, (64, 32), stride)
    groups = -(-tokens // stride)
    group = torch.arange(groups * stride).view(groups, stride)
    last = tokens - (groups - 1) * stride
    group[-1] = (groups - 1) * stride + torch.arange(stride) % last
    scores = torch.einsum(
        "bhtid,bhuid->bhtu", q[:, :, group].flip(3).double(), k[:, :, group].double()
    )
    weights = (scores / (4 * stride)).softmax(-1)
    for i, rows in enumerate(weights.split(64 // stride, 2)):
        expected = torch.stack([c.sum(-1) for c in rows.split(32 // stride, -1)], -1).mean(2)
        torch.testing.assert_close(got[:, :, i].double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.sum(-1), torch.ones(got.shape[:3]))


def test_small_chunks_of_rows_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = (drifting(700, 16, batch=2, seed=i) for i in (0, 1))
    whole = block_sums(q, k, (64, 32), 8)
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 1)
    torch.testing.assert_close(block_sums(q, k, (64, 32), 8), whole)


# ---- known answers ----


def attends(links: Tensor, strength: float = 60.0) -> tuple[Tensor, Tensor]:
    """q, k ``[1, 1, S, S]`` whose attention map is ``links`` ``[S, S]`` times ``strength``."""
    tokens = links.shape[0]
    q = links.float() * strength * math.sqrt(tokens)
    return q[None, None], torch.eye(tokens)[None, None]


def chosen(mask: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in mask[0, 0]]


def test_a_vertical_line_is_found_wherever_it_stands() -> None:
    for column in (37, 64, 255):
        links = torch.zeros(256, 256)
        links[:, column] = 1
        mask = XAttention(tau=0.9, tile=(64, 64)).select(*attends(links), site(256))
        assert chosen(mask) == [[column // 64]] * 4


@pytest.mark.parametrize("offset", [1, 3, 63, 65, 101])
def test_a_slash_of_odd_offset_is_found(offset: int) -> None:
    links = torch.zeros(256, 256)
    row = torch.arange(256)
    links[row, (row + offset) % 256] = 1
    mask = XAttention(tau=0.99, tile=(64, 64)).select(*attends(links), site(256))
    first = [(i + offset // 64) % 4 for i in range(4)]
    second = [(i + offset // 64 + 1) % 4 for i in range(4)]
    wanted = [{a, b} if offset % 64 else {a} for a, b in zip(first, second, strict=True)]
    assert [set(row) for row in chosen(mask)] == wanted


@pytest.mark.parametrize("offset", [0, 4])
def test_a_slash_of_even_offset_is_not_seen(offset: int) -> None:
    # where i + j = S - 1 modulo S, an odd number, j - i is odd too: the paper has it that
    # antidiagonals meet every slash.
    links = torch.zeros(256, 256)
    row = torch.arange(256)
    links[row, (row + offset) % 256] = 1
    sums = block_sums(*attends(links), (64, 64), 8)
    torch.testing.assert_close(sums, torch.full_like(sums, 1 / 4))


def test_the_diagonal_pattern_sees_slashes_of_whole_strides_alone() -> None:
    row = torch.arange(256)
    for offset, seen in ((0, True), (8, True), (1, False), (4, False)):
        links = torch.zeros(256, 256)
        links[row, (row + offset) % 256] = 1
        sums = block_sums(*attends(links), (64, 64), 8, "diagonal")
        assert bool((sums[0, 0].diagonal() > 0.8).all()) == seen


def test_patterns_are_pairings_of_a_groups_tokens() -> None:
    for stride in STRIDES:
        assert query_turn("antidiagonal", stride).tolist() == list(range(stride))[::-1]
        assert query_turn("diagonal", stride).tolist() == list(range(stride))
        random = query_turn("random", stride)
        assert sorted(random.tolist()) == list(range(stride))
        assert torch.equal(random, query_turn("random", stride))


def test_every_token_counts_in_a_short_group() -> None:
    x = torch.arange(11.0).view(1, 1, 11, 1)
    assert whole_groups(x, 8).flatten().tolist() == [*range(11), 8, 9, 10, 8, 9]


def test_equal_sums_are_taken_in_order_of_position() -> None:
    q = k = torch.zeros(1, 1, 512, 16)
    mask = XAttention(tau=0.5).select(q, k, site(512))
    assert chosen(mask) == [[0, 1]] * 4
    assert chosen(XAttention(topk=0.5).select(q, k, site(512))) == [[0, 1]] * 4


@pytest.mark.parametrize(("topk", "kept"), [(0.01, 1), (0.25, 3), (0.3, 3), (0.31, 4), (1, 10)])
def test_topk_keeps_that_share_of_key_tiles_rounded_up(topk: float, kept: int) -> None:
    q, k = (drifting(1280, 16, seed=i) for i in (0, 1))
    mask = XAttention(topk=topk).select(q, k, site(1280))
    assert bool((mask.sum(-1) == kept).all())
    sums = block_sums(q, k, (128, 128), 8)
    least = sums.masked_fill(~mask, math.inf).amin(-1)
    assert bool((sums.masked_fill(mask, 0).amax(-1) <= least).all())


@pytest.mark.parametrize(("blocks", "kept"), [(1, 1), (3, 3), (99, 10)])
def test_blocks_keeps_that_number_of_key_tiles(blocks: int, kept: int) -> None:
    q, k = (drifting(1280, 16, seed=i) for i in (0, 1))
    mask = XAttention(blocks=blocks).select(q, k, site(1280))
    assert bool((mask.sum(-1) == kept).all())


def test_heads_have_their_own_tau_from_calibrated_numbers() -> None:
    q, k = (drifting(1024, 16, heads=3, seed=i) for i in (0, 1))
    table = torch.tensor([0.2, 0.6, 1.0]).view(1, 1, 3)
    numbers = Numbers({"tau": table}, video=(1, 1, 1024))
    mask = XAttention(numbers=numbers).select(q, k, site(1024))
    for head, tau in enumerate((0.2, 0.6, 1.0)):
        alone = XAttention(tau=tau).select(q, k, site(1024))
        assert torch.equal(mask[:, head], alone[:, head])
    # a chunk of heads from the second on.
    late = CallSite(0, 0, 1.0, TokenGrid(1, 1, 1024), first_head=1)
    part = XAttention(numbers=numbers).select(q[:, 1:], k[:, 1:], late)
    assert torch.equal(part, mask[:, 1:])


# ---- in the engine ----


@pytest.mark.parametrize("text", [0, 20])
def test_text_is_computed_in_full(text: int) -> None:
    grid = TokenGrid(4, 10, 10, text=text)
    q, k = (drifting(grid.tokens, 32, batch=2, seed=i) for i in (0, 1))
    plan = plan_attention(XAttention(tau=0.1, tile=(32, 32)), q, k, CallSite(0, 0, 1.0, grid))
    assert float(plan.selected.max()) < 0.7
    if text:
        bare = plan_attention(
            XAttention(tau=0.1, tile=(32, 32)), q, k, CallSite(0, 0, 1.0, TokenGrid(1, 1, 420))
        )
        assert bool((plan.selected > bare.selected).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tau_of_one_is_dense_attention(dtype: torch.dtype) -> None:
    grid = TokenGrid(3, 7, 9, text=5)
    q, k, v = (drifting(grid.tokens, 64, batch=2, seed=i).to(dtype) for i in range(3))
    got = attend(q, k, v, grid, "xattention", tau=1)
    dense = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    room = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(got.double(), dense, rtol=room, atol=room)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 0}, r"tau must lie in \(0, 1\]"),
        ({"tau": None}, r"tau must lie in \(0, 1\]"),
        ({"topk": 0.0}, r"topk must lie in \(0, 1\]"),
        ({"topk": 1.5}, r"topk must lie in \(0, 1\]"),
        ({"tau": 0.8, "topk": 0.3}, r"by tau or by topk, .* Hint: leave one out"),
        ({"blocks": 0}, "blocks must be a whole number from 1, got 0"),
        ({"blocks": 2.0}, "blocks must be a whole number from 1, got 2.0"),
        ({"blocks": 2, "topk": 0.3}, r"by topk or by blocks, .* Hint: leave one out"),
        ({"blocks": 2, "tau": 0.3}, r"by tau or by blocks, .* Hint: leave one out"),
        ({"stride": 5}, "stride must be one of 4, 8, 16, 64, got 5"),
        ({"pattern": "spiral"}, "unknown pattern 'spiral'. Hint: choose from antidiagonal"),
        ({"stride": 64, "tile": "32x64"}, "a stride of 64 does not divide a tile of 32x64"),
        ({"tile": "16x1"}, "a stride of 8 does not divide a tile of 16x1"),
        ({"merge": "hash"}, "unknown merge"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(vidsparse.OptionError, match=message):
        XAttention(**options)


def test_topk_and_blocks_take_the_place_of_tau() -> None:
    assert XAttention(topk=0.3).tau is None
    assert XAttention(blocks=3).tau is None
    assert XAttention().options()["tau"] == 0.9
    for method in (XAttention(topk=0.3), XAttention(blocks=3)):
        assert XAttention(**method.options()) == method
