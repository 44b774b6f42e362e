"""Captioned procedural clips: shaded bodies that move over quiet backgrounds.

A scene is a value: the same scene renders at any size and length, on any device, to the same
picture up to sampling. Lengths are in half short sides of the frame, so that the short side runs
from -1 to 1; x points right, y down; time runs from 0 to 1 over the clip.

Tensors: clips are [B, 3, T, H, W] in [-1, 1].
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .drawing import (
    BEVELS,
    COLOURS,
    LIGHT_PLANE,
    SHAPES,
    TEXTURES,
    TURNABLE,
    coverage,
    pattern,
    placed,
    shaded,
    slope_towards,
)
from .words import check_word

BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "black": (0.05, 0.05, 0.06),
    "gray": (0.46, 0.47, 0.49),
    "navy": (0.07, 0.10, 0.30),
    "brown": (0.38, 0.26, 0.18),
    "pink": (0.92, 0.70, 0.77),
    "teal": (0.06, 0.31, 0.33),
    "cream": (0.93, 0.89, 0.78),
}
# half extents, in half short sides of the frame
SIZES: dict[str, float] = {"small": 0.18, "medium": 0.26, "large": 0.35}
STRAIGHT_MOTIONS: tuple[str, ...] = ("moves right", "moves left", "moves up", "moves down")
MOTIONS: tuple[str, ...] = (
    *STRAIGHT_MOTIONS,
    "bounces",
    "orbits",
    "spins",
    "grows",
    "shrinks",
    "stays still",
)

_LOW_CONTRAST: frozenset[tuple[str, str]] = frozenset({("white", "cream"), ("yellow", "cream")})

_SHADOW_SHIFT = (0.06, 0.085)
_SHADOW_SOFTNESS = 0.05
_SHADOW_DEPTH = 0.45


@dataclass(frozen=True, kw_only=True)
class Body:
    """One moving object: what it is, how it moves, and where its motion is anchored.

    ``x`` and ``y`` lie in [-1, 1] and are shares of the room that the motion leaves, so that no
    body leaves the frame; ``phase`` in [0, 1) is where on its circle an orbit starts.
    """

    shape: str
    colour: str
    size: str
    motion: str
    x: float = 0.0
    y: float = 0.0
    phase: float = 0.0

    def __post_init__(self) -> None:
        check_word("shape", self.shape, SHAPES)
        check_word("colour", self.colour, COLOURS)
        check_word("size", self.size, SIZES)
        check_word("motion", self.motion, MOTIONS)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One or two bodies on a background."""

    bodies: tuple[Body, ...]
    texture: str
    background: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.bodies) <= 2:
            raise ValueError(f"`bodies` must hold one or two bodies, got {len(self.bodies)}.")
        check_word("texture", self.texture, TEXTURES)
        check_word("background", self.background, BACKGROUNDS)


