"""Merging tiles into 128-row blocks, and the plan made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vidsparse
import vidsparse.planning
from vidsparse.grid import TokenGrid
from vidsparse.grouping import (
    MERGES,
    merge_consecutive,
    merge_xor,
    merge_xor_window,
)
from vidsparse.kernels.attention.reference import token_mask
from vidsparse.methods import FgAttn, SpargeAttn
from vidsparse.plan import SparsePlan, make_plan
from vidsparse.planning import plan_attention
from vidsparse.site import CallSite

# 530: the last block of every tile size is short, and tile 0 is not in it.
LENGTHS = [1, 16, 100, 128, 530]
TILES = [(16, 16), (32, 8), (64, 64), (128, 1), (16, 128)]


def random_mask(
    tokens: int, tile: tuple[int, int], *, share: float = 0.3, batch: int = 2, seed: int = 0
) -> Tensor:
    shape = (batch, 3, -(-tokens // tile[0]), -(-tokens // tile[1]))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    mask[..., 0] |= ~mask.any(-1)
    return mask


def clustered_mask(kinds: int = 6, tiles: int = 96, keys: int = 120, seed: int = 0) -> Tensor:
    """Query tiles of a few kinds in mixed order; tiles of a kind keep nearly the same keys."""
    gen = torch.Generator().manual_seed(seed)
    kind = torch.rand(kinds, keys, generator=gen) < 0.25
    mask = kind[torch.randint(kinds, (1, 2, tiles), generator=gen)]
    flipped = torch.rand(mask.shape, generator=gen) < 0.02
    return mask ^ flipped


def slow_greedy(rows: list[list[bool]], per_block: int) -> list[list[int]]:
    """Section 5.2, sentence by sentence: the first ungrouped tile takes its nearest ones."""
    ungrouped = list(range(len(rows)))
    groups = []
    while ungrouped:
        first = ungrouped.pop(0)
        distance = {
            i: sum(a != b for a, b in zip(rows[i], rows[first], strict=True)) for i in ungrouped
        }
        nearest = sorted(ungrouped, key=lambda i: (distance[i], i))[: per_block - 1]
        for i in nearest:
            ungrouped.remove(i)
        groups.append([first, *nearest])
    return groups


def groups_of(blocks: Tensor) -> list[list[int]]:
    """Blocks ``[G, R]`` as lists, without the empty places."""
    return [[t for t in block if t >= 0] for block in blocks.tolist()]


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("per_block", [1, 2, 4, 8])
@pytest.mark.parametrize("tiles", [1, 7, 8, 9, 64, 65, 130])
def test_every_tile_stands_in_exactly_one_block(tiles: int, per_block: int, merge: str) -> None:
    mask = random_mask(tiles * 16, (16, 16))
    blocks = MERGES[merge](mask, per_block)
    assert blocks.dtype == torch.int32
    assert blocks.shape == (2, 3, -(-tiles // per_block), per_block)
    for head in blocks.reshape(6, -1).tolist():
        assert sorted(t for t in head if t >= 0) == list(range(tiles))
        # only the last block may be short, and at its end.
        assert -1 not in head[:tiles]


@settings(max_examples=60)
@given(
    tiles=st.integers(1, 20),
    keys=st.integers(1, 12),
    per_block=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 10_000),
)
def test_xor_is_the_papers_greedy(tiles: int, keys: int, per_block: int, seed: int) -> None:
    # few keys make many equal distances, so the order of ties is tried as well.
    gen = torch.Generator().manual_seed(seed)
    mask = torch.rand(1, 2, tiles, keys, generator=gen) < 0.4
    blocks = merge_xor(mask, per_block)
    for h in range(2):
        assert groups_of(blocks[0, h]) == slow_greedy(mask[0, h].tolist(), per_block)


@pytest.mark.parametrize("tiles", [40, 61])
def test_windowed_xor_is_the_greedy_of_each_window(tiles: int) -> None:
    mask = random_mask(tiles * 16, (16, 16))
    blocks = merge_xor_window(mask, 4, window=16)
    for b in range(2):
        for h in range(3):
            expected = []
            for start in range(0, tiles, 16):
                rows = mask[b, h, start : start + 16].tolist()
                expected += [[start + i for i in group] for group in slow_greedy(rows, 4)]
            assert groups_of(blocks[b, h]) == expected


def test_one_window_is_the_whole_greedy() -> None:
    mask = random_mask(61 * 16, (16, 16))
    assert torch.equal(merge_xor_window(mask, 8, window=64), merge_xor(mask, 8))


def test_a_window_must_hold_whole_blocks() -> None:
    with pytest.raises(vidsparse.OptionError, match="whole blocks of 8 tiles, got 12 tiles"):
        merge_xor_window(random_mask(160, (16, 16)), 8, window=12)


def test_consecutive_merging_takes_neighbours() -> None:
    blocks = merge_consecutive(random_mask(10 * 16, (16, 16)), 4)
    assert blocks[1, 2].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]


def test_an_unknown_merge_is_refused() -> None:
    with pytest.raises(vidsparse.OptionError, match=r"'nearest'.*xor, xor-window, consecutive"):
        make_plan(random_mask(64, (16, 16)), (16, 16), 64, "nearest")


@pytest.mark.parametrize("merge", ["xor", "xor-window"])
def test_xor_computes_less_than_consecutive_on_clustered_masks(merge: str) -> None:
    mask = clustered_mask()
    tokens = mask.shape[2] * 16
    mask = mask[..., : mask.shape[2]]
    by_xor = make_plan(mask, (16, 16), tokens, merge).computed
    consecutive = make_plan(mask, (16, 16), tokens, "consecutive").computed
    assert bool((by_xor < 0.8 * consecutive).all())


@pytest.mark.parametrize("seed", range(4))
def test_xor_hardly_ever_loses_on_masks_without_structure(seed: int) -> None:
    mask = random_mask(1600, (16, 16), share=0.1, seed=seed)
    by_xor = make_plan(mask, (16, 16), 1600, "xor").computed.mean()
    consecutive = make_plan(mask, (16, 16), 1600, "consecutive").computed.mean()
    assert by_xor < 1.01 * consecutive


# ---- the plan ----


def as_token_mask(plan: SparsePlan) -> Tensor:
    return token_mask(plan.q_tiles, plan.kv_count, plan.kv_index, plan.tile, plan.tokens)


def brute_pairs(mask: Tensor, blocks: Tensor, tile: tuple[int, int], tokens: int) -> Tensor:
    """Pairs a plan must compute, bool ``[S, S]``: each block's tiles see their union of keys."""
    pairs = torch.zeros(tokens, tokens, dtype=torch.bool)
    for block in blocks.tolist():
        tiles = [t for t in block if t >= 0]
        for key in mask[tiles].any(0).nonzero().flatten().tolist():
            for t in tiles:
                pairs[t * tile[0] : (t + 1) * tile[0], key * tile[1] : (key + 1) * tile[1]] = True
    return pairs


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_plan_computes_the_union_and_counts_its_pairs(
    tokens: int, tile: tuple[int, int], merge: str
) -> None:
    mask = random_mask(tokens, tile)
    plan = make_plan(mask, tile, tokens, merge)
    grouped = MERGES[merge](mask, 128 // tile[0])
    got = as_token_mask(plan)
    for b in range(2):
        for h in range(3):
            pairs = brute_pairs(mask[b, h], grouped[b, h], tile, tokens)
            assert torch.equal(got[b, h], pairs)
            assert plan.computed[b, h].item() == pytest.approx(pairs.sum().item() / tokens**2)
            chosen = mask[b, h].repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
            chosen = chosen[:tokens, :tokens]
            assert plan.selected[b, h].item() == pytest.approx(chosen.sum().item() / tokens**2)
            # what the method chose is never lost.
            assert not bool((chosen & ~pairs).any())


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_full_mask_computes_exactly_everything(tile: tuple[int, int]) -> None:
    mask = torch.ones(1, 2, -(-500 // tile[0]), -(-500 // tile[1]), dtype=torch.bool)
    plan = make_plan(mask, tile, 500)
    assert plan.selected.tolist() == [[1.0, 1.0]]
    assert plan.computed.tolist() == [[1.0, 1.0]]
    assert bool(as_token_mask(plan).all())


@pytest.mark.parametrize("merge", MERGES)
def test_blocks_stand_longest_first_with_rising_lists(merge: str) -> None:
    mask = random_mask(1000, (16, 16)) & (torch.rand(2, 3, 63, 1) < 0.5)
    plan = make_plan(mask, (16, 16), 1000, merge)
    assert plan.kv_count.dtype == plan.q_tiles.dtype == torch.int32
    assert plan.kv_index.dtype == torch.int16
    for count, index in zip(plan.kv_count.flatten(0, 1), plan.kv_index.flatten(0, 1), strict=True):
        assert count.tolist() == sorted(count.tolist(), reverse=True)
        for n, row in zip(count.tolist(), index.tolist(), strict=True):
            assert row[:n] == sorted(set(row[:n]))


def test_a_tile_row_without_keys_gives_an_empty_list() -> None:
    mask = torch.zeros(1, 1, 4, 8, dtype=torch.bool)
    mask[0, 0, 2, 5] = True
    plan = make_plan(mask, (128, 64), 512)
    assert plan.kv_count.tolist() == [[[1, 0, 0, 0]]]
    assert plan.q_tiles[0, 0, 0].tolist() == [2]
    assert plan.kv_index[0, 0, 0, 0] == 5


# ---- from q and k ----


def qk(tokens: int, heads: int = 3, batch: int = 2) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, heads, tokens, 32, generator=gen) * 2 for _ in range(2))
    return q, k


@pytest.mark.parametrize("method", [FgAttn(top_p=0.2), SpargeAttn(tau=0.2, theta=-1)], ids=str)
@pytest.mark.parametrize("text", [1, 16, 37])
def test_text_is_computed_in_full_both_ways(method: FgAttn | SpargeAttn, text: int) -> None:
    grid = TokenGrid(3, 10, 13, text=text)
    plan = plan_attention(method, *qk(grid.tokens), CallSite(0, 0, 0.0, grid))
    pairs = as_token_mask(plan)
    assert bool(pairs[:, :, grid.video :].all())
    assert bool(pairs[..., grid.video :].all())
    assert not bool(pairs[:, :, : grid.video, : grid.video].all())


@pytest.mark.parametrize("heads_at_once", [1, 2])
@pytest.mark.parametrize("text", [0, 9])
def test_planning_by_chunks_of_heads_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, heads_at_once: int, text: int
) -> None:
    grid = TokenGrid(3, 10, 13, text=text)
    q, k = qk(grid.tokens, heads=5)
    method = FgAttn(top_p=0.4)
    whole = plan_attention(method, q, k, CallSite(0, 0, 0.0, grid))
    calls = []
    select = FgAttn.select

    def counted(self: FgAttn, q: Tensor, *rest: Any, **more: Any) -> Tensor:
        calls.append(q.shape[1])
        return select(self, q, *rest, **more)

    monkeypatch.setattr(FgAttn, "select", counted)
    tiles = (-(-grid.tokens // 16)) ** 2
    monkeypatch.setattr(vidsparse.planning, "MASK_TILES", 2 * tiles * heads_at_once)
    parts = plan_attention(method, q, k, CallSite(0, 0, 0.0, grid))
    assert calls == ([1] * 5 if heads_at_once == 1 else [2, 2, 1])
    for name in ("q_tiles", "kv_count", "kv_bits", "selected", "computed"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    assert (parts.tile, parts.tokens) == (whole.tile, whole.tokens)


@pytest.mark.parametrize(
    ("tile", "tiles_of_a_block"), [((16, 16), 4), ((32, 16), 2), ((64, 16), 1), ((128, 64), 1)]
)
def test_plans_for_a_cpu_have_blocks_of_64_rows_or_one_tile(
    tile: tuple[int, int], tiles_of_a_block: int
) -> None:
    grid = TokenGrid(3, 10, 13)
    plan = plan_attention(FgAttn(top_p=0.5, tile=tile), *qk(grid.tokens), CallSite(0, 0, 0.0, grid))
    assert plan.q_tiles.shape[-1] == tiles_of_a_block


def test_smaller_blocks_compute_less_and_never_less_than_selected() -> None:
    mask = torch.rand(1, 2, 63, 63, generator=torch.Generator().manual_seed(0)) < 0.2
    computed = [
        make_plan(mask, (16, 16), 1000, block_rows=rows).computed.mean().item()
        for rows in (16, 32, 64, 128)
    ]
    assert computed == sorted(computed)
    assert computed[0] == pytest.approx(make_plan(mask, (16, 16), 1000).selected.mean().item())


def test_planning_under_autocast_changes_nothing() -> None:
    # counts above 256 and scores would be rounded to bf16.
    grid = TokenGrid(1, 80, 80)
    q, k = qk(grid.tokens, heads=1, batch=1)
    method = FgAttn(top_p=0.7, tile=(128, 16))
    plain = plan_attention(method, q, k, CallSite(0, 0, 0.0, grid))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = plan_attention(method, q, k, CallSite(0, 0, 0.0, grid))
    for name in ("q_tiles", "kv_count", "kv_bits", "selected", "computed"):
        assert torch.equal(getattr(cast, name), getattr(plain, name)), name
