"""What an engine keeps of a call for the steps and branches after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from vidsparse.grid import TokenGrid
from vidsparse.plan import SparsePlan
from vidsparse.planning import share_with_means
from vidsparse.remainder import Remainder, likeness, weights

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


@dataclass(frozen=True, slots=True)
class Lacking:
    """What a plan lacked of the dense output in ``step``, and the step that had made the plan.

    ``earlier`` is what the refresh before lacked, where the method follows a ``slope``.
    """

    step: int
    planned: int
    remainder: Remainder
    earlier: Lacking | None = None

    def before(self, step: int) -> Lacking | None:
        """What a refresh in ``step`` keeps of refreshes before it: one is enough for a slope."""
        # a step that runs again replaces what it kept.
        last = self if self.step < step else self.earlier
        return None if last is None else replace(last, earlier=None)

    def counted(
        self, step: int, steps: int, fading: float, slope: float
    ) -> Iterator[tuple[Remainder, float]]:
        """What is to be added in ``step`` of ``steps``, and how many times (``weights``)."""
        if self.earlier is None:
            yield self.remainder, likeness(step - self.step, steps, fading)
            return
        gap = self.step - self.earlier.step
        last, before = weights(step - self.step, gap, steps, fading, slope)
        yield self.remainder, last
        yield self.earlier.remainder, before
