"""Cases of the kernels of top-k, xattention and sale, and of plans by them.

What the kernels are held to is the torch code that runs on a CPU. Tie rule: both add in other
orders, so what lies within rounding of a threshold may fall on either side of it; tiles of equal
weight at the threshold are all kept by kernels, and in order of position by torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from kernel_cases import (
    Case,
    Tile,
    by_kernels,
    by_torch,
    check_same_plan,
    drifting,
    limited,
    opened,
)
from torch import Tensor

from vidsparse import planning
from vidsparse.grid import TokenGrid
from vidsparse.masks import pooled_scores, top_k_mask
from vidsparse.methods import FgAttn, Numbers, Sale, SpargeAttn, SparseMethod, XAttention
from vidsparse.methods.sale import reference_area, relative_scores_mask
from vidsparse.methods.xattention import block_sums, query_turn
from vidsparse.order import token_order
from vidsparse.planning import order_and_plan
from vidsparse.site import CallSite

# ---- top-k ----


def check_top_k(tokens: int, tile: Tile, topk: float, device: str, theta: float | None) -> None:
    from vidsparse.kernels.selection.pooled import top_p_words
    from vidsparse.kernels.tokens.pool import pool
    from vidsparse.masks import self_similarity

    q, k = (drifting(tokens, 64, torch.float16, device, seed=i) for i in (0, 1))
    judged = theta is not None
    pooled = (pool(x, size, judged=judged) for x, size in zip((q, k), tile, strict=True))
    made = top_p_words(*pooled, scale=1 / 8, topk=topk, theta=theta)
    got = opened(made, tokens, tile)
    scores = pooled_scores(q, k, tile)
    stray = torch.zeros_like(scores, dtype=torch.bool)
    if theta is not None:
        stray |= (self_similarity(k, tile[1]) < theta).unsqueeze(-2)
        assert bool(stray.any())
    expected = top_k_mask(scores.masked_fill(stray, -math.inf), math.ceil(topk * got.shape[-1]))
    expected |= stray
    if theta is not None:
        expected |= (self_similarity(q, tile[0]) < theta).unsqueeze(-1)
    assert torch.equal(got, expected)


def top_k_cases(device: str) -> Iterator[Case]:
    def case(
        tokens: int,
        tile: Tile,
        topk: float,
        theta: float | None = None,
        limits: dict[str, int] | None = None,
    ) -> Callable[[], None]:
        def body() -> None:
            from vidsparse.kernels.selection import top_p

            with limited(top_p, **(limits or {})):
                check_top_k(tokens, tile, topk, device, theta)

        return body

    for topk in (1e-6, 0.1, 0.5, 0.97, 1.0):
        yield f"top-k {topk}", case(260, (64, 8), topk)
    for tokens in (1, 16, 17, 400):
        yield f"top-k {tokens} tokens", case(tokens, (64, 8), 0.3)
    yield "top-k judged", case(260, (64, 16), 0.2, theta=0.8)
    passes = {"ROW_COLUMNS": 64, "LONG_BLOCK": 128}
    yield "top-k in passes", case(300, (128, 1), 0.3, limits=passes)
    yield "top-k in passes, judged", case(700, (128, 8), 0.3, theta=0.86, limits=passes)

    def far_apart() -> None:
        # scores hundreds apart, whose softmax weights all vanish but the first's.
        from vidsparse.kernels.selection.pooled import top_p_words
        from vidsparse.kernels.tokens.pool import pool

        q = torch.full((1, 1, 32, 64), 40.0, device=device)
        k = torch.arange(64.0, device=device).flip(0)[None, None, :, None].expand(1, 1, 64, 64)
        pooled = (pool(q, 32), pool(k.contiguous(), 1))
        got = opened(top_p_words(*pooled, scale=1 / 8, topk=0.25), 64, (32, 1))
        assert got[0, 0, 0].tolist() == [True] * 16 + [False] * 48

    def ties() -> None:
        from vidsparse.kernels.selection.pooled import top_p_words
        from vidsparse.kernels.tokens.pool import pool

        x = torch.ones(1, 1, 64, 64, device=device)
        made = top_p_words(pool(x, 32), pool(x, 8), scale=1 / 8, topk=0.25)
        assert bool(opened(made, 64, (32, 8)).all())

    yield "top-k of scores far apart", far_apart
    yield "top-k ties", ties


def by_head_cases(device: str) -> Iterator[Case]:
    def shares() -> None:
        from vidsparse.kernels.selection.pooled import top_p_words
        from vidsparse.kernels.tokens.pool import pool

        q, k = (drifting(200, 64, torch.float16, device, batch=2, seed=i) for i in (0, 1))
        pooled = [pool(q, 64), pool(k, 8)]
        share = torch.tensor([0.3, 0.8], device=device)
        got = opened(top_p_words(*pooled, scale=1 / 8, top_p=share), 200, (64, 8))
        for head, one in enumerate((0.3, 0.8)):
            alone = opened(top_p_words(*pooled, scale=1 / 8, top_p=one), 200, (64, 8))
            assert torch.equal(got[:, head], alone[:, head])

    yield "a share for every head", shares


# ---- antidiagonals ----


def check_antidiagonal(
    tokens: int,
    tile: Tile,
    stride: int,
    device: str,
    *,
    dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
    pattern: str = "antidiagonal",
    top_p: float = 0.7,
    count: int | None = None,
    **how: Any,
) -> None:
    from vidsparse.kernels.selection.antidiagonal import AntidiagonalTuning, antidiagonal_words

    q, k = (drifting(tokens, dim, dtype, device, batch=batch, seed=i) for i in (0, 1))
    turn = None if pattern == "antidiagonal" else query_turn(pattern, stride)
    made = antidiagonal_words(
        q, k, tile=tile, stride=stride, turn=turn, top_p=top_p, count=count,
        how=AntidiagonalTuning(**how) if how else None,
    )  # fmt: skip
    got = opened(made, tokens, tile)
    sums = block_sums(q, k, tile, stride, pattern).double()
    # what the set means, with room for rounding at its edge.
    hair = 1e-4
    lowest = sums.masked_fill(~got, math.inf).amin(-1, keepdim=True)
    assert not bool((~got & (sums > lowest * (1 + hair))).any())
    if count is not None:
        assert bool((got.sum(-1) == count).all())
        return
    assert bool(((sums * got).sum(-1) >= top_p * (1 - hair)).all())
    above = sums * (sums > lowest * (1 + hair))
    assert bool((above.sum(-1) <= top_p * (1 + hair)).all())


def antidiagonal_cases(device: str) -> Iterator[Case]:
    def case(tokens: int, tile: Tile, stride: int, **more: Any) -> Callable[[], None]:
        return lambda: check_antidiagonal(tokens, tile, stride, device, **more)

    for stride in (4, 8, 16, 64):
        yield f"stride {stride}", case(700, (128, 128), stride)
    for tokens in (1, 5, 128, 333):
        yield f"antidiagonals of {tokens} tokens", case(tokens, (64, 32), 8)
    for pattern in ("diagonal", "random"):
        yield pattern, case(300, (64, 64), 8, pattern=pattern)
    for dim in (32, 96, 128):
        yield f"antidiagonals D={dim}", case(200, (32, 32), 8, dim=dim)
    yield "a group is a tile", case(150, (16, 16), 16)
    yield "antidiagonals batch 2", case(300, (64, 64), 8, batch=2)
    yield "antidiagonals by count", case(600, (64, 64), 8, count=5)
    boxes = {"rows": 64, "columns": 32, "stages": 2, "warps": 4, "tma": True}
    yield "antidiagonals by TMA", case(517, (64, 32), 8, batch=2, persistent=True, **boxes)
    yield "TMA without end", case(517, (64, 32), 8, batch=2, persistent=False, **boxes)

    def few_heads_at_a_time() -> None:
        from vidsparse.kernels.selection import antidiagonal

        with mock.patch.object(antidiagonal, "PART_BYTES", 1):
            check_antidiagonal(300, (64, 64), 8, device, batch=2)

    yield "antidiagonals a head at a time", few_heads_at_a_time


# ---- relative attention scores ----


def check_sale(
    tokens: int,
    tile: Tile,
    device: str,
    *,
    dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
    local: int = 64,
    sink_from: int | None = None,
    tau: float | tuple[float, ...] = 0.1,
    riding: str = "fp16",
    **how: Any,
) -> None:
    from vidsparse.kernels.selection.sale import sale_words
    from vidsparse.kernels.selection.triton_sale import SaleTuning

    q, k = (drifting(tokens, dim, dtype, device, batch=batch, seed=i) for i in (0, 1))
    given = tau if isinstance(tau, float) else torch.tensor(tau, device=device)
    made = sale_words(
        q, k, given, tile=tile, local=local, full_columns=sink_from, riding=riding,
        how=SaleTuning(**how) if how else None,
    )  # fmt: skip
    got = opened(made, tokens, tile)

    def torchs(factor: float) -> Tensor:
        return relative_scores_mask(q, k, given * factor, tile, local, sink_from)

    # a hair above and below: what both keep must be kept, what neither keeps must not.
    sure, possible = torchs(1.001), torchs(0.999)
    assert not bool((sure & ~got).any())
    assert not bool((got & ~possible).any())
    assert bool(got[:, :, reference_area(tokens, tile, local, sink_from, device)].all())
    if tokens > 4 * local and sink_from != 0:
        assert 0.02 < float(got.float().mean()) < 0.98


def sale_cases(device: str, riding: str = "fp16") -> Iterator[Case]:
    def case(tokens: int, tile: Tile = (64, 32), **more: Any) -> Callable[[], None]:
        return lambda: check_sale(tokens, tile, device, riding=riding, **more)

    for tokens in (1, 64, 130, 517):
        yield f"sale {tokens} tokens", case(tokens)
    for tile in ((16, 8), (32, 16), (128, 64), (128, 128), (16, 128)):
        yield f"sale tile {tile}", case(333, tile)
    for dim in (32, 96, 128):
        yield f"sale D={dim}", case(300, dim=dim)
    for local in (1, 33, 1000):
        yield f"sale local {local}", case(300, local=local)
    for sink_from in (0, 3, 9):
        yield f"sale sink from tile {sink_from}", case(300, sink_from=sink_from)
    yield "sale batch 2", case(300, batch=2)
    yield "sale tau by head", case(300, tau=(0.5, 0.01), batch=2)
    boxes: dict[str, Any] = {"rows": 128, "keys": 64, "stages": 2, "warps": 4, "tma": True}
    yield "sale by TMA", case(517, batch=2, **boxes)
    # more key tiles than a word has bits, in steps that fill a word at once.
    yield "sale many words", case(600, (64, 8), local=40)

    def few_words_at_a_time() -> None:
        from vidsparse.kernels.selection import sale

        with mock.patch.object(sale, "FINISHED_WORDS", 1):
            check_sale(600, (64, 8), device, local=40, riding=riding)

    yield "sale a word at a time", few_words_at_a_time


# ---- plans ----


def check_method(method: SparseMethod, grid: TokenGrid, device: str, **limits: int) -> None:
    q, k = (drifting(grid.tokens, 64, torch.float16, device, batch=2, seed=i) for i in (0, 1))
    order, site = token_order("hilbert", grid, device), CallSite(0, 0, 0.0, grid)
    there = order_and_plan(method, q, k, site, order, by_torch(method, q, k, k))
    with limited(planning, **limits):
        here = order_and_plan(method, q, k, site, order, by_kernels(method, q, k, k))
    assert torch.equal(here.q, there.q)
    check_same_plan(here.plan, there.plan)


def plan_cases(device: str) -> Iterator[Case]:
    def case(method: SparseMethod, grid: TokenGrid, **limits: int) -> Callable[[], None]:
        return lambda: check_method(method, grid, device, **limits)

    small = TokenGrid(3, 6, 9)
    texts = (small, TokenGrid(3, 6, 9, text=37), TokenGrid(3, 6, 9, text=37, text_first=True))
    for grid in texts:
        where = f"with {grid.text} text tokens" + " first" * grid.text_first
        yield f"xattention {where}", case(XAttention(tau=0.4, tile=(32, 32)), grid)
        yield f"sale {where}", case(Sale(tau=0.1, tile=(32, 16), local=40), grid)
    yield "fg-attn topk", case(FgAttn(topk=0.2), small)
    yield "spargeattn topk", case(SpargeAttn(topk=0.2, theta=0.5, tile=(32, 16)), small)
    yield "xattention topk", case(XAttention(topk=0.3, tile=(32, 32)), small)
    yield "xattention blocks", case(XAttention(blocks=2, tile=(32, 32), pattern="random"), small)
    numbers = Numbers({"tau": torch.tensor([[[0.2, 0.6]]])}, video=(3, 6, 9))
    for method in (
        XAttention(tile=(32, 32), numbers=numbers),
        Sale(tile=(32, 16), local=40, numbers=numbers),
    ):
        yield f"{method.name} with numbers", case(method, small)
        yield f"{method.name} with numbers by head", case(method, small, MASK_BYTES=1)

    def what_kernels_lack() -> None:
        # fp32 has no kernels here, nor have tiles of one key: torch plans.
        for method, dtype in ((XAttention(tile=(32, 32)), torch.float32), (Sale(), torch.float32)):
            q = drifting(162, 64, dtype, device)
            assert method.selection(q) == "select"
        q = drifting(162, 64, torch.float16, device)
        assert Sale(tile=(32, 1)).selection(q) == "select"
        check_method(Sale(tile=(32, 1), local=40, tau=0.1), small, device)

    yield "what kernels lack", what_kernels_lack


def cases(device: str) -> Iterator[Case]:
    """Name and body of every case."""
    yield from top_k_cases(device)
    yield from by_head_cases(device)
    yield from antidiagonal_cases(device)
    yield from sale_cases(device)
    yield from plan_cases(device)
