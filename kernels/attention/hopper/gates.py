"""Weights of a step's scores with a gate: which pieces of them reach the product with V.

A gate is decided by votes of a consumer's warps (of both consumers' for 128 rows): an absolute one
before the exponentials, a relative one after them. The product with the values is a step late
anyway, and is left out where no piece is open.
"""

# what triton compiles is not typed python: both branches of a static `if` return.
# ruff: noqa: RET505, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import by_run, first_two, load_scalar, row_vector, scales_of_runs
from .means import times_counts
from .ptx import BEHIND, exp2, meet
from .softmax import mask_keys, row_sums, scaled_sums


@gluon.jit
def _piece_maxima(scores, k_scale, PIECES: gl.constexpr):
    """Largest score of each row and piece ``[rows, PIECES]``, of what ``by_run`` gives."""
    rows: gl.constexpr = scores.shape[0]
    runs: gl.constexpr = scores.shape[1]
    largest = gl.max(gl.max(scores, 4), 2)[:, :, None, :, None]
    if k_scale is not None:
        largest = largest * k_scale
    largest = largest.reshape([rows, PIECES, runs // PIECES, 4])
    return gl.max(gl.max(largest, 2), 2)


@gluon.jit
def _scaled(scores, row_scale, k_scale_memory, PIECES: gl.constexpr):
    """Scores as ``by_run`` gives them, the factor of each, and the largest ``[rows, PIECES]``.

    ``row_scale`` is one number or one of each row.
    """
    SCORES: gl.constexpr = scores.type.layout
    BN: gl.constexpr = scores.shape[1]
    # one scale a column is no run.
    COLUMNS: gl.constexpr = k_scale_memory is not None and k_scale_memory.shape[0] > BN // 8
    RUNS: gl.constexpr = k_scale_memory is not None and not COLUMNS
    if COLUMNS:
        scores = scores * k_scale_memory.load(gl.SliceLayout(0, SCORES))[None, :]
    scores = by_run(scores, k_scale_memory.shape[0] if RUNS else PIECES)
    k_scale = None
    if RUNS:
        k_scale = scales_of_runs(k_scale_memory, scores)
    largest = _piece_maxima(scores, k_scale, PIECES)
    if len(row_scale.shape) == 0:
        factor = row_scale
        largest = largest * row_scale
    else:
        factor = row_vector(row_scale, scores)
        largest = largest * row_vector(row_scale, largest)
    if RUNS:
        factor = factor * k_scale
    return scores, factor, largest


@gluon.jit
def _below_running(largest, largest_yet, first):
    """Largest scores of pieces less the running maximum, and that with this step in it.

    The running maximum of a piece holds the piece itself and those before it.
    """
    BY_ROW: gl.constexpr = gl.SliceLayout(1, largest.type.layout)
    yet = gl.convert_layout(gl.where(first, -1.0e30, largest_yet), BY_ROW)
    if largest.shape[1] == 2:
        earlier, later = gl.split(largest)
        before = gl.maximum(gl.convert_layout(earlier, BY_ROW), yet)
        after = gl.maximum(gl.convert_layout(later, BY_ROW), before)
        piece = gl.arange(0, 2, gl.SliceLayout(0, largest.type.layout))
        below = largest - gl.where(piece[None, :] == 0, before[:, None], after[:, None])
    else:
        after = gl.maximum(gl.max(largest, 1), yet)
        below = largest - after[:, None]
    return below, gl.convert_layout(after, largest_yet.type.layout)


@gluon.jit
def _vote(largest, threshold, votes, slot, GATE_ROWS: gl.constexpr):
    """Note for each warp in which pieces of its rows a row reaches its threshold.

    Bit ``i * PIECES + p`` is of a consumer's rows ``i * GATE_ROWS`` on and piece ``p`` of the keys.
    """
    rows: gl.constexpr = largest.shape[0]
    PIECES: gl.constexpr = largest.shape[1]
    LAYOUT: gl.constexpr = largest.type.layout
    row = gl.arange(0, rows, gl.SliceLayout(1, LAYOUT))
    piece = gl.arange(0, PIECES, gl.SliceLayout(0, LAYOUT))
    bit = 1 << ((row // GATE_ROWS * PIECES)[:, None] + piece[None, :])
    # the threshold of a row without a token is NaN, which nothing reaches.
    limit = gl.convert_layout(threshold, gl.SliceLayout(1, LAYOUT))
    bits = gl.reduce_or(gl.where(largest >= limit[:, None], bit, 0), 1)
    votes.index(slot).store(gl.reduce_or(bits.reshape([4, rows // 4]), 1))


@gluon.jit
def count_votes(votes, slot, GATE_ROWS: gl.constexpr):
    """The bits that a warp of the consumer has voted for, or of either consumer."""
    ALL: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    bits = gl.reduce_or(votes.index(slot).load(ALL), 0)
    if GATE_ROWS == 128:
        bits = bits | gl.reduce_or(votes.index(slot ^ 1).load(ALL), 0)
    return bits


@gluon.jit
def is_open(bits, like, PIECES: gl.constexpr, GATE_ROWS: gl.constexpr):
    """Which pieces, runs or columns of each row are open: the second dimension of ``like``."""
    rows: gl.constexpr = like.shape[0]
    runs: gl.constexpr = like.shape[1]
    PAIR: gl.constexpr = first_two(like.type.layout, len(like.shape))
    row = gl.arange(0, rows, gl.SliceLayout(1, PAIR)) // GATE_ROWS * PIECES
    piece = gl.arange(0, runs, gl.SliceLayout(0, PAIR)) // (runs // PIECES)
    opens = ((bits >> (row[:, None] + piece[None, :])) & 1) != 0
    if len(like.shape) == 2:
        return opens
    else:
        return opens[:, :, None, None, None]


@gluon.jit
def count_skipped(
    skipped, threshold, bits, keys, BN: gl.constexpr, PIECES: gl.constexpr, GATE_ROWS: gl.constexpr
):  # fmt: skip
    """``skipped`` of each row, and the keys of this step's closed pieces."""
    row = gl.arange(0, skipped.shape[0], skipped.type.layout) // GATE_ROWS * PIECES
    # only a row that holds a token has a threshold.
    alive = threshold == threshold
    for p in gl.static_range(PIECES):
        there = gl.minimum(gl.maximum(keys - p * (BN // PIECES), 0), BN // PIECES)
        closed = ((bits >> (row + p)) & 1) == 0
        skipped = skipped + gl.where(closed & alive, there, 0)
    return skipped


@gluon.jit
def _weighed(
    scores, factor, subtracted, sums, rescale, counts_memory, averaged, SCORES: gl.constexpr
):  # fmt: skip
    """Weights ``[rows, keys]`` of scores as ``by_run`` gives them, and the sums with them."""
    rows: gl.constexpr = scores.shape[0]
    keys: gl.constexpr = scores.shape[1] * scores.shape[2] * 8
    fresh = exp2(scores * factor - subtracted)
    if counts_memory is not None:
        if averaged:
            fresh = times_counts(fresh, counts_memory, SCORES)
    fresh = gl.convert_layout(fresh.reshape([rows, keys]), SCORES)
    new_sums = scaled_sums(sums, rescale)
    new_sums += row_sums(fresh)
    return fresh, new_sums


@gluon.jit
def soften_gated(
    scores,
    first,
    keys,
    row_max,
    sums,
    row_scale,
    k_scale_memory,
    kept_memory,
    votes,
    slot,
    threshold,
    largest_yet,
    counts_memory,
    averaged,
    dtype: gl.constexpr,
    WEIGHTS: gl.constexpr,
    GATE: gl.constexpr,
    GATE_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
):
    """``soften`` with a gate, which leaves means alone.

    The last answer is the running maximum of the rows, or an absolute gate's bits of open pieces.
    """
    SCORES: gl.constexpr = scores.type.layout
    if first:
        scores = mask_keys(scores, keys)
    if counts_memory is not None:
        # means are open to all rows that hold a token; the others' threshold is NaN.
        threshold = gl.where(averaged & (threshold == threshold), -float("inf"), threshold)
    old_max = gl.where(first, -1.0e30, row_max)
    scores, factor, largest = _scaled(scores, row_scale, k_scale_memory, PIECES)
    if GATE == "absolute":
        _vote(largest, threshold, votes, slot, GATE_ROWS)
        if GATE_ROWS == 128:
            meet()
        gated = count_votes(votes, slot, GATE_ROWS)
        if kept_memory is not None:
            kept = load_scalar(kept_memory)
            gated = gated | kept
            if GATE_ROWS == 32:
                gated = gated | (kept << PIECES)
        # what is skipped enters neither maximum nor sum.
        opens = is_open(gated, largest, PIECES, GATE_ROWS)
        largest = gl.where(opens, largest, -float("inf"))
    else:
        below, gated = _below_running(largest, largest_yet, first)
        _vote(below, threshold, votes, slot, GATE_ROWS)
    step_max = gl.convert_layout(gl.max(largest, 1), row_max.type.layout)
    new_max = gl.where(step_max > old_max + BEHIND, step_max, old_max)
    rescale = exp2(old_max - new_max)
    subtracted = row_vector(new_max, scores)
    if GATE == "absolute":
        opens = is_open(gated, scores, PIECES, GATE_ROWS)
        subtracted = gl.where(opens, subtracted, float("inf"))
    fresh, new_sums = _weighed(
        scores, factor, subtracted, gl.where(first, 0.0, sums), rescale, counts_memory, averaged,
        SCORES,
    )  # fmt: skip
    return gl.convert_layout(fresh.to(dtype), WEIGHTS), new_max, rescale, new_sums, gated
