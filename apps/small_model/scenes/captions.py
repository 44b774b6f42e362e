"""Captions of ``scenes``: the camera and the ground first, then the bodies, then the light."""

from __future__ import annotations

import random

from vidsparse.apps.small_model.words import (
    NOUNS,
    SIZES,
    Vocabulary,
    colour_words,
    with_article,
)

from .world import COLOURS, Body, Scene

_COLOURS = colour_words(COLOURS)
# the first phrase of each row is the canonical one
_GROUNDS: dict[str, tuple[str, ...]] = {
    "meadow": ("a green meadow", "a meadow", "a grassy field"),
    "city": ("a city", "city blocks", "a town"),
    "sea": ("the sea", "the ocean", "open water"),
    "desert": ("a desert", "sand dunes", "a sandy desert"),
    "forest": ("a forest", "the woods", "a dense forest"),
    "snow": ("a snowy field", "the snow", "a snowy land"),
}
_CAMERAS: dict[str, tuple[str, ...]] = {
    "still": ("a still camera", "a fixed camera", "a steady shot"),
    "pan left": ("a camera pan left", "the camera pans left", "a pan to the left"),
    "pan right": ("a camera pan right", "the camera pans right", "a pan to the right"),
    "pan up": ("a camera pan up", "the camera pans up", "a pan upwards"),
    "pan down": ("a camera pan down", "the camera pans down", "a pan downwards"),
    "zoom in": ("a camera zoom in", "the camera zooms in", "a zoom in"),
    "zoom out": ("a camera zoom out", "the camera zooms out", "a zoom out"),
    "shake": ("a shaking camera", "the camera shakes", "a shaky shot"),
}
_LIGHTS: dict[str, tuple[str, ...]] = {
    "steady": ("",),
    "brightens": ("as it gets light", "while the light grows", "at dawn"),
    "darkens": ("as it gets dark", "while the light fades", "at dusk"),
    "sun moves": ("as the sun moves", "while the shadows turn", "under a moving sun"),
}
_PATTERNS: dict[str, tuple[str, ...]] = {
    "plain": ("", "plain"),
    "striped": ("striped",),
    "checkered": ("checkered", "checked"),
    "dotted": ("dotted", "spotted"),
}
_SIDEWAYS = {"moves right": "right", "moves left": "left"}
_MOTIONS: dict[str, tuple[str, ...]] = {
    "moves right": ("slides right", "moves right", "goes to the right"),
    "moves left": ("slides left", "moves left", "goes to the left"),
    "moves up": ("moves up", "goes up", "moves upwards"),
    "moves down": ("moves down", "goes down", "moves downwards"),
    "circles": ("moves in a circle", "circles", "goes round"),
    "spins": ("spins", "rotates", "turns"),
    "stays still": ("stays still", "rests", "does not move"),
}

PROMPT_FORM = (
    "a CAMERA over GROUND, a SIZE PATTERN COLOUR SHAPE MOTION, a SIZE PATTERN COLOUR SHAPE MOTION"
    "[, a SIZE PATTERN COLOUR SHAPE MOTION][, as it gets light | dark | as the sun moves]"
)
EXAMPLE_PROMPTS = (
    "a camera pan left over a snowy field, a large red ball rolls right, a medium blue star spins",
    "a camera zoom in over a desert, a large striped purple heart moves up, "
    "a small green ring stays still",
    "a still camera over the sea, a medium orange ball rolls left, a large dotted red triangle "
    "moves in a circle, as it gets dark",
    "a camera pan up over a forest, a large checkered yellow square slides right, "
    "a medium cyan heart stays still, as the sun moves",
    "a shaking camera over a city, a medium green star spins, a large blue ball rolls right",
    "a camera zoom out over a green meadow, a large dotted cyan ring moves down, "
    "a small plain red square moves left, a medium purple triangle stays still, as it gets light",
)


def _vocabulary() -> Vocabulary:
    phrases = ["a an the and over above rolls left right plain"]
    for table in (NOUNS, SIZES, _COLOURS, _GROUNDS, _CAMERAS, _LIGHTS, _PATTERNS, _MOTIONS):
        phrases += [phrase for row in table.values() for phrase in row]
    return Vocabulary(phrases, caption_tokens=64)


VOCABULARY = _vocabulary()


def _body_phrase(body: Body, rng: random.Random | None) -> str:
    def say(row: tuple[str, ...]) -> str:
        return row[0] if rng is None else rng.choice(row)

    named = [
        say(SIZES[body.size]),
        say(_PATTERNS[body.pattern]),
        say(_COLOURS[body.colour]),
        say(NOUNS[body.shape]),
    ]
    motion = say(_MOTIONS[body.motion])
    # a ball that goes sideways turns as it goes
    if body.shape == "ball" and body.motion in _SIDEWAYS and (rng is None or rng.random() < 0.6):
        motion = f"rolls {_SIDEWAYS[body.motion]}"
    return f"{with_article(named, rng)} {motion}"


def caption(scene: Scene, rng: random.Random | None = None) -> str:
    """Describe a scene, canonically without ``rng`` and in varied words and order with it."""
    bodies = [_body_phrase(body, rng) for body in scene.bodies]
    if rng is None:
        light = _LIGHTS[scene.light][0]
        parts = [f"{_CAMERAS[scene.camera][0]} over {_GROUNDS[scene.ground][0]}", *bodies]
        return ", ".join([*parts, light] if light else parts)
    rng.shuffle(bodies)
    camera, ground = rng.choice(_CAMERAS[scene.camera]), rng.choice(_GROUNDS[scene.ground])
    said = " and ".join(bodies) if rng.random() < 0.4 else ", ".join(bodies)
    light = rng.choice(_LIGHTS[scene.light])
    place = f"{rng.choice(('over', 'over', 'above'))} {ground}"
    if rng.random() < 0.3:
        parts = [f"{said} {place}", camera, light]
    else:
        parts = [f"{camera} {place}", said, light]
    return ", ".join(part for part in parts if part)
