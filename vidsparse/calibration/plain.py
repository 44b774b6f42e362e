"""Methods with one number for all heads: whole videos find it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vidsparse.calibration.base import Calibrator, Pass
from vidsparse.calibration.target import Dial
from vidsparse.errors import OptionError
from vidsparse.methods import FgAttn, SolAttn


@dataclass(kw_only=True)
class PlainCalibrator(Calibrator):
    """Moves one number of the method until whole videos are as wanted; calls are not looked at.

    Raises:
        OptionError: no target, which leaves nothing to find.
    """

    samples: ClassVar[int] = 8
    needs_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search.target is None:
            raise OptionError(
                f"{self.method.name} is calibrated for a target and has none. "
                "Hint: --target-psnr 32."
            )

    @property
    def looks(self) -> Sequence[Pass]:
        """The dense videos."""
        return [Pass(title="dense")]

    def found(self, number: float | None) -> dict[str, Tensor]:
        """One number for all heads, ``[P, L, H]``."""
        dial = self.dial
        return {dial.name: self.extent.table(fill=dial.start if number is None else number)}


@dataclass(kw_only=True)
class FgAttnCalibrator(PlainCalibrator):
    """Finds ``top_p``.

    Raises:
        OptionError: no target, or a method that selects by ``topk``.
    """

    calibrates = FgAttn

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.method, FgAttn)
        if self.method.top_p is None:
            raise OptionError(
                "calibration finds top_p, and with topk fg-attn selects without it. "
                "Hint: leave --topk out."
            )

    @property
    def dial(self) -> Dial:
        """The share of pooled attention that is kept."""
        assert isinstance(self.method, FgAttn)
        assert self.method.top_p is not None
        start = self.method.top_p
        return Dial(name="top_p", start=start, least=0.05, most=0.999, scale="rest", gain=6.0)


@dataclass(kw_only=True)
class SolAttnCalibrator(PlainCalibrator):
    """Finds ``tau``.

    Raises:
        OptionError: no target.
    """

    calibrates = SolAttn

    @property
    def dial(self) -> Dial:
        """Deviations above a row's mean score from which on blocks are exact."""
        assert isinstance(self.method, SolAttn)
        start = self.method.tau
        return Dial(name="tau", start=start, least=-4.0, most=4.0, scale="plain", gain=-4.0)
