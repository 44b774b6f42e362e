"""Rotary embedding in one pass: the same bits as PyTorch's separate operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_cases import DEVICE, Case, listed
from torch import Tensor

from vidsparse.pipelines.projection import rotate, rotate_crosswise, rotate_stacked

pytest.importorskip("triton", reason="Triton is not installed here")


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
    yield f"{name} over all heads", lambda: check(of(dtype, 2, 37, 192), *table(1, 37, 96))


@listed(cases("fp16", torch.float16))
def test_half_precision(body: Callable[[], None]) -> None:
    body()


# the interpreter rounds to bf16 otherwise than GPUs and PyTorch do.
@listed(cases("bf16", torch.bfloat16), only="cuda")
def test_bfloat16(body: Callable[[], None]) -> None:
    body()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [rotate_stacked, rotate_crosswise])
def test_what_compilers_are_given_is_the_same_to_the_bit(
    form: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = of(dtype, 2, 37, 3, 64)
    twice = tuple(angle[..., 0::2] for angle in table(37, 1, 64))
    for cos, sin in (table(1, 37, 1, 32), twice, table(37, 3, 32), table(2, 37, 1, 32)):
        assert torch.equal(form(x, cos, sin), plain(x, cos, sin))
    of_heads = of(dtype, 1, 3, 37, 96).transpose(1, 2)
    assert torch.equal(form(of_heads, *table(37, 1, 48)), plain(of_heads, *table(37, 1, 48)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_it_is_the_same_but_for_a_rounding(device: str) -> None:
    x, angle = of(torch.bfloat16, 1, 50, 2, 64).to(device), table(50, 1, 32)
    cos, sin = (one.to(device) for one in angle)
    compiled = torch.compile(rotate, fullgraph=True)(x, cos, sin)
    # sums and products may be made at once, or of what was not rounded before.
    torch.testing.assert_close(compiled, plain(x, cos, sin), rtol=2**-7, atol=2**-8)


@pytest.mark.gpu
def test_the_processors_use_it_but_not_where_gradients_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vidsparse.kernels.tokens import rotate as rotate_kernels

    def unwanted(*args: object, halves: bool) -> Tensor:
        raise AssertionError("the kernel ran")

    x = torch.randn(1, 5, 2, 16, device="cuda", dtype=torch.bfloat16)
    cos, sin = (t.cuda() for t in angles(5, 1, 8))
    expected = plain(x, cos, sin)
    assert torch.equal(rotate(x, cos, sin), expected)
    monkeypatch.setattr(rotate_kernels, "rotate_rows", unwanted)
    assert torch.equal(rotate(x.clone().requires_grad_(), cos, sin), expected)
    with pytest.raises(AssertionError, match="the kernel ran"):
        rotate(x, cos, sin)


def test_other_tensors_are_left_to_pytorch() -> None:
    from vidsparse.kernels.tokens.rotate import can_rotate

    x = torch.randn(1, 5, 2, 16).half()
    cos, sin = angles(5, 1, 8)
    assert can_rotate(x, cos, sin)
    assert not can_rotate(x.float(), cos, sin)
    assert not can_rotate(x.flatten()[1:-15].view(1, 9, 1, 16), cos, sin)
    assert not can_rotate(x, cos.double(), sin.double())
    assert not can_rotate(x.transpose(2, 3), cos, sin)
    assert not can_rotate(x[0, 0], cos, sin)
