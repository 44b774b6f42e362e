"""What an engine keeps of a call for the steps and branches after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.plan import SparsePlan
from vidsparse.planning import share_with_means
from vidsparse.remainder import Remainder, likeness, weights
from vidsparse.site import CallSite

_LENDER: Final = "conditional"

_SMALL: Final = 8 << 20
"""Bytes of a plan's lists up to which they are kept with it. Those of long videos take a quarter of
a gigabyte a layer, and making them anew takes nothing beside the call; those of short ones take
little, and every launch counts."""

# layer, branch (none where branches share a plan), and all else that a plan depends on: window,
# samples, grid, batch, heads, device.
PlanKey = tuple[
    int,
    str | None,
    int,
    tuple[int, ...],
    TokenGrid,
    int,
    int,
    tuple[int, ...] | None,
    torch.device,
]


def plan_key(q: Tensor, site: CallSite, *, shared: bool) -> PlanKey:
    """What the plan of a call with queries ``q`` ``[B, H, S, D]`` is kept under.

    ``shared`` says whether the branches of guidance have one.
    """
    branch, grid = None if shared else site.branch, site.grid
    if shared and (grid.text_first or grid.text > grid.lead):
        # branches may differ in text. What of it leads is frames of the past, where there are any:
        # the plan for a video behind others is another.
        grid = replace(grid, text=grid.lead, text_first=False)
    heads = q.shape[1], site.heads
    return site.layer, branch, site.window, site.samples, grid, q.shape[0], *heads, q.device


@dataclass(frozen=True, slots=True)
class Lists:
    """What a call by a plan is given of it: the same for every call that it serves.

    Args:
        kv_index: its lists.
        counts: the tokens that each block leaves out, where means stand for them.
        computed: its share of pairs, with means.
    """

    kv_index: Tensor
    counts: Tensor | None
    computed: Tensor

    @classmethod
    def of(cls, plan: SparsePlan, size: int | None, *, by_kernel: bool) -> Lists:
        """Those of ``plan`` with means of ``size`` tokens, or without."""
        counts = None if size is None else plan.left_out(size, by_kernel=by_kernel)
        kv_index = plan.list_keys(by_kernel=by_kernel)
        return cls(kv_index, counts, share_with_means(plan, size))

    @property
    def small(self) -> bool:
        """Whether they may be kept."""
        counts = 0 if self.counts is None else self.counts.nbytes
        return self.kv_index.nbytes + counts <= _SMALL


@dataclass(slots=True)
class KeptPlan:
    """A plan, the step and branch that made it, the last step it served, how many it has served.

    Of branches whose text differs in length each has it for its own, and its own lists: both are by
    the tokens of the whole sequence. In a ring the plan is of a process's own query ``tiles``.
    """

    plan: SparsePlan
    made: int
    by: str
    last: int
    tiles: range | None = None
    served: int = 1
    fitted: dict[int, SparsePlan] = field(default_factory=dict)
    lists: dict[int, Lists] = field(default_factory=dict)

    def serves(self, step: int, branch: str, reuse: int) -> bool:
        """Whether it may serve ``step``: it ages by steps that are run, not by those left out.

        In its own step it serves the branches that did not make it.
        """
        if step == self.made:
            return branch != self.by
        return step > self.made and (step == self.last or self.served < reuse)

    def use(self, step: int, video: int, tokens: int, text_rows: str) -> SparsePlan:
        """Take it for ``step``, for a sequence of so many tokens, of which ``video`` come first.

        ``text_rows`` is the method's that made it.
        """
        self.served += step != self.last
        self.last = step
        if tokens == self.plan.tokens:
            return self.plan
        if tokens not in self.fitted:
            self.fitted[tokens] = self.plan.with_text(
                video, tokens, self.tiles, text_rows=text_rows
            )
        return self.fitted[tokens]

    def holds(self, plan: SparsePlan) -> bool:
        """Whether ``plan`` is this one, as it is kept."""
        return plan is self.plan or plan is self.fitted.get(plan.tokens)


def lists_of(
    plan: SparsePlan, kept: KeptPlan | None, size: int | None, *, by_kernel: bool
) -> Lists:
    """What a call by ``plan`` is given of it: made once if that is small and both are ``kept``."""
    if kept is None or not kept.holds(plan):
        return Lists.of(plan, size, by_kernel=by_kernel)
    if plan.tokens in kept.lists:
        return kept.lists[plan.tokens]
    lists = Lists.of(plan, size, by_kernel=by_kernel)
    if lists.small:
        kept.lists[plan.tokens] = lists
    return lists


@dataclass(frozen=True, slots=True)
class Lacking:
    """What a plan lacked of the dense output in ``step``; the step and branch that made the plan.

    ``earlier`` is what the refresh before lacked, where the method follows a ``slope``.
    """

    step: int
    planned: int
    by: str
    remainder: Remainder
    earlier: Lacking | None = None

    @property
    def rows(self) -> tuple[int, int]:
        """Samples and tokens of the call that kept it."""
        values = self.remainder.values
        return values.shape[0], values.shape[2]

    def serves(self, kept: KeptPlan | None, due: int, tokens: int) -> bool:
        """Whether it is what ``kept`` lacked in the refresh that is ``due`` or in one after it.

        A step cache may have left that out. A text that changes in length is of other rows, to
        which a plan alone is fitted.
        """
        of_plan = kept is not None and kept.made == self.planned
        return of_plan and self.step >= due and self.rows[1] == tokens

    def before(self, step: int) -> Lacking | None:
        """What a refresh in ``step`` keeps of refreshes before it: one is enough for a slope."""
        # a step that runs again replaces what it kept.
        last = self if self.step < step else self.earlier
        return None if last is None else replace(last, earlier=None)

    def counted(
        self, step: int, steps: int, fading: float, slope: float
    ) -> Iterator[tuple[Remainder, float]]:
        """What is to be added in ``step`` of ``steps``, and how many times (``weights``)."""
        # of two branches' plans the difference would be none in time.
        if self.earlier is None or self.earlier.by != self.by:
            yield self.remainder, likeness(step - self.step, steps, fading)
            return
        gap = self.step - self.earlier.step
        last, before = weights(step - self.step, gap, steps, fading, slope)
        yield self.remainder, last
        if before:
            yield self.earlier.remainder, before


class AllLacking(dict[tuple[str, PlanKey], Lacking]):
    """What the plans of a run lack, by guidance branch and plan."""

    def count_on_gpu(self, beside: Lacking | None = None) -> int:
        """How many remainders are in a GPU's memory, with what is kept ``beside`` them."""
        all_of_them = (each for one in self.values() for each in (one, one.earlier))
        kept = [each for each in (*all_of_them, beside) if each is not None]
        # one that is borrowed stands here twice.
        return len({id(each.remainder) for each in kept if each.remainder.on_gpu})

    def go_back(self, step: int) -> None:
        """Forget what was kept in ``step`` and after it."""
        for at in [at for at, one in self.items() if one.step >= step]:
            del self[at]

    def end_forward(self, site: CallSite, lends: Callable[[PlanKey], bool]) -> None:
        """Forget what a branch has after its forward at ``site``.

        Where the conditional one ``lends`` what it kept in this step, that waits until the other
        branch has been through. Of branches in one batch all have been.
        """
        lender, together = borrows_from(site.branch), site.stacked > 1
        for (branch, key), one in [*self.items()]:
            now, own = one.step == site.step, branch == site.branch
            waits = now and own and lender is None and not together and lends(key)
            done = own or (together and borrows_from(branch) == site.branch)
            if key[2] == site.window and not waits and (done or (now and branch == lender)):
                del self[branch, key]

    def retire(self, site: CallSite, key: PlanKey, *, slope: bool) -> Lacking | None:
        """Forget what the last refresh kept; with a ``slope``, what the next one keeps of it."""
        last = self.pop((site.branch, key), None)
        return last.before(site.step) if last and slope else None

    def borrow(
        self, site: CallSite, kept: KeptPlan, key: PlanKey, shape: torch.Size, *, slope: bool
    ) -> bool:
        """Have a branch take what its plan lacked in the conditional one in this very step.

        Args:
            site: of the branch that takes it.
            kept: the plan.
            key: of both.
            shape: of its queries, ``[B, H, S, D]``.
            slope: whether what the branch had before is kept as ``earlier``.

        Returns:
            False where the conditional branch has kept nothing for such a call in this step.
        """
        lender = borrows_from(site.branch)
        lent = None if lender is None else self.get((lender, key))
        wanted = site.step, kept.made, (shape[0], shape[2])
        if lent is None or (lent.step, lent.planned, lent.rows) != wanted:
            return False
        last = self.get((site.branch, key)) if slope else None
        self[site.branch, key] = replace(lent, earlier=last and last.before(site.step))
        return True


