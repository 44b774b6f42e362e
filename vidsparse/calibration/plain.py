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
    """Moves one number of the method until whole videos are as wanted; it looks at no calls.

    Raises:
        OptionError: no target was given, without which there is nothing to find.
    """

    samples: ClassVar[int] = 8
    needs_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search.target is None:
            raise OptionError(
                f"calibrating {self.method.name} needs a target. Hint: --target-psnr 32."
            )

    @property
    def looks(self) -> Sequence[Pass]:
        """One pass, which makes the dense videos."""
        return [Pass(title="dense")]

    def found(self, number: float | None) -> dict[str, Tensor]:
        """One number for all heads, ``[P, L, H]``."""
        dial = self.dial
        return {dial.name: self.extent.table(fill=dial.start if number is None else number)}


@dataclass(kw_only=True)
class FgAttnCalibrator(PlainCalibrator):
    """Finds FG-Attn's ``top_p``, one for all heads.

    Raises:
        OptionError: no target was given, or the method selects by ``topk``.
    """

    calibrates = FgAttn

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.method, FgAttn)
        if self.method.top_p is None:
            raise OptionError(
                "calibration finds top_p, and fg-attn does not use top_p with topk. "
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
    """Finds Sol-Attn's ``tau``, one for all heads.

    Raises:
        OptionError: no target was given.
    """

    calibrates = SolAttn

    @property
    def dial(self) -> Dial:
        """Tau: a block is exact if its score is so many deviations above its row's mean."""
        assert isinstance(self.method, SolAttn)
        start = self.method.tau
        return Dial(name="tau", start=start, least=-4.0, most=4.0, scale="plain", gain=-4.0)
