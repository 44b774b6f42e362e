"""The prompts that studies and benches measure on, and those that are calibrated with."""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
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
    """Prompts to calibrate with: each of the kind of one held-out prompt in turn, none held out.

    A promise holds for prompts like those that it was made on. Motions, grounds and cameras are
    hard to a different degree, and a few prompts drawn blindly have other ones.
    """
    world = _world_of(model)
    kinds = itertools.cycle(world.kind(scene) for scene in world.held_out())
    rng = random.Random(CALIBRATION_SEED)
    waiting: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    drawn: set[str] = set()
    prompts = []
    for kind in itertools.islice(kinds, count):
        while not waiting[kind]:
            scene = world.sample(rng)
            prompt = world.caption(scene, None)
            if prompt not in drawn:
                drawn.add(prompt)
                waiting[world.kind(scene)].append(prompt)
        prompts.append(waiting[kind].pop(0))
    return tuple(prompts)


def _world_of(model: ModelRef) -> World:
    from .registry import SMALL_MODELS

    card = Path(model.location) / CARD
    # a hub id is no folder, and any folder may bring a card of its own.
    name = json.loads(card.read_text(encoding="utf-8")).get("name") if card.is_file() else ""
    return SMALL_MODELS.get(str(name), SMALL_MODELS["shapes"]).world
