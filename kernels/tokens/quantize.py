"""Rounding queries and keys to 8 or 4 bits: by Triton's kernel on a GPU, in torch elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .formats import FourBitQK, QuantizedQK, check_format, check_run, quantize_runs

if TYPE_CHECKING:
    from .pool import Pooled


def mean_token(x: Tensor) -> Tensor:
    """The mean of every head's queries or keys ``[B, H, D]``, in fp32 or better.

    Numbers that are not finite count as zeros.
    """
    if x.is_cuda and x.dtype != torch.float64:
        # triton is slow to import and absent off linux.
        from .triton_quantize import triton_mean

        return triton_mean(x)
    mean = x.mean(2, dtype=torch.promote_types(x.dtype, torch.float32))
    if mean.isfinite().all():
        return mean
    return x.masked_fill(~x.isfinite(), 0).mean(2, dtype=mean.dtype)


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
    return QuantizedQK(kind, q8, k8, q_scale, k_scale, shift, mean, q_run, k_run)


def quantize_like_keys(x: Tensor, quantized: QuantizedQK) -> tuple[Tensor, Tensor]:
    """``x`` ``[B, H, P, D]`` smoothed and rounded as the keys of ``quantized`` were.

    Returns:
        8-bit numbers, and a scale for every ``k_run`` of them, fp32 ``[B, H, ceil(P / k_run)]``.
    """
    rounded = _quantize_on_gpu if x.is_cuda else quantize_runs
    with torch.autocast(x.device.type, enabled=False):
        x8, scale, _ = rounded(x, quantized.kind, quantized.k_run, None, quantized.mean, None)
    return x8, scale


def quantize_four_bits(q: Tensor, k: Tensor, k_run: int, riding: str = "int8") -> FourBitQK:
    """Quantise smoothed queries, each with its own scale, and smoothed keys.

    Args:
        q: queries ``[B, H, S, D]``, any strides.
        k: keys ``[B, H, S, D]``.
        k_run: neighbouring keys that share a scale, a divisor of 128.
        riding: ``int8``, ``fp8`` or ``fp16``, the type that the 4-bit numbers are stored in.
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


def quantize_and_pool(
    q: Tensor,
    k: Tensor,
    kind: str,
    order: Tensor,
    tile: tuple[int, int],
    *,
    k_run: int = 64,
    judged: bool = False,
) -> tuple[QuantizedQK, Pooled, Pooled]:
    """8-bit queries and keys in another order and the means of their tiles, in one pass.

    Reads q once and k twice, for its mean comes first. What ``quantize_qk`` gives with the same
    ``order``, and ``pool`` of the tensors in that order.

    Args:
        q: queries ``[B, H, S, D]``, any strides.
        k: keys ``[B, H, S, D]``.
        kind: ``int8`` or ``fp8``.
        order: ``[S]`` token numbers; token i of the result is token ``order[i]`` of q and k.
        tile: (M, N), query rows and keys of a tile, divisors of 128. M queries share a scale.
        k_run: keys that share a scale, a divisor of 128.
        judged: also how alike the tokens of a tile are.

    Returns:
        The 8-bit operands and the pooled queries and keys.

    Raises:
        ValueError: unknown kind, or sizes that do not divide 128.
    """
    check_format(kind)
    for name, run in (("M", tile[0]), ("N", tile[1]), ("k_run", k_run)):
        check_run(name, run)
    from .pool import room_for_means
    from .triton_quantize import triton_quantize_runs

    # autocast would round the mean and the shift.
    with torch.autocast(q.device.type, enabled=False):
        mean = mean_token(k)
        q_means = room_for_means(q, tile[0], judged=judged)
        k_means = room_for_means(k, tile[1], judged=judged)
        q8, q_scale, shift = triton_quantize_runs(q, kind, tile[0], order, None, mean, q_means)
        k8, k_scale, _ = triton_quantize_runs(k, kind, k_run, order, mean, None, k_means)
    assert shift is not None
    quantized = QuantizedQK(kind, q8, k8, q_scale, k_scale, shift, mean, tile[0], k_run)
    return quantized, q_means, k_means


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
