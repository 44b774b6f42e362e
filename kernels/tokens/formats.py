"""Queries and keys in 8 or 4 bits, for products on tensor cores at a multiple of the rate of 16.

As SageAttention does it: the mean key of every head is subtracted first (it adds the same number to
all scores of a row, which the softmax does not see, and keys share a large mean that would eat the
8 bits), then runs of tokens are divided by a scale of their own and rounded.

    q ≈ q8 * q_scale,  k - mean(k) ≈ k8 * k_scale,  q·k ≈ (q8·k8) * q_scale * k_scale + q·mean(k)

The last term is kept for every row as ``shift``: the log-sum-exp and absolute gates want it back.

What is not finite has no place in 8 bits. It is left out of the mean and of scales; a query's shift
is not finite then, and the scale of a key's run is NaN, so that it shows in rows that see the run.

Four bits serve to choose tiles (SALE), not to compute attention: whole numbers from -7 to 7, stored
in 8-bit types where tensor cores have no 4-bit ones. Their sums over a head dim are whole numbers
too, and exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

FORMATS: Final[dict[str, tuple[torch.dtype, float]]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
"""8-bit formats: their dtype and the largest number that a scale maps to."""

FOUR_BITS: Final[dict[str, tuple[torch.dtype, float]]] = {
    "int4 in int8": (torch.int8, 7.0),
    "int4 in fp8": (torch.float8_e4m3fn, 7.0),
    "int4 in fp16": (torch.float16, 7.0),
}
"""Types that 4-bit numbers are stored in; e4m3 holds whole numbers up to 16 exactly."""

ROWS_AT_ONCE: Final = 128
"""Runs divide this: the most that a program of the quantisation kernel reads together."""

# a run of zeros has a scale too, and scales stay away from fp32's subnormal numbers.
SMALLEST: Final = 1.0e-12


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedQK:
    """8-bit queries and smoothed keys of one attention call, as ``quantize_qk`` makes them.

    Attributes:
        kind: ``int8`` or ``fp8`` (e4m3).
        q: queries ``[B, H, S, D]``, int8 or float8_e4m3fn, contiguous.
        k: keys less their mean, likewise.
        q_scale: what a run of ``q_run`` queries is multiplied by, fp32 ``[B, H, ceil(S / q_run)]``.
        k_scale: the same of ``k_run`` keys.
        shift: q·mean(k), unscaled, fp32 ``[B, H, S]``.
        mean: mean(k), what was taken from all keys, fp32 ``[B, H, D]``.
        q_run: queries that share a scale.
        k_run: keys that share a scale.
    """

    kind: str
    q: Tensor
    k: Tensor
    q_scale: Tensor
    k_scale: Tensor
    shift: Tensor
    mean: Tensor
    q_run: int
    k_run: int

    def to(self, device: torch.device | str) -> QuantizedQK:
        """The same numbers on ``device``."""
        tensors = (self.q, self.k, self.q_scale, self.k_scale, self.shift, self.mean)
        q, k, q_scale, k_scale, shift, mean = (x.to(device) for x in tensors)
        return replace(self, q=q, k=k, q_scale=q_scale, k_scale=k_scale, shift=shift, mean=mean)

    def dequantized(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Queries and smoothed keys as the 8-bit product sees them, in ``dtype``."""
        pairs = ((self.q, self.q_scale, self.q_run), (self.k, self.k_scale, self.k_run))
        tokens = self.q.shape[2]
        q, k = (
            x.to(dtype) * scale.to(dtype).repeat_interleave(run, 2)[:, :, :tokens, None]
            for x, scale, run in pairs
        )
        # a query that is not finite is zeros in 8 bits; its shift tells.
        return q.masked_fill(~self.shift.isfinite().unsqueeze(-1), torch.nan), k


def check_format(kind: str) -> None:
    """Raise a ``ValueError`` unless ``kind`` names an 8-bit format."""
    if kind not in FORMATS:
        raise ValueError(f"unknown 8-bit format {kind!r}. Hint: choose from {', '.join(FORMATS)}.")


def check_run(name: str, run: int) -> None:
    """Raise a ``ValueError`` unless the quantisation kernel can cut runs of ``run`` tokens."""
    if run < 1 or ROWS_AT_ONCE % run:
        raise ValueError(f"{name} must divide {ROWS_AT_ONCE}, got {run}")


