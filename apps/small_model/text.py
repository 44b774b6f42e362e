"""Captions of the world of ``shapes``."""

from __future__ import annotations

import random

from .drawing import COLOURS, TEXTURES
from .words import NOUNS, SIZES, Vocabulary, colour_words, with_article
from .world import BACKGROUNDS, Body, Scene

_COLOURS = colour_words((*COLOURS, *BACKGROUNDS))
# the first phrase of each row is the canonical one
_MOTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "moves right": (
        ("moves right", "moves to the right", "slides right", "goes right"),
        ("moving right", "moving to the right", "sliding right"),
    ),
    "moves left": (
        ("moves left", "moves to the left", "slides left", "goes left"),
        ("moving left", "moving to the left", "sliding left"),
    ),
    "moves up": (
        ("moves up", "rises", "moves upwards", "goes up"),
        ("moving up", "rising", "moving upwards"),
    ),
    "moves down": (
        ("moves down", "falls", "moves downwards", "goes down"),
        ("moving down", "falling", "moving downwards"),
    ),
    "bounces": (("bounces", "bounces up and down", "jumps"), ("bouncing", "jumping")),
    "orbits": (("orbits", "moves in a circle"), ("orbiting", "moving in a circle")),
    "spins": (("spins", "rotates", "turns"), ("spinning", "rotating", "turning")),
    "grows": (("grows", "gets bigger"), ("growing", "getting bigger")),
    "shrinks": (("shrinks", "gets smaller"), ("shrinking", "getting smaller")),
    "stays still": (("stays still", "does not move", "rests"), ("staying still", "resting")),
}
_TEXTURES: dict[str, tuple[str, ...]] = {
    "plain": ("plain", "", "solid"),
    "gradient": ("gradient", "shaded"),
    "striped": ("striped",),
    "checkered": ("checkered", "checked"),
    "dotted": ("dotted", "spotted"),
}
_OPENINGS = ("", "a video of", "a clip of", "an animation of")
_PLACES = ("on", "over", "in front of", "against")
_GROUNDS = ("background", "backdrop")

PROMPT_FORM = (
    "a SIZE COLOUR SHAPE that MOTION [and a SIZE COLOUR SHAPE that MOTION] "
    "on a TEXTURE COLOUR background"
)

EXAMPLE_PROMPTS = (
    "a large red ball that moves right on a plain navy background",
    "a medium yellow star that spins on a dotted teal background",
    "a large orange heart that bounces on a plain gray background",
    "a small cyan ring that orbits on a striped brown background",
    "a medium purple square that grows on a checkered cream background",
    "a large green triangle that moves up and a small white ball that moves left "
    "on a gradient black background",
)


def _vocabulary() -> Vocabulary:
    phrases = ["a an the and that which", *_OPENINGS, *_PLACES, *_GROUNDS]
    for table in (NOUNS, SIZES, _COLOURS, _TEXTURES):
        phrases += [phrase for row in table.values() for phrase in row]
    phrases += [phrase for finite, other in _MOTIONS.values() for phrase in (*finite, *other)]
    return Vocabulary(phrases, caption_tokens=48)


VOCABULARY = _vocabulary()


def _body_phrase(body: Body, rng: random.Random | None) -> str:
    finite, participle = _MOTIONS[body.motion]
    if rng is None:
        thing = with_article([body.size, body.colour, NOUNS[body.shape][0]])
        return f"{thing} that {finite[0]}"
    thing = with_article(
        [
            rng.choice(SIZES[body.size]),
            rng.choice(_COLOURS[body.colour]),
            rng.choice(NOUNS[body.shape]),
        ],
        rng,
    )
    if rng.random() < 0.5:
        return f"{thing} {rng.choice(participle)}"
    return f"{thing} {rng.choice(('that', 'that', 'which'))} {rng.choice(finite)}"


def caption(scene: Scene, rng: random.Random | None = None) -> str:
    """Describe a scene, canonically without ``rng`` and in varied words with it."""
    bodies = " and ".join(_body_phrase(body, rng) for body in scene.bodies)
    if rng is None:
        return f"{bodies} on {with_article([scene.texture, scene.background])} background"
    ground = with_article(
        [rng.choice(_TEXTURES[scene.texture]), rng.choice(_COLOURS[scene.background])], rng
    )
    opening = rng.choice(_OPENINGS) if rng.random() < 0.3 else ""
    place = rng.choice(_PLACES) if rng.random() < 0.5 else _PLACES[0]
    return f"{opening} {bodies} {place} {ground} {rng.choice(_GROUNDS)}".strip()


assert set(_TEXTURES) == set(TEXTURES)
