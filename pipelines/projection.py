"""What the families' processors make queries, keys and values by: projections and angles."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.kernels.hardware import triton_reason


def project_heads(
    x: Tensor, heads: int, q: Any, k: Any, v: Any, q_norm: Any, k_norm: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Project ``x`` ``[B, S, C]`` to q, k normed head by head and to v, ``[B, S, H, D]``."""
    query, key, value = (project(x).unflatten(2, (heads, -1)) for project in (q, k, v))
    if q_norm is not None:
        query = q_norm(query)
    if k_norm is not None:
        key = k_norm(key)
    return query, key, value


def rotate_part(x: Tensor, cos: Tensor, sin: Tensor, first: int) -> Tensor:
    """``x`` ``[B, S, H, D]``, its tokens from ``first`` on rotated; it may be written over.

    ``cos`` and ``sin`` ``[T, H or 1, D / 2]`` hold angles of neighbouring channels, of T tokens of
    the S: text that stands beside the video has none.
    """
    count = cos.shape[0]
    assert first + count <= x.shape[1]
    if count == x.shape[1]:
        return rotate(x, cos, sin)
    if torch.compiler.is_compiling():
        # what has no angle turns by nothing: with the video apart there would be two passes more.
        beside = (0, 0, 0, 0, first, x.shape[1] - count - first)
        return rotate(x, F.pad(cos, beside, value=1.0), F.pad(sin, beside))
    part = slice(first, first + count)
    x[:, part] = rotate(x[:, part], cos, sin)
    return x


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool = False) -> Tensor:
    """Rotary embedding of ``x`` ``[..., D]``, on a GPU in one pass.

    ``cos`` and ``sin`` ``[..., D / 2]`` hold the angle of every pair of channels: neighbours, or
    with ``halves`` one of the first half of the channels and one of the second. The product is
    formed in their precision and rounded as the stock processors do.
    """
    if _by_kernel(x, cos, sin):
        from vidsparse.kernels.tokens.rotate import rotate_rows

        return rotate_rows(x, cos, sin, halves=halves)
    if halves:
        first, second = x.chunk(2, -1)
        # multiplied and added at once.
        rotated = (
            torch.addcmul(first * cos, -sin, second.to(sin.dtype)),
            torch.addcmul(second * cos, sin, first.to(sin.dtype)),
        )
        return torch.cat(rotated, -1).type_as(x)
    if torch.compiler.is_compiling():
        return (rotate_crosswise if x.is_cuda else rotate_stacked)(x, cos, sin)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = x.new_empty(x.shape)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def rotate_stacked(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours of ``x`` ``[..., D]`` rotated, in the form that C++ compilers make the best of."""
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return rotated.flatten(-2).type_as(x)


def rotate_crosswise(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in the form that is fastest where a GPU's kernel is generated.

    Each number reads its neighbour, which lies in the same word. Of an output written in two halves
    there would be a kernel that asks for every number which half it is of, several times over.
    """
    neighbours = torch.unflatten(x, -1, (-1, 2)).flip(-1).flatten(-2)
    cos = cos.unsqueeze(-1).expand(*cos.shape, 2).flatten(-2)
    sin = torch.stack((-sin, sin), -1).flatten(-2)
    return (x * cos + neighbours * sin).type_as(x)


def _by_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the one-pass kernel may rotate ``x``: it knows no gradients, and compilers fuse."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        return False
    if triton_reason(x.device) is not None:
        return False
    from vidsparse.kernels.tokens.rotate import can_rotate

    return can_rotate(x, cos, sin)
