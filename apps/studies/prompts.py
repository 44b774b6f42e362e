"""The prompts that studies measure on, and those that they calibrate with."""

from __future__ import annotations

import itertools
import random
from typing import Final

# scenes that presets are calibrated on, and the noise they start from: not the study's own.
CALIBRATION_SEED: Final = 1000


def held_out_prompts() -> tuple[str, ...]:
    """The 24 prompts that the bundled model's training left out."""
    from vidsparse.apps.small_model.text import caption
    from vidsparse.apps.small_model.world import held_out_scenes

    return tuple(caption(scene) for scene in held_out_scenes())


def calibration_prompts(count: int) -> tuple[str, ...]:
    """Prompts to calibrate with: one body, as in the held-out scenes, and none of those."""
    from vidsparse.apps.small_model.text import caption
    from vidsparse.apps.small_model.world import sample_scene

    rng = random.Random(CALIBRATION_SEED)
    scenes = (sample_scene(rng) for _ in itertools.count())
    return tuple(
        caption(one)
        for one in itertools.islice((scene for scene in scenes if len(scene.bodies) == 1), count)
    )
