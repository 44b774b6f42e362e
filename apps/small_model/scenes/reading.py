"""What a clip of ``scenes`` shows: its bodies by colour and shape, and how the camera moves.

Read from the frames alone, without a learnt part. Bodies are what is saturated, because no ground
is; their hue is their colour whatever the light does, and their outline their shape. The camera is
the shift and zoom that carry one frame's ground into the next, least squares with outliers weighed
down, so that bodies and shadows, which move on their own, do not count.

Shapes: clips [T, H, W, 3] as RGB bytes; masks [T, H, W].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.apps.small_model.drawing import SHAPES
from vidsparse.apps.small_model.verdicts import Verdict

from .captions import caption
from .outlines import overlaps
from .world import COLOURS, PAN, SHAKE, SIZES, ZOOM, Scene, held_out_scenes

# frames are read at this many pixels of their short side
_SIDE: Final = 128
# grounds stay below this saturation, bodies above
_SATURATED: Final = 0.56
# a body fills at least this share of what the smallest one does
_LEAST_AREA: Final = 0.25 * math.pi * min(SIZES.values()) ** 2 / 4 * 0.45
_LEAST_PRESENCE: Final = 0.3
# true bodies overlap by 0.76 at the least with the shape that they are
_LEAST_OVERLAP: Final = 0.55
# of a body that stands twice, the smaller piece has at least this share of the larger one's area
_LEAST_TWIN: Final = 0.25
# a twin is there for long or not at all: so many frames apart it is looked for
_TWIN_EVERY: Final = 10


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a clip shows; bodies as (colour, shape) in alphabetical order.

    ``twice`` are the colours of bodies that stand in two places for half of the clip, which no
    caption asks for. What a body looks like is read from the larger piece.
    """

    bodies: tuple[tuple[str, str], ...]
    camera: str
    twice: tuple[str, ...] = field(default=(), compare=False)


def asked_of(scene: Scene) -> Reading:
    """What a scene's caption asks for."""
    asked = sorted((body.colour, body.shape) for body in scene.bodies)
    return Reading(bodies=tuple(asked), camera=scene.camera)


def read_clip(frames: np.ndarray) -> Reading:
    """Read bodies and camera from RGB bytes [T, H, W, 3]."""
    video = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 255
    scale = _SIDE / min(video.shape[2:])
    size = [round(side * scale) for side in video.shape[2:]]
    video = F.interpolate(video, size=size, mode="bilinear", antialias=True)
    colours = _colours(video)
    shown, twice = [], []
    for i, colour in enumerate(COLOURS):
        shape = _shape(colours == i)
        if shape is not None:
            shown.append((colour, shape))
            if _is_double(colours[::_TWIN_EVERY] == i):
                twice.append(colour)
    camera = _camera(video, colours >= 0)
    return Reading(bodies=tuple(sorted(shown)), camera=camera, twice=tuple(sorted(twice)))


def judge(clips: Sequence[np.ndarray]) -> list[Verdict]:
    """Read one clip for each held-out scene, in their order."""
    return [
        Verdict(prompt=caption(scene), asked=asked_of(scene), shown=read_clip(clip))
        for scene, clip in zip(held_out_scenes(), clips, strict=True)
    ]


# --- bodies ---


def _hue(picture: Tensor) -> tuple[Tensor, Tensor]:
    """Hue in [0, 6) and saturation of [N, 3, ...]."""
    high, low = picture.amax(1), picture.amin(1)
    spread = (high - low).clamp_min(1e-6)
    red, green, blue = picture.unbind(1)
    hue = torch.where(
        high == red,
        (green - blue) / spread,
        torch.where(high == green, 2 + (blue - red) / spread, 4 + (red - green) / spread),
    )
    return hue.remainder(6), (high - low) / high.clamp_min(1e-6)


def _is_body(picture: Tensor, saturation: Tensor) -> Tensor:
    # what is nearly black has no hue to speak of
    return (saturation > _SATURATED) & (picture.amax(1) > 0.12)


KINDS: Final = 1 + len(COLOURS) * len(SHAPES)
"""Kinds of bodies by colour and shape, and none."""


