"""Generating videos: one pipeline call, its phases timed, and a record of how it was made."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from vidsparse.errors import (
    NonFiniteError,
    OptionError,
    UnsupportedError,
    VidsparseError,
    listed,
)
from vidsparse.pipelines.handle import SparseHandle, is_sparse, sparsify, transformer_configs
from vidsparse.pipelines.image import fit_image, read_image
from vidsparse.pipelines.models import LoadedPipeline, check_takes, memory_hint, unknown_words
from vidsparse.pipelines.quiet import quiet_hosts
from vidsparse.pipelines.records import shared_record
from vidsparse.pipelines.request import GenerateRequest, resolve
from vidsparse.presets import Preset, load_preset

Progress = Callable[[int, int, float], object]
"""Called after each denoising step with its number from 1, the number of steps, its seconds."""

Cancel = Callable[[], bool]
"""Asked after each denoising step and before each block of text encoders and VAE; True stops."""

Attach = Callable[[SparseHandle], object]
"""Given the sparse pipeline's handle before it runs; the trace is complete when it has."""


class GenerationCancelled(VidsparseError):
    """``cancel`` asked to stop; nothing was generated."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """One video, ``frames`` uint8 ``[T, H, W, 3]``, and the JSON-able record of its making."""

    frames: NDArray[np.uint8]
    record: dict[str, Any]


def generate(
    loaded: LoadedPipeline,
    request: GenerateRequest,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    attach: Attach | None = None,
) -> Generated:
    """Generate one video.

    The frames are those of the stock pipeline called with the same arguments, rounded to 8 bits;
    with method ``dense`` the pipeline is not touched at all.

    Args:
        loaded: the model; its device, dtype, offload, compile and LoRA are what runs.
        request: what to generate.
        progress: told after each step.
        cancel: asked after each step, and before each block of the text encoders and the VAE.
        attach: given the handle of a sparse run, for its trace or a probe.

    Raises:
        OptionError: the request does not fit the model, or asks for another device or dtype than
            the model was loaded with.
        UnsupportedError: the GPU's memory is too small, the implementation cannot run here, or the
            pipeline needs a package that is not installed.
        NonFiniteError: a step, or the VAE, came to NaN or infinity.
        GenerationCancelled: ``cancel`` returned True.
    """
    return generate_batch(loaded, [request], progress, cancel, attach)[0]


def generate_batch(
    loaded: LoadedPipeline,
    requests: Sequence[GenerateRequest],
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    attach: Attach | None = None,
) -> list[Generated]:
    """Generate a video for each request in one pipeline call.

    Requests may differ in their prompts only. Every video starts from the noise of the seed, made
    on the CPU, so it does not depend on its place in the batch, on the batch, or on the device.
    Times and densities in a record are those of the whole batch.

    Raises:
        OptionError: as ``generate``, or requests that differ in more than the prompt, or several
            for a pipeline that takes one.
        NonFiniteError: as ``generate``; it ends the whole batch.
        GenerationCancelled: ``cancel`` returned True.
    """
    if not requests:
        return []
    settings = [_fit(request, loaded) for request in requests]
    first = settings[0]
    for other in settings[1:]:
        if other.options() != first.options():
            differing = [k for k, v in first.options().items() if other.options()[k] != v]
            raise OptionError(
                f"the requests of a batch may differ in their prompts only, and these differ in "
                f"{listed(differing)}. Hint: generate them one after the other."
            )
    if len(settings) > 1 and type(loaded.pipe).__name__ in _ONE_PROMPT:
        raise OptionError(
            f"{type(loaded.pipe).__name__} makes one video from an image at a time. "
            "Hint: generate them one after the other."
        )
    clock = _Clock(loaded.device)
    with (
        quiet_hosts(),
        memory_hint(),
        _on_device(loaded.device),
        _maybe_sparse(loaded, first) as handle,
    ):
        if handle is not None and attach is not None:
            attach(handle)
        frames = _run(loaded, settings, clock, progress, cancel)
        total = clock.now()
        record = shared_record(loaded, first, handle)
        record["batch"] = len(settings)
        record["times"] = {
            "load": loaded.load_seconds,
            "encode_text": clock.denoise_began,
            "denoise": clock.denoise_ended - clock.denoise_began,
            "attention": handle.summary().attention_seconds if handle else None,
            "decode": total - clock.denoise_ended,
            "total": total,
        }
    return [
        Generated(
            frames=video,
            record={
                "prompt": one.prompt,
                **record,
                "unknown_words": unknown_words(loaded.ref, one.prompt),
            },
        )
        for one, video in zip(settings, frames, strict=True)
    ]


def denoise(
    loaded: LoadedPipeline,
    request: GenerateRequest,
    last_step: int,
    progress: Progress | None = None,
) -> None:
    """Run the first steps of a request, up to ``last_step``, and decode nothing.

    For studies that watch attention calls. The pipeline runs as it is: sparse only where
    ``sparsify`` is in effect already.

    Raises:
        OptionError: as ``generate``.
        UnsupportedError: the GPU's memory is too small.
    """
    done = 0

    def count(step: int, steps: int, seconds: float) -> None:
        nonlocal done
        done = step
        if progress is not None:
            progress(step, steps, seconds)

    settings = _fit(request, loaded)
    with (
        quiet_hosts(),
        memory_hint(),
        _on_device(loaded.device),
        suppress(GenerationCancelled),
    ):
        _run(loaded, [settings], _Clock(loaded.device), count, lambda: done > last_step)


def decoded(
    loaded: LoadedPipeline, request: GenerateRequest, progress: Progress | None = None
) -> NDArray[np.uint8]:
    """The frames of a request, uint8 ``[T, H, W, 3]``, by the pipeline as it is.

    As ``denoise``, for studies that watch videos.

    Raises:
        OptionError: as ``generate``.
        UnsupportedError: the GPU's memory is too small.
    """
    settings = _fit(request, loaded)
    with quiet_hosts(), memory_hint(), _on_device(loaded.device):
        return _run(loaded, [settings], _Clock(loaded.device), progress, None)[0]


@contextmanager
def _on_device(device: str) -> Iterator[None]:
    """Make ``device`` the current one: kernels and timing events belong to the current device."""
    with torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
        yield


class _Clock:
    """Seconds since the start, with the device waited for at the phases' ends and nowhere else."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self.denoise_began = 0.0
        self.denoise_ended = 0.0
        self.step_began = 0.0
        self._zero = 0.0
        self._zero = self.now()

    def now(self, *, wait: bool = True) -> float:
        if wait and self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - self._zero

    @contextmanager
    def first_forward_of(self, transformers: Sequence[Any]) -> Iterator[None]:
        """Take the first forward of any of ``transformers`` as the start of denoising."""
        hooks: list[Any] = []

        def begin(module: object, args: object) -> None:
            self.denoise_began = self.step_began = self.now()
            _remove_all(hooks)

        eager = torch.compiler.disable(begin)  # type: ignore[no-untyped-call]
        hooks += [transformer.register_forward_pre_hook(eager) for transformer in transformers]
        try:
            yield
        finally:
            _remove_all(hooks)


