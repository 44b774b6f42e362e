"""BSFA: which blocks are judged, which pass, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget import random_qkv
from torch import Tensor

import vidsparse
from vidsparse.calibration import Extent
from vidsparse.calibration.bsfa import BsfaCalibrator
from vidsparse.engine import AttentionEngine
from vidsparse.grid import TokenGrid
from vidsparse.methods import Bsfa, FgAttn, Numbers
from vidsparse.methods.bsfa import FRACTION, THRESHOLD, always_kept
from vidsparse.order import token_order
from vidsparse.plan import SparsePlan
from vidsparse.planning import plan_attention
from vidsparse.schedule import Schedule
from vidsparse.site import CallSite

GRID = TokenGrid(3, 8, 16)  # 3 query blocks of 128, 6 key blocks of 64


def bsfa(
    threshold: Tensor, grid: TokenGrid = GRID, edges: tuple[float, ...] = (), **options: Any
) -> Bsfa:
    """``threshold`` ``[H, groups, fractions, query blocks]`` for one layer."""
    fractions = torch.tensor([0.1, 0.3])[: threshold.shape[2]]
    numbers = Numbers(
        {
            THRESHOLD: threshold[None, None].float(),
            FRACTION: fractions.expand(1, 1, threshold.shape[0], -1),
        },
        video=(grid.frames, grid.height, grid.width),
        edges=edges,
    )
    return Bsfa(**{"keep": 0.1, "numbers": numbers, **options})


def run(method: Bsfa, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> tuple[Tensor, float]:
    engine = AttentionEngine(method, schedule=Schedule(dense_steps=0), order="rowmajor", layers=1)
    engine.begin_run(site.step + 1)
    out = engine.attend(q, k, v, site)
    skipped = engine.trace.summary().skipped
    assert skipped is not None
    return out, skipped


def expected(q: Tensor, k: Tensor, v: Tensor, passes: Tensor, tile: tuple[int, int]) -> Tensor:
    """Softmax over the blocks that pass, ``[H, Tq, Tk]``, straight from the paper's words."""
    mask = passes.repeat_interleave(tile[0], 1).repeat_interleave(tile[1], 2)
    mask = mask[:, : q.shape[2], : k.shape[2]]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("tile", [(128, 64), (128, 128)])
