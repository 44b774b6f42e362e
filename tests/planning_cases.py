"""Cases of the kernels of mask and plan.

What the kernels are held to is the torch code that runs on a CPU. A mask is not compared bit by bit
with a sorted one, for two tiles of nearly equal weight may swap: it is held to what top-p means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from kernel_cases import (
    Case,
    by_kernels,
    by_torch,
    check_same_plan,
    limited,
    normal,
    opened,
    structured,
)
from torch import Tensor

from vidsparse import planning
from vidsparse.grid import TokenGrid
from vidsparse.grouping import merge_xor_window
from vidsparse.kernels import quantize_qk
from vidsparse.masks import pack_bits, pooled_mean, self_similarity, tile_count
from vidsparse.methods import FgAttn, SpargeAttn, SparseMethod
from vidsparse.order import token_order
from vidsparse.plan import SparsePlan, make_plan, make_plan_of_bits
from vidsparse.planning import order_and_plan
from vidsparse.site import CallSite

# ---- pooling and order ----


def check_pool(x: Tensor, size: int) -> None:
    from vidsparse.kernels.tokens.pool import pool

    pooled = pool(x, size, judged=True)
    mean = pooled_mean(x, size)
    got = (pooled.high.float() + pooled.low.float()) * pooled.scale.unsqueeze(-1)
    # 22 bits of the largest of a tile's means, and the rounding of another order of adding.
    room = mean.abs().amax(-1, keepdim=True) * 2.0**-20 + 2.0**-22 * x.abs().max().float()
    assert bool(((got - mean).abs() <= room).all())
    assert pooled.similarity is not None
    torch.testing.assert_close(pooled.similarity, self_similarity(x, size), rtol=1e-5, atol=1e-6)


def pool_cases(device: str) -> Iterator[Case]:
    def case(x: Tensor, size: int) -> Callable[[], None]:
        return lambda: check_pool(x.to(device), size)

    for size in (1, 8, 16, 32, 128):
        for tokens in (1, 15, 100, 257):
            x = normal(2, 2, tokens, 64) + 3
            yield f"pool {tokens} by {size}", case(x.half(), size)
    for dim in (32, 96, 128):
        yield f"pool D={dim}", case(normal(1, 3, 50, dim), 16)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        strided = normal(2, 70, 3, 64).to(dtype).transpose(1, 2)
        yield f"pool strided {dtype}", case(strided, 16)
    zeros = torch.zeros(1, 1, 48, 64)
    zeros[:, :, 16:32] = normal(16, 64)
    yield "pool zeros", case(zeros, 16)
    # beyond what fp16 holds, and below what it resolves.
    yield "pool huge", case(normal(1, 1, 40, 64) * 1e12, 16)
    yield "pool tiny", case(normal(1, 1, 40, 64) * 1e-20, 16)


def check_reorder(x: Tensor, size: int) -> None:
    from vidsparse.kernels.tokens.pool import pool, reorder, reorder_and_pool

    shuffle = torch.Generator().manual_seed(0)
    source = torch.randperm(x.shape[2], generator=shuffle).to(x.device)
    expected = x.index_select(2, source)
    got = reorder(x, source)
    assert got.is_contiguous()
    assert torch.equal(got, expected)
    # into the pipeline's layout.
    room = torch.zeros_like(x.transpose(1, 2).contiguous()).transpose(1, 2)
    assert torch.equal(reorder(x, source, room), expected)
    assert torch.equal(room, expected)
    copy, pooled = reorder_and_pool(x, source, size, judged=True)
    alone = pool(expected, size, judged=True)
    assert torch.equal(copy, expected)
    for name in ("high", "low", "scale", "similarity"):
        assert torch.equal(getattr(pooled, name), getattr(alone, name)), name


def reorder_cases(device: str) -> Iterator[Case]:
    def case(x: Tensor, size: int) -> Callable[[], None]:
        return lambda: check_reorder(x.to(device), size)

    for tokens in (1, 50, 257):
        for size in (8, 128):
            x = normal(2, 2, tokens, 64).half()
            yield f"reorder {tokens} with tiles of {size}", case(x, size)
    yield "reorder strided", case(normal(2, 70, 3, 96).bfloat16().transpose(1, 2), 16)


# ---- top-p ----


def check_top_p(scores: Tensor, kept: Tensor, top_p: float) -> None:
    """What top-p means, for fp64 ``scores`` ``[..., K]``, with room for rounding at its edge."""
    weights = scores.softmax(-1)
    hair = 1e-5
    lowest = weights.masked_fill(~kept, math.inf).amin(-1, keepdim=True)
    # nothing heavier than what is kept was left out.
    assert not bool((~kept & (weights > lowest * (1 + hair))).any())
    assert bool(((weights * kept).sum(-1) >= top_p * (1 - hair)).all())
    # without the lightest that are kept it would not be enough.
    above = weights * (weights > lowest * (1 + hair))
    assert bool((above.sum(-1) <= top_p * (1 + hair)).all())


def exact_scores(q: Tensor, k: Tensor, tile: tuple[int, int]) -> Tensor:
    q_mean, k_mean = (
        torch.stack([t.mean(2) for t in x.double().split(size, 2)], 2)
        for x, size in zip((q, k), tile, strict=True)
    )
    return q_mean @ k_mean.mT / math.sqrt(q.shape[-1])


def top_p_bits(
    q: Tensor, k: Tensor, tile: tuple[int, int], top_p: float, **more: Any
) -> tuple[Tensor, Tensor]:
    """The kernel's mask as bools, and the keys it counted."""
    from vidsparse.kernels.selection.pooled import top_p_words
    from vidsparse.kernels.tokens.pool import pool

    judged = more.get("theta") is not None
    pooled = [pool(x, size, judged=judged) for x, size in zip((q, k), tile, strict=True)]
    words, keys = top_p_words(*pooled, scale=q.shape[-1] ** -0.5, top_p=top_p, **more)
    kept = opened((words, keys), k.shape[2], tile)
    return kept, keys


