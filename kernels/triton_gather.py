"""The `triton` implementation: one pointer-gather kernel for every GPU that Triton compiles for.

Shape legend: B batch, H heads, S tokens, D head dim, M query rows of a tile, N keys of a chunk,
G blocks of 128 query rows, R = 128 / M tiles of a block, C longest key list.
Names: ``off_*`` offsets, ``*_ptr`` pointers, ``stride_*`` strides, ``BLOCK_*`` constants.

A program owns one block of 128 query rows. Its key list is read as one run of ``count * N`` tokens
in steps of BLOCK_N; only the last step can hold dead tokens, so it goes first, masked, and the loop
over the others carries no mask. Blocks start longest first over all heads.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# 8 warps and 2 stages kept the most on an H200 (BENCHMARKS.md); with 128 keys a step two stages
# of keys and values and the queries want 160 KiB of shared memory at D = 128.
WARPS = 8
STAGES = 2
BLOCK_N_LARGE = 128
BLOCK_N_SMALL = 64
LARGE_SHARED_BYTES = 163 * 1024

LOG2_E = 1.4426950408889634


@triton.jit
def _step(q, k, v, acc, row_sum, row_max, alive, scale_log2, MASKED: tl.constexpr):
    scores = tl.dot(q, k) * scale_log2
    if MASKED:
        scores = tl.where(alive[None, :], scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
    return acc, row_sum, new_max


@triton.jit
def gather_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_tiles_ptr,
    kv_count_ptr,
    kv_index_ptr,
    S,
    G,
    C,
    BH,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend one block of 128 query rows to its key list; all tensors contiguous."""
    # every head's longest block comes before any head's second longest.
    pid = tl.program_id(0)
    head = pid % BH
    block = pid // BH
    entry = head.to(tl.int64) * G + block

    off_m = tl.arange(0, BLOCK_M)
    off_n = tl.arange(0, BLOCK_N)
    off_d = tl.arange(0, BLOCK_D)
    tile = tl.load(q_tiles_ptr + entry * (BLOCK_M // M) + off_m // M)
    row = tile * M + off_m % M
    row_alive = (tile >= 0) & (row < S)
    dim_alive = off_d < D

    base = head.to(tl.int64) * S
    off_q = (base + row)[:, None] * D + off_d[None, :]
    q = tl.load(q_ptr + off_q, mask=row_alive[:, None] & dim_alive[None, :], other=0.0)
    k_ptr += base * D
    v_ptr += base * D
    kv_index_ptr += entry * C

    count = tl.load(kv_count_ptr + entry)
    # the list rises, so a short last chunk of the sequence can only stand at its end.
    last = tl.load(kv_index_ptr + tl.maximum(count - 1, 0)).to(tl.int32)
    past_end = tl.maximum((last + 1) * N - S, 0)
    keys = tl.where(count > 0, count * N - past_end, 0)
    steps = tl.cdiv(keys, BLOCK_N)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    # finite: with -inf a fully masked first step would subtract infinities.
    row_max = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)

    if steps > 0:
        place = (steps - 1) * BLOCK_N + off_n
        alive = place < keys
        chunk = tl.load(kv_index_ptr + place // N, mask=alive, other=0)
        # numbers of 16 bits are widened before they count tokens.
        token = chunk.to(tl.int32) * N + place % N
        k = tl.load(
            k_ptr + token[None, :] * D + off_d[:, None],
            mask=alive[None, :] & dim_alive[:, None],
            other=0.0,
        )
        v = tl.load(
            v_ptr + token[:, None] * D + off_d[None, :],
            mask=alive[:, None] & dim_alive[None, :],
            other=0.0,
        )
        acc, row_sum, row_max = _step(q, k, v, acc, row_sum, row_max, alive, scale_log2, True)
        for step in tl.range(0, steps - 1, num_stages=STAGES):
            place = step * BLOCK_N + off_n
            token = tl.load(kv_index_ptr + place // N).to(tl.int32) * N + place % N
            if D == BLOCK_D:
                k = tl.load(k_ptr + token[None, :] * D + off_d[:, None])
                v = tl.load(v_ptr + token[:, None] * D + off_d[None, :])
            else:
                off_k = token[None, :] * D + off_d[:, None]
                k = tl.load(k_ptr + off_k, mask=dim_alive[:, None], other=0.0)
                off_v = token[:, None] * D + off_d[None, :]
                v = tl.load(v_ptr + off_v, mask=dim_alive[None, :], other=0.0)
            acc, row_sum, row_max = _step(q, k, v, acc, row_sum, row_max, alive, scale_log2, False)

    # a row without keys: zeros and -inf.
    has_keys = row_sum > 0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    out = acc / row_sum[:, None]
    tl.store(
        out_ptr + off_q,
        out.to(out_ptr.dtype.element_ty),
        mask=row_alive[:, None] & dim_alive[None, :],
    )
    natural = (row_max + tl.log2(row_sum)) * 0.6931471805599453
    tl.store(lse_ptr + base + row, tl.where(has_keys, natural, -float("inf")), mask=row_alive)


def block_n(device: torch.device) -> int:
    """Keys of a step: as many as two stages leave shared memory for."""
    if device.type != "cuda":
        return BLOCK_N_LARGE
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    return BLOCK_N_LARGE if shared >= LARGE_SHARED_BYTES else BLOCK_N_SMALL


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor,
    kv_count: Tensor,
    kv_index: Tensor,
    *,
    tile: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; see ``sparse_attention`` for the arguments."""
    batch, heads, tokens, dim = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    blocks = q_tiles.shape[2]
    rows = q_tiles.shape[3] * tile[0]
    # triton launches on the current device, which need not be the one that holds the tensors.
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        gather_attention_kernel[(blocks * batch * heads,)](
            q,
            k,
            v,
            out,
            lse,
            q_tiles.contiguous(),
            kv_count.contiguous(),
            kv_index.contiguous(),
            tokens,
            blocks,
            kv_index.shape[-1],
            batch * heads,
            scale * LOG2_E,
            D=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            M=tile[0],
            N=tile[1],
            BLOCK_M=rows,
            BLOCK_N=block_n(q.device),
            STAGES=STAGES,
            num_warps=WARPS,
        )
    return out, lse
