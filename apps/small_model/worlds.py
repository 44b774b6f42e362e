"""The worlds that small models are trained on: what their training and their checks ask of one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from . import reading, text, world
from .drawing import COLOURS, SHAPES, TEXTURES
from .scenes import captions
from .scenes import reading as scenes_reading
from .scenes import render as scenes_render
from .scenes import world as scenes_world
from .verdicts import Verdict
from .words import Vocabulary


class Render(Protocol):
    """Films scenes."""

    def __call__(
        self,
        scenes: Sequence[Any],
        frames: int,
        height: int,
        width: int,
        device: torch.device | str = ...,
        course: int | None = None,
    ) -> torch.Tensor:
        """Clips [B, 3, T, H, W] in [-1, 1], of a course of ``frames`` unless it takes more."""
        ...


@dataclass(frozen=True, kw_only=True)
class World:
    """A world of captioned clips. Its scenes are values that only its own functions look into.

    Args:
        sample: draws a training scene.
        held_out: the 24 test scenes.
        kind: of a scene, in words; scenes of one kind are about as hard to make.
        render: films scenes: frames, height, width, device, and how many frames the whole course
            takes; clips [B, 3, T, H, W] in [-1, 1].
        centres: positions [bodies, T, 2] of a scene's bodies as shares of a square frame.
        caption: describes a scene, canonically without chance and in varied words with it.
        vocabulary: every word that captions hold.
        prompt_form: what a prompt looks like.
        example_prompts: some to try.
        judge: reads one clip [T, H, W, 3] of RGB bytes for each held-out scene, in their order.
        bar: how many of them must be right.
        subject: what a video shows, in a few words.
        source: the file or folder that draws it.
        contents: what there is in it, as the card says.
        test: what is held out and read, as the card says.
        limits: what it does not hold, a sentence each.
        bodies: the kind of body seen at each pixel of scenes' clips [B, 3, T, H, W], 0 for none:
            uint8 [B, T, H, W]; None where training does not ask.
        kinds: how many kinds of bodies there are, none counted in.
    """

    sample: Callable[[random.Random], Any]
    held_out: Callable[[], tuple[Any, ...]]
    kind: Callable[[Any], tuple[str, ...]]
    render: Render
    centres: Callable[[Any, int], np.ndarray]
    caption: Callable[[Any, random.Random | None], str]
    vocabulary: Vocabulary
    prompt_form: str
    example_prompts: tuple[str, ...]
    judge: Callable[[Sequence[np.ndarray]], list[Verdict]]
    bar: int
    subject: str
    source: str
    contents: str
    test: str
    limits: tuple[str, ...]
    bodies: Callable[[Sequence[Any], torch.Tensor], torch.Tensor] | None = None
    kinds: int = 1

    def training_ids(self, scene: Any, rng: random.Random) -> list[int]:
        """Padded ids of a caption for training; half of the captions are canonical."""
        caption = self.caption(scene, None if rng.random() < 0.5 else rng)
        return self.vocabulary.training_ids(caption, rng)


SHAPES_WORLD: Final = World(
    sample=world.sample_scene,
    held_out=world.held_out_scenes,
    kind=world.kind,
    render=world.render,
    centres=world.centres,
    caption=text.caption,
    vocabulary=text.VOCABULARY,
    prompt_form=text.PROMPT_FORM,
    example_prompts=text.EXAMPLE_PROMPTS,
    judge=reading.judge,
    bar=22,
    subject="shapes that move over quiet backgrounds",
    source="apps/small_model/world.py",
    contents=f"{len(SHAPES)} shapes\nin {len(COLOURS)} colours and {len(world.SIZES)} sizes, "
    f"{len(world.MOTIONS)} motions, {len(world.BACKGROUNDS)} background colours in\n"
    f"{len(TEXTURES)} textures, one or two objects a clip, with captions in varied words. 24 "
    "combinations of\ncolour, shape and direction are never drawn, and are the test below.",
    test="the 24 held-out prompts with one object in straight motion, generated dense. A script\n"
    "reads the object's colour and direction from the frames; counted are the clips where both "
    "are right",
    limits=(
        "It draws its own world only: no other subjects, no styles, no camera motion.",
        "It has seen one or two objects in a clip, never more, and never two of one shape or one "
        "colour.",
        "Its attention maps come from a world of flat backgrounds and few objects. How much "
        "quality a\n  sparse method costs here says little about how much it costs on a large "
        "model.",
    ),
)
SCENES_WORLD: Final = World(
    sample=scenes_world.sample_scene,
    held_out=scenes_world.held_out_scenes,
    kind=scenes_world.kind,
    render=scenes_render.render,
    centres=scenes_world.centres,
    caption=captions.caption,
    vocabulary=captions.VOCABULARY,
    prompt_form=captions.PROMPT_FORM,
    example_prompts=captions.EXAMPLE_PROMPTS,
    judge=scenes_reading.judge,
    bar=20,
    subject="bodies that cover each other on land\nseen from above, under a moving camera",
    source="apps/small_model/scenes/",
    contents=f"{len(SHAPES)}\nshapes in {len(scenes_world.COLOURS)} colours, "
    f"{len(scenes_world.PATTERNS)} patterns and {len(scenes_world.SIZES)} sizes, "
    f"{len(scenes_world.MOTIONS)} motions, {len(scenes_world.GROUNDS)} kinds of ground with "
    f"detail at many\nscales, {len(scenes_world.CAMERAS)} camera motions, "
    f"{len(scenes_world.LIGHTS)} courses of light, shadows, two or three bodies a clip, with "
    "captions\nin varied words. 24 combinations of colour, shape and camera are never drawn, and "
    "are the test below.",
    test="the 24 held-out prompts with two bodies, generated dense. A script reads the bodies' "
    "colours\nand shapes and the camera's motion from the frames; counted are the clips where "
    "all are right",
    limits=(
        "It draws its own world only: no other subjects, no styles, no horizon.",
        "It has seen two or three bodies in a clip, never more, and never two of one shape or one "
        "colour.",
        "Its ground lies still: water and trees do not move.",
    ),
    bodies=scenes_reading.bodies,
    kinds=scenes_reading.KINDS,
)
