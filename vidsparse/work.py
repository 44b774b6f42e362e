"""How much of a run's attention was computed, and where: the number that speed follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

SELECTION_UNKNOWN: Final = "not measured for this method, tile, length and device"
NOTHING_SELECTED: Final = "nothing to select"

PARTS: Final = ("dense_steps", "dense_layers", "dense_fallback", "refresh", "sparse")
"""What the shares of a run's work are split into."""


@dataclass(frozen=True, slots=True)
class SelectionCost:
    """What choosing the pairs of one call costs.

    Args:
        share: time of mask and plan over the time of dense attention.
        source: what it was measured on, and the file of rows it stands in.
    """

    share: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The attention work of one run, as shares of all its query-key pairs.

    The pairs are those of every video self-attention call of the run: all denoising steps, all
    layers, both guidance branches, calls that a step cache left out among them. ``dense_steps``,
    ``dense_layers``, ``dense_fallback``, ``refresh`` and ``sparse`` add up to ``total``.

    Attributes:
        total: pairs computed in the whole run. A pair counts half where a gate skipped its product
            with V.
        dense_steps: pairs of the steps that had no sparse call.
        dense_layers: pairs of the layers that stayed dense in the other steps.
        dense_fallback: pairs of calls that should have been sparse and could not be.
        refresh: pairs of calls that computed all and, beside them, those of a plan; where branches
            of guidance are in one batch, all of one branch may be all.
        sparse: pairs computed in the sparse calls.
        left_out: pairs of calls that were not made, because a step cache left them out: no part of
            ``total``. Versions that did not count them have shares of the calls that were made, and
            0 here.
        selection: what choosing the pairs cost beside computing them (mask and plan; with SALE its
            4-bit estimates, with XAttention its sums), as a share of the run's dense attention.
            None where that was not measured for this method, tile, length and device.
        selection_source: where ``selection`` was measured, or why it is None.
    """

    total: float
    dense_steps: float = 0.0
    dense_layers: float = 0.0
    dense_fallback: float = 0.0
    refresh: float = 0.0
    sparse: float = 0.0
    left_out: float = 0.0
    selection: float | None = None
    selection_source: str = SELECTION_UNKNOWN

    @classmethod
    def all_dense(cls, left_out: float = 0.0) -> Self:
        """The work of a run that chose no pairs and computed all but those ``left_out``."""
        made = 1.0 - left_out
        return cls(
            total=made,
            dense_steps=made,
            left_out=left_out,
            selection=0.0,
            selection_source=NOTHING_SELECTED,
        )

    @classmethod
    def of_schedule(cls, *, dense_steps: float, dense_layers: float, computed: float) -> Self:
        """The work of a run whose calls are all equally large.

        Args:
            dense_steps: share of the steps that are dense.
            dense_layers: share of the layers that are dense in the other steps.
            computed: mean share of pairs computed in the sparse calls.
        """
        layers = (1 - dense_steps) * dense_layers
        sparse = (1 - dense_steps) * (1 - dense_layers) * computed
        return cls(
            total=dense_steps + layers + sparse,
            dense_steps=dense_steps,
            dense_layers=layers,
            sparse=sparse,
        )

    @classmethod
    def mean(cls, works: Sequence[Work]) -> Self | None:
        """The mean over several runs, None for no run.

        ``selection`` is None where it is unknown for any of them.
        """
        if not works:
            return None
        known = [one for one in works if one.selection is not None]
        sources = known if len(known) == len(works) else [w for w in works if w.selection is None]

        def average(values: Sequence[float]) -> float:
            return math.fsum(values) / len(values)

        shares = ("total", *PARTS, "left_out")
        return cls(
            **{name: average([getattr(one, name) for one in works]) for name in shares},
            selection=average([one.selection or 0.0 for one in works])
            if len(known) == len(works)
            else None,
            selection_source="; ".join(dict.fromkeys(one.selection_source for one in sources)),
        )

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        """What ``to_json`` wrote, or None where a record of an earlier version has nothing.

        Parts that a version did not know are zero, and parts that this one does not know are left
        out of the split; ``total`` holds them all.
        """
        if not isinstance(value, Mapping) or "total" not in value:
            return None
        known = {field.name for field in fields(cls)}
        return cls(**{name: item for name, item in value.items() if name in known})

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @property
    def split(self) -> str:
        """Where the pairs were computed, as ``25.0% dense steps, 18.2% sparse calls``.

        What a step cache left out is said behind that.
        """
        parts = {
            "dense steps": self.dense_steps,
            "dense layers": self.dense_layers,
            "calls that fell back to dense": self.dense_fallback,
            "refreshes": self.refresh,
            "sparse calls": self.sparse,
        }
        told = [f"{share:.1%} {name}" for name, share in parts.items() if share]
        if self.left_out:
            told.append(f"and {self.left_out:.1%} left out by the step cache")
        return ", ".join(told)

    @property
    def selection_text(self) -> str:
        """What choosing cost and how that is known, in words."""
        if self.selection is None:
            return f"selection unknown: {self.selection_source}"
        return f"selection {self.selection:.1%} of dense attention ({self.selection_source})"

    def __str__(self) -> str:
        return f"{self.total:.1%} of all pairs computed ({self.split}); {self.selection_text}"
