"""The small model's card: what ``vidsparse.json`` and ``README.md`` of its folder say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5EncoderModel

from . import text, world
from .vae import CLIP_SIZES

NAME = "shapes"
LICENSE = "Apache-2.0"
DESCRIPTION = (
    "A small demonstration model, trained from nothing on procedurally drawn clips: it draws "
    "simple coloured shapes that move, knows the words listed here and nothing else."
)

# of the settings that commands take where a user gives none
FRAMES = 33
SIZE = "256x256"
STEPS = 20
GUIDANCE = 4.0
FPS = 16
# several dB more accurate than the Hilbert curve at equal work, on this model (BENCHMARKS.md).
ORDER = "rowmajor"
# from the "defaults" rows of the quality study. The first and the last layer keep two thirds of the
# pairs at this top_p, which costs more than it saves; dense, they give back half a decibel.
DENSE_LAYERS = DENSE_LAST_LAYERS = 1
REUSE = 2
METHOD_OPTIONS = {"fg-attn": {"top_p": 0.8}}

EXAMPLE_PROMPTS: tuple[str, ...] = (
    "a large red ball that moves right on a plain navy background",
    "a medium yellow star that spins on a dotted teal background",
    "a large orange heart that bounces on a plain gray background",
    "a small cyan ring that orbits on a striped brown background",
    "a medium purple square that grows on a checkered cream background",
    "a large green triangle that moves up and a small white ball that moves left "
    "on a gradient black background",
)

MEASURED = "measured.json"
"""Beside the checkpoints, written by hand from what the two checks print.

Keys: hardware; minutes; vae_psnr, by ``33x256x256`` and ``49x384x384``; fidelity, by ``256x256``
and ``384x384``.
"""

_NOT_MEASURED = "not measured"

_README = Template("""\
---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---
# $name

A **small demonstration model** for vidsparse: text to video, $name that move over quiet
backgrounds. It exists so that every method and command has real attention maps to work on, on any
machine and without a download. It is no substitute for a video model: it knows $words words and
one kind of picture.

It is a stock diffusers pipeline and needs no code of its own:

```python
from diffusers import WanPipeline

pipe = WanPipeline.from_pretrained("path/to/$name")
frames = pipe(
    "$prompt",
    height=$height,
    width=$width,
    num_frames=$frames,
    num_inference_steps=$steps,
    guidance_scale=$guidance,
).frames[0]
```

Prompts have the form

> $prompt_form

and `vidsparse.json` lists every word. A word outside that list is read as "unknown".

## Parts

- Transformer, $transformer_parameters M parameters: `WanTransformer3DModel`, $layers layers, $heads
  heads of $head_dim, feed-forward $ffn, patch $patch; stored in bfloat16.
- Text encoder, $encoder_parameters M: `UMT5EncoderModel`, $text_layers layers of width $text_width,
  trained jointly with the transformer; bfloat16.
- Autoencoder, $vae_parameters M: `AutoencoderKLWan`, residual, patch $vae_patch, $channels
  channels, compression 8x8 in space and 4 in time; float16.
- Tokenizer: one token a word, lower case, punctuation dropped.
- Scheduler: `UniPCMultistepScheduler`, flow prediction, shift $shift.

$sizes

## Data

None but what the training code draws while it runs (`apps/small_model/world.py`): $shapes shapes
in $colours colours and $extents sizes, $motions motions, $backgrounds background colours in
$textures textures, one or two objects a clip, with captions in varied words. 24 combinations of
colour, shape and direction are never drawn, and are the test below.

## Training

```
python -m vidsparse.apps.small_model.train --out runs/$name
```

trains every part from random weights and writes this folder. Hardware and wall clock of these
weights: $training.

## Measured

Reconstruction by the autoencoder in fp32, mean PSNR over held-out clips (bar: 30 dB), printed by

```
python -m vidsparse.apps.small_model.vae_psnr --model pipelines/models/$name --device cuda
```

| clips | PSNR, dB |
|---|---|
$psnr_rows

Fidelity: the 24 held-out prompts with one object in straight motion, generated dense. A script
reads the object's colour and direction from the frames; counted are the clips where both are right
(bar: 22), printed by

```
$fidelity_commands
```

| size | colour and direction both right |
|---|---|
$fidelity_rows

## Limits

- It draws its own world only: no other subjects, no styles, no camera motion.
- It is made for $trained_sizes.
  Other sizes and lengths run; how well was not measured.
- It has seen one or two objects in a clip, never more, and never two of one shape or one colour.
- Its attention maps come from a world of flat backgrounds and few objects. How much quality a
  sparse method costs here says little about how much it costs on a large model.

## License

