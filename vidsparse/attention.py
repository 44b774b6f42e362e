"""One attention call, from the pipeline's q, k, v to its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.errors import OptionError, UnsupportedError, VidsparseError
from vidsparse.grid import TokenGrid
from vidsparse.kernels.dispatch import (
    IMPLEMENTATIONS,
    block_rows,
    choose,
    eight_bits_that_pay,
    plans_on_device,
    sparse_attention,
)
from vidsparse.kernels.gates import Gate
from vidsparse.masks import PooledTopP, tile_count
from vidsparse.methods import Method, SparseMethod, make_method
from vidsparse.order import TokenOrder, check_order, token_order
from vidsparse.plan import SparsePlan, make_plan, make_plan_of_bits
from vidsparse.schedule import Action, Schedule
from vidsparse.site import CallSite
from vidsparse.trace import Cell, Trace

if TYPE_CHECKING:
    from vidsparse.kernels.quantize import QuantizedQK
    from vidsparse.kernels.triton_pool import Pooled
    from vidsparse.probe import CellProbe

DenseAttention = Callable[[Tensor, Tensor, Tensor], Tensor]

Observer = Callable[[Tensor, Tensor, Tensor, CallSite], None]
"""Shown q, k, v ``[B, H, S, D]`` of every call, in the pipeline's token order, before it runs."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """What a kernel gets of the queries and keys of one call.

    Attributes:
        q: queries ``[B, H, S, D]`` in order; where ``quantized`` is there, of any order, for their
            shape and dtype alone.
        k: keys, likewise.
        plan: the plan for them.
        quantized: both in order and 8 bits, if they were rounded on the way.
    """

    q: Tensor
    k: Tensor
    plan: SparsePlan
    quantized: QuantizedQK | None = None


# layer, branch, and all else that a plan depends on: grid, batch, heads, device.
PlanKey = tuple[int, str, TokenGrid, int, int, torch.device]

# tiles of all heads that a mask may hold at once. Sorting them takes about 30 bytes a tile, so this
# bounds the extra memory of a mask at 2 GB on a GPU; longer sequences go by chunks of heads. One
# head is the least: 16x1 tiles at 75,600 tokens are 357 million a head.
MASK_TILES = 64_000_000

# the kernels hold a mask as bits and tile means in 16 bits: all 40 heads at 75,600 tokens and 16x16
# tiles are 300 MB. Their scores go to a room of fixed size.
MASK_BYTES = 512 * 2**20


class AttentionEngine:
    """A method, an order and a schedule, with the plans and the trace of one run.

    Args:
        method: what to skip; ``dense`` computes everything.
        schedule: which steps and layers stay dense, how long a plan lives.
        order: name of the token order.
        layers: transformer layers that will call.
        implementation: kernel implementation or ``auto``.
        check_finite: check every output for NaN and Inf and raise, naming layer and step.
        trace: where calls are recorded; a new one is made at every ``begin_run``.

    Attributes:
        planner: ``order_and_plan``. A benchmark may put another plan in the place of its answer.
        kernel: ``sparse_attention``. A benchmark may put a stopwatch around it.

    Raises:
        OptionError: unknown order or implementation, or a method that lacks calibrated numbers.
    """

    def __init__(
        self,
        method: Method,
        *,
        schedule: Schedule,
        order: str = "hilbert",
        layers: int,
        implementation: str = "auto",
        check_finite: bool = False,
        trace: Trace | None = None,
    ) -> None:
        check_order(order)
        _check_implementation(implementation)
        if isinstance(method, SparseMethod):
            method.check_numbers()
        self.method = method
        self.schedule = schedule
        self.order = order
        self.layers = layers
        self.implementation = implementation
        self.check_finite = check_finite
        self.trace = trace if trace is not None else Trace()
        self.steps = 1
        self.observer: Observer | None = None
        self.planner: Callable[..., Ordered] = order_and_plan
        self.kernel: Callable[..., tuple[Tensor, Tensor]] = sparse_attention
        self.probe: CellProbe | None = None
        self._plans: dict[PlanKey, SparsePlan] = {}

    def begin_run(self, steps: int) -> None:
        """Start a run of ``steps`` denoising steps: new trace, no plans kept."""
        self.steps = steps
        self.trace = Trace()
        self._plans.clear()

    def implementation_for(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        head_dim: int,
        *,
        gate: Gate | None = None,
        quantize: str | None = None,
    ) -> str:
        """The kernel implementation that such a call will run.

        ``gate`` and ``quantize`` are what the call will have beside its plan.

        Raises:
            UnsupportedError: the one asked for cannot run there.
        """
        try:
            return choose(
                self.implementation, device, dtype, head_dim, gate=gate, quantize=quantize
            )
        except ValueError as error:
            raise UnsupportedError(str(error)) from None

    def _eight_bits(self, asked: str | None, q: Tensor, gate: Gate | None) -> str | None:
        if asked != "auto":
            return None if asked == "none" else asked
        try:
            return eight_bits_that_pay(
                self.implementation, q.device, q.dtype, q.shape[-1], gate=gate
            )
        except ValueError as error:
            raise UnsupportedError(str(error)) from None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, site: CallSite, dense: DenseAttention | None = None
    ) -> Tensor:
        """Attention of one layer at one step: ``q``, ``k``, ``v`` ``[B, H, S, D]``, any strides.

        ``dense`` is the pipeline's own attention on the same shapes; PyTorch's by default. A grid
        that does not have S tokens runs dense, and the trace says so.

        Raises:
            UnsupportedError: the implementation asked for cannot run on these tensors.
            VidsparseError: ``check_finite`` found NaN or Inf.
        """
        if self.observer is not None:
            self.observer(q, k, v, site)
        if isinstance(self.method, SparseMethod) and self.method.numbers is not None:
            # said in the first step, though it may be a dense one.
            self.method.numbers.check(site, q.shape[1])
        action = self._action(q, site)
        cell = Cell(site.step, site.layer, site.branch, action, "dense")
        with self.trace.timed(cell, q.device):
            if action in (Action.REPLAN.value, Action.REUSE.value):
                out = self._sparse(q, k, v, site, cell)
            else:
                out = (dense or F.scaled_dot_product_attention)(q, k, v)
        if self.check_finite and not bool(out.isfinite().all()):
            raise VidsparseError(
                f"attention gave NaN or Inf in layer {site.layer} at step {site.step} "
                f"({site.branch}, {cell.action}, {cell.implementation})"
            )
        return out

    def _action(self, q: Tensor, site: CallSite) -> str:
        if not isinstance(self.method, SparseMethod):
            return Action.DENSE.value
        action = self.schedule.decide(site.step, self.steps, site.layer, self.layers)
        if action is Action.DENSE:
            return action.value
        if site.grid.tokens != q.shape[2]:
            g = site.grid
            return (
                f"dense: a grid of {g.frames}x{g.height}x{g.width} video and {g.text} text tokens "
                f"does not match {q.shape[2]} tokens"
            )
        # without a plan made for just such a call, planning anew is always right.
        return action.value if _plan_key(q, site) in self._plans else Action.REPLAN.value

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite, cell: Cell) -> Tensor:
        assert isinstance(self.method, SparseMethod)
        asked, kind = q.dtype, q.device.type
        if torch.is_autocast_enabled(kind):
            # as autocast does for stock attention; planning and kernels choose their own precision.
            q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
        order = token_order(self.order, site.grid, q.device)
        key = _plan_key(q, site)
        layout = q
        if cell.action == Action.REPLAN.value:
            probed = self.probe is not None and self.probe.wants(site)
            # a probe looks at q and k themselves.
            early = None if probed else self._eight_bits(self.method.quantize, q, None)
            made = self.planner(self.method, q, k, site, order, early)
            if self.probe is not None and probed:
                shares = made.plan.selected, made.plan.computed
                self.probe.take(self.method, made.q, made.k, site, self.order, shares)
            if self.schedule.reuse > 1:
                self._plans[key] = made.plan
        else:
            made = Ordered(order.apply(q), order.apply(k), self._plans[key])
        q, k, plan = made.q, made.k, made.plan
        v = order.apply(v)
        # a gate is of this very step, also where the plan is not.
        gate = self.method.gate(q, site, plan)
        quantized = made.quantized
        bits = quantized.kind if quantized else self._eight_bits(self.method.quantize, q, gate)
        cell.implementation = self.implementation_for(
            q.device, q.dtype, q.shape[-1], gate=gate, quantize=bits
        )
        skipped = None if gate is None else torch.empty_like(plan.kv_count)
        out, _ = self.kernel(
            q,
            k,
            v,
            plan.q_tiles,
            plan.kv_count,
            plan.kv_index,
            tile=plan.tile,
            implementation=cell.implementation,
            gate=gate,
            quantize=quantized or bits,
            skipped=skipped,
        )
        cell.selected, cell.computed = plan.selected, plan.computed
        if skipped is not None:
            cell.count_skipped(skipped, plan.tokens)
        # the copies in order are as large as what the caller holds: not to be kept beside another.
        del q, k, v, made, quantized
        return order.undo(out, like=layout).to(asked)


def _plan_key(q: Tensor, site: CallSite) -> PlanKey:
    return site.layer, site.branch, site.grid, q.shape[0], q.shape[1], q.device


def order_and_plan(
    method: SparseMethod,
    q: Tensor,
    k: Tensor,
    site: CallSite,
    order: TokenOrder,
    quantize: str | None = None,
) -> Ordered:
    """``q`` and ``k`` ``[B, H, S, D]`` put in order, and the plan for them.

    Where kernels plan, tiles are averaged on the way, while their tokens are at hand. If the
    attention will be of the 8-bit format ``quantize``, they are rounded then, too; elsewhere that
    is left to the attention.
    """
    rule = _rule_of_kernels(method, q, site)
    if rule is None or min(method.tile) == 1:
        # tiles of one token are their own mean: for all heads at once that would be a second q.
        q, k = order.apply(q), order.apply(k)
        return Ordered(q, k, plan_attention(method, q, k, site))
    judged = rule.theta is not None
    quantized = None
    if quantize is not None:
        from vidsparse.kernels.triton_quantize import quantize_and_pool

        quantized, q_pooled, k_pooled = quantize_and_pool(
            q, k, quantize, order.permutation, method.tile, judged=judged
        )
    else:
        from vidsparse.kernels.triton_pool import reorder_and_pool

        q, q_pooled = reorder_and_pool(q, order.permutation, method.tile[0], judged=judged)
        k, k_pooled = reorder_and_pool(k, order.permutation, method.tile[1], judged=judged)
    plan = _plan_by_kernels(method, q, k, site, (q_pooled, k_pooled))
    assert plan is not None
    return Ordered(q, k, plan, quantized)


def plan_attention(method: SparseMethod, q: Tensor, k: Tensor, site: CallSite) -> SparsePlan:
    """Mask and plan for ``q``, ``k`` ``[B, H, S, D]`` in token order, text last.

    Tiles that hold text tokens are computed in full, both ways. Heads go in chunks where the mask
    of all of them would be too large.
    """
    plan = _plan_by_kernels(method, q, k, site)
    if plan is not None:
        return plan
    tokens, grid = q.shape[2], site.grid
    rows, keys = method.tile
    tiles = tile_count(tokens, rows) * tile_count(tokens, keys) * q.shape[0]
    chunk = max(1, MASK_TILES // tiles)
    block = block_rows(q.device)
    plans = []
    # autocast would round scores and counts to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        for h in range(0, q.shape[1], chunk):
            part = replace(site, first_head=site.first_head + h)
            mask = method.select(q[:, h : h + chunk], k[:, h : h + chunk], part)
            if grid.text:
                mask[:, :, grid.video // rows :] = True
                mask[:, :, :, grid.video // keys :] = True
            plans.append(make_plan(mask, method.tile, tokens, method.merge, block_rows=block))
    return _of_all_heads(plans)


def _rule_of_kernels(method: SparseMethod, q: Tensor, site: CallSite) -> PooledTopP | None:
    """The method's rule where kernels can follow it, else None."""
    if not plans_on_device(q.device, q.dtype, q.shape[-1]):
        return None
    return method.rule(site, q.device)


