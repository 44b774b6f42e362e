"""Attention whose queries, keys and values are dealt to several processes, in a ring.

Every process has all heads of its share of the tokens. Its keys and values travel round, so that
each process sees all of them, one process's at a time, and joins what they give by the log-sum-exp
(Ring Attention, arXiv 2310.01889; `kernels/attention/partial.py`).

**Shares.** The pipeline deals the video in its own order and in equal runs; text stands whole in
every process. Tiles are cut along another order, over the whole sequence. So before a sparse call
tokens change places: each process gets a stretch of the ordered sequence, cut between tiles (and
between the groups that means stand for), the last one with what is left, text included. Rows and
key chunks are then those of one process, and each is in one stretch.

**Plans.** What a method chooses depends on all keys, on all values or on all query tiles of a
block, in a way of its own. So a call that plans is exchanged to heads: every process selects and
plans for some of the heads with all their tokens, as one process does, and the plans, which are
small, are told to all. Of a plan a process keeps the tiles of its own stretch.

**Dense calls** need no order: queries stay where they are, and so do the text's, which every
process computes for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.grouping import WINDOW_TILES
from vidsparse.kernels.attention.partial import attend_to_part, join
from vidsparse.masks import bits_between, count_bits, tile_count
from vidsparse.methods import SparseMethod
from vidsparse.order import token_order
from vidsparse.plan import SparsePlan
from vidsparse.planning import Ordered, key_means
from vidsparse.route import Route
from vidsparse.site import CallSite

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attention to a part of the keys, with its log-sum-exp; see ``attend_to_part``."""


