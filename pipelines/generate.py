"""Generating videos: one pipeline call, its phases timed, and a record of how it was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

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
from vidsparse.kernels import support
from vidsparse.pipelines.caching import AnyCache, open_cache
from vidsparse.pipelines.calling import ONE_PROMPT, called_as, image_arguments
from vidsparse.pipelines.clock import Clock, remove_all
from vidsparse.pipelines.compilation import compilations
from vidsparse.pipelines.handle import SparseHandle, is_sparse, sparsify, transformer_configs
from vidsparse.pipelines.models import LoadedPipeline, check_takes, memory_hint, unknown_words
from vidsparse.pipelines.parallel import process_count
from vidsparse.pipelines.quiet import quiet_hosts
from vidsparse.pipelines.records import shared_record
from vidsparse.pipelines.request import GenerateRequest, resolve
from vidsparse.pipelines.video import Sound
from vidsparse.pipelines.watch import Watch, loaded_transformers
from vidsparse.presets import Preset, load_preset
from vidsparse.room import NoRoomError

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
    """One video, ``frames`` uint8 ``[T, H, W, 3]``, and the JSON-able record of its making.

    ``sound`` is the sound that the model made beside it, or None.
    """

    frames: NDArray[np.uint8]
    record: dict[str, Any]
    sound: Sound | None = None


def generate(
    loaded: LoadedPipeline,
    request: GenerateRequest,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    attach: Attach | None = None,
    ring: int | None = None,
    apart: bool | None = False,
) -> Generated:
    """Generate one video.

    The frames are those of the stock pipeline called with the same arguments, rounded to 8 bits.
    With method ``dense`` the pipeline is not touched at all, unless a faster kernel runs its
    attention (``dense_kernel``).

    Where ``torch.distributed`` was started with several processes, all of them make the video
    together (``SparseHandle.parallelize``), and each must be called with the same request.

    Args:
        loaded: the model; it runs with the device, dtype, offload, compile, linear and LoRA that it
            was loaded with.
        request: what to generate.
        progress: called after each step.
        cancel: called after each step, and before each block of the text encoders and the VAE; the
            run stops if it returns True.
        attach: called with the handle of a sparse run before it starts, for its trace or a probe.
        ring: with several processes, the size of a ring, as in ``SparseHandle.parallelize``.
        apart: with several processes, whether each half computes one guidance branch, as in
            ``SparseHandle.parallelize``; None: if possible, since it is faster.

    Raises:
        OptionError: the request does not fit the model, or asks for another device or dtype than
            the model was loaded with.
        UnsupportedError: the memory is too small, the implementation cannot run here, or the
            pipeline needs a package that is not installed.
        NonFiniteError: a step, or the VAE, returned NaN or infinity.
        GenerationCancelled: ``cancel`` returned True.
    """
    return generate_batch(loaded, [request], progress, cancel, attach, ring, apart)[0]


def generate_batch(
    loaded: LoadedPipeline,
    requests: Sequence[GenerateRequest],
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    attach: Attach | None = None,
    ring: int | None = None,
    apart: bool | None = False,
) -> list[Generated]:
    """Generate a video for each request in one pipeline call.

    Requests may differ in their prompts only. Every video starts from the noise of the seed, made
    on the CPU, so it does not depend on its place in the batch, on the batch, or on the device.
    Times and densities in a record are those of the whole batch.

    Raises:
        OptionError: as in ``generate``; or requests differ in more than the prompt; or there are
            several for a pipeline that takes one.
        NonFiniteError: as in ``generate``; it ends the whole batch.
        GenerationCancelled: ``cancel`` returned True.
    """
    if not requests:
        return []
    settings = _batch(loaded, requests)
    first = settings[0]
    began = datetime.now(UTC)
    clock = Clock(loaded.device)
    with (
        quiet_hosts(),
        _memory_hint(loaded, first, len(settings)),
        _on_device(loaded.device),
        _maybe_sparse(loaded, first, ring, apart) as handle,
        _maybe_cached(loaded, first, handle) as cache,
        compilations() if loaded.compile else nullcontext() as compiling,
    ):
        if handle is not None and attach is not None:
            attach(handle)
        watch = Watch(loaded.pipe, handle, None if cache is None else cache.remove)
        made = _run(loaded, settings, clock, progress, cancel, watch)
        total = clock.now()
        several = (processes := process_count()) > 1
        whole = not several or handle is None or handle.gather_trace()
        record = shared_record(loaded, first, handle, cache)
        record["batch"] = len(settings)
        if several:
            record["processes"] = processes
            if handle is not None and handle.ring > 1:
                record["ring"] = handle.ring
            if handle is not None and handle.apart:
                record["apart"] = True
            if handle is not None and handle.trace.balance is not None:
                record["balance"] = asdict(handle.trace.balance)
            if not whole:
                record["notes"].append("with densities of the first process's heads alone")
        record["began"] = began.isoformat(timespec="seconds")
        record["times"] = {
            "load": loaded.load_seconds,
            "encode_text": clock.denoise_began,
            "denoise": clock.denoise_ended - clock.denoise_began,
            # a part of denoising; 0 once everything is compiled.
            **({"compile": compiling()} if compiling else {}),
            "attention": handle.summary().attention_seconds if handle else None,
            "decode": total - clock.denoise_ended,
            "total": total,
        }
    return [
        Generated(
            frames=frames,
            sound=sound,
            record={
                "prompt": one.prompt,
                **record,
                **({} if sound is None else {"sound": sound.facts()}),
                "unknown_words": unknown_words(loaded.ref, one.prompt),
            },
        )
        for one, (frames, sound) in zip(settings, made, strict=True)
    ]


def denoise(
    loaded: LoadedPipeline,
    requests: Sequence[GenerateRequest],
    last_step: int,
    progress: Progress | None = None,
) -> None:
    """Run the first steps of requests at once, up to ``last_step``, and decode nothing.

    For studies that watch attention calls. The pipeline runs as it is: sparse only where
    ``sparsify`` is in effect already. Requests may differ in their prompts and seeds only.

    Raises:
        OptionError: as ``generate_batch``.
        UnsupportedError: the memory is too small.
    """
    done = 0

    def count(step: int, steps: int, seconds: float) -> None:
        nonlocal done
        done = step
        if progress is not None:
            progress(step, steps, seconds)

    settings = _batch(loaded, requests, ("seed",))
    with (
        quiet_hosts(),
        _memory_hint(loaded, settings[0], len(settings)),
        _on_device(loaded.device),
        suppress(GenerationCancelled),
    ):
        _run(loaded, settings, Clock(loaded.device), count, lambda: done > last_step)


def decoded(
    loaded: LoadedPipeline, requests: Sequence[GenerateRequest], progress: Progress | None = None
) -> list[NDArray[np.uint8]]:
    """The frames of requests made at once, uint8 ``[T, H, W, 3]``, by the pipeline as it is.

    As ``denoise``, for studies that watch videos.

    Raises:
        OptionError: as ``generate_batch``.
        UnsupportedError: the memory is too small.
    """
    settings = _batch(loaded, requests, ("seed",))
    with (
        quiet_hosts(),
        _memory_hint(loaded, settings[0], len(settings)),
        _on_device(loaded.device),
    ):
        made = _run(loaded, settings, Clock(loaded.device), progress, None)
    return [frames for frames, _ in made]


def _batch(
    loaded: LoadedPipeline, requests: Sequence[GenerateRequest], own: Sequence[str] = ()
) -> list[GenerateRequest]:
    """Requests as they will run in one pipeline call.

    Raises:
        OptionError: as ``generate_batch``; they may differ in ``own`` options too.
    """
    settings = [_fit(request, loaded) for request in requests]
    first = settings[0].options()
    for other in settings[1:]:
        differing = [k for k, v in first.items() if k not in own and other.options()[k] != v]
        if differing:
            raise OptionError(
                f"the requests of a batch may differ in their prompts only, and these differ in "
                f"{listed(differing)}. Hint: generate them one after the other."
            )
    if len(settings) > 1 and type(loaded.pipe).__name__ in ONE_PROMPT:
        raise OptionError(
            f"{type(loaded.pipe).__name__} makes one video from an image at a time. "
            "Hint: generate them one after the other."
        )
    return settings


@contextmanager
def _memory_hint(
    loaded: LoadedPipeline, request: GenerateRequest, batch: int = 1
) -> Iterator[None]:
    """Says, where memory runs out or would, what was asked for and what would take less.

    That is about half of it, or as many frames as the plan has room for.

    Raises:
        UnsupportedError: it does.
    """
    assert request.frames is not None
    videos = f"{batch} videos of " if batch > 1 else ""
    what = f"{videos}{request.frames} frames of {request.width}x{request.height}"
    # of the latent's frames, of which the first stands for fewer.
    half = loaded.defaults.frames_within((request.frames + loaded.defaults.frame_rest) / 2)
    fewer = "a smaller batch, " if batch > 1 else ""
    shorter = f"{half} frames or " if half < request.frames else ""
    try:
        with memory_hint(what, f"try {fewer}{shorter}a smaller size"):
            yield
    except NoRoomError as error:
        # a plan grows with the square of its tokens.
        share = (max(0, error.free) / error.needed) ** 0.5
        most = loaded.defaults.frames_within(request.frames * share)
        shorter = f"{most} frames, " if most < request.frames else ""
        raise UnsupportedError(
            f"{error.whose} is too small for {what}: {error.what} alone take "
            f"{error.needed / 2**30:.2f} GiB, and {max(0, error.free) / 2**30:.2f} are free. "
            f"Hint: try {fewer}{shorter}a smaller size or a larger tile."
        ) from None


@contextmanager
def _on_device(device: str) -> Iterator[None]:
    """Make ``device`` the current one: kernels and timing events belong to the current device."""
    with torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
        yield


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
    check_takes(
        loaded.ref,
        image=loaded.takes_image,
        last_image=request.last_image is not None,
        keyframes=bool(request.keyframes),
    )
    if loaded.takes_image and request.last_image is None and loaded.ref.needs_last_image:
        raise OptionError(
            f"{loaded.ref.name} makes videos between two images. Hint: add --last-image FILE."
        )
    own = {name: getattr(loaded, name) for name in ("device", "dtype", "offload", "lora", "linear")}
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
    loaded: LoadedPipeline, request: GenerateRequest, ring: int | None, apart: bool | None
) -> Iterator[SparseHandle | None]:
    several = process_count() > 1
    if request.method == "dense":
        if is_sparse(loaded.pipe):
            raise UnsupportedError(
                "method dense runs the stock pipeline, but this one is sparse. "
                "Hint: call remove() on its handle first."
            )
        if not several and (
            request.dense_kernel == "stock"
            or (
                request.dense_kernel == "auto"
                and support("gluon", loaded.device, torch.bfloat16, 128) is not None
            )
        ):
            # not touched at all.
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
        refresh=request.refresh,
        implementation=request.implementation,
        dense_kernel=request.dense_kernel,
        **request.method_options,
    ) as handle:
        if several:
            if apart is None:
                assert request.guidance is not None
                # a step cache comes after this, and knows whole forwards alone.
                two = request.guidance > 1 and request.cache == "none" and ring is None
                apart = two and handle.can_be_apart
            handle.parallelize(ring=ring, apart=apart)
        yield handle


def _maybe_cached(
    loaded: LoadedPipeline, request: GenerateRequest, handle: SparseHandle | None
) -> AbstractContextManager[AnyCache | None]:
    assert request.cache is not None
    assert request.steps is not None
    if request.cache == "none":
        return nullcontext()
    assert request.dense_steps is not None
    return open_cache(
        loaded.pipe,
        request.cache,
        threshold=request.cache_threshold,
        dense_steps=request.dense_steps,
        steps=request.steps,
        **({} if handle is None else {"whole": handle.engine.schedule.refresh_steps}),
    )


def _run(
    loaded: LoadedPipeline,
    requests: Sequence[GenerateRequest],
    clock: Clock,
    progress: Progress | None,
    cancel: Cancel | None,
    watch: Watch | None = None,
) -> list[tuple[NDArray[np.uint8], Sound | None]]:
    """The frames of each request, and the sound beside them where the pipeline makes some."""
    pipe, first = loaded.pipe, requests[0]
    watch = watch or Watch(pipe, None)

    def after_step(pipe: Any, step: int, timestep: object, tensors: Any) -> Any:
        steps = pipe.num_timesteps
        now = clock.now(wait=step == steps - 1)
        watch.end_step(tensors.get("latents"), step, steps)
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
            clock.first_forward_of(loaded_transformers(pipe)),
            _cancellable_blocks(pipe, cancel),
            called_as(pipe, first, after_step) as arguments,
        ):
            output = pipe(
                prompt=[request.prompt for request in requests],
                negative_prompt=[request.negative_prompt for request in requests],
                num_inference_steps=first.steps,
                generator=[torch.Generator("cpu").manual_seed(r.seed) for r in requests],
                output_type="np",
                **arguments,
                **image_arguments(pipe, requests),
            )
            watch.look(last=True)
    except ImportError as error:
        # a package that the host wants for this very call, as LTX-2 does to compress an image.
        raise UnsupportedError(f"{type(pipe).__name__} needs a package: {error}") from error
    finally:
        pipe.set_progress_bar_config(**bar)
        # after an error the pipeline has not come to this by itself.
        pipe.maybe_free_model_hooks()
    sounds = _sounds(pipe, output, len(requests))
    return [(_to_bytes(video), sound) for video, sound in zip(output.frames, sounds, strict=True)]


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

    transformers = loaded_transformers(pipe)
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
        remove_all(hooks)


def _sounds(pipe: Any, output: Any, videos: int) -> list[Sound | None]:
    """The sound of each video; None where the pipeline makes none.

    Raises:
        NonFiniteError: a sound holds NaN or infinity.
    """
    # waveforms ``[B, C, N]``, by a vocoder that knows their rate.
    waves = getattr(output, "audio", None)
    if waves is None:
        return [None] * videos
    samples = waves.float().cpu().numpy()
    if not np.isfinite(samples).all():
        raise NonFiniteError(
            "decoding returned NaN or infinity in the sound. Hint: use another dtype."
        )
    rate = int(pipe.vocoder.config.output_sampling_rate)
    return [Sound(samples=np.clip(each, -1, 1), rate=rate) for each in samples]


def _to_bytes(video: NDArray[np.float32]) -> NDArray[np.uint8]:
    """``[T, H, W, 3]`` from [0, 1] to 8 bits, frame by frame to save memory.

    Raises:
        NonFiniteError: a frame holds NaN or infinity.
    """
    out = np.empty(video.shape, np.uint8)
    for number, (frame, target) in enumerate(zip(video, out, strict=True), 1):
        if not np.isfinite(frame).all():
            raise NonFiniteError(
                f"decoding returned NaN or infinity in frame {number} of {len(video)}, from "
                "latents that were finite. Hint: use another dtype for the VAE."
            )
        target[...] = (frame * 255).round()
    return out
