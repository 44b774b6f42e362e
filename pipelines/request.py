"""One request to generate a video: every option in one value, validated before anything loads."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vidsparse.dtypes import DTYPES
from vidsparse.errors import OptionError
from vidsparse.pipelines.caching import CACHES, check_cache
from vidsparse.pipelines.cards import card_method
from vidsparse.pipelines.family import Defaults, beside
from vidsparse.pipelines.image import check_image, image_hash
from vidsparse.pipelines.models import model_folder, resolve_model
from vidsparse.pipelines.placement import (
    LINEARS,
    OFFLOADS,
    check_choice,
    check_device,
    check_device_name,
    check_dtype,
    check_linear,
)
from vidsparse.pipelines.speed import SPEEDS, bundle_for, own_cache, runs_as_high
from vidsparse.pipelines.weights import files_stamp, lora_hash, lora_stamp

if TYPE_CHECKING:
    from vidsparse.methods import SparseMethod
    from vidsparse.presets import Preset

MAX_PROMPT: Final = 10_000
"""Longest prompt in characters; every supported model reads far less."""

MOST: Final[Mapping[str, int]] = {"steps": 1000, "frames": 10_000, "width": 8192, "height": 8192}
"""Largest counts: schedulers know a thousand steps, and players no larger frames."""

MOST_GUIDANCE: Final = 100
"""Largest guidance scale; models are used with 1 to 15, and numbers overflow far above."""

FPS: Final = (0.1, 1000)
"""Frame rates that mp4 files keep exactly enough."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What to generate and how.

    ``None`` leaves a setting to the model (``order``, ``dense_steps``, ``dense_layers``,
    ``dense_last_layers``, ``reuse``, ``refresh``, ``steps``, ``frames``, ``width``, ``height``,
    ``fps``, ``guidance``) or to the machine (``device``, ``dtype``). ``resolve`` fills these in,
    and the method's options that are left out. ``linear`` and ``cache`` become the speed's, or
    ``none``; on a CPU ``linear`` is also that of a model which runs as ``high`` by itself.

    Args:
        prompt: what to show, at most 10,000 characters.
        negative_prompt: what to avoid; used when guidance is on.
        image: file of the video's first frame, for image-to-video.
        last_image: file of its last frame, where the model takes one.
        keyframes: files of frames between them, by frame number from 0, where the model takes some.
        model: a bundled model's name, a diffusers folder, or a hub id.
        method: a name from ``vidsparse.METHODS``; ``dense`` skips nothing. Left empty it becomes
            the preset's, the model's own, or the one whose options are given.
        method_options: the method's own options.
        preset: file of a calibrated method. It sets the method, its numbers, the order and the
            schedule, and frames and size if they are left open.
        order: how video tokens are ordered.
        dense_steps: first steps kept dense (decimal: share rounded up; integer: count).
        dense_last_steps: last steps kept dense.
        dense_layers: first layers kept dense.
        dense_last_layers: last layers kept dense.
        reuse: steps that a plan serves.
        refresh: steps at which sparse layers compute everything and keep what their plan lacks,
            which the following steps add (decimal: share rounded up; integer: count; 0: none).
        steps: denoising steps, at most 1,000.
        frames: video frames, at most 10,000.
        width: pixels, at most 8,192.
        height: pixels, at most 8,192.
        fps: frames per second of the written video, from 0.1 to 1000.
        guidance: classifier-free guidance scale, from 0 to 100; 1 or less turns it off.
        seed: of the initial noise, from 0 to 2^63 - 1.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``fp32``, ``bf16`` or ``fp16``; the VAE stays in fp32.
        offload: ``none``, ``model`` or ``group``.
        compile: compile the transformer's blocks with ``torch.compile``; None is the speed's, or
            False.
        linear: number format of the transformers' large linear layers: ``none`` (the model's own),
            ``fp8``, ``int8`` or ``bf16``.
        speed: a bundle of settings for what is left open: ``exact``, ``high``, ``balanced`` or
            ``fast``.
        cache: step cache: ``none``, ``first-block``, ``taylorseer`` or ``guidance``.
        cache_threshold: with ``first-block`` the change of the first block's residual below which
            the other blocks are left out; with ``taylorseer`` N, to run one of N steps; with
            ``guidance`` the same of the unconditional branch.
        lora: a LoRA file, folder or hub id.
        implementation: ``auto`` or the kernel implementation to insist on.
        dense_kernel: what runs dense attention: ``stock``, ``gluon`` or ``auto``, the faster.

    Raises:
        OptionError: a value is not valid, whatever the model.
    """

    prompt: str
    negative_prompt: str = ""
    image: str | None = None
    last_image: str | None = None
    keyframes: Mapping[int, str] = field(default_factory=dict)
    model: str = "shapes"
    method: str = ""
    method_options: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    order: str | None = None
    dense_steps: int | float | None = None
    dense_last_steps: int | float = 0
    dense_layers: int | float | None = None
    dense_last_layers: int | float | None = None
    reuse: int | None = None
    refresh: int | float | None = None
    steps: int | None = None
    frames: int | None = None
    width: int | None = None
    height: int | None = None
    fps: int | float | None = None
    guidance: float | None = None
    seed: int = 0
    device: str | None = None
    dtype: str | None = None
    offload: str = "none"
    compile: bool | None = None
    speed: str | None = None
    linear: str | None = None
    cache: str | None = None
    cache_threshold: float | None = None
    lora: str | None = None
    implementation: str = "auto"
    dense_kernel: str = "auto"

    def __post_init__(self) -> None:
        _check_prompt("prompt", self.prompt)
        _check_prompt("negative_prompt", self.negative_prompt)
        for name in ("steps", "frames", "width", "height"):
            _check_count(name, getattr(self, name), MOST[name])
        _check_number("fps", self.fps, least=FPS[0], most=FPS[1])
        _check_number("guidance", self.guidance, least=0, most=MOST_GUIDANCE)
        _check_seed(self.seed)
        check_device_name(self.device)
        check_choice("dtype", self.dtype, (None, *DTYPES))
        check_choice("offload", self.offload, OFFLOADS)
        check_choice("linear", self.linear, (None, *LINEARS))
        check_choice("speed", self.speed, (None, *SPEEDS))
        check_cache(self.cache, self.cache_threshold)
        if self.last_image is not None and self.image is None:
            raise OptionError("last_image needs image, the first frame. Hint: give both.")
        if any(type(at) is not int for at in self.keyframes):
            raise OptionError(
                "keyframes must map whole frame numbers to files, "
                f"got {f'{dict(self.keyframes)}'[:60]}. Hint: {{41: 'middle.png'}}."
            )
        if self.keyframes and self.image is None:
            raise OptionError("keyframes need image, the first frame. Hint: give both.")
        for path in self.images().values():
            check_image(path)
        self._check_attention()

    def _check_attention(self) -> None:
        # the core's own checks, which import torch: kept out of this module's import.
        from vidsparse.kernels import IMPLEMENTATIONS
        from vidsparse.methods import make_method
        from vidsparse.order import check_order
        from vidsparse.route import DENSE_KERNELS
        from vidsparse.schedule import Schedule

        if self.order is not None:
            check_order(self.order)
        check_choice("implementation", self.implementation, ("auto", *IMPLEMENTATIONS))
        check_choice("dense_kernel", self.dense_kernel, DENSE_KERNELS)
        Schedule.of(self)
        if self.preset is None:
            if not self.method:
                name = own_method(self.model, self.speed, self.method_options)
                object.__setattr__(self, "method", name)
            method = make_method(self.method, **self.method_options)
        else:
            method = self._take_preset(self.preset)
        # stored as JSON values, so that equal requests look equal.
        options = method.options()
        own = {name: options[name] for name in options if name in self.method_options}
        object.__setattr__(self, "method_options", own)

    def _take_preset(self, path: str) -> SparseMethod:
        from vidsparse.presets import load_preset

        preset = load_preset(path)
        if self.method not in ("", preset.method):
            raise OptionError(
                f"{preset.source} is for {preset.method}, not for {self.method}. "
                "Hint: leave the method out."
            )
        preset.check_order(self.order or preset.order)
        settled = {
            "method": preset.method,
            "order": preset.order,
            **{k: v for k, v in preset.schedule.items() if getattr(self, k) is None},
            **{k: v for k, v in preset.video.items() if getattr(self, k) is None},
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        preset.check_video(**{name: getattr(self, name) for name in preset.video})
        return preset.make_method(**self.method_options)

    def images(self) -> dict[str, str]:
        """The files of its images, by what each is."""
        named = {"image": self.image, "last_image": self.last_image}
        between = {f"keyframe {at}": self.keyframes[at] for at in sorted(self.keyframes)}
        return {name: path for name, path in (named | between).items() if path is not None}

    def options(self) -> dict[str, Any]:
        """Every option except the prompt, as JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "prompt"}


