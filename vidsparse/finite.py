"""A watch on outputs for NaN and infinity that a GPU is never waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from vidsparse.site import CallSite

Item = TypeVar("Item")

PAUSE: Final = 0.05
"""Seconds between two looks at a GPU: one takes as long as several launches, and steps of small
videos take a few milliseconds."""

_SMALL: Final = 8 << 20
"""Bytes of an output up to which it is held until the next look, when all of one shape take one
reduction. Larger ones are reduced at once: beside them a launch is nothing, and their memory is
not."""


@dataclass(frozen=True, slots=True)
class NonFiniteCall:
    """An attention call whose output holds NaN or infinity.

    Args:
        site: where it was made; layers and steps are counted from 0.
        how: what ran it.
    """

    site: CallSite
    how: str


@dataclass(frozen=True, slots=True)
class _Look(Generic[Item]):
    """Items, and whether the output of each was finite, known once the event has come.

    Flags are in an ``order`` of the items' places. With several processes one more says whether all
    outputs of all processes were.
    """

    items: list[Item]
    order: list[int]
    finite: Tensor
    event: torch.cuda.Event | None


class FiniteGuard(Generic[Item]):
    """Finds the first output that holds NaN or infinity, between steps.

    A look takes a few launches for all outputs since the one before, and its answer is copied to
    the host behind the work that is queued there. The next look reads it, when it has come.

    Args:
        pause: seconds that looks at a GPU are apart at least; steps between them wait for the next.
        agree: whether a flag (a bool of no dimensions) holds in all processes, on any device; for
            runs of several, which then find something at the same look. All of them must look
            equally often, so that they have no pause.
    """

    def __init__(
        self, *, pause: float = 0.0, agree: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._pause = pause
        self._agree = agree
        self._items: list[Item] = []
        self._held: list[Tensor] = []
        self._looks: list[_Look[Item]] = []
        self._looked = 0.0

    def watch(self, out: Tensor, item: Item, *, hold: bool = False) -> None:
        """Take in an output of any shape, and what it is the output of.

        ``hold`` keeps the tensor itself until the next look, whatever its size: it counts as it is
        then. Without it the tensor must not be changed.
        """
        if not out.numel():
            return
        self._items.append(item)
        self._held.append(out if hold or out.nbytes <= _SMALL else _peaks([out]))

    def look(self, *, last: bool) -> Item | None:
        """Look at what was taken in; the first item that an earlier look found not to be finite.

        On a CPU, and with ``last``, what this look itself finds is told too. Where only another
        process has found something, the first item of the look is told.
        """
        on_gpu = any(out.is_cuda for out in self._held)
        now = time.monotonic()
        if on_gpu and not last and now - self._looked < self._pause:
            return None
        self._looked = now
        if self._held:
            self._looks.append(_Look(self._items, *_on_host(self._held, self._agree)))
            self._items, self._held = [], []
        ready = [each for each in self._looks if last or each.event is None]
        ready = ready or self._looks[:-1]
        self._looks = self._looks[len(ready) :]
        for each in ready:
            if each.event is not None:
                each.event.synchronize()
            flags: list[bool] = each.finite.tolist()
            # with several processes there is a flag more than there are items.
            bad = [place for place, fine in zip(each.order, flags, strict=False) if not fine]
            if not all(flags):
                return each.items[min(bad, default=0)]
        return None


def _peaks(outs: list[Tensor]) -> Tensor:
    """The largest magnitude of each output, ``[N]`` of N of one shape.

    NaN and infinity come through it, and no finite numbers overflow.
    """
    rows = torch.stack(outs).view(len(outs), -1) if len(outs) > 1 else outs[0].reshape(1, -1)
    # float64 stays itself.
    dtype = torch.promote_types(rows.dtype, torch.float32)
    peaks: Tensor = torch.linalg.vector_norm(rows.detach(), torch.inf, dim=1, dtype=dtype)
    return peaks


def _on_host(
    outs: list[Tensor], agree: Callable[[Tensor], Tensor] | None
) -> tuple[list[int], Tensor, torch.cuda.Event | None]:
    groups: dict[object, list[int]] = {}
    for place, out in enumerate(outs):
        groups.setdefault((out.shape, out.dtype, out.device), []).append(place)
    order = [place for places in groups.values() for place in places]
    # a pipeline's transformers share a device; where they do not, the first one's gathers.
    device = outs[0].device
    peaks = [_peaks([outs[place] for place in places]).to(device) for places in groups.values()]
    finite = torch.cat(peaks).isfinite()
    if agree is not None:
        finite = torch.cat([finite, agree(finite.all()).to(device).view(1)])
    if not finite.is_cuda:
        return order, finite, None
    there = torch.empty(finite.shape, dtype=finite.dtype, pin_memory=True)
    there.copy_(finite, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return order, there, event
