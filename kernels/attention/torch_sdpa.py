"""The `torch` implementation: gather a block's keys, then call PyTorch's own flash attention.

This is the product path on a CPU, where it really beats dense attention. What makes it fast,
measured at S = 8,192 with 4 heads of 64 at 30 % on two cores:

- whole chunks are gathered by ``index_select`` over a ``[chunks, N * D]`` view (fancy indexing of
  tokens loses everything that sparsity won);
- as many blocks go in one call as their gathered keys fit in the cache, which saves calls;
- every thread has blocks of its own (``threads`` says why), but where all blocks of a short call
  fit in the cache, they go together: PyTorch's threads turn in place for some milliseconds after
  each operation, beside ours, and those are much of such a call;
- neighbours in a longest-first plan have nearly equal lengths, so padding a batch costs little;
- means of skipped keys are chunks like others, with the logarithm of what they stand for as a bias:
  threads that call many small operations wait for each other, whatever else they share.

Blocks that keep every chunk are not gathered at all: they go to the dense kernel together.

Gates need the scores, which no fused kernel of PyTorch shows: gated blocks take two products and a
softmax, and skip nothing but memory. 8-bit operands are computed in fp32 from the rounded numbers.
Both are here for what they do to the output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tokens.formats import QuantizedQK
from . import with_lse
from .gates import AbsoluteGate, Gate, kept_pieces, skipped_pairs, weigh
from .means import KeyMeans
from .threads import in_threads

# rows of blocks that go in one call: as many as have their keys and values in so many bytes.
ROWS_AT_ONCE = (256, 1024)
BYTES_AT_ONCE = 1 << 20

# a call whose lists are nearly equal and have so many bytes in all goes without threads of our own.
SHORT_BYTES = 64 << 20
BYTES_TOGETHER = 4 << 20
PADDED_TOGETHER = 1.125

# with more of them a thread waits less for the others at the end of a call, but each costs a few
# operations.
SPANS_A_THREAD = 4


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
    """``attend_with_lse`` with a gate, whose arguments are those of ``skipped_pairs``.

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
    out = weigh(weights, v[:, 0].to(work), ~closed)
    return out.to(v.dtype).unsqueeze(1), lse.unsqueeze(1), count


