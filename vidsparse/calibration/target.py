"""A quality or a speed by name: whole videos say how far a method's number has to go."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.metrics import compare_videos

if TYPE_CHECKING:
    Video = NDArray[np.uint8]

Kind = Literal["psnr", "ssim", "speed"]

TRIES: Final = 5
"""Most settings that are tried with one schedule."""

# the share of the prompts that a try after the first begins with, and their smallest number.
_PART: Final = 4
_FEWEST: Final = 2

# how far from the level that is sought a try may be, in decibels: 3 % of a speed.
_NEAR: Final = {"psnr": 0.3, "ssim": 0.3, "speed": 0.13}
# how far above the target that level lies, so that a try that is kept has it on other prompts, too:
# nine presets of 24 prompts had 0.3 dB less there than on their own (BENCHMARKS.md), since of many
# settings the cheapest that does on some prompts is chosen. A speed does not depend on the prompts.
_ABOVE: Final = {"psnr": 0.4, "ssim": 0.4, "speed": 0.087}
# what may be missing of a target that was met, in decibels: 1 % of a speed.
_SLACK: Final = 0.05
_RANGES: Final = {"psnr": (5.0, 60.0), "ssim": (0.1, 0.999), "speed": (1.0, 20.0)}
_UNITS: Final = {"psnr": " dB", "ssim": "", "speed": " times"}
# what a video is that differs nowhere: as near as 8 bits can say.
_LEAST_ERROR: Final = 1e-3
# how far one try may go from the last, on the dial's own scale: what was learnt holds nearby only.
_REACH: Final = math.log(2.5)
# the share of the work that another schedule has to save.
_WORTHWHILE: Final = 0.02
# on that scale, two numbers whose videos are as good as the same.
_ALIKE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted: a mean PSNR in dB, a mean SSIM, or how many times faster than dense.

    Raises:
        OptionError: a value that no video can reach.
    """

    kind: Kind
    value: float

    def __post_init__(self) -> None:
        low, high = _RANGES[self.kind]
        number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not number or not low <= self.value <= high:
            raise OptionError(
                f"target_{self.kind} must lie between {low:g} and {high:g}{_UNITS[self.kind]}, "
                f"got {self.value!r}"
            )

    @property
    def sought(self) -> float:
        """What a search aims at: 0.4 dB above the target, 2 % of a speed.

        On a logarithmic scale (decibels), where equal steps are equal ratios.
        """
        return _level(self.kind, self.value) + _ABOVE[self.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    """The number of a method that is turned until its videos are as wanted.

    Args:
        name: of the number.
        start: where the search begins.
        least: the smallest number that is tried.
        most: the largest.
        scale: on which steps are alike: ``logarithm`` of the number, ``rest`` for the logarithm of
            what a share leaves to one, or ``plain``.
        gain: decibels of PSNR for a step of 1 on that scale, as a first guess; negative where
            larger numbers compute less.
        only: the numbers that there are, where they are few.
    """

    name: str
    start: float
    least: float
    most: float
    scale: Literal["logarithm", "rest", "plain"]
    gain: float
    only: tuple[float, ...] = ()

    def place(self, number: float) -> float:
        """Where a number stands on the scale, one beyond the bounds at the nearer of them."""
        if self.scale != "plain":
            # what is outside may have no logarithm.
            number = min(max(number, self.least), self.most)
        if self.scale == "logarithm":
            return math.log(number)
        return -math.log1p(-number) if self.scale == "rest" else number

    def number(self, place: float) -> float:
        """The number at a place of the scale, or the nearest that there is."""
        if self.scale == "logarithm":
            # what lies far outside of the bounds has no exponential.
            number = math.exp(min(max(place, math.log(self.least)), math.log(self.most)))
        else:
            number = -math.expm1(-max(place, 0.0)) if self.scale == "rest" else place
        number = min(max(number, self.least), self.most)
        if self.only:
            return min(self.only, key=lambda one: abs(self.place(one) - self.place(number)))
        return float(f"{number:.4g}")


@dataclass(frozen=True, slots=True)
class _Seen:
    """One video of a try: log of its mean squared error, SSIM, share of pairs, and seconds."""

    log_error: float
    ssim: float
    total: float
    seconds: float

    @property
    def psnr(self) -> float:
        return psnr_of(self.log_error)


class Search:
    """Tries numbers of a dial on whole videos until they are as wanted.

    The first try is a video of every prompt. Prompts differ by far more than what one number does
    to each of them, so another try begins with a quarter of the prompts: how these moved from a
    whole try moves its mean. Only where that is as wanted, or nothing else is left to try, do the
    others follow. The next number lies on the line between the two tries beside what is sought, or
    else through the last two, or goes by the dial's first guess. What is kept is the cheapest whole
    try that has enough, or the nearest where none has. Enough is from 0.1 dB above the target on
    (a speed: from 1 % below), and 0.4 dB above it is where the search aims, since other prompts
    come out a little below those that settings were chosen by.

    Beside the number there may be schedules, each cheaper than the one before. Where the target is
    met with one, the next is tried in the same way, until one meets it at no less work.

    Args:
        target: what is wanted, None to try one number and say what comes of it.
    """

    def __init__(self, target: Target | None) -> None:
        self.target = target
        self.tried: list[float] = []
        self.schedules: list[int] = []
        """Of every try its schedule, counted from the dearest."""
        self.looks: list[tuple[int, int, int]] = []
        """What videos were or are to be made of, in order: a try, its first prompt, the end."""
        self._dense: dict[int, Tensor] = {}
        self._dense_seconds: dict[int, float] = {}
        self._rows: list[dict[int, _Seen]] = []

    # ---- what is shown ----

    def keep(self, prompt: int, video: Video, seconds: float) -> None:
        """Take in a prompt's dense video, and the seconds of its denoising."""
        self._dense[prompt] = torch.from_numpy(video)
        self._dense_seconds[prompt] = seconds

    def log_error(self, prompt: int, video: Video) -> float:
        """The logarithm of a video's mean squared error to the prompt's dense one."""
        # frame by frame: long videos in 64 bits would take gigabytes, and seconds to fill them.
        squared = math.fsum(
            float((one.float() - other.float()).square().sum(dtype=torch.float64))
            for one, other in zip(torch.from_numpy(video), self._dense[prompt], strict=True)
        )
        return math.log(max(squared / video.size, _LEAST_ERROR))

    def watch(self, prompt: int, video: Video, total: float, seconds: float) -> None:
        """Take in a video of the last look."""
        alike = math.nan
        if self.target is not None and self.target.kind == "ssim":
            found = compare_videos(self._dense[prompt].numpy(), video).ssim
            alike = math.nan if found is None else found
        seen = _Seen(self.log_error(prompt, video), alike, total, seconds)
        self._rows[self.looks[-1][0]][prompt] = seen

    def begin(self, number: float, schedule: int = 0) -> None:
        """Try a number next, the first on all prompts and others on a part of them."""
        prompts = len(self._dense)
        part = max(_FEWEST, -(-prompts // _PART)) if self.tried else prompts
        self.looks.append((len(self.tried), 0, min(part, prompts)))
        self.tried.append(number)
        self.schedules.append(schedule)
        self._rows.append({})

    def go_on(self, dial: Dial, schedules: int = 1) -> None:
        """After a look: the rest of a try, or the next try, unless there is nothing left to see."""
        if self.target is None:
            return
        last = self.looks[-1][0]
        schedule = self.schedules[last]
        if not self._met(last) and not self._too_dear(last):
            tries = self._tries_with(schedule)
            following = dial.number(self._next(dial, tries))
            away = min(abs(dial.place(following) - dial.place(self.tried[one])) for one in tries)
            if len(tries) < TRIES and away > _ALIKE and self._pays(following, schedule):
                self.begin(following, schedule)
                return
        best = self._best(range(len(self.tried)))
        cheaper = schedule + 1
        if (
            self.schedules[best] == schedule
            and cheaper < schedules
            and not self._tries_with(cheaper)
            and self._enough(best)
            and self.target.kind != "speed"
        ):
            self.begin(self.tried[best], cheaper)
        elif not self._whole(best):
            self.looks.append((best, len(self._rows[best]), len(self._dense)))

    # ---- what it comes to ----

    @property
    def best(self) -> int:
        """The try that is kept."""
        return self._best([one for one in range(len(self.tried)) if self._whole(one)])

    def _best(self, tries: Sequence[int]) -> int:
        """The cheapest of ``tries`` that meets the target, or the nearest."""
        target = self.target
        if target is None:
            return tries[-1]
        met = [one for one in tries if self._enough(one)]
        if met and target.kind == "speed":
            return max(met, key=lambda one: self._value(one, "psnr"))
        if met:
            return min(met, key=self._total)
        return min(tries, key=lambda one: abs(self._missing(one)))

    @property
    def number(self) -> float:
        """That of the try that is kept."""
        return self.tried[self.best]

    @property
    def schedule(self) -> int:
        """That of the try that is kept."""
        return self.schedules[self.best]

    def measured(self, name: str, schedules: Sequence[Mapping[str, int]] = ({},)) -> dict[str, Any]:
        """What was wanted and what came of it, as JSON values.

        Args:
            name: of the number.
            schedules: what each changes of the schedule that was asked for.
        """
        best = self.best
        seen = self._rows[best].values()
        found: dict[str, Any] = {
            "psnr": round(self._value(best, "psnr"), 2),
            "psnr_worst": round(min(one.psnr for one in seen), 2),
            "total": round(self._total(best), 4),
        }
        if len(seen) > 1:
            found["psnr_std"] = round(statistics.stdev(one.psnr for one in seen), 2)
        if self.target is not None:
            found["target"] = {self.target.kind: self.target.value}
            wanted = _level(self.target.kind, self.target.value)
            found["met"] = self._at(best) >= wanted - _SLACK
            if self.target.kind != "psnr":
                found[self.target.kind] = round(self._value(best, self.target.kind), 4)
        tries = [
            {
                name: round(number, 4),
                **schedules[self.schedules[one]],
                "psnr": round(self._value(one, "psnr"), 2),
                "total": round(self._total(one), 4),
                # the mean of all is an estimate then.
                **({} if self._whole(one) else {"prompts": len(self._rows[one])}),
            }
            for one, number in enumerate(self.tried)
        ]
        return {**found, name: round(self.tried[best], 4), "tries": tries}

    def _whole(self, one: int) -> bool:
        """Whether a try has a video of every prompt."""
        return len(self._rows[one]) == len(self._dense)

    def _value(self, one: int, kind: Kind) -> float:
        """The mean of a try, or what it will be by the prompts that were made."""
        row = self._rows[one]
        if kind == "speed":
            return math.fsum(self._dense_seconds[prompt] for prompt in row) / math.fsum(
                seen.seconds for seen in row.values()
            )

        def of(row: dict[int, _Seen]) -> dict[int, float]:
            return {p: seen.psnr if kind == "psnr" else seen.ssim for p, seen in row.items()}

        own = of(row)
        if self._whole(one):
            return mean(list(own.values()))
        whole = [of(self._rows[i]) for i in range(len(self.tried)) if self._whole(i)]
        moved = [
            (mean([own[p] - base[p] for p in own]), mean(list(base.values()))) for base in whole
        ]
        # the nearest says most.
        by, value = min(moved, key=lambda pair: abs(pair[0]))
        return value + by

    def _total(self, one: int) -> float:
        return mean([seen.total for seen in self._rows[one].values()])

    def _at(self, one: int) -> float:
        assert self.target is not None
        return _level(self.target.kind, self._value(one, self.target.kind))

    def _missing(self, one: int) -> float:
        """Decibels by which a try is below what is sought."""
        assert self.target is not None
        return self.target.sought - self._at(one)

    def _met(self, one: int) -> bool:
        assert self.target is not None
        return abs(self._missing(one)) <= _NEAR[self.target.kind]

    def _enough(self, one: int) -> bool:
        assert self.target is not None
        return self._missing(one) <= _NEAR[self.target.kind]

    def _too_dear(self, one: int) -> bool:
        """Whether a try has too few decibels and takes the work of one that has enough, or, with
        another schedule, next to that: what is left to gain is not worth more videos."""

        def least(other: int) -> float:
            same = self.schedules[other] == self.schedules[one]
            return self._total(other) * (1 if same else 1 - _WORTHWHILE)

        return not self._enough(one) and any(
            self._enough(other) and least(other) <= self._total(one)
            for other in range(len(self.tried))
        )

    def _pays(self, number: float, schedule: int) -> bool:
        """Whether a number with a cheaper schedule can be worth more videos.

        Not where it takes next to the work of a try that has enough with another schedule, if work
        grows with the number as it did with the schedule that was tried first.
        """
        enough = [
            self._total(one)
            for one, other in enumerate(self.schedules)
            if other != schedule and self._enough(one)
        ]
        first = self._tries_with(0)[-2:]
        if not enough or self.tried[first[0]] == self.tried[first[-1]]:
            return True
        (low, less), (high, more) = ((self.tried[one], self._total(one)) for one in first)
        last = self._tries_with(schedule)[-1]
        grown = (more - less) / (high - low) * (number - self.tried[last])
        return self._total(last) + grown < (1 - _WORTHWHILE) * min(enough)

    def _tries_with(self, schedule: int) -> list[int]:
        return [one for one, with_ in enumerate(self.schedules) if with_ == schedule]

    def _next(self, dial: Dial, tries: Sequence[int]) -> float:
        """The next place on the dial's scale, by tries with the same schedule."""
        assert self.target is not None
        missing = {dial.place(self.tried[one]): self._missing(one) for one in tries}
        last = dial.place(self.tried[tries[-1]])
        below = min((place for place in missing if missing[place] > 0), key=missing.__getitem__,
                    default=None)  # fmt: skip
        above = max((place for place in missing if missing[place] <= 0), key=missing.__getitem__,
                    default=None)  # fmt: skip
        if below is not None and above is not None:
            share = missing[below] / (missing[below] - missing[above])
            return below + share * (above - below)
        # more work costs about an eighth of the speed, in decibels, that it gains in quality.
        slope = dial.gain if self.target.kind != "speed" else -dial.gain / 8
        if len(tries) > 1:
            before = dial.place(self.tried[tries[-2]])
            along = (missing[before] - missing[last]) / (last - before)
            slope = along if along * slope > 0 else slope
        step = missing[last] / slope
        return last + min(max(step, -_REACH), _REACH)

    # ---- what is known, for a run that is interrupted ----

    def state(self) -> dict[str, Tensor]:
        """Everything."""
        names = sorted(self._dense)
        rows = torch.full((len(self._rows), len(names), 4), torch.nan, dtype=torch.float64)
        for number, row in enumerate(self._rows):
            for prompt, seen in row.items():
                values = (seen.log_error, seen.ssim, seen.total, seen.seconds)
                rows[number, names.index(prompt)] = torch.tensor(values, dtype=torch.float64)
        seconds = [self._dense_seconds[prompt] for prompt in names]
        return {
            **{f"dense.{prompt}": self._dense[prompt] for prompt in names},
            "dense_seconds": torch.tensor(seconds, dtype=torch.float64),
            "tried": torch.tensor(self.tried, dtype=torch.float64),
            "schedules": torch.tensor(self.schedules, dtype=torch.int64),
            "looks": torch.tensor(self.looks, dtype=torch.int64).view(-1, 3),
            "rows": rows,
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """All of a ``state()``."""
        names = sorted(
            int(name.removeprefix("dense.")) for name in state if name.startswith("dense.")
        )
        self._dense = {prompt: state[f"dense.{prompt}"] for prompt in names}
        seconds = state["dense_seconds"].tolist()
        self._dense_seconds = dict(zip(names, seconds, strict=True))
        self.tried = state["tried"].tolist()
        self.schedules = state["schedules"].tolist()
        self.looks = [(attempt, first, end) for attempt, first, end in state["looks"].tolist()]
        self._rows = [
            {
                prompt: _Seen(*values)
                for prompt, values in zip(names, row, strict=True)
                if not math.isnan(values[0])
            }
            for row in state["rows"].tolist()
        ]


def psnr_of(log_error: float) -> float:
    """Decibels of the logarithm of a mean squared error on 8 bits."""
    return 20 * math.log10(255) - 10 / math.log(10) * log_error


def mean(values: Sequence[float]) -> float:
    """Their mean, exactly rounded."""
    return math.fsum(values) / len(values)


def _level(kind: Kind, value: float) -> float:
    if kind == "psnr":
        return value
    if kind == "ssim":
        return -10 * math.log10(max(1 - value, 1e-6))
    return 10 * math.log10(value)
