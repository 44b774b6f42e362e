"""How much faster the sparse side of a comparison was, where its times can tell.

A ratio of two single runs says little: the next pair gives another one, most of all on a machine
that others use too. So there is a ratio only over several pairs, each of a dense and a sparse run
that were made one after the other by one process, and it comes with its range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

SHORT: Final = 3.0
"""Seconds: a run below this is too short to time, since set-up and noise are a part of it."""

SHORT_ON_GPU: Final = 0.5
"""The same on a GPU, where the like has always run before: untimed steps of ``compare``, a page's
warm-up and first video. Runs of one to two seconds differed there by 2 % (dense) and by 8 to 12 %
(sparse), which a ratio's range says."""

FEWEST: Final = 2
"""Pairs that a range takes."""


def shortest_of(record: Mapping[str, Any]) -> float:
    """Seconds below which a run is too short to time on the device that its ``record`` names."""
    device = record.get("device")
    on_gpu = isinstance(device, Mapping) and device.get("kind") == "cuda"
    return SHORT_ON_GPU if on_gpu else SHORT


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedPair:
    """One dense and one sparse run of a request.

    Args:
        dense: seconds of the dense run, None where unknown.
        sparse: seconds of the sparse run, None where unknown.
        kept: when the dense run was made, if that was for an earlier job, as a reader reads it;
            None where it ran beside the sparse one.
        machine: what both ran on; pairs of different ones have no ratio in common.
        shortest: seconds below which a run of it is too short to time.
    """

    dense: float | None
    sparse: float | None
    kept: str | None = None
    machine: str = ""
    shortest: float = SHORT


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Dense seconds over sparse seconds, with the range over pairs, or why there is none.

    Args:
        ratio: all dense seconds over all sparse seconds; None where the times cannot tell.
        least: the smallest ratio of a pair; None as ``ratio``.
        most: the largest ratio of a pair; None as ``ratio``.
        pairs: how many pairs were timed in turns.
        why: what keeps the times from telling, None where there is a ratio.
    """

    ratio: float | None
    least: float | None
    most: float | None
    pairs: int
    why: str | None

    @classmethod
    def of(cls, pairs: Sequence[TimedPair]) -> Speedup:
        """What ``pairs`` tell."""
        ran = [each for each in pairs if each.kept is None and each.dense and each.sparse]
        why = None
        if kept := next((each.kept for each in pairs if each.kept is not None), None):
            why = f"dense kept from {kept}"
        elif not ran:
            why = "not timed"
        elif len({each.machine for each in ran}) > 1:
            why = "measured on different machines"
        elif any(min(each.dense or 0, each.sparse or 0) < each.shortest for each in ran):
            why = "too short to time"
        elif len(ran) < FEWEST:
            why = "timed once"
        if why is not None:
            return cls(ratio=None, least=None, most=None, pairs=len(ran), why=why)
        dense = [each.dense for each in ran if each.dense]
        sparse = [each.sparse for each in ran if each.sparse]
        ratios = [one / other for one, other in zip(dense, sparse, strict=True)]
        return cls(
            ratio=sum(dense) / sum(sparse),
            least=min(ratios),
            most=max(ratios),
            pairs=len(ran),
            why=None,
        )

    @property
    def range(self) -> str:
        """The ratios' range and how many pairs were timed; empty without a ratio."""
        if self.ratio is None:
            return ""
        return f"{self.least:.2f} to {self.most:.2f} over {self.pairs} pairs"

    def __str__(self) -> str:
        return str(self.why) if self.ratio is None else f"{self.ratio:.2f}x ({self.range})"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "ratio": self.ratio,
            "least": self.least,
            "most": self.most,
            "pairs": self.pairs,
            "why": self.why,
        }
