"""Merging query tiles into the blocks of rows a kernel works on.

A block attends the union of its tiles' keys, so tiles that keep alike keys belong together.
All functions take a bool mask ``[B, H, Tq, Tk]`` and the number ``R`` of tiles in a block
(128 rows on a GPU), and return tile numbers int32 ``[B, H, G, R]`` with ``G = ceil(Tq / R)``; every
tile stands in one block exactly once, and -1 fills the places of a last, short block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.errors import OptionError

WINDOW_TILES = 64


def merge_consecutive(mask: Tensor, per_block: int) -> Tensor:
    """Blocks of ``per_block`` neighbouring tiles (FG-Attn's +merge-consecutive)."""
    batch, heads, tiles, _ = mask.shape
    numbers = torch.arange(tiles, dtype=torch.int32, device=mask.device)
    numbers = F.pad(numbers, (0, -tiles % per_block), value=-1).view(-1, per_block)
    return numbers.expand(batch, heads, -1, -1)


def _xor_distance(mask: Tensor) -> Tensor:
    """Key tiles that exactly one of two query tiles keeps, float ``[..., Tq, Tq]``.

    d(i, j) = sum_k b_ik XOR b_jk = |b_i| + |b_j| - 2 b_i . b_j, so one product gives all pairs;
    counts up to 2^24 are exact in fp32.
    """
    bits = mask.to(torch.float32)
    kept = bits.sum(-1)
    return kept.unsqueeze(-1) + kept.unsqueeze(-2) - 2 * (bits @ bits.transpose(-1, -2))


def _greedy(distance: Tensor, per_block: int, present: Tensor) -> Tensor:
    """Greedy grouping of ``[P, T, T]`` distances: int64 ``[P, G, R]`` positions.

    ``present`` bool ``[P, T]`` marks real tiles; absent ones are taken last.
    """
    problems, tiles, _ = distance.shape
    position = torch.arange(tiles, device=distance.device)
    # one integer orders by distance first and position second, so ties break the same everywhere.
    key = distance.to(torch.int64) * tiles + position
    never = torch.iinfo(torch.int64).max
    free = torch.ones(problems, tiles, dtype=torch.bool, device=distance.device)
    blocks = []
    for _ in range(tiles // per_block):
        # the first free real tile leads the block: its distance to itself is 0, and tiles identical
        # to it that are still free stand behind it.
        rank = torch.where(free, position + tiles * (~present), never)
        leader = rank.argmin(-1, keepdim=True)
        row = key.gather(1, leader.unsqueeze(-1).expand(-1, -1, tiles)).squeeze(1)
        row = torch.where(present, row, never - 1 - tiles + position)
        row = torch.where(free, row, never)
        members = row.topk(per_block, dim=-1, largest=False, sorted=True).indices
        free = free.scatter(1, members, False)
        blocks.append(members)
    return torch.stack(blocks, 1)


def _merge_in_windows(mask: Tensor, per_block: int, window: int) -> Tensor:
    batch, heads, tiles, keys = mask.shape
    padded = F.pad(mask, (0, 0, 0, -tiles % window))
    windows = padded.reshape(-1, window, keys)
    numbers = torch.arange(padded.shape[2], device=mask.device).view(-1, window)
    present = (numbers < tiles).repeat(batch * heads, 1)
    members = _greedy(_xor_distance(windows), per_block, present)
    start = numbers[:, :1].repeat(batch * heads, 1).unsqueeze(-1)
    blocks = (members + start).view(batch, heads, -1, per_block)
    blocks = torch.where(blocks < tiles, blocks, -1)
    # padding fills whole blocks behind the last real tile: every window but the last is full.
    return blocks[:, :, : -(-tiles // per_block)].to(torch.int32)


def merge_xor(mask: Tensor, per_block: int) -> Tensor:
    """FG-Attn's greedy grouping (section 5.2, equation 1) over the whole sequence.

    From the first free tile, take the ``R - 1`` free tiles of the smallest XOR distance; repeat.
    """
    tiles = mask.shape[2]
    return _merge_in_windows(mask, per_block, tiles + -tiles % per_block)


def merge_xor_window(mask: Tensor, per_block: int, window: int = WINDOW_TILES) -> Tensor:
    """The same greedy grouping inside windows of ``window`` neighbouring tiles.

    On a locality-preserving order alike tiles stand near each other, so a window loses little,
    and its cost grows linearly with the sequence instead of quadratically.

    Raises:
        OptionError: ``window`` is not a multiple of ``per_block``.
    """
    if window % per_block:
        raise OptionError(f"a window must be whole blocks of {per_block} tiles, got {window} tiles")
    return _merge_in_windows(mask, per_block, window)


MERGES: Final[dict[str, Callable[[Tensor, int], Tensor]]] = {
    "xor": merge_xor,
    "xor-window": merge_xor_window,
    "consecutive": merge_consecutive,
}


def check_merge(name: str) -> None:
    """Raise an ``OptionError`` unless ``name`` is one of ``MERGES``."""
    if name not in MERGES:
        raise OptionError(f"unknown merge {name!r}. Hint: choose from {', '.join(MERGES)}.")