def check_mask(q: Tensor, k: Tensor, tile: tuple[int, int], top_p: float) -> None:
    kept, _ = top_p_bits(q, k, tile, top_p)
    assert bool(kept.any(-1).all())
    check_top_p(exact_scores(q, k, tile), kept, top_p)


def top_p_cases(device: str) -> Iterator[Case]:
    def case(
        tokens: int,
        tile: tuple[int, int],
        share: float,
        *,
        dim: int = 64,
        batch: int = 1,
        spread: float = 2.0,
        dtype: torch.dtype = torch.float16,
        limits: dict[str, int] | None = None,
    ) -> Callable[[], None]:
        def body() -> None:
            from vidsparse.kernels.selection import top_p

            q, k = (
                (structured(tokens, dim, batch=batch, seed=i) * spread).to(dtype).to(device)
                for i in (0, 1)
            )
            with limited(top_p, **(limits or {})):
                check_mask(q, k, tile, share)

        return body

    for tokens in (1, 16, 17, 100, 530):
        yield f"top-p {tokens} tokens", case(tokens, (16, 16), 0.7)
    for tile in ((16, 1), (32, 8), (64, 64), (128, 1), (16, 128)):
        yield f"top-p tile {tile}", case(300, tile, 0.7)
    for share in (1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999):
        yield f"top-p {share}", case(300, (16, 8), share)
    for spread in (0.01, 0.5, 8.0, 30.0):
        yield f"top-p spread {spread}", case(300, (16, 8), 0.9, spread=spread)
    for dim in (32, 96, 128, 256):
        yield f"top-p D={dim}", case(100, (16, 8), 0.7, dim=dim)
    yield "top-p batch 2", case(100, (16, 16), 0.7, batch=2)
    yield "top-p fp32", case(100, (16, 8), 0.7, dtype=torch.float32)
    # 700 columns are 512 and 256; in passes of 128; in rooms of one block of rows.
    yield "top-p two pieces", case(700, (128, 1), 0.8)
    passes = {"ROW_COLUMNS": 64, "LONG_BLOCK": 128}
    yield "top-p in passes", case(700, (128, 1), 0.8, limits=passes)
    yield "top-p in passes, nearly all", case(530, (128, 1), 0.9999, limits=passes)

    def many_rooms() -> None:
        from vidsparse.kernels.selection import pooled

        with limited(pooled, SCORE_BYTES=1):
            case(300, (16, 16), 0.7, batch=2)()

    yield "top-p in many rooms", many_rooms

    def everything() -> None:
        q, k = (normal(1, 2, 100, 64, seed=i).half().to(device) for i in (0, 1))
        for tile in ((16, 16), (16, 1)):
            assert bool(top_p_bits(q, k, tile, 1.0)[0].all())

    def ties() -> None:
        # every key is one of three, so weights come in three values, and equals are kept together.
        # whole numbers: their products are exact, whatever order a machine adds them in.
        three = (normal(3, 64) * 2).round()
        k = three[torch.arange(90) % 3][None, None].to(device)
        q = normal(1, 1, 64, 64, seed=1).round().to(device)
        kept, _ = top_p_bits(q, k, (16, 1), 0.6)
        assert torch.equal(kept.view(4, 30, 3).any(1), kept.view(4, 30, 3).all(1))
        check_top_p(exact_scores(q, k, (16, 1)), kept[:, :], 0.6)
        # and all of them where all are equal.
        assert bool(top_p_bits(torch.zeros_like(q), k, (16, 1), 0.6)[0].all())

    def nothing_finite() -> None:
        q, k = (normal(1, 1, 64, 64, seed=i).to(device) for i in (0, 1))
        q[:, :, 16:32] = math.nan
        kept, keys = top_p_bits(q, k, (16, 16), 0.6)
        assert kept[0, 0, 1].tolist() == [True, False, False, False]
        assert keys[0, 0, 1].item() == 16
        k[:, :, 5] = math.inf
        assert bool((top_p_bits(q, k, (16, 16), 0.6)[0].sum(-1) == 1).all())

    yield "top-p 1", everything
    yield "top-p ties", ties
    yield "top-p without a finite row", nothing_finite