def own_method(model: str, speed: str | None, options: Collection[str]) -> str:
    """The method of a request that names none.

    It is ``dense`` at the speed ``exact``, and at another speed the method of that speed on the
    model. Without a speed it is the one of the model's card, or ``fg-attn`` if there is no card or
    the model is not on this machine. If options are given that this method does not have, it is the
    method that would run without the speed, if that has them, or else the only one that has them.

    Raises:
        ModelError: the model's card cannot be read.
    """
    from vidsparse.methods import METHODS

    if speed == "exact":
        return "dense"
    folder = model_folder(model)
    own = card_method(folder, speed)
    if own not in METHODS:
        # refused by that name where the method is made.
        return own
    able = [
        name
        for name, cls in METHODS.items()
        if set(options) <= {field.name for field in cls.option_fields()}
    ]
    if own in able:
        return own
    if (plain := card_method(folder)) in able:
        return plain
    # several that could be meant are for the user to choose from.
    return able[0] if len(able) == 1 else own


def check_ready(request: GenerateRequest, defaults: Defaults) -> None:
    """Raise an ``OptionError`` where the method needs calibrated numbers and there are none.

    ``request`` is one that was resolved.
    """
    from vidsparse.methods import SparseMethod, make_method
    from vidsparse.presets import load_preset

    method = make_method(request.method, **request.method_options)
    if request.preset is not None or not isinstance(method, SparseMethod):
        return
    own = defaults.presets.get(request.method)
    if own is None:
        method.check_numbers()
        return
    video = "{frames} frames of {width}x{height}".format_map(load_preset(own).video)
    if method.needs_numbers:
        raise OptionError(
            f"{method.name} needs calibrated numbers, and those that come with {request.model} are "
            f"for {video} in the model's own order. Hint: ask for that size and leave order and "
            f"options out, or make a preset with `vidsparse calibrate --method {method.name}`."
        )


