"""Which steps of a run at a speed there are, and which of them are measured."""

from __future__ import annotations

from dataclasses import dataclass

from vidsparse.schedule import Schedule, share_or_count


@dataclass(frozen=True, slots=True)
class Asked:
    """What the sparse steps of a run are to be.

    Args:
        method: that makes their plans; ``dense`` where there are none.
        refresh: steps that compute everything and keep what their plan lacks, as ``Schedule``.
        computed: density of the plans that the kernel runs, means not counted.
        warmup: first steps that stay dense, as ``Schedule``.
        cache: their step cache, with its threshold where that is not its own.
    """

    method: str
    refresh: int | float
    computed: float
    warmup: int | float
    cache: str

    def steps(self, steps: int) -> tuple[int, int]:
        """Steps of so many that stay dense, and refreshes, of which the first is one of those."""
        warmup = share_or_count(self.warmup, steps, "warmup")
        return warmup, share_or_count(self.refresh, steps, "refresh")


def sparse_at(schedule: Schedule, steps: int, one_branch: bool) -> int | None:
    """A step that goes by a plan: with refreshes one that comes right after one of them.

    Where steps of ``one_branch`` are measured, too, another such step comes after it. None if there
    is none.
    """
    window, refreshes = schedule.sparse_window(steps), schedule.refresh_steps(steps)
    sparse = [at for at in window if at not in refreshes]
    fit = [
        at
        for at in sparse
        if (at - 1 in refreshes if refreshes else at > window.start)
        and (not one_branch or at + 1 in sparse)
    ]
    return (fit[-1] if refreshes else fit[0]) if fit else None
