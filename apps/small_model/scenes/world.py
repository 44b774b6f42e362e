"""What a scene is: two or three bodies on ground seen from above, a camera and a light.

Lengths are in half short sides of the frame at a zoom of one; x points right, y down; time runs
from 0 to 1 over the clip. The ground lies still, and the camera looks straight down on it from
above (0, 0): a camera that pans left shows ground that moves right. Motions of bodies are over the
ground, not over the frame.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vidsparse.apps.small_model.drawing import COLOURS as ALL_COLOURS
from vidsparse.apps.small_model.drawing import SHAPES, TURNABLE
from vidsparse.apps.small_model.words import check_word

COLOURS: Final = {name: value for name, value in ALL_COLOURS.items() if name != "white"}
"""Colours of bodies: saturated ones, since no ground is."""
GROUNDS: Final = ("meadow", "city", "sea", "desert", "forest", "snow")
CAMERAS: Final = (
    "still",
    "pan left",
    "pan right",
    "pan up",
    "pan down",
    "zoom in",
    "zoom out",
    "shake",
)
LIGHTS: Final = ("steady", "brightens", "darkens", "sun moves")
# half extents
SIZES: Final = {"small": 0.16, "medium": 0.21, "large": 0.26}
STRAIGHT_MOTIONS: Final = ("moves right", "moves left", "moves up", "moves down")
MOTIONS: Final = (*STRAIGHT_MOTIONS, "circles", "spins", "stays still")
PATTERNS: Final = ("plain", "striped", "checkered", "dotted")

PAN: Final = 0.6
"""How far the camera travels in a pan."""
ZOOM: Final = 1.5
"""How much nearer a zoom ends or begins."""
SHAKE: Final = 0.045
"""How far a shake throws the camera, each way."""
SEEDS: Final = 1 << 30
_TRAVEL = 0.8
_RADIUS = 0.22
# of each colour, the grounds that it is hard to tell from
_LOW_CONTRAST: Final = frozenset(
    {
        ("green", "meadow"),
        ("green", "forest"),
        ("blue", "sea"),
        ("cyan", "sea"),
        ("orange", "desert"),
        ("yellow", "desert"),
        ("cyan", "snow"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Body:
    """One moving object: what it is, how it moves over the ground, and where it is anchored.

    ``x`` and ``y`` lie in [-1, 1] and are shares of the room that its motion and the camera's
    leave, so that it stays in the frame; ``phase`` in [0, 1) is where on its circle it starts.
    """

    shape: str
    colour: str
    size: str
    pattern: str
    motion: str
    x: float = 0.0
    y: float = 0.0
    phase: float = 0.0

    def __post_init__(self) -> None:
        check_word("shape", self.shape, SHAPES)
        check_word("colour", self.colour, COLOURS)
        check_word("size", self.size, SIZES)
        check_word("pattern", self.pattern, PATTERNS)
        check_word("motion", self.motion, MOTIONS)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Up to three bodies on a ground; later ones lie above earlier ones.

    ``seed`` in [0, ``SEEDS``) chooses among the pictures of a ground, which no caption tells apart.
    """

    bodies: tuple[Body, ...]
    ground: str
    camera: str
    light: str
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.bodies) <= 3:
            raise ValueError(f"`bodies` must hold one to three bodies, got {len(self.bodies)}.")
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"`seed` must be in [0, {SEEDS}), got {self.seed}.")
        check_word("ground", self.ground, GROUNDS)
        check_word("camera", self.camera, CAMERAS)
        check_word("light", self.light, LIGHTS)


