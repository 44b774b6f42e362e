"""Motif-Video: joint attention in the dual- and single-stream blocks, as HunyuanVideo's.

Text stands after the video, an image's tokens in front of the prompt. Where a model has decoder
blocks, they attend to the video twice, as it is decoded and as it was encoded: those run dense, and
the trace says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import MOTIF_VIDEO
from vidsparse.pipelines.hunyuan_video import HunyuanVideoSparseProcessor
from vidsparse.pipelines.layout import Layout, latent_grid, valid_text
from vidsparse.pipelines.parallel import Shares, gathered, split_outputs


class MotifVideoSparseProcessor(HunyuanVideoSparseProcessor):
    """Stands in for ``MotifVideoAttnProcessor2_0``; text may be padded at either end."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of video ``hidden_states`` ``[B, S, C]`` and text ``[B, T, C]``."""
        text = encoder_hidden_states
        if text is None or attention_mask is None:
            return super().__call__(attn, hidden_states, text, None, image_rotary_emb)
        # text has no angles, so that its order counts for nothing: the session cuts off its end.
        valid = attention_mask[:, 0, 0, -text.shape[1] :].int()
        front = valid.argsort(dim=1, descending=True, stable=True)[..., None]
        video, text = super().__call__(
            attn, hidden_states, text.take_along_dim(front, 1), None, image_rotary_emb
        )
        return video, text.take_along_dim(front.argsort(1), 1)


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """Tokens of the latent ``[B, C, T, H, W]``, and of image and prompt; decoding is last."""
    config, text = transformer.config, arguments["encoder_hidden_states"].shape[1]
    image, mask = (arguments.get(name) for name in ("image_embeds", "encoder_attention_mask"))
    of_image = 0 if image is None else image.shape[1]
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    grid = latent_grid(arguments.get("hidden_states"), patch, of_image + text)
    if grid is None:
        return None
    valid = () if mask is None else tuple(of_image + count for count in valid_text(mask))
    encoding = config.num_layers + config.num_single_layers - config.num_decoder_layers
    return Layout(grid, valid, layers_with_text=encoding)


def _plan(transformer: Any) -> Mapping[str, Any]:
    """Split after the patches and the angles, since the forward asks the latent for its size."""
    if transformer.config.num_decoder_layers:
        raise UnsupportedError(
            "this Motif-Video has blocks that attend to the video twice, and cannot run in several "
            "processes. Hint: run it in one process."
        )
    return {
        "x_embedder": split_outputs(1, 3),
        "rope": split_outputs(0, 2, 2),
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=MOTIF_VIDEO,
    attention=re.compile(r"(?:single_)?transformer_blocks\.\d+\.attn"),
    stock_processors=("MotifVideoAttnProcessor2_0",),
    processor=MotifVideoSparseProcessor,
    layout=_layout,
    branches=("conditional", "unconditional"),
    shares=Shares(plan=_plan),
)
