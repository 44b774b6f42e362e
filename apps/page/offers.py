"""What the page offers of a model: methods, presets, pictures and prompts to choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vidsparse.apps.page.host import HostPreset
from vidsparse.methods import METHODS, Method, SparseMethod
from vidsparse.pipelines.models import ModelRef

BY_HAND = ""
"""The choice of no preset, of no speed, and of no named size."""

BY_HAND_CHOICE = ("by hand", BY_HAND)


def offered(presets: Sequence[HostPreset] = ()) -> dict[str, type[Method]]:
    """The methods that a visitor can choose: those that work by themselves or by a preset."""
    calibrated = {each.preset.method for each in presets}
    return {
        name: cls for name, cls in METHODS.items() if name in calibrated or not needs_preset(name)
    }


def needs_preset(method: str) -> bool:
    """Whether the method works by calibrated numbers only."""
    cls = METHODS[method]
    return issubclass(cls, SparseMethod) and cls.needs_numbers


def first_method(model: ModelRef) -> str:
    """What the page shows first of a model: its own method, where that needs no preset."""
    own = model.defaults.method
    return own if own in offered() else next(iter(offered()))


def takes(model: ModelRef) -> dict[str, bool]:
    """Which pictures the model can use: for the first frame, and for the last one."""
    return {"image": model.image_class is not None, "last_image": model.takes_last_image}


def needs_image(model: ModelRef) -> bool:
    """Whether the model makes nothing without a picture."""
    return model.text_class is None


def examples_of(model: ModelRef) -> list[list[str]]:
    """Prompts to try, as Gradio lists samples."""
    return [[prompt] for prompt in model.example_prompts[:4]]


def titled(method: str) -> tuple[str, str]:
    """A method as a choice: what is shown, and its name."""
    return f"{METHODS[method].title} ({method})", method


def among(choices: Sequence[tuple[str, str]], value: str) -> str:
    """The value, where it is one of the choices."""
    return value if any(value == each for _, each in choices) else BY_HAND


def preset_choices(presets: Sequence[HostPreset]) -> list[tuple[str, str]]:
    """Presets as choices, and none of them first."""
    named = [(f"{each.name} ({each.preset.method})", each.name) for each in presets]
    return [("none: numbers by hand", BY_HAND), *named]


def first_preset(
    presets: Sequence[HostPreset], model: ModelRef, method: str, beside: Mapping[str, Any]
) -> HostPreset | None:
    """Which of ``presets`` to begin with: the model's own, where it is for the video asked for.

    Of methods that do nothing without, any. ``beside`` are the form's values.
    """
    fitting = [one for one in presets if one.preset.method == method]
    if not needs_preset(method):
        own = model.defaults.presets.get(method)
        fitting = [
            one
            for one in fitting
            if one.path == own
            and all(beside.get(name) in (None, "", n) for name, n in one.preset.video.items())
        ]
    # those that the host offers stand before the models' own.
    return next(iter(fitting), None)


def settles(preset: HostPreset) -> str:
    """What a preset leaves nobody to choose, in one line."""
    made = preset.preset
    free = METHODS[made.method].free_options
    own = [
        f"{name} {'by head' if name in made.tables else value}"
        for name, value in made.options.items()
        if name not in free and value is not None
    ]
    video = "{frames} frames of {width}x{height}".format(**made.video)
    return f"settles {', '.join([*own, f'{made.order} order', video])}"
