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
from vidsparse.pipelines.projection import rotate
from vidsparse.pipelines.wan import WanSparseProcessor


class AnyFlowSparseProcessor(WanSparseProcessor):
    """Stands in for ``AnyFlowAttnProcessor`` in self-attention; same call signature."""

    def rotated(self, x: Tensor, rotary: dict[str, Tensor]) -> Tensor:
        """By ``[1, 1, S, D / 2]``, the same for queries and keys."""
        angles = rotary["query"].transpose(1, 2)
        return rotate(x, angles.real, angles.imag)


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    """Tokens of the latent ``[B, T, C, H, W]``."""
    latent = arguments.get("hidden_states")
    if not isinstance(latent, Tensor) or latent.ndim != 5:
        return None
    grid = latent_grid(latent.transpose(1, 2), transformer.config.patch_size)
    return None if grid is None else Layout(grid)


ADAPTER: Final = Adapter(
    family=ANYFLOW,
    attention=re.compile(r"blocks\.\d+\.attn1"),
    stock_processors=("AnyFlowAttnProcessor",),
    processor=AnyFlowSparseProcessor,
    layout=_layout,
)
