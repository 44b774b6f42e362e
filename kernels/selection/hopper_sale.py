"""SALE's selection pass for Hopper: three consumers that compare, one producer that loads keys.

Shape legend: B batch, H heads, S tokens, M x N tile, Tq query tiles, W words of a row of the mask,
DP head dim rounded up to a power of two, X columns of the second product; a step is BN keys.

``triton_sale`` computes the same. There every program loads all keys of its head for 128 rows, and
L2 delivers no more; here a program has 384 rows, 128 for each consumer, which share the keys of
a step in shared memory. The two products of a step follow each other in the tensor cores without a
wait between them, while the other consumers look at their sums.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-redef"

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..hopper_ring import next_stage, plain, tma_load
from .sale_factors import block_d

ROWS = 128
KEYS = 128
STAGES = 7
# warpgroups of a program beside the producer's, as many as the sums of 128 x 128 leave room for.
CONSUMERS = 3
CONSUMER_REGISTERS = 160
PRODUCER_REGISTERS = 24


@triton.constexpr_function
def _of_tiles(layout):
    """Layout of the third of four dimensions of a tensor in ``layout``."""
    return gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))


@gluon.jit
def _passing(sums, N: gl.constexpr):
    """Bits of the key tiles in which an element that a thread holds is not negative.

    Of ``sums`` ``[rows, keys]``, for runs of 16 rows and the 32 threads that hold such a run:
    int32 ``[rows / 16, 8, 4]``.
    """
    TILES: gl.constexpr = sums.shape[1] // N
    best = sums.reshape([sums.shape[0] // 16, 2, 8, TILES, N // 8, 4, 2])
    best = gl.max(gl.max(gl.max(best, 6), 4), 1)
    bit = 1 << gl.arange(0, TILES, _of_tiles(best.type.layout))
    return gl.sum(gl.where(best >= 0, bit[None, None, :, None], 0), 2)


@gluon.jit
def _compare(
    q_memory,
    q_extra_memory,
    k_stages,
    k_extra_stages,
    barriers,
    words_ptr,
    head,
    start,
    STEPS,
    TQ,
    W,
    WHICH_: gl.constexpr,
    M_: gl.constexpr,
    N_: gl.constexpr,
):
    WHICH: gl.constexpr = plain(WHICH_)
    M: gl.constexpr = plain(M_)
    N: gl.constexpr = plain(N_)
    STAGES: gl.constexpr = k_stages.shape[0]
    ROWS: gl.constexpr = q_memory.shape[1]
    BN: gl.constexpr = k_stages.shape[1]
    TILES: gl.constexpr = BN // N
    full, empty, q_full = barriers
    # one layout of the sums, but each product's instruction has its own name for it.
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    EXTRA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    q = q_memory.index(WHICH)
    q_extra = q_extra_memory.index(WHICH)
    nothing = gl.full([ROWS, BN], 0.0, gl.float32, SUMS)
    nobody = _passing(nothing - 1.0, N)
    seen = nobody
    tiles = start // M + WHICH * (ROWS // M)
    stage = 0
    phase = 0
    mbarrier.wait(q_full, 0)
    for step in range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        k = k_stages.index(stage).permute((1, 0))
        k_extra = k_extra_stages.index(stage).permute((1, 0))
        sums = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
        # waits for nothing: one product may be under way. The next takes its sums over in the
        # tensor cores, which PTX orders by the fence between products of two shapes.
        sums = gl.convert_layout(warpgroup_mma_wait(1, deps=[sums]), EXTRA)
        sums = warpgroup_mma(q_extra, k_extra, sums, is_async=True)
        sums = gl.convert_layout(warpgroup_mma_wait(0, deps=[sums]), SUMS)
        mbarrier.arrive(empty.index(stage))
        seen = seen | (_passing(sums, N) << (step * TILES % 32))
        stage, phase = next_stage(stage, phase, STAGES)
        if ((step + 1) * TILES % 32 == 0) | (step + 1 == STEPS):
            found = gl.reduce_or(seen.reshape([ROWS // M, M * 2]), 1)
            tile = tiles + gl.arange(0, ROWS // M, found.type.layout)
            word = step * TILES // 32
            place = (head.to(gl.int64) * TQ + tile) * W + word
            gl.store(words_ptr + place, found, mask=(tile < TQ) & (word < W))
            seen = nobody


@gluon.jit
def _load(
    q_desc,
    k_desc,
    q_extra_desc,
    k_extra_desc,
    q_memory,
    q_extra_memory,
    k_stages,
    k_extra_stages,
    barriers,
    head,
    start,
    S,
    STEPS,
    PADDED_ROWS,
):
    STAGES: gl.constexpr = k_stages.shape[0]
    BN: gl.constexpr = k_stages.shape[1]
    CONSUMERS: gl.constexpr = q_memory.shape[0]
    ROWS: gl.constexpr = q_memory.shape[1]
    # bytes of a row or key: 8-bit numbers and 16-bit factors.
    BYTES: gl.constexpr = q_memory.shape[2] + 2 * q_extra_memory.shape[2]
    full, empty, q_full = barriers
    mbarrier.expect(q_full, CONSUMERS * ROWS * BYTES)
    for i in gl.static_range(CONSUMERS):
        row = start + i * ROWS
        tma_load(q_desc, [head * S + row, 0], q_full, q_memory.index(i))
        tma_load(q_extra_desc, [head * PADDED_ROWS + row, 0], q_full, q_extra_memory.index(i))
    stage = 0
    phase = 0
    for step in range(STEPS):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, BN * BYTES)
        tma_load(k_desc, [head * S + step * BN, 0], bar, k_stages.index(stage))
        k_extra = k_extra_stages.index(stage)
        tma_load(k_extra_desc, [(head * STEPS + step) * BN, 0], bar, k_extra)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def sale_kernel(
    q_desc,
    k_desc,
    q_extra_desc,
    k_extra_desc,
    words_ptr,
    S,
    TQ,
    W,
    M: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    """The words of CONSUMERS blocks of rows.

    Rows and keys past a head's last are the next head's, or zeros: their factors let nothing pass,
    and no tile past the last is stored.
    """
    ROWS: gl.constexpr = q_desc.block_type.shape[0]
    BN: gl.constexpr = k_desc.block_type.shape[0]
    DP: gl.constexpr = q_desc.block_type.shape[1]
    X: gl.constexpr = q_extra_desc.block_type.shape[1]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_memory = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, DP], q_desc.layout)
    k_stages = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, DP], k_desc.layout)
    q_extra_memory = gl.allocate_shared_memory(
        q_extra_desc.dtype, [CONSUMERS, ROWS, X], q_extra_desc.layout
    )
    k_extra_stages = gl.allocate_shared_memory(
        k_extra_desc.dtype, [STAGES, BN, X], k_extra_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    mbarrier.init(q_full, count=1)
    barriers = (full, empty, q_full)
    # a head's programs run together: its keys then stay in L2.
    blocks = (S + CONSUMERS * ROWS - 1) // (CONSUMERS * ROWS)
    head = gl.program_id(0) // blocks
    start = gl.program_id(0) % blocks * (CONSUMERS * ROWS)
    steps = (S + BN - 1) // BN
    # the argument tuples stand in the call: assigned to a variable, constexprs become tensors.
    gl.warp_specialize(
        [
            (
                _compare,
                (
                    q_memory, q_extra_memory, k_stages, k_extra_stages, barriers, words_ptr, head,
                    start, steps, TQ, W, gl.constexpr(0), M, N,
                ),
            ),
            (
                _compare,
                (
                    q_memory, q_extra_memory, k_stages, k_extra_stages, barriers, words_ptr, head,
                    start, steps, TQ, W, gl.constexpr(1), M, N,
                ),
            ),
            (
                _compare,
                (
                    q_memory, q_extra_memory, k_stages, k_extra_stages, barriers, words_ptr, head,
                    start, steps, TQ, W, gl.constexpr(2), M, N,
                ),
            ),
            (
                _load,
                (
                    q_desc, k_desc, q_extra_desc, k_extra_desc, q_memory, q_extra_memory, k_stages,
                    k_extra_stages, barriers, head, start, S, steps, TQ * M,
                ),
            ),
        ],
        [4, 4, 1],
        [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


def layouts(padded_dim: int, extra: int) -> tuple[gl.NVMMASharedLayout, gl.NVMMASharedLayout]:
    """How boxes of 8-bit numbers and of ``extra`` factors lie in shared memory."""
    return (
        gl.NVMMASharedLayout(padded_dim, 8, rank=2),
        gl.NVMMASharedLayout(2 * extra, 16, rank=2),
    )


def gluon_sale(
    q: Tensor, k: Tensor, q_extra: Tensor, k_extra: Tensor, words: Tensor, *, tile: tuple[int, int]
) -> None:
    """Fill ``words`` with the tiles in which an element passes.

    Args:
        q: 4-bit queries in fp8 ``[B, H, S, D]``.
        k: 4-bit keys, likewise.
        q_extra: the rows' factors of the second product, bf16 ``[B, H, Tq * M, X]``.
        k_extra: the keys', ``[B, H, S padded to whole steps, X]``.
        words: int32 ``[B, H, Tq, W]``.
        tile: (M, N), from (16, 8) to (128, 128).
    """
    batch, heads, tokens, dim = q.shape
    assert k_extra.shape[2] == triton.cdiv(tokens, KEYS) * KEYS
    assert q_extra.shape[2] == words.shape[2] * tile[0]
    padded, extra = block_d(dim), q_extra.shape[-1]
    eight_bits, factors = layouts(padded, extra)
    operands = (
        (q, ROWS, padded, eight_bits),
        (k, KEYS, padded, eight_bits),
        (q_extra, ROWS, extra, factors),
        (k_extra, KEYS, extra, factors),
    )
    with torch.cuda.device_of(q):
        sale_kernel[(batch * heads * triton.cdiv(tokens, CONSUMERS * ROWS),)](
            *(
                TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [rows, columns], layout)
                for x, rows, columns, layout in operands
            ),
            words,
            tokens,
            words.shape[2],
            words.shape[3],
            M=tile[0],
            N=tile[1],
            STAGES=STAGES,
            CONSUMERS=CONSUMERS,
            CONSUMER_REGS=CONSUMER_REGISTERS,
            PRODUCER_REGS=PRODUCER_REGISTERS,
            num_warps=4,
        )


def try_out(device: torch.device) -> None:
    """Compare a block, to see whether this Triton compiles the kernel."""
    x = torch.zeros(1, 1, ROWS, 64, dtype=torch.float8_e4m3fn, device=device)
    factors = torch.zeros(1, 1, ROWS, 16, dtype=torch.bfloat16, device=device)
    words = torch.zeros(1, 1, ROWS // 64, 1, dtype=torch.int32, device=device)
    gluon_sale(x, x, factors, factors, words, tile=(64, 32))
