"""What the families' processors make queries, keys and values by: projections and angles."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.kernels.hardware import triton_reason
from vidsparse.order import wants_gradient

_NORM: Final = "diffusers.models.normalization.RMSNorm"
"""The norm of heads that ``norm_and_rotate_rows`` computes."""


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


def norm_and_rotate(x: Tensor, norm: Any, cos: Tensor, sin: Tensor, first: int = 0) -> Tensor:
    """``x`` ``[B, S, H, D]`` normed head by head, and tokens from ``first`` on rotated.

    Args:
        x: what is projected; it may be written over.
        norm: of a head; None leaves it as it is.
        cos: ``[T, H or 1, D / 2]``, of neighbouring channels; T may be less than S, where text
            stands beside the video.
        sin: the same.
        first: the token that the angles begin at.
    """
    count, compiling = cos.shape[0], torch.compiler.is_compiling()
    assert first + count <= x.shape[1]
    if compiling and _norms_in_one_pass(x, norm, cos, sin):
        out: Tensor = norm_and_rotate_rows(x, norm.weight, norm.eps, cos, sin, first)
        return out
    if norm is not None:
        x = norm(x)
    if count == x.shape[1]:
        return rotate(x, cos, sin)
    if compiling:
        # what has no angle turns by nothing: with the video apart there would be two passes more.
        beside = (0, 0, 0, 0, first, x.shape[1] - count - first)
        return rotate(x, F.pad(cos, beside, value=1.0), F.pad(sin, beside))
    part = slice(first, first + count)
    x[:, part] = rotate(x[:, part], cos, sin)
    return x


def _norms_in_one_pass(x: Tensor, norm: Any, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel knows such a norm, which nothing else is hooked to, and such angles."""
    if not _has_triton(x.device) or wants_gradient(x):
        return False
    # torch's own rounds elsewhere.
    if f"{type(norm).__module__}.{type(norm).__name__}" != _NORM or norm.bias is not None:
        return False
    hooked = norm._forward_hooks or norm._forward_pre_hooks
    # weights that are offloaded come with the norm's own call.
    if hooked or hasattr(norm, "_hf_hook") or hasattr(norm, "_diffusers_hook"):
        return False
    weight = norm.weight
    return (
        weight is not None
        and tuple(weight.shape) == (x.shape[-1],)
        and x.dtype in (torch.float16, torch.bfloat16)
        and (weight.dtype, weight.device) == (x.dtype, x.device)
        and cos.dtype == sin.dtype == torch.float32
        and cos.stride() == sin.stride()
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_triton(device: torch.device) -> bool:
    return triton_reason(device) is None


@torch.library.custom_op("vidsparse::norm_and_rotate_rows", mutates_args=())
def norm_and_rotate_rows(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, first: int
) -> Tensor:
    """``norm_and_rotate`` in one pass: compilers take three, at half of what memory gives."""
    from vidsparse.kernels.tokens.rotate import can_rotate, rotate_rows

    if not can_rotate(x, cos, sin):
        x = x.contiguous()
    return rotate_rows(x, cos, sin, first=first, norm=(weight, eps))


@norm_and_rotate_rows.register_fake
def _(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, first: int) -> Tensor:
    return x.new_empty(x.shape)


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
