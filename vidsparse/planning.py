"""From the queries and keys of one call to the plan of its attention: order, mask, blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.kernels.attention.means import KeyMeans, group_means
from vidsparse.masks import tile_count
from vidsparse.methods import SparseMethod
from vidsparse.methods.base import Selection
from vidsparse.order import TokenOrder
from vidsparse.plan import SparsePlan, make_plan, make_plan_of_bits, plan_of_blocks
from vidsparse.route import Route, find_route
from vidsparse.site import CallSite

if TYPE_CHECKING:
    from vidsparse.kernels.tokens.formats import QuantizedQK
    from vidsparse.kernels.tokens.pool import Pooled

# tiles of all heads that a mask may hold at once. Sorting them takes about 30 bytes a tile, so this
# bounds the extra memory of a mask at 2 GB on a GPU; longer sequences go by chunks of heads. One
# head is the least: 16x1 tiles at 75,600 tokens are 357 million a head.
MASK_TILES = 64_000_000

# the kernels hold a mask as bits and tile means in 16 bits: all 40 heads at 75,600 tokens and 16x16
# tiles are 300 MB. Their scores go to a room of fixed size.
MASK_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Ordered:
    """What a kernel gets of the queries and keys of one call.

    Attributes:
        q: queries ``[B, H, S, D]`` in order; where ``quantized`` is there, of any order, for their
            shape and dtype alone.
        k: keys, likewise.
        plan: the plan for them.
        quantized: both in order and 8 bits, if they were rounded on the way.
        v: values in order, if they were put in order on the way.
        means: mean keys and values of groups of tokens, if they were made on the way.
    """

    q: Tensor
    k: Tensor
    plan: SparsePlan
    quantized: QuantizedQK | None = None
    v: Tensor | None = None
    means: tuple[Tensor, Tensor] | None = None


def order_and_plan(
    method: SparseMethod,
    q: Tensor,
    k: Tensor,
    site: CallSite,
    order: TokenOrder,
    route: Route | None = None,
    v: Tensor | None = None,
) -> Ordered:
    """``q`` and ``k`` ``[B, H, S, D]`` put in order, and the plan for them.

    Where kernels follow the method's rule, tiles are averaged on the way, while their tokens are at
    hand. If ``route`` asks for q·k in 8 bits, they are rounded then, too; elsewhere, and where
    means are taken of them, that is left to the attention. A method that looks at values wants
    ``v``, and it is put in order, too. Without a ``route`` the one for such tensors is found.
    """
    route = route or find_route(method, q, k, k)
    if route.selection == "blocks":
        assert v is not None
        chosen = method.choose_blocks(q, k, v, site, order)
        plan = plan_of_blocks(chosen.words, chosen.count, method.tile, q.shape[2])
        return Ordered(chosen.q, chosen.k, plan, v=chosen.v, means=chosen.means)
    if method.looks_at_values:
        assert v is not None
        q, k, v = (order.apply(x, by_kernel=route.reorders) for x in (q, k, v))
        return Ordered(q, k, plan_attention(method, q, k, site, route, v), v=v)
    if route.selection != "rule" or not route.reorders or min(method.tile) == 1:
        # tiles of one token are their own mean: for all heads at once that would be a second q.
        q, k = (order.apply(x, by_kernel=route.reorders) for x in (q, k))
        return Ordered(q, k, plan_attention(method, q, k, site, route))
    judged = method.rule(site, q.device).theta is not None
    quantized = None
    if route.quantize is not None and method.means is None:
        from vidsparse.kernels.tokens.quantize import quantize_and_pool

        quantized, q_pooled, k_pooled = quantize_and_pool(
            q, k, route.quantize, order.permutation, method.tile, judged=judged
        )
    else:
        from vidsparse.kernels.tokens.pool import reorder_and_pool

        q, q_pooled = reorder_and_pool(q, order.permutation, method.tile[0], judged=judged)
        k, k_pooled = reorder_and_pool(k, order.permutation, method.tile[1], judged=judged)
    plan = _plan_by_kernels(method, q, k, site, route, (q_pooled, k_pooled))
    return Ordered(q, k, plan, quantized)


def plan_attention(
    method: SparseMethod,
    q: Tensor,
    k: Tensor,
    site: CallSite,
    route: Route | None = None,
    v: Tensor | None = None,
) -> SparsePlan:
    """Mask and plan for ``q``, ``k`` ``[B, H, S, D]`` in token order, text last.

    ``v`` in that order is for methods that look at values, too. Key tiles that hold text tokens are
    listed by all, and query tiles that do list everything, unless the method's ``text_rows`` are
    ``sparse``. Heads go in chunks where the mask of all of them would be too large. Without a
    ``route`` the one for such tensors is found.
    """
    route = route or find_route(method, q, k, k)
    if route.selection in ("select", "blocks"):
        return _plan_by_torch(method, q, k, site, route, v)
    return _plan_by_kernels(method, q, k, site, route)


def heads_at_once(q: Tensor, tile: tuple[int, int]) -> int:
    """Heads of ``q`` ``[B, H, S, D]`` whose mask is made at once in torch."""
    tiles = tile_count(q.shape[2], tile[0]) * tile_count(q.shape[2], tile[1]) * q.shape[0]
    return max(1, MASK_TILES // tiles)


def _plan_by_torch(
    method: SparseMethod, q: Tensor, k: Tensor, site: CallSite, route: Route, v: Tensor | None
) -> SparsePlan:
    tokens, grid = q.shape[2], site.grid
    rows, keys = method.tile
    chunk = heads_at_once(q, method.tile)
    plans = []
    # autocast would round scores and counts to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        for h in range(0, q.shape[1], chunk):
            part = replace(site, first_head=site.first_head + h)
            heads = slice(h, h + chunk)
            values = None if v is None else v[:, heads]
            mask = method.select(q[:, heads], k[:, heads], part, v=values)
            if grid.text:
                if method.text_rows == "dense":
                    mask[:, :, grid.video // rows :] = True
                mask[:, :, :, grid.video // keys :] = True
            plans.append(
                make_plan(mask, method.tile, tokens, method.merge, block_rows=route.block_rows)
            )
    return _of_all_heads(plans)


def _plan_by_kernels(
    method: SparseMethod,
    q: Tensor,
    k: Tensor,
    site: CallSite,
    route: Route,
    pooled: tuple[Pooled, Pooled] | None = None,
) -> SparsePlan:
    batch, heads, tokens, dim = q.shape
    rows, keys = method.tile
    q_tiles, k_tiles = tile_count(tokens, rows), tile_count(tokens, keys)
    head_bytes = q_tiles * k_tiles // 8 + (q_tiles + k_tiles) * dim * 4
    chunk = max(1, MASK_BYTES // (head_bytes * batch))
    plans = []
    for start in range(0, heads, chunk):
        part = slice(start, min(start + chunk, heads))
        words, kept = mask_words(
            method,
            q[:, part],
            k[:, part],
            replace(site, first_head=site.first_head + start),
            route.selection,
            None
            if pooled is None
            else (pooled[0].heads(start, part.stop), pooled[1].heads(start, part.stop)),
        )
        plans.append(
            make_plan_of_bits(
                words, kept, method.tile, tokens, method.merge, block_rows=route.block_rows
            )
        )
    return _of_all_heads(plans)


def mask_words(
    method: SparseMethod,
    q: Tensor,
    k: Tensor,
    site: CallSite,
    selection: Selection,
    pooled: tuple[Pooled, Pooled] | None = None,
) -> tuple[Tensor, Tensor]:
    """The mask of all heads of ``q``, ``k`` ``[B, H, S, D]`` by Triton's kernels, text included.

    In words of 32 key tiles, int32 ``[B, H, Tq, W]``, with the key tokens of each query tile, int32
    ``[B, H, Tq]``. ``selection`` is the route's, and not ``select``.
    """
    if selection == "words":
        # autocast would round means and products to 16 bits.
        with torch.autocast(q.device.type, enabled=False):
            return method.words(q, k, site)
    rule = method.rule(site, q.device)
    from vidsparse.kernels.selection.pooled import top_p_words
    from vidsparse.kernels.tokens.pool import pool

    rows, keys = method.tile
    if pooled is None:
        judged = rule.theta is not None
        pooled = pool(q, rows, judged=judged), pool(k, keys, judged=judged)
    theta, heads = rule.theta, q.shape[1]
    if isinstance(theta, Tensor):
        # kernels compare with one number: with 0 what each head has above its own.
        pooled = _above(pooled[0], theta[:heads]), _above(pooled[1], theta[:heads])
        theta = 0.0
    return top_p_words(
        *pooled,
        scale=q.shape[-1] ** -0.5,
        top_p=rule.top_p[:heads] if isinstance(rule.top_p, Tensor) else rule.top_p,
        topk=rule.topk,
        theta=theta,
        full_rows=site.grid.video // rows if site.grid.text else None,
        full_columns=site.grid.video // keys if site.grid.text else None,
    )


def _above(pooled: Pooled, theta: Tensor) -> Pooled:
    """The same tiles, their self-similarity less ``theta`` ``[H]``."""
    assert pooled.similarity is not None
    return replace(pooled, similarity=pooled.similarity - theta.unsqueeze(-1))


def share_with_means(plan: SparsePlan, size: int | None) -> Tensor:
    """The plan's share of pairs with its pseudo keys, a group of ``size`` tokens each, ``[B, H]``.

    Where everything is listed no mean stands for anything.
    """
    if size is None:
        return plan.computed
    return (plan.computed + tile_count(plan.tokens, size) / plan.tokens).clamp(max=1.0)


def order_and_average(
    x: Tensor, order: TokenOrder, size: int | None, video: int, route: Route
) -> tuple[Tensor, Tensor | None]:
    """``x`` ``[B, H, S, D]`` in ``order``, and the means of its groups of ``size`` tokens.

    The means are None where no kernel makes them while it moves the tokens: ``key_means`` makes
    them then.
    """
    if size is None or not (route.reorders and route.lists) or video < x.shape[2]:
        return order.apply(x, by_kernel=route.reorders), None
    from vidsparse.kernels.tokens.moments import reorder_and_measure

    ordered, moments = reorder_and_measure(x, order.permutation, size, summed=True)
    return ordered, moments.mean


def key_means(
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    size: int,
    video: int,
    *,
    by_kernel: bool,
    made: tuple[Tensor | None, Tensor | None] = (None, None),
) -> KeyMeans:
    """Means of groups of ``size`` tokens of ``k``, ``v`` ``[B, H, S, D]`` in token order.

    Only ``video`` tokens, the first ones, are averaged: those of text are listed by every block.
    ``counts`` are the plan's (``left_out``); ``made`` the means that are there already.
    """
    groups = tile_count(k.shape[2], size)
    means = []
    for x, there in zip((k, v), made, strict=True):
        if there is not None:
            mean = there
        elif by_kernel:
            from vidsparse.kernels.tokens.moments import reorder_and_measure

            mean = reorder_and_measure(x[:, :, :video], None, size, summed=True)[1].mean
        else:
            mean = group_means(x, size, tokens=video)
        missing = groups - mean.shape[2]
        # padding by nothing would be a copy.
        means.append(F.pad(mean, (0, 0, 0, missing)) if missing else mean)
    return KeyMeans(means[0], means[1], counts, size)


def _of_all_heads(plans: list[SparsePlan]) -> SparsePlan:
    """One plan of plans for neighbouring heads."""
    if len(plans) == 1:
        return plans[0]
    return SparsePlan(
        q_tiles=torch.cat([p.q_tiles for p in plans], 1),
        kv_count=torch.cat([p.kv_count for p in plans], 1),
        kv_bits=torch.cat([p.kv_bits for p in plans], 1),
        tile=plans[0].tile,
        tokens=plans[0].tokens,
        selected=torch.cat([p.selected for p in plans], 1),
        computed=torch.cat([p.computed for p in plans], 1),
    )
