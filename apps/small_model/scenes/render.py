"""Filming a scene: the ground under a camera, bodies that cover each other, shadows, light.

The ground is painted once a clip and looked at by every frame; a body is drawn in a window around
it. A clip of 81 frames of 640x640 is a few hundred launches, and none of them depends on the host.

Shapes: clips [B, 3, T, H, W] in [-1, 1]; per-frame tables [T].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.apps.small_model.drawing import (
    BEVELS,
    coverage,
    pattern,
    placed,
    shaded,
    slope_towards,
)

from .terrain import paint
from .world import COLOURS, SIZES, Body, Scene, camera_path, track

# canvas points a pixel at a zoom of one, so that a zoom of 1.5 does not blur it much
_FINER = 1.25
_SHADOW_SHIFT = 0.10
_SHADOW_SOFTNESS = 0.045
_SHADOW_DEPTH = 0.55
# how far from a body its shadow ends
_MARGIN = _SHADOW_SHIFT + 3 * _SHADOW_SOFTNESS
_RELIEF = 0.8
_DUSK = 0.38
# what a pattern leaves of a body's brightness where it is darkest
_PATTERN_DEPTH = 0.42
# patterns repeat in this share of a body
_PATTERN_SIZE = 1.15


def light_course(light: str, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Brightness [T] and the angle [T] that light comes from, in radians; straight up is zero."""
    bright, angle = np.ones_like(time), np.full_like(time, -math.atan2(0.6, 0.8))
    match light:
        case "brightens":
            bright = _DUSK + (1 - _DUSK) * time
        case "darkens":
            bright = 1 - (1 - _DUSK) * time
        case "sun moves":
            angle = 1.25 * (2 * time - 1)
    return bright, angle


def _canvas(
    scene: Scene,
    aspect: tuple[float, float],
    pixel: float,
    camera: tuple[np.ndarray, np.ndarray, np.ndarray],
    device: torch.device,
) -> tuple[Tensor, tuple[float, float], tuple[float, float]]:
    """The ground that the camera sees in the clip, its middle, and its half width and height."""
    half, middle, axes = [], [], []
    for at, reach in zip(camera[:2], aspect, strict=True):
        low, high = float(np.min(at - reach / camera[2])), float(np.max(at + reach / camera[2]))
        count = math.ceil((high - low) / pixel * _FINER) + 4
        middle.append((low + high) / 2)
        half.append(count * pixel / _FINER / 2)
        axes.append((torch.arange(count, device=device) + 0.5) * (pixel / _FINER) - half[-1])
    x, y = (axis + place for axis, place in zip(axes, middle, strict=True))
    canvas = paint(scene.ground, scene.seed, x.view(1, -1), y.view(-1, 1), pixel / _FINER)
    return canvas, (middle[0], middle[1]), (half[0], half[1])


def _ground(
    scene: Scene,
    frames: tuple[int, int, int],
    aspect: tuple[float, float],
    pixel: float,
    camera: tuple[np.ndarray, np.ndarray, np.ndarray],
    towards: tuple[Tensor, Tensor],
) -> Tensor:
    """The ground [3, T, H, W] in [0, 1], lit by the light's direction but not by its brightness."""
    device = towards[0].device
    canvas, middle, half = _canvas(scene, aspect, pixel, camera, device)
    at_x, at_y, zoom = camera
    scale = np.stack([aspect[0] / zoom / half[0], aspect[1] / zoom / half[1]])
    shift = np.stack([(at_x - middle[0]) / half[0], (at_y - middle[1]) / half[1]])
    theta = np.zeros((len(zoom), 2, 3), dtype=np.float32)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = scale[0], scale[1], shift.T
    count, height, width = frames
    # a camera that stands still sees one picture
    seen = 1 if np.ptp(theta, axis=0).max() == 0 else count
    where = F.affine_grid(
        torch.from_numpy(theta[:seen]).to(device), [seen, 5, height, width], align_corners=False
    )
    # every frame looks at the same canvas
    looked = F.grid_sample(
        canvas.expand(seen, -1, -1, -1), where, padding_mode="border", align_corners=False
    )
    # the relief's slope towards the light
    facing = -(looked[:, 3] * towards[0].view(-1, 1, 1) + looked[:, 4] * towards[1].view(-1, 1, 1))
    lit = looked[:, :3] * (1 + _RELIEF * facing.clamp(-0.5, 0.5)).unsqueeze(1)
    return lit.transpose(0, 1).contiguous()


