"""The CPU kernels against the error budget, and the choice between implementations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from budget import (
    Kernel,
    Work,
    check_kernel,
    check_output,
    random_qkv,
    random_work,
    stock,
    truth,
)
from torch import Tensor

from vidsparse.kernels import dispatch
from vidsparse.kernels.attention import with_lse
from vidsparse.kernels.attention.reference import reference_attention, token_mask
from vidsparse.kernels.attention.torch_sdpa import gather_attention
from vidsparse.kernels.dispatch import IMPLEMENTATIONS, choose, sparse_attention, support
from vidsparse.kernels.hardware import gluon_fault
from vidsparse.plan import make_plan

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned_empty")

KERNELS = {"torch": gather_attention, "reference": reference_attention}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 15, 129, 333]


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> object:
    return KERNELS[request.param]


# ---- the yardstick itself ----


def test_a_token_mask_is_what_the_lists_say() -> None:
    work = Work(
        q_tiles=torch.tensor([[[[2, 0], [1, -1]]]], dtype=torch.int32),
        kv_count=torch.tensor([[[2, 1]]], dtype=torch.int32),
        kv_index=torch.tensor([[[[0, 4, 99], [3, 99, 99]]]], dtype=torch.int32),
        tile=(2, 1),
        tokens=5,
    )
    assert work.mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 1],
        [1, 0, 0, 0, 1],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 0],
        [1, 0, 0, 0, 1],
    ]


def test_the_reference_is_masked_softmax_attention() -> None:
    q, k, v = (x.double() for x in random_qkv(100, 16, torch.float32))
    work = random_work(100, (16, 16))
    out, lse = reference_attention(q, k, v, *work.tensors, tile=work.tile, scale=0.3)
    mask = work.mask()
    for h in range(2):
        for i in range(100):
            keys = mask[0, h, i].nonzero().flatten()
            scores = k[0, h, keys] @ q[0, h, i] * 0.3
            torch.testing.assert_close(out[0, h, i], scores.softmax(0) @ v[0, h, keys])
            torch.testing.assert_close(lse[0, h, i], scores.exp().sum().log())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_budget_refuses_a_lost_key_and_a_wrong_scale(dtype: torch.dtype) -> None:
    q, k, v = random_qkv(333, 64, dtype)
    work = random_work(333, (16, 16))
    stock_out = stock(q, k, v, work.mask(), 0.125)
    true, _ = truth(q, k, v, work, 0.125)
    check_output(stock_out, stock_out, true)
    short = work.kv_count.clone()
    short[0, 0, 0] -= 1
    fewer = Work(work.q_tiles, short, work.kv_index, work.tile, work.tokens)
    for wrong in (truth(q, k, v, fewer, 0.125)[0], truth(q, k, v, work, 0.13)[0]):
        with pytest.raises(AssertionError, match="largest error"):
            check_output(wrong.to(dtype), stock_out, true)


# ---- every implementation that runs on a CPU ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("tile", [(16, 16), (64, 64), (128, 1)], ids=str)
def test_any_length_in_every_dtype(
    kernel: Kernel, tile: tuple[int, int], tokens: int, dtype: torch.dtype
) -> None:
    check_kernel(kernel, *random_qkv(tokens, 64, dtype), random_work(tokens, tile))


@pytest.mark.parametrize("keys", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_every_tile_size(kernel: Kernel, rows: int, keys: int) -> None:
    work = random_work(300, (rows, keys), seed=rows + keys)
    check_kernel(kernel, *random_qkv(300, 64, torch.bfloat16), work)


@pytest.mark.parametrize("dim", [16, 64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_dim(kernel: Kernel, dtype: torch.dtype, dim: int) -> None:
    check_kernel(kernel, *random_qkv(277, dim, dtype), random_work(277, (32, 8)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_and_heads_have_plans_of_their_own(kernel: Kernel, dtype: torch.dtype) -> None:
    q, k, v = random_qkv(200, 64, dtype, batch=2, heads=3)
    check_kernel(kernel, q, k, v, random_work(200, (16, 16), batch=2, heads=3))


# lengths of the lists of a head's blocks; "full" lists hold all 21 chunks of 333 tokens.
RAGGED = {
    "all empty": [0],
    "one chunk each": [1],
    "one chunk or none": [1, 0],
    "full": [21],
    "full and empty": [21, 0],
    "full, some, none": [21, 21, 7, 0],
    "some and none": [5, 4, 0],
    "very uneven": [20, 1],
    "a pair of empty ones first": [0, 0, 0, 5, 21, 21],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("longest_first", [True, False], ids=["longest first", "any order"])
@pytest.mark.parametrize("counts", RAGGED.values(), ids=RAGGED)
def test_ragged_lists(
    kernel: Kernel, counts: list[int], longest_first: bool, dtype: torch.dtype
) -> None:
    work = random_work(333, (64, 16), counts=counts, longest_first=longest_first)
    check_kernel(kernel, *random_qkv(333, 64, dtype), work)


def test_a_list_that_is_only_the_short_chunk(kernel: Kernel) -> None:
    # 257 tokens: chunk 16 has one token, so each row's output is exactly that token's value.
    work = Work(
        q_tiles=torch.arange(3, dtype=torch.int32).view(1, 1, 3, 1),
        kv_count=torch.tensor([[[1, 1, 1]]], dtype=torch.int32),
        kv_index=torch.full((1, 1, 3, 1), 16, dtype=torch.int32),
        tile=(128, 16),
        tokens=257,
    )
    q, k, v = random_qkv(257, 64, torch.bfloat16, heads=1)
    check_kernel(kernel, q, k, v, work)
    out, _ = kernel(q, k, v, *work.tensors, tile=work.tile, scale=0.125)
    assert torch.equal(out, v[:, :, 256:].expand_as(out))


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_the_scale_is_the_callers(kernel: Kernel, scale: float) -> None:
    check_kernel(kernel, *random_qkv(200, 64, torch.float32), random_work(200, (16, 16)), scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_do_not_overflow(kernel: Kernel, dtype: torch.dtype) -> None:
    q, k, v = random_qkv(200, 64, dtype, spread=12)
    check_kernel(kernel, q, k, v, random_work(200, (16, 16)))


def as_stored(x: Tensor, layout: str) -> Tensor:
    """The same values as views into memory laid out in other ways."""
    if layout == "[B, S, H, D]":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "[B, H, D, S]":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.full((*x.shape[:3], x.shape[3] * 3), torch.nan, dtype=x.dtype)
    wide[..., 1::3] = x
    return wide[..., 1::3]


@pytest.mark.parametrize("counts", [[21, 9, 0], [11]], ids=["with full blocks", "without"])
@pytest.mark.parametrize("layout", ["[B, S, H, D]", "[B, H, D, S]", "every third"])
def test_strides_do_not_matter(kernel: Kernel, layout: str, counts: list[int]) -> None:
    q, k, v = random_qkv(333, 64, torch.bfloat16, batch=2)
    work = random_work(333, (64, 16), batch=2, counts=counts)
    q, k, v = (as_stored(x, layout) for x in (q, k, v))
    check_kernel(kernel, q, k, v, work)


@pytest.mark.parametrize("layout", ["[B, S, H, D]", "[B, H, D, S]", "every third"])
def test_strides_do_not_matter_where_every_key_is_chosen_alone(kernel: Kernel, layout: str) -> None:
    q, k, v = (as_stored(x, layout) for x in random_qkv(77, 64, torch.float32, batch=2))
    check_kernel(kernel, q, k, v, random_work(77, (1, 1), batch=2, counts=[20, 3]))
    check_kernel(kernel, q, k, v, random_work(77, (64, 1), batch=2, counts=[20]))


@pytest.mark.parametrize("block_rows", [16, 32, 64, 128])
def test_a_plan_of_the_core_runs(kernel: Kernel, block_rows: int) -> None:
    mask = torch.rand(2, 2, 32, 32, generator=torch.Generator().manual_seed(0)) < 0.2
    plan = make_plan(mask, (16, 16), 500, "xor", block_rows=block_rows)
    work = Work(plan.q_tiles, plan.kv_count, plan.kv_index, plan.tile, plan.tokens)
    check_kernel(kernel, *random_qkv(500, 64, torch.bfloat16, batch=2), work)


# ---- the torch implementation where there is no CPU flash kernel ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", RAGGED.values(), ids=RAGGED)
def test_two_products_and_a_softmax_are_as_exact(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(with_lse, "has_flash", lambda device: False)
    work = random_work(333, (64, 16), counts=counts)
    check_kernel(gather_attention, *random_qkv(333, 64, dtype, spread=3), work)


def test_without_flash_no_more_than_a_pair_of_blocks_has_its_scores_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = []
    attend = with_lse.attend_with_lse

    def watched(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        rows.append(q.shape[0] * q.shape[2])
        return attend(q, *rest)

    monkeypatch.setattr(with_lse, "has_flash", lambda device: False)
    monkeypatch.setattr(with_lse, "attend_with_lse", watched)
    work = random_work(1000, (128, 64), heads=1, counts=[16])
    check_kernel(gather_attention, *random_qkv(1000, 64, torch.float32, heads=1), work)
    assert max(rows) <= 256


# ---- the choice ----


def test_auto_takes_the_fastest_that_can_run() -> None:
    assert IMPLEMENTATIONS == ("gluon", "triton", "torch", "reference")
    assert choose("auto", "cpu", torch.bfloat16, 64) == "torch"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_the_cpu_implementations_run_every_dtype(implementation: str, dtype: torch.dtype) -> None:
    assert support(implementation, "cpu", dtype, 80) is None


@pytest.mark.parametrize("implementation", ["gluon", "triton"])
def test_the_gpu_kernels_say_why_they_do_not_run_on_a_cpu(implementation: str) -> None:
    assert support(implementation, "cpu", torch.bfloat16, 64) == "runs on CUDA devices, not on cpu"


@pytest.mark.parametrize("implementation", ["gluon", "triton"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA")
def test_the_gpu_kernels_say_so_when_there_is_no_cuda(implementation: str) -> None:
    reason = support(implementation, "cuda", torch.bfloat16, 64)
    assert reason == "needs a CUDA device, and PyTorch finds none"


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "reason"),
    [
        ((7, 5), torch.float16, 64, r"compute capability 8\.0"),
        ((8, 0), torch.float32, 64, "not in fp32"),
        ((9, 0), torch.bfloat16, 80, "64, 96 and 128, not 80"),
        ((9, 0), torch.bfloat16, 96, None),
        ((12, 0), torch.float16, 128, None),
    ],
)
def test_triton_names_the_device_dtype_or_head_dim(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    dim: int,
    reason: str | None,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    got = support("triton", "cuda", dtype, dim)
    if reason is None:
        assert got is None
    else:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(got)


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "reason", "chosen"),
    [
        ((8, 0), torch.bfloat16, 128, r"9\.0 \(Hopper\)", "triton"),
        ((10, 0), torch.bfloat16, 128, r"9\.0 \(Hopper\)", "triton"),
        ((9, 0), torch.float32, 128, "not in fp32", "torch"),
        ((9, 0), torch.bfloat16, 80, "64, 96 and 128, not 80", "torch"),
        ((9, 0), torch.float16, 96, None, "gluon"),
    ],
)
def test_gluon_is_for_hopper_and_first_there(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    dim: int,
    reason: str | None,
    chosen: str,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    got = support("gluon", "cuda", dtype, dim)
    assert (got is None) == (reason is None)
    assert re.search(reason or "", got or "")
    assert choose("auto", "cuda", dtype, dim) == chosen


@pytest.fixture
def hopper_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Pretend a Hopper GPU and a version of Triton."""
    triton = pytest.importorskip("triton")

    def pretend(version: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(triton, "__version__", version)
        gluon_fault.cache_clear()

    yield pretend
    # what was found out for that version is not true of the real one.
    gluon_fault.cache_clear()


@pytest.mark.parametrize("version", ["3.5.1", "4.0.0"])
def test_a_triton_without_what_gluon_imports_is_named(
    monkeypatch: pytest.MonkeyPatch, hopper_with: Callable[[str], None], version: str
) -> None:
    import vidsparse.kernels.attention

    # as where gluon's modules are not there, or have other names.
    monkeypatch.setitem(sys.modules, "vidsparse.kernels.attention.hopper", None)
    monkeypatch.delattr(vidsparse.kernels.attention, "hopper", raising=False)
    hopper_with(version)
    reason = support("gluon", "cuda", torch.float16, 64)
    assert reason is not None
    assert f"Triton 3.6 and 3.7, and Triton {version} differs" in reason


@pytest.mark.parametrize(("version", "tried"), [("3.7.1", False), ("3.10.0", True)])
def test_a_triton_that_cannot_compile_gluon_leaves_the_plain_kernels(
    monkeypatch: pytest.MonkeyPatch,
    hopper_with: Callable[[str], None],
    version: str,
    tried: bool,
) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("at 12:4:\nPassManager::run failed")

    hopper_with(version)
    from vidsparse.kernels.attention.hopper import launch

    monkeypatch.setattr(launch, "try_out", broken)
    reason = support("gluon", "cuda", torch.float16, 64)
    if tried:
        assert reason is not None
        assert reason.endswith(f"Triton {version} differs: PassManager::run failed")
    else:
        assert reason is None
    assert choose("auto", "cuda", torch.float16, 64) == ("triton" if tried else "gluon")


def test_gluon_refuses_tiles_and_blocks_that_it_has_no_kernel_for() -> None:
    pytest.importorskip("triton")
    from vidsparse.kernels.attention.hopper.launch import gluon_attention

    q, k, v = random_qkv(64, 64, torch.float16)
    work = random_work(64, (16, 16))
    with pytest.raises(ValueError, match="no kernel for tiles of 16x4"):
        gluon_attention(q, k, v, *work.tensors, tile=(16, 4), scale=1.0)
    with pytest.raises(ValueError, match="must have 4 tiles, not 8"):
        gluon_attention(q, k, v, *work.tensors, tile=(32, 16), scale=1.0)


def test_an_implementation_asked_for_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_qkv(64, 64, torch.float32)
    work = random_work(64, (16, 16))
    with pytest.raises(ValueError, match=r"'triton' implementation cannot run here: it runs on"):
        sparse_attention(q, k, v, *work.tensors, tile=work.tile, implementation="triton")
    called = []
    for name in ("torch", "reference"):

        def loader(name: str = name) -> Any:
            called.append(name)
            return KERNELS[name]

        monkeypatch.setitem(dispatch._KNOWN, name, dispatch._KNOWN[name]._replace(load=loader))
    for name in ("reference", "torch", "auto"):
        sparse_attention(q, k, v, *work.tensors, tile=work.tile, implementation=name)
    assert called == ["reference", "torch", "torch"]


@pytest.mark.parametrize("function", [support, choose])
def test_an_unknown_implementation_is_named_with_the_known_ones(function: object) -> None:
    with pytest.raises(ValueError, match=r"'cuda'. Hint: choose from auto, gluon, triton, torch"):
        function("cuda", "cpu", torch.float32, 64)  # type: ignore[operator]


def test_the_default_scale_is_one_over_the_root_of_the_head_dim() -> None:
    q, k, v = random_qkv(64, 96, torch.float32)
    work = random_work(64, (16, 16))
    default, _ = sparse_attention(q, k, v, *work.tensors, tile=work.tile)
    given, _ = sparse_attention(q, k, v, *work.tensors, tile=work.tile, scale=96**-0.5)
    assert torch.equal(default, given)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_autocast_does_not_reach_into_a_kernel(implementation: str) -> None:
    q, k, v = random_qkv(200, 64, torch.float32)
    work = random_work(200, (16, 16))
    options: dict[str, Any] = {"tile": work.tile, "implementation": implementation}
    plain = sparse_attention(q, k, v, *work.tensors, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = sparse_attention(q, k, v, *work.tensors, **options)
    assert torch.equal(cast[0], plain[0])
    assert torch.equal(cast[1], plain[1])


def test_the_reference_mask_ignores_what_lies_behind_a_list() -> None:
    work = random_work(200, (16, 16))
    clean = work.kv_index.clone()
    clean[clean == 2**30] = 0
    assert torch.equal(token_mask(work.q_tiles, work.kv_count, clean, work.tile, 200), work.mask())


def test_gradients_are_refused_rather_than_lost() -> None:
    q, k, v = (torch.randn(1, 1, 128, 64, requires_grad=True) for _ in "qkv")
    whole = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    work: dict[str, Any] = {"q_tiles": whole, "kv_count": whole[..., 0] + 1, "kv_index": whole}
    with pytest.raises(ValueError, match="no backward pass"):
        sparse_attention(q, k, v, **work, tile=(128, 128), implementation="torch")
    out, _ = sparse_attention(q, k, v, **work, tile=(128, 128), implementation="reference")
    out.sum().backward()
    assert q.grad is not None
    assert v.grad is not None
