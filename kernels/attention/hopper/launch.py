"""Launching the kernel: its configurations and operands."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...hardware import device_facts
from ...logarithms import LOG2_E
from ...tokens.formats import QuantizedQK
from ..gates import KEY_GROUP, AbsoluteGate, Gate, gate_kind, kept_pieces
from ..lists import heads_together, is_anchored, tables, tables_of_means
from ..means import KeyMeans
from .arguments import Sizes
from .kernel import gather_attention_kernel
from .layouts import boxes_layout
from .parts import join_parts_kernel
from .schedule import LEAST_SHARE, MOST_PARTS, split_tail

BLOCK_ROWS = 128
# what a block may have, less room for barriers and tables.
STAGE_BYTES = 224 * 1024


@dataclass(frozen=True)
class AttentionTuning:
    """What is tuned of the attention kernel: none of it changes what a call computes."""

    stages: int
    # of the three warpgroups that share 504 registers a lane, two are consumers.
    consumer_registers: int
    producer_registers: int
    step: int = KEY_GROUP


def tuned_attention(keys: int, padded_dim: int, *, key_bytes: int = 2) -> AttentionTuning:
    """The fastest measured for key chunks of ``keys`` tokens and numbers of so many bytes."""
    # as many stages as shared memory holds beside the queries.
    queries = BLOCK_ROWS * padded_dim * key_bytes
    # and, of 8 bits, a scale for every key at most.
    scales = 4 if key_bytes == 1 else 0
    stages = (STAGE_BYTES - queries) // (KEY_GROUP * (padded_dim * (key_bytes + 2) + scales))
    if keys == 1:
        return AttentionTuning(stages, consumer_registers=208, producer_registers=88)
    return AttentionTuning(stages, consumer_registers=232, producer_registers=40)


def _boxes(x: Tensor, rows: int, padded_dim: int) -> TensorDescriptor:
    """Boxes of ``rows`` rows of one head of ``x``, which never reach the next."""
    batch, heads, tokens, dim = x.shape
    columns, layout = boxes_layout(padded_dim, 8 * x.element_size())
    # what is contiguous may have any stride in a dimension of one.
    head, token = (tokens * dim, dim) if x.is_contiguous() else x.stride()[1:3]
    return TensorDescriptor(
        x,
        [batch * heads, tokens, dim],
        [head, token, 1],
        [1, rows, columns],
        layout,
    )


def _boxable(x: Tensor) -> Tensor:
    """``x`` as TMA can read it: on multiples of 16 bytes, its heads equally far from each other.

    One sample is, as the pipelines lay it out: a token's heads beside each other.
    """
    sample, head, token, channel = x.stride()
    even = x.shape[0] == 1 or sample == x.shape[1] * head
    aligned = all(stride * x.element_size() % 16 == 0 for stride in (head, token))
    if even and aligned and channel == 1 and min(head, token) > 0:
        return x if x.data_ptr() % 16 == 0 else x.clone()
    return _dense(x)


def _dense(x: Tensor) -> Tensor:
    """``x`` contiguous and on a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _kept_words(gate: AbsoluteGate, kv_count: Tensor, keys: int) -> Tensor:
    """A word for each step of every list, of which bit p marks piece p as never skipped."""
    assert gate.keep is not None
    kept = kept_pieces(gate.keep, kv_count, keys, gate.keys)
    pieces = KEY_GROUP // gate.keys
    kept = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % pieces)).to(torch.int32)
    kept = kept.view(*kept.shape[:-1], -1, pieces)
    return (kept << torch.arange(pieces, device=kept.device)).sum(-1, dtype=torch.int32)


# of a compiled first launch, the second one and its sizes.
_SECOND: dict[object, tuple[Any, Sizes]] = {}


def _launch(grid: tuple[int, int, int], operands: tuple[Any, ...], sizes: Sizes) -> None:
    """Launch the kernel, twice where blocks may have to be attended again.

    What triton finds out about arguments at every launch, which takes longer than the second launch
    on the GPU, holds for both.
    """
    launch = gather_attention_kernel[grid]
    compiled = launch(*operands, sizes, num_warps=4)
    if sizes.launch is None:
        return
    if compiled in _SECOND:
        again, second = _SECOND[compiled]
        again[grid](*operands, second)
    else:
        second = replace(sizes, launch="second")
        _SECOND[compiled] = launch(*operands, second, num_warps=4), second