def check_kernels(request: GenerateRequest) -> None:
    """Raise an ``OptionError`` where a kernel asked for by name runs nothing on the device.

    ``request`` is one that was resolved. What else a kernel needs, of dtype and head dim, is said
    once a model's calls come.
    """
    import torch

    from vidsparse.kernels import support

    assert request.device is not None
    asked = {"dense_kernel": request.dense_kernel}
    if request.method != "dense":
        asked["implementation"] = request.implementation
    for name, kernel in asked.items():
        if kernel in ("auto", "stock"):
            continue
        # a dtype and a head dim that all of them take.
        reason = support(kernel, request.device, torch.bfloat16, 64)
        if reason is not None:
            raise OptionError(
                f"{name} {kernel} was asked for, and it {reason}. "
                "Hint: auto takes the fastest that can run."
            )


def _own_preset(request: GenerateRequest, defaults: Defaults) -> str | None:
    """The preset that comes with the model if it fits the request, else None.

    It does not fit if the request names a speed, which has settings of its own, or a LoRA, or
    changes a setting that the numbers were found with.
    """
    from vidsparse.methods import METHODS
    from vidsparse.presets import load_preset

    path = defaults.presets.get(request.method)
    if path is None or any((request.preset, request.speed, request.lora)):
        return None
    preset = load_preset(path)
    width, height = _size(request, defaults)
    video = {"frames": request.frames or defaults.frames, "width": width, "height": height}
    free = METHODS[request.method].free_options
    fits = (
        video == dict(preset.video)
        and request.order in (None, preset.order)
        and all(
            name in free or (name not in preset.tables and preset.options[name] == value)
            for name, value in request.method_options.items()
        )
    )
    return path if fits else None