def _held_out_triples() -> tuple[tuple[str, str, str], ...]:
    # every colour three times, every shape four times, every direction six times
    colours = tuple(COLOURS)
    return tuple(
        (colours[i // 3], SHAPES[i % 6], STRAIGHT_MOTIONS[(i + i // 6) % 4]) for i in range(24)
    )


HELD_OUT: tuple[tuple[str, str, str], ...] = _held_out_triples()
"""24 (colour, shape, motion) triples that training never draws."""


def _contrasts(colour: str, background: str) -> bool:
    return (colour, background) not in _LOW_CONTRAST


def _sample_body(rng: random.Random, background: str, taken: Sequence[Body]) -> Body:
    while True:
        shape = rng.choice(SHAPES)
        colour = rng.choice(tuple(COLOURS))
        motion = rng.choice(MOTIONS)
        if (colour, shape, motion) in HELD_OUT or not _contrasts(colour, background):
            continue
        if motion == "spins" and shape not in TURNABLE:
            continue
        # two bodies that differ in neither colour nor shape would make the caption ambiguous
        if any(colour == other.colour or shape == other.shape for other in taken):
            continue
        return Body(
            shape=shape,
            colour=colour,
            size=rng.choice(tuple(SIZES)),
            motion=motion,
            x=rng.uniform(-1, 1),
            y=rng.uniform(-1, 1),
            phase=rng.random(),
        )


def _clearance(first: Body, second: Body) -> float:
    """Mean distance between two bodies over a square clip, less their extents."""
    time = np.linspace(0, 1, 9)
    a, b = track(first, time), track(second, time)
    return float(np.mean(np.hypot(a[0] - b[0], a[1] - b[1]) - a[2] - b[2]))


def sample_scene(rng: random.Random) -> Scene:
    """Draw a training scene; two bodies in 40 % of scenes, never a triple of ``HELD_OUT``."""
    background = rng.choice(tuple(BACKGROUNDS))
    bodies = [_sample_body(rng, background, ())]
    if rng.random() < 0.4:
        # of a few candidates keep the one that overlaps the first body least
        candidates = [_sample_body(rng, background, bodies) for _ in range(6)]
        bodies.append(max(candidates, key=lambda body: _clearance(bodies[0], body)))
    return Scene(bodies=tuple(bodies), texture=rng.choice(TEXTURES), background=background)


def held_out_scenes() -> tuple[Scene, ...]:
    """The 24 test scenes: one body of ``HELD_OUT`` each, in straight motion."""
    scenes = []
    for i, (colour, shape, motion) in enumerate(HELD_OUT):
        background = next(
            name
            for name in (tuple(BACKGROUNDS)[(i + k) % len(BACKGROUNDS)] for k in range(2))
            if _contrasts(colour, name)
        )
        body = Body(
            shape=shape,
            colour=colour,
            size=tuple(SIZES)[i % 3],
            motion=motion,
            x=((i * 7) % 11) / 5 - 1,
            y=((i * 5) % 11) / 5 - 1,
        )
        scenes.append(Scene(bodies=(body,), texture=TEXTURES[i % 5], background=background))
    return tuple(scenes)


def kind(scene: Scene) -> tuple[str, ...]:
    """The texture behind it, and of each body the size, and the motion where it is not straight."""
    bodies = (
        (body.size, "straight" if body.motion in STRAIGHT_MOTIONS else body.motion)
        for body in scene.bodies
    )
    return (scene.texture, *itertools.chain.from_iterable(bodies))


def track(
    body: Body, time: np.ndarray, aspect: tuple[float, float] = (1.0, 1.0)
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Position x, y, half extent and rotation (radians) of a body, each [T], at ``time`` [T].

    ``aspect`` is the half width and half height of the frame.
    """
    extent = SIZES[body.size]
    widest = extent * (1.45 if body.motion in ("grows", "shrinks") else 1.0)
    room_x, room_y = aspect[0] - 1.06 * widest, aspect[1] - 1.06 * widest
    one = np.ones_like(time)
    x, y = 0.85 * room_x * body.x * one, 0.85 * room_y * body.y * one
    scale, angle = extent * one, 0.0 * one
    sweep = 2 * time - 1
    turns = 2 * math.pi * (body.phase + time)
    match body.motion:
        case "moves right":
            x = room_x * sweep
        case "moves left":
            x = -room_x * sweep
        case "moves down":
            y = room_y * sweep
        case "moves up":
            y = -room_y * sweep
        case "bounces":
            y = room_y - 1.6 * room_y * np.abs(np.sin(2 * math.pi * time))
        case "orbits":
            radius = min(0.5, room_x, room_y)
            x, y = radius * np.cos(turns), radius * np.sin(turns)
        case "spins":
            angle = 2 * math.pi * time
        case "grows":
            scale = extent * (0.55 + 0.9 * time)
        case "shrinks":
            scale = extent * (1.45 - 0.9 * time)
    return x, y, scale, angle


def _background(
    scenes: Sequence[Scene], x: torch.Tensor, y: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Backgrounds [B, 3, 1, H, W] in [0, 1] of the grid ``x`` [1, W], ``y`` [H, 1]."""
    bases = torch.tensor([BACKGROUNDS[scene.background] for scene in scenes], device=device)
    base = bases.view(-1, 3, 1, 1, 1)
    patterns = {texture: pattern(texture, x, y) for texture in {s.texture for s in scenes}}
    chosen = torch.stack([patterns[scene.texture] for scene in scenes])[:, None, None]
    # dark colours need an absolute step, light ones a relative step, to look alike
    picture = base + (0.035 + 0.075 * base) * chosen
    return picture * (1.0 - 0.08 * (x**2 + y**2))


def _layer(
    bodies: Sequence[Body],
    time: np.ndarray,
    x: torch.Tensor,
    y: torch.Tensor,
    aspect: tuple[float, float],
    pixel: float,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Colour [B, 3, T, H, W], coverage [B, 1, T, H, W] and shadow [B, 1, T, H, W] of one body each.

    ``time`` [T] is that of the frames, ``pixel`` the size of one pixel.
    """
    tracks = np.stack([np.stack(track(body, time, aspect)) for body in bodies])
    table = torch.tensor(tracks, dtype=torch.float32, device=device)[..., None, None]
    centre_x, centre_y, scale, angle = table.unbind(1)
    cos, sin = torch.cos(angle), torch.sin(angle)
    size = (len(bodies), len(time), y.shape[0], x.shape[1])
    distance, slope, shadow = (torch.empty(size, device=device) for _ in range(3))
    for shape in {body.shape for body in bodies}:
        rows = [i for i, body in enumerate(bodies) if body.shape == shape]
        index = torch.tensor(rows, device=device)
        c, s, k = cos[index], sin[index], scale[index]
        dx, dy = x - centre_x[index], y - centre_y[index]
        here = placed(shape, dx, dy, c, s, k)
        distance[index] = here
        slope[index] = slope_towards(shape, dx, dy, c, s, k, here, LIGHT_PLANE)
        shift_x, shift_y = _SHADOW_SHIFT
        shadow[index] = placed(shape, dx - shift_x, dy - shift_y, c, s, k)
    bevel = torch.tensor([BEVELS[body.shape] for body in bodies], device=device)
    colours = torch.tensor([COLOURS[body.colour] for body in bodies], device=device)
    picture = shaded(colours.view(-1, 3, 1, 1, 1), distance, slope, bevel.view(-1, 1, 1, 1) * scale)
    covered = coverage(distance, pixel).unsqueeze(1)
    shade = (_SHADOW_DEPTH * torch.sigmoid(-shadow / _SHADOW_SOFTNESS)).unsqueeze(1)
    return picture.clamp(0, 1), covered, shade


@torch.no_grad()
def render(
    scenes: Sequence[Scene],
    frames: int,
    height: int,
    width: int,
    device: torch.device | str = "cpu",
    course: int | None = None,
) -> torch.Tensor:
    """Render scenes as clips [B, 3, T, H, W] in [-1, 1], fp32, antialiased.

    With a ``course`` of more frames they are the beginning of clips of so many.
    """
    device = torch.device(device)
    short = min(height, width)
    pixel = 2.0 / short
    aspect = (width / short, height / short)
    x = ((torch.arange(width, device=device) + 0.5) * pixel - aspect[0]).view(1, width)
    y = ((torch.arange(height, device=device) + 0.5) * pixel - aspect[1]).view(height, 1)
    time = np.arange(frames) / max((course or frames) - 1, 1)
    clip = _background(scenes, x, y, device).expand(-1, -1, frames, -1, -1).clone()
    for level in range(max(len(scene.bodies) for scene in scenes)):
        rows = [i for i, scene in enumerate(scenes) if len(scene.bodies) > level]
        index = torch.tensor(rows, device=device)
        bodies = [scenes[i].bodies[level] for i in rows]
        picture, covered, shade = _layer(bodies, time, x, y, aspect, pixel, device)
        below = clip[index] * (1 - shade)
        clip[index] = torch.lerp(below, picture, covered)
    return clip.clamp_(0, 1).mul_(2).sub_(1)


def centres(scene: Scene, frames: int) -> np.ndarray:
    """Positions [bodies, T, 2] as shares (x, y) of a square frame; (0, 0) is top left."""
    time = np.arange(frames) / max(frames - 1, 1)
    places = [np.stack(track(body, time)[:2], axis=-1) for body in scene.bodies]
    return np.asarray((np.stack(places) + 1) / 2)
