"""What a sparse attention call lacked of the dense one, kept for the steps that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

FADING: Final = 0.6
"""How fast a remainder stops being right, where nothing better is known of a model."""

_LARGEST: Final = {8: 127, 4: 7}

# what all remainders of a run may take in 8 bits, and on a GPU beside what a run has spared there;
# beyond it 4 bits are worth what they cost.
_SMALL: Final = 2**30


@dataclass(frozen=True, slots=True)
class Keeping:
    """How remainders are kept.

    Args:
        bits: of a value, 8 or 4. Eight err by about one percent of the remainder, which is itself
            a small part of the output; four err by about a tenth (``docs/experiments.md``).
        most_on_gpu: how many may be in the GPU's memory; others wait in the machine's. None: all.
    """

    bits: int = 8
    most_on_gpu: int | None = None

    def bytes_for(self, q: Tensor) -> int:
        """Bytes of the ``Remainder`` of a call with queries ``q`` ``[B, H, S, D]``."""
        rows, scales = q[..., 0].numel(), 8 // self.bits
        return rows * (math.ceil(q.shape[-1] * self.bits / 8) + scales * q.element_size())


def choose_keeping(
    q: Tensor, calls: int, room: int, host_room: int, spared: int = 0
) -> Keeping | None:
    """How to keep what ``calls`` calls with queries like ``q`` ``[B, H, S, D]`` lack.

    Eight bits while that is little memory, then four. On the GPU they take no more than ``spared``
    and a little, so that a run's peak stays near the model's own; the rest waits in the machine's
    memory where that has room, and on the GPU where only that has.

    Args:
        q: queries of one call.
        calls: of all layers and guidance branches.
        room: bytes there are for it on the GPU.
        host_room: bytes there are for it in the machine's memory.
        spared: bytes that the run takes less than the model as it was.

    Returns:
        None where nothing fits.
    """
    if Keeping().bytes_for(q) * calls <= min(room, _SMALL):
        return Keeping()
    each = Keeping(4).bytes_for(q)
    for most in (min(room, spared + _SMALL), room):
        on_gpu = most // each
        if on_gpu >= calls:
            return Keeping(4)
        if (calls - on_gpu) * each <= host_room:
            return Keeping(4, on_gpu)
    return None


def lack_of_room(q: Tensor, calls: int, room: int, keeping: Keeping | None) -> str | None:
    """What is to be said where ``choose_keeping`` found no room for all on the GPU."""
    each = Keeping(4).bytes_for(q)
    needed = each * calls
    here = 0 if keeping is None else keeping.most_on_gpu
    if here is None or (keeping is not None and needed <= room):
        return None
    away = 0 if keeping is None else (calls - here) * each
    return (
        f"refreshes keep {needed / 2**30:.1f} GiB, for which the GPU has room for "
        f"{room / 2**30:.1f}: "
        + (f"{away / 2**30:.1f} are in the machine's memory" if away else "nothing was kept")
    )


@dataclass(frozen=True, slots=True)
class Remainder:
    """Dense minus sparse output of one call, ``[B, H, S, D]``, in 8 or 4 bits.

    From one denoising step to the next it changes far less than its size: most of what a sparse
    call lacks can be added from an earlier step. DiTFastAttn (arXiv 2406.08552, section 3.1)
    shares such a remainder between the steps of window attention.

    Args:
        values: int8 ``[B, H, S, D]``, at most 127 in size; or, of 4 bits, uint8
            ``[B, H, S, ceil(D / 2)]``: a byte holds a channel of the first half of the head below,
            and one of the second half above, both plus 8.
        scale: what a step of ``values`` stands for, in the dtype of the output: ``[B, H, S, 1]``,
            or, of 4 bits, ``[B, H, S, 2]``, one for each half.
        bits: of a value.
        there: what has to have happened on the GPU before it may be read, where it is a copy.
    """

    values: Tensor
    scale: Tensor
    bits: int = 8
    there: torch.cuda.Event | None = None

    @classmethod
    def of(
        cls,
        dense: Tensor,
        sparse: Tensor,
        bits: int = 8,
        *,
        by_kernel: bool = False,
    ) -> Remainder:
        """What ``sparse`` lacks of ``dense``, both ``[B, H, S, D]``, in 8 or 4 bits.

        ``by_kernel`` says whether one of Triton's kernels rounds it, in one pass.
        """
        if by_kernel:
            from vidsparse.kernels.tokens.remainder import round_difference

            values, scale = round_difference(dense, sparse, bits)
        else:
            values, scale = _in_bits(dense - sparse, bits)
        return cls(values, scale, bits)

    @property
    def on_gpu(self) -> bool:
        """Whether it is in a GPU's memory."""
        return self.values.is_cuda

    def to_host(self) -> Remainder:
        """It in the machine's memory."""
        return Remainder(_to_host(self.values), _to_host(self.scale), self.bits)

    def fetched(self, device: torch.device) -> Remainder:
        """It on ``device``; what comes of the machine's memory does so beside the GPU's other work.

        To be asked for before the call that it is added to, so that nobody waits for it. Whoever
        lets go of it without adding it has to ``wait`` first: its memory may be another's by then.
        """
        if device.type != "cuda" or self.on_gpu:
            return self
        stream, now = _copying(device), torch.cuda.current_stream(device)
        values = torch.empty_like(self.values, device=device)
        scale = torch.empty_like(self.scale, device=device)
        # whatever had that memory before is done with it then.
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            values.copy_(self.values, non_blocking=True)
            scale.copy_(self.scale, non_blocking=True)
            there = stream.record_event()
        return Remainder(values, scale, self.bits, there)

    def wait(self) -> None:
        """Let what the GPU is given from now on wait until it is there."""
        if self.there is not None:
            torch.cuda.current_stream(self.values.device).wait_event(self.there)

    def add_to(self, out: Tensor, factor: float = 1.0, *, by_kernel: bool = False) -> Tensor:
        """Add it, ``factor`` times, to ``out`` ``[B, H, S, D]``, in place; returns ``out``.

        ``by_kernel`` says whether one of Triton's kernels does so, in one pass.
        """
        self.wait()
        values, scale = self.values, self.scale.to(out.dtype)
        if by_kernel and out.stride(-1) == 1:
            from vidsparse.kernels.tokens.remainder import add_scaled

            return add_scaled(out, values, scale, factor, self.bits)
        if self.bits == 8:
            return out.addcmul_(values.to(out.dtype), scale, value=factor)
        half = values.shape[-1]
        for place, (part, four) in enumerate(
            ((out[..., :half], values & 15), (out[..., half:], values >> 4))
        ):
            steps = four[..., : part.shape[-1]].to(out.dtype).sub_(8)
            part.addcmul_(steps, scale[..., place : place + 1], value=factor)
        return out


