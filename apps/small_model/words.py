"""What captions of every world share: names of bodies, and word-level vocabularies."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable

# the first noun, size or colour of each row is the canonical one
NOUNS: dict[str, tuple[str, ...]] = {
    "ball": ("ball", "sphere", "circle"),
    "square": ("square", "cube", "box"),
    "ring": ("ring", "donut"),
    "triangle": ("triangle", "pyramid"),
    "star": ("star",),
    "heart": ("heart",),
}
SIZES: dict[str, tuple[str, ...]] = {
    "small": ("small", "little", "tiny"),
    "medium": ("medium", ""),
    "large": ("large", "big", "huge"),
}
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "purple": ("purple", "violet"),
    "cyan": ("cyan", "turquoise"),
    "gray": ("gray", "grey"),
    "cream": ("cream", "beige"),
}

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2


def check_word(name: str, value: str, allowed: Collection[str]) -> None:
    """Raise a ``ValueError`` unless a scene's ``name`` is one of the words that its world has."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {value!r}.")


def colour_words(colours: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What each colour may be called, its own name first."""
    return {name: _SYNONYMS.get(name, (name,)) for name in colours}


def with_article(parts: list[str], rng: random.Random | None = None) -> str:
    """Words after "a" or "an", with ``rng`` now and then after "the"."""
    phrase = " ".join(part for part in parts if part)
    if rng is not None and rng.random() < 0.1:
        return f"the {phrase}"
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def words(prompt: str) -> list[str]:
    """The words of a prompt as the tokenizer sees them: lower case, punctuation dropped."""
    return re.sub(r"[^\w\s]", " ", prompt.lower()).split()


class Vocabulary:
    """The words of a world's captions, in alphabetical order, as ids.

    Args:
        phrases: what captions are made of.
        caption_tokens: room for the longest caption and its end token; longer prompts still work.
    """

    def __init__(self, phrases: Iterable[str], caption_tokens: int):
        self.words = tuple(sorted({word for phrase in phrases for word in phrase.split()}))
        self.caption_tokens = caption_tokens
        self.ids = {PAD: PAD_ID, END: END_ID, UNKNOWN: UNKNOWN_ID}
        self.ids |= {word: i + 3 for i, word in enumerate(self.words)}

    def unknown(self, prompt: str) -> list[str]:
        """Words of a prompt that no caption holds, in order, each once."""
        return list(dict.fromkeys(word for word in words(prompt) if word not in self.ids))

    def token_ids(self, prompt: str) -> list[int]:
        """Token ids of a prompt, end token included, unpadded; equals the shipped tokenizer."""
        return [*(self.ids.get(word, UNKNOWN_ID) for word in words(prompt)), END_ID]

    def training_ids(self, caption: str, rng: random.Random) -> list[int]:
        """Padded ids [caption_tokens] of a caption for training.

        One in ten gains a word from outside the vocabulary, so that such a word in a prompt
        disturbs little.
        """
        ids = self.token_ids(caption)
        if rng.random() < 0.1:
            ids.insert(rng.randrange(len(ids)), UNKNOWN_ID)
        return ids + [PAD_ID] * (self.caption_tokens - len(ids))