def resolve(
    request: GenerateRequest, defaults: Defaults, *, own_presets: bool = True
) -> GenerateRequest:
    """Fill in what the request leaves open, and check it against the model's units.

    A preset that comes with the model is used if it fits the request; ``own_presets=False`` turns
    that off. A size left open has the model's area, and the shape of the image if there is one.

    Raises:
        OptionError: the model cannot make such frames or size, or the device does not exist.
        UnsupportedError: this machine cannot run linear layers in the format asked for.
    """
    from vidsparse.methods import make_method
    from vidsparse.presets import load_preset

    names = (
        "dense_steps", "dense_layers", "dense_last_layers", "reuse", "refresh", "steps", "frames",
        "fps", "guidance",
    )  # fmt: skip
    device = check_device(request.device)
    defaults = defaults.on(device)
    own_preset = _own_preset(request, defaults) if own_presets else None
    if own_preset is not None:
        request = replace(request, preset=own_preset)
    defaults = defaults.with_method(request.method)
    values = {
        name: getattr(defaults, name) if getattr(request, name) is None else getattr(request, name)
        for name in names
    }
    values["width"], values["height"] = _size(request, defaults)
    _check_frames(values["frames"], defaults)
    _check_keyframes(request, values["frames"], defaults)
    for name in ("width", "height"):
        _check_size(name, values[name], defaults)
    values["device"] = device
    dtype = values["dtype"] = check_dtype(request.dtype, device)
    bundled = _bundled(request, defaults, values["steps"], device, dtype)
    values |= {name: bundled[name] for name in ("linear", "compile", "cache")}
    values |= {k: v for k, v in bundled["schedule"].items() if getattr(request, k) is None}
    if request.preset is None:
        own = defaults.options_beside(request.method, request.method_options)
        options = {**own, **bundled["method_options"], **request.method_options}
        method = make_method(request.method, **options)
    else:
        method = load_preset(request.preset).make_method(**request.method_options)
    values["method_options"] = method.options()
    values["order"] = request.order or method.token_order or defaults.order
    if values["refresh"] is None:
        values["refresh"] = method.refresh
    check_linear(values["linear"], device, dtype)
    if request.cache_threshold is None:
        own = bundled["cache_threshold"]
        values["cache_threshold"] = CACHES.get(values["cache"]) if own is None else own
    # a card may have named it.
    check_cache(values["cache"], values.get("cache_threshold"))
    return replace(request, **values)


_LEAVES_OUT: Final = ("method", "preset", "cache")
_ERRS_BY: Final = (
    *_LEAVES_OUT, "method_options", "cache_threshold", "order", "dense_steps", "dense_last_steps",
    "dense_layers", "dense_last_layers", "reuse", "refresh", "implementation", "steps", "guidance",
    "lora", "image", "last_image", "keyframes",
)  # fmt: skip


def runs_as_measured(request: GenerateRequest, defaults: Defaults) -> bool:
    """Whether what is known of a speed's quality holds for a request that was resolved.

    It does if no setting that changes the error was asked for beside the speed, and the video has
    the model's own length and size. Of ``exact``, which leaves nothing out, it holds at any.
    """
    alone = resolve(
        GenerateRequest(
            prompt="",
            model=request.model,
            speed=request.speed,
            device=request.device,
            dtype=request.dtype,
        ),
        defaults,
    )
    video = [(one.frames, one.width, one.height) for one in (request, defaults)]
    exact = request.speed == "exact"
    names = _LEAVES_OUT if exact else _ERRS_BY
    same = all(getattr(request, name) == getattr(alone, name) for name in names)
    linears = {request.linear, alone.linear}
    # what is known says that it is of layers that were not in bf16.
    alike = len(linears) == 1 or (not exact and linears == {"none", "bf16"})
    return same and alike and (exact or video[0] == video[1])