def bodies(scenes: Sequence[Scene], clips: Tensor) -> Tensor:
    """The kind of body seen at each pixel of clips [B, 3, T, H, W] in [-1, 1], 0 for none.

    By colour, which no two bodies of a scene share: uint8 [B, T, H, W].
    """
    kinds = torch.zeros(len(scenes), 1 + len(COLOURS), dtype=torch.uint8)
    colours = list(COLOURS)
    for row, scene in zip(kinds, scenes, strict=True):
        for body in scene.bodies:
            colour = colours.index(body.colour)
            row[1 + colour] = 1 + colour * len(SHAPES) + SHAPES.index(body.shape)
    seen = 1 + _colours((clips + 1) / 2)
    return kinds.to(clips.device).gather(1, seen.flatten(1)).view(seen.shape)


def _colours(video: Tensor) -> Tensor:
    """Number of the nearest colour of every pixel of [N, 3, ...], -1 where it is ground."""
    hue, saturation = _hue(video)
    palette, _ = _hue(torch.tensor(list(COLOURS.values()), device=video.device).view(-1, 3, 1))
    gap = (hue.unsqueeze(-1) - palette.view(-1) + 3).remainder(6) - 3
    return torch.where(_is_body(video, saturation), gap.abs().argmin(-1), -1)


def _largest_piece(mask: Tensor) -> Tensor:
    """The connected piece of a mask [H, W] that holds its densest place."""
    whole = torch.zeros_like(mask)
    if not mask.any():
        return whole
    # a body is a small part of a frame: all else is looked at no more
    rows, columns = (mask.any(across).nonzero() for across in (1, 0))
    box = tuple(slice(int(places[0]), int(places[-1]) + 1) for places in (rows, columns))
    mask = mask[box]
    dense = F.avg_pool2d(mask[None, None].float(), 7, 1, 3)[0, 0] * mask
    piece = torch.zeros_like(mask)
    piece.view(-1)[int(dense.argmax())] = True
    while True:
        wide = F.max_pool2d(piece[None, None].float(), (5, 1), 1, (2, 0))
        grown = (F.max_pool2d(wide, (1, 5), 1, (0, 2))[0, 0] > 0) & mask
        if torch.equal(grown, piece):
            whole[box] = piece
            return whole
        piece = grown


def _closed(mask: Tensor) -> Tensor:
    """A mask [H, W] without the cracks and specks that gloss and patterns leave in it."""
    wide = F.max_pool2d(F.pad(mask[None, None].float(), [2] * 4), 3, 1, 1)
    return -F.max_pool2d(-wide, 3, 1, 1)[0, 0, 2:-2, 2:-2] > 0


