"""Mochi: joint attention over video and each sample's valid text; angles differ between heads.

Guidance is batched. The stock processor runs one sample at a time; here those with equally much
valid text run together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import MOCHI
from vidsparse.pipelines.joint import JointSparseProcessor
from vidsparse.pipelines.layout import Layout, latent_grid, valid_text
from vidsparse.pipelines.parallel import Shares, gathered, split_input, split_outputs


class MochiSparseProcessor(JointSparseProcessor):
    """Stands in for ``MochiAttnProcessor2_0``."""

    def pair_angles(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """As they come: ``[S, H, D / 2]``."""
        return rotary


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    mask, patch = arguments["encoder_attention_mask"], transformer.config.patch_size
    grid = latent_grid(arguments.get("hidden_states"), (1, patch, patch), mask.shape[1])
    if grid is None:
        return None
    # the stock processor picks valid tokens wherever they stand; cutting needs them in front.
    first = torch.cummin(mask.bool().int(), 1).values
    if not torch.equal(first, mask.bool().int()):
        raise UnsupportedError(
            "Mochi's text must have its padding at the end. Hint: use a tokenizer that pads right."
        )
    return Layout(grid, valid_text(mask))


def _plan(transformer: Any) -> Mapping[str, Any]:
    """Split before the blocks, and the angles of all heads."""
    return {
        "rope": split_outputs(0, 3, 2),
        "transformer_blocks.0": {"hidden_states": split_input(1, 3)},
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=MOCHI,
    attention=re.compile(r"transformer_blocks\.\d+\.attn1"),
    stock_processors=("MochiAttnProcessor2_0",),
    processor=MochiSparseProcessor,
    layout=_layout,
    shares=Shares(plan=_plan),
)
