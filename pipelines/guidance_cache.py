"""The step cache ``guidance``: forwards of the unconditional branch that need not be run.

What guidance adds is the difference between its two branches, and that changes little from one step
to the next, other than the branches themselves. So the unconditional branch is run in one of so
many steps; in the others its output is the conditional one's with the difference that was found
last. FasterCache (arXiv:2410.19355) rests on the same, and keeps the difference by frequency.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vidsparse.errors import UnsupportedError
from vidsparse.pipelines.again import tensors_of
from vidsparse.pipelines.branches import check_both_branches
from vidsparse.pipelines.cached import GUIDANCE_HOOK, check_uncached
from vidsparse.pipelines.family import TOGETHER
from vidsparse.pipelines.forwards import show_changes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class _Difference:
    """What the branches of one transformer differed by, and where it stands in the step.

    ``conditional`` is the output of the conditional branch in this step, ``values`` the other's
    less that, found in the step ``found``. ``forwards`` counts those of this step. ``steady`` says
    whether it changed little over the last two steps in a row that ran both branches.
    """

    step: int = -1
    forwards: int = 0
    conditional: Any = None
    values: list[Tensor] = field(default_factory=list)
    found: int = -1
    steady: bool = False

    def enter(self, step: int) -> None:
        """A forward of ``step`` begins."""
        if step != self.step:
            self.step, self.forwards, self.conditional = step, 0, None
        self.forwards += 1

    def take(self, output: Any, most: float) -> None:
        """What the forward returned that began last; steady up to a change by ``most``."""
        if self.forwards == 1:
            self.conditional = output
        elif self.forwards == 2 and self.conditional is not None:
            own, other = (list(tensors_of(one)) for one in (self.conditional, output))
            alike = [one.shape for one in own] == [one.shape for one in other]
            values = [(b - a).detach() for a, b in zip(own, other, strict=True) if alike]
            if self.values and self.step == self.found + 1:
                self.steady = _changed(values, self.values) <= most
            self.values, self.found = values, self.step

    def unconditional(self, every: int) -> Any:
        """The output of the forward that begins, if it is the second of its step and need not run.

        None where the difference is not steady, ``every`` steps old, of other shapes, or wants a
        gradient.
        """
        if self.forwards != 2 or not self.steady or self.step - self.found >= every:
            return None
        own = list(tensors_of(self.conditional))
        if [one.shape for one in own] != [one.shape for one in self.values]:
            # ChronoEdit drops frames in the middle of a run.
            return None
        if any(one.requires_grad for one in own):
            return None
        return _plus(self.conditional, iter(self.values))


class GuidanceCache(AbstractContextManager["GuidanceCache"]):
    """Leaves out forwards of a pipeline's unconditional branch, with counts of those that were run.

    It leaves none out in the first ``warmup`` steps, nor in those that ``whole`` names, in which
    sparse layers compute everything, nor before two steps in a row have shown that the difference
    changes little, in every video of a batch. As a context manager it removes itself when the block
    ends.

    Args:
        pipe: a pipeline of a supported class, whose branches come one after the other.
        every: the unconditional branch is run in one of so many steps, from 2.
        warmup: first steps in which it is always run; it is in the first one of all.
        whole: of a number of steps, those in which it is always run.

    Attributes:
        steady: share of its norm by which the difference may change from one step to the next: 0.2
            to 0.3 in calm runs of ``shapes`` after their first steps, about 2 in those whose
            outputs swing, where it changes its sign every time.

    Raises:
        UnsupportedError: the pipeline computes its branches in one forward, or apart from each
            other in several processes, or several forwards of a branch in a step; or it has a step
            cache already.
    """

    cache: Final = "guidance"
    steady: float = 0.5

    def __init__(
        self,
        pipe: Any,
        every: int = 2,
        *,
        warmup: int = 0,
        whole: Callable[[int], Collection[int]] = lambda steps: (),
    ) -> None:
        from vidsparse.pipelines.adapter import transformers_of
        from vidsparse.pipelines.lookup import find_adapter
        from vidsparse.pipelines.position import Positions

        adapter = find_adapter(pipe)
        if not adapter.takes_turns:
            raise UnsupportedError(f"{type(pipe).__name__} {TOGETHER}")
        self.threshold = every
        self._pipe = weakref.ref(pipe)
        self._warmup = max(1, warmup)
        self._of_steps = whole
        self._whole: Collection[int] = ()
        # whether there was a forward in the last run that might have been left out.
        self._asked = False
        self._positions = Positions()
        # by step, forwards and those of them that were run.
        self._counts: dict[int, tuple[int, int]] = {}
        self._differences: dict[int, _Difference] = {}
        self._undo: list[Callable[[], object]] = []
        transformers = transformers_of(pipe, adapter)
        for transformer in transformers:
            check_both_branches(transformer)
            check_uncached(transformer)
        for transformer in transformers:
            self._attach(transformer)

    def blocks_run(self) -> dict[int, float]:
        """By step of the last run, from 0: the share of all its blocks that were run."""
        return {step: run / made for step, (made, run) in self._counts.items()}

    def share_left_out(self) -> float:
        """Of all forwards of the last run, the share that was left out."""
        made = sum(forwards for forwards, _ in self._counts.values())
        return 1 - sum(run for _, run in self._counts.values()) / made if made else 0.0

    @property
    def note(self) -> str | None:
        """What the last run has to say of the cache beside counts, if anything."""
        if any(run < made for made, run in self._counts.values()):
            return None
        if all(made == 1 for made, _ in self._counts.values()):
            return "the cache guidance left nothing out: the run had no guidance"
        if not self._asked:
            return "the cache guidance left nothing out: all steps were to run both branches"
        return "the cache guidance left nothing out: what guidance adds changed from step to step"

    def remove(self) -> None:
        """Take the cache off the transformers. Harmless when repeated."""
        while self._undo:
            self._undo.pop()()
        self._differences.clear()

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _attach(self, transformer: Any) -> None:
        import torch
        from diffusers.hooks import HookRegistry, ModelHook

        # outside the graph: the step is read by python before each forward.
        begin = torch.compiler.disable(self._begin)  # type: ignore[no-untyped-call]
        end = torch.compiler.disable(self._end)  # type: ignore[no-untyped-call]

        class LeavesOut(ModelHook):  # type: ignore[misc]
            _is_stateful = False

            def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
                made = begin(module, args, kwargs)
                if made is not None:
                    return made
                return end(module, self.fn_ref.original_forward(*args, **kwargs))

        registry = HookRegistry.check_if_exists_or_initialize(transformer)
        registry.register_hook(LeavesOut(), GUIDANCE_HOOK)
        self._undo.append(lambda: show_changes(transformer))
        self._undo.append(lambda: registry.remove_hook(GUIDANCE_HOOK, recurse=False))
        show_changes(transformer)

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a forward that need not be run returns; None for one that has to be."""
        from vidsparse.pipelines.position import named_arguments

        at = self._positions.next(self._pipe(), named_arguments(module, args, kwargs))
        if at.begins:
            self._counts.clear()
            self._differences.clear()
            self._asked = False
            self._whole = self._of_steps(at.steps)
        difference = self._differences.setdefault(id(module), _Difference())
        difference.enter(at.step)
        made = None
        if at.step >= self._warmup and at.step not in self._whole:
            self._asked |= difference.forwards == 2
            made = difference.unconditional(self.threshold)
        forwards, run = self._counts.get(at.step, (0, 0))
        self._counts[at.step] = forwards + 1, run + (made is None)
        return made

    def _end(self, module: Any, output: Any) -> Any:
        """Take in what a forward that was run returned, and return it."""
        self._differences[id(module)].take(output, self.steady)
        return output


def _changed(now: list[Tensor], before: list[Tensor]) -> float:
    """By how much of its norm a difference has changed, in the video where that is most.

    Without end where it is of other shapes.
    """
    import torch

    if [one.shape for one in now] != [one.shape for one in before] or not now:
        return math.inf

    def norms(values: Tensor) -> Tensor:
        found: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1, dtype=torch.float32)
        return found

    shares = [
        norms(one - other) / norms(one).clamp_min(torch.finfo(torch.float32).tiny)
        for one, other in zip(now, before, strict=True)
    ]
    return float(torch.cat(shares).max())


def _plus(output: Any, values: Iterator[Tensor]) -> Any:
    """``output`` with the next of ``values`` added to each of its floating-point tensors."""
    import torch

    if isinstance(output, torch.Tensor):
        return output + next(values) if output.is_floating_point() else output
    if isinstance(output, dict):
        # the host's own kind of it takes its parts by name.
        return type(output)(**{name: _plus(part, values) for name, part in output.items()})
    if isinstance(output, (list, tuple)):
        return type(output)(_plus(part, values) for part in output)
    return output
