"""The error that the mean of a chunk of keys would leave, foreseen from means and variances."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


def error_of_means(q: Tensor, k: Tensor, v: Tensor, rows: int, tile: tuple[int, int]) -> Tensor:
    """The squared error to expect of a mean in a chunk's place, fp32 ``[B, H, Tq, Tk]``.

    For a tile t of ``rows`` queries and a chunk j of n keys, with c = 1/sqrt(D), from means and
    variances of every channel:

        s_j = c q_t·k_j + ln n + c²/2 Σ_d ((q_t² + var q_t) var k_j + var q_t k_j²)
        σ²  = c² Σ_d (q_t² + var q_t) var k_j
        p   = softmax(s),  o = Σ_j p_j v_j
        E_j = rows p_j² (σ² var v_j / n + σ⁴/4 |v_j - o|²)

    σ² is the spread of the logits inside the chunk. The first term is values that go with logits,
    the second mass that a mean misses. A block of M rows sums E over its tiles.
    """
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    scale_2 = 1 / q.shape[-1]
    q_mean, q_variance, q_sizes = _moments(q, rows)
    k_mean, k_variance, k_sizes = _moments(k, tile[1])
    v_mean, v_variance, _ = _moments(v, tile[1])
    spread = scale_2 * ((q_mean.square() + q_variance) @ k_variance.mT)
    across = scale_2 * (q_variance @ k_mean.square().mT)
    logits = scale_2**0.5 * (q_mean @ k_mean.mT) + k_sizes.log() + 0.5 * (spread + across)
    share = logits.softmax(-1)
    away = torch.cdist(share @ v_mean, v_mean).square()
    error = spread * (v_variance.sum(-1) / k_sizes).unsqueeze(-2) + 0.25 * spread.square() * away
    error = error * share.square() * q_sizes.unsqueeze(-1)
    per_block = tile[0] // rows
    error = F.pad(error, (0, 0, 0, -error.shape[2] % per_block))
    return error.reshape(*error.shape[:2], -1, per_block, error.shape[3]).sum(3)
