"""``scenes``: Wan's layout at head dim 128, for clips of 33,600 tokens.

What a step costs, and why the recipe is as it is. A layer of width d = 384 and feed-forward f does
4 S^2 d operations of self-attention forwards and 2 S (6 d^2 + 2 d f) + 2,048 S d elsewhere;
training costs 3.5 times the attention and 3 times the rest. For S tokens, all eight layers:

    clip            S        a clip's training step     attention's share
    17x160x160      500      0.1 TFLOP                  0.1
    33x320x320      3,600    0.8 TFLOP                  0.7
    49x480x480      11,700   6.7 TFLOP                  0.9
    81x640x640      33,600   50 TFLOP                   0.95

So words, colours and courses are learnt where a clip costs next to nothing, and a long clip costs
as much as 40 of 33 frames: it comes last. Measured on one H200, with the batches below: 3,150,
377, 60 and 9.3 clips a second, 17 to 22 GB. ``train --benchmark`` prints what they are on the
machine at hand.
"""

from __future__ import annotations

from typing import Final

from .model import Card, ClipSize, Crop, LatentPlan, Recipe, StepPlan
from .wan import Wan
from .worlds import SCENES_WORLD

_TINY = ClipSize(frames=17, side=160)
_SHORT = ClipSize(frames=33, side=320)
_MIDDLE = ClipSize(frames=49, side=480)
_LONG = ClipSize(frames=81, side=640)
_SIZES = (_SHORT, _MIDDLE, _LONG)
# the first fifth of a long clip: outlines as large and as fast, at a fourteenth of the cost
_BEGINNING = ClipSize(frames=17, side=640)
_POOL_CLIPS = (384, 128, 64)
# as with shapes: short crops teach detail fast, long ones the steady state of the causal
# convolutions. Two shapes and no third, since each is compiled
_CROPS = (
    Crop(frames=9, side=160, batch=32, share=0.65),
    Crop(frames=33, side=288, batch=3, share=0.35),
)


class Scenes(Wan):
    """Eight layers of three heads of 128, and the autoencoder of ``shapes``.

    The feed-forward is narrow for the width, so that depth, which is what attention is studied
    on, fits 32 MB.
    """

    name = "scenes"
    world = SCENES_WORLD
    heads = 3
    head_dim = 128
    layers = 8
    feed_forward = 240
    text_width = 192
    text_feed_forward = 256
    # below the 16 MiB a file that some places where weights are kept allow
    shard_size = "15MB"
    # more tokens tell more of the same picture, so that the noise that hides it is stronger
    flow_shift = 5.0
    card = Card(
        description="A small demonstration model of long videos, trained from nothing on "
        "procedurally drawn clips: coloured bodies that cover each other on land seen from above, "
        "under a moving camera. It knows the words listed here and nothing else.",
        steps=25,
        guidance=3.0,
        frames=81,
        size="640x640",
        on_cpu=(33, "320x320"),
        # two dense ends of eight layers lose 7 dB at equal total work (docs/reasons.md).
        dense_layers=0,
        dense_last_layers=0,
        order="rowmajor",
        reuse=2,
        method_options={
            "foresight": {"share": 0.12, "fading": 0.3, "slope": 0.5},
            # each method's sparsest row of "seconds" with at least 31 dB; sol-attn's best. At other
            # sizes they were not measured.
            "fg-attn": {"top_p": 0.9316},
            "spargeattn": {"tau": 0.9941},
            "xattention": {"tau": 0.9629},
            "sale": {"tau": 0.007986},
            "sol-attn": {"tau": 0.3906},
        },
        schedules={
            "foresight": {
                "dense_steps": 0.12,
                "reuse": 1,
                "refresh": 0.16,
            }
        },
        method="foresight",
        # what the rows of "speeds" were measured with.
        speeds={
            "high": {
                "psnr": 40.6,
                "prompts": 24,
                "cache": "guidance",
                "method_options": {"share": 0.1},
                "schedule": {"dense_steps": 0.24, "refresh": 0.24},
            },
            "balanced": {
                "psnr": 35.1,
                "prompts": 24,
                "cache": "guidance",
                "method_options": {"share": 0.1},
                "schedule": {"dense_steps": 0.16, "refresh": 0.16},
            },
            "fast": {
                "psnr": 32.5,
                "prompts": 24,
                "cache": "guidance",
                "cache_threshold": 3,
                "method_options": {"share": 0.1},
                "schedule": {"dense_steps": 0.12, "refresh": 0.16},
            },
        },
        limits=(
            "In nine of the 24 clips of the test a body stands in two places, small ones most\n"
            "  often; a higher guidance makes it more.",
            "Bodies that spin bend while they turn.",
            "The figures above were taken while it was made, by the functions of those commands: "
            "four clips\n  of each size, and the videos in one script with those of another "
            "guidance. The commands\n  themselves were not run on these weights.",
        ),
    )
    # the autoencoder that ships took its minutes in a session of its own; the transformer, with
    # --start latents, took another, and more by ``further``
    recipe = Recipe(
        vae_minutes=9.5,
        latent_minutes=2.5,
        transformer_minutes=23.0,
        crops=_CROPS,
        sizes=_SIZES,
        pool_clips=_POOL_CLIPS,
        latent_plans=(
            LatentPlan(size=_TINY, batch=32, batches=2),
            LatentPlan(size=_SHORT, batch=8, batches=4),
            LatentPlan(size=_MIDDLE, batch=2, batches=4),
            LatentPlan(size=_LONG, batch=1, batches=2),
        ),
        step_plans=(
            StepPlan(source=0, batch=256, share=1.0, ends=0.1),
            StepPlan(source=1, batch=48, share=0.7, begins=0.1),
            StepPlan(source=2, batch=12, share=0.3, begins=0.35),
            StepPlan(source=3, batch=4, share=0.2, begins=0.5),
        ),
        check_clips=4,
        # 24.8 dB in training after 600 steps, where AdamW alone had 21.7 after 490
        vae_muon_rate=2e-3,
    )
    # every later session: weights are there. Outlines are learnt from the beginnings of long clips,
    # where the time of a step buys most clips of that scale, and more than half of the time goes to
    # whole ones, whose bodies appear twice where noise hides how many there are
    further = Recipe(
        vae_minutes=0.0,
        latent_minutes=3.0,
        transformer_minutes=21.0,
        crops=_CROPS,
        sizes=_SIZES,
        pool_clips=_POOL_CLIPS,
        latent_plans=(
            LatentPlan(size=_SHORT, batch=8, batches=2),
            LatentPlan(size=_MIDDLE, batch=2, batches=3),
            LatentPlan(size=_LONG, batch=1, batches=6),
            LatentPlan(size=_BEGINNING, batch=4, batches=4, course=_LONG.frames),
        ),
        step_plans=(
            StepPlan(source=0, batch=48, share=0.17),
            StepPlan(source=1, batch=12, share=0.09),
            StepPlan(source=2, batch=4, share=0.27, lean=2.4),
            StepPlan(source=3, batch=16, share=0.47, lean=1.6),
        ),
        check_clips=4,
        learning_rate=6e-4,
        muon_rate=1.5e-3,
        # bodies are a twentieth of the picture, and ground that no words tell of is the rest
        body_weight=6.0,
        naming=0.2,
    )


SCENES: Final = Scenes()