def gluon_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor | None,
    kv_count: Tensor | None,
    kv_index: Tensor | None,
    *,
    tile: tuple[int, int],
    scale: float,
    gate: Gate | None = None,
    quantized: QuantizedQK | None = None,
    means: KeyMeans | None = None,
    skipped: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; see ``sparse_attention`` for the arguments.

    Without the three tensors of a plan every row attends all keys, in full precision or 8 bits. The
    output is then laid out as the queries are, if these are one sample's with a token's heads
    beside each other.

    Raises:
        ValueError: a tile that the kernel does not have.
    """
    rows, keys = tile
    if rows not in (16, 32, 64, 128) or keys not in (1, 8, 16, 32, 64, 128):
        raise ValueError(f"no kernel for tiles of {rows}x{keys}")
    if q_tiles is not None and q_tiles.shape[3] * rows != BLOCK_ROWS:
        raise ValueError(f"blocks must have {BLOCK_ROWS // rows} tiles, not {q_tiles.shape[3]}")
    batch, heads, tokens, dim = q.shape
    dtype = q.dtype
    blocks = -(-tokens // BLOCK_ROWS) if q_tiles is None else q_tiles.shape[2]
    chunks = -(-tokens // keys) if kv_index is None else kv_index.shape[-1]
    padded = 64 if dim == 64 else 128
    thresholds = kept = None
    if gate is not None:
        thresholds = gate.thresholds(q, -(-tokens // rows)).contiguous()
        if isinstance(gate, AbsoluteGate) and gate.keep is not None:
            assert kv_count is not None
            kept = _kept_words(gate, kv_count, keys)
        if skipped is not None:
            # both consumers of a block add to it.
            skipped.zero_()
    beside = q_tiles is None and batch == 1 and q.stride(1) < q.stride(2)
    if quantized is not None:
        q, k = quantized.q, quantized.k
    # a chunk of few tokens is gathered by pointers.
    q, k, v = _boxable(q), *((_boxable if keys >= 8 else _dense)(x) for x in (k, v))
    c = tuned_attention(keys, padded, key_bytes=k.element_size())
    # without boxes, then.
    box = keys if keys >= 8 else 8
    total = blocks * batch * heads
    programs = device_facts(q.device).multiprocessors
    whole, parts = total, 1
    mean_steps = 0 if means is None else -(-means.groups // c.step)
    if gate is None:
        share = 1.0 if kv_index is None else LEAST_SHARE
        steps = math.ceil(share * tokens / c.step) + mean_steps
        # every part has means.
        whole, parts = split_tail(total, programs, steps, mean_steps or MOST_PARTS)
    items = whole + (total - whole) * parts
    # parts have rows of their own behind all others.
    all_rows = batch * heads * tokens
    spare = BLOCK_ROWS * (items - whole)
    out = torch.empty(all_rows + spare, dim, dtype=dtype, device=q.device)
    lse = torch.empty(all_rows + spare, dtype=torch.float32, device=q.device)
    together = heads_together(batch * heads, tokens * dim * (k.element_size() + v.element_size()))
    plan = tables(q_tiles, kv_count, kv_index, quantized)
    words = torch.zeros(3 + total, dtype=torch.int32, device=q.device)
    averages = tables_of_means(means)
    k_mean, v_mean = (None if x is None else _boxes(_dense(x), box, padded) for x in averages[:2])
    operands = (
        _boxes(q, min(rows, 64), padded),
        _boxes(k, box, padded),
        _boxes(v, box, padded),
        k_mean,
        v_mean,
        k,
        v,
        out,
        lse,
        *plan,
        thresholds,
        kept,
        skipped,
        *averages,
        words,
        tokens,
        blocks,
        chunks,
        0 if means is None else means.groups,
        0 if means is None else means.counts.shape[-1],
        batch * heads,
        together,
        items,
        whole,
        parts,
        scale * LOG2_E.value,
    )
    sizes = Sizes(
        dim=dim,
        padded=padded,
        rows=rows,
        keys=keys,
        step=c.step,
        q_run=1 if quantized is None else quantized.q_run,
        k_run=1 if quantized is None else quantized.k_run,
        gate=gate_kind(gate),
        gate_rows=BLOCK_ROWS if gate is None else gate.rows,
        gate_keys=c.step if gate is None else gate.keys,
        stages=c.stages,
        consumer_registers=c.consumer_registers,
        producer_registers=c.producer_registers,
        producer_warps=1 if keys >= 8 else 4,
        launch="first" if is_anchored(gate, dtype) else None,
        beside=beside,
    )
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(q):
        grid = (min(programs, items), 1, 1)
        _launch(grid, operands, sizes)
        if parts > 1:
            rows_at_once = 1024 // padded
            join_parts_kernel[(total - whole, BLOCK_ROWS // rows_at_once)](
                out,
                lse,
                plan[-1],
                plan[0],
                tokens,
                blocks,
                batch * heads,
                together,
                whole,
                parts,
                scale,
                D=dim,
                DP=padded,
                M=rows,
                MOST=triton.next_power_of_2(parts),
                ROWS=rows_at_once,
                BESIDE=beside,
                num_warps=4,
            )
    lse = lse[:all_rows].view(batch, heads, tokens)
    if beside:
        return out[:all_rows].view(1, tokens, heads, dim).transpose(1, 2), lse
    return out[:all_rows].view(q.shape), lse


def try_out(device: torch.device) -> None:
    """Attend a block by both launches, to see whether this Triton compiles the kernel.

    Twice, because the second call launches a second time without looking at the arguments.
    """
    x = torch.zeros(1, 1, BLOCK_ROWS, 64, dtype=torch.bfloat16, device=device)
    nought = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    tile = (BLOCK_ROWS, KEY_GROUP)
    for _ in range(2):
        gluon_attention(x, x, x, nought, nought[..., 0] + 1, nought, tile=tile, scale=1.0)
