"""What ``vidsparse bench gpus`` measures: how processes share a video, and how heads differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vidsparse.apps.bench.gpus_rows import GpusRow
from vidsparse.apps.bench.model_settings import Variant

if TYPE_CHECKING:
    from vidsparse.apps.bench.model_settings import Setting

KINDS: Final = ("even", "ring", "skewed", "apart")
"""Heads of one density shared out as far as they go; the same in a ring; heads that differ; heads
of one density with each guidance branch on one half of the processes."""

SKEWED: Final = (0.05, 0.6)
"""Densities of the first head and the last, which rise in between: the worst order there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How processes share a video.

    Args:
        kind: of ``KINDS``.
        balance: whether heads are dealt to processes by their work.
        ring: how many processes keys and values travel round; None for as few as the heads need.
    """

    kind: str
    balance: bool = True
    ring: int | None = None

    @property
    def apart(self) -> bool:
        """Whether each half of the processes computes one guidance branch."""
        return self.kind == "apart"

    @property
    def heads(self) -> str:
        """How dense they are: ``even`` or ``skewed``."""
        return "skewed" if self.kind == "skewed" else "even"

    def densities(self, computed: float, heads: int) -> tuple[float, ...]:
        """Of each of ``heads``; ``computed`` is that of even ones."""
        if self.heads == "even":
            return (computed,) * heads
        low, high = SKEWED
        return tuple(low + (high - low) * head / max(1, heads - 1) for head in range(heads))

    def __str__(self) -> str:
        if self.kind == "ring":
            return f"ring of {self.ring}"
        if self.apart:
            return "guidance branches apart"
        return f"{self.kind} heads " + ("dealt by work" if self.balance else "in order")

    def covers(
        self, row: GpusRow, setting: Setting, linear: str, compiled: bool, count: int
    ) -> bool:
        """Whether ``row`` is what ``count`` processes would measure of ``setting`` in this way."""
        variant = setting.sparse[0]
        run = (row.warmup, row.steps, row.processes)
        asked = sum(self.densities(setting.computed, row.heads)) / row.heads
        own = Variant(setting.model.tile, None).name
        return (
            (row.family, row.shape) == (setting.family, setting.shape)
            and (row.linear, row.compiled) == (linear, compiled)
            and run == (setting.warmup, setting.steps, count)
            and (row.kind, row.balance) == (self.kind, self.balance)
            and self.ring in (None, row.ring)
            and row.layers == (setting.layers or setting.model.full_layers())
            and abs(row.asked - asked) < 1e-3
            and (row.tile or own) == variant.name
            and row.impl.partition(" ")[2] == (variant.quantize or "")
            and setting.implementation in ("auto", row.impl.partition(" ")[0])
        )


def sharings_of(kinds: Sequence[str], ring: int | None, count: int, forwards: int) -> list[Sharing]:
    """The ways in which ``count`` processes are to share a video.

    Args:
        kinds: of ``KINDS``. ``apart`` is for an even number of processes and a model with two
            forwards a step; it is left out of others.
        ring: how many of them keys travel round in kind ``ring``; all where None.
        count: processes.
        forwards: transformer calls of a step.
    """
    found = []
    for kind in KINDS:
        if kind not in kinds or (kind == "apart" and (forwards != 2 or count % 2)):
            continue
        if kind == "skewed":
            found += [Sharing(kind=kind, balance=balance) for balance in (True, False)]
        else:
            found.append(Sharing(kind=kind, ring=(ring or count) if kind == "ring" else None))
    return found
