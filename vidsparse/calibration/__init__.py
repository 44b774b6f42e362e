"""Calibration: finding a method's numbers from attention calls of dense runs, or whole videos.

A ``Calibrator`` is shown q, k and v of each call as it happens and keeps a few numbers of it, never
the tensors; or it names methods to make videos with, and is shown these, until they are as good or
as fast as was asked. ``CALIBRATORS`` has one for each method that can be calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from vidsparse.calibration.base import Calibrator, Extent, Pass
from vidsparse.calibration.bsfa import BsfaCalibrator
from vidsparse.calibration.foresight import ForesightCalibrator
from vidsparse.calibration.plain import FgAttnCalibrator, SolAttnCalibrator
from vidsparse.calibration.sale import SaleCalibrator
from vidsparse.calibration.spargeattn import SpargeCalibrator
from vidsparse.calibration.xattention import XAttentionCalibrator

CALIBRATORS: Final[Mapping[str, type[Calibrator]]] = MappingProxyType(
    {
        cls.calibrates.name: cls
        for cls in (
            FgAttnCalibrator,
            SpargeCalibrator,
            XAttentionCalibrator,
            SaleCalibrator,
            BsfaCalibrator,
            SolAttnCalibrator,
            ForesightCalibrator,
        )
    }
)
"""Calibrators by the name of their method."""

__all__ = [
    "CALIBRATORS",
    "BsfaCalibrator",
    "Calibrator",
    "Extent",
    "FgAttnCalibrator",
    "ForesightCalibrator",
    "Pass",
    "SaleCalibrator",
    "SolAttnCalibrator",
    "SpargeCalibrator",
    "XAttentionCalibrator",
]
