"""What a clip of ``shapes`` shows: the colour and direction of the one object that moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .drawing import COLOURS
from .text import caption
from .verdicts import Verdict
from .world import held_out_scenes

_DIRECTIONS = {
    (0, 1): "moves right",
    (0, -1): "moves left",
    (1, 1): "moves down",
    (1, -1): "moves up",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a clip shows: the object's colour and motion, or "none" where nothing moves."""

    colour: str
    motion: str


def read_clip(frames: np.ndarray) -> Reading:
    """Read colour and direction of the one moving object in RGB bytes [T, H, W, 3].

    The median over time is the background, because a body in straight motion covers no pixel for
    half of the clip. What differs from it is body or shadow; shadow has the background's hue, only
    darker, so it is told apart by direction in RGB space.
    """
    video = frames.astype(np.float32) / 255
    background = np.median(video, axis=0)
    difference = np.linalg.norm(video - background, axis=-1)
    moving = difference > 0.16
    if moving.mean() < 0.002:
        return Reading(colour="none", motion="none")
    pixels = video[moving]
    behind = np.broadcast_to(background, video.shape)[moving]
    brightness, ground = pixels.sum(1), behind.sum(1)
    shadow = (_alignment(pixels, behind) > 0.985) & (brightness < ground)
    body = pixels[~shadow & (brightness > 0.25)]
    if len(body) == 0:
        return Reading(colour="none", motion="none")
    palette = np.array(list(COLOURS.values()), dtype=np.float32)
    votes = np.argmax(np.stack([_alignment(body, c[None]) for c in palette]), axis=0)
    colour = list(COLOURS)[int(np.bincount(votes, minlength=len(palette)).argmax())]
    return Reading(colour=colour, motion=_direction(moving))


def _alignment(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosine between RGB vectors [N, 3]."""
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.asarray((first * second).sum(1) / np.maximum(norms, 1e-6))


def _direction(moving: np.ndarray) -> str:
    """Direction of the centroid of a mask [T, H, W]; "none" under a quarter of the frame."""
    area = moving.sum(axis=(1, 2))
    seen = area > 0.25 * np.median(area[area > 0])
    rows, columns = np.nonzero(seen)[0], np.indices(moving.shape[1:])
    places = np.stack(
        [(columns[1 - axis] * moving[seen]).sum((1, 2)) / area[seen] for axis in range(2)], axis=1
    ) / np.array(moving.shape[:0:-1])
    # the slope of a line through all places stands up to a few frames read wrongly
    slope = np.polyfit(rows / len(moving), places, 1)[0]
    axis = int(np.abs(slope).argmax())
    if abs(slope[axis]) < 0.25:
        return "none"
    return _DIRECTIONS[axis, int(np.sign(slope[axis]))]


def judge(clips: Sequence[np.ndarray]) -> list[Verdict]:
    """Read one clip for each held-out scene, in their order."""
    return [
        Verdict(
            prompt=caption(scene),
            asked=Reading(colour=scene.bodies[0].colour, motion=scene.bodies[0].motion),
            shown=read_clip(clip),
        )
        for scene, clip in zip(held_out_scenes(), clips, strict=True)
    ]
