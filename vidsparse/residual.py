"""The error that the mean of a chunk of keys would leave, foreseen from means and variances."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FINEST_ROWS: Final = 16
"""Query rows of the finest tile that is judged as one."""

SUMMED_KEYS: Final = 64
"""Keys of a group whose mean stands for them in the softmax's sum and in its output."""

# tiles and chunks of a step, whose rows are finer than a mask's: 64 MB for each of a few tensors,
# and so few steps that a GPU does not wait for their launches.
_AT_ONCE: Final = 2**24


class _Moments(NamedTuple):
    """Means and variances of runs of tokens ``[B, H, T, D]``, and how many each has, ``[T]``."""

    mean: Tensor
    variance: Tensor
    sizes: Tensor


def _in_runs(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:2], -1, size, x.shape[3])


def _moments(x: Tensor, size: int) -> _Moments:
    """Those of runs of ``size`` tokens of ``x`` ``[B, H, S, D]``; the last one may be short."""
    tokens = x.shape[2]
    whole = tokens // size * size
    parts = [_in_runs(x[:, :, :whole], size)] if whole else []
    if whole < tokens:
        parts.append(x[:, :, whole:].unsqueeze(2))
    means = [part.mean(3) for part in parts]
    # several times as fast on a CPU as `var_mean`.
    variances = [
        (part - mean.unsqueeze(3)).square_().mean(3)
        for part, mean in zip(parts, means, strict=True)
    ]
    sizes = x.new_full((-(-tokens // size),), size)
    sizes[-1] = tokens - size * (len(sizes) - 1)
    return _Moments(torch.cat(means, 2), torch.cat(variances, 2), sizes)


def _merged(fine: _Moments, each: int) -> _Moments:
    """Those of ``each`` runs together."""
    short = -fine.mean.shape[2] % each
    mean, variance = (F.pad(x, (0, 0, 0, short)) if short else x for x in fine[:2])
    parts = F.pad(fine.sizes, (0, short)).view(-1, each, 1)
    sizes = parts.sum(1)
    mean, variance = _in_runs(mean, each), _in_runs(variance, each)
    merged = (mean * parts).sum(3) / sizes
    away = variance + (mean - merged.unsqueeze(3)).square()
    return _Moments(merged, (away * parts).sum(3) / sizes, sizes.squeeze(-1))


def _logits(q: Tensor, square: Tensor, keys: _Moments) -> tuple[Tensor, Tensor, Tensor]:
    """l, b and σ² of ``error_of_means``; ``q`` and ``square`` have the scale in them."""
    most = keys.sizes.log()
    spread = square @ keys.variance.mT
    frozen = (2 * most * spread).sqrt() - most
    gained = torch.where(spread < 2 * most, 0.5 * spread, frozen)
    return q @ keys.mean.mT + most + gained, gained, spread


def error_of_means(
    q: Tensor, k: Tensor, v: Tensor, tile: tuple[int, int], rows: int = FINEST_ROWS
) -> Tensor:
    """What the mean of each chunk would err by in each block of rows: fp32 ``[B, H, Tq, Tk]``.

    For a tile t of some rows of a block and a chunk j of n keys, with c = 1/sqrt(D), from means and
    variances of every channel:

        σ²  = c² Σ_d (q_t² + var q_t) var k_j     how far the logits of the chunk's keys spread
        b   = σ²/2, from σ² = 2 ln n on σ sqrt(2 ln n) - ln n
        l_j = c q_t·k_j + ln n + b
        p_j = min(exp(l_j) / Σ_g exp(l_g), 1),    o = Σ_g exp(l_g) v_g / Σ_g exp(l_g)
        E_j = rows p_j² ((min(e^σ², n) - 1) / n var v_j + (1 - e^-b)² |v_j - o|²)

    The softmax's sum and o are over groups g of ``SUMMED_KEYS`` keys, or chunks where those are
    larger: videos of three small models were none the worse for it (``docs/experiments.md``). A
    chunk that stands out of its group has a share of 1 at most. b is what the spread adds to the
    logarithm of the chunk's mean exponential. n numbers have no tail beyond sqrt(2 ln n)
    deviations, so that it grows no faster than σ from there on: the freezing of Derrida's random
    energy model (Phys. Rev. B 24, 2613, 1981). The first term of E is values that go with logits,
    the second mass that a mean misses. A block sums E over its tiles.

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
    of_k, of_v = _moments(k, tile[1]), _moments(v, tile[1])
    each = max(1, SUMMED_KEYS // tile[1])
    k_groups, v_groups = _merged(of_k, each), _merged(of_v, each)
    k_sizes, v_mean, v_variance = of_k.sizes, of_v.mean, of_v.variance.sum(-1).unsqueeze(-2)
    v_square = v_mean.square().sum(-1).unsqueeze(-2)
    blocks = max(1, _AT_ONCE // (per_block * len(k_sizes) * q.shape[0] * q.shape[1]))
    found = []
    for first in range(0, q_mean.shape[2], blocks * per_block):
        part = slice(first, first + blocks * per_block)
        mean = scale * q_mean[:, :, part]
        square = scale**2 * (q_mean[:, :, part].square() + q_variance[:, :, part])
        logits, _, _ = _logits(mean, square, k_groups)
        whole = logits.logsumexp(-1, keepdim=True)
        out = (logits - whole).exp_() @ v_groups.mean
        logits, gained, spread = _logits(mean, square, of_k)
        share = (logits - whole).clamp_max_(0).exp_()
        away = out.square().sum(-1, keepdim=True) + v_square - 2 * (out @ v_mean.mT)
        inside = (torch.minimum(spread, k_sizes.log()).exp() - 1) / k_sizes
        missed = torch.expm1(-gained).square()
        error = share.square() * (inside * v_variance + missed * away.clamp_min(0))
        error *= q_sizes[part].unsqueeze(-1)
        error = F.pad(error, (0, 0, 0, -error.shape[2] % per_block))
        found.append(error.reshape(*error.shape[:2], -1, per_block, error.shape[3]).sum(3))
    return torch.cat(found, 2)
