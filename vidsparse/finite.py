"""A watch on attention's outputs for NaN and infinity that a GPU is never waited for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vidsparse.site import CallSite


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
class _Step:
    """The calls of a step, and whether each output was finite, known once the event has come."""

    calls: list[NonFiniteCall]
    finite: Tensor
    event: torch.cuda.Event | None


class FiniteGuard:
    """Finds the first call that came to NaN or infinity, between steps.

    A call costs one reduction, whose result stays on the device. Between steps the results of one
    step are copied to the host behind the work that is queued there, and those of the step before
    are read, which have come by then.
    """

    def __init__(self) -> None:
        self._calls: list[NonFiniteCall] = []
        self._peaks: list[Tensor] = []
        self._steps: list[_Step] = []

    def watch(self, out: Tensor, site: CallSite, how: str) -> None:
        """Take in the output of a call, of any shape."""
        self._calls.append(NonFiniteCall(site, how))
        # the largest magnitude: NaN and infinity come through it, and no finite numbers overflow.
        self._peaks.append(torch.linalg.vector_norm(out.detach(), torch.inf))

    def look(self, *, last: bool) -> NonFiniteCall | None:
        """Close a step, and return the first call that was not finite, of the steps before it.

        On a CPU, and with ``last``, the step itself is looked at too.
        """
        if self._peaks:
            self._steps.append(_Step(self._calls, *_on_host(self._peaks)))
            self._calls, self._peaks = [], []
        ready = [each for each in self._steps if last or each.event is None]
        ready = ready or self._steps[:-1]
        self._steps = self._steps[len(ready) :]
        for step in ready:
            if step.event is not None:
                step.event.synchronize()
            for call, finite in zip(step.calls, step.finite.tolist(), strict=True):
                if not finite:
                    return call
        return None


def _on_host(peaks: list[Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
    # a pipeline's transformers share a device; where they do not, the first one's gathers.
    finite = torch.stack([peak.to(peaks[0].device).float() for peak in peaks]).isfinite()
    if not finite.is_cuda:
        return finite, None
    there = torch.empty(finite.shape, dtype=finite.dtype, pin_memory=True)
    there.copy_(finite, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(finite.device))
    return there, event
