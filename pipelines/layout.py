"""How the tokens of one forward are made up: the video's grid, and what stands beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.site import CallSite

Patch: TypeAlias = tuple[int, int, int]
"""Frames, lines and columns of a latent in one token."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the token sequence of one forward is made up.

    Args:
        grid: video tokens and the text tokens beside them, padding included.
        valid: the number of real text tokens of each sample, which come first in its text; what
            follows them is padding that takes no part in attention. Empty if all are real.
        layers_with_text: how many layers, from the first, have the text in their sequence; None if
            all have.
    """

    grid: TokenGrid
    valid: tuple[int, ...] = ()
    layers_with_text: int | None = None

    def groups(self, batch: int, layer: int = 0) -> list[tuple[slice | list[int], int]]:
        """Samples grouped by their valid text, and how many tokens to cut off each group's end."""
        if self.layers_with_text is not None and layer >= self.layers_with_text:
            return [(slice(0, batch), 0)]
        samples: dict[int, list[int]] = {}
        for sample, count in enumerate(self.valid):
            samples.setdefault(count, []).append(sample)
        if len(samples) < 2:
            return [(slice(0, batch), self.padding(0))]
        return [(_sliced(rows), self.grid.text - count) for count, rows in samples.items()]

    def padding(self, sample: int) -> int:
        """Tokens to cut off a sample's end."""
        return self.grid.text - self.valid[sample] if self.valid else 0

    def new_texts(self, stacked: int, known: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Text lengths of the samples of each branch that are not in ``known`` yet.

        The batch holds ``stacked`` branches, one after another.
        """
        count = len(self.valid) // stacked
        halves = (self.valid[i * count : (i + 1) * count] for i in range(stacked))
        return [text for text in dict.fromkeys(halves) if text and text not in known]

    def calls(
        self, batch: int, site: CallSite, texts: Sequence[tuple[int, ...]]
    ) -> list[tuple[slice | list[int], int, CallSite]]:
        """The attention calls of a batch: for each its samples, tokens to cut off, and call site.

        Samples run together if they have equally much text in every branch of guidance, so that
        each finds in one branch the plan that was made in the other. Branches of one batch whose
        text differs run apart, the conditional one first, which plans for both.

        Args:
            batch: samples of all branches in the batch.
            site: the forward's, with its layer.
            texts: text lengths of a branch's samples, for every branch seen in the run so far.
        """
        groups = self.groups(batch, site.layer)
        stacked = 1 if batch % site.stacked else site.stacked
        count = batch // stacked
        samples: dict[tuple[int, ...], list[int]] = {}
        for sample in range(count):
            key = tuple(text[sample] for text in texts if len(text) == count)
            samples.setdefault(key, []).append(sample)
        without = self.layers_with_text is not None and site.layer >= self.layers_with_text
        if without or (len(groups) == 1 and len(samples) == 1):
            rows, padding = groups[0]
            # every attention call comes by here, most of them with nothing to change.
            same = not padding and stacked == site.stacked
            return [(rows, padding, site if same else _fitted(site, padding, stacked=stacked))]
        last = (count * (stacked - 1), site.branch)
        branches = [last, (0, "unconditional")] if stacked > 1 else [last]
        calls = []
        for first, branch in branches:
            for of_branch in samples.values():
                padding = self.padding(first + of_branch[0])
                where = _fitted(
                    site,
                    padding,
                    branch=branch,
                    stacked=1,
                    guided=False,
                    samples=tuple(of_branch) if len(samples) > 1 else (),
                )
                calls.append((_sliced([first + sample for sample in of_branch]), padding, where))
        return calls


def _fitted(site: CallSite, padding: int, **of_call: Any) -> CallSite:
    """The site of a call whose text is so much shorter."""
    return replace(site, grid=replace(site.grid, text=site.grid.text - padding), **of_call)


def _sliced(rows: list[int]) -> slice | list[int]:
    """Rising numbers as a slice where they can be one: it takes part of a batch without a copy."""
    return slice(rows[0], rows[-1] + 1) if len(rows) == rows[-1] - rows[0] + 1 else rows


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
    """The grid of a section of a video that follows frames of the past ``[B, C, T, H, W]``.

    The sequence holds the ``coarse`` frames (in patches twice as large each way, then four times),
    then the ``clean`` ones, then the section. Clean frames of the video's size are frames of its
    grid; all others count as text before it. ``video`` is the section's own grid, with the text
    behind it.
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
