"""What a calibrator is, and what it is told of the model."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidsparse.calibration.target import Dial, Search, Target
from vidsparse.errors import OptionError
from vidsparse.methods import Method, Numbers, SparseMethod
from vidsparse.methods.base import option, optional_number
from vidsparse.site import CallSite

Video = NDArray[np.uint8]
"""Frames ``[T, H, W, 3]``."""

DENSE_VIDEO: Final = "search.dense."
"""How the names of dense videos begin in ``Calibrator.state()``; their prompt's number follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """What there is to calibrate.

    Args:
        parts: transformers of the pipeline.
        layers: attention layers of each.
        heads: heads of a layer.
        window: the steps that may be sparse.
        refresh_steps: the steps that compute everything and keep what their plan lacks.
        prompts: how many prompts it is calibrated with.
    """

    parts: int
    layers: int
    heads: int
    window: range
    refresh_steps: tuple[int, ...] = ()
    prompts: int = 2

    def table(self, *more: int, fill: float = 0.0) -> Tensor:
        """An fp32 table ``[P, L, H, *more]`` on the CPU."""
        return torch.full((self.parts, self.layers, self.heads, *more), fill)

    def spread(self, count: int, *, by_plan: bool = False) -> tuple[int, ...]:
        """``count`` steps of the window, each in the middle of an equal share of it.

        ``by_plan`` leaves refresh steps out.
        """
        steps = [one for one in self.window if not (by_plan and one in self.refresh_steps)]
        count = min(count, len(steps))
        return tuple(steps[(2 * i + 1) * len(steps) // (2 * count)] for i in range(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One look at every prompt: at calls or forwards of a dense run, at finished videos, or both.

    Args:
        title: what it looks for, in a few words.
        steps: the denoising steps whose attention calls it wants to see.
        forwards: the denoising steps whose forwards it wants run again, once for each layer, with
            ``method`` in that layer alone. The videos are dense then.
        whole: whether it wants to see the finished videos. A pass without ``steps`` and
            ``forwards`` makes whole videos.
        method: what the videos are made with; None for dense ones.
        schedule: changes of the schedule that was asked for.
        first: number of its first prompt, counted from 0.
        prompts: number of the prompt that it stops before, counted from 0; None looks at all.
    """

    title: str
    steps: tuple[int, ...] = ()
    forwards: tuple[int, ...] = ()
    whole: bool = False
    method: Method | None = None
    schedule: Mapping[str, int] = field(default_factory=dict)
    first: int = 0
    prompts: int | None = None

    def span(self, prompts: int) -> range:
        """The numbers of the prompts that it looks at, of ``prompts`` in all."""
        return range(self.first, prompts if self.prompts is None else min(self.prompts, prompts))

    @property
    def dense(self) -> bool:
        """Whether its videos are dense."""
        return self.method is None or bool(self.forwards)

    @property
    def last_step(self) -> int | None:
        """The last denoising step that it needs; None if it needs whole videos."""
        return None if self.whole else max((*self.steps, *self.forwards), default=None)


def _target(kind: str, metavar: str, help: str) -> Any:
    return option(
        None, flag=f"--target-{kind}", metavar=metavar, convert=optional_number, help=help
    )


