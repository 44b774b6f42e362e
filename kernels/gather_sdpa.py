"""The `torch` implementation: gather a block's keys, then call PyTorch's own flash attention.

This is the product path on a CPU, where it really beats dense attention. What makes it fast,
measured at S = 8,192 with 4 heads of 64 at 30 % on two cores:

- whole chunks are gathered by ``index_select`` over a ``[chunks, N * D]`` view (fancy indexing of
  tokens loses everything that sparsity won);
- blocks of 256 rows together go in one call, which saves calls and gives both cores a block; more
  at a time leave the cache;
- neighbours in a longest-first plan have nearly equal lengths, so padding a batch costs little.

Blocks that keep every chunk are not gathered at all: they go to the dense kernel together.

Gates need the scores, which no fused kernel of PyTorch shows: gated blocks take two products and a
softmax, and skip nothing but memory. 8-bit operands are computed in fp32 from the rounded numbers.
Both are here for what they do to the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .gates import AbsoluteGate, Gate, kept_pieces, skipped_pairs
from .quantize import QuantizedQK

ROWS_AT_ONCE = 256


def _has_flash(device: torch.device) -> bool:
    # pytorch's fused kernels that report a log-sum-exp differ by device and build, and speed is
    # not the point off the CPU: two products and a softmax run everywhere.
    return device.type == "cpu"


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> list[Tensor]:
    """Attention and its log-sum-exp: ``[P, 1, R, D]`` queries, ``[P, 1, L, D]`` keys.

    All with a last stride of 1: the CPU's kernel takes it for granted.
    """
    if _has_flash(q.device):
        mask = None if bias is None else bias.expand(q.shape[0], 1, q.shape[2], k.shape[2])
        return list(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, attn_mask=mask, scale=scale
            )
        )
    # in fp32: scores rounded to the inputs' 16 bits would cost more than all the rest.
    work = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(work) @ k.to(work).transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    return [(scores.softmax(-1) @ v.to(work)).to(q.dtype), scores.logsumexp(-1)]


def _attend_gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    gate: Gate,
    lengths: Tensor,
    thresholds: Tensor,
    row_alive: Tensor,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``_attend`` with a gate, whose arguments are those of ``skipped_pairs``.

    The third answer is how many pairs it skipped in every block, int32 ``[P]``.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    scores = (q[:, 0].to(work) @ k[:, 0].to(work).transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias[:, 0]
    closed = skipped_pairs(gate, scores, lengths, thresholds.to(work), row_alive, kept)
    within = torch.arange(scores.shape[-1], device=scores.device) < lengths.unsqueeze(-1)
    count = (closed & within.unsqueeze(1) & row_alive.unsqueeze(-1)).sum((1, 2), dtype=torch.int32)
    if isinstance(gate, AbsoluteGate):
        scores = scores.masked_fill(closed, -torch.inf)
    lse = scores.logsumexp(-1)
    # a row that has lost all keys is all -inf.
    floor = lse.masked_fill(lse == -torch.inf, 0)
    weights = (scores - floor.unsqueeze(-1)).exp().masked_fill(closed, 0)
    return (weights @ v[:, 0].to(work)).to(v.dtype).unsqueeze(1), lse.unsqueeze(1), count


def _chunks(x: Tensor, size: int) -> Tensor:
    """``[S, D]`` as ``[ceil(S / size), size * D]``, zero-padded."""
    padding = -x.shape[0] % size
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    return x.reshape(-1, size * x.shape[1])


def _padded_lists(
    counts: list[int], kv_index: Tensor, keys: int, last: int, short: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Key lists that are safe to read in full, and what hides their dead tokens.

    Chunk numbers ``[G, C]``, 0 past the end of a list, and a bias ``[G, 1, 1, C * keys]``: -inf on
    the tokens of such chunks and on the ``short`` tokens that the ``last`` chunk lacks. Made once a
    head: a dozen small operations for each batch would cost as much as its gather.
    """
    place = torch.arange(kv_index.shape[-1], device=kv_index.device)
    beyond = place >= torch.tensor(counts, device=kv_index.device).unsqueeze(1)
    # index_select takes no 16-bit numbers.
    chosen = kv_index.masked_fill(beyond, 0).to(torch.int32)
    dead = beyond.unsqueeze(-1).expand(-1, -1, keys)
    if short:
        missing = torch.arange(keys, device=kv_index.device) >= keys - short
        dead = dead | ((chosen == last).unsqueeze(-1) & missing)
    bias = torch.zeros(dead.shape, dtype=dtype, device=kv_index.device)
    bias.masked_fill_(dead, -torch.inf)
    return chosen, bias.view(len(counts), 1, 1, -1)