def _chunks(x: Tensor, size: int) -> Tensor:
    """``[B, H, S, D]`` as ``[B * H, ceil(S / size), size * D]``, zero-padded, of last stride 1."""
    padding = -x.shape[2] % size
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    chunks = x.reshape(x.shape[0] * x.shape[1], -1, size * x.shape[3])
    return chunks if chunks.stride(-1) == 1 else chunks.contiguous()


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
    means: KeyMeans | None = None,
    skipped: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather and attend, a few blocks at a time; see ``sparse_attention`` for the arguments."""
    batch, heads, tokens = q.shape[:3]
    dtype = q.dtype
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
                kept = kept_pieces(gate.keep, kv_count, tile[1], gate.keys).flatten(0, 1)
        thresholds = thresholds.flatten(0, 1)
    tiles_of = q_tiles.flatten(0, 1)
    averages = None
    if means is not None:
        # their scores and weights are few, and worth fp32: ln n has no 8 bits to lose.
        work = torch.promote_types(q.dtype, torch.float32)
        averages = _Averages(
            means.keys_in(work, quantized).flatten(0, 1),
            means.v.to(work).flatten(0, 1),
            means.counts[..., : means.groups].to(work).log().flatten(0, 1),
        )
    # as chunks of the lists they are in the operands' own numbers, and gates judge no means.
    listed = averages is not None and gate is None and averages.k.dtype == q.dtype
    fused = gate is None and with_lse.has_flash(q.device)
    call = _prepare(q, k, v, q_tiles, kv_count, kv_index, tile, scale, averages if listed else None)
    counts = kv_count.flatten(0, 1).tolist()
    total = sum(map(sum, counts))
    on_cpu = q.device.type == "cpu"
    if fused and (averages is None or listed) and _is_short(call, counts, total):
        counts = [list(chain.from_iterable(counts))]
        call = _together(call, max(counts[0]))
    else:
        call = replace(call, at_once=_at_once(call, total, fused))
    share = total / (SPANS_A_THREAD * torch.get_num_threads())
    split = on_cpu and not call.together
    spans = [
        _Span(head, blocks, counts[head][blocks])
        for head in range(len(counts))
        for blocks in _spans(counts[head], call.at_once, share if split else float("inf"))
    ]

    def attend(span: _Span) -> tuple[Tensor, Tensor]:
        pieces = None
        if gate is not None and thresholds is not None:
            pieces = _Pieces(
                gate,
                thresholds[span.head],
                None if kept is None else kept[span.head, span.blocks],
                tiles_of[span.head, span.blocks],
            )
        o, s, count = _attend_span(call, span, pieces)
        if skipped is not None:
            skipped[(*divmod(span.head, heads), span.blocks)] = count
        if averages is not None and not listed:
            o, s = _with_averages(call, span, averages, o, s)
        return o, s

    if split:
        answers = in_threads(attend, spans, weights=[sum(span.counts) for span in spans])
    else:
        answers = [attend(span) for span in spans]
    out, lse = _take_home(answers, q_tiles, tile, tokens)
    out = out.view(batch, heads, -1, q.shape[3])[:, :, :tokens].to(dtype).contiguous()
    lse = lse.view(batch, heads, -1)[:, :, :tokens].contiguous()
    if quantized is not None:
        lse += quantized.shift * scale
    return out, lse


@dataclass(frozen=True)
class _Call:
    """What the spans of a call read. Heads of all batch entries are counted through.

    ``q`` ``[heads, G, 1, block rows, D]``; ``k_chunks`` and ``v_chunks`` ``[heads, chunks + M,
    keys * D]``, M chunks of means behind the others; ``chosen`` ``[heads, G, M + C]``, chunk
    numbers that are safe to read in full, the means' first; ``ends`` ``[C + 1, C * keys]``: row
    C - c hides all but the first c chunks; ``mean_bias`` ``[heads, G, M * keys]``, None without
    means.
    """

    q: Tensor
    k_chunks: Tensor
    v_chunks: Tensor
    chosen: Tensor
    ends: Tensor
    mean_bias: Tensor | None
    chunks: int
    tokens: int
    tile: tuple[int, int]
    scale: float
    at_once: int = 1

    @property
    def means(self) -> int:
        """Chunks of means, M."""
        return self.chosen.shape[-1] - self.ends.shape[0] + 1

    @property
    def together(self) -> bool:
        """Whether the blocks of all heads are one head's, their chunks one behind the other."""
        return self.k_chunks.shape[1] > self.chunks + self.means

    @property
    def bytes_a_chunk(self) -> int:
        """Of keys and values."""
        return 2 * self.k_chunks.shape[-1] * self.k_chunks.element_size()


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor,
    kv_count: Tensor,
    kv_index: Tensor,
    tile: tuple[int, int],
    scale: float,
    averages: _Averages | None,
) -> _Call:
    """For all heads at once: a thread that calls PyTorch keeps the others from calling it."""
    rows, keys = tile
    batch, heads, blocks, per_block = q_tiles.shape
    tiles = _chunks(q, rows)
    # places without a tile read the last tile once more; what they compute is not kept.
    members = torch.where(q_tiles < 0, tiles.shape[1] - 1, q_tiles).long().flatten(0, 1).flatten(1)
    first = torch.arange(batch * heads, device=q.device).unsqueeze(1) * tiles.shape[1]
    grouped = tiles.flatten(0, 1).index_select(0, (members + first).flatten())
    places = kv_index.shape[-1]
    beyond = torch.arange(places, device=q.device) >= kv_count.unsqueeze(-1)
    # past its end a list repeats its first chunk: what is not finite there is in the block anyway,
    # and a bias of -inf does not hide it. an empty list has chunk 0, and its rows are not kept.
    # index_select takes no 16-bit numbers.
    chosen = torch.where(beyond, kv_index[..., :1], kv_index).to(torch.int32)
    chosen = chosen.masked_fill_(kv_count.unsqueeze(-1) == 0, 0).flatten(0, 1)
    k_chunks, v_chunks = _chunks(k, keys), _chunks(v, keys)
    chunks, mean_bias = k_chunks.shape[1], None
    if averages is not None:
        means_k, means_v = (_chunks(x.unsqueeze(0), keys) for x in (averages.k, averages.v))
        own = torch.arange(chunks, chunks + means_k.shape[1], dtype=torch.int32, device=q.device)
        chosen = torch.cat((own.expand(*chosen.shape[:2], -1), chosen), -1)
        k_chunks, v_chunks = torch.cat((k_chunks, means_k), 1), torch.cat((v_chunks, means_v), 1)
        mean_bias = F.pad(averages.bias, (0, -averages.bias.shape[-1] % keys), value=-torch.inf)
    end = torch.zeros(2 * places * keys, dtype=q.dtype, device=q.device)
    end[places * keys :] = -torch.inf
    return _Call(
        grouped.view(batch * heads, blocks, 1, per_block * rows, q.shape[3]),
        k_chunks,
        v_chunks,
        chosen,
        end.unfold(0, max(1, places * keys), keys) if places else end.view(1, 0),
        mean_bias,
        chunks,
        q.shape[2],
        tile,
        scale,
    )