@dataclass(kw_only=True)
class Calibrator(ABC):
    """Finds the numbers of ``method`` in one or more passes over the same prompts.

    A pass sees the calls or the videos of its prompts. Then ``finish`` draws conclusions, which the
    next pass may build on, and which may add passes. Everything it knows is in ``state()``, so that
    a killed run can go on.

    First come the calibrator's own passes, ``looks``. If a quality or a speed is the target, tries
    follow: whole videos, with the number of ``dial`` moved from try to try (``Search``).

    Fields that are settings carry their command line flag, as a method's options do.

    Raises:
        OptionError: more than one target was given, or a value that no video can reach.
    """

    calibrates: ClassVar[type[SparseMethod]]
    """The method whose numbers it finds."""

    samples: ClassVar[int]
    """Prompts that it takes by default: for a paper's method as many as the paper."""

    bound: ClassVar[str | None] = None
    """Name of the setting that bounds the relative L1 error of the method's output, if any."""

    divides_layers: ClassVar[bool] = False
    """Whether it finds how much each layer or head needs, so that no layer has to be dense."""

    needs_target: ClassVar[bool] = False
    """Whether there is nothing to find without a target."""

    settles_schedule: ClassVar[bool] = False
    """Whether its numbers hold for one schedule only, even without a target."""

    method: SparseMethod
    extent: Extent
    timesteps: Tensor | None = field(default=None, init=False, repr=False)
    """The timestep of each denoising step that was seen."""
    search: Search = field(init=False, repr=False)

    target_psnr: float | None = _target(
        "psnr", "DB", "mean PSNR to the dense videos to reach with the least work, in dB"
    )
    target_ssim: float | None = _target(
        "ssim", "S", "mean SSIM to the dense videos to reach with the least work"
    )
    target_speed: float | None = _target(
        "speed", "X", "speed to reach, as a multiple of dense denoising, as near as can be"
    )

    def __post_init__(self) -> None:
        wanted: list[Target] = []
        for kind in ("psnr", "ssim", "speed"):
            value = getattr(self, f"target_{kind}")
            if value is not None:
                wanted.append(Target(kind, value))
        if len(wanted) > 1:
            given = " and ".join(f"target_{one.kind}" for one in wanted)
            raise OptionError(f"there can be one target, got {given}. Hint: leave one out.")
        self.search = Search(wanted[0] if wanted else None)

    @property
    def searches(self) -> bool:
        """Whether tries follow its own passes: whole videos made with what it found."""
        return self.search.target is not None

    @property
    def passes(self) -> Sequence[Pass]:
        """Its own passes, then one pass for each try; with tries the first sees whole videos."""
        looks = list(self.looks)
        if not self.searches:
            return looks
        looks[0] = replace(looks[0], whole=True)
        name = self.dial.name
        for attempt, first, end in self.search.looks:
            number = self.search.tried[attempt]
            schedule = self._schedules[self.search.schedules[attempt]]
            title = " ".join(f"{what} {n:.4g}" for what, n in {name: number, **schedule}.items())
            method = self.made(number)
            looks.append(
                Pass(title=title, method=method, schedule=schedule, first=first, prompts=end)
            )
        return looks

    def observe(self, number: int, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        """Take in one call in pass ``number``: ``[B, H, S, D]``, tokens in order, text last."""
        raise NotImplementedError(f"{type(self).__name__} looks at no calls")

    def compare(self, number: int, part: int, errors: Sequence[float]) -> None:
        """Take in a forward of transformer ``part`` in pass ``number``.

        ``errors`` holds one number for each of its layers: the mean squared error of the
        transformer's output if that layer alone is sparse.
        """
        raise NotImplementedError(f"{type(self).__name__} looks at no forwards")

    def watch(self, number: int, prompt: int, video: Video, total: float, seconds: float) -> None:
        """Take in one video in pass ``number``, of prompt number ``prompt``.

        ``total`` is the share of the run's query-key pairs that was computed, ``seconds`` the time
        of its denoising.
        """
        if self.passes[number].dense:
            self.search.keep(prompt, video, seconds)
        elif number < len(self.looks):
            self.learn(number, prompt, video, total)
        else:
            self.search.watch(prompt, video, total, seconds)

    def finish(self, number: int) -> None:
        """Draw conclusions from pass ``number``, which has ended."""
        own = len(self.looks)
        if number < own:
            self.conclude(number)
        if self.searches and number == own - 1:
            self.search.begin(self.dial.number(self.dial.place(self.dial.start)))
        elif number >= own:
            self.search.go_on(self.dial, len(self._schedules))

    def state(self) -> dict[str, Tensor]:
        """Everything known so far, which a killed run needs to go on.

        A tensor whose name begins with ``DENSE_VIDEO`` never changes once it is there.
        """
        tries = {f"search.{name}": value for name, value in self.search.state().items()}
        return {**self.known(), **tries}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a ``state()``."""
        tries = {
            name.removeprefix("search."): value
            for name, value in state.items()
            if name.startswith("search.")
        }
        self.search.restore(tries)
        self.recall(state)

    def tables(self) -> dict[str, Tensor]:
        """The numbers by name, fp32 ``[P, L, H, ...]``, once all passes have ended."""
        return self.found(self.search.number if self.searches else None)

    def options(self) -> dict[str, Any]:
        """Options of the method that were found beside the tables."""
        return self.options_at(self.search.number) if self.searches else {}

    def measured(self) -> dict[str, Any]:
        """What was measured on the way, as JSON values."""
        own = self.seen()
        if not self.searches:
            return own
        return {**self.search.measured(self.dial.name, self._schedules), **own}

    def schedule(self) -> Mapping[str, int]:
        """The changes of the asked-for schedule that were found to be better."""
        return self._schedules[self.search.schedule] if self.searches else {}

    @property
    def _schedules(self) -> Sequence[Mapping[str, int]]:
        return [{}, *self.cheaper]

    def made(self, number: float) -> SparseMethod:
        """The method with its dial at ``number``."""
        # fits any grid: the engine compares, and calibration has one grid only.
        numbers = Numbers(self.found(number), None, self.edges)
        changed: dict[str, Any] = {**self.options_at(number), "numbers": numbers}
        return replace(self.method, **changed)

    @property
    def edges(self) -> tuple[float, ...]:
        """Timesteps that separate the groups of steps, from high to low."""
        if self.timesteps is None:
            return ()
        times = self.timesteps.tolist()
        return tuple((times[step - 1] + times[step]) / 2 for step in self.starts)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of every group but the first; empty if tables do not differ by group."""
        return ()

    def settings(self) -> dict[str, Any]:
        """The settings as JSON values, without those that are None."""
        values = {f.name: getattr(self, f.name) for f in setting_fields(type(self))}
        return {name: value for name, value in values.items() if value is not None}

    # ---- what a calibrator is made of ----

    @property
    @abstractmethod
    def looks(self) -> Sequence[Pass]:
        """Its own passes, in order. The first looks at dense runs."""

    @property
    @abstractmethod
    def dial(self) -> Dial:
        """The number that is moved to meet a target. Asked for after its own passes only."""

    def learn(self, number: int, prompt: int, video: Video, total: float) -> None:
        """Take in one video of a pass of its own."""
        raise NotImplementedError(f"{type(self).__name__} looks at no videos")

    def conclude(self, number: int) -> None:  # noqa: B027 - many have nothing to conclude.
        """Draw conclusions from a pass of its own, which has ended."""

    @abstractmethod
    def found(self, number: float | None) -> dict[str, Tensor]:
        """The tables with the dial at ``number``; None: by the settings."""

    @property
    def cheaper(self) -> Sequence[Mapping[str, int]]:
        """Schedules that compute less than the asked-for one, the most work first.

        Each is given as changes of that schedule.
        """
        return ()

    def options_at(self, number: float) -> dict[str, Any]:
        """Options of the method with the dial at ``number``, beside the tables."""
        return {}

    def seen(self) -> dict[str, Any]:
        """What its own passes measured, as JSON values."""
        return {}

    def known(self) -> dict[str, Tensor]:
        """What its own passes have found so far, which a killed run needs to go on."""
        return {}

    def recall(self, state: dict[str, Tensor]) -> None:  # noqa: B027 - many have nothing to recall.
        """Restore what ``known()`` returned."""


def setting_fields(cls: type[Calibrator]) -> tuple[dataclasses.Field[Any], ...]:
    """A calibrator's fields that are settings."""
    return tuple(f for f in dataclasses.fields(cls) if "flag" in f.metadata)


def check_positive(name: str, value: object) -> None:
    """Raise an ``OptionError`` unless ``value`` is a finite number above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):  # type: ignore[operator]
        raise OptionError(f"{name} must be a number above 0, got {value!r}")


def check_count(name: str, value: object) -> None:
    """Raise an ``OptionError`` unless ``value`` is a whole number from 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} must be a whole number from 1, got {value!r}")
