"""The engine of a run: one attention call after another, dense, with a new plan or an old one.

The file has over 600 lines because what a call does, what it leaves to later ones and what it is
recorded as are decided together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.autocast import autocast, working_dtype
from vidsparse.errors import OptionError, UnsupportedError, VidsparseError, check_flag
from vidsparse.finite import FiniteGuard, NonFiniteCall
from vidsparse.kept import (
    AllLacking,
    KeptPlan,
    Lacking,
    Lending,
    PlanKey,
    borrows_from,
    lists_of,
    plan_key,
)
from vidsparse.kernels.dispatch import dense_attention, sparse_attention
from vidsparse.methods import METHODS, Method, SparseMethod
from vidsparse.order import TokenOrder, check_order, token_order, wants_gradient
from vidsparse.plan import SparsePlan
from vidsparse.planning import (
    Ordered,
    key_means,
    order_and_average,
    order_and_plan,
    share_with_means,
)
from vidsparse.remainder import Keeping, Remainder, choose_keeping, lack_of_room
from vidsparse.ring import (
    Ring,
    attend_densely,
    attend_in_ring,
    check_dense_in_ring,
    deal_tokens,
    gate_left_out,
    not_finite,
    plan_stretch,
    stretch_step,
)
from vidsparse.room import check_room, free_bytes, lockable_bytes
from vidsparse.route import (
    Route,
    check_dense_kernel,
    check_implementation,
    dense_by_kernel,
    find_route,
    lacks_a_kernel,
)
from vidsparse.schedule import Action, Schedule
from vidsparse.selection_costs import selection_cost
from vidsparse.site import CallSite
from vidsparse.trace import Cell, Trace
from vidsparse.work import SelectionCost

if TYPE_CHECKING:
    from vidsparse.probe import CellProbe

DenseAttention = Callable[[Tensor, Tensor, Tensor], Tensor]

FELL_BACK = "dense: the sparse call returned NaN or infinity"
"""The action of a call that ``dense_fallback`` made again; both are in its time."""

NO_ROOM_ELSEWHERE: Final = "nothing was kept of refreshes: another process has no room for it"
"""What the trace of a process with room says then."""

INFERENCE_ONLY = (
    "sparse attention is for inference only, and gradients are asked for. "
    "Hint: torch.no_grad(), or remove() the handle to train."
)

# of a GPU's memory, for what a forward takes at its largest.
_LEFT_FREE: Final = 0.1

Observer = Callable[[Tensor, Tensor, Tensor, CallSite], None]
"""Shown q, k, v ``[B, H, S, D]`` of every call, in the pipeline's token order, before it runs."""