def _remove_all(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _fit(request: GenerateRequest, loaded: LoadedPipeline) -> GenerateRequest:
    """The request as it will run: resolved, and saying what was loaded."""
    for name in ("device", "dtype"):
        asked, has = getattr(request, name), getattr(loaded, name)
        if asked is not None and _device_key(asked) != _device_key(has):
            raise OptionError(
                f"{name} {asked} was asked for, but the model was loaded with {has}. "
                f"Hint: load the model again with {name}={asked!r}."
            )
    if (request.image is not None) != loaded.takes_image:
        made, asked = ("an image", "text") if loaded.takes_image else ("text", "an image")
        raise OptionError(
            f"a video from {asked} was asked for, but the model was loaded to make them from "
            f"{made}. Hint: load the model again with image={request.image is not None}."
        )
    check_takes(loaded.ref, image=loaded.takes_image, last_image=request.last_image is not None)
    if loaded.takes_image and request.last_image is None and loaded.ref.needs_last_image:
        raise OptionError(
            f"{loaded.ref.name} makes videos between two images. Hint: add --last-image FILE."
        )
    own = {name: getattr(loaded, name) for name in ("device", "dtype", "offload", "lora")}
    request = replace(request, **own, compile=loaded.compile, model=loaded.ref.name)
    return resolve(request, loaded.defaults)


def _device_key(name: str) -> str:
    """``cuda`` and ``cuda:0`` are one device."""
    return "cuda:0" if name == "cuda" else name


def check_preset(loaded: LoadedPipeline, request: GenerateRequest) -> Preset | None:
    """The preset of ``request``, where it has one.

    Raises:
        OptionError: it cannot be read, or was calibrated for another model than the loaded one.
    """
    if request.preset is None:
        return None
    preset = load_preset(request.preset)
    preset.check_model(transformer_configs(loaded.pipe), loaded.weights_hash)
    return preset


@contextmanager
def _maybe_sparse(
    loaded: LoadedPipeline, request: GenerateRequest
) -> Iterator[SparseHandle | None]:
    if request.method == "dense":
        if is_sparse(loaded.pipe):
            raise UnsupportedError(
                "method dense runs the stock pipeline, but this one is sparse. "
                "Hint: call remove() on its handle first."
            )
        yield None
        return
    preset = check_preset(loaded, request)
    with sparsify(
        loaded.pipe,
        request.method,
        preset=preset,
        order=request.order or loaded.defaults.order,
        dense_steps=request.dense_steps,
        dense_last_steps=request.dense_last_steps,
        dense_layers=request.dense_layers,
        dense_last_layers=request.dense_last_layers,
        reuse=request.reuse,
        implementation=request.implementation,
        **request.method_options,
    ) as handle:
        yield handle


def _run(
    loaded: LoadedPipeline,
    requests: Sequence[GenerateRequest],
    clock: _Clock,
    progress: Progress | None,
    cancel: Cancel | None,
) -> list[NDArray[np.uint8]]:
    pipe, first = loaded.pipe, requests[0]
    watch = _Watch(loaded.device)

    def after_step(pipe: Any, step: int, timestep: object, tensors: Any) -> Any:
        steps = pipe.num_timesteps
        now = clock.now(wait=step == steps - 1)
        watch.look(tensors.get("latents"), step, steps)
        seconds, clock.step_began, clock.denoise_ended = now - clock.step_began, now, now
        if progress is not None:
            progress(step + 1, steps, seconds)
        if cancel is not None and cancel():
            # raised rather than flagged to the pipeline: that would still decode what is there.
            raise GenerationCancelled(f"cancelled after step {step + 1} of {steps}")
        return tensors

    bar = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(**{**bar, "disable": True})
    try:
        with (
            clock.first_forward_of(_transformers(pipe)),
            _cancellable_blocks(pipe, cancel),
            _called_as(pipe, first, after_step) as arguments,
        ):
            output = pipe(
                prompt=[request.prompt for request in requests],
                negative_prompt=[request.negative_prompt for request in requests],
                num_inference_steps=first.steps,
                generator=[torch.Generator("cpu").manual_seed(r.seed) for r in requests],
                output_type="np",
                **arguments,
                **_images(pipe, requests),
            )
    except ImportError as error:
        # a package that the host wants for this very call, as LTX-2 does to compress an image.
        raise UnsupportedError(f"{type(pipe).__name__} needs a package: {error}") from error
    finally:
        pipe.set_progress_bar_config(**bar)
        # after an error the pipeline has not come to this by itself.
        pipe.maybe_free_model_hooks()
    return [_to_bytes(video) for video in output.frames]


@contextmanager
def _cancellable_blocks(pipe: Any, cancel: Cancel | None) -> Iterator[None]:
    """Ask ``cancel`` before every block that runs outside the transformers.

    Those are encoding and decoding, which can take as long as many steps and have no callback.
    Blocks are what stands in a list of modules; a VAE passes through its own once for every few
    frames or for every tile.
    """
    if cancel is None:
        yield
        return
    asked = cancel

    def ask(module: object, args: object) -> None:
        if asked():
            raise GenerationCancelled("cancelled while encoding or decoding")

    transformers = _transformers(pipe)
    parts: list[Any] = [
        part
        for part in pipe.components.values()
        if isinstance(part, torch.nn.Module) and all(part is not each for each in transformers)
    ]
    blocks = {
        block
        for part in parts
        for module in part.modules()
        if isinstance(module, torch.nn.ModuleList)
        for block in module
    }
    hooks = [block.register_forward_pre_hook(ask) for block in blocks]
    try:
        yield
    except GenerationCancelled:
        for part in parts:
            # Wan's VAE keeps features of the frames before, and lets go of them in its next call.
            if hasattr(part, "clear_cache"):
                part.clear_cache()
        raise
    finally:
        _remove_all(hooks)


@contextmanager
def _called_as(
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
    "HunyuanVideo15ImageToVideoPipeline",
    "LTX2ImageToVideoPipeline",
)
"""Pipelines that take one image for all prompts; the others want one for each."""

_ONE_PROMPT: Final = ("LTX2ImageToVideoPipeline",)
"""Pipelines that take an image for one prompt only."""


def _images(pipe: Any, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """The first and the last frame, at the video's size."""
    first = requests[0]
    assert first.width is not None
    assert first.height is not None
    given: dict[str, Any] = {}
    for name in ("image", "last_image"):
        if (path := getattr(first, name)) is None:
            continue
        image = fit_image(read_image(path), first.width, first.height)
        shared = type(pipe).__name__ in _SHARED_IMAGE
        given[name] = image if shared else [image] * len(requests)
    return given


def _transformers(pipe: Any) -> list[Any]:
    found = (getattr(pipe, name, None) for name in ("transformer", "transformer_2"))
    return [transformer for transformer in found if transformer is not None]


class _Watch:
    """Ends a run whose latents are no numbers any more, and says after which step."""

    def __init__(self, device: str) -> None:
        self._waits = device.startswith("cuda")
        self._finite: list[tuple[int, torch.Tensor]] = []

    def look(self, latents: torch.Tensor | None, step: int, steps: int) -> None:
        """Take the latents after ``step`` of ``steps``, counted from 0.

        Raises:
            NonFiniteError: they, or those of a step before, hold NaN or infinity.
        """
        if latents is not None:
            self._finite.append((step, latents.isfinite().all()))
        # a GPU is still computing this step: asking it for the one before costs no time.
        ready = len(self._finite) - (self._waits and step < steps - 1)
        for done, finite in self._finite[:ready]:
            if not bool(finite):
                raise NonFiniteError(
                    f"the video came to NaN or infinity in step {done + 1} of {steps}. "
                    "Hint: lower the guidance, or use another dtype; sparsify(..., "
                    "check_finite=True) names the layer."
                )
        del self._finite[:ready]


def _to_bytes(video: NDArray[np.float32]) -> NDArray[np.uint8]:
    """``[T, H, W, 3]`` from [0, 1] to 8 bits, frame by frame to save memory.

    Raises:
        NonFiniteError: a frame holds NaN or infinity.
    """
    out = np.empty(video.shape, np.uint8)
    for number, (frame, target) in enumerate(zip(video, out, strict=True), 1):
        if not np.isfinite(frame).all():
            raise NonFiniteError(
                f"decoding came to NaN or infinity in frame {number} of {len(video)}, from latents "
                "that were finite. Hint: use another dtype for the VAE."
            )
        target[...] = (frame * 255).round()
    return out
