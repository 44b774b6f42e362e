"""Cases of rotary embedding by a kernel, held to PyTorch's separate operations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_cases import DEVICE, Case
from torch import Tensor


def plain(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool = False) -> Tensor:
    if halves:
        first, second = x.chunk(2, -1)
        rotated = (
            torch.addcmul(first * cos, -sin, second.to(sin.dtype)),
            torch.addcmul(second * cos, sin, first.to(sin.dtype)),
        )
        return torch.cat(rotated, -1).type_as(x).contiguous()
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def angles(*shape: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 5
    return angle.cos(), angle.sin()


def check(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool = False) -> None:
    from vidsparse.kernels.tokens.rotate import can_rotate, rotate_rows

    assert can_rotate(x, cos, sin)
    got = rotate_rows(x, cos, sin, halves=halves)
    assert got.is_contiguous()
    expected = plain(x, cos, sin, halves=halves)
    if halves:
        # multiplied and added at once, which neither the interpreter nor every CPU does.
        torch.testing.assert_close(got, expected, rtol=torch.finfo(x.dtype).eps, atol=1e-7)
    else:
        assert torch.equal(got, expected)


def of(dtype: torch.dtype, *shape: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return x.to(DEVICE, dtype)


def table(*shape: int) -> tuple[Tensor, Tensor]:
    cos, sin = angles(*shape)
    return cos.to(DEVICE), sin.to(DEVICE)


def check_normed(x: Tensor, count: int, first: int) -> None:
    """``count`` tokens from ``first`` on have angles, and all are normed before."""
    from diffusers.models.normalization import RMSNorm

    from vidsparse.kernels.tokens.rotate import rotate_rows

    norm = RMSNorm(x.shape[-1], eps=1e-6).to(x)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    cos, sin = table(count, 1, x.shape[-1] // 2)
    with torch.no_grad():
        got = rotate_rows(x, cos, sin, first=first, norm=(norm.weight, norm.eps))
        expected = norm(x).contiguous()
        part = slice(first, first + count)
        expected[:, part] = plain(expected[:, part], cos, sin)
    step = torch.finfo(x.dtype).eps
    # the mean square is a sum in another order: now and then a number is rounded otherwise.
    torch.testing.assert_close(got, expected, rtol=2 * step, atol=4 * step)
    assert float((got != expected).float().mean()) < 0.02


def cases(name: str, dtype: torch.dtype) -> Iterator[Case]:
    """The shapes in which families hold their angles."""

    def rows() -> Tensor:
        return of(dtype, 2, 37, 3, 64)

    def wide() -> Tensor:
        return of(dtype, 1, 3, 37, 96).transpose(1, 2)

    def twice() -> None:
        cos, sin = table(37, 1, 64)
        check(rows(), cos[..., 0::2], sin[..., 0::2])

    def by_head() -> None:
        cos, sin = table(2, 3, 37, 32)
        check(rows(), cos.transpose(1, 2), sin.transpose(1, 2), halves=True)

    yield f"{name} of tokens", lambda: check(rows(), *table(1, 37, 1, 32))
    yield f"{name} every angle twice", twice
    yield f"{name} of heads", lambda: check(rows(), *table(37, 3, 32))
    yield f"{name} of samples", lambda: check(rows(), *table(2, 37, 1, 32))
    yield f"{name} part of a sequence", lambda: check(rows()[:, 7:], *table(30, 1, 32))
    yield f"{name} 96 channels, strided", lambda: check(wide(), *table(37, 1, 48))
    yield f"{name} halves", by_head
    yield f"{name} halves, strided", lambda: check(wide(), *table(37, 1, 48), halves=True)
    for what, count, first in (("text behind", 30, 0), ("text before", 30, 7), ("video", 37, 0)):
        yield f"{name} normed, {what}", partial(check_normed, rows(), count, first)
    yield f"{name} normed, strided", lambda: check_normed(wide(), 20, 9)
    yield f"{name} over all heads", lambda: check(of(dtype, 2, 37, 192), *table(1, 37, 96))
