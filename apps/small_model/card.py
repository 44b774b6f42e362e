"""The small model's card: what ``vidsparse.json`` and ``README.md`` of its folder say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

from vidsparse.errors import listed
from vidsparse.markdown import markdown_table

from .model import LICENSE, SmallModel

MEASURED = "measured.json"
"""Beside the checkpoints, written by hand from what the two checks print.

Keys: hardware and minutes, or training, a sentence, where several trainings made the weights;
vae_psnr, by ``33x256x256`` and other sizes; fidelity, by ``256x256`` and others.
"""

DEFAULT = "shapes"
"""The model that the training command makes where none is named."""

_NOT_MEASURED = "not measured"

_README = Template("""\
---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---
# $name

A **small demonstration model** for vidsparse: text to video, $subject.
It exists so that every method and command has real attention maps to work on, on any machine and
without a download. It is no substitute for a video model: it knows $words words and one kind of
picture.

It is a stock diffusers pipeline and needs no code of its own:

```python
from diffusers import $pipeline

pipe = $pipeline.from_pretrained("path/to/$name")
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

$parts

$sizes

## Data

None but what the training code draws while it runs (`$source`): $contents

## Training

```
python -m vidsparse.apps.small_model.train$chosen --out runs/$name
```

trains every part from random weights and writes this folder. Hardware and wall clock of these
weights: $training.

## Measured

Reconstruction by the autoencoder in fp32, mean PSNR over held-out clips (bar: 30 dB), printed by

```
python -m vidsparse.apps.small_model.vae_psnr --model pipelines/models/$name --device cuda
```

$psnr_table

Fidelity: $test
(bar: $bar), printed by

```
$fidelity_commands
```

$fidelity_table

## Limits

- It is made for $trained_sizes.
  Other sizes and lengths run; how well was not measured.$limits

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


def settings(model: SmallModel) -> dict[str, Any]:
    """What ``vidsparse.json`` holds."""
    card = model.card
    on_cpu = {}
    if card.on_cpu is not None:
        frames, size = card.on_cpu
        on_cpu = {"on_cpu": {"frames": frames, "size": size}}
    return {
        "name": model.name,
        "description": card.description,
        "license": LICENSE,
        "frames": card.frames,
        "size": card.size,
        "steps": card.steps,
        "guidance": card.guidance,
        "fps": card.fps,
        **on_cpu,
        "order": card.order,
        "dense_layers": card.dense_layers,
        "dense_last_layers": card.dense_last_layers,
        "reuse": card.reuse,
        "method": card.method,
        "method_options": dict(card.method_options),
        "schedules": dict(card.schedules),
        "speeds": dict(card.speeds),
        "prompt_form": model.world.prompt_form,
        "vocabulary": list(model.world.vocabulary.words),
        "example_prompts": list(model.world.example_prompts),
    }


def license_text() -> str | None:
    """The text of the licence, from the metadata of vidsparse; None where it is not installed."""
    # an egg-info folder in the working directory, which hides the real one, holds no licence
    found = (d.read_text("licenses/LICENSE") for d in metadata.distributions(name="vidsparse"))
    return next((licence for licence in found if licence), None)


def _together(tokens: int) -> int:
    """How many videos of so many tokens the fidelity check makes at a time."""
    return 24 if tokens < 10_000 else 4


def readme(
    model: SmallModel,
    transformer: Any,
    encoder: Any,
    vae: Any,
    *,
    measured: Mapping[str, Any],
) -> str:
    """The model card, in Markdown."""
    card, world, sizes = model.card, model.world, model.recipe.sizes
    width, height = card.size.split("x")
    squares = [f"{size.side}x{size.side}" for size in sizes]
    counts = [model.tokens(transformer, vae, size) for size in sizes]
    tokens = [
        f"{size.frames} frames of {square} are {count:,} tokens"
        for size, square, count in zip(sizes, squares, counts, strict=True)
    ]
    psnr, fidelity = measured.get("vae_psnr", {}), measured.get("fidelity", {})
    training = measured.get("training", _NOT_MEASURED)
    if {"hardware", "minutes"} <= measured.keys():
        training = f"{measured['hardware']}, {measured['minutes']} minutes"
    command = f"python -m vidsparse.apps.small_model.fidelity --model pipelines/models/{model.name}"
    return _README.substitute(
        name=model.name,
        chosen="" if model.name == DEFAULT else f" --model {model.name}",
        pipeline=model.pipeline_class.__name__,
        words=len(world.vocabulary.words),
        prompt=world.example_prompts[0],
        prompt_form=world.prompt_form,
        width=width,
        height=height,
        frames=card.frames,
        steps=card.steps,
        guidance=card.guidance,
        parts=model.parts(transformer, encoder, vae),
        sizes=f"{listed(tokens)}.",
        limits="".join(f"\n- {limit}" for limit in (*world.limits, *card.limits)),
        subject=world.subject,
        source=world.source,
        contents=world.contents,
        test=world.test,
        bar=world.bar,
        training=training,
        psnr_table=markdown_table(
            ("clips", "PSNR, dB"),
            ((str(size), str(psnr.get(str(size), _NOT_MEASURED))) for size in sizes),
        ),
        fidelity_commands="\n".join(
            f"{command} --device cuda --batch {_together(count)} --size {square} "
            f"--frames {size.frames}"
            for size, square, count in zip(sizes, squares, counts, strict=True)
        ),
        fidelity_table=markdown_table(
            ("size", "all right"),
            (
                (f"{square}, {size.frames} frames", str(fidelity.get(square, _NOT_MEASURED)))
                for size, square in zip(sizes, squares, strict=True)
            ),
        ),
        trained_sizes=listed(
            [f"{size.frames} frames of {size.side}x{size.side}" for size in sizes]
        ),
    )