@pytest.mark.parametrize("grid", [GRID, TokenGrid(3, 7, 15)], ids=["whole", "short"])
def test_blocks_whose_largest_score_is_below_the_threshold_are_left_out(
    grid: TokenGrid, tile: tuple[int, int]
) -> None:
    q, k, v = random_qkv(grid.tokens, 64, torch.float32)
    scores = (q @ k.transpose(-1, -2))[0] / 8
    rows, keys = (-(-grid.tokens // size) for size in tile)
    largest = torch.stack(
        [
            torch.stack([block.amax((1, 2)) for block in band.split(tile[1], 2)], 1)
            for band in scores.split(tile[0], 1)
        ],
        1,
    )
    threshold = largest.median(-1).values  # [H, Tq]: about half of the blocks pass
    own = always_kept(grid, tile)
    passes = (largest >= threshold.unsqueeze(-1)) | own
    assert 0.3 < passes.float().mean().item() < 0.95
    method = bsfa(threshold[:, None, None], grid, tile=tile)
    out, skipped = run(method, q, k, v, CallSite(0, 0, 0.0, grid))
    torch.testing.assert_close(out, expected(q, k, v, passes, tile), rtol=1e-4, atol=1e-5)
    sizes = [
        torch.tensor([min(size, grid.tokens - i * size) for i in range(n)])
        for size, n in zip(tile, (rows, keys), strict=True)
    ]
    pairs = sizes[0].unsqueeze(1) * sizes[1]
    share = (~passes * pairs).sum().item() / (2 * grid.tokens**2)
    assert skipped == pytest.approx(share)


def test_no_threshold_skips_a_blocks_own_tokens_and_computed_stays_above_a_half() -> None:
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32)
    method = bsfa(torch.full((2, 1, 1, 3), torch.inf))
    engine = AttentionEngine(method, schedule=Schedule(dense_steps=0), order="rowmajor", layers=1)
    out = engine.attend(q, k, v, CallSite(0, 0, 0.0, GRID))
    own = torch.eye(3, dtype=torch.bool).repeat_interleave(2, 1).expand(2, -1, -1)
    torch.testing.assert_close(out, expected(q, k, v, own, (128, 64)), rtol=1e-4, atol=1e-5)
    summary = engine.trace.summary()
    assert summary.selected == 1
    assert summary.computed == pytest.approx(0.5 + 0.5 / 3)
    assert summary.sparsity == pytest.approx(1 / 3)


def test_text_is_kept_both_ways() -> None:
    grid = TokenGrid(3, 8, 16, text=70)  # query block 3 and key blocks 6 and 7
    kept = always_kept(grid, (128, 64))
    assert kept.shape == (4, 8)
    assert bool(kept[3].all())
    assert bool(kept[:, 6:].all())
    assert kept[:3, :6].int().tolist() == [
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    q, k, v = random_qkv(grid.tokens, 64, torch.float32)
    # thresholds are for blocks of video tokens: a preset does not know the prompt's length.
    out, _ = run(bsfa(torch.full((2, 1, 1, 3), torch.inf)), q, k, v, CallSite(0, 0, 0.0, grid))
    passes = kept.expand(2, -1, -1)
    torch.testing.assert_close(out, expected(q, k, v, passes, (128, 64)), rtol=1e-4, atol=1e-5)


def test_a_step_takes_the_thresholds_of_its_group_and_fraction() -> None:
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32)
    low, high = -torch.inf, torch.inf
    # groups x fractions: all pass but in the second group at the second fraction.
    table = torch.tensor([[low, low], [low, high]])[None, :, :, None].expand(2, -1, -1, 3)

    def skipped(timestep: float, keep: float) -> float:
        method = bsfa(table, edges=(500.0,), keep=keep)
        return run(method, q, k, v, CallSite(0, 0, timestep, GRID))[1]

    assert [skipped(t, f) for t in (900.0, 500.0, 499.0) for f in (0.1, 0.3)] == [
        0, 0, 0, 0, 0, pytest.approx(2 / 3),
    ]  # fmt: skip


def test_heads_have_their_own_thresholds_whatever_the_order_and_dtype() -> None:
    q, k, v = random_qkv(GRID.tokens, 64, torch.bfloat16)
    table = torch.tensor([-torch.inf, torch.inf])[:, None, None, None].expand(-1, 1, 1, 3)
    engine = AttentionEngine(bsfa(table), schedule=Schedule(dense_steps=0), layers=1)
    engine.attend(q, k, v, CallSite(0, 0, 0.0, GRID))
    (cell,) = engine.trace.cells
    assert cell.skipped is not None
    torch.testing.assert_close(cell.skipped, torch.tensor([[0, 2 / 3]]))


def test_flags_beside_the_list_are_those_of_the_blocks_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, _ = random_qkv(GRID.tokens, 64, torch.float32)
    order = token_order("rowmajor", GRID)
    method = FgAttn(top_p=0.5, tile=(16, 16), merge="xor")
    plan = plan_attention(method, order.apply(q), order.apply(k), CallSite(0, 0, 0.0, GRID))
    # on a GPU, lists end in what the memory held.
    past = torch.arange(plan.kv_index.shape[-1]) >= plan.kv_count.unsqueeze(-1)
    poisoned = plan.kv_index.masked_fill(past, -12_345)
    monkeypatch.setattr(SparsePlan, "kv_index", poisoned)
    mask = torch.rand(24, 24, generator=torch.Generator().manual_seed(0)) < 0.2
    flags = plan.listed(mask, plan.kv_index)
    for head in range(2):
        for g, tiles in enumerate(plan.q_tiles[0, head].tolist()):
            count = int(plan.kv_count[0, head, g])
            chunks = plan.kv_index[0, head, g, :count].tolist()
            want = [any(bool(mask[t, c]) for t in tiles if t >= 0) for c in chunks]
            assert flags[0, head, g, :count].tolist() == want


def test_without_a_preset_it_says_how_to_make_one() -> None:
    with pytest.raises(vidsparse.OptionError, match="vidsparse calibrate --method bsfa"):
        AttentionEngine(Bsfa(), schedule=Schedule(), layers=1)


def test_a_fraction_without_thresholds_is_refused() -> None:
    method = bsfa(torch.zeros(2, 1, 2, 3), keep=0.2)
    with pytest.raises(vidsparse.OptionError, match=r"\(0.1, 0.3\), got 0.2"):
        AttentionEngine(method, schedule=Schedule(), layers=1)


@pytest.mark.parametrize("tile", ["64x64", "128x32", "128x16"])
def test_other_blocks_are_refused(tile: Any) -> None:
    with pytest.raises(vidsparse.OptionError, match="128 queries by 64 or 128 keys"):
        Bsfa(tile=tile)


def test_another_size_or_model_is_refused_in_the_first_step() -> None:
    engine = AttentionEngine(bsfa(torch.zeros(2, 1, 1, 3)), schedule=Schedule(), layers=2)
    engine.begin_run(10)
    other = TokenGrid(3, 16, 8)
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32)
    with pytest.raises(vidsparse.OptionError, match="grid of 3x8x16, and this video has 3x16x8"):
        engine.attend(q, k, v, CallSite(0, 0, 0.0, other))
    with pytest.raises(vidsparse.OptionError, match=r"for 1 x 1 layers .* with 2 heads"):
        engine.attend(q, k, v, CallSite(1, 0, 0.0, GRID))
    q, k, v = random_qkv(GRID.tokens, 64, torch.float32, heads=3)
    with pytest.raises(vidsparse.OptionError, match="this call has 3"):
        engine.attend(q, k, v, CallSite(0, 0, 0.0, GRID))


@pytest.mark.parametrize(
    ("fractions", "kept"), [((0.2, 0.4), 0.4), ((0.1, 0.25), 0.25), ((0.5, 0.3, 0.1), 0.3)]
)
def test_a_preset_keeps_the_fraction_nearest_to_the_methods(
    fractions: tuple[float, ...], kept: float
) -> None:
    extent = Extent(parts=1, layers=1, heads=1, window=range(8), prompts=1)
    made = BsfaCalibrator(method=Bsfa(), extent=extent, fractions=fractions)
    assert made.options() == {"keep": kept}
    assert FRACTION in made.found(None)