def _shape(masks: Tensor) -> str | None:
    """The shape of the body that masks [T, H, W] show: "unclear" where it is like none of them.

    None where there is no body.
    """
    least = _LEAST_AREA * _SIDE**2
    pieces = [_closed(_largest_piece(mask)) for mask in masks if mask.sum() >= least]
    pieces = [piece for piece in pieces if piece.sum() >= least]
    if len(pieces) < _LEAST_PRESENCE * len(masks):
        return None
    # where it is largest it is least covered by others, or nearest
    pieces.sort(key=lambda piece: -int(piece.sum()))
    clear = pieces[: max(1, len(pieces) // 2)]
    # three quarters of the frames may cover a part of it, or blur it
    covered = overlaps(torch.stack(clear)).quantile(0.75, dim=0)
    best = int(covered.argmax())
    return SHAPES[best] if covered[best] >= _LEAST_OVERLAP else "unclear"


def _is_double(masks: Tensor) -> bool:
    """Whether the body that masks [T, H, W] show stands in two places in half of them."""
    double = 0
    for mask in masks:
        piece = _largest_piece(mask)
        rest = mask & ~piece
        least = max(_LEAST_AREA * _SIDE**2, _LEAST_TWIN * int(piece.sum()))
        # the largest piece cannot be smaller than all of them together
        if int(rest.sum()) >= least:
            double += int(_closed(_largest_piece(rest)).sum()) >= least
    return 2 * double >= len(masks)


# --- camera ---


def _ground_detail(video: Tensor) -> Tensor:
    """Relative brightness [T, 1, H, W] less its broad course, so that light does not count."""
    grey = (video.mean(1, keepdim=True) + 0.03).log()
    return _mean_around(grey, 3) - _mean_around(grey, 25)


def _mean_around(pictures: Tensor, side: int) -> Tensor:
    """Each pixel's mean of a square of ``side`` around it: down first, then across."""
    down = F.avg_pool2d(pictures, (side, 1), 1, (side // 2, 0), count_include_pad=False)
    return F.avg_pool2d(down, (1, side), 1, (0, side // 2), count_include_pad=False)


def _fit(
    first: Tensor,
    second: Tensor,
    keep: Tensor,
    places: tuple[Tensor, Tensor],
    moved: np.ndarray,
) -> np.ndarray:
    """Shift along x and y and log zoom that carry ``first`` [1, 1, H, W] into ``second``.

    Shifts are of the picture, in half short sides, and sought from ``moved``. ``keep`` [H, W]
    weighs the pixels.
    """
    x, y = places
    height, width = x.shape
    unit = 2 / min(height, width)
    for _ in range(6):
        zoom = math.exp(-moved[2])
        grid = torch.stack(
            [
                (x - moved[0]) * zoom / (width * unit / 2),
                (y - moved[1]) * zoom / (height * unit / 2),
            ],
            dim=-1,
        ).float()
        there = F.grid_sample(first, grid[None], align_corners=False)[0, 0]
        inside = (grid.abs() < 0.97).all(-1)
        slope_y, slope_x = torch.gradient(there, spacing=unit)
        error = (second[0, 0] - there).double()
        design = torch.stack([-slope_x, -slope_y, -(slope_x * x + slope_y * y)], dim=-1).double()
        valid = keep * inside
        noise = 1.5 * error.abs()[valid > 0].median().clamp_min(1e-4)
        weight = valid / (1 + (error / noise) ** 2) ** 2
        design, weighted = design.flatten(0, 1), (design * weight.unsqueeze(-1)).flatten(0, 1)
        normal, right = weighted.T @ design, weighted.T @ error.flatten()
        # ground without any detail, plain grey, tells of no step
        least = 1e-9 * normal.trace().clamp_min(1e-9) * torch.eye(3)
        step = torch.linalg.solve(normal + least, right).numpy()
        moved = moved + step
        if np.abs(step).max() < 1e-4:
            break
    return moved


def _camera(video: Tensor, covered: Tensor) -> str:
    """How the camera moves over ``video`` [T, 3, H, W], where no body has ``covered`` [T, H, W]."""
    detail = _ground_detail(video)
    height, width = video.shape[2:]
    unit = 2 / min(height, width)
    axis_x = (torch.arange(width) + 0.5) * unit - width * unit / 2
    axis_y = (torch.arange(height) + 0.5) * unit - height * unit / 2
    places = (axis_x.expand(height, -1).double(), axis_y.view(-1, 1).expand(-1, width).double())
    # a body's rim and shadow go with it
    near = F.max_pool2d(covered[:, None].float(), 9, 1, 4)[:, 0]
    broad = _mean_around(detail, 9)
    steps = []
    for i in range(len(video) - 1):
        keep = (1 - near[i + 1]).double()
        # broad detail finds a step of several pixels, fine detail places it
        moved = np.zeros(3)
        for level in (broad, detail):
            moved = _fit(level[i : i + 1], level[i + 1 : i + 2], keep, places, moved)
        steps.append(moved)
    path = np.cumsum(np.stack(steps), axis=0)
    x, y, zoom = path[-1]
    if abs(zoom) > math.log(ZOOM) / 2:
        return "zoom in" if zoom > 0 else "zoom out"
    if max(abs(x), abs(y)) > PAN / 2:
        # the ground goes the other way
        if abs(x) > abs(y):
            return "pan left" if x > 0 else "pan right"
        return "pan up" if y > 0 else "pan down"
    course = np.linspace(0, 1, len(path))
    sway = [part - np.polyval(np.polyfit(course, part, 1), course) for part in path.T[:2]]
    return "shake" if np.sqrt(np.mean(np.square(sway))) > SHAKE / 3 else "still"