def _in_bits(lacking: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The values and scales of a ``Remainder``, ``lacking`` ``[B, H, S, D]``, which is used up."""
    if bits == 8:
        scale, steps = _rounded(lacking, 8)
        return steps.char(), scale
    half = -(-lacking.shape[-1] // 2)
    (low, first), (high, second) = (
        _rounded(part, 4) for part in (lacking[..., :half], lacking[..., half:])
    )
    return _packed(first, second), torch.cat([low, high], -1)


def _rounded(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """A scale for each row of ``x`` ``[..., D]``, and whole numbers in its place."""
    most = _LARGEST[bits]
    scale = x.abs().amax(-1, keepdim=True) / most
    # a row that lacks nothing has no scale to divide by.
    return scale, x.div_(scale.masked_fill(scale == 0, 1)).round_().clamp_(-most, most)


def _packed(first: Tensor, second: Tensor) -> Tensor:
    """Whole numbers from -7 to 7, two in a byte; ``second`` may be one narrower than ``first``."""
    # what is no number has a scale that is none either.
    low, high = (part.nan_to_num_(0.0).add_(8).to(torch.uint8) for part in (first, second))
    low[..., : high.shape[-1]] |= high << 4
    return low


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _to_host(x: Tensor) -> Tensor:
    home = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return home.copy_(x, non_blocking=True)


def likeness(age: int, steps: int, fading: float = FADING) -> float:
    """How much of a remainder is still right ``age`` steps after it, in a run of ``steps``.

    The best factor falls from step to step, by about 3 % in a run of 20 with the ``fading`` that is
    usual. A model's own may be half of that or four times as much (``docs/experiments.md``).
    """
    return math.exp(-fading * age / steps)


def weights(
    age: int, gap: int, steps: int, fading: float = FADING, slope: float = 0.0
) -> tuple[float, float]:
    """What the last remainder counts ``age`` steps after it, and the one ``gap`` steps before that.

    A remainder changes from one refresh to the next, and goes on to change: ``slope`` times as much
    as it did, for as long as it took, in a run of ``steps``. All of it fades (``likeness``).
    """
    likely = likeness(age, steps, fading)
    onward = slope * min(age / gap, 1.0)
    return likely * (1 + onward), -likely * onward