# ---- plans against torch ----


def check_index(plan: SparsePlan) -> None:
    expected = plan.list_keys(by_kernel=False)
    there = torch.arange(expected.shape[-1], device=expected.device) < plan.kv_count.unsqueeze(-1)
    # as it is, and with bits that came with more from another process.
    part = torch.cat([~plan.kv_bits, plan.kv_bits], -1)[..., plan.kv_bits.shape[-1] :]
    for one in (plan, replace(plan, kv_bits=part)):
        got = one.list_keys(by_kernel=True)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(got[there], expected[there])


def check_method(
    method: SparseMethod,
    grid: TokenGrid,
    device: str,
    *,
    batch: int = 1,
    rounded: bool = True,
    **limits: int,
) -> None:
    """Hold a plan by kernels to torch's; where it is ``rounded``, beside queries and keys too."""
    q, k = (
        (structured(grid.tokens, 64, batch=batch, seed=i) * 2).half().to(device) for i in (0, 1)
    )
    order = token_order("hilbert", grid, device)
    site = CallSite(0, 0, 0.0, grid)
    there = order_and_plan(method, q, k, site, order, by_torch(method, q, k, k))
    with limited(planning, **limits):
        here = order_and_plan(method, q, k, site, order, by_kernels(method, q, k, k))
    assert torch.equal(here.q, there.q)
    assert torch.equal(here.k, there.k)
    check_same_plan(here.plan, there.plan)
    check_index(here.plan)
    if not rounded:
        return
    # means are taken of 16-bit keys in order, which rounding on the way does not make.
    without: dict[str, Any] = {"means": None}
    method = replace(method, **without)
    with limited(planning, **limits):
        route = by_kernels(method, q, k, k, quantize="int8")
        also = order_and_plan(method, q, k, site, order, route)
    check_same_plan(also.plan, there.plan)
    # tiles of one token are planned from tokens in order: nothing is rounded on the way.
    assert (also.quantized is None) == (min(method.tile) == 1)
    if also.quantized is not None:
        expected = quantize_qk(q, k, "int8", q_run=method.tile[0], order=order.permutation)
        for name in ("q", "k"):
            a, b = (getattr(x, name).int() for x in (also.quantized, expected))
            assert (a - b).abs().float().mean() <= 1e-4


def plan_cases(device: str) -> Iterator[Case]:
    def case(method: SparseMethod, grid: TokenGrid, **more: Any) -> Callable[[], None]:
        return lambda: check_method(method, grid, device, **more)

    small = TokenGrid(3, 6, 9)
    for merge in ("xor", "xor-window", "consecutive"):
        yield (
            f"plan by {merge}",
            case(FgAttn(top_p=0.4, merge=merge), TokenGrid(3, 8, 11), batch=2, rounded=False),
        )
    for tile in ((16, 1), (32, 8), (64, 64), (128, 16)):
        yield f"plan of tile {tile}", case(FgAttn(top_p=0.4, tile=tile), small)
    for text in (1, 16, 37):
        grid = TokenGrid(3, 6, 9, text=text, text_first=text == 16)
        yield f"plan with {text} text tokens", case(FgAttn(top_p=0.2), grid)
    for theta in (-1, 0.2, 0.5, 0.6, 1):
        method: SparseMethod = SpargeAttn(tau=0.3, theta=theta, tile=(32, 16))
        yield f"plan of spargeattn at theta {theta}", case(method, small)
    method = SpargeAttn(tau=0.3, theta=0.5, tile=(16, 1))
    yield "plan of spargeattn with text", case(method, TokenGrid(3, 6, 9, text=9))
    for tile in ((16, 16), (16, 1)):
        method = FgAttn(top_p=0.4, tile=tile)
        yield f"plan of tile {tile} by head", case(method, small, batch=2, MASK_BYTES=1)


