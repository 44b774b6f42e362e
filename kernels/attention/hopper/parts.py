"""The second kernel, which joins the parts of blocks that were cut.

A part's rows and log-sum-exps are written behind those of all heads.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .schedule import locate, tile_of


@gluon.jit
def join_parts_kernel(
    out_ptr,
    lse_ptr,
    shift_ptr,
    q_tiles_ptr,
    S,
    G,
    BH,
    TOGETHER,
    WHOLE,
    PARTS,
    scale,
    D: gl.constexpr,
    DP: gl.constexpr,
    M: gl.constexpr,
    MOST: gl.constexpr,
    ROWS: gl.constexpr,
    BESIDE: gl.constexpr,
):
    """Weigh the at most MOST parts of ROWS rows of a block by their log-sum-exps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [MOST, 1, 8], [1, 256 // DP, DP // 8], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    PAIR: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, PAIR)
    head, block = locate(WHOLE + gl.program_id(0), G, BH, TOGETHER)
    place = gl.program_id(1) * ROWS + gl.arange(0, ROWS, BY_ROW)
    tile = tile_of(q_tiles_ptr, block, place, G, M)
    row = tile * M + place % M
    alive = (tile >= 0) & (row < S)
    part = gl.arange(0, MOST, gl.SliceLayout(1, PAIR))
    column = gl.arange(0, DP, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    spare = (BH * S + (gl.program_id(0) * PARTS + part) * 128).to(gl.int64)
    spare = spare[:, None] + place[None, :]
    there = (part < PARTS)[:, None] & alive[None, :]
    lse = gl.load(lse_ptr + spare, mask=there, other=-float("inf"))
    pointers = out_ptr + (spare * D)[:, :, None] + column[None, None, :]
    inside = there[:, :, None] & (column < D)[None, None, :]
    parts = gl.load(pointers, mask=inside, other=0.0).to(gl.float32)
    top = gl.max(lse, 0)
    # a row without keys, of zeros in every part.
    top = gl.where(top == -float("inf"), 0.0, top)
    weight = gl.exp(lse - top[None, :])
    total = gl.sum(weight, 0)
    out = gl.sum(parts * (weight / gl.where(total > 0, total, 1.0)[None, :])[:, :, None], 0)
    token = head.to(gl.int64) * S + row
    BY_OUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    place_out = token
    if BESIDE:
        place_out = row.to(gl.int64) * BH + head
    to = gl.convert_layout(place_out * D, gl.SliceLayout(1, BY_OUT))[:, None]
    of_row = gl.convert_layout(alive, gl.SliceLayout(1, BY_OUT))[:, None]
    column = gl.arange(0, DP, gl.SliceLayout(0, BY_OUT))[None, :]
    gl.store(out_ptr + to + column, out.to(out_ptr.dtype.element_ty), mask=of_row & (column < D))
    joined = top + gl.log(total)
    if shift_ptr is not None:
        joined += gl.load(shift_ptr + token, mask=alive, other=0.0) * scale
    gl.store(lse_ptr + token, gl.where(total > 0, joined, -float("inf")), mask=alive)
