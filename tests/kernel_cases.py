"""What the tests of Triton's kernels share: where cases run, inputs, ways to plan.

A case is a name and a body. On a machine with an NVIDIA GPU the kernels run there; without one
Triton interprets them on the CPU, which `conftest.py` asks for before any kernel is defined. With
``TRITON_INTERPRET=1`` the interpreter runs them on any machine.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from budget import Kernel, Work, random_qkv, random_work
from torch import Tensor

from vidsparse.kernels import support
from vidsparse.masks import pack_bits, tile_count, unpack_bits
from vidsparse.methods import SparseMethod
from vidsparse.plan import SparsePlan
from vidsparse.planning import plan_attention
from vidsparse.route import Route, find_route
from vidsparse.site import CallSite

Case = tuple[str, Callable[[], None]]
Tile = tuple[int, int]

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

CHUNKS = [1, 8, 16, 32, 64, 128]
HEAD_DIMS = [64, 96, 128]
# lengths of the lists of a head's three blocks, of at most 19 chunks of 16 tokens.
LISTS = {
    "all empty": [0],
    "one chunk or none": [1, 0],
    "full, some, none": [19, 7, 0],
    "any order": [0, 3, 19],
}


def listed(
    cases: Iterable[Case], *, only: str | None = None, quick: int = 1
) -> pytest.MarkDecorator:
    """Parametrise a test over the bodies of ``cases``.

    ``only`` is the device that the cases are for, where they are not for both. Interpreted, each
    ``quick``-th stands for those around it where time is short.
    """
    marks = [pytest.mark.gpu] if DEVICE == "cuda" else []
    if only not in (None, DEVICE):
        other = "Triton's interpreter" if only == "cpu" else "an NVIDIA GPU"
        marks.append(pytest.mark.skip(reason=f"a case for {other}"))
    return pytest.mark.parametrize(
        "body",
        [
            pytest.param(
                body,
                id=name,
                marks=[*marks, pytest.mark.slow] if DEVICE == "cpu" and number % quick else marks,
            )
            for number, (name, body) in enumerate(cases)
        ],
    )


def triton_kernel() -> Kernel:
    """The plain kernel of attention."""
    from vidsparse.kernels.attention.triton_gather import triton_attention

    return triton_attention


def skip_without(name: str, kind: str | None = None) -> None:
    """Skip the test unless this GPU is one for kernel ``name`` with 8-bit format ``kind``."""
    capability = torch.cuda.get_device_capability()
    if name == "gluon" and capability != (9, 0):
        pytest.skip("gluon is for compute capability 9.0 (Hopper)")
    if capability < (8, 0):
        pytest.skip("triton needs compute capability 8.0 (Ampere) or newer")
    if kind is not None and "fp8" in kind and capability < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9 (Ada) or newer")
    # on the right GPU any other reason is a fault, not a reason to skip.
    assert support(name, "cuda", torch.bfloat16, 128, quantize=kind) is None


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in fp32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def structured(tokens: int, dim: int, *, heads: int = 2, batch: int = 1, seed: int = 0) -> Tensor:
    """Tokens ``[B, H, S, D]`` that drift slowly, so that neighbours are alike."""
    steps = normal(batch, heads, tokens, dim, seed=seed).cumsum(2)
    return steps / steps.std(2, keepdim=True, correction=0).clamp_min(1e-3) + normal(1, seed=seed)


def drifting(tokens: int, dim: int, dtype: torch.dtype, device: str, **more: int) -> Tensor:
    """``structured`` tokens, twice as far apart."""
    return (structured(tokens, dim, **more) * 2).to(dtype).to(device)


def strided(x: Tensor) -> Tensor:
    """The same tensor with heads beside channels in memory, as pipelines keep them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# how far scores are above those before them. fp32 holds the weights of the first; of the second the
# weights, not their sums; of the others neither.
FAR = [50, 87, 110, 3000]
# of values: with small ones a product is finite where the sum of weights is not, with large ones
# the other way round.
SIZES = [1, 1e-3, 1e33]
EARLY = 40


