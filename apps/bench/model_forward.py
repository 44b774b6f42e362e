"""Timed transformer forwards: dense attention by kernel, and sparse attention by a plan to order.

Random weights give random q and k, of which top-p keeps nearly everything. So a sparse forward here
puts its tokens in order, looks at the real q and k and plans as in the product, all of it in the
time; then ``planned_to_order`` hands the kernel another plan, of the density asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vidsparse.apps.bench.attention_cases import KERNEL, Case, random_mask
from vidsparse.grouping import WINDOW_TILES
from vidsparse.kernels import block_rows
from vidsparse.masks import tile_count
from vidsparse.pipelines.guidance_cache import GuidanceCache
from vidsparse.plan import SparsePlan, make_plan

if TYPE_CHECKING:
    from vidsparse.engine import AttentionEngine
    from vidsparse.pipelines.caching import AnyCache
    from vidsparse.route import Route
    from vidsparse.site import CallSite

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Stopwatch:
    """Adds up the time of spans on one device; on a GPU by events, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Count the block."""
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def milliseconds(self) -> float:
        """The sum so far, which is then forgotten; waits for the device."""
        spans, self._spans = self._spans, []
        if self.device.type != "cuda":
            return float(sum(end - start for start, end in spans)) * 1e3
        torch.cuda.synchronize(self.device)
        return float(sum(start.elapsed_time(end) for start, end in spans))


@contextmanager
def watched_attention(
    watch: Stopwatch, tokens: int, attention: Attention | None = None
) -> Iterator[None]:
    """Time PyTorch's attention over whole videos, and perhaps run another kernel in its place.

    Stock processors of all families and our own dense calls look it up in ``torch.nn.functional``,
    which is where this stands in for it until the block ends.

    Args:
        watch: counts calls whose queries and keys are at least ``tokens``; attention to text alone
            or to sound is not meant.
        tokens: video tokens.
        attention: ``(q, k, v) -> out``, ``[B, H, S, D]``, computes such calls that have no mask.
    """
    stock = F.scaled_dot_product_attention

    def counted(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if min(query.shape[2], key.shape[2]) < tokens:
            return stock(query, key, value, attn_mask, *args, **kwargs)
        with watch.span():
            if attention is not None and attn_mask is None:
                return attention(query, key, value)
            return stock(query, key, value, attn_mask, *args, **kwargs)

    with mock.patch.object(F, "scaled_dot_product_attention", counted):
        yield


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured step.

    Args:
        ms: all its forwards.
        attention_ms: attention over the whole video in it.
        peak_gib: memory at its highest, weights included; None on a CPU.
    """

    ms: float
    attention_ms: float
    peak_gib: float | None


def time_step(
    run: Callable[[], list[Tensor]], watch: Stopwatch, device: torch.device
) -> tuple[Timing, list[Tensor]]:
    """Time ``run`` once, together with what ``watch`` counted in it."""
    whole = Stopwatch(device)
    watch.milliseconds()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with whole.span():
        out = run()
    ms = whole.milliseconds()
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None
    return Timing(ms, watch.milliseconds(), peak), out


@contextmanager
def guidance_cache_with(cache: AnyCache | None, **values: Any) -> Iterator[None]:
    """A guidance cache has other ``values`` of its attributes in the block; others stay.

    With ``threshold=1`` steps have all their forwards, and with ``steady=inf`` it leaves out all
    that it may, whatever random weights make.
    """
    if not isinstance(cache, GuidanceCache):
        yield
        return
    with mock.patch.multiple(cache, **values):
        yield


@contextmanager
def first_blocks(
    model: nn.Module, names: Mapping[str, str], count: int, *, last: bool = False
) -> Iterator[None]:
    """Run only the first blocks of each list: enough to compile and choose every kernel.

    And the ``last`` one, where that is not like the others.
    """
    whole = {name: getattr(model, name) for name in names}
    try:
        for name, blocks in whole.items():
            few = [*blocks[:count], *([blocks[-1]] if last and len(blocks) > count else [])]
            setattr(model, name, nn.ModuleList(few))
        yield
    finally:
        for name, blocks in whole.items():
            setattr(model, name, blocks)


@dataclass(slots=True)
class PlanToOrder:
    """What ``planned_to_order`` saw.

    Args:
        real: density that each real plan would have computed, ``[B, H]`` per call.
        tokens: length of the longest call.
        implementation: the kernel that ran.
    """

    real: list[Tensor] = field(default_factory=list)
    tokens: int = 0
    implementation: str = ""


