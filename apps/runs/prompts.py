"""Reading prompt files: one prompt a line, ``#`` comments, and names for the videos they make."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vidsparse.errors import OptionError

MAX_CHARACTERS = 10_000

# long enough to recognise a prompt, short enough for every file system (255 bytes with 4-byte
# letters, the number and the suffix).
SLUG_CHARACTERS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of a file.

    Args:
        number: its place among the file's prompts, from 1.
        text: the line, stripped.
        line: its line number in the file, from 1, for messages.
    """

    number: int
    text: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFile:
    """A file's prompts, and the stem that names their output folder."""

    stem: str
    prompts: tuple[Prompt, ...]


def read_prompts(path: str) -> PromptFile:
    """Read the prompts of ``path``; ``-`` reads standard input.

    Blank lines and lines that start with ``#`` are skipped.

    Raises:
        OptionError: the file is missing, a folder, unreadable, not UTF-8, has no prompt, or one
            longer than 10,000 characters.
    """
    name = "standard input" if path == "-" else path
    prompts = tuple(parse_prompts(name, _text(path, name)))
    if not prompts:
        raise OptionError(
            f"{name} holds no prompt. Hint: write one prompt a line; lines that start with # are "
            "comments."
        )
    return PromptFile(stem="stdin" if path == "-" else Path(path).stem, prompts=prompts)


def slug(text: str) -> str:
    """A short file name for a prompt: lower-case words with dashes, cut at a word's end."""
    plain = unicodedata.normalize("NFC", text).lower()
    words = "".join(c if c.isalnum() else " " for c in plain).split()
    name = ""
    for word in words:
        longer = f"{name}-{word}" if name else word
        if len(longer) > SLUG_CHARACTERS:
            break
        name = longer
    return name or (words[0][:SLUG_CHARACTERS] if words else "prompt")


def _text(path: str, name: str) -> str:
    if not path:
        raise OptionError(
            "the prompt file has no name. Hint: give a file, or - to read standard input."
        )
    if path == "-" and sys.stdin is None:
        raise OptionError("standard input is closed. Hint: give a file with one prompt a line.")
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise OptionError(
            f"there is no prompt file {path}. Hint: write one prompt a line into it, or give - to "
            "read standard input."
        ) from None
    except IsADirectoryError:
        raise OptionError(
            f"{path} is a folder. Hint: give a text file with one prompt a line."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"the prompt file {path!r} cannot be read: {reason}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OptionError(
            f"{name} is not UTF-8 text (line {line}, byte {error.start}). "
            "Hint: save the file with UTF-8 encoding."
        ) from None


def parse_prompts(name: str, text: str) -> Iterator[Prompt]:
    """The prompts of a text; ``name`` is what errors call it.

    Raises:
        OptionError: a prompt with a NUL character, or longer than 10,000 characters.
    """
    number = 0
    # not splitlines(): it also cuts at form feeds and unicode separators, which no editor counts.
    for line, raw in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
        # joined files have one of these marks where each began.
        prompt = raw.replace("\ufeff", "").strip()
        if not prompt or prompt.startswith("#"):
            continue
        if "\0" in prompt:
            raise OptionError(
                f"line {line} of {name} holds a NUL character. Hint: give a plain text file."
            )
        if len(prompt) > MAX_CHARACTERS:
            raise OptionError(
                f"the prompt in line {line} of {name} has {len(prompt):,} characters, at most "
                f"{MAX_CHARACTERS:,} are allowed. Hint: put one prompt on each line."
            )
        number += 1
        yield Prompt(number=number, text=prompt, line=line)