def runs_as_calibrated(request: GenerateRequest, preset: Preset) -> bool:
    """Whether what calibration measured with ``preset`` holds for a request that was resolved.

    It does if the request has the schedule, the free options, the steps, the guidance and the LoRA
    of the videos that were measured, and nothing beside its method takes from its quality.
    """
    measured = preset.measured
    as_made = {
        **preset.schedule,
        # a calibration has none.
        "dense_last_steps": 0,
        "method_options": preset.make_method().options(),
        "steps": measured.get("denoising_steps", request.steps),
        "guidance": measured.get("guidance", request.guidance),
        "cache": "none",
    }
    lora = None if request.lora is None else lora_hash(request.lora)
    return (
        all(getattr(request, name) == value for name, value in as_made.items())
        # a CPU's own choice: bf16 took 0.1 dB of 40 (docs/speed.md).
        and request.linear in ("none", "bf16")
        and lora == measured.get("lora_hash")
    )


def _bundled(
    request: GenerateRequest, defaults: Defaults, steps: int, device: str, dtype: str
) -> dict[str, Any]:
    """The settings of the request's speed, or the plain ones, under what the request gives."""
    found: dict[str, Any] = {
        "linear": "none", "compile": False, "cache": "none", "cache_threshold": None,
        "schedule": {}, "method_options": {},
    }  # fmt: skip
    machine: dict[str, Any] = {"steps": steps, "device": device, "dtype": dtype}
    if request.guidance is not None:
        # what a step's forwards are depends on it.
        defaults = replace(defaults, guidance=request.guidance)
    if request.speed is not None:
        bundle = bundle_for(request.speed, defaults, method=request.method, **machine)
        found = {name: getattr(bundle, name) for name in found}
        found["method_options"] = beside(bundle.method_options, request.method_options)
    elif runs_as_high(request.method, defaults):
        found["linear"] = bundle_for("high", defaults, **machine).linear
        if request.preset is None:
            # what a preset promises was measured without one.
            found["cache"], found["cache_threshold"] = own_cache(defaults, steps)
    if found["cache"] == "guidance" and defaults.guidance <= 1:
        found |= {"cache": "none", "cache_threshold": None}
    if request.cache is not None:
        # the threshold is that of the bundle's own cache.
        found["cache_threshold"] = None
    for name in ("linear", "compile", "cache"):
        if (given := getattr(request, name)) is not None:
            found[name] = given
    return found


def _size(request: GenerateRequest, defaults: Defaults) -> tuple[int, int]:
    """Width and height as asked for; what is left open is the image's shape, or the model's."""
    width, height = request.width, request.height
    if request.image is None or None not in (width, height):
        return width or defaults.width, height or defaults.height
    across, down = check_image(request.image)

    def to_unit(pixels: float) -> int:
        return max(1, round(pixels / defaults.size_factor)) * defaults.size_factor

    if width is not None:
        return width, to_unit(width * down / across)
    if height is not None:
        return to_unit(height * across / down), height
    area = defaults.width * defaults.height
    return to_unit(math.sqrt(area * across / down)), to_unit(math.sqrt(area * down / across))


def settings_hash(request: GenerateRequest) -> str:
    """Eight hex digits over everything that changes the video, except the prompt.

    Two spellings of one model folder agree, and so do a default left open and the same value
    given; a LoRA, an image and a preset are what they say, not where they lie. A model or a LoRA of
    the hub is its id, since it may not have been fetched yet. Where weights rest (``offload``) does
    not count.

    Raises:
        ModelError: the model is not there.
        OptionError: the request does not fit the model or the machine.
    """
    from vidsparse.presets import load_preset

    ref = resolve_model(request.model)
    resolved = resolve(request, ref.defaults)
    settings = resolved.options()
    settings["model"] = f"{ref.source}:{ref.location}"
    if ref.source != "hub":
        # trained further or fetched anew, the same folder makes other videos.
        settings["files"] = files_stamp(Path(ref.location))
    settings |= {name: image_hash(path) for name, path in request.images().items()}
    # each is there by itself now.
    del settings["keyframes"]
    if request.lora is not None:
        settings["lora"] = lora_stamp(request.lora)
    if resolved.preset is not None:
        # what it says, not where it lies.
        settings["preset"] = load_preset(resolved.preset).digest
    # 4 and 4.0 are one scale.
    settings["guidance"] = float(settings["guidance"])
    # what it stood for is there already.
    del settings["speed"]
    del settings["offload"]
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def with_prompt(request: GenerateRequest, prompt: str) -> GenerateRequest:
    """The same request for another prompt; only the prompt is checked.

    Raises:
        OptionError: the prompt is no text, or too long.
    """
    _check_prompt("prompt", prompt)
    made = copy.copy(request)
    object.__setattr__(made, "prompt", prompt)
    return made


