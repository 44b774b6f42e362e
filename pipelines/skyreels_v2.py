"""SkyReels-V2: Wan's blocks and names under other classes, so that Wan's processor serves it.

Diffusion forcing tells every frame its timestep. It is sparse where the frames that are denoised
are all at one step; in blocks of several frames they attend causally by a mask, which is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.adapter import Adapter
from vidsparse.pipelines.families import SKYREELS_V2
from vidsparse.pipelines.layout import Layout, latent_grid
from vidsparse.pipelines.parallel import Shares, gathered, split_input, split_outputs
from vidsparse.pipelines.wan import WanSparseProcessor


def _layout(transformer: Any, arguments: Mapping[str, Any]) -> Layout | None:
    config = transformer.config
    if config.num_frame_per_block > 1:
        raise UnsupportedError(
            "SkyReels-V2 is sparse only where all frames attend to each other, not in causal "
            "blocks. Hint: leave causal_block_size at 1, or remove() the handle to run it densely."
        )
    forcing = arguments.get("enable_diffusion_forcing")
    if forcing and getattr(transformer, "_parallel_config", None) is not None:
        raise UnsupportedError(
            "diffusion forcing tells every token its timestep, which is not dealt to several "
            "processes here. Hint: run it in one process."
        )
    grid = latent_grid(arguments.get("hidden_states"), config.patch_size)
    return None if grid is None else Layout(grid)


def _plan(transformer: Any) -> Mapping[str, Any]:
    """Split before the blocks; diffusers has such a plan for Wan alone."""
    return {
        "rope": split_outputs(1, 4, 2),
        "blocks.0": {"hidden_states": split_input(1, 3)},
        "proj_out": gathered(),
    }


ADAPTER: Final = Adapter(
    family=SKYREELS_V2,
    attention=re.compile(r"blocks\.\d+\.attn1"),
    stock_processors=("SkyReelsV2AttnProcessor",),
    processor=WanSparseProcessor,
    layout=_layout,
    branches=("conditional", "unconditional"),
    shares=Shares(plan=_plan),
)
