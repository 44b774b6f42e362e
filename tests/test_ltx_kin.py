"""LTX's and LTX-2's pipelines around conditions and tiles: their grids, full masks, removal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers import LTX2DFRPipeline, LTX2DFRTemporalRefinePipeline, LTXEulerAncestralRFScheduler
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.dfr_layout import epilogue_tiles
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from test_families import check_full_mask, forward_of, state_of
from tiny_ltx import PLAIN_LTX2, ltx, ltx2
from tiny_parts import IMAGE, LAST_IMAGE, noise, ready
from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.ltx import frames_layout

pytestmark = pytest.mark.usefixtures("one_thread")

SIGMAS = [1.0, 0.7, 0.4]
STEPS = {"num_inference_steps": 3}
VIDEO = [IMAGE] * 9


def ltx25(kind: str) -> Any:
    """With the marks of keyframes that only LTX-2.5 has."""
    pipe = ltx2(kind, use_keyframes_abs_pos_embedding=True)
    torch.nn.init.normal_(pipe.transformer.keyframes_abs_pos_embedding)
    return pipe


def refine() -> Any:
    parts = ltx25("LTX2DFRPipeline").components
    made = {name: part for name, part in parts.items() if part is not None}
    upsampler = LTX2LatentUpsamplerModel(
        in_channels=4,
        mid_channels=32,
        num_blocks_per_stage=1,
        spatial_upsample=False,
        temporal_upsample=True,
    )
    made |= {"scheduler": LTXEulerAncestralRFScheduler(eta=0.5)}
    return ready(LTX2DFRTemporalRefinePipeline(**made, temporal_latent_upsampler=upsampler.eval()))


def ltx_long() -> Any:
    pipe = ltx("LTXI2VLongMultiPromptPipeline")
    pipe.scheduler = LTXEulerAncestralRFScheduler()
    return pipe


@dataclass(frozen=True)
class Kin:
    """A pipeline, what its call needs, and the grid of its last forward."""

    build: Callable[[], Any]
    grid: TokenGrid
    call: dict[str, Any]
    branches: tuple[str, ...] = ("conditional",)


KIN = {
    "ltx-long": Kin(
        ltx_long,
        TokenGrid(3, 8, 8),
        {
            "num_frames": 33,
            "sigmas": [*SIGMAS, 0.0],
            "temporal_tile_size": 16,
            "temporal_overlap": 8,
        },
    ),
    "ltx2-condition": Kin(
        # the first frame in its place, another one as tokens behind the video.
        lambda: ltx2("LTX2ConditionPipeline"),
        TokenGrid(3, 8, 8),
        {
            "conditions": [
                LTX2VideoCondition(frames=IMAGE, index=0, crf=0),
                LTX2VideoCondition(frames=LAST_IMAGE, index=1, crf=0),
            ],
            **STEPS,
            **PLAIN_LTX2,
        },
    ),
    "ltx2-references": Kin(
        lambda: ltx2("LTX2InContextPipeline", perturbed_attn=True),
        TokenGrid(4, 8, 8),
        {
            "reference_conditions": [LTX2ReferenceCondition(frames=VIDEO)],
            "spatio_temporal_guidance_blocks": [1],
            **STEPS,
        },
        ("conditional", "uncond_stg", "uncond_modality"),
    ),
    "ltx2-small-references": Kin(
        lambda: ltx2("LTX2InContextPipeline"),
        TokenGrid(3, 8, 8, text=2 * 4 * 4),
        {
            "conditions": [LTX2VideoCondition(frames=LAST_IMAGE, index=1, crf=0)],
            "reference_conditions": [LTX2ReferenceCondition(frames=VIDEO)],
            "reference_downscale_factor": 2,
            **STEPS,
            **PLAIN_LTX2,
        },
    ),
    "ltx2-hdr": Kin(
        lambda: ltx2("LTX2HDRPipeline"),
        TokenGrid(4, 8, 8),
        {
            "reference_conditions": [LTX2ReferenceCondition(frames=VIDEO)],
            "stg_scale": 0.0,
            "modality_scale": 1.0,
            **STEPS,
        },
    ),
    # a keyframe is invented beside the video.
    "ltx2-dfr": Kin(
        lambda: ltx25("LTX2DFRPipeline"),
        TokenGrid(5, 8, 8),
        {"num_frames": 25, "sigmas": SIGMAS},
    ),
    "ltx2-refine": Kin(
        refine,
        TokenGrid(9, 8, 8),
        {
            "num_frames": 25,
            "sigmas": SIGMAS,
            "latents": noise(1, 1, 4, 4, 8, 8),
            "keyframes_latents": noise(2, 1, 4, 1, 8, 8),
            "keyframe_positions": [24],
            "audio_latents": noise(3, 1, 2, 26, 2),
        },
    ),
}

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