class Lending:
    """Which calls of the conditional branch are followed by one that may borrow from it."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, PlanKey], int] = {}
        self._came: dict[tuple[str, PlanKey], tuple[int, torch.Size]] = {}
        self._followed: set[tuple[str, PlanKey]] = set()

    def note(self, site: CallSite, key: PlanKey, shape: torch.Size) -> None:
        """Take in a call with queries of that ``shape``, whatever it then does."""
        lender, call = borrows_from(site.branch), (site.step, shape)
        if lender is None:
            self._first.setdefault((site.branch, key), site.step)
            self._came[site.branch, key] = call
        elif self._came.get((lender, key)) == call:
            self._followed.add((lender, key))

    def expects(self, site: CallSite, key: PlanKey) -> bool:
        """Whether what the conditional branch keeps now will be borrowed, or may be by this one.

        What earlier steps showed counts, and what the pipeline says in the first alone.
        """
        if site.stacked > 1:
            return True
        lender = borrows_from(site.branch)
        if lender is None and not site.branch.startswith(_LENDER):
            return False
        at = lender or site.branch, key
        first = self._first.get(at, site.step) == site.step
        return site.guided if first else at in self._followed


def borrows_from(branch: str) -> str | None:
    """The branch that ``branch`` may borrow from; those of a later window have a number behind."""
    start, found, number = branch.partition(_LENDER)
    return found + number if start == "un" else None
