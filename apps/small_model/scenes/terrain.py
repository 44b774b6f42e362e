"""The ground of ``scenes``: six kinds of land seen from above, with detail at many scales.

A ground is a function of places: octaves of smooth noise, each a piece of one fixed table of random
numbers that the scene's seed chooses. What is finer than a few pixels fades out, so that the same
ground is the same picture at any size. A ground is painted once a clip, on a canvas that the camera
then looks at: its own colour, and the slope of its relief, which the light of a moment shades.

Shapes: planes [h, w]; places x [1, w] and y [h, 1]; a canvas [5, h, w] of red, green, blue and the
relief's slopes along x and y.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_TABLE = 512
# fades begin at this many pixels a wave and end at twice as many
_FINEST = 3.0
Colour = tuple[float, float, float]


@lru_cache(maxsize=4)
def _table(device: torch.device) -> Tensor:
    """Numbers in [-1, 1], [1, 1, 512, 512], the same on every device and in every process."""
    generator = torch.Generator("cpu").manual_seed(0)
    return (torch.rand(1, 1, _TABLE, _TABLE, generator=generator) * 2 - 1).to(device)


class Land:
    """Places of a canvas, and the random fields of one seed over them."""

    def __init__(self, x: Tensor, y: Tensor, pixel: float, seed: int):
        self.x, self.y, self._pixel = x, y, pixel
        self._rng = random.Random(seed)

    def fade(self, wave: float) -> float:
        """How much of a wave of that length is shown, from 0 to 1."""
        return min(max(wave / (_FINEST * self._pixel) - 1, 0.0), 1.0)

    def places(self, size: float) -> tuple[Tensor, Tensor]:
        """Places in units of ``size``, from a random origin in the table; see ``look``."""
        room = _TABLE - 8.0 / size
        first, second = (4.0 / size + self._rng.random() * room for _ in range(2))
        return self.x / size + first, self.y / size + second

    def look(self, u: Tensor, v: Tensor, mode: str) -> Tensor:
        """The table at places of broadcast shape, in its own units, within [0, 512)."""
        none = torch.zeros_like(u + v)
        grid = (torch.stack([u + none, v + none], dim=-1) + 0.5) / (_TABLE / 2) - 1
        plane = F.grid_sample(
            _table(u.device), grid[None], mode=mode, padding_mode="border", align_corners=False
        )
        return plane[0, 0]

    def noise(self, wave: float, octaves: int, gain: float = 0.5) -> Tensor:
        """Octaves of noise from ``wave`` downwards, each ``gain`` times the one before it."""
        total = torch.zeros_like(self.x + self.y)
        for octave in range(octaves):
            size = wave / 2**octave
            # a draw for each octave, shown or not, so that resolutions agree on the rest
            u, v = self.places(size / 2)
            shown = self.fade(size)
            if shown > 0:
                total = total + shown * gain**octave * self.look(u, v, "bicubic")
        return total

    def cells(self, size: float) -> tuple[Tensor, Tensor]:
        """Distance to the nearest of points strewn one a cell of ``size``, and that point's number.

        The distance is in cells, the number in [-1, 1].
        """
        u, v = self.places(size)
        column, row = u.floor(), v.floor()
        nearest = torch.full_like(u + v, 9.0)
        number = torch.zeros_like(nearest)
        for step_y in (-1, 0, 1):
            for step_x in (-1, 0, 1):
                near_u, near_v = column + step_x, row + step_y
                jitter_u = 0.5 + 0.4 * self.look(near_u, near_v, "nearest")
                jitter_v = 0.5 + 0.4 * self.look(near_v, near_u, "nearest")
                gap = torch.hypot(near_u + jitter_u - u, near_v + jitter_v - v)
                closer = gap < nearest
                nearest = torch.where(closer, gap, nearest)
                number = torch.where(closer, self.look(near_u + 1, near_v, "nearest"), number)
        return nearest, number

    def step(self, value: Tensor, width: float) -> Tensor:
        """0 where ``value`` is well below zero, 1 well above, a ramp of ``width`` or of a pixel."""
        return torch.sigmoid(4 * value / max(width, 1.5 * self._pixel))

    def slopes(self, height: Tensor) -> Tensor:
        """Slopes [2, h, w] of a height along x and y."""
        padded = F.pad(height[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
        along_x = (padded[1:-1, 2:] - padded[1:-1, :-2]) / (2 * self._pixel)
        along_y = (padded[2:, 1:-1] - padded[:-2, 1:-1]) / (2 * self._pixel)
        return torch.stack([along_x, along_y])


def _mix(first: Tensor | Colour, second: Tensor | Colour, share: Tensor) -> Tensor:
    """Colours or pictures [3, h, w], mixed by a plane of shares."""
    ends = [
        end if isinstance(end, Tensor) else share.new_tensor(end).view(3, 1, 1)
        for end in (first, second)
    ]
    return ends[0] + (ends[1] - ends[0]) * share.clamp(0, 1)


def _meadow(land: Land) -> tuple[Tensor, Tensor]:
    """Grass in patches, a path, flowers."""
    patches = land.noise(1.1, 6)
    blades = land.noise(0.09, 3, 0.7)
    picture = _mix((0.31, 0.37, 0.21), (0.53, 0.59, 0.37), 0.5 + 0.5 * patches + 0.20 * blades)
    bend = land.noise(1.6, 2)
    path = 0.07 - (land.y - 0.25 * land.x - 0.45 * bend).abs()
    picture = _mix(picture, (0.62, 0.56, 0.45), land.step(path + 0.03 * blades, 0.03))
    gap, number = land.cells(0.15)
    flower = land.step((0.16 - gap) * 0.15, 0.012) * (number > 0.1) * land.fade(0.1)
    picture = _mix(picture, (0.93, 0.91, 0.88), flower)
    return picture, 0.05 * patches + 0.008 * blades


def _city(land: Land) -> tuple[Tensor, Tensor]:
    """Blocks of roofs between streets."""
    u, v = land.places(0.42)
    column, row = u.floor(), v.floor()
    near_u, near_v = (u - column - 0.5).abs(), (v - row - 0.5).abs()
    # signed distance to the rim of the block, in the world's lengths
    block = 0.42 * (0.36 - torch.maximum(near_u, near_v))
    # every block holds two by two roofs
    half_u, half_v = ((2 * place).floor().remainder(_TABLE) for place in (u, v))
    tone = land.look(half_u, half_v, "nearest")
    tint = land.look((half_u + 7).remainder(_TABLE), half_v, "nearest")
    roof = _mix((0.34, 0.34, 0.37), (0.74, 0.72, 0.68), 0.5 + 0.5 * tone)
    roof = _mix(roof, (0.56, 0.42, 0.37), (tint > 0.55).float())
    inner = torch.minimum((near_u - 0.02).abs(), (near_v - 0.02).abs())
    roof = roof * (1 - 0.35 * land.step(0.006 - 0.42 * inner, 0.004) * land.fade(0.02))
    grain = land.noise(0.3, 5, 0.6)
    box, number = land.cells(0.1)
    roof = roof * (1 + 0.16 * land.step((0.22 - box) * 0.1, 0.01) * number.sign() + 0.05 * grain)
    line = torch.maximum(
        land.step(0.005 - 0.42 * (0.5 - near_u).abs(), 0.004),
        land.step(0.005 - 0.42 * (0.5 - near_v).abs(), 0.004),
    )
    street = _mix((0.25, 0.25, 0.27), (0.66, 0.65, 0.60), 0.75 * line * land.fade(0.02))
    street = street * (1 + 0.06 * grain)
    built = land.step(block, 0.012)
    return _mix(street, roof, built), 0.02 * built * (1 + 0.6 * tone)


def _sea(land: Land) -> tuple[Tensor, Tensor]:
    """Swell, waves across it, foam on the highest."""
    swell = land.noise(1.3, 4)
    bend = land.noise(0.7, 3)
    waves = torch.sin((land.y + 0.25 * land.x + 0.16 * bend) * 2 * math.pi / 0.22)
    chop = land.noise(0.13, 3, 0.7)
    height = 0.5 * swell + 0.35 * waves + 0.35 * chop
    picture = _mix((0.16, 0.22, 0.27), (0.36, 0.46, 0.52), 0.5 + 0.55 * height)
    foam = land.step(height + 0.25 * chop - 0.80, 0.4)
    return _mix(picture, (0.78, 0.84, 0.87), foam), 0.013 * height


def _desert(land: Land) -> tuple[Tensor, Tensor]:
    """Dunes with sharp crests, ripples on them."""
    bend = land.noise(1.5, 3)
    along = (0.5 * land.x + land.y + 0.35 * bend) / 0.62
    saw = along - along.floor()
    dune = torch.where(saw < 0.72, saw / 0.72, (1 - saw) / 0.28)
    fine = land.noise(0.5, 5)
    ripples = torch.sin((land.x - 0.4 * land.y + 0.12 * fine) * 2 * math.pi / 0.09)
    ripples = ripples * land.fade(0.09)
    share = 0.62 * dune + 0.22 * fine + 0.07 * ripples + 0.2
    picture = _mix((0.53, 0.44, 0.33), (0.88, 0.78, 0.60), share)
    gap, number = land.cells(0.5)
    rock = land.step((0.07 - gap + 0.03 * fine) * 0.5, 0.012) * (number > 0)
    return _mix(picture, (0.36, 0.31, 0.27), rock), 0.05 * dune + 0.012 * fine + 0.0016 * ripples


def _forest(land: Land) -> tuple[Tensor, Tensor]:
    """Crowns of two sizes, a clearing here and there."""
    clear = land.noise(1.4, 4)
    leaves = land.noise(0.11, 3, 0.75)
    gap, number = land.cells(0.19)
    low, low_number = land.cells(0.1)
    under = _mix((0.10, 0.14, 0.10), (0.25, 0.31, 0.20), 1.1 - low + 0.2 * low_number)
    crown = (0.66 - gap).clamp_min(0)
    tree = _mix((0.15, 0.22, 0.14), (0.38, 0.45, 0.28), 1.5 * crown + 0.22 * number + 0.2 * leaves)
    picture = _mix(under, tree, land.step(crown - 0.06, 0.12))
    open_ground = land.step(clear - 0.52, 0.12)
    picture = _mix(picture, (0.47, 0.46, 0.33), open_ground)
    return picture * (1 + 0.08 * leaves), (0.05 * crown + 0.012 * leaves) * (1 - open_ground)


def _snow(land: Land) -> tuple[Tensor, Tensor]:
    """Drifts, rocks that look out of them, a trail."""
    drifts = land.noise(1.2, 6, 0.45)
    grain = land.noise(0.16, 4, 0.6)
    picture = _mix((0.70, 0.75, 0.82), (0.94, 0.95, 0.96), 0.62 + 0.5 * drifts + 0.12 * grain)
    rock = land.step(land.noise(0.9, 5, 0.6) + 0.1 * grain - 0.72, 0.06)
    picture = _mix(picture, (0.33, 0.32, 0.33), rock)
    bend = land.noise(1.7, 2)
    trail = 0.022 - (land.x + 0.3 * land.y - 0.5 * bend).abs()
    picture = _mix(picture, (0.60, 0.65, 0.73), 0.7 * land.step(trail, 0.02))
    return picture, 0.07 * drifts + 0.008 * grain + 0.02 * rock


_GROUNDS: Final[Mapping[str, Callable[[Land], tuple[Tensor, Tensor]]]] = MappingProxyType(
    {
        "meadow": _meadow,
        "city": _city,
        "sea": _sea,
        "desert": _desert,
        "forest": _forest,
        "snow": _snow,
    }
)


def paint(ground: str, seed: int, x: Tensor, y: Tensor, pixel: float) -> Tensor:
    """Canvas [5, h, w] of a ground at places ``x`` [1, w] and ``y`` [h, 1], ``pixel`` apart.

    Places must lie within 4 half short sides of (0, 0).
    """
    land = Land(x, y, pixel, seed)
    picture, height = _GROUNDS[ground](land)
    return torch.cat([picture.clamp(0, 1), land.slopes(height).clamp(-1, 1)])
