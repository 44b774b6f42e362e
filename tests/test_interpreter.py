"""What makes Triton's interpreter quick changes none of its results."""

# what triton compiles is not typed python.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "kernels are compiled for a GPU here: the interpreter is not in use",
        allow_module_level=True,
    )


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _later(a, at, b, bt):
    """Of two numbers with their places, the larger, and of equal ones the later."""
    take = b >= a
    return tl.where(take, b, a), tl.where(take, bt, at)


@triton.jit
def _less(a, b):
    # neither commutes nor associates: the order of calls shows.
    return a - b


@triton.jit
def _reduce_all(x_ptr, out_ptr, R: tl.constexpr, C: tl.constexpr, KEEP: tl.constexpr):
    row, column = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    x = tl.load(x_ptr + row * C + column)
    places = row * C + column
    for axis in tl.static_range(2):
        n: tl.constexpr = C if axis == 0 else R
        to = tl.arange(0, n)
        if KEEP:
            to = to[None, :] if axis == 0 else to[:, None]
        tl.store(out_ptr + to, tl.reduce(x, axis, _larger, keep_dims=KEEP))
        tl.store(out_ptr + n + to, tl.reduce(x, axis, _less, keep_dims=KEEP))
        largest, place = tl.reduce((x, places), axis, _later, keep_dims=KEEP)
        tl.store(out_ptr + 2 * n + to, largest)
        tl.store(out_ptr + 3 * n + to, place.to(tl.float32))
        out_ptr += 4 * n
    if not KEEP:
        tl.store(out_ptr, tl.reduce(x, None, _less))
        tl.store(out_ptr + 1, tl.reduce(tl.reduce(x, 1, _larger), 0, _larger))


def reduced(x: Tensor, keep: bool) -> Tensor:
    out = torch.zeros(4 * sum(x.shape) + 2)
    _reduce_all[(1,)](x, out, *x.shape, keep)
    return out


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [(4, 8), (16, 2), (1, 4)], ids=str)
def test_reducing_by_slices_is_reducing_by_elements(
    shape: tuple[int, int], keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import interpreter

    torch.manual_seed(0)
    # few values, so that some are equal.
    x = torch.randint(-3, 3, shape).float()
    x.view(-1)[1] = torch.nan
    ours = reduced(x, keep)
    with monkeypatch.context() as patch:
        # the interpreter's own, from a second copy of its file.
        spec = importlib.util.find_spec("triton.runtime.interpreter")
        assert spec is not None
        assert spec.loader is not None
        own = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(own)
        assert own.ReduceOps.generic_reduce is not interpreter.ReduceOps.generic_reduce
        patch.setattr(interpreter.ReduceOps, "generic_reduce", own.ReduceOps.generic_reduce)
        theirs = reduced(x, keep)
    assert ours.isnan().any()
    assert torch.equal(ours.nan_to_num(99), theirs.nan_to_num(99))


@triton.jit
def _twice(x):
    # of triton's own library, which sees the language by another name.
    return tl.cumsum(x, 0) + tl.sort(x)


@triton.jit
def _call_often(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + at)
    for _ in range(3):
        x = _twice(x) * 0.5 + tl.sum(x, 0).to(tl.bfloat16).to(tl.float32)
    tl.store(out_ptr + at, x)


def test_replacing_the_language_once_is_replacing_it_at_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime import interpreter

    torch.manual_seed(0)
    x = torch.randn(2, 8)

    def called() -> Tensor:
        out = torch.zeros_like(x)
        _call_often[(2,)](x, out, 8)
        return out

    count = 0
    spec = importlib.util.find_spec("triton.runtime.interpreter")
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    # by the copy's, that sets the language as this one's does.
    own.__dict__.update(
        {name: vars(interpreter)[name] for name in ("interpreter_builder", "interpreter_semantic")}
    )

    def replace(function: Any) -> Any:
        nonlocal count
        count += 1
        return own._patch_lang(function)

    ours = [called(), called()]
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace)
        patch.setattr(interpreter, "_get_np_dtype", own._get_np_dtype)
        theirs = called()
    assert count > 6
    assert torch.equal(ours[0], theirs)
    assert torch.equal(ours[1], theirs)
    assert torch.equal(called(), theirs)


@triton.jit
def _wrap(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at) * 2 + 1)


def test_a_sum_that_does_not_fit_wraps_whether_or_not_the_interpreter_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime import interpreter

    x = torch.tensor([0, -5, 2**30, 2**31 - 1], dtype=torch.int32)
    options = interpreter.InterpreterOptions
    made = []
    for looks in (False, True):
        given = options(sanitize_overflow=looks)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", given)
        made.append(torch.zeros_like(x))
        _wrap[(1,)](x, made[-1], len(x))
    assert made[0].tolist() == made[1].tolist() == [1, -9, -(2**31) + 1, -1]


def test_shapes_described_once_are_those_described_anew() -> None:
    from triton.language import core

    for element, other in ((tl.int32, tl.float32), (tl.float32, tl.int32)):
        made = [tl.block_type(element, sizes) for sizes in ([4, 8], [4, 8], [8, 4])]
        for one in made:
            assert (one.element_ty, one.scalar, one.numel) == (element, element, 32)
            tensor = core.tensor(None, one)
            assert (tensor.dtype, tensor.numel.value) == (element, 32)
            assert [size.value for size in tensor.shape] == list(one.shape)
        assert made[0] == made[1] != made[2]
        assert made[0].name == made[1].name != made[2].name
        assert made[0] != made[0].with_element_ty(other)
    pointers = [tl.pointer_type(tl.int32, const=const) for const in (False, True)]
    assert [tl.block_type(one, [4]).element_ty.const for one in pointers] == [False, True]
