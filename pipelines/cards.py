"""What the files of a model folder say: its card, its settings, the defaults that follow."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vidsparse.errors import ModelError, listed
from vidsparse.files import parse_json
from vidsparse.pipelines.families import WAN
from vidsparse.pipelines.family import DEFAULT_METHOD, SCHEDULED, Defaults, Family
from vidsparse.pipelines.placement import LINEARS
from vidsparse.pipelines.speed import SPEEDS, speed_method

CARD: Final = "vidsparse.json"
"""Optional file of a model folder: its settings and the words it knows."""

PRESETS: Final = "presets"
"""Optional folder of a model folder: a preset for each of some methods, ``METHOD.json``."""

GUIDER: Final = "guider/guider_config.json"
"""HunyuanVideo 1.5 and Motif-Video hold their guidance in a component, not in the call."""

_CARD_SETTINGS: Final = (
    "steps",
    "guidance",
    "fps",
    "order",
    "dense_steps",
    "dense_layers",
    "dense_last_layers",
    "reuse",
    "refresh",
    "method",
    "method_options",
    "schedules",
    "speeds",
)
_IN_A_SPEED: Final = (
    "method_options",
    "schedule",
    "cache",
    "cache_threshold",
    "linear",
    "psnr",
    "prompts",
)
_COUNTS: Final = ("frames", "width", "height", "steps", "reuse", "frame_factor", "size_factor")
_NUMBERS: Final = ("guidance", "fps", "dense_steps", "dense_layers", "dense_last_layers", "refresh")


def read_card(path: Path) -> dict[str, Any]:
    """What a card says, its texts checked.

    Raises:
        ModelError: it cannot be read, or holds something else.
    """
    card = read_json(path)
    for name, kind in (
        *(("description", str), ("license", str)),
        *(("vocabulary", list), ("example_prompts", list)),
    ):
        value = card.get(name, kind())
        texts = value if isinstance(value, list) else [value]
        if not isinstance(value, kind) or not all(isinstance(text, str) for text in texts):
            form = "text" if kind is str else "a list of texts"
            raise ModelError(f"{name} in {path} must be {form}, got {f'{value!r}'[:60]}")
    return card


def card_method(folder: Path, speed: str | None = None) -> str:
    """The method of requests that name none, on the model of a folder.

    It is what the model's card names, or ``fg-attn``; at a speed, what that takes there.

    Raises:
        ModelError: the card cannot be read.
    """
    card = read_card(folder / CARD) if (folder / CARD).is_file() else {}
    method = str(card.get("method", DEFAULT_METHOD))
    if speed is None:
        return method
    speeds = card.get("speeds")
    # what is no object is refused where the settings are read.
    return speed_method(speed, method, speeds if isinstance(speeds, Mapping) else {})


def checked_defaults(
    family: Family, folder: Path, index: Mapping[str, Any], card: Mapping[str, Any]
) -> Defaults:
    """The defaults, of the types that requests count on; their bounds are those of requests.

    Raises:
        ModelError: a file holds something else.
    """
    try:
        defaults = _read_defaults(family, folder, index, card)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelError(f"the settings in {folder} cannot be read: {f'{error}'[:200]}") from None
    _check_methods(defaults, folder)
    for name, small in defaults.on_cpu.items():
        if not isinstance(small, int) or isinstance(small, bool) or not 1 <= small < 2**31:
            raise ModelError(
                f"{name} on_cpu in {folder} must be a whole number from 1, got {f'{small!r}'[:60]}"
            )
    for name, kinds, form in (
        *((name, (int,), "a whole number from 1") for name in _COUNTS),
        *((name, (int, float), "a number") for name in _NUMBERS),
        ("order", (str,), "the name of an order"),
        ("method", (str,), "the name of a method"),
    ):
        value: Any = getattr(defaults, name)
        if name == "refresh" and value is None:
            continue
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or (name in _COUNTS and not 1 <= value < 2**31):
            raise ModelError(f"{name} in {folder} must be {form}, got {f'{value!r}'[:60]}")
    return defaults


def _check_methods(defaults: Defaults, folder: Path) -> None:
    """What a card says of methods and speeds, as far as building a request will not say it."""

    def check(where: str, held: Any, known: Sequence[str] | None) -> None:
        if not isinstance(held, Mapping):
            raise ModelError(f"{where} in {folder} must be an object, got {f'{held!r}'[:60]}")
        unknown = [str(name) for name in held if known is not None and name not in known]
        if unknown:
            raise ModelError(
                f"{where} in {folder} cannot have {unknown[0][:60]!r}. "
                f"Hint: there are {listed(known or ())}."
            )

    for what, names, inside in (
        ("method_options", None, None),
        ("schedules", None, SCHEDULED),
        ("speeds", SPEEDS, _IN_A_SPEED),
    ):
        held = getattr(defaults, what)
        check(what, held, names)
        for name, values in held.items():
            check(f"{what} of {name[:60]}", values, inside)
    for name, speed in defaults.speeds.items():
        check(f"method_options of {name}", speed.get("method_options", {}), None)
        check(f"schedule of {name}", speed.get("schedule", {}), SCHEDULED)
        for number in ("cache_threshold", "psnr", "prompts"):
            value = speed.get(number, 0)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ModelError(f"{number} of {name} in {folder} must be a number")
        if speed.get("linear", "none") not in LINEARS:
            raise ModelError(f"linear of {name} in {folder} must be one of {listed(LINEARS)}")
        if ("psnr" in speed) != ("prompts" in speed):
            raise ModelError(
                f"speed {name} in {folder} must have both psnr and prompts, or neither"
            )


def _read_defaults(
    family: Family, folder: Path, index: Mapping[str, Any], card: Mapping[str, Any]
) -> Defaults:
    """The card's settings where there are any, then those that the model's own files tell."""
    vae = read_json(folder / "vae" / "config.json")
    transformer = read_json(folder / "transformer" / "config.json")
    values = _own_settings(folder, index, transformer, vae)
    values |= {name: card[name] for name in _CARD_SETTINGS if name in card}
    values["presets"] = {file.stem: str(file) for file in sorted(folder.glob(f"{PRESETS}/*.json"))}
    values |= _video(folder, card)
    on_cpu = card.get("on_cpu", {})
    if not isinstance(on_cpu, Mapping) or not on_cpu.keys() <= {"frames", "size"}:
        raise ModelError(
            f"on_cpu in {folder / CARD} must be an object of frames and size, "
            f"got {f'{on_cpu!r}'[:60]}"
        )
    values["on_cpu"] = _video(folder, on_cpu)
    if family is WAN:
        # its VAEs compress differently, and say so; others are what their pipelines take them for.
        pixels = vae.get("scale_factor_spatial", 8) * math.lcm(
            *transformer.get("patch_size", [1, 2, 2])[1:]
        )
        values["frame_factor"] = vae.get("scale_factor_temporal", 4)
        # the pipeline's own check wants its unit too, whatever the configuration.
        values["size_factor"] = math.lcm(pixels, family.defaults.size_factor)
    return dataclasses.replace(family.defaults.for_transformer(transformer), **values)


def _video(folder: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """Frames, width and height as a card says them; what it leaves out is not there."""
    video = {"frames": said["frames"]} if "frames" in said else {}
    if "size" in said:
        match = re.fullmatch(r"(\d+)x(\d+)", str(said["size"]))
        if match is None:
            raise ModelError(
                f"size in {folder / CARD} must look like 256x256, got {said['size']!r}"
            )
        video["width"], video["height"] = int(match[1]), int(match[2])
    return video


def _own_settings(
    folder: Path,
    index: Mapping[str, Any],
    transformer: Mapping[str, Any],
    vae: Mapping[str, Any],
) -> dict[str, Any]:
    """Where models of one family were made for different videos, and how their files tell."""
    if index.get("expand_timesteps"):
        # Wan 2.2 TI2V-5B.
        return {"frames": 121, "width": 1280, "height": 704, "fps": 24}
    values: dict[str, Any] = {}
    if "sample_frames" in transformer:
        # CogVideoX: 49 frames of 720x480 in 1.0; 1.5 patches frames in pairs.
        values["frames"] = transformer["sample_frames"]
        # its VAE halves a picture between any two of its levels.
        pixels = 2 ** (len(vae["block_out_channels"]) - 1)
        values["width"] = transformer["sample_width"] * pixels
        values["height"] = transformer["sample_height"] * pixels
        values["fps"] = 16 if transformer.get("patch_size_t") else 8
    if transformer.get("target_size") == 960:
        # HunyuanVideo 1.5 at 720p.
        values |= {"width": 1280, "height": 720}
    if transformer.get("image_condition_type") == "latent_concat":
        # HunyuanVideo's first image-to-video model: no guidance is distilled into it, it is run
        # without any, and it gives away four of the 129 frames it was trained on.
        values |= {"guidance": 1.0, "frames": 125}
    guider = folder / GUIDER
    if guider.is_file():
        config = read_json(guider)
        values["guidance"] = config["guidance_scale"] if config.get("enabled", True) else 1.0
    return values


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a model.

    Raises:
        ModelError: it is missing, cannot be read, or holds something else.
    """
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing. Hint: the folder is no complete diffusers model."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value
