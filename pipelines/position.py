"""Where a run stands: which denoising step comes next, and which branches of guidance."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from vidsparse.errors import UnsupportedError

# what pipelines call their forwards. LTX-2 has more of them, whose own names will do.
BRANCHES: Final = {
    "cond": "conditional",
    "uncond": "unconditional",
    "pred_cond": "conditional",
    "pred_uncond": "unconditional",
    "cond_uncond": "conditional",
}


@dataclass(frozen=True, slots=True)
class Position:
    """Where the forward to come stands in its run.

    Args:
        step: its step, from 0.
        steps: how many the run has.
        timesteps: those of the scheduler.
        begins: whether it is the first of its run.
    """

    step: int
    steps: int
    timesteps: Any
    begins: bool


class Positions:
    """Follows a pipeline's runs, forward by forward."""

    def __init__(self) -> None:
        self._timesteps: Any = None
        # places in the list of timesteps: of the run's first step, and of the last forward.
        self._first = self._last = 0
        # the timestep that forwards were told since the run ended.
        self._told_after: float | None = None

    def next(self, pipe: Any, arguments: Mapping[str, Any]) -> Position:
        """Where the forward that is about to run stands.

        Raises:
            UnsupportedError: the scheduler does not say, or is not the one of this run.
        """
        timesteps = getattr(pipe.scheduler, "timesteps", None)
        if timesteps is None:
            raise _no_step(pipe.scheduler)
        total, told = step_count(pipe.scheduler), _place_told(pipe, arguments)
        # every pipeline call sets new timesteps, and its first step need not be the list's; a step
        # that goes back covers loops that do not.
        begins = timesteps is not self._timesteps
        begins = begins or (self._first if told is None else told) < self._last
        if begins:
            first = _steps_left_out(pipe, total)
            # a run that begins before is not the one that the pipeline's numbers are left over
            # from: one of another pipeline on the same parts, or of a loop of one's own.
            self._first = first if told is None or told >= first else 0
            self._timesteps, self._told_after = timesteps, None
        self._last = self._first if told is None else told
        if self._last >= total:
            self._check_ended(pipe, arguments)
        steps = total - self._first
        return Position(min(self._last - self._first, steps - 1), steps, timesteps, begins)

    def _check_ended(self, pipe: Any, arguments: Mapping[str, Any]) -> None:
        """Check that a forward whose scheduler has ended is no part of a run.

        Forwards to look at or to time are told one timestep, and stand at the last step.

        Raises:
            UnsupportedError: it is told another timestep than those before it.
        """
        told = arguments.get("timestep")
        value = float(told.max()) if isinstance(told, Tensor) else told
        if self._told_after not in (None, value):
            name = type(pipe).__name__
            raise UnsupportedError(
                f"the transformer is told other timesteps, and the scheduler of {name} "
                "is at its end: what runs has another one. Hint: call sparsify() on the pipeline "
                "that runs, or set_timesteps() of this scheduler before a loop of your own."
            )
        self._told_after = value


def _steps_left_out(pipe: Any, total: int) -> int:
    """Steps at the beginning of the list that a call leaves out, as video-to-video does.

    What a pipeline says of it may be left over from its last call.
    """
    if hasattr(pipe, "current_timestep"):
        current = pipe.current_timestep
        # outside a call, or with a list for every frame.
        if current is None or (isinstance(current, Tensor) and current.numel() > 1):
            return 0
    return total - min(total, getattr(pipe, "num_timesteps", total))


def _place_told(pipe: Any, arguments: Mapping[str, Any]) -> int | None:
    """Which of the scheduler's timesteps is next; None before the first step, where none says."""
    scheduler = pipe.scheduler
    current = getattr(pipe, "current_timestep", None)
    if isinstance(current, Tensor) and current.numel() > 1:
        return _step_of_frames(pipe, current, scheduler.timesteps)
    index = getattr(scheduler, "step_index", None)
    if index is not None:
        return int(index)
    # CogVideoX's schedulers count no steps, and Helios' distilled one has a count that stays none,
    # as others' is before their first step. what the transformer is told is of the list, where all
    # tokens are told the same.
    counts, told = hasattr(scheduler, "step_index"), arguments.get("timestep")
    told = told if counts or current is None else current
    place = _place(scheduler.timesteps, told, alike=counts)
    if place is None and not counts:
        raise _no_step(scheduler)
    return place


def step_count(scheduler: Any) -> int:
    """How many steps a scheduler's timesteps are for: LTX's ancestral one lists their end too."""
    count = len(scheduler.timesteps)
    sigmas = getattr(scheduler, "sigmas", None)
    return count - (sigmas is not None and len(sigmas) == count)


def _step_of_frames(pipe: Any, told: Tensor, timesteps: Any) -> int:
    """The step of all frames that are being denoised; ``told`` is 0 for the other frames.

    With diffusion forcing every frame has a copy of the scheduler, and the pipeline's own counts
    no steps.

    Raises:
        UnsupportedError: frames are at different steps.
    """
    place = _place(timesteps, told[told > 0], alike=True)
    if place is None or pipe.num_timesteps > len(timesteps):
        raise UnsupportedError(
            "sparse attention needs all frames at the same denoising step. "
            "Hint: leave ar_step at 0, or remove() the handle to run densely."
        )
    return place


def _place(timesteps: Any, value: Any, *, alike: bool) -> int | None:
    if value is None:
        return None
    if isinstance(value, Tensor):
        if not value.numel() or (alike and bool((value != value.flatten()[0]).any())):
            return None
        value = value.flatten()[0]
    at = float(value)
    exact = timesteps.tolist()
    # some hosts tell their transformer whole numbers.
    for values in (exact, [float(int(one)) for one in exact]):
        if at in values:
            return values.index(at)
    return None


def _no_step(scheduler: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{type(scheduler).__name__} does not say which step it is at: it has no step_index, and "
        "the timestep given to the transformer is not in its list of timesteps. "
        "Hint: use the scheduler that the model came with."
    )


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments of ``module.forward``, by name; pipelines pass all by name already."""
    if not args:
        return kwargs
    return inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments


def guided(pipe: Any) -> bool:
    """Whether the run that goes on has guidance, as its pipeline says."""
    said = getattr(pipe, "do_classifier_free_guidance", None)
    # some keep the number alone.
    return (getattr(pipe, "_guidance_scale", None) or 0) > 1 if said is None else bool(said)
