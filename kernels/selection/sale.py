"""SALE's selection pass: every score in 4 bits, compared with its row's threshold as it is made.

Shape legend: B batch, H heads, S tokens, D head dim, M x N tile, Tq and Tk tiles, W = ceil(Tk / 32)
words of a row of the mask.

The 4-bit numbers ride in fp8 where tensor cores have it, else in fp16: their sums, whole numbers
below 2^13, come out exact and in fp32, which a second product goes on from (``sale_factors``). What
looks at the sums is a kernel for Hopper or a plain one.
"""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hardware import device_facts, hopper_reason
from ..tokens.quantize import quantize_four_bits
from .bits import bits_from, ones
from .sale_factors import key_factors, row_factors
from .triton_sale import SaleTuning, triton_sale, tuned_sale

FINISHED_TILES = 16
FINISHED_WORDS = 128


@triton.jit
def finish_kernel(
    words_ptr,
    keys_ptr,
    S,
    TQ,
    TK,
    W,
    local,
    full_rows,
    full_columns,
    M: tl.constexpr,
    N: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Add what is kept anyway to the words of TILES query tiles, and count their keys."""
    runs = tl.cdiv(TQ, TILES)
    head = (tl.program_id(0) // runs).to(tl.int64)
    tile = (tl.program_id(0) % runs) * TILES + tl.arange(0, TILES)
    low = tile * M + tl.minimum(S - tile * M, M) // 2 - local // 2
    near = (tl.maximum(low, 0) // N)[:, None]
    far = ((low + local + N - 1) // N)[:, None]
    sink = tl.where(tile >= full_rows, 0, full_columns)[:, None]
    counts = tl.zeros([TILES], dtype=tl.int32)
    for first in range(0, W, BLOCK_W):
        word = (first + tl.arange(0, BLOCK_W))[None, :]
        place = (head * TQ + tile)[:, None] * W + word
        alive = (tile < TQ)[:, None] & (word < W)
        found = tl.load(words_ptr + place, mask=alive, other=0)
        found |= bits_from(word, near) & ~bits_from(word, far)
        found |= bits_from(word, sink)
        found &= ~bits_from(word, tl.zeros_like(near) + TK)
        tl.store(words_ptr + place, found, mask=alive)
        # the last key tile may be short.
        last = (found >> ((TK - 1) % 32)) & 1
        counts += tl.sum(ones(found) * N - tl.where(word == W - 1, last * (TK * N - S), 0), 1)
    tl.store(keys_ptr + head * TQ + tile, counts, mask=tile < TQ)


def can_estimate(q: Tensor, tile: tuple[int, int]) -> bool:
    """Whether the kernels take such queries and tiles: 16 bits, D up to 128, 8 keys or more."""
    dim = q.shape[-1]
    sixteen_bits = q.dtype in (torch.float16, torch.bfloat16)
    return sixteen_bits and tile[1] >= 8 and dim % 16 == 0 and dim <= 128


def _hopper_trial() -> Callable[[torch.device], None]:
    from .hopper_sale import try_out

    return try_out


def hopper_sale_reason(device: torch.device) -> str | None:
    """Why Hopper's kernel cannot run on a GPU that the plain one can run on, or None if it can."""
    return hopper_reason(device, _hopper_trial)


def sale_words(
    q: Tensor,
    k: Tensor,
    tau: float | Tensor,
    *,
    tile: tuple[int, int],
    local: int,
    full_rows: int | None = None,
    full_columns: int | None = None,
    how: SaleTuning | None = None,
    riding: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Key tiles in which some element's relative attention score may reach ``tau``.

    Args:
        q: queries ``[B, H, S, D]``, fp16 or bf16, D a multiple of 16 up to 128.
        k: keys, likewise.
        tau: the threshold, or one for every head, fp32 ``[H]``.
        tile: (M, N), N at least 8.
        local: tokens of the local area, which is kept.
        full_rows: query tiles from this one on keep everything.
        full_columns: key tiles from this one on are the sink, and kept in every row.
        how: sizes of the plain kernel; by default the GPU's own kernel and sizes.
        riding: ``fp8`` or ``fp16``, the type that 4-bit numbers ride in; the GPU's own by default.

    Returns:
        The mask in words of 32 key tiles, int32 ``[B, H, Tq, W]``, the first tile of a word in its
        lowest bit; and the key tokens that each query tile keeps, int32 ``[B, H, Tq]``.
    """
    batch, heads, tokens, _ = q.shape
    rows, keys = tile
    q, k = q.contiguous(), k.contiguous()
    q_tiles, k_tiles = triton.cdiv(tokens, rows), triton.cdiv(tokens, keys)
    facts = device_facts(q.device)
    own = how is None
    how = how or tuned_sale(facts.capability, facts.shared_bytes)
    riding = riding or ("fp8" if facts.capability >= (8, 9) else "fp16")
    four = quantize_four_bits(q, k, keys, riding)
    # the interpreter has no products of bf16.
    half = torch.bfloat16 if q.is_cuda else torch.float32
    q_extra = row_factors(
        q, k, four, tau, tile=tile, local=local, full_columns=full_columns, half=half
    )
    k_extra = key_factors(four, how.keys, half)
    words = torch.empty(
        batch, heads, q_tiles, triton.cdiv(k_tiles, 32), dtype=torch.int32, device=q.device
    )
    counts = torch.empty(batch, heads, q_tiles, dtype=torch.int32, device=q.device)
    operands = (four.q, four.k, q_extra, k_extra, words)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        if own and riding == "fp8" and hopper_sale_reason(q.device) is None:
            from .hopper_sale import gluon_sale

            gluon_sale(*operands, tile=tile)
        else:
            triton_sale(*operands, tile=tile, how=how)
        finish_kernel[(batch * heads * triton.cdiv(q_tiles, FINISHED_TILES),)](
            words,
            counts,
            tokens,
            q_tiles,
            k_tiles,
            words.shape[-1],
            local,
            q_tiles if full_rows is None else full_rows,
            k_tiles if full_columns is None else full_columns,
            M=rows,
            N=keys,
            TILES=FINISHED_TILES,
            BLOCK_W=FINISHED_WORDS,
            num_warps=4,
        )
    return words, counts