def far_above(
    above: float,
    keys: int,
    dim: int,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 900,
) -> tuple[Tensor, Tensor, Tensor, Work]:
    """In the last head scores of EARLY tokens are ``above`` others; every second list has none."""
    q, k, v = random_qkv(tokens, dim, dtype, batch=2, spread=0.5)
    q[..., 0], k[..., 0] = 16, 0
    k[1, 1, :EARLY, 0] = above * dim**0.5 / 16
    work = random_work(tokens, (rows, keys), batch=2, share=0.5)
    for b, h, g in itertools.product(*map(range, work.kv_count.shape)):
        chunks = work.kv_index[b, h, g, : work.kv_count[b, h, g]]
        if g % 2 and bool((chunks * keys >= EARLY).any()):
            others = chunks[chunks * keys >= EARLY].clone()
            work.kv_count[b, h, g] = len(others)
            chunks[: len(others)] = others
    return q, k, v, work


def blocks_that_meet_late(work: Work) -> Tensor:
    """Blocks of ``far_above`` whose first step, the last 128 keys of a list, has no EARLY ones."""
    late = torch.zeros_like(work.kv_count, dtype=torch.bool)
    at_once = 128 // work.tile[1]
    for g, count in enumerate(work.kv_count[1, 1].tolist()):
        early = work.kv_index[1, 1, g, :count] * work.tile[1] < EARLY
        first = (count - 1) // at_once * at_once
        late[1, 1, g] = bool(early.any()) and not bool(early[first:].any())
    return late


@contextmanager
def limited(module: ModuleType, **limits: int) -> Iterator[None]:
    """Other limits of sizes, so that small cases go the way of large ones."""
    with ExitStack() as stack:
        for name, value in limits.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def opened(made: tuple[Tensor, Tensor], tokens: int, tile: Tile) -> Tensor:
    """The mask as bools, once its words and counts agree and no bit stands for nothing."""
    words, keys = made
    k_tiles = tile_count(tokens, tile[1])
    kept = unpack_bits(words, k_tiles)
    assert torch.equal(pack_bits(kept), words)
    sizes = torch.full((k_tiles,), tile[1], device=words.device)
    sizes[-1] -= k_tiles * tile[1] - tokens
    assert torch.equal((kept * sizes).sum(-1), keys.long())
    return kept


def by_kernels(method: SparseMethod, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Route:
    """The way by kernels on any device: the interpreter's tensors are the CPU's."""
    route = find_route(method, q, k, v, **more)
    return replace(route, selection=method.selection(q), reorders=True, lists=True)


def by_torch(method: SparseMethod, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Route:
    """The way by torch on any device."""
    route = find_route(method, q, k, v, **more)
    return replace(route, selection="select", reorders=False, lists=False)


def check_same_plan(got: SparsePlan, expected: SparsePlan) -> None:
    """Assert that two plans hold the same bits and counts."""
    assert (got.tile, got.tokens) == (expected.tile, expected.tokens)
    for name in ("q_tiles", "kv_count", "kv_bits"):
        one, other = getattr(got, name), getattr(expected, name)
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    for name in ("selected", "computed"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), msg=name)


def check_captured(
    method: SparseMethod, q: Tensor, k: Tensor, later: Tensor, site: CallSite
) -> None:
    """Capture a plan of ``q`` in a CUDA graph, and replay it with ``later`` in its place."""
    first = plan_attention(method, q, k, site)
    expected = plan_attention(method, later, k, site)
    assert not torch.equal(first.kv_bits, expected.kv_bits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = plan_attention(method, q, k, site)
        index = plan.kv_index
    q.copy_(later)
    graph.replay()
    check_same_plan(plan, expected)
    there = torch.arange(index.shape[-1], device=q.device) < plan.kv_count.unsqueeze(-1)
    assert torch.equal(index[there], expected.kv_index[there])
