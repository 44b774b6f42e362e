"""What a sparse attention call lacked of the dense one, kept for the steps that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from torch import Tensor

_LARGEST: Final = 127
_FADING: Final = 0.6


@dataclass(frozen=True, slots=True)
class Remainder:
    """Dense minus sparse output of one call, ``[B, H, S, D]``, in 8 bits with a scale a row.

    From one denoising step to the next it changes far less than its size: most of what a sparse
    call lacks can be added from an earlier step. DiTFastAttn (arXiv 2406.08552, section 3.1)
    shares such a remainder between the steps of window attention.

    Rounding to 8 bits errs by about one percent of the remainder, which is itself a small part of
    the output, and takes half the memory of 16 bits.

    Args:
        values: int8 ``[B, H, S, D]``, at most 127 in size.
        scale: what a step of ``values`` stands for, ``[B, H, S, 1]``, in the dtype of the output.
    """

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, dense: Tensor, sparse: Tensor) -> Remainder:
        """What ``sparse`` lacks of ``dense``, both ``[B, H, S, D]``."""
        lacking = dense - sparse
        scale = lacking.abs().amax(-1, keepdim=True) / _LARGEST
        # a row that lacks nothing has no scale to divide by.
        steps = lacking.div_(scale.masked_fill(scale == 0, 1)).round_()
        return cls(steps.clamp_(-_LARGEST, _LARGEST).char(), scale)

    def add_to(self, out: Tensor, factor: float = 1.0) -> Tensor:
        """Add it, ``factor`` times, to ``out`` ``[B, H, S, D]``, in place; returns ``out``."""
        scale = self.scale.to(out.dtype)
        return out.addcmul_(self.values.to(out.dtype), scale, value=factor)


def likeness(age: int, steps: int) -> float:
    """How much of a remainder is still right ``age`` steps after it, in a run of ``steps``.

    The best factor falls from step to step, by about 3 % in a run of 20 (``docs/experiments.md``).
    """
    return math.exp(-_FADING * age / steps)


def remainder_bytes(q: Tensor) -> int:
    """Bytes of the ``Remainder`` of a call with queries ``q`` ``[B, H, S, D]``."""
    return q.numel() + q[..., 0].numel() * q.element_size()
