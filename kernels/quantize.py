"""Queries and keys in 8 or 4 bits, for products on tensor cores at a multiple of the rate of 16.

As SageAttention does it: the mean key of every head is subtracted first (it adds the same number to
all scores of a row, which the softmax does not see, and keys share a large mean that would eat the
8 bits), then runs of tokens are divided by a scale of their own and rounded.

    q ≈ q8 * q_scale,  k - mean(k) ≈ k8 * k_scale,  q·k ≈ (q8·k8) * q_scale * k_scale + q·mean(k)

The last term is kept for every row as ``shift``: the log-sum-exp and absolute gates want it back.

Four bits are for looking, not for computing: whole numbers from -7 to 7, which ride in 8-bit types
where tensor cores have no 4-bit ones. Their sums over a head dim are whole numbers too, and exact.
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
"""Types that 4-bit numbers ride in; e4m3 holds whole numbers up to 16 exactly."""

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
        q_run: queries that share a scale.
        k_run: keys that share a scale.
    """

    kind: str
    q: Tensor
    k: Tensor
    q_scale: Tensor
    k_scale: Tensor
    shift: Tensor
    q_run: int
    k_run: int

    def to(self, device: torch.device | str) -> QuantizedQK:
        """The same numbers on ``device``."""
        tensors = (self.q, self.k, self.q_scale, self.k_scale, self.shift)
        q, k, q_scale, k_scale, shift = (x.to(device) for x in tensors)
        return replace(self, q=q, k=k, q_scale=q_scale, k_scale=k_scale, shift=shift)

    def dequantized(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Queries and smoothed keys as the 8-bit product sees them, in ``dtype``."""
        pairs = ((self.q, self.q_scale, self.q_run), (self.k, self.k_scale, self.k_run))
        tokens = self.q.shape[2]
        q, k = (
            x.to(dtype) * scale.to(dtype).repeat_interleave(run, 2)[:, :, :tokens, None]
            for x, scale, run in pairs
        )
        return q, k


def check_format(kind: str) -> None:
    """Raise a ``ValueError`` unless ``kind`` names an 8-bit format."""
    if kind not in FORMATS:
        raise ValueError(f"unknown 8-bit format {kind!r}. Hint: choose from {', '.join(FORMATS)}.")


def check_run(name: str, run: int) -> None:
    """Raise a ``ValueError`` unless the quantisation kernel can cut runs of ``run`` tokens."""
    if run < 1 or ROWS_AT_ONCE % run:
        raise ValueError(f"{name} must divide {ROWS_AT_ONCE}, got {run}")


def mean_token(x: Tensor) -> Tensor:
    """The mean of every head's queries or keys ``[B, H, D]``, in fp32 or better."""
    if x.is_cuda and x.dtype != torch.float64:
        # triton is slow to import and absent off linux.
        from .triton_quantize import triton_mean

        return triton_mean(x)
    return x.mean(2, dtype=torch.promote_types(x.dtype, torch.float32))


def quantize_qk(
    q: Tensor,
    k: Tensor,
    kind: str,
    *,
    q_run: int = 64,
    k_run: int = 64,
    order: Tensor | None = None,
) -> QuantizedQK:
    """Quantise queries and smoothed keys.

    Args:
        q: queries ``[B, H, S, D]``, any strides.
        k: keys ``[B, H, S, D]``.
        kind: ``int8`` or ``fp8``.
        q_run: neighbouring queries that share a scale, a divisor of 128.
        k_run: the same for keys.
        order: ``[S]`` token numbers; token i of the result is token ``order[i]`` of q and k, so
            that tokens are put in order and quantised in one pass. None keeps their order.

    Raises:
        ValueError: unknown kind, or a run that does not divide 128.
    """
    check_format(kind)
    for name, run in (("q_run", q_run), ("k_run", k_run)):
        check_run(name, run)
    # autocast would round the mean and the shift.
    with torch.autocast(q.device.type, enabled=False):
        mean = mean_token(k)
        rounded = _quantize_on_gpu if q.is_cuda else quantize_runs
        q8, q_scale, shift = rounded(q, kind, q_run, order, None, mean)
        k8, k_scale, _ = rounded(k, kind, k_run, order, mean, None)
    assert shift is not None
    return QuantizedQK(kind, q8, k8, q_scale, k_scale, shift, q_run, k_run)


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


def quantize_four_bits(q: Tensor, k: Tensor, k_run: int, riding: str = "int8") -> FourBitQK:
    """Quantise smoothed queries, each with its own scale, and smoothed keys.

    Args:
        q: queries ``[B, H, S, D]``, any strides.
        k: keys ``[B, H, S, D]``.
        k_run: neighbouring keys that share a scale, a divisor of 128.
        riding: ``int8``, ``fp8`` or ``fp16``, the type that the 4-bit numbers ride in.
    """
    kind = f"int4 in {riding}"
    with torch.autocast(q.device.type, enabled=False):
        q_mean, k_mean = mean_token(q), mean_token(k)
        rounded = _quantize_on_gpu if q.is_cuda else quantize_runs
        q4, q_scale, shift = rounded(q, kind, 1, None, q_mean, k_mean)
        k4, k_scale, product = rounded(k, kind, k_run, None, k_mean, q_mean)
        assert shift is not None
        assert product is not None
        offset = product - (q_mean * k_mean).sum(-1, keepdim=True).float()
        offset = offset / k_scale.repeat_interleave(k_run, 2)[:, :, : k.shape[2]]
    return FourBitQK(q4, k4, q_scale, k_scale, offset, shift, k_run)


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
    dtype, top = (FORMATS | FOUR_BITS)[kind]
    tokens = x.shape[2]
    runs = torch.nn.functional.pad(x, (0, 0, 0, -tokens % run))
    runs = runs.reshape(*x.shape[:2], -1, run, x.shape[3])
    largest = runs.abs().amax((-1, -2)).clamp_min(SMALLEST)
    runs = runs * (top / largest)[..., None, None]
    if whole_numbers(kind):
        runs = (runs + 0.5).floor()
    rounded = runs.to(dtype).flatten(2, 3)[:, :, :tokens].contiguous()
    return rounded, (largest / top).float(), product


def _quantize_on_gpu(
    x: Tensor,
    kind: str,
    run: int,
    order: Tensor | None,
    subtract: Tensor | None,
    multiply: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    # triton is slow to import and absent off linux.
    from .triton_quantize import triton_quantize_runs

    return triton_quantize_runs(x, kind, run, order, subtract, multiply)
