"""What is written in PTX, and names that differ between versions of Triton."""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

# triton 3.9 renames these.
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

# a row maximum may fall behind by this many powers of two before what was summed is rescaled: the
# final division undoes it exactly, and weights up to 256 fit all dtypes.
BEHIND = gl.constexpr(8.0)
RESCALED_AT_ONCE = 32
# whole numbers below 2^22 added to the bits of 1.5 * 2^23 make those of the sum in fp32; and this
# one makes those of minus infinity.
OFFSET_OF_INTEGERS = gl.constexpr(12582912)
MASKED_INTEGER = gl.constexpr(0xFF800000 - 0x4B400000 - 2**32)


@gluon.jit
def exp2(x):
    """2 to the power of ``x``, as the exponential unit gives it."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def log2(x):
    """The logarithm of ``x`` to base 2, minus infinity of 0."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


def _rescale_source(registers: int) -> str:
    """PTX: ``registers`` products, or plain copies where no lane of the warp has a factor but 1.

    An accumulator's registers come in fours, two of one row and two of another.
    """
    out, x, factor = ([registers * part + i for i in range(registers)] for part in range(3))
    copies = " ".join(f"mov.f32 ${o}, ${i};" for o, i in zip(out, x, strict=True))
    products = " ".join(
        f"mul.f32 ${o}, ${i}, ${f};" for o, i, f in zip(out, x, factor, strict=True)
    )
    return (
        "{ .reg .pred p; .reg .pred q; "
        f"setp.neu.f32 p, ${factor[0]}, 0f3F800000; setp.neu.or.f32 p, ${factor[2]}, 0f3F800000, p;"
        f" vote.sync.any.pred q, p, 0xffffffff; {copies} @!q bra.uni same; {products} same: }}"
    )


_RESCALE = gl.constexpr(_rescale_source(RESCALED_AT_ONCE))
_RESCALE_OPERANDS = gl.constexpr(",".join(["=f"] * RESCALED_AT_ONCE + ["f"] * 2 * RESCALED_AT_ONCE))
_RESCALED_AT_ONCE = gl.constexpr(RESCALED_AT_ONCE)


@gluon.jit
def rescaled(acc, factor):
    """``acc`` times a factor for each row, skipped by warps whose factors are all 1."""
    return gl.inline_asm_elementwise(
        _RESCALE,
        _RESCALE_OPERANDS,
        [acc, factor],
        dtype=gl.float32,
        is_pure=True,
        pack=_RESCALED_AT_ONCE,
    )


def _raise_source() -> str:
    """PTX: for two rows, what a thread has seen of their scores ($2, $3) and their maxima ($4, $5).

    Only where some thread of the warp is ``BEHIND`` above do the four threads of a row tell each
    other.
    """
    behind = "0f" + struct.pack(">f", BEHIND.value).hex()
    both = "".join(
        f"shfl.sync.bfly.b32 t, {x}, {distance}, 31, 0xffffffff; max.f32 {x}, {x}, t; "
        for distance in (1, 2)
        for x in "xy"
    )
    return (
        "{ .reg .pred p; .reg .pred q; .reg .f32 a; .reg .f32 b; .reg .f32 x; .reg .f32 y; "
        f".reg .f32 t; mov.f32 x, $2; mov.f32 y, $3; add.f32 a, $4, {behind}; "
        f"add.f32 b, $5, {behind}; setp.gt.f32 p, x, a; setp.gt.or.f32 p, y, b, p; "
        "vote.sync.any.pred q, p, 0xffffffff; mov.f32 $0, $4; mov.f32 $1, $5; @!q bra.uni same; "
        f"{both}"
        "setp.gt.f32 p, x, a; selp.f32 $0, x, $4, p; "
        "setp.gt.f32 q, y, b; selp.f32 $1, y, $5, q; same: }"
    )


_RAISE = gl.constexpr(_raise_source())


@gluon.jit
def raised(largest, row_max):
    """Maxima of rows, moved where what a thread holds of a row is ``BEHIND`` above.

    Both ``[rows, 4]``, an entry for each of the four threads that share a row.
    """
    return gl.inline_asm_elementwise(
        _RAISE, "=f,=f,f,f,f,f", [largest, row_max], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def as_float(x, one):
    """``x + OFFSET_OF_INTEGERS`` in fp32 of int32 sums of 8-bit products, given a 1.

    A multiplication and addition, because those have a unit that is idle then; conversions and
    plain additions share one with the maxima.
    """
    bits = gl.inline_asm_elementwise(
        "mad.lo.s32 $0, $1, $2, 0x4B400000;", "=r,r,r", [x, one], gl.int32, is_pure=True, pack=1
    )
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def meet():
    """Let both consumers wait for each other."""
    # barriers from 8 on are free: triton takes one for each partition.
    gl.inline_asm_elementwise(
        "barrier.cta.sync 8, 256; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
