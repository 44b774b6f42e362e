"""Rotary embedding in one pass: the same bits as PyTorch's separate operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import listed
from rotate_cases import angles, cases, of, plain, table
from torch import Tensor

from vidsparse.pipelines.projection import (
    norm_and_rotate,
    rotate,
    rotate_crosswise,
    rotate_stacked,
)

pytest.importorskip("triton", reason="Triton is not installed here")


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


@pytest.mark.parametrize("first", [0, 7], ids=["text behind", "text before"])
def test_text_beside_a_video_turns_by_nothing_compiled_or_not(first: int) -> None:
    x, (cos, sin) = of(torch.float32, 2, 37, 3, 64).cpu(), angles(30, 1, 32)
    part = slice(first, first + 30)
    expected = x.clone()
    expected[:, part] = plain(x[:, part], cos, sin)
    assert torch.equal(norm_and_rotate(x.clone(), None, cos, sin, first), expected)
    compiled = torch.compile(norm_and_rotate, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, None, cos, sin, first), expected)


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
