"""CogVideoX 1.0 and 1.5, ConsisID: one stream of text and video, text first.

Padded text takes part. Guidance is batched. ``fuse_qkv_projections`` puts another stock processor
in all layers; the session stands in for that one too, here by projecting as it does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.adapter import Adapter, SparseProcessor
from vidsparse.pipelines.families import COGVIDEOX
from vidsparse.pipelines.layout import Layout, latent_grid
from vidsparse.pipelines.parallel import Shares, gathered, split_input
from vidsparse.pipelines.projection import norm_and_rotate

_FUSED: Final = "FusedCogVideoXAttnProcessor2_0"


class CogVideoXSparseProcessor(SparseProcessor):
    """Stands in for ``CogVideoXAttnProcessor2_0`` and its fused sister; same call signature."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of video ``hidden_states`` ``[B, S, C]`` and text ``[B, T, C]``."""
        if attention_mask is not None:
            raise self.unexpected("with an attention mask")
        text = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, hidden_states], 1)
        # unfusing leaves the fused weights where they are, so the processor has to say.
        if type(self.stock).__name__ == _FUSED:
            q, k, v = attn.to_qkv(x).chunk(3, -1)
        else:
            q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        q, k, v = (part.unflatten(2, (attn.heads, -1)) for part in (q, k, v))
        if image_rotary_emb is None:
            q = q if attn.norm_q is None else attn.norm_q(q)
            k = k if attn.norm_k is None else attn.norm_k(k)
        else:
            # every angle stands there twice, once for each channel of a pair.
            cos, sin = (x[:, None, 0::2] for x in image_rotary_emb)
            q = norm_and_rotate(q, attn.norm_q, cos, sin, text)
            k = norm_and_rotate(k, attn.norm_k, cos, sin, text)
        out = self.attend(q, k, v).flatten(2, 3)
        out = attn.to_out[1](attn.to_out[0](out))
        return out[:, text:], out[:, :text]


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """Tokens of the latent ``[B, T, C, H, W]``, whose last frames may make up a patch alone."""
    latent, config = arguments.get("hidden_states"), transformer.config
    if not isinstance(latent, Tensor) or latent.ndim != 5:
        return None
    # ConsisID, of CogVideoX 1.0, has no such setting.
    frames, patch = config.get("patch_size_t") or 1, config.patch_size
    text = arguments["encoder_hidden_states"].shape[1]
    grid = latent_grid(latent.transpose(1, 2), (frames, patch, patch), text, text_first=True)
    return None if grid is None else Layout(grid)


def _plan(transformer: Any) -> Mapping[str, Any]:
    """Split before the blocks, where video and text have parted again."""
    if type(transformer).__name__ != "CogVideoXTransformer3DModel":
        raise UnsupportedError(
            f"{type(transformer).__name__} looks at faces beside attention, and cannot run in "
            "several processes. Hint: run it in one process."
        )
    return {
        "": {"image_rotary_emb": [split_input(0, 2), split_input(0, 2)]},
        "transformer_blocks.0": {"hidden_states": split_input(1, 3)},
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=COGVIDEOX,
    attention=re.compile(r"transformer_blocks\.\d+\.attn1"),
    stock_processors=("CogVideoXAttnProcessor2_0", _FUSED),
    processor=CogVideoXSparseProcessor,
    layout=_layout,
    # CogVideoX says so, ConsisID does not.
    stacked=True,
    shares=Shares(plan=_plan),
)
