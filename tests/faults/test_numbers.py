"""Extreme numbers: every implementation and every method stays within its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from budget import (
    Kernel,
    allowed,
    check_lse,
    check_output,
    errors,
    random_qkv,
    random_work,
    stock,
    truth,
)
from fault_runs import IS_LONG
from kernel_cases import DEVICE, triton_kernel
from torch import Tensor

from vidsparse import TokenGrid, attend
from vidsparse.kernels import sparse_attention
from vidsparse.kernels.attention.reference import reference_attention
from vidsparse.kernels.attention.torch_sdpa import gather_attention
from vidsparse.methods import METHODS, SparseMethod

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread", "poisoned_empty"),
]

TOKENS, DIM = 333, 64
GRID = TokenGrid(3, 8, 11)
QKV = tuple[Tensor, Tensor, Tensor]


def _plain(method: type) -> bool:
    """Whether it is sparse and runs without calibrated numbers."""
    return issubclass(method, SparseMethod) and not method.needs_numbers


def _one_huge(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 0, 150, 5] = 1e4
    return x


def extremes() -> dict[str, Callable[[QKV], QKV]]:
    """Inputs that are finite, and as far from usual ones as models can come."""

    def each(change: Callable[[Tensor], Tensor], which: str = "qkv") -> Callable[[QKV], QKV]:
        def changed(qkv: QKV) -> QKV:
            q, k, v = (
                change(x) if name in which else x for name, x in zip("qkv", qkv, strict=True)
            )
            return q, k, v

        return changed

    return {
        "zeros": each(torch.zeros_like),
        "zero queries": each(torch.zeros_like, "q"),
        "zero values": each(torch.zeros_like, "v"),
        "constants": each(lambda x: torch.full_like(x, 0.5)),
        "plus and minus 1e4": each(lambda x: x.sign() * 1e4, "v"),
        "large keys": each(lambda x: x.sign() * 100, "k"),
        "queries and keys of 1e4": each(lambda x: x.sign() * 1e4, "qk"),
        "one huge query": each(_one_huge, "q"),
        "one huge key": each(_one_huge, "k"),
        "one huge value": each(_one_huge, "v"),
        "identical keys": each(lambda x: x[:, :, :1].expand_as(x).contiguous(), "k"),
        "values at fp16's edge": each(lambda x: x.sign() * 6.5e4, "v"),
        "subnormal numbers": each(lambda x: x * 1e-7),
    }


KERNELS: dict[str, Callable[[], Kernel]] = {
    "reference": lambda: reference_attention,
    "torch": lambda: gather_attention,
    "triton": triton_kernel,
}
DTYPES = [torch.float32, torch.float16]
if IS_LONG:
    DTYPES.append(torch.bfloat16)
TILES = [(16, 16), (128, 64), (64, 128)] if IS_LONG else [(128, 64)]


def cases() -> Iterator[object]:
    for name in KERNELS:
        for dtype in DTYPES:
            if name == "triton" and dtype == torch.bfloat16 and DEVICE == "cpu":
                # the interpreter keeps bf16 in numbers that numpy does not have.
                continue
            for tile in TILES:
                yield pytest.param(name, dtype, tile, id=f"{name}-{dtype}-{tile}")


@pytest.mark.parametrize("extreme", extremes())
@pytest.mark.parametrize(("name", "dtype", "tile"), list(cases()))
def test_a_kernel_keeps_to_its_budget_on_extreme_numbers(
    name: str, dtype: torch.dtype, tile: tuple[int, int], extreme: str
) -> None:
    qkv = extremes()[extreme](random_qkv(TOKENS, DIM, dtype))
    q, k, v = (x.to(dtype).to(DEVICE if name == "triton" else "cpu") for x in qkv)
    work = random_work(TOKENS, tile, counts=[-(-TOKENS // tile[1]), 2, 1, 0])
    work, scale = work.to(str(q.device)), DIM**-0.5
    out, lse = KERNELS[name]()(q, k, v, *work.tensors, tile=work.tile, scale=scale)
    true, true_lse = truth(q, k, v, work, scale)
    assert bool(out.isfinite().all())
    largest, _ = errors(out, true)
    most, _ = allowed(stock(q, k, v, work.mask(), scale), true)
    # stock attention is exact on some of these. a sum of so many fp32 products may round as often,
    # each time to either side.
    roundings = TOKENS**0.5 * torch.finfo(torch.float32).eps * float(v.abs().max())
    assert largest <= max(most, roundings)
    check_lse(lse, true_lse, dtype)
    seen = work.mask().any(-1).cpu()
    assert not bool(out.cpu()[~seen].any())


@pytest.mark.parametrize("extreme", extremes())
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_in_8_bits_answers_extreme_numbers_with_averages_of_values(
    name: str, extreme: str
) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    device = DEVICE if name == "triton" else "cpu"
    qkv = extremes()[extreme](random_qkv(TOKENS, DIM, torch.float16))
    q, k, v = (x.half().to(device) for x in qkv)
    work = random_work(TOKENS, (128, 64), counts=[6, 2, 1])
    out, lse = sparse_attention(
        q, k, v, *work.to(device).tensors, tile=work.tile, implementation=name, chosen=True,
        quantize="int8",
    )  # fmt: skip
    # where rounding moves scores by millions it decides which key wins, but some average it is.
    assert bool(lse.isfinite().all())
    slack = 2 * torch.finfo(torch.float16).eps * float(v.abs().max())
    assert bool((out >= v.amin(2, keepdim=True) - slack).all())
    assert bool((out <= v.amax(2, keepdim=True) + slack).all())


@pytest.mark.parametrize("extreme", extremes())
@pytest.mark.parametrize("method", [name for name, one in METHODS.items() if _plain(one)])
def test_a_method_answers_extreme_numbers_with_averages_of_values(
    method: str, extreme: str
) -> None:
    q, k, v = extremes()[extreme](random_qkv(GRID.tokens, DIM, torch.float32))
    out = attend(q, k, v, GRID, method)
    assert bool(out.isfinite().all())
    # whatever it leaves out, weights are positive and sum to one, up to their roundings.
    slack = 64 * torch.finfo(torch.float32).eps * float(v.abs().max())
    lowest, highest = (edge(v, 2).unsqueeze(2) for edge in (torch.amin, torch.amax))
    assert bool((out >= lowest - slack).all())
    assert bool((out <= highest + slack).all())


@pytest.mark.parametrize("extreme", extremes())
def test_a_method_that_keeps_everything_is_stock_attention_on_extreme_numbers(extreme: str) -> None:
    q, k, v = extremes()[extreme](random_qkv(GRID.tokens, DIM, torch.float32))
    work = random_work(GRID.tokens, (16, 16), counts=[1000])
    true, _ = truth(q, k, v, work, DIM**-0.5)
    everything = stock(q, k, v, work.mask(), DIM**-0.5)
    check_output(attend(q, k, v, GRID, "fg-attn", top_p=1), everything, true)
