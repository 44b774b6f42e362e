"""The engine of a run: one attention call after another, dense, with a new plan or an old one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vidsparse.errors import OptionError, VidsparseError
from vidsparse.grid import TokenGrid
from vidsparse.kernels.dispatch import sparse_attention
from vidsparse.methods import METHODS, Method, SparseMethod
from vidsparse.order import TokenOrder, check_order, token_order, wants_gradient
from vidsparse.plan import SparsePlan
from vidsparse.planning import Ordered, key_means, order_and_plan
from vidsparse.route import Route, check_implementation, find_route
from vidsparse.schedule import Action, Schedule
from vidsparse.selection_costs import selection_cost
from vidsparse.site import CallSite
from vidsparse.trace import Cell, Trace
from vidsparse.work import SelectionCost

if TYPE_CHECKING:
    from vidsparse.probe import CellProbe

DenseAttention = Callable[[Tensor, Tensor, Tensor], Tensor]

Observer = Callable[[Tensor, Tensor, Tensor, CallSite], None]
"""Shown q, k, v ``[B, H, S, D]`` of every call, in the pipeline's token order, before it runs."""

# layer, branch, and all else that a plan depends on: grid, batch, heads, device.
PlanKey = tuple[int, str, TokenGrid, int, int, torch.device]


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
        router: ``find_route``. A benchmark may ask it for another 8-bit format.
        planner: ``order_and_plan``. A benchmark may replace the plan that it returns.
        kernel: ``sparse_attention``. A benchmark may put a stopwatch around it.

    Raises:
        OptionError: what is no method, unknown order or implementation, or a method that lacks
            calibrated numbers.
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
        if not isinstance(method, Method):
            # anything else would run dense without a word.
            raise OptionError(
                f"a method is a name or a method that is built already, got {method!r}. "
                f"Hint: choose from {', '.join(METHODS)}."
            )
        check_order(order)
        check_implementation(implementation)
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
        self.router: Callable[..., Route] = find_route
        self.planner: Callable[..., Ordered] = order_and_plan
        self.kernel: Callable[..., tuple[Tensor, Tensor]] = sparse_attention
        self.probe: CellProbe | None = None
        self._plans: dict[PlanKey, SparsePlan] = {}
        self._routes: dict[tuple[Hashable, ...], Route] = {}
        self._costs: dict[tuple[torch.device, torch.dtype, int], SelectionCost | None] = {}

    def begin_run(self, steps: int) -> None:
        """Start a run of ``steps`` denoising steps: new trace, no plans kept."""
        self.steps = steps
        self.trace = Trace()
        self._plans.clear()
        self._routes.clear()
        self._costs.clear()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, site: CallSite, dense: DenseAttention | None = None
    ) -> Tensor:
        """Attention of one layer at one step: ``q``, ``k``, ``v`` ``[B, H, S, D]``, any strides.

        ``dense`` is the pipeline's own attention on the same shapes; PyTorch's by default. A grid
        that does not have S tokens runs dense, and the trace says so.

        Returns:
            The output ``[B, H, S, D]`` in the dtype and token order of ``q``.

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
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        cell = Cell(site.step, site.layer, site.branch, action, "dense", pairs)
        with self.trace.timed(cell, q.device):
            if action in (Action.REPLAN.value, Action.REUSE.value):
                out = self._sparse(q, k, v, site, cell)
            else:
                out = (dense or F.scaled_dot_product_attention)(q, k, v)
        if self.check_finite and not bool(out.isfinite().all()):
            raise VidsparseError(
                f"attention returned NaN or Inf in layer {site.layer} at step {site.step} "
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
        route = self._route(q, k, v)
        cell.implementation = route.implementation
        order = token_order(self.order, site.grid, q.device)
        key = _plan_key(q, site)
        layout = q
        if cell.action == Action.REPLAN.value:
            made = self._planned(q, k, v, site, order, route)
            cell.selection = self._selection_cost(q)
            if self.schedule.reuse > 1:
                self._plans[key] = made.plan
        else:
            q, k = (order.apply(x, by_kernel=route.reorders) for x in (q, k))
            made = Ordered(q, k, self._plans[key])
        q, k, plan = made.q, made.k, made.plan
        v = order.apply(v, by_kernel=route.reorders) if made.v is None else made.v
        means, size = None, self.method.means
        if size is not None:
            # of this very step, also where the plan is not.
            means = key_means(
                k, v, plan, size, site.grid.video, by_kernel=route.lists, made=made.means
            )
        kv_index = plan.list_keys(by_kernel=route.lists)
        # a gate is of this very step, also where the plan is not.
        gate = self.method.gate(q, site, plan, kv_index)
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
        cell.selected, cell.computed = plan.selected, plan.computed
        if means is not None:
            cell.computed = plan.computed + means.groups / plan.tokens
        if skipped is not None:
            cell.count_skipped(skipped, plan.tokens)
        # the copies in order are as large as what the caller holds: not to be kept beside another.
        del q, k, v, made, kv_index, gate, means
        return order.undo(out, like=layout, by_kernel=route.reorders).to(asked)

    def _route(self, q: Tensor, k: Tensor, v: Tensor) -> Route:
        # found once a run for all calls alike: asking the device takes time of the host's.
        asked = self.router, self.implementation
        key = *asked, q.device, q.dtype, q.shape[-1], wants_gradient(q, k, v)
        if key not in self._routes:
            self._routes[key] = self.router(
                self.method, q, k, v, implementation=self.implementation
            )
        return self._routes[key]

    def _selection_cost(self, q: Tensor) -> SelectionCost | None:
        assert isinstance(self.method, SparseMethod)
        # a table is read for it, which takes as long as all other decisions of a call.
        key = q.device, q.dtype, q.shape[2]
        if key not in self._costs:
            self._costs[key] = selection_cost(self.method, *key)
        return self._costs[key]

    def _planned(
        self, q: Tensor, k: Tensor, v: Tensor, site: CallSite, order: TokenOrder, route: Route
    ) -> Ordered:
        assert isinstance(self.method, SparseMethod)
        if self.probe is None or not self.probe.wants(site):
            return self.planner(self.method, q, k, site, order, route, v)
        # a probe looks at q and k themselves: they are not rounded on the way.
        made = self.planner(self.method, q, k, site, order, replace(route, quantize=None), v)
        shares = made.plan.selected, made.plan.computed
        values = order.apply(v, by_kernel=route.reorders) if made.v is None else made.v
        self.probe.take(self.method, made.q, made.k, values, site, self.order, shares)
        return made


def _plan_key(q: Tensor, site: CallSite) -> PlanKey:
    return site.layer, site.branch, site.grid, q.shape[0], q.shape[1], q.device