Apache-2.0, see `LICENSE`.
""")


def read_measured(checkpoints: Path) -> dict[str, Any]:
    """The measurements beside ``checkpoints``; empty where there are none yet."""
    path = checkpoints / MEASURED
    if not path.is_file():
        return {}
    measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return measured


def settings() -> dict[str, Any]:
    """What ``vidsparse.json`` holds."""
    return {
        "name": NAME,
        "description": DESCRIPTION,
        "license": LICENSE,
        "frames": FRAMES,
        "size": SIZE,
        "steps": STEPS,
        "guidance": GUIDANCE,
        "fps": FPS,
        "order": ORDER,
        "dense_layers": DENSE_LAYERS,
        "dense_last_layers": DENSE_LAST_LAYERS,
        "reuse": REUSE,
        "method_options": METHOD_OPTIONS,
        "prompt_form": text.PROMPT_FORM,
        "vocabulary": list(text.VOCABULARY),
        "example_prompts": list(EXAMPLE_PROMPTS),
    }


def license_text() -> str | None:
    """The text of the licence, from the metadata of vidsparse; None where it is not installed."""
    # an egg-info folder in the working directory, which hides the real one, holds no licence
    found = (d.read_text("licenses/LICENSE") for d in metadata.distributions(name="vidsparse"))
    return next((licence for licence in found if licence), None)


def readme(
    transformer: WanTransformer3DModel,
    encoder: UMT5EncoderModel,
    vae: AutoencoderKLWan,
    *,
    shift: float,
    measured: Mapping[str, Any],
) -> str:
    """The model card, in Markdown."""
    width, height = SIZE.split("x")
    sizes = [f"{size.frames}x{size.side}x{size.side}" for size in CLIP_SIZES]
    squares = [f"{size.side}x{size.side}" for size in CLIP_SIZES]
    tokens = [
        f"{size.frames} frames of {size.side}x{size.side} are "
        f"{_tokens(transformer, vae, size.frames, size.side):,} tokens"
        for size in CLIP_SIZES
    ]
    psnr, fidelity = measured.get("vae_psnr", {}), measured.get("fidelity", {})
    training = _NOT_MEASURED
    if {"hardware", "minutes"} <= measured.keys():
        training = f"{measured['hardware']}, {measured['minutes']} minutes"
    command = f"python -m vidsparse.apps.small_model.fidelity --model pipelines/models/{NAME}"
    return _README.substitute(
        name=NAME,
        words=len(text.VOCABULARY),
        prompt=EXAMPLE_PROMPTS[0],
        prompt_form=text.PROMPT_FORM,
        width=width,
        height=height,
        frames=FRAMES,
        steps=STEPS,
        guidance=GUIDANCE,
        layers=transformer.config.num_layers,
        heads=transformer.config.num_attention_heads,
        head_dim=transformer.config.attention_head_dim,
        ffn=transformer.config.ffn_dim,
        patch="x".join(map(str, transformer.config.patch_size)),
        text_layers=encoder.config.num_layers,
        text_width=encoder.config.d_model,
        vae_patch=vae.config.patch_size,
        channels=vae.config.z_dim,
        transformer_parameters=_millions(transformer),
        encoder_parameters=_millions(encoder),
        vae_parameters=_millions(vae),
        shift=f"{shift:g}",
        sizes=f"{' and '.join(tokens)}.",
        shapes=len(world.SHAPES),
        colours=len(world.COLOURS),
        extents=len(world.SIZES),
        motions=len(world.MOTIONS),
        backgrounds=len(world.BACKGROUNDS),
        textures=len(world.TEXTURES),
        training=training,
        psnr_rows="\n".join(f"| {size} | {psnr.get(size, _NOT_MEASURED)} |" for size in sizes),
        fidelity_commands="\n".join(
            f"{command} --device cuda --batch 24 --size {square} --frames {size.frames}"
            for square, size in zip(squares, CLIP_SIZES, strict=True)
        ),
        fidelity_rows="\n".join(
            f"| {square}, {size.frames} frames | {fidelity.get(square, _NOT_MEASURED)} |"
            for square, size in zip(squares, CLIP_SIZES, strict=True)
        ),
        trained_sizes=" and ".join(f"{s.frames} frames of {s.side}x{s.side}" for s in CLIP_SIZES),
    )


def _millions(model: Any) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}"


def _tokens(
    transformer: WanTransformer3DModel, vae: AutoencoderKLWan, frames: int, side: int
) -> int:
    time, height, width = transformer.config.patch_size
    space = vae.config.scale_factor_spatial
    latent_frames = (frames - 1) // vae.config.scale_factor_temporal + 1
    return int(latent_frames // time * (side // space // height) * (side // space // width))
