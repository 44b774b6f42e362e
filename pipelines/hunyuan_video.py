"""HunyuanVideo: joint attention in the dual- and single-stream blocks, padded text at the end.

The stock attention masks the padding in every call, which keeps it off the fast kernels. Valid keys
are a prefix of the sequence, so here the padding is cut off instead. Padded text tokens are no
one's keys, and only video leaves the transformer, so what their rows hold is never seen.

FramePack makes a video section by section in these blocks, behind frames of the past.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import HUNYUAN_VIDEO
from vidsparse.pipelines.joint import JointSparseProcessor
from vidsparse.pipelines.layout import Layout, latent_grid, valid_text, with_history
from vidsparse.pipelines.packed import Packed
from vidsparse.pipelines.parallel import Shares, gathered, split_outputs


class HunyuanVideoSparseProcessor(JointSparseProcessor):
    """Stands in for ``HunyuanVideoAttnProcessor2_0``, and 1.5's, beside video."""

    def pair_angles(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """From ``[S, D]``, every angle twice."""
        cos, sin = (x[:, None, 0::2] for x in rotary)
        return cos, sin


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    config, mask = transformer.config, arguments["encoder_attention_mask"]
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    grid = latent_grid(arguments.get("hidden_states"), patch, mask.shape[1])
    if grid is None or "latents_clean" not in arguments:
        return None if grid is None else Layout(grid, valid_text(mask))
    # FramePack: one prompt comes without its padding, an image's tokens in front of it.
    counts, image = valid_text(mask), arguments["image_embeds"].shape[1]
    grid = replace(grid, text=image + (counts[0] if len(counts) == 1 else mask.shape[1]))
    history = (arguments.get(f"latents_history_{scale}x") for scale in (2, 4))
    grid = with_history(grid, arguments["latents_clean"], history, patch)
    return Layout(grid, tuple(grid.lead + image + count for count in counts))


def _plan(transformer: Any) -> Mapping[str, Any] | Packed:
    """Split after the patches and the angles, since the forward asks the latent for its size."""
    if hasattr(transformer, "clean_x_embedder"):
        # FramePack: frames of the past at other scales, in front of the video, stay whole.
        return Packed(
            blocks=("transformer_blocks", "single_transformer_blocks"),
            carried="hidden_states",
            every={"freqs_cis": 0, "image_rotary_emb": 0},
            output=0,
            text_apart=True,
        )
    if getattr(transformer.config, "image_condition_type", None) == "token_replace":
        raise UnsupportedError(
            "HunyuanVideo's image-to-video by token replacement modulates the first frame's tokens "
            "apart, and cannot run in several processes. Hint: run it in one process."
        )
    return {
        "x_embedder": split_outputs(1, 3),
        "rope": split_outputs(0, 2, 2),
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=HUNYUAN_VIDEO,
    attention=re.compile(r"(?:single_)?transformer_blocks\.\d+\.attn"),
    stock_processors=("HunyuanVideoAttnProcessor2_0",),
    processor=HunyuanVideoSparseProcessor,
    layout=_layout,
    branches=("conditional", "unconditional"),
    shares=Shares(plan=_plan),
)
