"""HunyuanVideo 1.5: joint attention with three kinds of text, sorted so that padding comes last.

Image tokens, glyph tokens and prompt tokens stand in this order, their padding after all of them.
The stock processor builds a ``[B, 1, S, S]`` mask of it in every layer, 12 GiB at 720p; here the
padding is cut off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import HUNYUAN_VIDEO_15
from vidsparse.pipelines.hunyuan_video import HunyuanVideoSparseProcessor
from vidsparse.pipelines.layout import Layout, latent_grid, valid_text
from vidsparse.pipelines.parallel import Shares, gathered, split_outputs


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    config, image = transformer.config, arguments["image_embeds"]
    masks = (arguments["encoder_attention_mask"], arguments["encoder_attention_mask_2"])
    text = sum(mask.shape[1] for mask in masks) + image.shape[1]
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    grid = latent_grid(arguments.get("hidden_states"), patch, text)
    if grid is None:
        return None
    # text-to-video passes zeros, which the transformer takes as no image.
    images = image.shape[1] if bool(image.any()) else 0
    prompts, glyphs = (valid_text(mask) for mask in masks)
    valid = (images + sum(pair) for pair in zip(prompts, glyphs, strict=True))
    return Layout(grid, tuple(valid))


def _plan(transformer: Any) -> Mapping[str, Any]:
    """Split after the patches and the angles, since the forward asks the latent for its size."""
    return {
        "x_embedder": split_outputs(1, 3),
        "rope": split_outputs(0, 2, 2),
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=HUNYUAN_VIDEO_15,
    attention=re.compile(r"transformer_blocks\.\d+\.attn"),
    stock_processors=("HunyuanVideo15AttnProcessor2_0",),
    processor=HunyuanVideoSparseProcessor,
    layout=_layout,
    branches=("conditional", "unconditional"),
    shares=Shares(plan=_plan),
)