def _draw(
    picture: Tensor,
    scene: Scene,
    body: Body,
    aspect: tuple[float, float],
    pixel: float,
    camera: tuple[np.ndarray, np.ndarray, np.ndarray],
    towards: tuple[Tensor, Tensor],
    time: np.ndarray,
) -> None:
    """Draw a body and its shadow over ``picture`` [3, T, H, W] at ``time`` [T], in place."""
    device = picture.device
    frames, height, width = picture.shape[1:]
    place_x, place_y, angle = track(scene, body, time, aspect)
    at_x, at_y, zoom = camera
    # where the body is in the frame, in pixels, and the window of whole pixels around it
    centre_x = ((place_x - at_x) * zoom + aspect[0]) / pixel - 0.5
    centre_y = ((place_y - at_y) * zoom + aspect[1]) / pixel - 0.5
    reach = math.ceil((1.1 * SIZES[body.size] + _MARGIN) * float(zoom.max()) / pixel) + 1
    offsets = np.arange(-reach, reach + 1)
    columns, rows = (np.rint(c).astype(np.int64)[:, None] + offsets for c in (centre_x, centre_y))
    # pixels beyond the frame are drawn on its rim by nobody: their coverage is cut off below
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
        :, None, :
    ]

    def table(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.float32)).to(device)

    per_frame = (pixel / zoom)[:, None]
    dx = table((columns - centre_x[:, None]) * per_frame)[:, None, :]
    dy = table((rows - centre_y[:, None]) * per_frame)[:, :, None]
    cos, sin = table(np.cos(angle)).view(-1, 1, 1), table(np.sin(angle)).view(-1, 1, 1)
    extent = torch.full_like(cos, SIZES[body.size])
    toward_x, toward_y = towards
    here = placed(body.shape, dx, dy, cos, sin, extent)
    slope = slope_towards(body.shape, dx, dy, cos, sin, extent, here, towards)
    shadow = placed(
        body.shape, dx + _SHADOW_SHIFT * toward_x, dy + _SHADOW_SHIFT * toward_y, cos, sin, extent
    )
    colour = torch.tensor(COLOURS[body.colour], device=device).view(1, 3, 1, 1, 1)
    unit = SIZES[body.size] * _PATTERN_SIZE
    print_ = pattern(body.pattern, (cos * dx + sin * dy) / unit, (cos * dy - sin * dx) / unit)
    dye = 1 - _PATTERN_DEPTH * (0.5 - 0.5 * print_) if body.pattern != "plain" else print_ + 1
    painted = colour * dye.expand(here.shape)[None, None]
    looks = shaded(painted, here[None], slope[None], BEVELS[body.shape] * extent)[0].clamp(0, 1)
    # distances are over the ground, pixels over the frame
    covered = coverage(here * table(zoom).view(-1, 1, 1), pixel)
    shade = 1 - _SHADOW_DEPTH * torch.sigmoid(-shadow / _SHADOW_SOFTNESS)
    visible = torch.from_numpy(inside).to(device)
    frame = torch.arange(frames, device=device).view(-1, 1, 1)
    row = torch.from_numpy(rows.clip(0, height - 1)).to(device)[:, :, None]
    column = torch.from_numpy(columns.clip(0, width - 1)).to(device)[:, None, :]
    index = ((frame * height + row) * width + column).expand(visible.shape)
    flat = picture.view(3, -1)
    below = flat[:, index]
    drawn = torch.lerp(below * shade, looks, covered)
    # several places of a window may stand for one pixel of the rim: only the true one may write
    spare = flat.shape[1]
    padded = torch.where(visible, index, spare)
    target = F.pad(flat, (0, 1))
    target[:, padded.flatten()] = drawn.flatten(1)
    flat.copy_(target[:, :spare])


@torch.no_grad()
def render(
    scenes: Sequence[Scene],
    frames: int,
    height: int,
    width: int,
    device: torch.device | str = "cpu",
    course: int | None = None,
) -> Tensor:
    """Render scenes as clips [B, 3, T, H, W] in [-1, 1], fp32, antialiased.

    With a ``course`` of more frames they are the beginning of clips of so many.
    """
    device = torch.device(device)
    short = min(height, width)
    aspect, pixel = (width / short, height / short), 2.0 / short
    time = np.arange(frames) / max((course or frames) - 1, 1)
    clip = torch.empty(len(scenes), 3, frames, height, width, device=device)
    for scene, film in zip(scenes, clip, strict=True):
        camera = camera_path(scene.camera, time)
        bright, angle = light_course(scene.light, time)
        towards = (
            torch.tensor(np.sin(angle), dtype=torch.float32, device=device).view(-1, 1, 1),
            torch.tensor(-np.cos(angle), dtype=torch.float32, device=device).view(-1, 1, 1),
        )
        film.copy_(_ground(scene, (frames, height, width), aspect, pixel, camera, towards))
        for body in scene.bodies:
            _draw(film, scene, body, aspect, pixel, camera, towards, time)
        film.mul_(torch.tensor(bright, dtype=torch.float32, device=device).view(1, -1, 1, 1))
    return clip.clamp_(0, 1).mul_(2).sub_(1)
