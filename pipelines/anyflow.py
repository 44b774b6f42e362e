"""AnyFlow: Wan's blocks with its angles as complex numbers; latents come frame by frame.

Guidance, where there is any, is batched. A step goes to any later one, so that four may be all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import ANYFLOW
from vidsparse.pipelines.layout import Layout, latent_grid
from vidsparse.pipelines.parallel import Shares, gathered, own_tokens, split_input
from vidsparse.pipelines.projection import rotate
from vidsparse.pipelines.wan import WanSparseProcessor


class AnyFlowSparseProcessor(WanSparseProcessor):
    """Stands in for ``AnyFlowAttnProcessor`` in self-attention; same call signature."""

    def rotated(self, x: Tensor, rotary: dict[str, Tensor]) -> Tensor:
        """By ``[1, 1, S, D / 2]``, the same for queries and keys."""
        angles = own_tokens(rotary["query"].transpose(1, 2), 1, x.shape[1])
        return rotate(x, angles.real, angles.imag)


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """Tokens of the latent ``[B, T, C, H, W]``."""
    latent = arguments.get("hidden_states")
    if not isinstance(latent, Tensor) or latent.ndim != 5:
        return None
    grid = latent_grid(latent.transpose(1, 2), transformer.config.patch_size)
    return None if grid is None else Layout(grid)


def _plan(transformer: Any) -> Mapping[str, Any]:
    """Split for the blocks alone; a frame's timestep is given to every token of it."""
    return {
        "blocks.0": {"hidden_states": split_input(1, 3)},
        "blocks.*": {"temb": split_input(1, 4)},
        f"blocks.{len(transformer.blocks) - 1}": gathered(),
    }


ADAPTER: Final = Adapter(
    family=ANYFLOW,
    attention=re.compile(r"blocks\.\d+\.attn1"),
    stock_processors=("AnyFlowAttnProcessor",),
    processor=AnyFlowSparseProcessor,
    layout=_layout,
    shares=Shares(plan=_plan),
)
