"""Rotary embedding in one pass: the same bits as PyTorch's separate operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from kernel_cases import listed
from rotate_cases import angles, cases, of, plain, table
from torch import Tensor

from vidsparse.pipelines import projection
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


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("first", [0, 7], ids=["text behind", "text before"])
def test_text_beside_a_video_turns_by_nothing_compiled_or_not(first: int, normed: bool) -> None:
    x, (cos, sin) = of(torch.float32, 2, 37, 3, 64).cpu(), angles(30, 1, 32)
    norm = RMSNorm(64, eps=1e-6) if normed else None
    part = slice(first, first + 30)
    with torch.no_grad():
        expected = x.clone() if norm is None else norm(x)
        expected[:, part] = plain(expected[:, part], cos, sin)
        assert torch.equal(norm_and_rotate(x.clone(), norm, cos, sin, first), expected)
        compiled = torch.compile(norm_and_rotate, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x, norm, cos, sin, first), expected)


def norms() -> dict[str, Any]:
    """Norms of heads of 64 channels in bf16: one that the kernel knows, and others."""
    made = {name: RMSNorm(64, eps=1e-6).bfloat16() for name in ("known", "hooked", "offloaded")}
    made["hooked"].register_forward_hook(lambda *_: None)
    made["offloaded"]._hf_hook = object()
    return made | {
        "fp32": RMSNorm(64, eps=1e-6),
        "biased": RMSNorm(64, eps=1e-6, bias=True).bfloat16(),
        "plain": RMSNorm(64, eps=1e-6, elementwise_affine=False),
        "torch's own": torch.nn.RMSNorm(64, eps=1e-6).bfloat16(),
        "layer": torch.nn.LayerNorm(64).bfloat16(),
        "none": None,
    }


@pytest.mark.parametrize("name", norms())
def test_one_pass_takes_the_norm_that_its_kernel_knows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a CPU what is asked is all but the device.
    monkeypatch.setattr(projection, "_has_triton", lambda device: True)
    x, (cos, sin) = of(torch.bfloat16, 1, 9, 2, 64).cpu(), angles(9, 1, 32)
    with torch.no_grad():
        assert projection._norms_in_one_pass(x, norms()[name], cos, sin) == (name == "known")
    assert not projection._norms_in_one_pass(x, norms()[name], cos.double(), sin)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 7], ids=["text behind", "text before"])
def test_compiled_blocks_norm_and_rotate_in_one_pass(first: int) -> None:
    x, (cos, sin) = of(torch.bfloat16, 2, 37, 3, 64).cuda(), angles(30, 1, 32)
    cos, sin = cos.cuda(), sin.cuda()
    norm = RMSNorm(64, eps=1e-6).to(x)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    operands = x, norm.weight.detach(), 1e-6, cos, sin, first
    torch.library.opcheck(projection.norm_and_rotate_rows, operands)
    seen: list[str] = []

    def look(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        compiled = torch.compile(norm_and_rotate, fullgraph=True, backend=look)
        got = compiled(x, norm, cos, sin, first)
        expected = norm_and_rotate(x.clone(), norm, cos, sin, first)
    assert any("norm_and_rotate_rows" in name for name in seen)
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-6)


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