def random_words(tiles: int, keys: int, *, share: float = 0.3, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(1, 2, tiles, keys, generator=gen) < share


def check_groups(mask: Tensor, per_block: int, window: int | None) -> None:
    from vidsparse.kernels.selection.plan import group_by_xor

    tiles = mask.shape[2]
    got = group_by_xor(pack_bits(mask), per_block, window)
    whole = tiles + -tiles % per_block
    assert torch.equal(got, merge_xor_window(mask, per_block, window or whole))


def group_cases(device: str) -> Iterator[Case]:
    def case(mask: Tensor, per_block: int, window: int | None) -> Callable[[], None]:
        return lambda: check_groups(mask.to(device), per_block, window)

    for per_block in (2, 4, 8):
        for tiles in (1, 7, 9, 61):
            for window in (16, None):
                mask = random_words(tiles, 70, seed=tiles)
                yield f"group {tiles} by {per_block} in {window}", case(mask, per_block, window)
    # few keys: most distances are equal, and the order of ties shows.
    yield "group ties", case(random_words(61, 3), 8, 32)
    yield "group equal rows", case(torch.ones(1, 2, 20, 40, dtype=torch.bool), 4, None)
    yield "group many words", case(random_words(9, 1500), 4, None)

    def wide() -> None:
        from vidsparse.kernels.selection import plan

        # the numbers of 64 bits that long rows in wide windows want.
        constants = plan.group_constants(2**14, 2**13)
        assert constants["NEVER"] == 2**63 - 1
        replaced = {key: constants[key] for key in ("RANK", "NEVER")}
        real = plan.group_constants
        with mock.patch.object(plan, "group_constants", lambda *a: real(*a) | replaced):
            check_groups(random_words(20, 70).to(device), 4, None)

    yield "group by 64 bits", wide


def bits_cases(device: str) -> Iterator[Case]:
    def case(tokens: int, tile: tuple[int, int], share: float) -> Callable[[], None]:
        def body() -> None:
            gen = torch.Generator().manual_seed(tokens)
            shape = (2, 2, tile_count(tokens, tile[0]), tile_count(tokens, tile[1]))
            mask = (torch.rand(shape, generator=gen) < share).to(device)
            sizes = torch.full((shape[-1],), tile[1], device=device)
            sizes[-1] -= shape[-1] * tile[1] - tokens
            keys = (mask * sizes).sum(-1).int()
            for merge in ("xor-window", "consecutive"):
                plan = make_plan_of_bits(pack_bits(mask), keys, tile, tokens, merge)
                check_same_plan(plan, make_plan(mask, tile, tokens, merge))
                check_index(plan)

        return body

    for tokens in (1, 128, 530):
        for tile in ((16, 16), (64, 1), (128, 128)):
            yield f"plan of random bits, {tokens} by {tile}", case(tokens, tile, 0.3)
    yield "plan of full bits", case(500, (16, 8), 1.0)
    # rows without keys, and blocks without them.
    yield "plan of few bits", case(500, (16, 8), 0.002)

    def wide_numbers() -> None:
        # 40,000 chunks are more than int16 counts.
        mask = random_words(1, 40_000, share=0.01).to(device)
        plan = make_plan_of_bits(
            pack_bits(mask), mask.sum(-1).int(), (128, 1), 40_000, "consecutive"
        )
        assert plan.kv_index.dtype == torch.int32
        check_index(plan)

    yield "more chunks than int16 counts", wide_numbers


def engine_cases(device: str) -> Iterator[Case]:
    def whole_call() -> None:
        from vidsparse.engine import AttentionEngine
        from vidsparse.schedule import Schedule
        from vidsparse.site import CallSite

        grid = TokenGrid(3, 8, 11, text=5)
        shape = (2, grid.tokens, 2, 64)
        q, k, v = (normal(*shape, seed=i).half().to(device).transpose(1, 2) * 2 for i in range(3))
        outputs = []
        for how in (by_torch, by_kernels):
            engine = AttentionEngine(
                FgAttn(top_p=0.3), schedule=Schedule(dense_steps=0, reuse=2), layers=1
            )
            engine.router = how
            engine.begin_run(2)
            outputs += [engine.attend(q, k, v, CallSite(0, step, 0.0, grid)) for step in range(2)]
            assert [c.action for c in engine.trace.cells] == ["replan", "reuse"]
        for out in outputs[1:]:
            assert torch.equal(out, outputs[0])
        # written as the pipeline keeps its tensors, which need not copy it.
        assert outputs[2].stride() == outputs[3].stride() == q.stride()

    yield "a whole call", whole_call


def cases(device: str) -> Iterator[Case]:
    """Name and body of every case."""
    yield from pool_cases(device)
    yield from reorder_cases(device)
    yield from top_p_cases(device)
    yield from plan_cases(device)
    yield from group_cases(device)
    yield from bits_cases(device)
    yield from engine_cases(device)
