"""The words of the small model: captions for scenes, and the tokenizer it ships with."""

from __future__ import annotations

import random
import re

from .world import BACKGROUNDS, COLOURS, TEXTURES, Body, Scene

# the first noun, size or phrase of each row is the canonical one
_NOUNS: dict[str, tuple[str, ...]] = {
    "ball": ("ball", "sphere", "circle"),
    "square": ("square", "cube", "box"),
    "ring": ("ring", "donut"),
    "triangle": ("triangle", "pyramid"),
    "star": ("star",),
    "heart": ("heart",),
}
_SIZES: dict[str, tuple[str, ...]] = {
    "small": ("small", "little", "tiny"),
    "medium": ("medium", ""),
    "large": ("large", "big", "huge"),
}
_COLOURS: dict[str, tuple[str, ...]] = {name: (name,) for name in (*COLOURS, *BACKGROUNDS)} | {
    "purple": ("purple", "violet"),
    "cyan": ("cyan", "turquoise"),
    "gray": ("gray", "grey"),
    "cream": ("cream", "beige"),
}
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

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2
CAPTION_TOKENS = 48
"""Room for the longest caption and its end token; longer prompts still work."""

PROMPT_FORM = (
    "a SIZE COLOUR SHAPE that MOTION [and a SIZE COLOUR SHAPE that MOTION] "
    "on a TEXTURE COLOUR background"
)


def _vocabulary() -> tuple[str, ...]:
    phrases = ["a an the and that which", *_OPENINGS, *_PLACES, *_GROUNDS]
    for table in (_NOUNS, _SIZES, _COLOURS, _TEXTURES):
        phrases += [phrase for row in table.values() for phrase in row]
    phrases += [phrase for finite, other in _MOTIONS.values() for phrase in (*finite, *other)]
    return tuple(sorted({word for phrase in phrases for word in phrase.split()}))


VOCABULARY: tuple[str, ...] = _vocabulary()
"""Every word a caption can hold, in alphabetical order."""

_IDS: dict[str, int] = {PAD: PAD_ID, END: END_ID, UNKNOWN: UNKNOWN_ID} | {
    word: i + 3 for i, word in enumerate(VOCABULARY)
}
VOCABULARY_SIZE = len(_IDS)


def _with_article(parts: list[str], rng: random.Random | None = None) -> str:
    phrase = " ".join(part for part in parts if part)
    if rng is not None and rng.random() < 0.1:
        return f"the {phrase}"
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def _body_phrase(body: Body, rng: random.Random | None) -> str:
    finite, participle = _MOTIONS[body.motion]
    if rng is None:
        thing = _with_article([body.size, body.colour, _NOUNS[body.shape][0]])
        return f"{thing} that {finite[0]}"
    thing = _with_article(
        [
            rng.choice(_SIZES[body.size]),
            rng.choice(_COLOURS[body.colour]),
            rng.choice(_NOUNS[body.shape]),
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
        return f"{bodies} on {_with_article([scene.texture, scene.background])} background"
    ground = _with_article(
        [rng.choice(_TEXTURES[scene.texture]), rng.choice(_COLOURS[scene.background])], rng
    )
    opening = rng.choice(_OPENINGS) if rng.random() < 0.3 else ""
    place = rng.choice(_PLACES) if rng.random() < 0.5 else _PLACES[0]
    return f"{opening} {bodies} {place} {ground} {rng.choice(_GROUNDS)}".strip()


def words(prompt: str) -> list[str]:
    """The words of a prompt as the tokenizer sees them: lower case, punctuation dropped."""
    return re.sub(r"[^\w\s]", " ", prompt.lower()).split()


def unknown_words(prompt: str) -> list[str]:
    """Words of a prompt the model has never seen, in order, each once."""
    return list(dict.fromkeys(word for word in words(prompt) if word not in _IDS))


def token_ids(prompt: str) -> list[int]:
    """Token ids of a prompt, end token included, unpadded; equals the shipped tokenizer."""
    return [*(_IDS.get(word, UNKNOWN_ID) for word in words(prompt)), END_ID]


def training_ids(scene: Scene, rng: random.Random) -> list[int]:
    """Padded ids [CAPTION_TOKENS] of a caption for training.

    Half of the captions are canonical. One in ten gains a word from outside the vocabulary, so
    that such a word in a prompt disturbs little.
    """
    ids = token_ids(caption(scene, None if rng.random() < 0.5 else rng))
    if rng.random() < 0.1:
        ids.insert(rng.randrange(len(ids)), UNKNOWN_ID)
    return ids + [PAD_ID] * (CAPTION_TOKENS - len(ids))


assert set(_TEXTURES) == set(TEXTURES)
