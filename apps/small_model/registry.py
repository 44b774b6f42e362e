"""The small models there are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from .cogvideox import SHAPES_JOINT
from .model import SmallModel
from .wan import SHAPES
from .wan_scenes import SCENES

SMALL_MODELS: Final[Mapping[str, SmallModel]] = MappingProxyType(
    {model.name: model for model in (SHAPES, SHAPES_JOINT, SCENES)}
)
"""By the name of their folder. The product lists a model once its weights exist."""


def small_model_of(folder: Path) -> SmallModel:
    """The declaration that an exported ``folder`` was made from."""
    settings = json.loads((folder / "vidsparse.json").read_text(encoding="utf-8"))
    return SMALL_MODELS[settings["name"]]
