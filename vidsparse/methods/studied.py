"""What a method declares of itself so that studies and benchmarks find it without naming it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Settings = Mapping[str, Any]
"""Options of a method that differ from their defaults."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A number of a method that moves its density.

    ``low`` gives the least density and ``high`` the most, whichever is the larger number; places
    between them are spaced evenly, or evenly in the logarithm.
    """

    name: str
    low: float
    high: float
    logarithmic: bool = False
    whole: bool = False

    def at(self, share: float) -> float:
        """The number at ``share`` of the way from ``low`` to ``high``, four digits of it."""
        if self.logarithmic:
            number = self.low * (self.high / self.low) ** share
        else:
            number = self.low + share * (self.high - self.low)
        return round(number) if self.whole else float(f"{number:.4g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """A table of a method's paper: settings whose videos are measured beside each other.

    Args:
        name: of the study and of its picture, unlike any other method's.
        lines: the settings by the name of the line that their points make in the picture.
        columns: options that the table shows.
        orders: token orders that every setting is measured in; None is the model's own.
        knobs: ways to select that are set to one and the same density in turn, each a line.
        sparsity: also show the share of all products, q·k and p·v, that is not made.
    """

    name: str
    lines: Mapping[str, tuple[Settings, ...]]
    columns: tuple[str, ...] = ()
    orders: tuple[str | None, ...] = (None,)
    knobs: tuple[Knob, ...] = ()
    sparsity: bool = False

    def line_of(self, options: Settings) -> str:
        """The name of the line that a row with these options is a point of; empty for none."""
        for name, settings in self.lines.items():
            if any(_holds(options, one) for one in settings):
                order = f"{options['order']} order" if len(self.orders) > 1 else ""
                knob = next((k.name for k in self.knobs if options.get(k.name) is not None), "")
                return " ".join(word for word in (name, order, knob) if word)
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallAblation:
    """A table of a method's paper that is of single attention calls, not of videos.

    Args:
        name: of the table and of its picture, unlike any other's.
        measured: ``difference``, what each of two settings errs against dense attention, in every
            token order; ``recall``, the share of what full precision selects that the method
            selects too; ``skipped``, products with V that a gate leaves out against the share that
            the preset predicts; ``mask``, the mask's time against dense attention's, over the
            length of the sequence.
        settings: by the name of their case, for ``difference`` (two of them) and ``recall``.
        telling: for ``difference``, heads are told apart whose L1 differs by more than this.
        option: for ``skipped``, the option whose values the preset has predictions for.
    """

    name: str
    measured: Literal["difference", "recall", "skipped", "mask"]
    settings: Mapping[str, Settings] = field(default_factory=dict)
    telling: float = 0.0
    option: str = ""


def _holds(options: Settings, some: Settings) -> bool:
    return all(options.get(name, ...) == value for name, value in some.items())
