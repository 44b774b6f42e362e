"""What a calibrator is, and what it is told of the model."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vidsparse.errors import OptionError
from vidsparse.methods import Method, SparseMethod
from vidsparse.site import CallSite

Video = NDArray[np.uint8]
"""Frames ``[T, H, W, 3]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """What there is to calibrate.

    Args:
        parts: transformers of the pipeline.
        layers: attention layers of each.
        heads: heads of a layer.
        window: the steps that may be sparse.
    """

    parts: int
    layers: int
    heads: int
    window: range

    def table(self, *more: int, fill: float = 0.0) -> Tensor:
        """An fp32 table ``[P, L, H, *more]`` on the CPU."""
        return torch.full((self.parts, self.layers, self.heads, *more), fill)

    def spread(self, count: int) -> tuple[int, ...]:
        """``count`` steps of the window, each in the middle of an equal share of it."""
        steps = list(self.window)
        count = min(count, len(steps))
        return tuple(steps[(2 * i + 1) * len(steps) // (2 * count)] for i in range(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One look at every prompt: at calls of a dense run, or at finished videos.

    Args:
        title: what it looks for, in a few words.
        steps: the denoising steps whose calls it wants to see; none where it looks at videos.
        method: what the videos are made with.
        prompts: how many of the prompts it looks at, all by default.
    """

    title: str
    steps: tuple[int, ...] = ()
    method: Method | None = None
    prompts: int | None = None


@dataclass(kw_only=True)
class Calibrator(ABC):
    """Finds the numbers of ``method`` in one or more passes over the same prompts.

    A pass sees the calls or the videos of all prompts, then ``finish`` draws its conclusion, which
    the next pass may build on, and which may add passes. Everything it knows is in ``state()``, so
    that a killed run can go on.

    Fields that are settings carry their command line flag, as a method's options do.
    """

    calibrates: ClassVar[type[SparseMethod]]
    """The method whose numbers it finds."""

    samples: ClassVar[int]
    """Prompts that it takes by default, for papers' methods as many as the paper does."""

    bound: ClassVar[str | None] = None
    """The setting that bounds the relative L1 error of the method's output, where there is one."""

    method: SparseMethod
    extent: Extent

    @property
    @abstractmethod
    def passes(self) -> Sequence[Pass]:
        """The passes, in order."""

    def observe(self, number: int, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> None:
        """Take in one call in pass ``number``: ``[B, H, S, D]``, tokens in order, text last."""
        raise NotImplementedError(f"{type(self).__name__} looks at no calls")

    def watch(self, number: int, prompt: int, video: Video, total: float) -> None:
        """Take in one video in pass ``number``, of the prompt with that index.

        ``total`` is the share of the run's query-key pairs that was computed.
        """
        raise NotImplementedError(f"{type(self).__name__} looks at no videos")

    @abstractmethod
    def finish(self, number: int) -> None:
        """Conclude pass ``number``."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything known so far."""

    @abstractmethod
    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a ``state()``."""

    @abstractmethod
    def tables(self) -> dict[str, Tensor]:
        """The numbers, fp32 ``[P, L, H, ...]``, once all passes are finished."""

    @abstractmethod
    def measured(self) -> dict[str, Any]:
        """What was seen on the way, as JSON values."""

    @property
    def starts(self) -> tuple[int, ...]:
        """The steps at which a new group of steps starts, where tables differ by group."""
        return ()

    @property
    def schedule(self) -> bool:
        """Whether the numbers hold for the dense steps and layers they were found with alone."""
        return False

    def settings(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {f.name: getattr(self, f.name) for f in setting_fields(type(self))}


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
