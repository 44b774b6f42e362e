"""A cost model of a step on several GPUs: fitted on rows of few, asked about more and longer clips.

A step is what four parts add up to: the attention kernel, the mask (with plan and order), the
exchange and the rest. On N GPUs that share heads out

- kernel, mask and rest take ``fixed + divided / N`` each, of every video its own two numbers: what
  is the same on every GPU, and what is shared;
- the exchange takes ``bytes / bandwidth + calls * latency``, the same two numbers for all videos
  of a machine. A GPU gives ``volume * (N - 1) / N^2`` of q, k, v and the output to others.

Where heads do not share out to all, the rest is a ring (``vidsparse/ring.py``): tokens change
places, queries and keys are exchanged once more to plan, and keys and values go round beside the
kernel, of which only what takes longer than the kernel is counted. A longer clip has a ``stretch``
times the tokens: kernel and mask take ``stretch^2``, the shared rest and the exchange
``stretch``. For the mask that is the most it can be: ordering tokens takes less.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vidsparse.apps.bench.gpus_rows import GpusRow
from vidsparse.errors import OptionError
from vidsparse.schedule import share_or_count

STEPS: Final = ("dense", "sparse")
"""The kinds of step."""

# of what a GPU exchanges in a call by heads (q, k, v and the output), the share of two of them.
_TWO_OF_FOUR: Final = 0.5


@dataclass(frozen=True, slots=True)
class TwoTerms:
    """``first * a + second * b`` with two numbers that are not negative."""

    first: float
    second: float

    def of(self, a: float, b: float) -> float:
        """The sum."""
        return self.first * a + self.second * b


def fit_two_terms(terms: Sequence[tuple[float, float]], values: Sequence[float]) -> TwoTerms:
    """The two numbers that come nearest to ``values``, by the squares of relative errors.

    Where the terms of all values are in one proportion, the second stands for both.
    """
    found = [
        (a / value, b / value) for (a, b), value in zip(terms, values, strict=True) if value > 0
    ]
    aa, ab, bb = (sum(one[i] * one[j] for one in found) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(one[i] for one in found) for i in (0, 1))
    tried = [TwoTerms(0.0, b / bb if bb else 0.0), TwoTerms(a / aa if aa else 0.0, 0.0)]
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        both = TwoTerms((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant)
        if min(both.first, both.second) >= 0:
            return both
    return min(tried, key=lambda each: sum((each.of(*one) - 1) ** 2 for one in found))


@dataclass(frozen=True, slots=True)
class Hosts:
    """GPUs that make one video: so many machines of so many each.

    Args:
        count: machines.
        each: GPUs of one.
    """

    count: int
    each: int

    @property
    def gpus(self) -> int:
        """How many there are."""
        return self.count * self.each

    @staticmethod
    def parse(text: str) -> Hosts:
        """``8``, or ``2x8`` for two machines of eight.

        Raises:
            OptionError: it is neither.
        """
        parts = text.split("x")
        if len(parts) > 2 or not all(re.fullmatch("[1-9][0-9]{0,3}", part) for part in parts):
            raise OptionError(f"{text!r} is no number of GPUs. Hint: 8, or 2x8 for two machines.")
        *more, each = map(int, parts)
        return Hosts(more[0] if more else 1, each)

    def __str__(self) -> str:
        return str(self.each) if self.count == 1 else f"{self.count}x{self.each}"


@dataclass(frozen=True, slots=True)
class Parts:
    """Milliseconds of a step."""

    kernel: float
    mask: float
    exchange: float
    rest: float

    @property
    def ms(self) -> float:
        """All of it."""
        return self.kernel + self.mask + self.exchange + self.rest


@dataclass(frozen=True, slots=True)
class Links:
    """What exchanges take.

    Attributes:
        ms_per_mb: milliseconds for a megabyte that a GPU gives to others.
        ms_per_call: and for every attention call.
    """

    ms_per_mb: float
    ms_per_call: float


# of a video: what its rows have in common.
Key = tuple[str, str, int, str, bool, str, bool, float, str]


def key_of(row: GpusRow) -> Key:
    """What rows of the same video on different numbers of GPUs have in common."""
    told = row.family, row.shape, row.layers, row.linear, row.compiled
    return *told, row.kind, row.balance, row.asked, row.impl


@dataclass(frozen=True, slots=True)
class VideoCost:
    """What one video takes.

    Attributes:
        row: one of its rows, for what it is.
        parts: fixed and divided milliseconds of each part but the exchange, by kind of step.
        volume: megabytes of q, k, v and the output of a step's attention calls.
    """

    row: GpusRow
    parts: Mapping[str, Mapping[str, TwoTerms]]
    volume: float


def measured_parts(row: GpusRow, kind: str, *, alone: bool) -> Parts:
    """The parts of a step of a row, on one GPU (``alone``) or on all."""
    if kind == "dense":
        step, kernel, mask = row.dense_ms, row.dense_attention_ms, 0.0
        if alone:
            step, kernel = row.one_dense_ms, row.one_dense_attention_ms
    else:
        step, kernel, mask = row.sparse_ms, row.kernel_ms, row.mask_plan_ms
        if alone:
            step, kernel, mask = row.one_sparse_ms, row.one_kernel_ms, row.one_mask_plan_ms
    # dense calls exchange the same.
    exchange = 0.0 if alone else row.exchange_ms
    return Parts(kernel, mask, exchange, max(0.0, step - kernel - mask - exchange))


@dataclass(frozen=True, slots=True)
class Predicted:
    """Steps of a video on some GPUs.

    Attributes:
        ring: how many of them keys and values travel round.
        dense: a dense step.
        sparse: a sparse step.
        run_s: seconds of denoising that they come to.
    """

    ring: int
    dense: Parts
    sparse: Parts
    run_s: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """What was fitted.

    Attributes:
        links: of the machine.
        videos: what each takes.
    """

    links: Links
    videos: Mapping[Key, VideoCost]

    def predicted(
        self, key: Key, hosts: Hosts, *, stretch: float = 1.0, between: float | None = None
    ) -> Predicted:
        """Steps of the video of ``key`` on ``hosts``.

        Args:
            key: of ``videos``.
            hosts: the GPUs.
            stretch: how many times the tokens.
            between: GB/s that a GPU gives to another machine.

        Raises:
            OptionError: GPUs of several machines exchange data, and ``between`` is None.
        """
        cost = self.videos[key]
        sharers = math.gcd(hosts.gpus, cost.row.heads)
        ring = hosts.gpus // sharers
        found = {}
        for kind in STEPS:
            shares = 1.0, 1.0 / hosts.gpus
            of = cost.parts[kind]
            kernel = of["kernel"].of(*shares) * stretch**2
            rest = of["rest"].of(shares[0], shares[1] * stretch)
            held = cost.volume * stretch / hosts.gpus
            exchange = self._by_heads(held, sharers, hosts, between, cost.row.calls)
            exchange += self._in_ring(held, ring, hosts, between, cost.row.calls, kind, kernel)
            found[kind] = Parts(kernel, of["mask"].of(*shares) * stretch**2, exchange, rest)
        first = share_or_count(cost.row.warmup, cost.row.steps, "warmup")
        run = first * found["dense"].ms + (cost.row.steps - first) * found["sparse"].ms
        return Predicted(ring, found["dense"], found["sparse"], run / 1e3)

    def _by_heads(
        self, held: float, sharers: int, hosts: Hosts, between: float | None, calls: int
    ) -> float:
        """Milliseconds of the exchange of ``held`` megabytes for heads."""
        if sharers == 1:
            return 0.0
        # neighbours share heads out: those of one machine, as far as it goes.
        near = min(sharers, math.gcd(sharers, hosts.each)) if hosts.count > 1 else sharers
        within, across = held * (near - 1) / sharers, held * (sharers - near) / sharers
        return (
            calls * self.links.ms_per_call
            + within * self.links.ms_per_mb
            + _across(across, between)
        )

    def _in_ring(
        self,
        held: float,
        ring: int,
        hosts: Hosts,
        between: float | None,
        calls: int,
        kind: str,
        kernel: float,
    ) -> float:
        """Milliseconds of what a ring exchanges beside, of which some runs beside the kernel."""
        if ring == 1:
            return 0.0

        def time(megabytes: float) -> float:
            if hosts.count > 1:
                # the slowest of a ring's links.
                return _across(megabytes, between)
            return megabytes * self.links.ms_per_mb

        round_ms = time(_TWO_OF_FOUR * held * (ring - 1))
        moved = 0.0
        if kind == "sparse":
            moved = (1 + _TWO_OF_FOUR) * held * (ring - 1) / ring
        return calls * self.links.ms_per_call + time(moved) + max(0.0, round_ms - kernel)


def _across(megabytes: float, between: float | None) -> float:
    """Milliseconds between machines at ``between`` GB/s."""
    if megabytes and between is None:
        raise OptionError(
            "the speed of the link between machines is not known. Hint: --between 50, the GB/s "
            "that each GPU can send to another machine."
        )
    return megabytes / between if between else 0.0


def fits(row: GpusRow) -> bool:
    """Whether the model can be fitted on a row: its GPUs share heads only, with equal work."""
    return row.kind in ("even", "skewed") and row.ring == 1 and (row.kind == "even" or row.balance)


def fit(rows: Iterable[GpusRow], most: int) -> CostModel:
    """Fit the model on the rows of at most ``most`` GPUs.

    Raises:
        OptionError: no row follows the model.
    """
    used = [row for row in rows if fits(row) and row.processes <= most]
    if not used:
        raise OptionError(
            f"there is no row of {most} GPUs or fewer that shares heads, to fit the model on. "
            "Hint: vidsparse bench gpus --gpus 2 --kind even."
        )
    links = fit_two_terms(
        [(row.calls, row.exchange_mb) for row in used], [row.exchange_ms for row in used]
    )
    videos: dict[Key, VideoCost] = {}
    for row in used:
        alike = [other for other in used if key_of(other) == key_of(row)]
        videos[key_of(row)] = VideoCost(
            row, {kind: _parts(alike, kind) for kind in STEPS}, _volume(alike)
        )
    return CostModel(Links(ms_per_mb=links.second, ms_per_call=links.first), videos)


def _volume(rows: Sequence[GpusRow]) -> float:
    """Megabytes of q, k, v and the output of all processes, by what one gives to the others."""
    whole = [row.exchange_mb * row.processes**2 / (row.processes - 1) for row in rows]
    return sum(whole) / len(whole)


def _parts(rows: Sequence[GpusRow], kind: str) -> dict[str, TwoTerms]:
    """Fixed and divided milliseconds of each part but the exchange."""
    measured = [(1, measured_parts(row, kind, alone=True)) for row in rows]
    measured += [(row.processes, measured_parts(row, kind, alone=False)) for row in rows]
    shares = [(1.0, 1 / count) for count, _ in measured]
    return {
        name: fit_two_terms(shares, [getattr(parts, name) for _, parts in measured])
        for name in ("kernel", "mask", "rest")
    }
