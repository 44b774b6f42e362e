"""How the tokens of one forward are made up: the video's grid, and what stands beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor

from vidsparse.grid import TokenGrid

Patch: TypeAlias = tuple[int, int, int]
"""Frames, lines and columns of a latent in one token."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the token sequence of one forward is made up.

    Args:
        grid: video tokens and the text tokens beside them, padding included.
        valid: the number of real text tokens of each sample, which come first in its text; what
            follows them is padding that takes no part in attention. Empty where all are real.
        layers_with_text: how many layers, from the first, have the text in their sequence; None
            where all have.
    """

    grid: TokenGrid
    valid: tuple[int, ...] = ()
    layers_with_text: int | None = None

    def groups(self, batch: int, layer: int = 0) -> list[tuple[slice | list[int], int]]:
        """Samples with equally much valid text, and how many tokens to cut off their end."""
        if self.layers_with_text is not None and layer >= self.layers_with_text:
            return [(slice(0, batch), 0)]
        samples: dict[int, list[int]] = {}
        for sample, count in enumerate(self.valid):
            samples.setdefault(count, []).append(sample)
        if len(samples) < 2:
            count = self.valid[0] if self.valid else self.grid.text
            return [(slice(0, batch), self.grid.text - count)]
        # a slice takes part of a batch without a copy.
        return [
            (
                slice(rows[0], rows[-1] + 1) if len(rows) == rows[-1] - rows[0] + 1 else rows,
                self.grid.text - count,
            )
            for count, rows in samples.items()
        ]


def latent_grid(
    latent: Any, patch: Patch, text: int = 0, *, text_first: bool = False
) -> TokenGrid | None:
    """Tokens of a latent ``[B, C, T, H, W]`` after patching; None where it is none."""
    if not isinstance(latent, Tensor) or latent.ndim != 5:
        return None
    frames, height, width = _patches(latent, patch)
    return TokenGrid(frames, height, width, text, text_first)


def with_history(
    video: TokenGrid, clean: Tensor | None, coarse: Iterable[Tensor | None], patch: Patch
) -> TokenGrid:
    """The grid of a section of a video, behind frames of the past ``[B, C, T, H, W]``.

    In front of it stand ``coarse`` ones, in patches twice as large each way, then four times; then
    ``clean`` ones. Clean frames of the video's size are frames of its grid, all others count as
    text, of which ``video`` has what stands behind it.
    """
    lead, scale = 0, 2
    for latent in coarse:
        lead += 0 if latent is None else math.prod(_patches(latent, patch, scale))
        scale *= 2
    frames, height, width = (0, 0, 0) if clean is None else _patches(clean, patch)
    if (height, width) != (video.height, video.width):
        lead, frames = lead + frames * height * width, 0
    video = replace(video, frames=video.frames + frames, text=video.text + lead)
    return replace(video, lead=lead) if video.text > lead else replace(video, text_first=True)


def _patches(latent: Tensor, patch: Patch, scale: int = 1) -> tuple[int, ...]:
    """Frames, height and width of a latent in patches; the host fills up large ones."""
    sizes = (n // p for n, p in zip(latent.shape[2:], patch, strict=True))
    if scale > 1:
        sizes = (-(-n // (p * scale)) for n, p in zip(latent.shape[2:], patch, strict=True))
    return tuple(sizes)


def valid_text(mask: Tensor) -> tuple[int, ...]:
    """The number of valid tokens of each sample, from a mask ``[B, text]`` that is not 0 there."""
    return tuple(mask.bool().sum(1).tolist())
