"""The obviously right implementation: a token mask and a softmax.

Slow and hungry (it holds [S, S] scores per head), it is what every other implementation is tested
against, in the dtype of its inputs or in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tokens.formats import QuantizedQK
from .gates import AbsoluteGate, Gate, kept_pieces, skipped_pairs, weigh
from .means import KeyMeans


def token_mask(
    q_tiles: Tensor, kv_count: Tensor, kv_index: Tensor, tile: tuple[int, int], tokens: int
) -> Tensor:
    """Which pairs a plan computes, bool ``[B, H, S, S]`` (shapes as in ``sparse_attention``)."""
    batch, heads, blocks, per_block = q_tiles.shape
    rows, keys = tile
    q_count, k_count = -(-tokens // rows), -(-tokens // keys)
    place = torch.arange(kv_index.shape[-1], device=kv_index.device)
    listed = place < kv_count.unsqueeze(-1)
    # one extra column and row collect what is not listed and the places without a tile.
    chunk = torch.where(listed, kv_index.long(), k_count)
    kept = torch.zeros(batch, heads, blocks, k_count + 1, dtype=torch.bool, device=chunk.device)
    kept.scatter_(-1, chunk, True)
    per_tile = kept.unsqueeze(3).expand(-1, -1, -1, per_block, -1).flatten(2, 3)
    tiles = torch.where(q_tiles < 0, q_count, q_tiles.long()).flatten(2)
    mask = torch.zeros(
        batch, heads, q_count + 1, k_count + 1, dtype=torch.bool, device=chunk.device
    )
    mask.scatter_(2, tiles.unsqueeze(-1).expand_as(per_tile), per_tile)
    mask = mask[:, :, :q_count, :k_count]
    mask = mask.repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    return mask[:, :, :tokens, :tokens]


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor,
    kv_count: Tensor,
    kv_index: Tensor,
    *,
    tile: tuple[int, int],
    scale: float,
    gate: Gate | None = None,
    quantized: QuantizedQK | None = None,
    means: KeyMeans | None = None,
    skipped: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Masked softmax attention, head by head; see ``sparse_attention`` for the arguments."""
    # low-precision inputs are computed in fp32; fp64 stays fp64, the yardstick of the tests.
    work = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=work, device=q.device)
    shift = torch.zeros_like(lse)
    mean_keys = None if means is None else means.keys_in(work, quantized)
    if quantized is not None:
        q, k = quantized.dequantized(work)
        shift = quantized.shift.to(work)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            at = (slice(b, b + 1), slice(h, h + 1))
            mask = token_mask(q_tiles[at], kv_count[at], kv_index[at], tile, q.shape[2])[0, 0]
            scores = (q[b, h].to(work) @ k[b, h].to(work).T + shift[b, h].unsqueeze(-1)) * scale
            scores = scores.masked_fill(~mask, -torch.inf)
            closed = None
            if gate is not None:
                closed, count = _skipped(
                    scores, q_tiles[b, h], kv_count[b, h], kv_index[b, h], tile, gate, (b, h), q
                )
                if skipped is not None:
                    skipped[b, h] = count
                if isinstance(gate, AbsoluteGate):
                    mask = mask & ~closed
                    scores = scores.masked_fill(closed, -torch.inf)
            values = v[b, h].to(work)
            if means is not None and mean_keys is not None:
                pseudo = (q[b, h].to(work) @ mean_keys[b, h].T + shift[b, h].unsqueeze(-1)) * scale
                count = _rows_of_blocks(means.counts[b, h], q_tiles[b, h], tile[0], q.shape[2])
                count = count[:, : means.groups].to(work)
                # where it stands for no token, a mean that is not finite is nobody's.
                pseudo = (pseudo + count.log()).masked_fill(count == 0, -torch.inf)
                scores = torch.cat([scores, pseudo], -1)
                mask = torch.cat([mask, count > 0], -1)
                values = torch.cat([values, means.v[b, h].to(work)])
                if closed is not None:
                    closed = torch.cat([closed, torch.zeros_like(count, dtype=torch.bool)], -1)
            lse[b, h] = scores.logsumexp(-1)
            # of weights divided by their sum, not of exp(score - lse): beside large scores fp32 has
            # no place for the logarithm of how many there are. a row without keys is all -inf: its
            # output is zero, its log-sum-exp -inf.
            weights = scores.softmax(-1).masked_fill(~mask, 0)
            if closed is not None:
                mask = mask & ~closed
                weights = weights.masked_fill(closed, 0)
            out[b, h] = weigh(weights, values, mask).to(out.dtype)
    return out, lse


def _rows_of_blocks(table: Tensor, q_tiles: Tensor, rows: int, tokens: int) -> Tensor:
    """What a table ``[G, X]`` has for the block of every row: ``[S, X]``, zeros without one."""
    tiles = -(-tokens // rows)
    home = torch.where(q_tiles < 0, tiles, q_tiles.long())
    of_tiles = table.new_zeros(tiles + 1, table.shape[1])
    of_tiles[home.flatten()] = table.repeat_interleave(q_tiles.shape[1], 0)
    return of_tiles[:tiles].repeat_interleave(rows, 0)[:tokens]


def _skipped(
    scores: Tensor,
    q_tiles: Tensor,
    kv_count: Tensor,
    kv_index: Tensor,
    tile: tuple[int, int],
    gate: Gate,
    head: tuple[int, int],
    q: Tensor,
) -> tuple[Tensor, Tensor]:
    """What a gate skips of one head's ``scores`` ``[S, S]``: which pairs, and how many a block."""
    tokens = scores.shape[0]
    rows, keys = tile
    thresholds = gate.thresholds(q, -(-tokens // rows))[head].to(scores.dtype)
    kept = None
    if isinstance(gate, AbsoluteGate) and gate.keep is not None:
        kept = kept_pieces(gate.keep[head], kv_count, keys, gate.keys)
    closed = torch.zeros_like(scores, dtype=torch.bool)
    count = torch.zeros_like(kv_count, dtype=torch.int32)
    within_tile = torch.arange(rows, device=scores.device)
    within_chunk = torch.arange(keys, device=scores.device)
    for g, listed in enumerate(kv_count.tolist()):
        row = (q_tiles[g, :, None].long() * rows + within_tile).flatten()
        alive = (q_tiles[g] >= 0).repeat_interleave(rows) & (row < tokens)
        run = (kv_index[g, :listed, None].long() * keys + within_chunk).flatten()
        run = run[run < tokens]
        row = row.clamp(0, tokens - 1)
        pairs = skipped_pairs(
            gate,
            scores[row][:, run].unsqueeze(0),
            torch.tensor([len(run)], device=scores.device),
            thresholds[row // rows].unsqueeze(0),
            alive.unsqueeze(0),
            None if kept is None else kept[g : g + 1],
        )[0]
        closed[row[alive].unsqueeze(1), run.unsqueeze(0)] = pairs[alive]
        count[g] = pairs[alive].sum()
    return closed, count
