"""When attention runs dense, when it makes a plan or a remainder, and when it reuses the last."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import Final, Self

from vidsparse.errors import OptionError


class Action(StrEnum):
    """What one attention call does."""

    DENSE = "dense"
    REPLAN = "replan"
    REUSE = "reuse"
    REFRESH = "refresh"


def share_or_count(value: int | float, total: int, name: str) -> int:
    """Read an amount of steps or layers: a decimal is a share rounded up, an integer a count.

    ``0.24`` of 50 steps is 12, ``1.0`` is all of them, ``1`` is one.

    Raises:
        OptionError: a negative or infinite value, or a share above 1.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise OptionError(f"{name} must be a share (0.24) or a count (12), got {value!r}")
    if isinstance(value, float):
        if value > 1:
            raise OptionError(
                f"{name} as a share must lie between 0.0 and 1.0, got {value}. "
                f"Hint: a count is written without a point: {int(value)}."
            )
        # 0.07 * 100 is 7.000000000000001: without the slack a share would round one step too high.
        return min(total, math.ceil(value * total - 1e-9))
    return min(total, value)


def check_steps(name: str, value: object) -> None:
    """Raise an ``OptionError`` unless ``value`` is a number of steps from 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} must be a whole number of steps from 1, got {value!r}")


OF_METHOD: Final = ("reach", "unconditional_every")
"""What of a schedule is an option of the method."""

_AMOUNTS: Final = (
    "dense_steps",
    "dense_last_steps",
    "dense_layers",
    "dense_last_layers",
    "refresh",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Which (step, layer) calls stay dense and how long a plan lives.

    The first steps fix the layout of a video and are the most sensitive; FG-Attn (section 6) keeps
    24 % of the steps dense on Wan and LTX and 10 % on HunyuanVideo.

    Args:
        dense_steps: first denoising steps kept dense (decimal: share rounded up; integer: count).
        dense_last_steps: last steps kept dense.
        dense_layers: first transformer layers kept dense in every step.
        dense_last_layers: last transformer layers kept dense in every step.
        reuse: steps a plan serves before it is made anew; 1 plans in every step. Steps that a step
            cache leaves out do not count. With ``refresh`` a plan serves as long as what was kept
            with it, if that is longer.
        refresh: steps at which a sparse layer computes all pairs as well as those of its plan, and
            keeps the difference; the steps up to the next refresh add it to what they compute
            (decimal: share rounded up; integer: count; 0: nothing is kept). The first refresh is
            the last dense step, if there is one.
        reach: how many steps after a refresh add what it kept, if the next refresh is further
            away. The steps beyond make plans as if there had been none. None: all up to the next.
            It is an option of the method, ``SparseMethod.reach``.
        unconditional_every: of the first dense steps and the refreshes, counted from the first
            refresh both ways, the unconditional branch of guidance computes all pairs only in every
            one of this number, and takes what the conditional one's plan lacked in the others.
            1: in all of them, as where branches run on different processes. It is an option of the
            method, too.

    Raises:
        OptionError: a value is negative, a share above 1, or ``reuse``, ``reach`` or
            ``unconditional_every`` below 1.
    """

    dense_steps: int | float = 0.24
    dense_last_steps: int | float = 0
    dense_layers: int | float = 0
    dense_last_layers: int | float = 0
    reuse: int = 1
    refresh: int | float = 0
    reach: int | None = None
    unconditional_every: int = 1

    def __post_init__(self) -> None:
        for name in _AMOUNTS:
            share_or_count(getattr(self, name), 1, name)
        check_steps("reuse", self.reuse)
        check_steps("unconditional_every", self.unconditional_every)
        if self.reach is not None:
            check_steps("reach", self.reach)

    @classmethod
    def of(cls, settings: object, *, reach: int | None = None) -> Self:
        """The schedule that ``settings`` have, such as those of a request.

        What is None there is as usual.
        """
        names = [one.name for one in fields(cls) if one.name not in OF_METHOD]
        asked = {name: getattr(settings, name) for name in names}
        given = {name: value for name, value in asked.items() if value is not None}
        return cls(**given, reach=reach)

    def sparse_window(self, steps: int) -> range:
        """The steps that may be sparse, of ``steps`` in all."""
        first = share_or_count(self.dense_steps, steps, "dense_steps")
        last = share_or_count(self.dense_last_steps, steps, "dense_last_steps")
        return range(first, steps - last)

    def refresh_steps(self, steps: int) -> tuple[int, ...]:
        """The steps with a refresh, of ``steps`` in all, from the first to the last.

        Attention changes fastest in the first steps, where a video takes shape. So the distances
        between refreshes grow: the last is about twice the first.
        """
        wanted = share_or_count(self.refresh, steps, "refresh")
        return _refresh_steps(self.sparse_window(steps), wanted)

    def refresh_for(self, step: int, steps: int) -> int | None:
        """The refresh that ``step`` is, or that keeps what ``step`` adds, if no step is left out.

        None if there is none, or none that reaches so far, and for a dense step.
        """
        last = self._last_refresh(step, steps)
        reached = last is not None and (self.reach is None or step - last <= self.reach)
        return last if reached else None

    def _last_refresh(self, step: int, steps: int) -> int | None:
        # most methods have none, and every attention call asks.
        if not self.refresh or step not in self.sparse_window(steps):
            return None
        return max((one for one in self.refresh_steps(steps) if one <= step), default=None)

    def lends(self, step: int, steps: int) -> bool:
        """Whether the conditional branch computes all pairs in ``step`` for the other one, too.

        A refresh that comes late is the one that is due.
        """
        if self.unconditional_every == 1 or not (refreshes := self.refresh_steps(steps)):
            return False
        if step <= refreshes[0]:
            return (refreshes[0] - step) % self.unconditional_every != 0
        due = self.refresh_for(step, steps)
        return due is not None and refreshes.index(due) % self.unconditional_every != 0

    def sparse_layers(self, layers: int) -> range:
        """The layers that may be sparse, of ``layers`` in all."""
        first = share_or_count(self.dense_layers, layers, "dense_layers")
        last = share_or_count(self.dense_last_layers, layers, "dense_last_layers")
        return range(first, layers - last)

    def plan_step(self, step: int, steps: int) -> int:
        """The step whose plan serves ``step``, if no step is left out.

        For a dense step it is the step itself.
        """
        window = self.sparse_window(steps)
        if step not in window:
            return step
        last = self._last_refresh(step, steps)
        if last is None:
            return step - (step - window.start) % self.reuse
        if self.reach is None or step - last <= self.reach:
            return last
        anew = last + max(self.reach + 1, self.reuse)
        return last if step < anew else step - (step - anew) % self.reuse

    def decide(self, step: int, steps: int, layer: int, layers: int) -> Action:
        """What the call of ``layer`` in ``step`` does, in a run without a step cache.

        ``steps`` and ``layers`` are how many there are in all.
        """
        window = self.sparse_window(steps)
        if layer not in self.sparse_layers(layers):
            return Action.DENSE
        refreshes = self.refresh_steps(steps)
        if step in refreshes:
            # what is kept for no step after it is not worth a second computation.
            used = step + 1 in window and step + 1 not in refreshes
            return Action.REFRESH if used else Action.DENSE
        if step not in window:
            return Action.DENSE
        return Action.REPLAN if self.plan_step(step, steps) == step else Action.REUSE


# every attention call asks for them. by numbers, since a schedule with a count of 1 equals one with
# a share of 1.0, which is all steps.
@lru_cache(maxsize=256)
def _refresh_steps(window: range, wanted: int) -> tuple[int, ...]:
    if not window or not wanted:
        return ()
    first = max(0, window.start - 1)
    wanted = min(wanted, window.stop - first)
    found: list[int] = []
    for number in range(wanted):
        part = number / wanted
        place = first + (2 * part + part**2) / 3 * (window.stop - first)
        # where the first distances are less than a step, refreshes are neighbours.
        found.append(max(math.floor(place + 0.5), found[-1] + 1 if found else first))
    return tuple(found)
