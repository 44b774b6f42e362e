"""Which of the drawn shapes an outline is, whatever its place, size and rotation.

The shape whose true outline, moved onto the centre, scaled to the same area and turned, covers it
best. A share of what both cover says how well, so that what is no shape at all is told as well.

Shapes: masks [H, W] and [N, H, W].
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.apps.small_model.drawing import SHAPES, distance

# outlines are compared on a grid of this many points a side, which spans this many radii of the
# disc of equal area: a star's tips reach 1.7
_POINTS: Final = 48
_REACH: Final = 2.0
_TURNS: Final = 36


def _axes() -> tuple[Tensor, Tensor]:
    axis = ((torch.arange(_POINTS) + 0.5) / _POINTS * 2 - 1) * _REACH
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return x, y


@lru_cache(maxsize=1)
def _templates() -> Tensor:
    """True outlines [shapes, turns, points], of the area of a disc of radius 1."""
    fine = (torch.arange(256) + 0.5) / 256 * 2.6 - 1.3
    fine_y, fine_x = torch.meshgrid(fine, fine, indexing="ij")
    x, y = _axes()
    templates = []
    for shape in SHAPES:
        inside = distance(shape, fine_x, fine_y) < 0
        centre_x, centre_y = fine_x[inside].mean(), fine_y[inside].mean()
        unit = math.sqrt(float(inside.sum()) * (2.6 / 256) ** 2 / math.pi)
        for turn in range(_TURNS):
            cos, sin = (f(2 * math.pi * turn / _TURNS) for f in (math.cos, math.sin))
            u, v = (cos * x + sin * y) * unit + centre_x, (cos * y - sin * x) * unit + centre_y
            templates.append((distance(shape, u, v) < 0).flatten())
    return torch.stack(templates).view(len(SHAPES), _TURNS, -1).float()


def _levelled(mask: Tensor) -> Tensor:
    """A mask [H, W] on the grid of the templates, at its centre and of their area."""
    height, width = mask.shape
    rows, columns = mask.nonzero().double().unbind(1)
    unit = math.sqrt(len(rows) / math.pi)
    x, y = _axes()
    grid = torch.stack(
        [
            (x * unit + float(columns.mean()) + 0.5) * 2 / width - 1,
            (y * unit + float(rows.mean()) + 0.5) * 2 / height - 1,
        ],
        dim=-1,
    )
    there = F.grid_sample(mask[None, None].float(), grid[None], align_corners=False)
    return (there[0, 0] > 0.5).flatten().float()


def overlaps(masks: Tensor) -> Tensor:
    """How well each shape covers each mask [N, H, W]: shared over covered area, [N, shapes].

    Every shape is turned as it fits best.
    """
    seen = torch.stack([_levelled(mask) for mask in masks])
    true = _templates().flatten(0, 1)
    both = seen @ true.T
    either = seen.sum(1, keepdim=True) + true.sum(1) - both
    return (both / either).view(len(seen), len(SHAPES), _TURNS).amax(-1)
