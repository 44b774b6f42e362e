"""8-bit queries and keys: the rounding itself, and attention held to what it promises."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from budget import (
    check_quantized,
    clustered_qkv,
    eight_bit_rms,
    errors,
    random_qkv,
    random_work,
    truth,
)

from vidsparse.kernels import (
    quantize_qk,
    sparse_attention,
    support,
)
from vidsparse.kernels.attention.reference import reference_attention
from vidsparse.kernels.attention.torch_sdpa import gather_attention
from vidsparse.kernels.hardware import gluon_fault
from vidsparse.kernels.tokens.formats import QuantizedQK, quantize_runs

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned_empty")

KERNELS = {"torch": gather_attention, "reference": reference_attention}
KINDS = ["int8", "fp8"]


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Any:
    return KERNELS[request.param]


# ---- rounding ----


def test_int8_by_hand() -> None:
    # two runs of two tokens, the last one short; the largest of a run becomes 127.
    x = torch.tensor([[0.0, 12.7], [-2.54, 0.05], [0.5, -1.0]])[None, None]
    x8, scale, product = quantize_runs(x, "int8", 2, None, None, torch.tensor([[[1.0, 10.0]]]))
    assert x8[0, 0].tolist() == [[0, 127], [-25, 1], [64, -127]]
    torch.testing.assert_close(scale[0, 0], torch.tensor([0.1, 1 / 127]))
    assert product is not None
    torch.testing.assert_close(product[0, 0], torch.tensor([127.0, -2.04, -9.5]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", [1, 16, 64, 128])
def test_no_element_is_off_by_more_than_half_a_step(run: int, kind: str) -> None:
    x = random_qkv(333, 64, torch.float32, batch=2)[0]
    x8, scale, _ = quantize_runs(x, kind, run, None, None, None)
    width = scale.repeat_interleave(run, 2)[:, :, :333, None]
    off = (x8.float() * width - x).abs()
    half = width / 2
    if kind == "fp8":
        # three bits after the leading one: half a step is a sixteenth of its place.
        half = torch.maximum(x.abs() / 16, width * 2.0**-10)
    assert bool((off <= half * 1.0001).all())
    # every run uses the whole range.
    top = {"int8": 127, "fp8": 448}[kind]
    largest = x8.float().abs().amax(-1)
    padded = torch.nn.functional.pad(largest, (0, -333 % run)).view(2, 2, -1, run)
    assert bool((padded.amax(-1) == top).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_zeros_stays_zero(kind: str) -> None:
    x8, scale, _ = quantize_runs(torch.zeros(1, 1, 40, 16), kind, 16, None, None, None)
    assert not bool(x8.float().any())
    assert bool((scale > 0).all())
    assert bool(scale.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_operands_know_their_mean_and_shift(dtype: torch.dtype) -> None:
    q, k, _ = clustered_qkv(200, 64, dtype, batch=2, mean=2.0)
    got = quantize_qk(q, k, "int8", q_run=16, k_run=32)
    mean = k.double().mean(2, keepdim=True)
    q_back, k_back = got.dequantized(torch.float64)
    assert (q_back - q.double()).abs().max() <= got.q_scale.max() / 2 * 1.001
    assert (k_back - (k.double() - mean)).abs().max() <= got.k_scale.max() / 2 * 1.001
    shift = (q.double() @ mean.mT).squeeze(-1)
    torch.testing.assert_close(got.shift.double(), shift, rtol=1e-5, atol=1e-4)
    assert got.q_scale.shape == (2, 2, 13)
    assert got.k_scale.shape == (2, 2, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_is_applied_before_runs_are_cut(kind: str) -> None:
    q, k, _ = random_qkv(200, 64, torch.bfloat16, batch=2)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    got = quantize_qk(q, k, kind, q_run=16, order=order)
    expected = quantize_qk(q[:, :, order], k[:, :, order], kind, q_run=16)
    for name in ("q", "k", "q_scale", "k_scale", "shift"):
        a, b = (getattr(x, name).float() for x in (got, expected))
        # the mean adds the same tokens in another order.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 if name != "k" else 33)
    assert torch.equal(got.q, expected.q)


def test_smoothing_keeps_a_large_common_key_out_of_the_scale() -> None:
    q, k, v = clustered_qkv(500, 64, torch.float32, mean=6.0)
    work = random_work(500, (64, 16), share=0.6)
    true, _ = truth(q, k, v, work, 0.125)

    def error(operands: QuantizedQK) -> float:
        out, _ = reference_attention(
            q, k, v, *work.tensors, tile=work.tile, scale=0.125, quantized=operands
        )
        return errors(out, true)[1]

    smooth = quantize_qk(q, k, "int8")
    k8, k_scale, _ = quantize_runs(k, "int8", 64, None, None, None)
    rough = replace(smooth, k=k8, k_scale=k_scale, shift=torch.zeros_like(smooth.shift))
    assert error(rough) > 3 * error(smooth)


# ---- attention ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", [(16, 16), (128, 64), (64, 1)], ids=str)
def test_attention_is_as_exact_as_8_bits_allow(
    kernel: Any, tile: tuple[int, int], dtype: torch.dtype, kind: str
) -> None:
    q, k, v = random_qkv(300, 64, dtype, batch=2)
    work = random_work(300, tile, batch=2)
    check_quantized(kernel, q, k, v, work, quantize_qk(q, k, kind, q_run=tile[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [[0], [1, 0], [19, 7, 0]], ids=str)
def test_ragged_lists_and_a_large_mean(kernel: Any, counts: list[int], kind: str) -> None:
    q, k, v = clustered_qkv(300, 96, torch.float32, mean=3.0, pull=2.0)
    work = random_work(300, (128, 16), counts=counts, longest_first=False)
    check_quantized(kernel, q, k, v, work, quantize_qk(q, k, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_promised_error_is_the_error(kind: str) -> None:
    # were the promise too high, the tests above would let anything pass.
    q, k, v = random_qkv(400, 64, torch.float32)
    work = random_work(400, (64, 16), share=0.6)
    quantized = quantize_qk(q, k, kind)
    out, lse = reference_attention(
        q, k, v, *work.tensors, tile=work.tile, scale=0.125, quantized=quantized
    )
    true, true_lse = truth(q, k, v, work, 0.125)
    promised, promised_lse = eight_bit_rms(q, k, v, work, 0.125, quantized)
    assert errors(out, true)[1] == pytest.approx(promised, rel=0.15)
    assert errors(lse, true_lse)[1] == pytest.approx(promised_lse, rel=0.15)


def test_the_public_call_quantises_or_takes_what_was_quantised() -> None:
    q, k, v = random_qkv(300, 64, torch.bfloat16)
    work = random_work(300, (32, 16))
    options: dict[str, Any] = {"tile": work.tile, "implementation": "torch"}
    by_name = sparse_attention(q, k, v, *work.tensors, **options, quantize="int8")
    ready = quantize_qk(q, k, "int8", q_run=32, k_run=16)
    given = sparse_attention(q, k, v, *work.tensors, **options, quantize=ready)
    plain = sparse_attention(q, k, v, *work.tensors, **options)
    assert torch.equal(by_name[0], given[0])
    assert torch.equal(by_name[1], given[1])
    assert not torch.equal(by_name[0], plain[0])


# ---- refusals ----


def test_unknown_formats_are_named_with_the_known_ones() -> None:
    q, k, v = random_qkv(200, 64, torch.float32)
    work = random_work(200, (64, 16))
    message = r"unknown 8-bit format 'int4'. Hint: choose from int8, fp8"
    with pytest.raises(ValueError, match=message):
        support("torch", "cpu", torch.bfloat16, 64, quantize="int4")
    with pytest.raises(ValueError, match=message):
        quantize_qk(q, k, "int4")
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, v, *work.tensors, tile=work.tile, quantize="int4")


@pytest.mark.parametrize("run", [0, 48, 256])
@pytest.mark.parametrize("name", ["q_run", "k_run"])
def test_runs_divide_128(name: str, run: int) -> None:
    q, k, _ = random_qkv(200, 64, torch.float32)
    with pytest.raises(ValueError, match=f"{name} must divide 128, got {run}"):
        quantize_qk(q, k, "int8", **{name: run})  # type: ignore[arg-type]


def test_operands_of_another_call_are_refused() -> None:
    q, k, v = random_qkv(200, 64, torch.float32)
    work = random_work(200, (64, 16))
    ready = quantize_qk(q[:, :1], k[:, :1], "int8")
    with pytest.raises(ValueError, match="8-bit operands of shape"):
        sparse_attention(q, k, v, *work.tensors, tile=work.tile, quantize=ready)


def test_gradients_do_not_go_through_8_bits() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(200, 64, torch.float32))
    work = random_work(200, (64, 16))
    with pytest.raises(ValueError, match="8-bit attention has no backward pass"):
        sparse_attention(
            q,
            k,
            v,
            *work.tensors,
            tile=work.tile,
            implementation="reference",
            quantize="int8",
        )


@pytest.mark.parametrize(
    ("capability", "quantize", "reason"),
    [
        ((8, 0), "int8", None),
        ((8, 6), "fp8", "needs compute capability 8.9 (Ada) or newer for fp8"),
        ((8, 9), "fp8", None),
        ((9, 0), "fp8", None),
    ],
)
def test_triton_says_which_8_bits_a_gpu_has(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], quantize: str, reason: str | None
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert support("triton", "cuda", torch.bfloat16, 128, quantize=quantize) == reason


def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gluon_fault.cache_clear()


@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
def test_gluon_has_all_of_them(monkeypatch: pytest.MonkeyPatch, quantize: str | None) -> None:
    hopper(monkeypatch)
    assert support("gluon", "cuda", torch.bfloat16, 128, quantize=quantize) is None


def test_gluon_says_what_a_foreign_triton_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia.hopper", None)
    for name in list(sys.modules):
        if name.startswith("vidsparse.kernels.attention.hopper"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("vidsparse.kernels.attention.hopper", raising=False)
    reason = support("gluon", "cuda", torch.bfloat16, 128)
    assert reason is not None
    assert "is known to compile with Triton 3.6 and 3.7" in reason
    assert "nvidia.hopper" in reason
    gluon_fault.cache_clear()


def test_scales_are_positive() -> None:
    q, k, v = random_qkv(200, 64, torch.float32)
    work = random_work(200, (64, 16))
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="scale must be positive"):
            sparse_attention(q, k, v, *work.tensors, tile=work.tile, scale=scale)
