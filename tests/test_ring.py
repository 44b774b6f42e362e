"""The parts of a ring that need no processes: stretches, plans of parts, and their joining."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.kernels.attention.partial import attend_to_part, join
from vidsparse.kernels.attention.reference import token_mask
from vidsparse.masks import bits_between, count_bits, pack_bits, tile_count, unpack_bits
from vidsparse.plan import SparsePlan, make_plan
from vidsparse.ring import own_rows, plan_of_part, stretch_bounds

# odd lengths, text, more processes than tiles, tiles that differ in rows and keys.
GRIDS = [TokenGrid(5, 7, 11), TokenGrid(5, 7, 11, text=13), TokenGrid(1, 3, 17, text=2)]
TILES = [(16, 16), (16, 64), (64, 8)]


def random_plan(tile: tuple[int, int], tokens: int, merge: str) -> SparsePlan:
    generator = torch.Generator().manual_seed(tokens)
    shape = 2, 3, tile_count(tokens, tile[0]), tile_count(tokens, tile[1])
    mask = torch.rand(shape, generator=generator) < 0.2
    mask[..., 0] = True
    return make_plan(mask, tile, tokens, merge)


def mask_of(plan: SparsePlan) -> Tensor:
    return token_mask(plan.q_tiles, plan.kv_count, plan.kv_index, plan.tile, plan.tokens)


@pytest.mark.parametrize("first", [0, 5, 31, 32, 70])
@pytest.mark.parametrize("count", [1, 32, 33, 77])
def test_bits_between_are_those_of_the_mask(first: int, count: int) -> None:
    mask = torch.rand(3, 4, 150, generator=torch.Generator().manual_seed(0)) < 0.5
    found = unpack_bits(bits_between(pack_bits(mask), first, count, 150), 150)
    assert torch.equal(found[..., :count], mask[..., first : first + count])
    assert not found[..., count:].any()


def test_bits_are_counted_in_full_words_too() -> None:
    mask = torch.rand(5, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0], mask[1] = True, False
    assert torch.equal(count_bits(pack_bits(mask)), mask.sum(-1).int())


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("step", [16, 64])
def test_stretches_are_cut_at_steps_and_the_last_is_longest(
    grid: TokenGrid, count: int, step: int
) -> None:
    bounds = stretch_bounds(grid, count, step)
    lengths = [after - before for before, after in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(lengths)) == (0, grid.tokens, count)
    assert not any(bound % step for bound in bounds[:-1])
    assert max(lengths) == lengths[-1]
    assert lengths[-1] - min(lengths) < 2 * step + count + grid.text


@pytest.mark.parametrize("merge", ["xor", "xor-window", "consecutive"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("count", [2, 3])
def test_plans_of_parts_hold_the_pairs_of_the_whole(
    grid: TokenGrid, tile: tuple[int, int], merge: str, count: int
) -> None:
    plan = random_plan(tile, grid.tokens, merge)
    bounds = stretch_bounds(grid, count, 64)
    longest = bounds[-1] - bounds[-2]
    whole = mask_of(plan)
    for rows, keys in product(pairwise(bounds), pairwise(bounds)):
        if rows[0] == rows[1] or keys[0] == keys[1]:
            continue
        tiles = range(rows[0] // tile[0], tile_count(rows[1], tile[0]))
        part = plan_of_part(own_rows(plan, tiles, merge), keys[0], keys[1] - keys[0], longest)
        found = mask_of(part)
        wanted = torch.zeros_like(found)
        cut = whole[:, :, rows[0] : rows[1], keys[0] : keys[1]]
        wanted[:, :, : cut.shape[2], : cut.shape[3]] = cut
        assert torch.equal(found, wanted)


def test_own_rows_has_fewer_blocks_where_merging_stays_near() -> None:
    plan = random_plan((16, 16), 16 * 64 * 4, "xor-window")
    # half of the windows.
    assert own_rows(plan, range(128), "xor-window").q_tiles.shape[2] == plan.q_tiles.shape[2] // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cuts", [(0, 40), (0, 17, 40), (0, 1, 2, 40)])
def test_joined_parts_are_attention_to_all_keys(dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=generator, dtype=dtype) * 3 for n in (21, 40, 40))
    # rows that saw nothing yet.
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=dtype)
    for start, end in pairwise(cuts):
        lse = join(out, lse, *attend_to_part(q, k[:, :, start:end], v[:, :, start:end]))
    scores = q.double() @ k.double().transpose(-1, -2) / 4
    # a weight errs by the log-sum-exp's last place, which is that of its size.
    largest = scores.abs().max().item()
    budget = 8 * torch.finfo(dtype).eps * largest * v.abs().max().item()
    assert (out - scores.softmax(-1) @ v.double()).abs().max() <= budget
    assert (lse - scores.logsumexp(-1)).abs().max() <= 8 * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [1, 5, 15, 16, 40])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_shows_beside_any_count_of_keys(
    dtype: torch.dtype, keys: int, number: float
) -> None:
    q, k, v = (torch.ones(1, 2, n, 16, dtype=dtype) for n in (7, keys, keys))
    q[0, 1, 3, 5] = number
    out, lse = attend_to_part(q, k, v)
    shown = torch.zeros(1, 2, 7, dtype=torch.bool)
    shown[0, 1, 3] = True
    assert torch.equal(out.isnan().all(-1), shown)
    assert torch.equal(out.isnan().any(-1), shown)
    assert torch.equal(~lse.isfinite(), shown)


def test_a_row_without_keys_stays_zero_and_nan_stays_nan() -> None:
    out, none = torch.zeros(1, 1, 2, 4), torch.tensor([[[-torch.inf, 1.0]]])
    lse = join(out, none, torch.zeros(1, 1, 2, 4), torch.tensor([[[-torch.inf, torch.nan]]]))
    assert lse[0, 0, 0] == -torch.inf
    assert lse[0, 0, 1].isnan()
    assert not out[0, 0, 0].any()
    assert out[0, 0, 1].isnan().all()