def check_quantized(quantized: QuantizedQK, q: Tensor) -> None:
    """Raise a ``ValueError`` unless 8-bit operands fit ``q`` ``[B, H, S, D]``; shapes only."""
    check_format(quantized.kind)
    batch, heads, tokens, dim = q.shape
    eight = FORMATS[quantized.kind][0]
    for name in ("q_run", "k_run"):
        check_run(name, getattr(quantized, name))
    wanted = {
        "q": (tuple(q.shape), eight),
        "k": (tuple(q.shape), eight),
        "q_scale": ((batch, heads, -(-tokens // quantized.q_run)), torch.float32),
        "k_scale": ((batch, heads, -(-tokens // quantized.k_run)), torch.float32),
        "shift": ((batch, heads, tokens), torch.float32),
        "mean": ((batch, heads, dim), None),
    }
    for name, (shape, dtype) in wanted.items():
        x: Tensor = getattr(quantized, name)
        if tuple(x.shape) != shape or dtype not in (None, x.dtype):
            raise ValueError(
                f"8-bit operands of shape {tuple(x.shape)} for q of {tuple(q.shape)}: {name} must "
                f"be {dtype or 'floating point'} {shape}, got {x.dtype}"
            )
        if x.device != q.device or not x.is_contiguous():
            raise ValueError(
                f"8-bit operands must be contiguous, and on {q.device} as q is: {name}"
            )


def whole_numbers(kind: str) -> bool:
    """Whether a format rounds to whole numbers, whatever type they ride in."""
    return kind != "fp8"


@dataclass(frozen=True, slots=True, eq=False)
class FourBitQK:
    """4-bit queries and keys, both smoothed, as ``quantize_four_bits`` makes them.

        q_i·k_j ≈ (q4·k4 + offset_j / q_scale_i) * q_scale_i * k_scale + shift_i

    Attributes:
        q: queries less their mean ``[B, H, S, D]``, whole numbers from -7 to 7.
        k: keys less their mean, likewise.
        q_scale: what a query is multiplied by, fp32 ``[B, H, S]``.
        k_scale: what the keys of a run are multiplied by, fp32 ``[B, H, ceil(S / k_run)]``.
        offset: mean(q)·(k - mean(k)) over the run's scale, fp32 ``[B, H, S]``.
        shift: q·mean(k), fp32 ``[B, H, S]``.
        k_run: keys that share a scale.
    """

    q: Tensor
    k: Tensor
    q_scale: Tensor
    k_scale: Tensor
    offset: Tensor
    shift: Tensor
    k_run: int


def quantize_runs(
    x: Tensor,
    kind: str,
    run: int,
    order: Tensor | None,
    subtract: Tensor | None,
    multiply: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise ``x`` ``[B, H, S, D]`` in plain torch: what the kernel is tested against.

    ``kind`` is a name from ``FORMATS`` or ``FOUR_BITS``, ``run`` the tokens that share a scale.
    ``subtract`` ``[B, H, D]`` is taken from every token first; the product of every token with
    ``multiply`` ``[B, H, D]`` is the third answer. The others are the 8-bit tensor and its scales.
    """
    if order is not None:
        x = x.index_select(2, order)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    product = None if multiply is None else (x @ multiply.unsqueeze(-1)).squeeze(-1).float()
    if subtract is not None:
        x = x - subtract.unsqueeze(2)
    # what is not finite has no number in 8 bits and sets no scale: a product tells of the token,
    # and where there is none, the scale of its run.
    finite = x.isfinite()
    x = x.masked_fill(~finite, 0)
    dtype, top = (FORMATS | FOUR_BITS)[kind]
    tokens = x.shape[2]
    runs = torch.nn.functional.pad(x, (0, 0, 0, -tokens % run))
    runs = runs.reshape(*x.shape[:2], -1, run, x.shape[3])
    largest = runs.abs().amax((-1, -2)).clamp_min(SMALLEST)
    runs = runs * (top / largest)[..., None, None]
    if whole_numbers(kind):
        runs = (runs + 0.5).floor()
    rounded = runs.to(dtype).flatten(2, 3)[:, :, :tokens].contiguous()
    scale = (largest / top).float()
    if product is None:
        lost = torch.nn.functional.pad(~finite.all(-1), (0, -tokens % run))
        scale = scale.masked_fill(lost.view(*lost.shape[:2], -1, run).any(-1), torch.nan)
    return rounded, scale, product
