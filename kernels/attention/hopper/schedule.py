"""Which block comes next: the order of blocks, and how those of the last round are cut.

Blocks that are too many for full rounds of all programs are cut into parts of their lists, if that
is worth it, so that the last round is a short one. With a gate all blocks stay whole: a relative
one goes by the maximum of what stands before in a list.
"""

# what triton compiles is not typed python: both branches of a static `if` return.
# ruff: noqa: RET505
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# what a part takes beyond its own steps, and what joining parts takes, both in steps.
PART_COST = 1.5
JOIN_COST = 4.0
MOST_PARTS = 8
LEAST_STEPS = 4
# with less to win, measured calls were as often slower as faster.
LEAST_GAIN = 0.01
# how many of all chunks the lists hold is known to the GPU alone. With more than this share cutting
# wins more than is thought here; with less a few percent may be lost.
LEAST_SHARE = 0.15


def split_tail(blocks: int, programs: int, steps: int, most: int = MOST_PARTS) -> tuple[int, int]:
    """How many blocks of ``steps`` steps to leave whole, and parts to cut each of the others into.

    Equal blocks that do not fill the last round of ``programs`` leave most of the GPU waiting for
    a few of them: 4,096 blocks take 132 programs as long as 4,224.
    """
    rounds, rest = divmod(blocks, programs)
    if rest == 0:
        return blocks, 1
    found, least = (blocks, 1), (rounds + 1) * steps * (1 - LEAST_GAIN)
    for parts in range(2, min(MOST_PARTS, most, steps // LEAST_STEPS) + 1):
        last = -(-rest * parts // programs) * (steps / parts + PART_COST)
        if (time := rounds * steps + last + JOIN_COST) < least:
            found, least = (blocks - rest, parts), time
    return found


@gluon.jit
def locate(entry, G, BH, TOGETHER):
    """Head and block of the ``entry``-th block in the order of work.

    TOGETHER heads are worked on at a time, longest blocks first: few enough that their keys and
    values stay in L2.
    """
    group = entry // (TOGETHER * G)
    start = group * TOGETHER
    heads = gl.minimum(BH - start, TOGETHER)
    rank = entry - start * G
    head = start + rank % heads
    return head, head * G + rank // heads


@gluon.jit
def tile_of(q_tiles_ptr, block, place, G, M: gl.constexpr):
    """Query tiles of ``place``, rows of a block, -1 for none; without lists a block is a tile."""
    if q_tiles_ptr is None:
        return block % G + place * 0
    else:
        return gl.load(q_tiles_ptr + block.to(gl.int64) * (128 // M) + place // M)


@gluon.jit
def part_of(item, work):
    """Place of an item's block in the order of work, which part it is and of how many.

    The first WHOLE items are blocks, the others parts of the blocks behind them.
    """
    beyond = gl.maximum(item - work.WHOLE, 0)
    whole = item < work.WHOLE
    entry = gl.where(whole, item, work.WHOLE + beyond // work.PARTS)
    return entry, gl.where(whole, 0, beyond % work.PARTS), gl.where(whole, 1, work.PARTS)


@gluon.jit
def block_of(item, work):
    """Number of an item's block among those of all heads."""
    entry, _, _ = part_of(item, work)
    _, block = locate(entry, work.G, work.BH, work.TOGETHER)
    return block


@gluon.jit
def next_noted(item, noted_ptr, counter_ptr, work):
    """``item``, or the next one whose block is noted."""
    passing = item < work.ITEMS
    while passing:
        block = block_of(item, work)
        passing = gl.load(noted_ptr + 1 + block) == 0
        if passing:
            item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
            passing = item < work.ITEMS
    return item
