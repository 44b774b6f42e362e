"""The prompts that studies and benches measure on, and those that are calibrated with."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vidsparse.pipelines.cards import CARD

if TYPE_CHECKING:
    from vidsparse.pipelines.models import ModelRef

    from .worlds import World

# scenes that presets are calibrated on, and the noise they start from: not the study's own.
CALIBRATION_SEED: Final = 1000


def held_out_prompts(model: ModelRef) -> tuple[str, ...]:
    """The 24 prompts that a small model's training left out; of others, those of ``shapes``."""
    world = _world_of(model)
    return tuple(world.caption(scene, None) for scene in world.held_out())


def calibration_prompts(model: ModelRef, count: int) -> tuple[str, ...]:
    """Prompts to calibrate with: as many bodies as in the held-out scenes, and none of those."""
    world = _world_of(model)
    bodies = len(world.held_out()[0].bodies)
    rng = random.Random(CALIBRATION_SEED)
    scenes = (world.sample(rng) for _ in itertools.count())
    alike = (scene for scene in scenes if len(scene.bodies) == bodies)
    return tuple(world.caption(one, None) for one in itertools.islice(alike, count))


def _world_of(model: ModelRef) -> World:
    from .registry import SMALL_MODELS

    card = Path(model.location) / CARD
    # a hub id is no folder, and any folder may bring a card of its own.
    name = json.loads(card.read_text(encoding="utf-8")).get("name") if card.is_file() else ""
    return SMALL_MODELS.get(str(name), SMALL_MODELS["shapes"]).world
