"""One request to generate a video: every option in one value, validated before anything loads."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from vidsparse.errors import OptionError
from vidsparse.pipelines.families import Defaults
from vidsparse.pipelines.image import check_image, image_hash
from vidsparse.pipelines.models import resolve_model
from vidsparse.pipelines.placement import (
    DTYPES,
    OFFLOADS,
    check_choice,
    check_device,
    check_device_name,
    check_dtype,
)

if TYPE_CHECKING:
    from vidsparse.methods import SparseMethod

_DEFAULT_METHOD: Final = "fg-attn"

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
    ``dense_last_layers``, ``reuse``, ``steps``, ``frames``, ``width``, ``height``, ``fps``,
    ``guidance``) or to the machine (``device``, ``dtype``); ``resolve`` fills it in, and the
    method's options that are not given.

    Args:
        prompt: what to show, at most 10,000 characters.
        negative_prompt: what to avoid; used when guidance is on.
        image: file of the video's first frame, for image-to-video.
        last_image: file of its last frame, where the model takes one.
        model: a bundled model's name, a diffusers folder, or a hub id.
        method: a name from ``vidsparse.METHODS``; ``dense`` runs the stock pipeline untouched. Left
            empty it becomes the preset's, or ``fg-attn``.
        method_options: the method's own numbers.
        preset: file of a calibrated method; it says the method, its numbers, the order, and frames
            and size where those are left open.
        order: how video tokens are ordered.
        dense_steps: first steps kept dense (decimal: share rounded up; integer: count).
        dense_last_steps: last steps kept dense.
        dense_layers: first layers kept dense.
        dense_last_layers: last layers kept dense.
        reuse: steps that a plan serves.
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
        compile: compile the transformer's blocks with ``torch.compile``.
        lora: a LoRA file, folder or hub id.
        implementation: ``auto`` or the kernel implementation to insist on.

    Raises:
        OptionError: a value is not valid, whatever the model.
    """

    prompt: str
    negative_prompt: str = ""
    image: str | None = None
    last_image: str | None = None
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
    compile: bool = False
    lora: str | None = None
    implementation: str = "auto"

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
        if self.last_image is not None and self.image is None:
            raise OptionError("last_image needs image, the first frame. Hint: give both.")
        for path in (self.image, self.last_image):
            if path is not None:
                check_image(path)
        self._check_attention()

    def _check_attention(self) -> None:
        # the core's own checks, which import torch: kept out of this module's import.
        from vidsparse.kernels import IMPLEMENTATIONS
        from vidsparse.methods import make_method
        from vidsparse.order import check_order
        from vidsparse.schedule import Schedule

        if self.order is not None:
            check_order(self.order)
        check_choice("implementation", self.implementation, ("auto", *IMPLEMENTATIONS))
        given = {f.name: getattr(self, f.name) for f in fields(Schedule)}
        Schedule(**{name: value for name, value in given.items() if value is not None})
        if self.preset is None:
            if not self.method:
                object.__setattr__(self, "method", _DEFAULT_METHOD)
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

    def options(self) -> dict[str, Any]:
        """Every option except the prompt, as JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "prompt"}


def check_ready(request: GenerateRequest) -> None:
    """Raise an ``OptionError`` where the method needs calibrated numbers and no preset is given."""
    from vidsparse.methods import SparseMethod, make_method

    method = make_method(request.method, **request.method_options)
    if request.preset is None and isinstance(method, SparseMethod):
        method.check_numbers()


def resolve(request: GenerateRequest, defaults: Defaults) -> GenerateRequest:
    """Fill in what the request leaves open, and check it against the model's units.

    A size left open follows the shape of the image, where there is one, at the model's area.

    Raises:
        OptionError: frames or size that the model cannot make, or a device that is not there.
    """
    from vidsparse.methods import make_method
    from vidsparse.presets import load_preset

    names = (
        "dense_steps", "dense_layers", "dense_last_layers", "reuse", "steps", "frames",
        "fps", "guidance",
    )  # fmt: skip
    values = {
        name: getattr(defaults, name) if getattr(request, name) is None else getattr(request, name)
        for name in names
    }
    values["width"], values["height"] = _size(request, defaults)
    _check_frames(values["frames"], defaults)
    for name in ("width", "height"):
        _check_size(name, values[name], defaults)
    if request.preset is None:
        options = {**defaults.method_options.get(request.method, {}), **request.method_options}
        method = make_method(request.method, **options)
    else:
        method = load_preset(request.preset).make_method(**request.method_options)
    values["method_options"] = method.options()
    values["order"] = request.order or method.token_order or defaults.order
    device = check_device(request.device)
    return replace(request, **values, device=device, dtype=check_dtype(request.dtype, device))


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
    given. Where weights rest (``offload``) does not count.

    Raises:
        ModelError: the model is not there.
        OptionError: the request does not fit the model or the machine.
    """
    from vidsparse.presets import load_preset

    ref = resolve_model(request.model)
    settings = resolve(request, ref.defaults).options()
    settings["model"] = f"{ref.source}:{ref.location}"
    for name in ("image", "last_image"):
        if (path := getattr(request, name)) is not None:
            settings[name] = image_hash(path)
    if request.lora is not None and os.path.exists(request.lora):
        settings["lora"] = os.path.realpath(request.lora)
    if request.preset is not None:
        # what it says, not where it lies.
        settings["preset"] = load_preset(request.preset).digest
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
            f"{name} holds what is no Unicode text, at character {error.start + 1}. "
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
    factor = defaults.frame_factor
    if frames % factor != 1:
        nearest = max(0, round((frames - 1) / factor)) * factor + 1
        raise OptionError(
            f"frames must be {factor}k+1 for {defaults.family}, got {frames}. Hint: use {nearest}."
        )


def _check_size(name: str, pixels: int, defaults: Defaults) -> None:
    factor = defaults.size_factor
    if pixels % factor:
        nearest = max(1, round(pixels / factor)) * factor
        raise OptionError(
            f"{name} must be a multiple of {factor} for {defaults.family}, got {pixels}. "
            f"Hint: use {nearest}."
        )