@contextmanager
def planned_to_order(
    engine: AttentionEngine,
    watch: Stopwatch,
    *,
    density: float | Sequence[float],
    skew: float,
    quantize: str | None,
) -> Iterator[PlanToOrder]:
    """Let ``engine`` plan as ever, then run a random plan of ``density`` instead of the real one.

    Args:
        engine: the engine of a sparse pipeline; as it was when the block has ended.
        watch: counts the kernel alone, and rounding to 8 bits where planning has not done it.
        density: share of query-key pairs that the kernel computes; or one for each head of a layer,
            whose random lists are then the same in every process that has it.
        skew: lists are from ``density * (1 - skew)`` to ``density * (1 + skew)`` long.
        quantize: 8-bit format of q·k, or None.
    """
    seen = PlanToOrder()
    router, planner, kernel = engine.router, engine.planner, engine.kernel
    # one plan for each shape: in the order of its layers, a model's plans are different, but random
    # ones are alike to a kernel.
    plans: dict[Any, SparsePlan] = {}

    def plan(
        method: Any, q: Tensor, k: Tensor, site: Any, order: Any, route: Route, v: Tensor
    ) -> Any:
        made = planner(method, q, k, site, order, route, v)
        heads = _heads_of(site, q.shape[1])
        key = (tuple(q.shape), site.grid, None if isinstance(density, float) else heads)
        if key not in plans:
            ask = partial(random_plan, video=site.grid.video, tile=method.tile, skew=skew)
            if isinstance(density, float):
                plans[key] = ask(q, density=density)
            else:
                plans[key] = _plan_by_head(q, heads, density, ask)
        seen.real.append(made.plan.computed)
        seen.tokens = max(seen.tokens, q.shape[2])
        return replace(made, plan=plans[key])

    def timed(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.implementation = kwargs["implementation"]
        with watch.span():
            return kernel(q, *args, **kwargs)

    engine.router = partial(router, quantize=quantize)
    engine.planner, engine.kernel = plan, timed
    try:
        yield seen
    finally:
        engine.router, engine.planner, engine.kernel = router, planner, kernel


def _heads_of(site: CallSite, count: int) -> tuple[int, ...]:
    """The numbers, in their layer, of the ``count`` heads of a call."""
    own = range(site.first_head, site.first_head + count)
    return tuple(own) if site.heads is None else tuple(site.heads[place] for place in own)


def _plan_by_head(
    q: Tensor,
    heads: tuple[int, ...],
    densities: Sequence[float],
    ask: Callable[..., SparsePlan],
) -> SparsePlan:
    """The plans of ``heads`` by ``ask`` beside each other, each made of its head's number alone."""
    made = []
    with torch.random.fork_rng([q.device] if q.is_cuda else []):
        for place, head in enumerate(heads):
            torch.manual_seed(head)
            made.append(ask(q[:, place : place + 1], density=densities[head]))

    def beside(name: str) -> Tensor:
        return torch.cat([getattr(one, name) for one in made], 1)

    return replace(
        made[0],
        q_tiles=beside("q_tiles"),
        kv_count=beside("kv_count"),
        kv_bits=beside("kv_bits"),
        selected=beside("selected"),
        computed=beside("computed"),
    )


def random_plan(
    q: Tensor, video: int, tile: tuple[int, int], density: float, skew: float
) -> SparsePlan:
    """A plan for ``q`` ``[B, H, S, D]`` with random lists that sum up to ``density``.

    Query tiles are merged as ``xor-window`` merges them: any of one window together. What holds
    tokens behind the first ``video`` ones is computed in full.
    """
    batch, heads, tokens, _ = q.shape
    rows, keys = tile
    block = max(rows, block_rows(q.device))
    # blocks and chunks that hold text, as shares of all rows and keys.
    text_block, text_chunk = (video // n if video < tokens else tokens for n in (block, keys))
    full_rows = max(0.0, 1 - text_block * block / tokens)
    full_keys = max(0.0, 1 - text_chunk * keys / tokens)
    # very short videos are nearly all text blocks: the density is then what it is.
    share = 0.0 if full_rows == 1 else (density - full_rows) / (1 - full_rows)
    share = 0.0 if full_keys == 1 else (share - full_keys) / (1 - full_keys)
    case = Case(
        counts=KERNEL,
        tile=(block, keys),
        kept=min(1.0, max(share, 0.0)),
        seq_len=tokens,
        heads=batch * heads,
        skew=skew,
    )
    mask = random_mask(case, q.device).view(batch, heads, tile_count(tokens, block), -1)
    mask[:, :, text_block:] = True
    mask[:, :, :, text_chunk:] = True
    plan = make_plan(mask, case.tile, tokens, "consecutive", block_rows=block)
    members = _shuffled_tiles(batch * heads, min(video, tokens), tokens, rows, block // rows)
    members = members.to(q.device).view(batch, heads, -1, block // rows)
    chosen = plan.q_tiles.long().expand(-1, -1, -1, block // rows)
    return replace(plan, q_tiles=members.gather(2, chosen), tile=tile)


def _shuffled_tiles(sequences: int, video: int, tokens: int, rows: int, per_block: int) -> Tensor:
    """Query tiles by block, ``[sequences, blocks, per_block]`` int32, shuffled within windows."""
    count = tile_count(tokens, rows)
    tiles = torch.arange(math.ceil(count / per_block) * per_block, dtype=torch.int32)
    tiles[count:] = -1
    tiles = tiles.repeat(sequences, 1)
    windows = video // rows // WINDOW_TILES
    if windows and per_block > 1:
        window = tiles[:, : windows * WINDOW_TILES].view(sequences, windows, WINDOW_TILES)
        window.copy_(window.gather(2, torch.rand(window.shape).argsort(-1)))
    return tiles.view(sequences, -1, per_block)
