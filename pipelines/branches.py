"""The two guidance branches of a step on different processes.

Pipelines such as Wan's call the transformer twice a step, for the prompt and for the negative one,
and look at what it gave only after the second call. So one half of the processes computes the
first branch and the other half the second, at the same time: a call for the other half's branch
computes nothing. The first of a step's two returns a tensor that holds NaN, and the second fills it
with what the other half sends before it returns. Each process trades with the one of its own place
in the other half.

Where branches share plans, the conditional half makes them and sends each to the other half, layer
by layer, as one process would hand it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from vidsparse.errors import UnsupportedError
from vidsparse.masks import tile_count
from vidsparse.methods import Method, SparseMethod
from vidsparse.pipelines.balance import device_of
from vidsparse.pipelines.cached import cache_of
from vidsparse.plan import SparsePlan
from vidsparse.planning import Ordered
from vidsparse.schedule import Action

if TYPE_CHECKING:
    from vidsparse.engine import AttentionEngine
    from vidsparse.order import TokenOrder
    from vidsparse.route import Route
    from vidsparse.site import CallSite
    from vidsparse.trace import Trace

HALVES: Final = 2
"""Guidance branches of a step."""

HOOK: Final = "vidsparse_branches"
"""The name under which diffusers keeps the hook of a transformer."""

BRANCHES_ARE_APART: Final = (
    "this pipeline's guidance branches run in different processes already. "
    "Hint: remove() its handle first."
)

_CACHED: Final = (
    "a step cache does not work where guidance branches run in different processes. "
    "Hint: leave one of them out."
)


def check_apart(transformers: Iterable[Any], known: tuple[str, ...]) -> None:
    """Check that guidance branches of ``transformers`` can be computed apart from each other.

    Raises:
        UnsupportedError: a transformer's class is not among the ``known`` ones; it has a step
            cache, or is dealt to processes already.
    """
    for transformer in transformers:
        if type(transformer).__name__ not in known:
            raise UnsupportedError(
                f"the guidance branches of {type(transformer).__name__} cannot run in different "
                "processes. Hint: parallelize() without apart."
            )
        if getattr(transformer, "_parallel_config", None) is not None:
            raise UnsupportedError(
                "this pipeline runs under context parallelism already. "
                "Hint: call parallelize(apart=True) alone."
            )
        if cache_of(transformer) is not None:
            raise UnsupportedError(_CACHED)


def has_one_branch(transformer: Any) -> bool:
    """Whether a transformer computes one guidance branch while another process has the other."""
    registry = getattr(transformer, "_diffusers_hook", None)
    return registry is not None and HOOK in registry.hooks


def check_both_branches(transformer: Any) -> None:
    """Raise an ``UnsupportedError`` if a transformer that is to get a cache has one branch only."""
    if has_one_branch(transformer):
        raise UnsupportedError(_CACHED)


@dataclass(frozen=True, slots=True)
class _First:
    """What the first of a step's two calls gave.

    Args:
        step: of the run.
        branch: its place among the branches.
        sample: the prediction, or what is to hold it.
    """

    step: int
    branch: int
    sample: Tensor


class Halves:
    """What this process, in one of two halves, knows of the two guidance branches.

    Args:
        branches: the branches' names, in the order of a step's calls.
    """

    def __init__(self, branches: tuple[str, ...]) -> None:
        count = dist.get_world_size()
        self._branches = branches
        self._own, place = divmod(dist.get_rank(), count // HALVES)
        self._partner = (1 - self._own) * (count // HALVES) + place
        self._first: _First | None = None
        # whether what runs now is one branch while the other half runs the other.
        self._apart = False
        # whether the last forward's run is one of two; None before the first one of a run.
        self._was_apart: bool | None = None
        # the steps of the run of which each half computed one branch.
        self._steps: set[int] = set()
        self._engines: list[AttentionEngine] = []

    # ---- forwards ----

    def attach(
        self, transformer: Any, watch: Callable[[], tuple[int, str] | None]
    ) -> Callable[[], None]:
        """Have calls for the other half's branch compute nothing; returns what undoes it.

        Args:
            transformer: from latents ``[B, C, T, H, W]`` to predictions of as many frames and
                pixels, called once for each branch of a step.
            watch: step and branch of the forward that begins; None where a run has no guidance.
        """
        from diffusers.hooks import HookRegistry, ModelHook

        halves = self

        class OneBranch(ModelHook):  # type: ignore[misc]
            _is_stateful = False

            def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
                def run() -> Any:
                    return self.fn_ref.original_forward(*args, **kwargs)

                def empty() -> Tensor:
                    video: Tensor = kwargs["hidden_states"]
                    shape = (video.shape[0], module.config.out_channels, *video.shape[2:])
                    return video.new_full(shape, float("nan"))

                return halves._forward(watch(), run, empty)

        registry = HookRegistry.check_if_exists_or_initialize(transformer)
        registry.register_hook(OneBranch(), HOOK)
        return lambda: registry.remove_hook(HOOK, recurse=False)

    def computes(self, branch: str) -> bool:
        """Whether the last forward was computed here, where it was for ``branch``."""
        return not self._was_apart or branch == self._branches[self._own]

    def begin_run(self) -> None:
        """Forget the run before, and a step that was ended in its middle."""
        self._first = self._was_apart = None
        self._steps.clear()

    def _forward(
        self,
        at: tuple[int, str] | None,
        run: Callable[[], Any],
        empty: Callable[[], Tensor],
    ) -> Any:
        first, self._first = self._first, None
        before, self._was_apart = self._was_apart, at is not None
        if before is not None and before != self._was_apart:
            # guidance ends or begins again: each half has kept what the other one has not.
            for engine in self._engines:
                engine.forget()
        if at is None:
            # the two halves compute the same.
            return run()
        self._steps.add(at[0])
        again = at[1] not in self._branches
        step, branch = at[0], 0 if again else self._branches.index(at[1])
        if again or (first is not None and first.branch == branch):
            raise UnsupportedError(
                f"the pipeline called the {at[1]} branch twice in step {step}; with apart=True it "
                "must call each branch once. Hint: parallelize() without apart."
            )
        if branch != self._own:
            theirs = empty() if first is None else torch.empty_like(first.sample)
            if first is None:
                self._first = _First(step, branch, theirs)
            else:
                self._trade(first.sample, theirs)
            return (theirs,)
        self._apart = True
        try:
            out = run()
        finally:
            self._apart = False
        own: Tensor = out[0]
        if first is None:
            self._first = _First(step, branch, own)
        elif (first.sample.shape, first.sample.dtype) != (own.shape, own.dtype):
            raise UnsupportedError(
                f"a prediction has shape {tuple(own.shape)} and {own.dtype}, expected "
                f"{tuple(first.sample.shape)} and {first.sample.dtype}. "
                "Hint: parallelize() without apart."
            )
        else:
            self._trade(own, first.sample)
        return (own,)

    def _trade(self, own: Tensor, theirs: Tensor) -> None:
        """Send ``own`` to the partner, and fill ``theirs`` with what it sends."""
        own = own.contiguous()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own, self._partner),
                dist.P2POp(dist.irecv, theirs, self._partner),
            ]
        )
        for work in works:
            work.wait()

    def tell(self, numbers: Tensor) -> Tensor:
        """Tell the partner ``numbers``, and hear as many; both on the CPU. Waits."""
        own = numbers.to(device_of(None))
        theirs = torch.empty_like(own)
        self._trade(own, theirs)
        return theirs.cpu()

    # ---- plans ----

    def share_plans(self, engine: AttentionEngine) -> Callable[[], None]:
        """Have the conditional half's plans serve the other, where the method says so.

        Returns what undoes it.
        """
        planner = engine.planner
        self._engines.append(engine)

        def plan(
            method: SparseMethod,
            q: Tensor,
            k: Tensor,
            site: CallSite,
            order: TokenOrder,
            route: Route,
            v: Tensor,
        ) -> Ordered:
            if not self._apart or not _hands_on(engine, method, site):
                return planner(method, q, k, site, order, route, v)
            if self._own == 0:
                made = planner(method, q, k, site, order, route, v)
                self._give(made.plan)
                return made
            taken = self._take(method, q, route)
            return Ordered(
                order.apply(q, by_kernel=route.reorders),
                order.apply(k, by_kernel=route.reorders),
                taken,
            )

        def undo() -> None:
            engine.planner = planner

        engine.planner = plan
        return undo

    def _give(self, plan: SparsePlan) -> None:
        parts = [plan.q_tiles, plan.kv_count.unsqueeze(-1), plan.kv_bits]
        shares = torch.stack([plan.selected, plan.computed]).float()
        for x in (torch.cat(parts, -1), shares):
            dist.send(x, self._partner)

    def _take(self, method: SparseMethod, q: Tensor, route: Route) -> SparsePlan:
        (batch, heads, tokens, _), (rows, keys) = q.shape, method.tile
        per_block = max(1, route.block_rows // rows)
        blocks = tile_count(tile_count(tokens, rows), per_block)
        words = tile_count(tile_count(tokens, keys), 32)
        table = torch.empty(
            batch, heads, blocks, per_block + 1 + words, dtype=torch.int32, device=q.device
        )
        shares = torch.empty(2, batch, heads, dtype=torch.float32, device=q.device)
        for x in (table, shares):
            dist.recv(x, self._partner)
        return SparsePlan(
            q_tiles=table[..., :per_block].contiguous(),
            kv_count=table[..., per_block].contiguous(),
            kv_bits=table[..., per_block + 1 :].contiguous(),
            tile=method.tile,
            tokens=tokens,
            selected=shares[0],
            computed=shares[1],
        )

    # ---- the trace ----

    def gather(self, trace: Trace, engine: AttentionEngine) -> bool:
        """Make a run's trace that of both branches, where each half has its own.

        Every process must call it, after heads have been gathered. Calls of the other half have no
        seconds: they ran beside. Returns whether it could be done: not where the halves made other
        calls.
        """
        if not self._steps:
            return True
        trace.resolve()
        names = ("selected", "computed", "skipped")
        held = [
            (cell, [name for name in names if getattr(cell, name) is not None])
            for cell in trace.cells
            # in the others both halves computed the same.
            if cell.step in self._steps
        ]
        values = [getattr(cell, name) for cell, its in held for name in its]
        own = torch.cat([torch.zeros(1), *(value.flatten().float() for value in values)])
        sizes = torch.tensor([len(held), own.numel()])
        if not torch.equal(sizes, self.tell(sizes)):
            return False
        told = self.tell(own)[1:]
        taken = iter(torch.split(told, [value.numel() for value in values]))
        other = self._branches[1 - self._own]
        for cell, its in held:
            beside = replace(cell, branch=other, seconds=None)
            for name in its:
                setattr(beside, name, next(taken).view(getattr(cell, name).shape))
            trace.cells.append(beside)
        trace.cells.sort(key=lambda cell: (cell.step, self._branches.index(cell.branch)))
        start = trace.cells[0].step
        for cell in trace.cells:
            handed = _serves_both(engine, engine.method, start, cell.step)
            if handed and cell.branch == self._branches[1] and cell.step in self._steps:
                # as one process calls it, and counts it.
                cell.made_plan, cell.selection = False, None
                if cell.action == Action.REPLAN:
                    cell.action = Action.REUSE.value
        return True


def _hands_on(engine: AttentionEngine, method: SparseMethod, site: CallSite) -> bool:
    """Whether a plan made now serves both branches, as it does in one process."""
    cells = engine.trace.cells
    return _serves_both(engine, method, cells[0].step if cells else site.step, site.step)


def _serves_both(engine: AttentionEngine, method: Method, start: int, step: int) -> bool:
    """Whether plans of ``step`` do, in a run that began at ``start``."""
    if not isinstance(method, SparseMethod) or method.plans != "shared":
        return False
    # until the second branch has been seen a plan is kept for later steps alone.
    return step > start or engine.schedule.reuse > 1 or bool(engine.schedule.refresh)
