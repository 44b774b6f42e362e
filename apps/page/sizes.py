"""Sizes and lengths of a video by name: what fills width, height and frames."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vidsparse.apps.page.host import Limits
    from vidsparse.pipelines.models import ModelRef

# what players call so, in landscape.
_NAMED = {"480p": (832, 480), "720p": (1280, 720)}

# of a model's own area: what is much larger than what it was made for, it makes badly.
MOST_AREA = 4


def sizes_of(model: ModelRef, limits: Limits) -> dict[str, tuple[int, int]]:
    """Width and height by what they are called, the model's own first; no two are the same."""
    own, unit = model.defaults, model.defaults.size_factor
    area, wide = own.width * own.height, max(own.width, own.height) / min(own.width, own.height)
    # a square model's portrait is that of a picture.
    tall = wide if wide > 1 else 4 / 3
    side, narrow = math.sqrt(area), math.sqrt(area / tall)
    asked = {
        "usual": (own.width, own.height),
        **{name: size for name, size in _NAMED.items() if math.prod(size) <= MOST_AREA * area},
        "square": (side, side),
        "landscape": (narrow * tall, narrow),
        "portrait": (narrow, narrow * tall),
    }
    found: dict[str, tuple[int, int]] = {}
    for name, (width, height) in asked.items():
        size = round(width / unit) * unit, round(height / unit) * unit
        if max(size) <= limits.side and size not in found.values():
            found[name] = size
    return found


def lengths_of(model: ModelRef, limits: Limits) -> dict[str, int]:
    """Frames by what their number is called, the model's own first."""
    own = model.defaults
    asked = {"usual": 1.0, "half": 0.5, "twice": 2.0}
    found: dict[str, int] = {}
    for name, share in asked.items():
        parts = round((own.frames - own.frame_rest) * share / own.frame_factor)
        frames = parts * own.frame_factor + own.frame_rest
        if parts > 0 and frames <= limits.frames:
            found[name] = frames
    return found


def size_choices(model: ModelRef, limits: Limits) -> list[tuple[str, str]]:
    """Sizes as a dropdown lists them, and as it fills them in."""
    return [
        (f"{name}, {width}x{height}", f"{width}x{height}")
        for name, (width, height) in sizes_of(model, limits).items()
    ]


def length_choices(model: ModelRef, limits: Limits) -> list[tuple[str, str]]:
    """Lengths as a dropdown lists them, and as it fills them in."""
    return [
        (f"{name}, {frames / model.defaults.fps:.1f} s", str(frames))
        for name, frames in lengths_of(model, limits).items()
    ]
