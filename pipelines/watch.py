"""Watching a run for numbers that are none: between steps, at next to no cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vidsparse.errors import NonFiniteError
from vidsparse.finite import PAUSE, FiniteGuard, NonFiniteCall
from vidsparse.logs import logger
from vidsparse.pipelines.again import Forward
from vidsparse.pipelines.forwards import is_compiled
from vidsparse.pipelines.handle import SparseHandle
from vidsparse.pipelines.parallel import everywhere, from_all, process_count


def loaded_transformers(pipe: Any) -> list[Any]:
    """The transformers that a pipeline has."""
    found = (getattr(pipe, name, None) for name in ("transformer", "transformer_2"))
    return [transformer for transformer in found if transformer is not None]


class _Step:
    """A denoising step: its number, from 0, and the forwards that it ran."""

    def __init__(self) -> None:
        self.number = 0
        self.forwards: list[Forward] = []


class Watch:
    """Ends a run that is no numbers any more, and says where that began.

    The transformers' outputs are looked at, for what attention makes of NaN or infinity stays in
    the residual stream, and the latents after every step. Which attention call it was is found by
    running that step's forwards again.

    Args:
        pipe: what runs.
        handle: of the sparse pipeline; None looks at latents alone.
        uncache: takes a step cache off, which would leave out what is to be run again.
    """

    def __init__(
        self, pipe: Any, handle: SparseHandle | None, uncache: Callable[[], object] | None = None
    ) -> None:
        self._handle = handle
        self._uncache = uncache
        self._several = process_count() > 1
        # a graph of the whole transformer may write the next output over this one.
        every = self._several or any(
            is_compiled(each) or hasattr(each, "_orig_mod") for each in loaded_transformers(pipe)
        )
        self._guard: FiniteGuard[tuple[_Step, Forward | None]] = FiniteGuard(
            pause=0.0 if every else PAUSE, agree=everywhere if self._several else None
        )
        self._step = _Step()
        self._steps = 0
        if handle is not None:
            handle.watch(self._take)

    def _take(self, forward: Forward, out: torch.Tensor, given_back: bool) -> None:
        if forward not in self._step.forwards:
            self._step.forwards.append(forward)
            self._step.number = forward.site.step
        # of two processes that share guidance branches out, each waits for what the other's is.
        self._guard.watch(out, (self._step, forward), hold=given_back)

    def end_step(self, latents: torch.Tensor | None, step: int, steps: int) -> None:
        """Take in the latents after ``step`` of ``steps``, counted from 0, and look.

        After the last one engines let go of their plans.

        Raises:
            NonFiniteError: they, an output, or those of a step before, hold NaN or infinity.
        """
        ended, self._step, self._steps = self._step, _Step(), steps
        ended.number = step
        if latents is not None:
            self._guard.watch(latents, (ended, None), hold=True)
        last = step == steps - 1
        self.look(last=last)
        if last and self._handle is not None:
            # nothing is run again any more, and a decoder wants the memory.
            for engine in self._handle.engines:
                engine.forget()

    def look(self, *, last: bool) -> None:
        """Look at what was taken in; with ``last``, wait for what is found.

        Raises:
            NonFiniteError: an output, or latents, hold NaN or infinity.
        """
        found = self._guard.look(last=last)
        if found is None:
            return
        step, forward = found
        where = f"step {step.number + 1} of {self._steps}"
        call = self._call_of(step)
        if call is not None:
            layer = call.site.layer + 1
            raise NonFiniteError(
                f"attention returned NaN or infinity in layer {layer}, {where} "
                f"({call.site.branch}: {call.how}). Hint: lower the guidance, use another dtype, "
                "or have such calls made again densely with sparsify(..., dense_fallback=True)."
            )
        if forward is not None:
            raise NonFiniteError(
                f"the video became NaN or infinity in the transformer, {where} "
                f"({forward.site.branch}), and no attention call could be named by running the "
                "step again. Hint: lower the guidance, or use another dtype; sparsify(..., "
                "check_finite=True) looks at every call."
            )
        raise NonFiniteError(
            f"the video became NaN or infinity in {where}. "
            "Hint: lower the guidance, or use another dtype."
        )

    def _call_of(self, step: _Step) -> NonFiniteCall | None:
        """The first attention call of ``step`` that is not finite, in any process."""
        if self._handle is None or not step.forwards:
            return None
        if self._uncache is not None:
            self._uncache()
        call = None
        try:
            call = self._handle.find_non_finite(step.forwards)
        except Exception:
            # the run has failed, whatever comes of a closer look.
            logger.info("the step that returned NaN or infinity cannot be run again", exc_info=True)
        calls = from_all(call) if self._several else [call]
        # where both branches stand in one batch, a forward has the name of one.
        places = {forward.site.branch: at for at, forward in enumerate(step.forwards)}
        return min(
            (each for each in calls if each is not None),
            key=lambda each: (places.get(each.site.branch, 0), each.site.layer),
            default=None,
        )
