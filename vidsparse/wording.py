"""How measures are written for people: as many digits as tell something, and a dash for none."""

from __future__ import annotations

from vidsparse.metrics import Sides, Spread, VideoQuality
from vidsparse.work import Work


def format_number(value: float | None, spec: str, unit: str = "", missing: str = "-") -> str:
    """A number with its unit, or a dash where there is none."""
    return missing if value is None else f"{value:{spec}}{unit}"


def format_share(value: float | None) -> str:
    """A share as a percentage."""
    return format_number(value, ".1%")


def format_total(work: Work | None) -> str:
    """The share of all pairs that a run computed, as a percentage."""
    return format_share(work.total if work else None)


def format_seconds(value: float | None) -> str:
    """Seconds, with enough digits to compare short runs."""
    return format_number(value, ".2f" if value is not None and value < 100 else ".0f", " s")


def format_psnr(quality: VideoQuality, unit: str = "") -> str:
    """A video's PSNR in dB, or the word that stands for a difference of nothing."""
    return "identical" if quality.identical else format_number(quality.psnr, ".2f", unit)


def format_sides(values: Sides) -> str:
    """A measure of both videos, each by itself."""
    dense, sparse = (format_number(value, ".4f") for value in values)
    return f"{dense} dense, {sparse} sparse"


def format_spread(value: Spread, spec: str, unit: str = "", identical: int = 0) -> str:
    """``mean ± std``, with the number of identical videos that the mean leaves out."""
    if value.mean is None:
        return "identical" if identical else "-"
    text = f"{value.mean:{spec}}"
    if value.std is not None:
        text += f" ± {value.std:{spec}}"
    text += unit
    return f"{text} ({identical} identical left out)" if identical else text
