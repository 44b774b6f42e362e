"""Setting a method's number so that its videos have a given density."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# a bracket is cut at least this far from its ends: a density that hardly moves along most of the
# bracket would otherwise take a trial for every small step.
MARGIN: Final = 0.1


def find_density(
    measure: Callable[[float], float],
    goal: float,
    *,
    start: float,
    tolerance: float,
    trials: int,
) -> None:
    """Call ``measure`` at places in [0, 1] until one of its densities is ``goal``.

    Densities rise with the place. The first place is a guess, which may be far off: calls of a
    dense run are not those of a sparse one. From there each measured density narrows the bracket
    that holds the goal, which is cut by false position, and in halves where an end is not measured
    yet or the same end moved twice.

    Args:
        measure: the density at a place; its caller keeps what it finds.
        goal: the density to reach.
        start: the first place.
        tolerance: how near a density must come to the goal.
        trials: calls of ``measure`` at most.
    """
    low: tuple[float, float | None] = (0.0, None)
    high: tuple[float, float | None] = (1.0, None)
    place = start
    rose: bool | None = None
    for _ in range(trials):
        density = measure(place)
        if abs(density - goal) <= tolerance:
            return
        again = rose == (density < goal)
        rose = density < goal
        if rose:
            low = (place, density)
        else:
            high = (place, density)
        share = 0.5
        if not again and low[1] is not None and high[1] is not None and high[1] > low[1]:
            share = (goal - low[1]) / (high[1] - low[1])
        share = min(max(share, MARGIN), 1 - MARGIN)
        place = low[0] + share * (high[0] - low[0])
