"""How far an attention output may be from exact before its speed means nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from vidsparse.plan import SparsePlan

# SageAttention's 8-bit scores on normal inputs; anything far beyond is a broken kernel.
LOSSY_BUDGET: Final = 0.1


def error_budget(stock_error: float, dtype: torch.dtype, *, lossy: bool) -> float:
    """The largest relative error that is not a defect, from that of stock attention.

    Twice the stock error, and never below a few roundings of the dtype; ``lossy`` attention
    multiplies in 8 bits.
    """
    import torch

    budget = 2 * stock_error + 4 * torch.finfo(dtype).eps
    return max(budget, LOSSY_BUDGET) if lossy else budget


def sampled_errors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SparsePlan, out: torch.Tensor
) -> tuple[float, float]:
    """Relative error of ``out`` against fp64 over three blocks a head, and stock SDPA's own.

    The yardstick gathers a block's keys in fp64; the stock error is that of
    ``scaled_dot_product_attention`` on the same gathered keys in the dtype of ``q``.
    """
    import torch
    import torch.nn.functional as F

    rows, keys = plan.tile
    difference, stock_difference, norm = 0.0, 0.0, 0.0
    blocks = plan.kv_count.shape[2]
    kv_index = plan.kv_index
    for head in range(q.shape[1]):
        for block in {0, blocks // 2, blocks - 1}:
            tiles = plan.q_tiles[0, head, block].long()
            tiles = tiles[tiles >= 0]
            row = (tiles.unsqueeze(1) * rows + torch.arange(rows, device=q.device)).flatten()
            row = row[row < plan.tokens]
            chunk = kv_index[0, head, block, : plan.kv_count[0, head, block]].long()
            token = (chunk.unsqueeze(1) * keys + torch.arange(keys, device=q.device)).flatten()
            token = token[token < plan.tokens]
            qs, ks, vs = q[:, head, row], k[:, head, token], v[:, head, token]
            exact = F.scaled_dot_product_attention(qs.double(), ks.double(), vs.double())
            stock = F.scaled_dot_product_attention(qs, ks, vs)
            difference += (out[:, head, row] - exact).square().sum().item()
            stock_difference += (stock - exact).square().sum().item()
            norm += exact.square().sum().item()
    return (difference / norm) ** 0.5, (stock_difference / norm) ** 0.5