class AttentionEngine:
    """A method, an order and a schedule, with the plans and the trace of one run.

    Args:
        method: what to skip; ``dense`` computes everything.
        schedule: which steps and layers stay dense, how long a plan lives.
        order: name of the token order.
        layers: transformer layers that will call.
        implementation: kernel implementation or ``auto``.
        dense_kernel: what runs dense calls: ``stock`` (the pipeline's own attention), ``gluon``, or
            ``auto``, the faster of them.
        check_finite: check every output for NaN and Inf and raise, naming layer and step.
        dense_fallback: make a sparse call again densely where its output holds NaN or Inf.
        trace: where calls are recorded; a new one is made at every ``begin_run``.

    Attributes:
        router: ``find_route``. A benchmark may ask it for another 8-bit format.
        planner: ``order_and_plan``. A benchmark may replace the plan that it returns.
        guard: takes in every output, and at a refresh the sparse one too, to be asked afterwards
            which was the first that is not finite.
        only: layers that may be sparse in the next calls; the others run dense, except at
            refreshes. None: all that the schedule allows. Calibration sets it to look at one layer
            alone.
        kernel: ``sparse_attention``. A benchmark may put a stopwatch around it.
        any_process: where several processes make a run, whether a tensor is true in any of them;
            all of them ask.
        spared: says how many bytes of a GPU the run takes less than the model as it was; what
            refreshes keep may take them.

    Raises:
        OptionError: ``method`` is no method; the order, the implementation or the dense kernel is
            unknown; the method needs calibrated numbers and has none.
    """

    def __init__(
        self,
        method: Method,
        *,
        schedule: Schedule,
        order: str = "hilbert",
        layers: int,
        implementation: str = "auto",
        dense_kernel: str = "auto",
        check_finite: bool = False,
        dense_fallback: bool = False,
        trace: Trace | None = None,
    ) -> None:
        if not isinstance(method, Method):
            # anything else would run dense without a word.
            raise OptionError(
                f"a method is a name or a method that is built already, got {method!r}. "
                f"Hint: choose from {', '.join(METHODS)}."
            )
        check_order(order)
        check_implementation(implementation)
        check_dense_kernel(dense_kernel)
        check_flag("check_finite", check_finite)
        check_flag("dense_fallback", dense_fallback)
        if isinstance(method, SparseMethod):
            method.check_numbers()
        self.method = method
        self.schedule = schedule
        self.order = order
        self.layers = layers
        self.implementation = implementation
        self.dense_kernel = dense_kernel
        self.check_finite = check_finite
        self.dense_fallback = dense_fallback
        self.guard: FiniteGuard[NonFiniteCall] | None = None
        self.trace = trace if trace is not None else Trace()
        self.steps = 1
        self.observer: Observer | None = None
        self.router: Callable[..., Route] = find_route
        self.planner: Callable[..., Ordered] = order_and_plan
        self.kernel: Callable[..., tuple[Tensor, Tensor]] = sparse_attention
        self.probe: CellProbe | None = None
        self.only: Collection[int] | None = None
        self.any_process: Callable[[Tensor], bool] | None = None
        self.spared: Callable[[], int] | None = None
        self._plans: dict[PlanKey, KeptPlan] = {}
        self._lacking, self._lending = AllLacking(), Lending()
        # of the run: the engines of a pipeline's transformers have one set, as they have one trace.
        self.branches: set[str] = set()
        # how what refreshes keep is kept, and where there is no room for it the schedule without.
        self._keeping: Keeping | None = None
        self._fits: bool | None = None
        self._plain: Schedule | None = None
        self._routes: dict[tuple[Hashable, ...], Route] = {}
        self._dense: dict[tuple[Hashable, ...], bool] = {}
        self._costs: dict[tuple[torch.device, torch.dtype, int], SelectionCost | None] = {}
        # of what calls there is room to plan.
        self._fitting: set[tuple[Hashable, ...]] = set()

    def begin_run(self, steps: int) -> None:
        """Start a run of ``steps`` denoising steps: new trace, no plans kept."""
        self.steps = steps
        self.trace = Trace()
        self.forget()
        self.branches, self._lending = set(), Lending()
        self._keeping = self._plain = self._fits = None
        self._routes.clear()
        self._dense.clear()
        self._costs.clear()
        self._fitting.clear()

    def forget(self) -> None:
        """Let go of plans and of what was kept beside them, which may be gigabytes."""
        self._plans.clear()
        self._lacking.clear()

    def go_back(self, step: int) -> None:
        """Forget what was kept of ``step`` and after it, as far as it goes, to run it again.

        Where a later step has replaced what an earlier one kept, nothing is left, and calls plan
        anew.
        """
        self._plans = {key: kept for key, kept in self._plans.items() if kept.made < step}
        for kept in self._plans.values():
            # it served the step, for else another would stand in its place.
            kept.last = step
        self._lacking.go_back(step)

    def plans_anew(self, step: int) -> bool:
        """Whether no call of ``step`` goes by what is kept of a step before."""
        schedule = self._plain or self.schedule
        due = schedule.refresh_for(step, self.steps)
        if self._follows_slope and self._lacking:
            # what the last refresh kept is half of the next one's slope.
            return False
        if due is not None:
            return all(each.step < due for each in self._lacking.values())
        return not any(kept.serves(step, kept.by, schedule.reuse) for kept in self._plans.values())

    def end_forward(self, site: CallSite) -> None:
        """Let go of what no step after a forward that has returned adds.

        Its last call does so, too; but a step cache may leave that one out, and a decoder that
        wants the memory comes next.
        """
        if self._lacking and self.schedule.refresh_for(site.step + 1, self.steps) is None:
            self._lacking.end_forward(site, lambda key: self._lends(site, key))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        site: CallSite,
        dense: DenseAttention | None = None,
        *,
        keep_dense: bool = False,
        dense_because: str | None = None,
        ring: Ring | None = None,
    ) -> Tensor:
        """Attention of one layer at one step: ``q``, ``k``, ``v`` ``[B, H, S, D]``, any strides.

        ``dense`` is the pipeline's own attention on the same shapes; PyTorch's by default. With
        ``keep_dense`` it is what the user has chosen, and runs all dense calls unless another
        kernel was asked for by name. Where the grid does not have S tokens the call runs dense, and
        the trace says so. ``dense_because`` is the pipeline's reason to keep this call dense: it
        then runs by ``dense``, whatever else was asked for and whatever grid ``site`` has.

        In a ``ring`` S are the tokens of this process: its run of the grid's video in the
        pipeline's order, and all text. Every process of the ring must call.

        Returns:
            The output ``[B, H, S, D]`` in the dtype and token order of ``q``.

        Raises:
            UnsupportedError: the implementation asked for cannot run on these tensors, gradients
                are asked for and the call is sparse, or the memory is too small to plan it.
            VidsparseError: ``check_finite`` found NaN or Inf.
        """
        if self.observer is not None and dense_because is None:
            self.observer(q, k, v, site)
        self.branches.add(site.branch)
        shared = isinstance(self.method, SparseMethod) and self.method.plans == "shared"
        key = plan_key(q, site, shared=shared)
        numbers = self.method.numbers if isinstance(self.method, SparseMethod) else None
        if numbers is not None and dense_because is None:
            # said in the first step, though it may be a dense one.
            numbers.check(site, q.shape[1])
        if self.schedule.unconditional_every > 1:
            self._lending.note(site, key, q.shape)
        if dense_because is None:
            action = self._action(q, site, key, ring)
        else:
            action = f"dense: {dense_because}"
        tokens = q.shape[2] if ring is None else site.grid.tokens
        pairs = q.shape[0] * q.shape[1] * tokens**2
        cell = Cell(site.step, site.layer, site.branch, action, "dense", pairs, heads=site.heads)
        with self.trace.timed(cell, q.device):
            planned = earlier = None
            if action == Action.REFRESH.value:
                # the old one's memory serves the new one. The sparse call comes first: the copies
                # that it makes are gone before there is a dense output beside them.
                earlier = self._lacking.retire(site, key, slope=self._has_slope(site.step))
                planned, route = self._sparse(q, k, v, site, cell, key, ring)
                self._show(planned, site, cell)
            sparse = action in (Action.REPLAN.value, Action.REUSE.value)
            if sparse:
                lacks: list[tuple[Remainder, float]] = []
                try:
                    for remainder, factor in self._lacks(site, key, q.shape[2]):
                        lacks.append((remainder.fetched(q.device), factor))
                    out, route = self._sparse(q, k, v, site, cell, key, ring)
                except BaseException:
                    for remainder, _ in lacks:
                        remainder.wait()
                    raise
                self._add_remainder(out, lacks, site, key, route)
                del lacks
            if sparse and self.dense_fallback and not_finite(out, ring):
                cell.action, cell.implementation = FELL_BACK, "dense"
                cell.selected = cell.computed = cell.skipped = None
                # whatever made it is not to be used again.
                self._plans.pop(key, None)
                sparse = False
            # of branches in one batch the conditional one is the last.
            lends = planned is not None and site.stacked > 1 and self._lends(site, key, q)
            first = q.shape[0] // site.stacked if lends else 0
            if not sparse:
                # a mask, for one, is nothing that another kernel knows of.
                keep_dense = dense_because is not None or (
                    keep_dense and self.dense_kernel == "auto"
                )
                asked = "stock" if keep_dense else self.dense_kernel
                stock = dense or F.scaled_dot_product_attention
                rows = (q[first:], k[first:], v[first:]) if first else (q, k, v)
                if ring is None:
                    out, cell.dense_by = self._run_dense(*rows, stock, asked)
                else:
                    check_dense_in_ring(self.dense_kernel)
                    out = attend_densely(ring, *autocast(*rows), site.grid).to(q.dtype)
                    cell.dense_by = "dense"
                # a refresh is named after what serves the steps to come.
                if planned is None:
                    cell.implementation = cell.dense_by
            if planned is not None:
                how, keeping = {"by_kernel": route.reorders}, self._keeping or Keeping()
                remainder = Remainder.of(out, planned[first:], keeping.bits, **how)
                if first:
                    remainder.add_to(planned[:first], **how)
                    planned[first:], cell.whole = out, 1 - first / q.shape[0]
                    out = planned
                most = keeping.most_on_gpu
                if most is not None and self._lacking.count_on_gpu(earlier) >= most:
                    remainder = remainder.to_host()
                kept = self._plans[key]
                lacking = Lacking(site.step, kept.made, kept.by, remainder, earlier)
                self._lacking[site.branch, key] = lacking
        self._show(out, site, cell)
        if self.check_finite and not bool(out.isfinite().all()):
            raise VidsparseError(
                f"attention returned NaN or Inf in layer {site.layer} at step {site.step} "
                f"({site.branch}, {cell.action}, {cell.implementation})"
            )
        return out

    def _show(self, out: Tensor, site: CallSite, cell: Cell) -> None:
        if self.guard is not None:
            how = f"{cell.action}, {cell.implementation}"
            self.guard.watch(out, NonFiniteCall(site, how))

    def _action(self, q: Tensor, site: CallSite, key: PlanKey, ring: Ring | None) -> str:
        if not isinstance(self.method, SparseMethod):
            return Action.DENSE.value
        kept, lends = self._plans.get(key), self._lends(site, key, q)
        if lends and borrows_from(site.branch):
            slope = self._has_slope(site.step)
            if kept is not None and self._lacking.borrow(site, kept, key, q.shape, slope=slope):
                return Action.REUSE.value
            lends = False
        schedule = self._plain or self.schedule
        action = schedule.decide(site.step, self.steps, site.layer, self.layers)
        if lends and action is Action.DENSE and site.layer in schedule.sparse_layers(self.layers):
            # a dense step of the one branch, from which the other takes what its plan lacks.
            action = Action.REFRESH
        if action is Action.REFRESH and not self._has_room(q, site):
            schedule = self._plain = replace(self.schedule, refresh=0)
            action = schedule.decide(site.step, self.steps, site.layer, self.layers)
        if self.only is not None and site.layer not in self.only and action is not Action.REFRESH:
            action = Action.DENSE
        if action is Action.DENSE:
            return action.value
        if ring is None and site.grid.tokens != q.shape[2]:
            g = site.grid
            return (
                f"dense: a grid of {g.frames}x{g.height}x{g.width} video and {g.text} text tokens "
                f"does not match {q.shape[2]} tokens"
            )
        if action is Action.REFRESH:
            return action.value
        # without a plan made for just such a call, planning anew is always right.
        due = schedule.refresh_for(site.step, self.steps)
        if due is not None:
            # a step cache may have left the refresh out, and a second transformer may have come in
            # after it.
            lacking = self._lacking.get((site.branch, key))
            if lacking is not None and lacking.serves(kept, due, q.shape[2]):
                return Action.REUSE.value
            if not self._has_room(q, site):
                self._plain = replace(self.schedule, refresh=0)
                return self._action(q, site, key, ring)
            # what a late one kept in the last step of its reach would serve nothing: that step is
            # as those beyond, which plan.
            follows = schedule.refresh_for(site.step + 1, self.steps)
            if follows is not None or site.step + 1 not in schedule.sparse_window(self.steps):
                return Action.REFRESH.value
        again = kept is not None and kept.serves(site.step, site.branch, self.schedule.reuse)
        return Action.REUSE.value if again else Action.REPLAN.value

    def _run_dense(
        self, q: Tensor, k: Tensor, v: Tensor, stock: DenseAttention, asked: str
    ) -> tuple[Tensor, str]:
        """The output, and what made it: the Hopper kernel, or whatever the pipeline has."""
        key = asked, q.device, working_dtype(q), q.shape[2:], wants_gradient(q, k, v)
        if key not in self._dense:
            self._dense[key] = dense_by_kernel(q, k, v, asked, working_dtype(q))
        if not self._dense[key]:
            return stock(q, k, v), "dense"
        return dense_attention(*autocast(q, k, v), chosen=True)[0].to(q.dtype), "gluon"

    def _sparse_in_ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        site: CallSite,
        cell: Cell,
        key: PlanKey,
        ring: Ring,
        route: Route,
    ) -> Tensor:
        assert isinstance(self.method, SparseMethod)
        method, grid = self.method, site.grid
        self._note(gate_left_out(method, route))
        deal = deal_tokens(self.order, grid, ring.count, ring.rank, stretch_step(method), q.device)
        plan = self._take_kept(site, cell, key)
        if plan is None:
            plan, tiles = plan_stretch(
                ring, deal, (q, k, v), site, method, self.order, route, self.planner
            )
            cell.made_plan, cell.selection = True, self._selection_cost(q, grid.tokens)
            plan = self._keep(plan, site, cell, key, tiles)
        cell.selected, cell.computed = plan.selected, share_with_means(plan, method.means)
        return attend_in_ring(ring, deal, (q, k, v), plan, grid, method.means, route, self.kernel)

    def _sparse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        site: CallSite,
        cell: Cell,
        key: PlanKey,
        ring: Ring | None,
    ) -> tuple[Tensor, Route]:
        """The output, and the way it went."""
        assert isinstance(self.method, SparseMethod)
        asked = q.dtype
        q, k, v = autocast(q, k, v)
        route = self._route(q, k, v)
        # said here, before any gradient is written. the definition has one, except through 8 bits.
        if route.implementation != "reference" and wants_gradient(q, k, v):
            raise UnsupportedError(INFERENCE_ONLY)
        cell.implementation = route.implementation
        if ring is not None:
            out = self._sparse_in_ring(q, k, v, site, cell, key, ring, route)
            return out.to(asked), route
        order = token_order(self.order, site.grid, q.device)
        layout, size, video = q, self.method.means, site.grid.video
        plan = self._take_kept(site, cell, key)
        mean = None
        if plan is None:
            made = self._planned(q, k, v, site, order, route)
            plan = self._keep(made.plan, site, cell, key)
            cell.made_plan, cell.selection = True, self._selection_cost(q, q.shape[2])
        else:
            q = order.apply(q, by_kernel=route.reorders)
            k, mean = order_and_average(k, order, size, video, route)
            made = Ordered(q, k, plan)
        q, k = made.q, made.k
        averages: tuple[Tensor | None, Tensor | None] = made.means or (mean, None)
        if made.v is None:
            v, of_values = order_and_average(v, order, size, video, route)
            averages = (averages[0], of_values)
        else:
            v = made.v
        lists = lists_of(plan, self._plans.get(key), size, by_kernel=route.lists)
        kv_index, means = lists.kv_index, None
        if size is not None:
            assert lists.counts is not None
            # of this very step, also where the plan is not.
            means = key_means(k, v, lists.counts, size, video, by_kernel=route.lists, made=averages)
        # a gate is of this very step, also where the plan is not.
        gate = self.method.gate(q, site, plan, kv_index) if route.gates else None
        assert gate is None or gate.keys == self.method.gate_keys
        skipped = None if gate is None else torch.empty_like(plan.kv_count)
        out, _ = self.kernel(
            q,
            k,
            v,
            plan.q_tiles,
            plan.kv_count,
            kv_index,
            tile=plan.tile,
            implementation=route.implementation,
            chosen=True,
            gate=gate,
            quantize=made.quantized or route.quantize,
            means=means,
            skipped=skipped,
            # lists are made anew for every call, and looking at each would cost a GPU's queue more
            # launches than the call itself has. on a CPU it costs next to nothing.
            validate=False if q.is_cuda else None,
        )
        cell.selected, cell.computed = plan.selected, lists.computed
        if skipped is not None:
            cell.count_skipped(skipped, plan.tokens)
        # the copies in order are as large as what the caller holds: not to be kept beside another.
        del q, k, v, made, mean, averages, kv_index, lists, gate, means
        return order.undo(out, like=layout, by_kernel=route.reorders).to(asked), route

    def _take_kept(self, site: CallSite, cell: Cell, key: PlanKey) -> SparsePlan | None:
        """The plan that a call goes by without making one, as its action says."""
        kept = self._plans.get(key)
        if kept is None:
            return None
        # a refresh goes by what another branch goes by in the same step.
        refreshed = cell.action == Action.REFRESH.value and kept.serves(site.step, site.branch, 1)
        if cell.action != Action.REUSE.value and not refreshed:
            return None
        cell.plan_step = kept.made
        assert isinstance(self.method, SparseMethod)
        return kept.use(site.step, site.grid.video, site.grid.tokens, self.method.text_rows)

    def _keep(
        self,
        plan: SparsePlan,
        site: CallSite,
        cell: Cell,
        key: PlanKey,
        tiles: range | None = None,
    ) -> SparsePlan:
        """Keep a plan for the steps and branches that may go by it, and return it."""
        assert isinstance(self.method, SparseMethod)
        shared = self.method.plans == "shared"
        if shared and site.stacked > 1:
            plan = plan.shared(site.stacked)
        cell.plan_step = site.step
        served = cell.action == Action.REFRESH.value or (shared and len(self.branches) > 1)
        if self.schedule.reuse > 1 or served:
            self._plans[key] = KeptPlan(plan, site.step, site.branch, site.step, tiles)
        return plan

    def _has_room(self, q: Tensor, site: CallSite) -> bool:
        """Whether what refreshes keep for all layers and branches fits somewhere; decides where."""
        if self._fits is None:
            self._fits = self._find_room(q, site)
            # processes that do not all keep them would wait for each other in other calls.
            lacks = torch.tensor(not self._fits, device=q.device)
            if self.any_process is not None and self.any_process(lacks) and self._fits:
                self._fits = False
                self._note(NO_ROOM_ELSEWHERE)
        return self._fits

    def _find_room(self, q: Tensor, site: CallSite) -> bool:
        """Whether it fits on this process's device or beside it."""
        if not q.is_cuda:
            return True
        before = {cell.branch for cell in self.trace.cells if cell.step < site.step}
        calls = self.layers * (len(before) or 2 // site.stacked)
        calls *= 2 if self._follows_slope else 1
        free, all_of_it = free_bytes(q.device), torch.cuda.mem_get_info(q.device)[1]
        assert free is not None
        room = max(0, int(free - all_of_it * _LEFT_FREE))
        spared = 0 if self.spared is None else self.spared()
        self._keeping = keeping = choose_keeping(q, calls, room, lockable_bytes(), spared)
        self._note(lack_of_room(q, calls, room, keeping))
        return keeping is not None

    def _lacks(
        self, site: CallSite, key: PlanKey, tokens: int
    ) -> Iterator[tuple[Remainder, float]]:
        """What a call's plan lacked at the last refresh, and how many times it counts."""
        lacking = self._lacking.get((site.branch, key))
        if lacking is None:
            return
        assert isinstance(self.method, SparseMethod)
        # what another branch lent is of this very step, which may be one before the first refresh.
        lent = lacking.step == site.step
        due = self.schedule.refresh_for(site.step, self.steps)
        # a plan made anew lacks something else than the one before it.
        if lent or (due is not None and lacking.serves(self._plans.get(key), due, tokens)):
            how = self.method.fading, self.method.slope
            yield from lacking.counted(site.step, self.steps, *how)

    def _add_remainder(
        self,
        out: Tensor,
        lacks: Sequence[tuple[Remainder, float]],
        site: CallSite,
        key: PlanKey,
        route: Route,
    ) -> None:
        """Add to ``out``, in place, what it ``lacks``."""
        for remainder, factor in lacks:
            # of branches in one batch there may be that of one alone.
            count = remainder.values.shape[0]
            for first in range(0, out.shape[0], count):
                part = out if count == out.shape[0] else out[first : first + count]
                remainder.add_to(part, factor, by_kernel=route.reorders)
        if self.schedule.refresh_for(site.step + 1, self.steps) is None:
            # nothing follows that it serves, but a decoder that wants the memory.
            self._lacking.pop((site.branch, key), None)

    def _lends(self, site: CallSite, key: PlanKey, q: Tensor | None = None) -> bool:
        """Whether the conditional branch computes all pairs in this step for the other one, too."""
        schedule = self._plain or self.schedule
        # calibration, which looks at one layer, wants the others as they are. in one batch branches
        # are written over each other's, and fall back as one.
        if not schedule.lends(site.step, self.steps) or self.only is not None:
            return False
        if (site.stacked > 1 and self.dense_fallback) or (q is not None and wants_gradient(q)):
            return False
        return self._lending.expects(site, key)

    def _has_slope(self, step: int) -> bool:
        """Whether what is kept in ``step`` has something to change from: not before a refresh."""
        return self._follows_slope and step > self.schedule.refresh_steps(self.steps)[0]

    @property
    def _follows_slope(self) -> bool:
        return isinstance(self.method, SparseMethod) and self.method.slope > 0

    def _route(self, q: Tensor, k: Tensor, v: Tensor) -> Route:
        # found once a run for all calls alike: asking the device takes time of the host's.
        asked = self.router, self.implementation
        key = *asked, q.device, q.dtype, q.shape[-1], wants_gradient(q, k, v)
        if key not in self._routes:
            found = self.router(self.method, q, k, v, implementation=self.implementation)
            self._routes[key] = found
            if self.implementation == "auto":
                self._note(lacks_a_kernel(q, found.implementation))
        return self._routes[key]

    def _note(self, note: str | None) -> None:
        if note is not None and note not in self.trace.notes:
            self.trace.notes.append(note)

    def _selection_cost(self, q: Tensor, tokens: int) -> SelectionCost | None:
        assert isinstance(self.method, SparseMethod)
        # a table is read for it, which takes as long as all other decisions of a call.
        key = q.device, q.dtype, tokens
        if key not in self._costs:
            self._costs[key] = selection_cost(self.method, *key)
        return self._costs[key]

    def _planned(
        self, q: Tensor, k: Tensor, v: Tensor, site: CallSite, order: TokenOrder, route: Route
    ) -> Ordered:
        assert isinstance(self.method, SparseMethod)
        # once a run for all calls alike, of which the later ones may have what the first gave back.
        alike = q.device, q.dtype, q.shape
        if alike not in self._fitting:
            check_room(self.method, q, route)
            self._fitting.add(alike)
        if self.probe is None or not self.probe.wants(site):
            return self.planner(self.method, q, k, site, order, route, v)
        # a probe looks at q and k themselves: they are not rounded on the way.
        made = self.planner(self.method, q, k, site, order, replace(route, quantize=None), v)
        shares = made.plan.selected, share_with_means(made.plan, self.method.means)
        values = order.apply(v, by_kernel=route.reorders) if made.v is None else made.v
        self.probe.take(self.method, made.q, made.k, values, site, self.order, shares)
        return made
