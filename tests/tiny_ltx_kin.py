"""Tiny pipelines of LTX and LTX-2 around conditions and tiles, with a call and a grid each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import LTX2DFRTemporalRefinePipeline, LTXEulerAncestralRFScheduler
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from tiny_ltx import PLAIN_LTX2, ltx, ltx2
from tiny_parts import IMAGE, LAST_IMAGE, noise, ready

from vidsparse.grid import TokenGrid

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
