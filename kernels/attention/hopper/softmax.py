"""Weights of a step's scores without a gate, and what the rows carry from step to step.

A row's weights are powers of its scores less an anchor. In fp16 that is a running maximum. bf16 has
the exponents of fp32, so the largest score of a block's first step serves for all steps, which then
look for no maxima and rescale nothing. What comes out is right unless it left fp32's range, which
is seen when a block is stored. Such blocks are noted, and a second launch attends them again with
running maxima. It finds none where later scores are no more than 70 above the first ones and values
are of ordinary size.
"""

# what triton compiles is not typed python: static and dynamic conditions stay apart.
# ruff: noqa: SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-redef"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import by_run, first_two, thread_vector
from .means import times_counts, with_counts
from .ptx import MASKED_INTEGER, OFFSET_OF_INTEGERS, as_float, exp2, raised


@gluon.jit
def mask_keys(scores, keys):
    """Set columns from ``keys`` on to minus infinity (integers: to what is converted to it)."""
    # the zero is opaque: known before the loop, the columns would be kept in 32 registers over it.
    zero = gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout)) + zero
    masked: gl.constexpr = MASKED_INTEGER if scores.dtype.is_int() else -float("inf")
    return gl.where((column < keys)[None, :], scores, masked)


@gluon.jit
def row_sums(weights):
    """Sums of a row, of which each of the four threads that share it keeps its own."""
    rows: gl.constexpr = weights.shape[0]
    keys: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([rows, keys // 8, 4, 2]), 3), 1)


@gluon.jit
def scaled_sums(sums, rescale):
    """``row_sums`` times a factor for each row."""
    layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    return sums * gl.convert_layout(rescale, layout)[:, None]


@gluon.jit
def _sums_of(fresh, like):
    """What each thread holds of its rows, summed."""
    return gl.convert_layout(gl.sum(gl.sum(gl.sum(fresh, 4), 2), 1), like.type.layout)


@gluon.jit
def _raise_anchor(scores, factor, old_max, sums, one):
    """Rows' maxima with these scores in them, what that lowers weights by, and lowered sums."""
    largest = gl.max(gl.max(scores, 4), 2)
    if scores.dtype.is_int():
        largest = as_float(largest, one) - OFFSET_OF_INTEGERS
    if len(factor.shape) > 0:
        factor = factor.reshape(factor.shape[0], factor.shape[1])
        factor = gl.convert_layout(factor, gl.SliceLayout(2, largest.type.layout))[:, :, None]
    largest = gl.convert_layout(gl.max(largest * factor, 1), old_max.type.layout)
    new_max = raised(largest, old_max)
    rescale = exp2(old_max - new_max)
    return new_max, rescale, sums * rescale


@gluon.jit
def _weights_of(
    scores, first, row_max, sums, row_scale, k_scale, one, counts_memory, averaged,
    SCORES: gl.constexpr, ANCHORED: gl.constexpr,
):  # fmt: skip
    """Weights of a step's keys as ``by_run`` gives them, and what their rows carry on.

    If ANCHORED, ``row_max`` is the first step's for all steps, and the third answer says nothing.
    """
    INTEGERS: gl.constexpr = scores.dtype.is_int()
    scores = by_run(scores, 1 if k_scale is None else k_scale.shape[0])
    factor = row_scale
    if len(row_scale.shape) > 0:
        PAIR: gl.constexpr = first_two(scores.type.layout, 5)
        scale = gl.convert_layout(row_scale, gl.SliceLayout(1, PAIR))[:, None]
        if k_scale is not None:
            scale = scale * gl.convert_layout(k_scale, gl.SliceLayout(0, PAIR))[None, :]
        factor = scale[:, :, None, None, None]
    rescale = row_max
    row_max = gl.where(first, -1.0e30, row_max)
    sums = gl.where(first, 0.0, sums)
    if ANCHORED:
        raises = first
    else:
        raises: gl.constexpr = True
    if raises:
        row_max, rescale, sums = _raise_anchor(scores, factor, row_max, sums, one)
    subtracted = thread_vector(row_max, scores)
    if INTEGERS:
        # behind the branch in which maxima are raised, where the exponentials leave time for it.
        scores = as_float(scores, one)
        subtracted = subtracted + factor * OFFSET_OF_INTEGERS
    fresh = exp2(scores * factor - subtracted)
    if counts_memory is not None:
        if averaged:
            fresh = times_counts(fresh, counts_memory, SCORES)
    return fresh, row_max, rescale, sums + _sums_of(fresh, sums)


@gluon.jit
def soften(
    scores, first, keys, row_max, sums, row_scale, k_scale, one, counts_memory, averaged,
    dtype: gl.constexpr, WEIGHTS: gl.constexpr, ANCHORED: gl.constexpr,
):  # fmt: skip
    """Weights of a step's scores, and what its rows carry on.

    ``k_scale`` are those of runs, or of columns, or None. If ``averaged``, the keys are means.
    """
    SCORES: gl.constexpr = scores.type.layout
    rows: gl.constexpr = scores.shape[0]
    keys_at_once: gl.constexpr = scores.shape[1]
    # no branch but this one stands between the products and the exponentials.
    RAISED: gl.constexpr = (
        counts_memory is not None and k_scale is None and not scores.dtype.is_int()
    )
    special = first
    if RAISED:
        special = first | averaged
    if special:
        if RAISED:
            if averaged:
                scores = with_counts(scores, counts_memory, row_scale)
            else:
                scores = mask_keys(scores, keys)
        else:
            scores = mask_keys(scores, keys)
    # one scale a column is no run.
    COLUMNS: gl.constexpr = k_scale is not None and k_scale.shape[0] > keys_at_once // 8
    if COLUMNS:
        if scores.dtype.is_int():
            scores = as_float(scores, one) - OFFSET_OF_INTEGERS
        scores = scores * k_scale[None, :]
        k_scale = None
    fresh, new_max, rescale, sums = _weights_of(
        scores, first, row_max, sums, row_scale, k_scale, one,
        None if RAISED else counts_memory, averaged, SCORES, ANCHORED,
    )  # fmt: skip
    fresh = gl.convert_layout(fresh.reshape([rows, keys_at_once]), SCORES)
    return gl.convert_layout(fresh.to(dtype), WEIGHTS), new_max, rescale, sums