def _held_out_triples() -> tuple[tuple[str, str, str], ...]:
    # every camera three times, every shape four times, every colour three or four times
    colours = tuple(COLOURS)
    return tuple(
        (colours[i % 7], SHAPES[(i + i // 6) % 6], CAMERAS[(i + i // 8) % 8]) for i in range(24)
    )


HELD_OUT: Final = _held_out_triples()
"""24 (colour, shape, camera) triples that training never draws."""


def camera_path(camera: str, time: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the camera stands over the ground (x, y) and its zoom, each [T], at ``time`` [T]."""
    zero, one = np.zeros_like(time), np.ones_like(time)
    sweep = PAN * (time - 0.5)
    match camera:
        case "pan left":
            return -sweep, zero, one
        case "pan right":
            return sweep, zero, one
        case "pan up":
            return zero, -sweep, one
        case "pan down":
            return zero, sweep, one
        case "zoom in":
            return zero, zero, ZOOM**time
        case "zoom out":
            return zero, zero, ZOOM ** (1 - time)
        case "shake":
            turns = 2 * math.pi * time
            return SHAKE * np.sin(5 * turns), SHAKE * np.sin(4 * turns + 1.0), one
    return zero, zero, one


def _motion(body: Body, time: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a motion adds to its anchor, x and y, and the rotation in radians, each [T]."""
    zero = np.zeros_like(time)
    sweep = _TRAVEL * (time - 0.5)
    # what goes left or right rolls, as far as its rim takes it
    roll = sweep / SIZES[body.size] if body.shape == "ball" else zero
    turns = 2 * math.pi * (body.phase + time)
    match body.motion:
        case "moves right":
            return sweep, zero, roll
        case "moves left":
            return -sweep, zero, -roll
        case "moves down":
            return zero, sweep, zero
        case "moves up":
            return zero, -sweep, zero
        case "circles":
            return _RADIUS * np.cos(turns), _RADIUS * np.sin(turns), zero
        case "spins":
            return zero, zero, 2 * math.pi * time
    return zero, zero, zero


def _anchor(
    share: float, half: float, extent: float, moved: np.ndarray, at: np.ndarray, zoom: np.ndarray
) -> float:
    """The place along one axis that keeps a body within ``half`` of the frame's middle.

    Where no place does, the body is cut by the frame alike on both sides.
    """
    room = half / zoom - 1.03 * extent
    lowest, highest = float(np.max(at - room - moved)), float(np.min(at + room - moved))
    middle, reach = (lowest + highest) / 2, max(highest - lowest, 0.0) / 2
    return middle + share * reach


def track(
    scene: Scene, body: Body, time: np.ndarray, aspect: tuple[float, float] = (1.0, 1.0)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place x, y of a body over the ground and its rotation (radians), each [T], at ``time`` [T].

    ``aspect`` is the half width and half height of the frame.
    """
    # the anchor must not depend on how often a clip is sampled
    course = np.linspace(0, 1, 33)
    at_x, at_y, zoom = camera_path(scene.camera, course)
    moved_x, moved_y, _ = _motion(body, course)
    extent = SIZES[body.size]
    x = _anchor(body.x, aspect[0], extent, moved_x, at_x, zoom)
    y = _anchor(body.y, aspect[1], extent, moved_y, at_y, zoom)
    moved_x, moved_y, angle = _motion(body, time)
    return x + moved_x, y + moved_y, angle


def _sample_body(rng: random.Random, ground: str, camera: str, taken: Sequence[Body]) -> Body:
    while True:
        shape, colour = rng.choice(SHAPES), rng.choice(tuple(COLOURS))
        motion = rng.choice(MOTIONS)
        if (colour, shape, camera) in HELD_OUT or (colour, ground) in _LOW_CONTRAST:
            continue
        if motion == "spins" and shape not in TURNABLE:
            continue
        # what two bodies share, a caption could mean either by
        if any(colour == other.colour or shape == other.shape for other in taken):
            continue
        return Body(
            shape=shape,
            colour=colour,
            size=rng.choice(tuple(SIZES)),
            pattern=rng.choice(PATTERNS),
            motion=motion,
            x=rng.uniform(-1, 1),
            y=rng.uniform(-1, 1),
            phase=rng.random(),
        )


def _clearance(scene: Scene, body: Body) -> float:
    """Least distance over a square clip between the rims of ``body`` and the scene's bodies."""
    time = np.linspace(0, 1, 9)
    x, y, _ = track(scene, body, time)
    least = math.inf
    for other in scene.bodies:
        other_x, other_y, _ = track(scene, other, time)
        gap = np.hypot(x - other_x, y - other_y) - SIZES[body.size] - SIZES[other.size]
        least = min(least, float(np.min(gap)))
    return least


def sample_scene(rng: random.Random) -> Scene:
    """Draw a training scene of two or three bodies, never a triple of ``HELD_OUT``.

    In a third of the scenes bodies cross as chance has it; in the others the clearest of some
    candidates is taken, so that crossings are short.
    """
    ground, camera = rng.choice(GROUNDS), rng.choice(CAMERAS)
    # half of the light stays as it is, so that a change is worth saying
    light = "steady" if rng.random() < 0.5 else rng.choice(LIGHTS[1:])
    candidates = 1 if rng.random() < 1 / 3 else 6
    scene = Scene(
        bodies=(_sample_body(rng, ground, camera, ()),),
        ground=ground,
        camera=camera,
        light=light,
        seed=rng.randrange(SEEDS),
    )
    for _ in range(rng.choice((1, 1, 2))):
        offered = [_sample_body(rng, ground, camera, scene.bodies) for _ in range(candidates)]
        scene = _with(scene, max(offered, key=lambda body: _clearance(scene, body)))
    return scene


def _with(scene: Scene, body: Body) -> Scene:
    return Scene(
        bodies=(*scene.bodies, body),
        ground=scene.ground,
        camera=scene.camera,
        light=scene.light,
        seed=scene.seed,
    )


def held_out_scenes() -> tuple[Scene, ...]:
    """The 24 test scenes: a body and a camera of ``HELD_OUT`` each, and a body beside it.

    The two keep clear of each other, so that a reader of frames sees both; three scenes of a
    camera stand on three grounds.
    """
    scenes = []
    for i, (colour, shape, camera) in enumerate(HELD_OUT):
        rng = random.Random(i)
        ground = next(
            name
            for name in (GROUNDS[(i + k) % len(GROUNDS)] for k in range(len(GROUNDS)))
            if (colour, name) not in _LOW_CONTRAST
        )
        first = Body(
            shape=shape,
            colour=colour,
            size=tuple(SIZES)[1 + i % 2],
            pattern=PATTERNS[i % 4],
            motion=STRAIGHT_MOTIONS[(i + i // 4) % 4] if i % 3 else "stays still",
            x=((i * 7) % 11) / 5 - 1,
            y=((i * 5) % 11) / 5 - 1,
        )
        scene = Scene(
            bodies=(first,),
            ground=ground,
            camera=camera,
            light=LIGHTS[i % 4] if i % 2 else "steady",
            seed=rng.randrange(SEEDS),
        )
        beside = [_sample_body(rng, ground, camera, scene.bodies) for _ in range(60)]
        scenes.append(_with(scene, max(beside, key=lambda body: _clearance(scene, body))))
    return tuple(scenes)


def kind(scene: Scene) -> tuple[str, ...]:
    """Camera, ground and light, and how many bodies there are."""
    return (scene.camera, scene.ground, scene.light, str(len(scene.bodies)))


def centres(scene: Scene, frames: int) -> np.ndarray:
    """Positions [bodies, T, 2] as shares (x, y) of a square frame; (0, 0) is top left."""
    time = np.arange(frames) / max(frames - 1, 1)
    at_x, at_y, zoom = camera_path(scene.camera, time)
    places = []
    for body in scene.bodies:
        x, y, _ = track(scene, body, time)
        places.append(np.stack([(x - at_x) * zoom, (y - at_y) * zoom], axis=-1))
    return np.asarray((np.stack(places) + 1) / 2)
