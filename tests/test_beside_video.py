"""Tokens before and behind the video: where they are taken to stand, and that they are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_families import TINY, latents
from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.pipelines import sparsify

pytestmark = pytest.mark.usefixtures("one_thread")

GRIDS = {
    # past frames in larger patches; two past frames and a section of three; image and prompt.
    "framepack": {TokenGrid(2 + 3, 4, 4, text=4 + 4 + 9 + 12, lead=4 + 4)},
    "helios": {TokenGrid(2 + 3, 4, 4, text=4 + 4, text_first=True)},
    # its first stages are smaller than the past.
    "helios-pyramid": {
        TokenGrid(3, 1, 1, text=4 + 4 + 2 * 16, text_first=True),
        TokenGrid(3, 2, 2, text=4 + 4 + 2 * 16, text_first=True),
        TokenGrid(2 + 3, 4, 4, text=4 + 4, text_first=True),
    },
    # prompts of two lengths, and sound.
    "cosmos3": {TokenGrid(3, 8, 8, text=text + 8, lead=text) for text in (26, 27)},
}


@pytest.mark.parametrize("name", GRIDS)
def test_what_stands_beside_the_video_is_exact_at_a_low_density(name: str) -> None:
    pipe = TINY[name].build()
    seen: set[TokenGrid] = set()
    moved: list[float] = []
    with sparsify(pipe, top_p=0.1, dense_steps=0) as handle:
        attend_as_ever = handle.engine.attend

        def watch(q: Tensor, k: Tensor, v: Tensor, site: Any, *rest: Any, **more: Any) -> Tensor:
            out = attend_as_ever(q, k, v, site, *rest, **more)
            true = F.scaled_dot_product_attention(q, k, v)
            beside = torch.ones(q.shape[2], dtype=torch.bool)
            beside[site.grid.before : site.grid.before + site.grid.video] = False
            torch.testing.assert_close(out[:, :, beside], true[:, :, beside])
            moved.append((out - true)[:, :, ~beside].abs().max().item())
            seen.add(site.grid)
            return out

        handle.engine.attend = watch  # type: ignore[method-assign]
        latents(name, pipe)
        assert handle.summary().notes == ()
    assert seen == GRIDS[name]
    assert max(moved) > 1e-2


def test_cosmos_3_has_its_video_where_the_grid_says() -> None:
    name = "cosmos3"
    pipe = TINY[name].build()
    places: list[tuple[list[int], int]] = []
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: places.append(
            (kwargs["vision_sequence_indexes"].tolist(), kwargs["und_len"])
        ),
        with_kwargs=True,
    )
    with sparsify(pipe, "dense"):
        latents(name, pipe)
    for video, text in places:
        assert video == list(range(text, text + 3 * 8 * 8))
