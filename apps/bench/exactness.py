"""How far an attention output may be from exact before its speed means nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from vidsparse.kernels.attention.gates import Gate
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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SparsePlan,
    out: torch.Tensor,
    gate: Gate | None = None,
) -> tuple[float, float]:
    """Relative error of ``out`` against fp64 over three blocks a head, and stock SDPA's own.

    The yardstick gathers a block's keys in fp64, and leaves out what ``gate`` skips by its
    definition; the stock error is that of ``scaled_dot_product_attention`` on the same gathered
    keys in the dtype of ``q``, without a gate.
    """
    import torch
    import torch.nn.functional as F

    from vidsparse.masks import tile_count

    rows, keys = plan.tile
    difference, stock_difference, norm = 0.0, 0.0, 0.0
    blocks = plan.kv_count.shape[2]
    kv_index = plan.kv_index
    for head in range(q.shape[1]):
        for block in {0, blocks // 2, blocks - 1}:
            tiles = plan.q_tiles[0, head, block].long()
            row = (tiles.unsqueeze(1) * rows + torch.arange(rows, device=q.device)).flatten()
            alive = (row >= 0) & (row < plan.tokens)
            chunk = kv_index[0, head, block, : plan.kv_count[0, head, block]].long()
            token = (chunk.unsqueeze(1) * keys + torch.arange(keys, device=q.device)).flatten()
            token = token[token < plan.tokens]
            # rows without a token stay where they are: a gate counts the places of a block.
            qs, ks, vs = q[0, head, row * alive], k[0, head, token], v[0, head, token]
            qs, ks, vs = (x.unsqueeze(0) for x in (qs, ks, vs))
            exact = F.scaled_dot_product_attention(qs.double(), ks.double(), vs.double())
            stock = F.scaled_dot_product_attention(qs, ks, vs.to(qs.dtype)) - exact
            if gate is not None:
                limits = gate.thresholds(q, tile_count(plan.tokens, rows))[0, head]
                kept = _kept(gate, plan, head, block)
                exact = _gated(gate, qs, ks, vs, limits[row * alive // rows], alive, kept)
            difference += (out[0, head, row[alive]] - exact[0, alive]).square().sum().item()
            stock_difference += stock[0, alive].square().sum().item()
            norm += exact[0, alive].square().sum().item()
    return (difference / norm) ** 0.5, (stock_difference / norm) ** 0.5


def _kept(gate: Gate, plan: SparsePlan, head: int, block: int) -> torch.Tensor | None:
    """The pieces of one block's list that a gate never skips, bool ``[1, pieces]``."""
    from vidsparse.kernels.attention.gates import AbsoluteGate, kept_pieces

    if not isinstance(gate, AbsoluteGate) or gate.keep is None:
        return None
    one = (0, head, slice(block, block + 1))
    return kept_pieces(gate.keep[one], plan.kv_count[one], plan.tile[1], gate.keys)


def _gated(
    gate: Gate,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    limits: torch.Tensor,
    alive: torch.Tensor,
    kept: torch.Tensor | None,
) -> torch.Tensor:
    """One block's ``q`` ``[1, R, D]`` over its run of keys ``[1, L, D]`` under a gate, in fp64.

    ``limits`` are the thresholds of its rows ``[R]``, ``alive`` says which rows hold a token.
    """
    import torch

    from vidsparse.kernels.attention.gates import AbsoluteGate, skipped_pairs

    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    length = torch.tensor([k.shape[1]], device=k.device)
    closed = skipped_pairs(gate, scores, length, limits[None], alive[None], kept)
    if isinstance(gate, AbsoluteGate):
        # what it skips enters no sum; what a relative gate skips does.
        scores = scores.masked_fill(closed, -torch.inf)
    weights: torch.Tensor = scores.softmax(-1).masked_fill(closed, 0)
    return weights @ v.double()
