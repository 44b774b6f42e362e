"""How stock pipelines differ in the arguments of a call, so that one request suits them all."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from vidsparse.pipelines.image import fit_image, read_image
from vidsparse.pipelines.request import GenerateRequest


@contextmanager
def called_as(
    pipe: Any, request: GenerateRequest, after_step: Callable[..., Any]
) -> Iterator[dict[str, Any]]:
    """The arguments in which pipelines differ; what they only keep inside is set for the block."""
    takes = inspect.signature(pipe.__call__).parameters
    # HunyuanVideo's image-to-video by concatenation gives its first four frames away.
    condition = pipe.transformer.config.get("image_condition_type")
    assert request.frames is not None
    arguments: dict[str, Any] = {
        "num_frames": request.frames + 4 if condition == "latent_concat" else request.frames
    }
    with ExitStack() as stack:
        if "height" in takes:
            arguments |= {"width": request.width, "height": request.height}
        else:
            # HunyuanVideo 1.5 derives a size from the shape of the image.
            size = (request.height, request.width)
            stack.enter_context(
                _attribute(
                    pipe.video_processor, "calculate_default_height_width", lambda *_, **__: size
                )
            )
        if "guidance_scale" not in takes:
            assert request.guidance is not None
            on = request.guidance > 1
            guider = pipe.guider.new(
                **({"guidance_scale": request.guidance} if on else {"enabled": False})
            )
            stack.callback(setattr, pipe, "guider", pipe.guider)
            pipe.guider = guider
        elif "true_cfg_scale" in takes and not pipe.transformer.config.guidance_embeds:
            # nor is guidance distilled into it.
            arguments |= {"guidance_scale": 1.0, "true_cfg_scale": request.guidance}
        else:
            arguments["guidance_scale"] = request.guidance
        if "frame_rate" in takes:
            # LTX is told how fast its frames will be shown.
            arguments["frame_rate"] = request.fps
        if "decode_timestep" in takes and pipe.vae.config.timestep_conditioning:
            # LTX's newer VAEs denoise a last time; these are the values of its own examples.
            arguments |= {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
        if "callback_on_step_end" in takes:
            arguments["callback_on_step_end"] = after_step
        else:
            stack.enter_context(_after_scheduler(pipe, after_step))
        yield arguments


@contextmanager
def _attribute(target: Any, name: str, value: object) -> Iterator[None]:
    """Let ``target`` alone, not its class, have ``value`` under ``name`` inside the block."""
    vars(target)[name] = value
    try:
        yield
    finally:
        del vars(target)[name]


@contextmanager
def _after_scheduler(pipe: Any, after_step: Callable[..., Any]) -> Iterator[None]:
    """Tell ``after_step`` of every step of the scheduler, for pipelines without a callback."""
    step, done = pipe.scheduler.step, itertools.count()

    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        latents = result[0] if isinstance(result, tuple) else result.prev_sample
        after_step(pipe, next(done), None, {"latents": latents})
        return result

    with _attribute(pipe.scheduler, "step", stepped):
        yield


_SHARED_IMAGE: Final = (
    "WanImageToVideoPipeline",
    "SkyReelsV2ImageToVideoPipeline",
    "HunyuanVideo15ImageToVideoPipeline",
    "LTX2ImageToVideoPipeline",
    "LTX2ConditionPipeline",
)
"""Pipelines that take one image for all prompts; the others want one for each."""

ONE_PROMPT: Final = ("LTX2ImageToVideoPipeline", "LTX2ConditionPipeline")
"""Pipelines that take an image for one prompt only."""


def image_arguments(pipe: Any, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """The first and the last frame, and those between, at the video's size."""
    first = requests[0]
    assert first.width is not None
    assert first.height is not None
    size = first.width, first.height
    images = {name: fit_image(read_image(path), *size) for name, path in first.images().items()}
    if "conditions" in inspect.signature(pipe.__call__).parameters:
        from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition

        # frames of the latent: the first is one of the video, others are several.
        factor = pipe.vae_temporal_compression_ratio
        places = {"image": 0, "last_image": -1}
        places |= {f"keyframe {at}": (at - 1) // factor + 1 for at in first.keyframes}
        return {"conditions": [LTX2VideoCondition(images[n], places[n]) for n in images]}
    shared = type(pipe).__name__ in _SHARED_IMAGE
    return {name: one if shared else [one] * len(requests) for name, one in images.items()}