def gather_attention(
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
    skipped: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather and attend, a few blocks at a time; see ``sparse_attention`` for the arguments."""
    batch, heads, tokens = q.shape[:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    if quantized is not None:
        q, k = quantized.dequantized(torch.float32)
        v = v.float()
    thresholds = kept = None
    if gate is not None:
        thresholds = gate.thresholds(q, -(-tokens // tile[0])).repeat_interleave(tile[0], 2)
        thresholds = thresholds[:, :, :tokens]
        if isinstance(gate, AbsoluteGate):
            if quantized is not None:
                # thresholds are on scores with the mean key in them.
                thresholds = thresholds - quantized.shift * scale
            if gate.keep is not None:
                kept = kept_pieces(gate.keep, kv_count, tile[1], gate.keys)
    counts = kv_count.tolist()
    for b in range(batch):
        for h in range(heads):
            pieces = None
            if gate is not None and thresholds is not None:
                pieces = _Pieces(gate, thresholds[b, h], None if kept is None else kept[b, h])
            out[b, h], lse[b, h], count = _one_head(
                q[b, h],
                k[b, h],
                v[b, h],
                q_tiles[b, h],
                counts[b][h],
                kv_index[b, h],
                tile=tile,
                scale=scale,
                pieces=pieces,
            )
            if skipped is not None:
                skipped[b, h] = count
    if quantized is not None:
        lse += quantized.shift * scale
    return out, lse


@dataclass(frozen=True)
class _Pieces:
    """A gate for one head: thresholds of its tokens ``[S]``, pieces that stay ``[G, pieces]``."""

    gate: Gate
    thresholds: Tensor
    kept: Tensor | None


def _one_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor,
    counts: list[int],
    kv_index: Tensor,
    *,
    tile: tuple[int, int],
    scale: float,
    pieces: _Pieces | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One head: ``[S, D]`` tensors, ``q_tiles`` ``[G, R]``.

    Output ``[S, D]``, log-sum-exp ``[S]``, pairs that the gate skipped in every block ``[G]``.
    """
    (tokens, dim), (rows, keys) = q.shape, tile
    blocks, per_block = q_tiles.shape
    block_rows = per_block * rows
    # places without a tile read the last tile once more; what they compute is not copied out.
    members = torch.where(q_tiles < 0, -(-tokens // rows) - 1, q_tiles).flatten()
    grouped = _chunks(q, rows).index_select(0, members).view(blocks, 1, block_rows, dim)
    result = torch.empty_like(grouped)
    sums = torch.empty(blocks, block_rows, dtype=torch.float32, device=q.device)
    k_chunks, v_chunks = _chunks(k, keys), _chunks(v, keys)
    last = k_chunks.shape[0] - 1
    short = (last + 1) * keys - tokens

    full = 0
    if _has_flash(q.device) and pieces is None:
        # else the scores of all these rows would be held at once.
        while full < blocks and counts[full] == last + 1:
            full += 1
    if full:
        # [1, 1, full * rows, D]: a view, since the blocks lie one behind the other.
        whole = grouped[:full].view(1, 1, full * block_rows, dim)
        o, s = _attend(whole, k.contiguous()[None, None], v.contiguous()[None, None], None, scale)
        result[:full] = o.reshape(full, 1, block_rows, dim)
        sums[:full] = s.reshape(full, block_rows)

    # written anew by every batch of blocks: fresh memory for each would spend more time in page
    # faults than in copying.
    at_once = max(1, ROWS_AT_ONCE // block_rows)
    most = at_once * max(counts[full:], default=0)
    k_room, v_room = k_chunks.new_empty(2, most, k_chunks.shape[1])
    chosen, bias = _padded_lists(counts, kv_index, keys, last, short, q.dtype)
    skipped = torch.zeros(blocks, dtype=torch.int32, device=q.device)
    if pieces is not None:
        token = members.long().unsqueeze(1) * rows + torch.arange(rows, device=q.device)
        alive = ((token < tokens) & (q_tiles.view(-1, 1) >= 0)).view(blocks, block_rows)
        thresholds = pieces.thresholds[token.clamp_max(tokens - 1)].view(blocks, block_rows)
        lengths = (bias == 0).flatten(1).sum(1)
    for g in range(full, blocks, at_once):
        batch = slice(g, min(g + at_once, blocks))
        length = max(counts[batch])
        if length == 0:
            result[batch] = 0
            sums[batch] = -torch.inf
            continue
        n = batch.stop - g
        flat = chosen[batch, :length].reshape(-1)
        kk = torch.index_select(k_chunks, 0, flat, out=k_room[: len(flat)])
        vv = torch.index_select(v_chunks, 0, flat, out=v_room[: len(flat)])
        kk, vv = (x.view(n, 1, length * keys, dim) for x in (kk, vv))
        aligned = short == 0 and min(counts[batch]) == length
        mask = None if aligned else bias[batch, :, :, : length * keys]
        if pieces is not None:
            kept = None if pieces.kept is None else pieces.kept[batch]
            o, s, skipped[batch] = _attend_gated(
                grouped[batch],
                kk,
                vv,
                mask,
                scale,
                pieces.gate,
                lengths[batch],
                thresholds[batch],
                alive[batch],
                kept,
            )
        else:
            o, s = _attend(grouped[batch], kk, vv, mask, scale)
        result[batch] = o
        sums[batch] = s.flatten(1)
        if min(counts[batch]) == 0:
            # an empty block beside one with keys is all masked, which is no softmax.
            empty = [i for i in range(g, batch.stop) if counts[i] == 0]
            result[empty] = 0
            sums[empty] = -torch.inf

    # tiles back to their places; absent ones land in an extra tile that is cut off.
    tiles = -(-tokens // rows)
    home = torch.where(q_tiles < 0, tiles, q_tiles).flatten().long()
    out = q.new_empty(tiles + 1, rows * dim).index_copy_(0, home, result.view(-1, rows * dim))
    lse = sums.new_empty(tiles + 1, rows).index_copy_(0, home, sums.view(-1, rows))
    return out.view(-1, dim)[:tokens], lse.view(-1)[:tokens], skipped
