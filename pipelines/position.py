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
    """Follows a pipeline's runs, forward by forward, as its scheduler counts them.

    Forwards under another scheduler (a second pipeline's on the same transformer, one that a loop
    of one's own made for itself) are of no run that is followed, and are refused where they show:
    the timestep they are told is another one, and the pipeline's scheduler has not gone on.

    Two things cannot be known. After a run that was ended between two steps, the first such forward
    passes as that run's next step; the second is refused. And a class that says how many steps
    its calls run, but not whether one goes on (EasyAnimate, ConsisID), says so of its last call
    ever after: a loop of one's own that starts just as many steps before the end of its list is
    taken for such a call, whose steps are counted from its first.
    """

    def __init__(self) -> None:
        self._timesteps: Any = None
        # places in the list of timesteps: of the run's first step, and of the last forward.
        self._first = self._last = 0
        # the scheduler's own count at the last forward, and the timestep which that was told.
        self._count: int | None = None
        self._told: Any = None

    def next(self, pipe: Any, arguments: Mapping[str, Any]) -> Position:
        """Where the forward that is about to run stands.

        Raises:
            UnsupportedError: the scheduler does not say, or is not the one of this run.
        """
        timesteps = getattr(pipe.scheduler, "timesteps", None)
        if timesteps is None:
            raise _no_step(pipe.scheduler)
        total, place = step_count(pipe.scheduler), _place_told(pipe, arguments)
        self._check_told(pipe, arguments.get("timestep"), place)
        # every pipeline call sets new timesteps, and its first step need not be the list's; a step
        # that goes back covers loops that do not.
        begins = timesteps is not self._timesteps
        begins = begins or (self._first if place is None else place) < self._last
        if begins:
            self._first = _steps_left_out(pipe, total, place)
            self._timesteps = timesteps
        self._last = self._first if place is None else place
        self._count = getattr(pipe.scheduler, "step_index", None)
        self._told = arguments.get("timestep")
        steps = total - self._first
        return Position(min(self._last - self._first, steps - 1), steps, timesteps, begins)

    def _check_told(self, pipe: Any, told: Any, place: int | None) -> None:
        """Check that a forward is of the run that the pipeline's scheduler counts.

        Raises:
            UnsupportedError: it is told another timestep than the last one, and the scheduler
                stands where it stood, or is at its end.
        """
        scheduler = pipe.scheduler
        count, total = getattr(scheduler, "step_index", None), step_count(scheduler)
        followed = scheduler.timesteps is self._timesteps
        if count is None:
            # before the first step the list says which it is; not that of all training steps,
            # which a scheduler has until it is set.
            is_set = getattr(scheduler, "num_inference_steps", None) is not None
            listed = is_set or not hasattr(scheduler, "step_index")
            if not followed or (place is not None and listed):
                return
        elif place != count or not (count >= total or (followed and count == self._count)):
            return
        if _same_told(told, self._told if followed else scheduler.timesteps[total - 1]):
            return
        where = "at its end" if count is not None and count >= total else "where it was"
        raise UnsupportedError(
            "the transformer was told another timestep, but the scheduler of "
            f"{type(pipe).__name__} is {where}: another scheduler runs the transformer. "
            "Hint: call sparsify() on the pipeline that runs, or set_timesteps() of this scheduler "
            "before a loop of your own."
        )


def _same_told(told: Any, before: Any) -> bool:
    """Whether two forwards were told one timestep; tokens that are not denoised are told less."""
    if told is before:
        # mostly so, of a step's branches: reading a value would wait for the device.
        return True
    if told is None or before is None:
        return False
    return _highest(told) == _highest(before)


def _highest(told: Any) -> float:
    return float(told.max()) if isinstance(told, Tensor) else float(told)


def _steps_left_out(pipe: Any, total: int, place: int | None) -> int:
    """Steps at the beginning of the list that a call leaves out, as video-to-video does.

    What a pipeline says of it may be left over from its last call, which the timestep that it says
    it is at shows, or the place of the run's first forward; then none are.
    """
    first = total - min(total, getattr(pipe, "num_timesteps", total))
    if not hasattr(pipe, "current_timestep"):
        return first if place in (None, first) else 0
    current = pipe.current_timestep
    # outside a call, or with a list for every frame.
    if current is None or (isinstance(current, Tensor) and current.numel() > 1):
        return 0
    # schedulers of second order list each timestep twice, and a call may begin with either.
    at = _place(pipe.scheduler.timesteps[first:], current, alike=False)
    return first if at is not None and place in (None, first + at) else 0


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
    # tokens are told the same; what the pipeline says may be left over from a call that raised.
    counts = hasattr(scheduler, "step_index")
    place = _place(scheduler.timesteps, arguments.get("timestep"), alike=counts)
    if place is None and not counts:
        raise _no_step(scheduler)
    return getattr(scheduler, "begin_index", None) if place is None else place


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


def speaks_of_run(pipe: Any) -> bool:
    """Whether what ``pipe`` says of guidance is of the run whose first forward begins.

    It says so of its last call for as long as there is no other: in a loop of one's own, and while
    another pipeline runs the same transformer. No pipeline says whether it is being called; so its
    call is looked for among the functions that are running. Where it never was called, whoever
    loops has set what it says.
    """
    # known from the first call on.
    return not hasattr(pipe, "num_timesteps") or _is_called(pipe)


def _is_called(pipe: Any) -> bool:
    kinds = [vars(kind)["__call__"] for kind in type(pipe).__mro__ if "__call__" in vars(kind)]
    own = {code for kind in kinds if (code := getattr(inspect.unwrap(kind), "__code__", None))}
    frame = inspect.currentframe()
    while frame is not None:
        # of no other frame: a look at its variables keeps them until it ends.
        if frame.f_code in own and frame.f_locals.get("self") is pipe:
            return True
        frame = frame.f_back
    return False


def guided(pipe: Any) -> bool:
    """Whether the call of ``pipe`` that goes on has guidance, as it says."""
    # some keep the number alone.
    without = getattr(pipe, "do_classifier_free_guidance", None) is None
    return (getattr(pipe, "_guidance_scale", None) or 0) > 1 if without else says_guided(pipe)


def says_guided(pipe: Any) -> bool:
    """Whether it says so in words: a number may be that of guidance within one forward."""
    return bool(getattr(pipe, "do_classifier_free_guidance", False))