def mask_by_kernels(
    method: SparseMethod,
    q: Tensor,
    k: Tensor,
    site: CallSite,
    pooled: tuple[Pooled, Pooled] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The mask of all heads of ``q``, ``k`` ``[B, H, S, D]`` by Triton's kernels, text included.

    In words of 32 key tiles, int32 ``[B, H, Tq, W]``, with the key tokens of each query tile, int32
    ``[B, H, Tq]``. None where there are no kernels for this call, and ``method.select`` is the way.
    """
    if not plans_on_device(q.device, q.dtype, q.shape[-1]):
        return None
    rule = method.rule(site, q.device)
    if rule is None:
        # autocast would round means and products to 16 bits.
        with torch.autocast(q.device.type, enabled=False):
            return method.words(q, k, site)
    from vidsparse.kernels.triton_mask import top_p_words
    from vidsparse.kernels.triton_pool import pool

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


def _plan_by_kernels(
    method: SparseMethod,
    q: Tensor,
    k: Tensor,
    site: CallSite,
    pooled: tuple[Pooled, Pooled] | None = None,
) -> SparsePlan | None:
    """``plan_attention`` by Triton's kernels, or None where there are none for this call."""
    batch, heads, tokens, dim = q.shape
    rows, keys = method.tile
    q_tiles, k_tiles = tile_count(tokens, rows), tile_count(tokens, keys)
    head_bytes = q_tiles * k_tiles // 8 + (q_tiles + k_tiles) * dim * 4
    chunk = max(1, MASK_BYTES // (head_bytes * batch))
    block = block_rows(q.device)
    plans = []
    for start in range(0, heads, chunk):
        part = slice(start, min(start + chunk, heads))
        made = mask_by_kernels(
            method,
            q[:, part],
            k[:, part],
            replace(site, first_head=site.first_head + start),
            None
            if pooled is None
            else (pooled[0].heads(start, part.stop), pooled[1].heads(start, part.stop)),
        )
        if made is None:
            return None
        plans.append(make_plan_of_bits(*made, method.tile, tokens, method.merge, block_rows=block))
    return _of_all_heads(plans)


def _above(pooled: Pooled, theta: Tensor) -> Pooled:
    """The same tiles, their self-similarity less ``theta`` ``[H]``."""
    assert pooled.similarity is not None
    return replace(pooled, similarity=pooled.similarity - theta.unsqueeze(-1))


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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: TokenGrid,
    method: str | Method = "fg-attn",
    *,
    order: str = "hilbert",
    implementation: str = "auto",
    **options: Any,
) -> Tensor:
    """Sparse attention over one set of q, k, v ``[B, H, S, D]``, without a pipeline.

    ``options`` are the method's own (``top_p=0.9, tile=(16, 16)``).

    Raises:
        OptionError: a bad option, or a grid whose tokens are not S.
        UnsupportedError: the implementation asked for cannot run on these tensors.
    """
    if grid.tokens != q.shape[2]:
        raise OptionError(f"the grid has {grid.tokens} tokens, q has {q.shape[2]}: they must agree")
    if isinstance(method, str):
        method = make_method(method, **options)
    elif options:
        raise OptionError("options go with a method's name; this method already has its own")
    engine = AttentionEngine(
        method,
        schedule=Schedule(dense_steps=0),
        order=order,
        layers=1,
        implementation=implementation,
    )
    return engine.attend(q, k, v, CallSite(0, 0, 0.0, grid))


def _check_implementation(name: str) -> None:
    if name not in ("auto", *IMPLEMENTATIONS):
        raise OptionError(
            f"unknown implementation {name!r}. "
            f"Hint: choose from auto, {', '.join(IMPLEMENTATIONS)}."
        )