class Ring:
    """The processes among which keys and values travel.

    Args:
        group: of ``torch.distributed``; None for all its processes.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.count = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._before = members[(self.rank - 1) % self.count]
        self._after = members[(self.rank + 1) % self.count]
        self.last = members[-1]

    def any(self, flag: Tensor) -> bool:
        """Whether any process has ``flag`` (a bool of no dimensions) set; waits."""
        return any_process(flag, self.group)

    def pass_on(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Start to send ``x`` to the next process; what comes from the one before, and the works.

        What comes is there once the works have been waited for, and ``x`` must live until then.
        """
        received = torch.empty_like(x)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, self._after, self.group),
                dist.P2POp(dist.irecv, received, self._before, self.group),
            ]
        )
        return received, works

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows of ``x`` to every process, ``sent[i]`` to process i, in their order.

        Returns:
            The rows that came, ``received[i]`` of process i, in its order.
        """
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out


# ---- what a ring does not run ----


def check_dense_in_ring(kernel: str) -> None:
    """Raise an ``UnsupportedError`` where ``kernel``, of ``DENSE_KERNELS``, runs in no ring."""
    if kernel == "gluon":
        raise UnsupportedError(
            "the 'gluon' kernel does not run dense calls in a ring, whose parts differ in "
            "length. Hint: dense_kernel auto, or leave ring out."
        )


def gate_left_out(method: SparseMethod, route: Route) -> str | None:
    """What a trace should note of a gate that a ring leaves out, None where there is no gate.

    Raises:
        UnsupportedError: the method cannot do without its gate.
    """
    if not route.gates or method.gate_keys is None:
        return None
    if not method.can_do_without_gate:
        raise UnsupportedError(
            f"{method.name} does not run in a ring yet: its gate looks at whole "
            "lists of keys. Hint: leave ring out, or take another method."
        )
    return f"without {method.name}'s gate: a ring has a part of the scores at a time"


# ---- tokens ----


def any_process(flag: Tensor, group: Any) -> bool:
    """Whether any process of ``group`` (None: of all) has ``flag``, a bool of no dimensions, set.

    All of them must ask, and wait.
    """
    found = flag.to(torch.int32)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found)


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """How the tokens of a sequence change places between runs and stretches, for one process.

    Attributes:
        bounds: where stretches begin in the ordered sequence, and its length: ``count + 1``.
        sent: tokens of the own run in the order they are sent in, ``[S / count]``.
        sent_counts: how many go to each process.
        placed: places in the own stretch of the video's tokens that come, ``[n]``.
        received_counts: how many come from each process.
    """

    bounds: tuple[int, ...]
    sent: Tensor
    sent_counts: list[int]
    placed: Tensor
    received_counts: list[int]

    @property
    def longest(self) -> int:
        """The length of the last stretch; no other is longer."""
        return self.bounds[-1] - self.bounds[-2]

    def length(self, rank: int) -> int:
        """Of the stretch of a process."""
        return self.bounds[rank + 1] - self.bounds[rank]


def stretch_bounds(grid: TokenGrid, count: int, step: int) -> tuple[int, ...]:
    """Cut the ordered sequence of ``grid`` into ``count`` stretches at multiples of ``step``.

    The last one is the longest: it alone has text and what a multiple of ``step`` leaves over.
    Where there are few tokens a stretch may be empty.
    """
    steps = grid.video // step
    before = steps - tile_count(steps, count)
    each, more = divmod(before, max(1, count - 1))
    bounds = [0]
    for rank in range(count - 1):
        bounds.append(bounds[-1] + (each + (rank < more)) * step)
    return (*bounds, grid.tokens)


def stretch_step(method: SparseMethod) -> int:
    """What stretches are a multiple of: tiles are cut by none of them, nor are groups of means."""
    return math.lcm(*method.tile, method.means or 1)


@lru_cache(maxsize=64)
def deal_tokens(
    order: str, grid: TokenGrid, count: int, rank: int, step: int, device: torch.device
) -> Deal:
    """How tokens change places for process ``rank`` of ``count`` (cached)."""
    bounds = stretch_bounds(grid, count, step)
    before = grid.text if grid.text_first else 0
    with torch.inference_mode(False):
        # ordered place -> token of the video in the pipeline's order.
        token = token_order(order, grid, "cpu").permutation[: grid.video] - before
        run = grid.video // count
        holder = token // run
        sent, sent_counts = [], []
        for one in range(count):
            stretch = slice(bounds[one], min(bounds[one + 1], grid.video))
            mine = token[stretch][holder[stretch] == rank] % run
            sent.append(mine)
            sent_counts.append(len(mine))
        own = holder[bounds[rank] : min(bounds[rank + 1], grid.video)]
        return Deal(
            bounds=bounds,
            sent=torch.cat(sent).to(device),
            sent_counts=sent_counts,
            placed=own.argsort(stable=True).to(device),
            received_counts=own.bincount(minlength=count).tolist(),
        )


def _split(x: Tensor, grid: TokenGrid) -> tuple[Tensor, Tensor]:
    """A process's video and the text of ``x`` ``[B, H, S / N + text, D]``."""
    if grid.text_first:
        return x[:, :, grid.text :], x[:, :, : grid.text]
    video = x.shape[2] - grid.text
    return x[:, :, :video], x[:, :, video:]


def _beside(video: Tensor, text: Tensor, grid: TokenGrid) -> Tensor:
    if not grid.text:
        return video
    return torch.cat([text, video] if grid.text_first else [video, text], 2)


def _to_stretch(x: Tensor, grid: TokenGrid, deal: Deal, ring: Ring) -> Tensor:
    """From the own run and all text to the own stretch, zeros behind it up to ``longest``."""
    video, text = _split(x, grid)
    sent = video.permute(2, 0, 1, 3).index_select(0, deal.sent)
    received = ring.exchange(sent, deal.sent_counts, deal.received_counts)
    batch, heads, _, width = x.shape
    out = x.new_zeros(batch, heads, deal.longest, width)
    out.index_copy_(2, deal.placed, received.permute(1, 2, 0, 3))
    if ring.rank == ring.count - 1 and grid.text:
        out[:, :, -grid.text :] = text
    return out


