"""What the partitions of a program are given, grouped.

``Sizes`` is what a variant of the kernel is compiled for, one constexpr. The other groups are made
in the kernel of its arguments and of the program's shared memory; what a call does without is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Sizes:
    """What is known when the kernel is compiled.

    Args:
        dim: of heads.
        padded: columns of a row in shared memory, 64 or 128.
        rows: of a query tile.
        keys: of a key chunk.
        step: keys that a consumer multiplies at a time.
        q_run: rows that share a scale, of 8 bits.
        k_run: keys that share a scale, of 8 bits.
        gate: ``relative``, ``absolute`` or None.
        gate_rows: rows that a gate's vote joins.
        gate_keys: keys that a gate's vote joins.
        stages: of the ring of keys and values.
        consumer_registers: of a thread of each consumer.
        producer_registers: of a thread of the producer.
        producer_warps: of the producer, 1 or 4.
        launch: ``first`` or ``second``, or None where no block can need a second launch.
        beside: whether a token's heads lie beside each other in the output, of one sample.
    """

    dim: int
    padded: int
    rows: int
    keys: int
    step: int
    q_run: int
    k_run: int
    gate: str | None
    gate_rows: int
    gate_keys: int
    stages: int
    consumer_registers: int
    producer_registers: int
    producer_warps: int
    launch: str | None
    beside: bool


class Inputs(NamedTuple):
    """Queries, keys and values, boxes to read them by, and scales of 8 bits."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    k_mean_desc: Any
    v_mean_desc: Any
    k_ptr: Any
    v_ptr: Any
    k_mean_ptr: Any
    v_mean_ptr: Any
    q_scale_ptr: Any
    k_scale_ptr: Any
    k_mean_scale_ptr: Any


class BlockLists(NamedTuple):
    """What each block attends and how: its tiles, chunks, counts of means, and a gate's numbers.

    ``shift_ptr`` has what the mean key, which 8-bit keys lack, adds to a row's scores.
    ``words_ptr`` has an item counter for each launch, a word that says whether any block is to be
    attended again, and one for each block.
    """

    q_tiles_ptr: Any
    kv_count_ptr: Any
    kv_index_ptr: Any
    counts_ptr: Any
    kept_ptr: Any
    threshold_ptr: Any
    shift_ptr: Any
    words_ptr: Any


class Outputs(NamedTuple):
    """Rows, their log-sum-exps, and how many pairs a gate skipped."""

    out_ptr: Any
    lse_ptr: Any
    skipped_ptr: Any


class Lengths(NamedTuple):
    """Tokens, chunks and means of a row of their tables, and what scores are multiplied with."""

    S: Any
    C: Any
    P: Any
    COUNTS: Any
    scale_log2: Any


class BlockShares(NamedTuple):
    """Blocks of a head, all heads, and how the programs share them: see ``schedule``."""

    G: Any
    BH: Any
    TOGETHER: Any
    ITEMS: Any
    WHOLE: Any
    PARTS: Any


class Pieces(NamedTuple):
    """Shared memory as the producer fills it, box by box."""

    q: Any
    k: Any
    v: Any
    rows: Any
    q_rows: Any


class Stages(NamedTuple):
    """Shared memory as consumers read it, step by step."""

    q: Any
    k: Any
    v: Any
    votes: Any


class Tables(NamedTuple):
    """Numbers in shared memory: a block's record, scales and thresholds, and those of a stage."""

    record: Any
    row_scales: Any
    thresholds: Any
    k_scales: Any
    kept_words: Any
    counts: Any


class Barriers(NamedTuple):
    """Of stages and of queries, for what is there and for what may be overwritten."""

    full: Any
    empty: Any
    q_full: Any
    q_empty: Any
