"""Calibration: finding a method's numbers from the attention calls of dense denoising runs.

A ``Calibrator`` is shown q, k and v of each call as it happens and keeps a few numbers of it, never
the tensors. ``CALIBRATORS`` has one for each method that can be calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from vidsparse.calibration.base import Calibrator, Extent, Pass
from vidsparse.calibration.bsfa import BsfaCalibrator
from vidsparse.calibration.sale import SaleCalibrator
from vidsparse.calibration.spargeattn import SpargeCalibrator
from vidsparse.calibration.xattention import XAttentionCalibrator

CALIBRATORS: Final[Mapping[str, type[Calibrator]]] = MappingProxyType(
    {
        cls.calibrates.name: cls
        for cls in (SpargeCalibrator, XAttentionCalibrator, SaleCalibrator, BsfaCalibrator)
    }
)
"""Calibrators by the name of their method."""

__all__ = [
    "CALIBRATORS",
    "BsfaCalibrator",
    "Calibrator",
    "Extent",
    "Pass",
    "SaleCalibrator",
    "SpargeCalibrator",
    "XAttentionCalibrator",
]