def _at_once(call: _Call, total: int, fused: bool) -> int:
    """Blocks that go in one call, where all of them list ``total`` chunks.

    A kernel that is not fused holds their scores: these are of few rows.
    """
    heads, blocks, _, block_rows, _ = call.q.shape
    least, most = (rows // block_rows for rows in ROWS_AT_ONCE)
    if not fused:
        return max(1, least)
    each = (total / max(1, heads * blocks) + call.means) * call.bytes_a_chunk
    return max(1, min(max(BYTES_AT_ONCE // max(1, round(each)), least), most))


def _is_short(call: _Call, counts: list[list[int]], total: int) -> bool:
    """Whether all blocks may go together: they are few enough, and their lists nearly equal."""
    blocks = len(counts) * len(counts[0]) if counts else 0
    longest = max(map(max, counts)) if blocks else 0
    # what lists everything is not gathered at all.
    if longest == call.chunks:
        return False
    padded, listed = (blocks * call.means + n for n in (blocks * longest, total))
    return 0 < padded * call.bytes_a_chunk <= SHORT_BYTES and padded <= PADDED_TOGETHER * listed


def _together(call: _Call, longest: int) -> _Call:
    """The same call with all heads' blocks as one head's; ``longest`` is their longest list."""
    heads, each = call.k_chunks.shape[:2]
    first = torch.arange(0, heads * each, each, dtype=torch.int32, device=call.chosen.device)
    return replace(
        call,
        q=call.q.flatten(0, 1).unsqueeze(0),
        k_chunks=call.k_chunks.reshape(1, heads * each, -1),
        v_chunks=call.v_chunks.reshape(1, heads * each, -1),
        chosen=(call.chosen + first.view(-1, 1, 1)).flatten(0, 1).unsqueeze(0),
        mean_bias=None if call.mean_bias is None else call.mean_bias.flatten(0, 1).unsqueeze(0),
        at_once=max(1, BYTES_TOGETHER // ((call.means + longest) * call.bytes_a_chunk)),
    )


def _take_home(
    answers: list[tuple[Tensor, Tensor]], q_tiles: Tensor, tile: tuple[int, int], tokens: int
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of all spans, from blocks to tiles: ``[heads * tiles, ...]``."""
    rows = tile[0]
    tiles = -(-tokens // rows)
    heads = q_tiles.shape[0] * q_tiles.shape[1]
    result, sums = (torch.cat(parts) for parts in zip(*answers, strict=True))
    result, sums = result.view(heads * q_tiles[0, 0].numel(), -1), sums.view(-1, rows)
    first = torch.arange(heads, device=q_tiles.device).unsqueeze(1) * tiles
    home = (q_tiles.reshape(heads, -1) + first).flatten()
    there = q_tiles.flatten() >= 0
    if not there.all():
        home, result, sums = home[there], result[there], sums[there]
    out = result.new_empty(heads * tiles, result.shape[1]).index_copy_(0, home, result)
    return out, sums.new_empty(heads * tiles, rows).index_copy_(0, home, sums)


@dataclass(frozen=True)
class _Span:
    """Neighbouring blocks of one head, with the lengths of their lists."""

    head: int
    blocks: slice
    counts: list[int]


@dataclass(frozen=True)
class _Pieces:
    """A span's gate: thresholds of the head's tokens ``[S]``, pieces that stay ``[G, pieces]``.

    ``q_tiles`` ``[G, R]`` are the tiles of its blocks, -1 where there is none.
    """

    gate: Gate
    thresholds: Tensor
    kept: Tensor | None
    q_tiles: Tensor


def _spans(counts: list[int], per_batch: int, share: float) -> list[slice]:
    """A head's blocks in spans of whole batches that attend about ``share`` chunks each."""
    spans, first, work = [], 0, 0
    for g in range(0, len(counts), per_batch):
        work += sum(counts[g : g + per_batch])
        end = min(g + per_batch, len(counts))
        if work >= share or end == len(counts):
            spans.append(slice(first, end))
            first, work = end, 0
    return spans


def _attend_span(call: _Call, span: _Span, pieces: _Pieces | None) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[G, 1, R, D]``, log-sum-exp ``[G, R]``, pairs that the gate skipped ``[G]``."""
    (rows, keys), counts = call.tile, span.counts
    q, chosen = call.q[span.head, span.blocks], call.chosen[span.head, span.blocks]
    k_chunks, v_chunks = call.k_chunks[span.head], call.v_chunks[span.head]
    mean_bias = None if call.mean_bias is None else call.mean_bias[span.head, span.blocks]
    blocks, _, block_rows, dim = q.shape
    device = q.device
    last, means, each = call.chunks - 1, call.means, call.chunks + call.means
    short = (last + 1) * keys - call.tokens
    outs, sums = [], []
    skipped = torch.zeros(blocks if pieces is not None else 0, dtype=torch.int32, device=device)

    full = 0
    if with_lse.has_flash(device) and pieces is None and not call.together:
        # else the scores of all these rows would be held at once.
        while full < blocks and counts[full] == last + 1:
            full += 1
    if full:
        # [1, 1, full * rows, D]: a view, since the blocks lie one behind the other.
        whole = q[:full].view(1, 1, full * block_rows, dim)
        k, v = (x.view(1, 1, -1, dim)[:, :, : call.tokens] for x in (k_chunks, v_chunks))
        o, s = with_lse.attend_with_lse(whole, k, v, None, call.scale)
        outs.append(o.view(full, 1, block_rows, dim))
        sums.append(s.view(full, block_rows))

    # written anew by every batch of blocks: fresh memory for each would spend more time in page
    # faults than in copying.
    most = call.at_once * (means + max(counts[full:], default=0))
    k_room, v_room = k_chunks.new_empty(2, most, k_chunks.shape[1])
    if pieces is not None:
        token = pieces.q_tiles.long().view(-1, 1) * rows + torch.arange(rows, device=device)
        alive = ((token >= 0) & (token < call.tokens)).view(blocks, block_rows)
        at = token.clamp(0, call.tokens - 1)
        thresholds = pieces.thresholds[at].view(blocks, block_rows)
    for g in range(full, blocks, call.at_once):
        batch = slice(g, min(g + call.at_once, blocks))
        length, n = max(counts[batch]), batch.stop - g
        if means + length == 0:
            outs.append(q.new_zeros(n, 1, block_rows, dim))
            sums.append(q.new_full((n, block_rows), -torch.inf, dtype=torch.float32))
            continue
        lists = chosen[batch, : means + length]
        flat = lists.reshape(-1)
        kk = torch.index_select(k_chunks, 0, flat, out=k_room[: len(flat)])
        vv = torch.index_select(v_chunks, 0, flat, out=v_room[: len(flat)])
        kk, vv = (x.view(n, 1, -1, dim) for x in (kk, vv))
        lists = lists[:, means:]
        if call.together:
            lists = lists % each
        aligned = short == 0 and min(counts[batch]) == length and not means
        mask = None if aligned else _hidden(call, counts[batch], lists, last, short)
        if mean_bias is not None and mask is not None:
            mask = torch.cat((mean_bias[batch, None, None], mask), -1)
        if pieces is not None:
            o, s, skipped[batch] = _attend_gated(
                q[batch],
                kk,
                vv,
                mask,
                call.scale,
                pieces.gate,
                _lengths(counts[batch], lists, keys, last, short),
                thresholds[batch],
                alive[batch],
                None if pieces.kept is None else pieces.kept[batch],
            )
        else:
            o, s = with_lse.attend_with_lse(q[batch], kk, vv, mask, call.scale)
        s = s.flatten(1)
        if min(counts[batch]) == 0:
            # an empty block without means beside one with keys is all masked, which is no softmax.
            empty = [i for i, count in enumerate(counts[batch]) if count == 0]
            if mean_bias is not None:
                empty = [i for i in empty if not (mean_bias[g + i] > -torch.inf).any()]
            o[empty] = 0
            s[empty] = -torch.inf
        outs.append(o)
        sums.append(s)
    return torch.cat(outs), torch.cat(sums), skipped


@dataclass(frozen=True)
class _Averages:
    """Mean keys and values of all heads ``[heads, P, D]``, and ln of counts ``[heads, G, P]``."""

    k: Tensor
    v: Tensor
    bias: Tensor


def _with_averages(
    call: _Call, span: _Span, averages: _Averages, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """A span's output and log-sum-exp with the means of what its blocks do not list."""
    at = span.head, span.blocks
    q = call.q[at].squeeze(1).to(averages.k.dtype)
    bias = averages.bias[at].unsqueeze(1)
    scores = (q @ averages.k[span.head].mT) * call.scale + bias
    # where it stands for no token, a mean that is not finite is nobody's.
    stands = (bias > -torch.inf).expand_as(scores)
    scores = scores.masked_fill(~stands, -torch.inf)
    # of a block that lists everything there are no means: all is -inf, and adds nothing.
    largest = torch.maximum(scores.amax(-1), lse).clamp_min(torch.finfo(lse.dtype).min)
    weights = (scores - largest.unsqueeze(-1)).exp()
    own = (lse - largest).exp()
    total = own + weights.sum(-1)
    # without a key and without a mean: zeros.
    share = torch.where(total == 0, 0, 1 / total).unsqueeze(-1)
    joined = (
        out.squeeze(1).to(q.dtype) * own.unsqueeze(-1)
        + weigh(weights, averages.v[span.head], stands)
    ) * share
    return joined.unsqueeze(1).to(out.dtype), largest + total.log()


def _hidden(call: _Call, counts: list[int], lists: Tensor, last: int, short: int) -> Tensor:
    """A bias ``[n, 1, 1, length * keys]`` of -inf on tokens that are not there.

    They are those past a list's end, and the ``short`` tokens that the ``last`` chunk lacks.
    """
    keys, places = call.tile[1], call.ends.shape[0] - 1
    length = lists.shape[1]
    row = torch.tensor([places - count for count in counts], device=lists.device)
    bias = call.ends[:, : length * keys].index_select(0, row)
    if short:
        missing = torch.arange(keys, device=lists.device) >= keys - short
        lacking = (lists == last).unsqueeze(-1) & missing
        bias = bias.masked_fill_(lacking.flatten(1), -torch.inf)
    return bias[:, None, None]


def _lengths(counts: list[int], lists: Tensor, keys: int, last: int, short: int) -> Tensor:
    """Tokens of each list ``[n]``; only the last chunk lacks any, and it is a list's last."""
    ends = [max(count - 1, 0) for count in counts]
    at = torch.tensor(ends, device=lists.device).unsqueeze(1)
    lacks = (lists.gather(1, at).squeeze(1) == last) * short
    count = torch.tensor(counts, device=lists.device)
    return count * keys - lacks * (count > 0)