def recorded_request(prompt: str, options: Mapping[str, Any]) -> GenerateRequest:
    """The request of a finished video, by its record.

    A preset and images that it names are not looked for: they may have been moved, removed or made
    anew since, and the video is there all the same.

    Raises:
        OptionError: a value is not valid.
        TypeError: an option is unknown.
    """
    named = {name: options.get(name) for name in ("image", "last_image", "preset")}
    for name, file in named.items():
        if file is not None and not isinstance(file, str):
            raise OptionError(f"{name} must be the path of a file, got {file!r}")
    # JSON has no keys that are numbers.
    between = {int(at): file for at, file in options.get("keyframes", {}).items()}
    made = GenerateRequest(prompt=prompt, **{**options, **dict.fromkeys(named), "keyframes": {}})
    for name, value in {**named, "keyframes": between}.items():
        object.__setattr__(made, name, value)
    return made


def _check_prompt(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise OptionError(f"{name} must be text, got {type(text).__name__}")
    if len(text) > MAX_PROMPT:
        raise OptionError(
            f"{name} must have at most {MAX_PROMPT:,} characters, got {len(text):,}. "
            "Hint: models read a few hundred words; shorten it."
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise OptionError(
            f"{name} is not valid Unicode text at character {error.start + 1}. "
            "Hint: give it in UTF-8."
        ) from None


def _check_count(name: str, value: object, most: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name} must be a whole number, got {_brief(value)}")
    if not 1 <= value <= most:
        bound = "least 1" if value < 1 else f"most {most:,}"
        raise OptionError(f"{name} must be at {bound}, got {_brief(value)}")


def _check_number(name: str, value: object, *, least: float, most: float) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # whole numbers may be too large to be made a float.
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        raise OptionError(f"{name} must be a number, got {_brief(value)}")
    assert isinstance(value, (int, float))
    if not least <= value <= most:
        bound = f"least {least:g}" if value < least else f"most {most:g}"
        raise OptionError(f"{name} must be at {bound}, got {_brief(value)}")


def _brief(value: object) -> str:
    """A value as an error shows it, however long it is."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise OptionError(f"seed must be a whole number from 0 to 2^63 - 1, got {_brief(seed)}")


def _check_frames(frames: int, defaults: Defaults) -> None:
    factor, rest = defaults.frame_factor, defaults.frame_rest
    if frames % factor != rest:
        nearest = max(0, round((frames - rest) / factor)) * factor + rest
        raise OptionError(
            f"frames must be {factor}k+{rest} for {defaults.family}, got {frames}. "
            f"Hint: use {nearest}."
        )


def _check_keyframes(request: GenerateRequest, frames: int, defaults: Defaults) -> None:
    """A keyframe stands where a frame of the latent begins; what has an option of its own aside."""
    factor = defaults.frame_factor
    last = frames - factor
    for at in request.keyframes:
        if at % factor != 1 or not 0 < at <= last:
            if last < 1:
                raise OptionError(
                    f"a video of {frames} frames has no room for keyframes. "
                    "Hint: ask for more frames, or leave keyframes out."
                )
            nearest = min(max(0, round((at - 1) / factor)) * factor + 1, last)
            raise OptionError(
                f"keyframes of {defaults.family} must be {factor}k+1, counted from 0, and at most "
                f"{last} in {frames} frames, got {at}. Hint: use {nearest}."
            )
        if at == last and request.last_image is not None:
            raise OptionError(
                f"keyframe {at} and last_image are the same frame. Hint: leave one out."
            )


def _check_size(name: str, pixels: int, defaults: Defaults) -> None:
    factor = defaults.size_factor
    if pixels % factor:
        nearest = max(1, round(pixels / factor)) * factor
        raise OptionError(
            f"{name} must be a multiple of {factor} for {defaults.family}, got {pixels}. "
            f"Hint: use {nearest}."
        )