def _to_run(x: Tensor, grid: TokenGrid, deal: Deal, ring: Ring) -> Tensor:
    """Undo ``_to_stretch``; the last process tells the others the text's rows."""
    batch, heads, _, width = x.shape
    sent = x.permute(2, 0, 1, 3).index_select(0, deal.placed)
    received = ring.exchange(sent, deal.received_counts, deal.sent_counts)
    video = x.new_empty(batch, heads, len(deal.sent), width)
    video.index_copy_(2, deal.sent, received.permute(1, 2, 0, 3))
    if not grid.text:
        return video
    text = x[:, :, deal.longest - grid.text : deal.longest].contiguous()
    dist.broadcast(text, ring.last, group=ring.group)
    return _beside(video, text, grid)


# ---- plans ----


def plan_stretch(
    ring: Ring,
    deal: Deal,
    qkv: tuple[Tensor, Tensor, Tensor],
    site: CallSite,
    method: SparseMethod,
    order: str,
    route: Route,
    planner: Callable[..., Ordered],
) -> tuple[SparsePlan, range]:
    """Plan a call by all processes together.

    Args:
        ring: the processes.
        deal: how tokens change places.
        qkv: ``[B, H, S / N + text, D]`` each, in the pipeline's order.
        site: of the call, with the grid of all tokens.
        method: what to skip.
        order: name of the token order.
        route: what runs where.
        planner: ``order_and_plan``.

    Returns:
        The plan of this process's stretch, and the query tiles of the whole sequence in it.
    """
    q, k, v = qkv
    in_order = token_order(order, site.grid, q.device)
    # rounding follows once tokens have changed places.
    route = replace(route, quantize=None)
    asked = method.looks_at_values or route.selection == "blocks"

    def plan_heads(q: Tensor, k: Tensor, v: Tensor | None, first: int) -> SparsePlan:
        part = replace(site, first_head=site.first_head + first)
        return planner(method, q, k, part, in_order, route, v).plan

    plan = plan_in_ring(ring, plan_heads, q, k, v if asked else None, site.grid, method, route)
    rows = method.tile[0]
    tiles = range(deal.bounds[ring.rank] // rows, tile_count(deal.bounds[ring.rank + 1], rows))
    return own_rows(plan, tiles, method.merge), tiles


def plan_in_ring(
    ring: Ring,
    plan: Callable[[Tensor, Tensor, Tensor | None, int], SparsePlan],
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    grid: TokenGrid,
    method: SparseMethod,
    route: Route,
) -> SparsePlan:
    """The plan of all heads for the whole sequence, made by all processes together.

    Args:
        ring: the processes.
        plan: what plans for some heads with all their tokens in the pipeline's order, of which the
            last argument is the first one's number among the heads of ``q``.
        q: queries ``[B, H, S / N + text, D]`` of this process.
        k: keys, likewise.
        v: values, likewise, where the method looks at them.
        grid: of all tokens.
        method: what ``plan`` selects by.
        route: what ``plan`` runs by.
    """
    batch, heads = q.shape[:2]
    shares = [heads // ring.count + (rank < heads % ring.count) for rank in range(ring.count)]
    first = sum(shares[: ring.rank])
    whole = [None if x is None else _to_heads(x, grid, ring, shares) for x in (q, k, v)]
    rows, keys = method.tile
    per_block = max(1, route.block_rows // rows)
    blocks = tile_count(tile_count(grid.tokens, rows), per_block)
    words = tile_count(tile_count(grid.tokens, keys), 32)
    # processes with fewer heads send as much as the others, so that nobody has to ask.
    table = torch.zeros(
        batch, shares[0], blocks, per_block + 1 + words, dtype=torch.int32, device=q.device
    )
    densities = torch.zeros(2, batch, shares[0], dtype=torch.float32, device=q.device)
    if own := shares[ring.rank]:
        made = plan(whole[0], whole[1], whole[2], first)  # type: ignore[arg-type]
        table[:, :own] = torch.cat([made.q_tiles, made.kv_count.unsqueeze(-1), made.kv_bits], -1)
        densities[:, :, :own] = torch.stack([made.selected, made.computed])
    table, densities = _of_all(table, 1, shares, ring), _of_all(densities, 2, shares, ring)
    return SparsePlan(
        q_tiles=table[..., :per_block],
        kv_count=table[..., per_block],
        kv_bits=table[..., per_block + 1 :],
        tile=method.tile,
        tokens=grid.tokens,
        selected=densities[0],
        computed=densities[1],
    )


def _of_all(x: Tensor, dim: int, shares: list[int], ring: Ring) -> Tensor:
    """What the processes have in ``x``, one behind the other: ``shares[i]`` of process i."""
    received = [torch.empty_like(x) for _ in shares]
    dist.all_gather(received, x, group=ring.group)
    return torch.cat([one.narrow(dim, 0, n) for one, n in zip(received, shares, strict=True)], dim)


def _to_heads(x: Tensor, grid: TokenGrid, ring: Ring, shares: list[int]) -> Tensor:
    """All tokens, in the pipeline's order, of ``shares[rank]`` heads of ``[B, H, S / N, D]``."""
    video, text = _split(x, grid)
    batch, _, run, width = video.shape
    own, first = shares[ring.rank], sum(shares[: ring.rank])
    received = ring.exchange(video.transpose(0, 1), shares, [own] * ring.count)
    whole = received.view(ring.count, own, batch, run, width).permute(2, 1, 0, 3, 4)
    return _beside(whole.flatten(2, 3), text[:, first : first + own], grid)


def own_rows(plan: SparsePlan, tiles: range, merge: str) -> SparsePlan:
    """The blocks of ``plan`` that hold any of the query tiles ``tiles``, without others' tiles.

    Tiles are numbered from the first of them. Keys are still those of the whole sequence, and so
    are densities. ``merge`` is what made blocks of tiles.
    """
    held = (plan.q_tiles >= tiles.start) & (plan.q_tiles < tiles.stop)
    # the places of others are left free behind one's own.
    nowhere = torch.iinfo(torch.int32).max
    q_tiles = torch.where(held, plan.q_tiles - tiles.start, nowhere).sort(-1).values
    q_tiles = q_tiles.masked_fill(q_tiles == nowhere, -1)
    blocks, per_block = plan.q_tiles.shape[2:]
    most = min(blocks, len(tiles))
    if merge != "xor":
        # blocks are made within windows, of which those at the ends may be shared.
        window = per_block if merge == "consecutive" else WINDOW_TILES
        windows = (tiles.stop - 1) // window - tiles.start // window + 1
        most = min(most, windows * tile_count(window, per_block))
    # how many there are differs from head to head: as many as there can be, the longest first.
    length = torch.where(held.any(-1), plan.kv_count + 1, 0)
    place = length.argsort(dim=-1, descending=True, stable=True)[..., :most]
    count = torch.where(held.any(-1), plan.kv_count, 0).gather(2, place)

    def taken(table: Tensor) -> Tensor:
        return table.gather(2, place.unsqueeze(-1).expand(-1, -1, -1, table.shape[-1]))

    return replace(plan, q_tiles=taken(q_tiles), kv_count=count, kv_bits=taken(plan.kv_bits))


def plan_of_part(plan: SparsePlan, first: int, length: int, tokens: int) -> SparsePlan:
    """``plan`` against the keys ``first`` to ``first + length`` alone, as one of ``tokens``.

    ``first`` is a multiple of a chunk. What lies behind those keys is in no list.
    """
    keys = plan.tile[1]
    columns = tile_count(tokens, keys)
    bits = bits_between(plan.kv_bits, first // keys, tile_count(length, keys), columns)
    count = torch.where(plan.kv_count > 0, count_bits(bits), 0)
    return replace(plan, kv_bits=bits, kv_count=count, tokens=tokens)


# ---- attention ----


def attend_in_ring(
    ring: Ring,
    deal: Deal,
    qkv: tuple[Tensor, Tensor, Tensor],
    plan: SparsePlan,
    grid: TokenGrid,
    means: int | None,
    route: Route,
    kernel: Callable[..., tuple[Tensor, Tensor]],
) -> Tensor:
    """Attention by ``plan`` (of ``own_rows``) on this process's tokens.

    Args:
        ring: the processes.
        deal: how tokens change places.
        qkv: ``[B, H, S / N + text, D]`` each, in the pipeline's order.
        plan: of this process's rows.
        grid: of all tokens.
        means: tokens of a group whose mean stands for what is skipped, or None.
        route: what runs where.
        kernel: ``sparse_attention``.

    Returns:
        The output of the same tokens, ``[B, H, S / N + text, D]``.
    """
    q, k, v = (_to_stretch(x, grid, deal, ring) for x in qkv)

    def attend(keys: Tensor, values: Tensor, holder: int) -> tuple[Tensor, Tensor]:
        first, length = deal.bounds[holder], deal.length(holder)
        part = plan_of_part(plan, first, length, deal.longest)
        stand_ins = None
        if means is not None:
            video = min(length, grid.video - first)
            counts = part.left_out(means, by_kernel=route.lists)
            stand_ins = key_means(keys, values, counts, means, video, by_kernel=route.lists)
            # nothing stands behind a shorter stretch, so no mean stands for it.
            stand_ins.counts[..., tile_count(length, means) :] = 0
        return kernel(
            q,
            keys,
            values,
            part.q_tiles,
            part.kv_count,
            part.list_keys(by_kernel=route.lists),
            tile=plan.tile,
            implementation=route.implementation,
            chosen=True,
            quantize=route.quantize,
            means=stand_ins,
            validate=False if q.is_cuda else None,
        )

    empty = [not deal.length(rank) for rank in range(ring.count)]
    out = _travel(ring, k, v, attend, empty)
    if out is None:
        out = torch.zeros_like(q)
    return _to_run(out.to(q.dtype), grid, deal, ring)


def attend_densely(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid, attend: Attend = attend_to_part
) -> Tensor:
    """Attention of this process's tokens ``[B, H, S / N + text, D]`` to all keys."""
    (keys, text_keys), (values, text_values) = _split(k, grid), _split(v, grid)

    def one(keys: Tensor, values: Tensor, holder: int) -> tuple[Tensor, Tensor]:
        # text is in every process, and counts once.
        if holder == ring.rank and grid.text:
            keys, values = torch.cat([keys, text_keys], 2), torch.cat([values, text_values], 2)
        return attend(q, keys, values)

    out = _travel(ring, keys, values, one, [False] * ring.count)
    assert out is not None
    return out.to(q.dtype)


def not_finite(out: Tensor, ring: Ring | None) -> bool:
    """Whether ``out`` holds NaN or Inf, in any process of a ring; waits."""
    found = ~out.isfinite().all()
    return bool(found) if ring is None else ring.any(found)


def _travel(
    ring: Ring,
    k: Tensor,
    v: Tensor,
    attend: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]],
    empty: list[bool],
) -> Tensor | None:
    """Send keys and values round and join what ``attend`` makes of each process's; None if none.

    The next ones are on their way while it computes. ``empty`` are processes without keys, which
    have no queries either.
    """
    held = torch.stack([k, v])
    out, lse = None, None
    for turn in range(ring.count):
        holder = (ring.rank - turn) % ring.count
        ends = turn == ring.count - 1
        coming, works = (held, []) if ends else ring.pass_on(held)
        if not empty[ring.rank] and not empty[holder]:
            part, part_lse = attend(held[0], held[1], holder)
            if out is None or lse is None:
                # sums of more than two parts are made in fp32.
                out, lse = part.to(torch.promote_types(part.dtype, torch.float32)), part_lse
            else:
                lse = join(out, lse, part, part_lse)
        for work in works:
            work.wait()
        held = coming
    return out
