"""LTX's and LTX-2's pipelines around conditions and tiles: their grids, full masks, removal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import LTX2DFRPipeline
from diffusers.pipelines.ltx2.dfr_layout import epilogue_tiles
from family_checks import check_full_mask, forward_of, state_of
from tiny_ltx_kin import KIN
from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.ltx import frames_layout

pytestmark = pytest.mark.usefixtures("one_thread")


EVERY = pytest.mark.parametrize("name", KIN)


def made(name: str, pipe: Any, **changes: Any) -> Tensor:
    """The denoised latents of a run of three steps."""
    call = {"prompt": "a red circle", "height": 64, "width": 64, "num_frames": 9}
    generator = torch.Generator().manual_seed(0)
    call |= {"output_type": "latent", "generator": generator, **KIN[name].call, **changes}
    latents: Tensor = pipe(**call).frames
    return latents


@EVERY
def test_grid_steps_and_branches_and_removal_bit_for_bit(name: str) -> None:
    kin = KIN[name]
    pipe = kin.build()
    stock, before = made(name, pipe), state_of(pipe)
    with sparsify(pipe, top_p=0.3, dense_steps=1) as handle:
        sparse = made(name, pipe)
        assert handle._session._layout.grid == kin.grid
        assert handle.summary().notes == ()
        seen = [c for c in handle.trace.cells if c.layer == 0]
    assert [(c.step, c.branch) for c in seen] == [(s, b) for s in range(3) for b in kin.branches]
    # a branch goes by the plan of one before it that has as many videos in its batch.
    for place, cell in enumerate(seen):
        alike = any((c.step, c.pairs) == (cell.step, cell.pairs) for c in seen[:place])
        assert cell.action == ("dense" if cell.step == 0 else "reuse" if alike else "replan")
    assert not torch.equal(sparse, stock)
    assert state_of(pipe) == before
    assert torch.equal(made(name, pipe), stock)


@EVERY
def test_full_mask_stays_within_twice_the_stock_error(name: str) -> None:
    # the processors are those of LTX and LTX-2, whose tests have bf16 too.
    pipe = KIN[name].build()
    check_full_mask(pipe, forward_of(pipe, lambda: made(name, pipe)), torch.float32)


def test_references_that_are_attended_to_in_part_run_dense_and_the_trace_says_so() -> None:
    name = "ltx2-references"
    pipe, part = KIN[name].build(), {"conditioning_attention_strength": 0.5}
    stock = made(name, pipe, **part)
    assert not torch.equal(stock, made(name, pipe))
    with sparsify(pipe, top_p=0.3, dense_steps=0) as handle:
        ours = made(name, pipe, **part)
        summary = handle.summary()
    assert summary.notes == ("dense: the host has a mask for this call",)
    assert summary.selected is None
    assert "all calls dense" in str(summary)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


def test_tiles_of_one_step_have_plans_of_their_own() -> None:
    name = "ltx2-dfr"
    pipe: LTX2DFRPipeline = KIN[name].build()
    tiles = {"video_tiles": epilogue_tiles((4, 32, 8), 1, ()), "height": 256}
    assert len(tiles["video_tiles"]) > 1
    stock = made(name, pipe, **tiles)
    with sparsify(pipe, top_p=1.0, dense_steps=0, reuse=3) as handle:
        ours = made(name, pipe, **tiles)
        seen = {(c.step, c.branch, c.action) for c in handle.trace.cells}
    parts = ["conditional", *(f"conditional {n + 1}" for n in range(1, len(tiles["video_tiles"])))]
    actions = ("replan", "reuse", "reuse")
    assert seen == {(s, part, action) for s, action in enumerate(actions) for part in parts}
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


# where the video stands


def coordinates(*grids: tuple[int, int, int]) -> Tensor:
    """Time, line and column of frames of several sizes, one grid after the other."""
    axes = [torch.cartesian_prod(*(torch.arange(n) * 8.0 for n in grid)).T for grid in grids]
    return torch.cat(axes, 1)


@pytest.mark.parametrize(
    ("grids", "expected"),
    [
        ([(3, 4, 5)], TokenGrid(3, 4, 5)),
        ([(2, 4, 5), (3, 4, 5), (1, 4, 5)], TokenGrid(6, 4, 5)),
        ([(2, 2, 3), (3, 4, 5), (7, 2, 1)], TokenGrid(3, 4, 5, text=12 + 14, lead=12)),
        ([(4, 1, 5)], TokenGrid(4, 1, 5)),
        ([(4, 5, 1)], TokenGrid(4, 5, 1)),
        ([(4, 1, 1)], TokenGrid(4, 1, 1)),
    ],
)
def test_the_longest_run_of_frames_of_one_size_is_the_video(
    grids: list[tuple[int, int, int]], expected: TokenGrid
) -> None:
    assert frames_layout(coordinates(*grids)).grid == expected
