"""The error that the mean of a chunk of keys would leave, foreseen from means and variances."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

FINEST_ROWS: Final = 16
"""Query rows of the finest tile that is judged as one."""

# tiles and chunks of a step, whose rows are finer than a mask's: 64 MB for each of a few tensors,
# and so few steps that a GPU does not wait for their launches.
_AT_ONCE: Final = 2**24


def _moments(x: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means and variances of runs of ``size`` tokens ``[B, H, T, D]``, and their sizes ``[T]``."""
    tokens = x.shape[2]
    starts = torch.arange(0, tokens, size, device=x.device)
    sizes = (tokens - starts).clamp_max(size).to(x.dtype)
    runs = F.pad(x, (0, 0, 0, -tokens % size)).reshape(*x.shape[:2], -1, size, x.shape[3])
    mean = runs.sum(3) / sizes.unsqueeze(-1)
    there = torch.arange(size, device=x.device) < sizes.unsqueeze(-1)
    away = (runs - mean.unsqueeze(3)).masked_fill(~there.unsqueeze(-1), 0)
    return mean, away.square().sum(3) / sizes.unsqueeze(-1), sizes


def error_of_means(
    q: Tensor, k: Tensor, v: Tensor, tile: tuple[int, int], rows: int = FINEST_ROWS
) -> Tensor:
    """What the mean of each chunk would err by in each block of rows: fp32 ``[B, H, Tq, Tk]``.

    For a tile t of some rows of a block and a chunk j of n keys, with c = 1/sqrt(D), from means and
    variances of every channel:

        σ²  = c² Σ_d (q_t² + var q_t) var k_j     how far the logits of the chunk's keys spread
        b   = σ²/2, from σ² = 2 ln n on σ sqrt(2 ln n) - ln n
        p_j = softmax(c q_t·k_j + ln n + b),      o = Σ_j p_j v_j
        E_j = rows p_j² ((min(e^σ², n) - 1) / n var v_j + (1 - e^-b)² |v_j - o|²)

    b is what the spread adds to the logarithm of the chunk's mean exponential. n numbers have no
    tail beyond sqrt(2 ln n) deviations, so that it grows no faster than σ from there on: the
    freezing of Derrida's random energy model (Phys. Rev. B 24, 2613, 1981). The first term of E is
    values that go with logits, the second mass that a mean misses. A block sums E over its tiles.

    Args:
        q: queries ``[B, H, S, D]``.
        k: keys, the same shape.
        v: values, the same shape.
        tile: queries of a block and keys of a chunk.
        rows: queries of a tile, a divisor of the block's.
    """
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    scale, per_block = q.shape[-1] ** -0.5, tile[0] // rows
    q_mean, q_variance, q_sizes = _moments(q, rows)
    k_mean, k_variance, k_sizes = _moments(k, tile[1])
    v_mean, v_variance, _ = _moments(v, tile[1])
    most, v_variance = k_sizes.log(), v_variance.sum(-1).unsqueeze(-2)
    v_square = v_mean.square().sum(-1).unsqueeze(-2)
    blocks = max(1, _AT_ONCE // (per_block * k_mean.shape[2] * q.shape[0] * q.shape[1]))
    found = []
    for first in range(0, q_mean.shape[2], blocks * per_block):
        part = slice(first, first + blocks * per_block)
        mean, square = q_mean[:, :, part], q_mean[:, :, part].square() + q_variance[:, :, part]
        spread = scale**2 * (square @ k_variance.mT)
        frozen = (2 * most * spread).sqrt() - most
        gained = torch.where(spread < 2 * most, 0.5 * spread, frozen)
        share = (scale * (mean @ k_mean.mT) + most + gained).softmax(-1)
        out = share @ v_mean
        away = out.square().sum(-1, keepdim=True) + v_square - 2 * (out @ v_mean.mT)
        inside = (torch.minimum(spread, most).exp() - 1) / k_sizes
        missed = torch.expm1(-gained).square()
        error = share.square() * (inside * v_variance + missed * away.clamp_min(0))
        error *= q_sizes[part].unsqueeze(-1)
        error = F.pad(error, (0, 0, 0, -error.shape[2] % per_block))
        found.append(error.reshape(*error.shape[:2], -1, per_block, error.shape[3]).sum(3))
    return torch.cat(found, 2)
