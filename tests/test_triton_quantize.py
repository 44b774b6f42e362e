"""Rounding to 8 bits, and attention with 8-bit operands, interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from budget import (
    Kernel,
    check_quantized,
    clustered_qkv,
    random_qkv,
    random_work,
)
from kernel_cases import (
    CHUNKS,
    HEAD_DIMS,
    Case,
    listed,
    skip_without,
    strided,
    triton_kernel,
)
from quantize_checks import check_mean, check_pooled

from vidsparse.kernels import quantize_qk
from vidsparse.kernels.tokens.formats import quantize_runs

pytest.importorskip("triton", reason="Triton is not installed here")


def interpreted_quantized() -> Iterator[Case]:
    def attention(
        dim: int, tile: tuple[int, int], kind: str, tokens: int = 300, batch: int = 1
    ) -> Callable[[], None]:
        def body() -> None:
            q, k, v = clustered_qkv(tokens, dim, torch.float16, batch=batch, pull=2.0, mean=1.0)
            work = random_work(tokens, tile, batch=batch)
            quantized = quantize_qk(q, k, kind, q_run=tile[0])
            check_quantized(triton_kernel(), q, k, v, work, quantized)

        return body

    for n, keys in enumerate(CHUNKS):
        for dim in HEAD_DIMS:
            kind = ("int8", "fp8")[(n + dim // 32) % 2]
            yield f"{kind} D={dim} N={keys}", attention(dim, (16, keys), kind)
    yield "int8 batch 2", attention(64, (128, 64), "int8", 200, 2)
    yield "int8 one token", attention(64, (128, 64), "int8", 1)

    def rounding(kind: str, run: int, order: bool) -> Callable[[], None]:
        def body() -> None:
            x = strided(random_qkv(333, 96, torch.float16, batch=2)[0])
            if kind == "fp8":
                # numbers that fp8 holds: the interpreter loses a carry when it rounds to it.
                x = (x * 40).to(torch.float8_e4m3fn).to(torch.float16)
                x[..., ::run, 0] = 448.0
            tokens = torch.randperm(333) if order else None
            mean = x.float().mean(2) if kind == "int8" else None
            arguments = (kind, run, tokens, mean, x.float().mean(2))
            check_rounding(x, *arguments)

        return body

    yield "mean of strided keys", check_mean
    for tile, judged in (((16, 16), False), ((128, 64), True), ((1, 128), False)):
        yield (
            f"quantise and pool {tile} judged {judged}",
            partial(check_pooled, "int8", tile, judged=judged),
        )
    for run in (1, 16, 64, 128):
        for kind in ("int8", "fp8"):
            order = run < 64 and kind == "int8"
            yield f"quantise {kind} runs of {run}", rounding(kind, run, order)


def check_rounding(
    x: torch.Tensor,
    kind: str,
    run: int,
    order: torch.Tensor | None,
    subtract: torch.Tensor | None,
    multiply: torch.Tensor | None,
) -> None:
    """Hold the quantisation kernel to ``quantize_runs``: the same but for ties of rounding."""
    from vidsparse.kernels.tokens.triton_quantize import triton_quantize_runs

    arguments = (kind, run, order, subtract, multiply)
    x8, scale, product = triton_quantize_runs(x, *arguments)
    expected, expected_scale, expected_product = quantize_runs(x, *arguments)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    assert product is not None
    assert expected_product is not None
    near = 1e-5 * expected_product.abs().max().item()
    torch.testing.assert_close(product, expected_product, rtol=1e-4, atol=near)
    # neighbours in int8 and in fp8's ordered bits, and both as near as can be told in fp32: numbers
    # of few bits have many ties.
    a, b = (t.view(torch.int8).int() for t in (x8, expected))
    off = a != b
    assert int((a - b).abs().max()) <= 1
    assert off.float().mean() <= 1e-2
    exact = x.double() if order is None else x[:, :, order].double()
    if subtract is not None:
        exact = exact - subtract.double().unsqueeze(2)
    exact = exact / expected_scale.double().repeat_interleave(run, 2)[:, :, : x.shape[2], None]
    middle = (x8.double() + expected.double()) / 2
    assert bool((exact - middle)[off].abs().le(1e-5 + 1e-5 * middle[off].abs()).all())


@listed(interpreted_quantized(), only="cpu", quick=3)
def test_interpreted(body: Callable[[], None]) -> None:
    body()


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
class TestOnGpu:
    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    @pytest.mark.parametrize("dim", HEAD_DIMS)
    @pytest.mark.parametrize("keys", CHUNKS)
    def test_8_bits(self, kernel: Kernel, keys: int, dim: int, kind: str) -> None:
        skip_without("triton", kind)
        for tokens, rows in ((129, 16), (600, 128)):
            qkv = clustered_qkv(tokens, dim, torch.bfloat16, heads=1, pull=2.0, mean=1.0)
            q, k, v = (x.cuda() for x in qkv)
            work = random_work(tokens, (rows, keys), heads=1, seed=rows).to("cuda")
            quantized = quantize_qk(q, k, kind, q_run=rows)
            check_quantized(kernel, q, k, v, work, quantized)

    @pytest.mark.parametrize("run", [1, 4, 16, 128])
    @pytest.mark.parametrize("keys", [1, 16, 128])
    def test_scales_of_any_run(self, kernel: Kernel, keys: int, run: int) -> None:
        q, k, v = (x.cuda() for x in clustered_qkv(500, 64, torch.bfloat16, pull=2.0, mean=1.0))
        work = random_work(500, (32, keys)).to("cuda")
        check_quantized(
            kernel, q, k, v, work, quantize_qk(q, k, "int8", q_run=128 // run, k_run=run)
        )

    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    @pytest.mark.parametrize("tile", [(16, 16), (128, 64), (64, 1)], ids=str)
    def test_quantisation_that_pools(self, tile: tuple[int, int], kind: str) -> None:
        skip_without("triton", kind)
        check_pooled(kind, tile, judged=True, device="cuda")

    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    @pytest.mark.parametrize("run", [1, 16, 64, 128])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_rounding_to_8_bits(self, dtype: torch.dtype, run: int, kind: str) -> None:
        skip_without("triton", kind)
        x = strided(random_qkv(5000, 96, dtype, batch=2)[0].cuda())
        order = torch.randperm(5000, device="cuda")
        mean = x.float().mean(2)
        check_rounding(x, kind, run, order, mean, mean)
        check_rounding(x, kind, run, None, None, mean)
