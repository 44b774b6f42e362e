"""What the kernels that work on masks in bits share."""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ones(x):
    """Bits that are set in each int32; compiles to the machine's own instruction."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def bits_from(word, column):
    """The bits of the ``word``-th word that stand for ``column`` or one behind it."""
    shift = tl.minimum(tl.maximum(column - word * 32, 0), 32)
    # there is no shift by 32.
    return tl.where(shift < 32, (tl.zeros_like(shift) - 1) << (shift & 31), 0)
