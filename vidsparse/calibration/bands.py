"""What every block of keys adds to the attention of a few query tiles, to try many masks cheaply.

Softmax attention under a mask is a sum over blocks of keys divided by a sum over blocks of keys.
Once each block's share of both is known for a query tile, another mask costs one small product of
its bits with them, so a whole grid of thresholds is tried for the price of a few dense calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.masks import tile_count

# what the shares and scores of a band may take: on a CPU they should stay in its cache.
BAND_BYTES = {"cpu": 8 * 2**20, "cuda": 2 * 2**30}


@dataclass(frozen=True, slots=True)
class Band:
    """n neighbouring query tiles of one head, M rows each, and U units of keys.

    Attributes:
        tiles: their places in the sequence.
        shares: every unit's sum of weighted values, and of weights in the last column; fp32
            ``[n, U, M, D + 1]``. Weights are relative to the row's largest score.
        largest: the largest scaled score of each row in each unit, fp32 ``[n, M, U]``.
        alive: rows that hold a token, bool ``[n, M]``.
    """

    tiles: slice
    shares: Tensor
    largest: Tensor
    alive: Tensor

    def outputs(self, masks: Tensor) -> Tensor:
        """Attention under ``masks`` ``[C, n, U]``: ``[C, n, M, D]``, zeros in dead rows."""
        n, units, rows, width = self.shares.shape
        chosen = masks.transpose(0, 1).to(self.shares.dtype)
        sums = (chosen @ self.shares.view(n, units, rows * width)).view(n, -1, rows, width)
        return self.divided(sums[..., :-1], sums[..., -1:]).transpose(0, 1)

    def dense(self) -> Tensor:
        """Attention to everything, ``[n, M, D]``."""
        sums = self.shares.sum(1)
        return self.divided(sums[..., :-1], sums[..., -1:])

    def divided(self, values: Tensor, weights: Tensor) -> Tensor:
        """``values`` over ``weights``, both ``[n, ..., M, *]``; zeros where there is no weight."""
        alive = self.alive.view(self.alive.shape[0], *(1,) * (values.ndim - 3), -1, 1)
        # without weights there are no values either.
        return values * (alive / weights.clamp_min(1e-30))


def bands(q: Tensor, k: Tensor, v: Tensor, rows: int, unit: int, scale: float) -> Iterator[Band]:
    """The bands of one head, ``[S, D]`` each; tiles of ``rows`` queries, units of ``unit`` keys."""
    tokens, dim = q.shape
    tiles, units = tile_count(tokens, rows), tile_count(tokens, unit)
    padding = units * unit - tokens
    keys = F.pad(k.float(), (0, 0, 0, padding)).T
    values = F.pad(v.float(), (0, 1), value=1.0)
    values = F.pad(values, (0, 0, 0, padding)).view(units, unit, dim + 1)
    bytes_of_a_tile = 4 * rows * units * (dim + 1 + 3 * unit)
    at_once = max(1, BAND_BYTES[q.device.type] // bytes_of_a_tile)
    for start in range(0, tiles, at_once):
        stop = min(start + at_once, tiles)
        band = q[start * rows : stop * rows].float() * scale
        band = F.pad(band, (0, 0, 0, (stop - start) * rows - band.shape[0]))
        scores = band @ keys
        if padding:
            scores[:, tokens:] = -torch.inf
        by_unit = scores.view(-1, units, unit)
        largest = by_unit.amax(-1)
        weights = (by_unit - largest.amax(-1)[:, None, None]).exp_()
        shares = weights.transpose(0, 1) @ values
        row = torch.arange(start * rows, stop * rows, device=q.device)
        yield Band(
            slice(start, stop),
            shares.view(units, stop - start, rows, dim + 1).transpose(0, 1).contiguous(),
            largest.view(stop - start, rows, units),
            (row < tokens).view(stop - start, rows),
        )
