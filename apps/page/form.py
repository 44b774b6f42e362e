"""The form: controls on the page, and the one ``GenerateRequest`` that they make.

A method's controls come from its own declarations, as its command line options do, so a new method
needs no line here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import gradio as gr

from vidsparse.apps.options import amount, default_text
from vidsparse.apps.page.host import Host
from vidsparse.errors import OptionError
from vidsparse.kernels import IMPLEMENTATIONS
from vidsparse.methods import METHODS, Method, SparseMethod, make_method
from vidsparse.order import ORDERS
from vidsparse.pipelines.models import ModelRef, unknown_words
from vidsparse.pipelines.request import GenerateRequest, resolve


def offered() -> dict[str, type[Method]]:
    """The methods that a visitor can choose: those that work without a file of numbers."""
    return {
        name: cls
        for name, cls in METHODS.items()
        if not (issubclass(cls, SparseMethod) and cls.needs_numbers)
    }


# what a new visitor sees first.
DEFAULT_METHOD = next(iter(offered()))

_WHOLE = ("steps", "frames", "width", "height", "seed", "reuse")
_AMOUNTS = ("dense_steps", "dense_last_steps", "dense_layers", "dense_last_layers")
_FROM_MODEL = ("frames", "width", "height", "steps", "guidance", "fps", "order")


def parameter(method: str, field: str) -> str:
    """The name of a method's own option among the form's values."""
    return f"{method}_{field}".replace("-", "_").replace(".", "_")


def takes_image(model: ModelRef) -> bool:
    """Whether the model can start from a picture."""
    return model.image_class is not None


def needs_image(model: ModelRef) -> bool:
    """Whether the model makes nothing without a picture."""
    return model.text_class is None


def examples_of(model: ModelRef) -> list[list[str]]:
    """Prompts to try, as Gradio lists samples."""
    return [[prompt] for prompt in model.example_prompts[:4]]


class Form:
    """The controls, made where the page is built.

    Attributes:
        controls: name to component; those of ``GenerateRequest`` and each method's own.
        groups: method to the group that holds its own controls.
        image: the upload of a picture, for models that take one.
        preview: the picture as it will be used.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.controls: dict[str, Any] = {}
        self.groups: dict[str, gr.Group] = {}
        self._prompt(host.models[0])
        self._sparsity(host.models[0])
        self._video(host.models[0])
        self._schedule(host.models[0])

    def _add(self, name: str, control: Any) -> Any:
        self.controls[name] = control
        return control

    def _prompt(self, model: ModelRef) -> None:
        self._add(
            "prompt",
            gr.Textbox(
                label="Prompt",
                lines=3,
                max_lines=8,
                value=model.example_prompts[0] if model.example_prompts else "",
                elem_id="prompt",
            ),
        )
        self.examples = gr.Dataset(
            components=[self.controls["prompt"]],
            samples=examples_of(model),
            label="Prompts to try",
            visible=bool(model.example_prompts),
            elem_id="examples",
        )
        self._add(
            "model",
            gr.Dropdown(
                [(Path(each.name).name, each.name) for each in self.host.models],
                value=model.name,
                label="Model",
                visible=len(self.host.models) > 1,
            ),
        )
        shown = takes_image(model)
        self.image = gr.File(
            label="First frame: PNG, JPEG or WebP",
            file_types=[".png", ".jpg", ".jpeg", ".webp"],
            type="filepath",
            height=96,
            visible=shown,
        )
        self.preview = gr.Image(
            label="First frame", interactive=False, visible=False, buttons=[], height=160
        )

    def _sparsity(self, model: ModelRef) -> None:
        methods = offered()
        with gr.Group():
            self._add(
                "method",
                gr.Dropdown(
                    [(f"{cls.title} ({name})", name) for name, cls in methods.items()],
                    value=DEFAULT_METHOD,
                    label="Method",
                    info=METHODS[DEFAULT_METHOD].summary,
                    elem_id="method",
                ),
            )
            for name, cls in methods.items():
                own = model.defaults.method_options.get(name, {})
                with gr.Group(visible=name == DEFAULT_METHOD) as group:
                    for field in cls.option_fields():
                        control = control_for(field, own.get(field.name, field.default))
                        self._add(parameter(name, field.name), control)
                self.groups[name] = group

    def _video(self, model: ModelRef) -> None:
        defaults, first = model.defaults, self.defaults_of(model)
        with gr.Accordion("Video", open=True), gr.Group():
            with gr.Row():
                self._add("seed", _number("Seed", 0))
                self._add("steps", _number("Steps", first["steps"]))
            with gr.Row():
                label, step = f"Frames ({defaults.frame_factor}k+1)", defaults.frame_factor
                self._add("frames", _number(label, first["frames"], step))
                for side in ("width", "height"):
                    control = _number(side.capitalize(), first[side], defaults.size_factor)
                    self._add(side, control)
            with gr.Row():
                for name, label in (("guidance", "Guidance"), ("fps", "Frames a second")):
                    self._add(name, gr.Number(value=first[name], label=label, min_width=90))
            self._add(
                "negative_prompt",
                gr.Textbox(value="", label="Negative prompt", placeholder="what not to show"),
            )

    def _schedule(self, model: ModelRef) -> None:
        first = self.defaults_of(model)
        with gr.Accordion("Where attention stays dense", open=False), gr.Group():
            gr.Markdown(
                "A count (3), or a share with a point (0.24).", elem_classes="note", padding=True
            )
            for pair in (_AMOUNTS[:2], _AMOUNTS[2:]):
                with gr.Row():
                    for name in pair:
                        label = name.removeprefix("dense_").replace("_", " ")
                        label = label if label.startswith("last") else f"first {label}"
                        self._add(
                            name,
                            gr.Textbox(value=first.get(name, "0"), label=label, min_width=110),
                        )
            with gr.Row():
                self._add(
                    "order",
                    gr.Dropdown(
                        list(ORDERS),
                        value=model.defaults.order,
                        label="Token order",
                        min_width=110,
                    ),
                )
                self._add("reuse", _number("Steps a plan serves", model.defaults.reuse))
            self._add(
                "implementation",
                gr.Dropdown(["auto", *IMPLEMENTATIONS], value="auto", label="Kernel"),
            )

    # ---- values ----

    def request(
        self, values: Mapping[str, Any], image: Path | None = None
    ) -> tuple[GenerateRequest, list[str]]:
        """The request that the controls' values make, its defaults filled in, and warnings.

        Raises:
            OptionError: a value that cannot be used, or more than the host allows.
        """
        prompt = values.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise OptionError("there is no prompt. Hint: write what the video should show.")
        model = self.host.model(values.get("model"))
        unknown = unknown_words(model, prompt)
        warnings = []
        if unknown:
            warnings.append(
                f"{model.name} never learned {', '.join(unknown[:8])}"
                f"{' and more' if len(unknown) > 8 else ''}: it will guess."
            )
        request = self.settings({**values, "prompt": prompt.strip()}, image)
        return request, warnings

    def settings(self, values: Mapping[str, Any], image: Path | None = None) -> GenerateRequest:
        """As ``request``, whatever the prompt.

        Raises:
            OptionError: as ``request``.
        """
        model = self.host.model(values.get("model"))
        method = values.get("method")
        if not isinstance(method, str) or method not in self.groups:
            names = ", ".join(self.groups)
            raise OptionError(f"unknown method {method!r}. Hint: choose from {names}.")
        own: dict[str, Any] = {name: whole(name, values.get(name)) for name in _WHOLE}
        own |= {name: _read_amount(name, values.get(name)) for name in _AMOUNTS}
        own |= {name: number(name, values.get(name)) for name in ("guidance", "fps")}
        own["seed"] = own["seed"] or 0
        if image is None and needs_image(model):
            raise OptionError(f"{model.name} starts from a picture. Hint: upload its first frame.")
        if image is not None and takes_image(model):
            own["image"] = str(image)
        request = GenerateRequest(
            prompt=values.get("prompt") or "",
            negative_prompt=values.get("negative_prompt") or "",
            model=model.name,
            method=method,
            method_options=method_options(method, values),
            order=_name("token order", values.get("order")),
            implementation=_name("implementation", values.get("implementation")) or "auto",
            device=self.host.devices[0],
            dtype=self.host.dtype,
            **own,
        )
        # the limits come first: a size far too large should not be told its nearest multiple.
        filled = {
            name: getattr(model.defaults, name)
            for name in ("frames", "width", "height", "steps")
            if getattr(request, name) is None
        }
        self.host.limits.check(dataclasses.replace(request, **filled))
        return resolve(request, model.defaults)

    def values_of(self, request: GenerateRequest) -> dict[str, Any]:
        """The controls' values that make ``request``; those it says nothing about are left out."""
        values = {name: getattr(request, name) for name in self.controls if hasattr(request, name)}
        values |= {name: str(values[name]) for name in _AMOUNTS}
        for name, value in request.method_options.items():
            values[parameter(request.method, name)] = value
        return {name: value for name, value in values.items() if name in self.controls}

    def defaults_of(self, model: ModelRef) -> dict[str, Any]:
        """The controls' values that the model brings, as far as the host allows."""
        limits, defaults = self.host.limits, model.defaults
        values: dict[str, Any] = {name: getattr(defaults, name) for name in _FROM_MODEL}
        for name, most, unit, first in (
            ("steps", limits.steps, 1, 0),
            ("frames", limits.frames, defaults.frame_factor, 1),
            ("width", limits.side, defaults.size_factor, 0),
            ("height", limits.side, defaults.size_factor, 0),
        ):
            values[name] = min(values[name], (most - first) // unit * unit + first)
        values["reuse"] = defaults.reuse
        for name in ("dense_steps", "dense_layers", "dense_last_layers"):
            values[name] = str(getattr(defaults, name))
        for method in self.groups:
            # what the model does not say is the method's own default.
            own = make_method(method, **defaults.method_options.get(method, {})).options()
            values |= {parameter(method, name): value for name, value in own.items()}
        return values


def control_for(field: dataclasses.Field[Any], value: Any) -> Any:
    """The control of a method's own option, by its declaration."""
    facts = field.metadata
    label, info = field.name.replace("_", " "), facts["help"]
    if isinstance(field.default, bool):
        return gr.Checkbox(value=value, label=label, info=info)
    if facts.get("choices"):
        return gr.Dropdown(list(facts["choices"]), value=_text(value), label=label, info=info)
    if isinstance(field.default, int):
        return gr.Number(value=value, label=label, info=info, precision=0)
    if isinstance(field.default, float):
        # no step of its own: a number that is in range should never be called invalid.
        return gr.Number(value=value, label=label, info=info, step=0.05)
    return gr.Textbox(value=_text(value), label=label, info=info, placeholder=facts["metavar"])


def method_options(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The method's own options among the form's values; what is left blank keeps its default.

    Raises:
        OptionError: a value that cannot be read.
    """
    options: dict[str, Any] = {}
    for field in METHODS[method].option_fields():
        value = values.get(parameter(method, field.name))
        if value is None or value == "":
            continue
        if isinstance(field.default, bool):
            options[field.name] = bool(value)
            continue
        try:
            options[field.name] = field.metadata["convert"](_text(value))
        except OptionError:
            raise
        except ValueError:
            raise OptionError(
                f"{field.name} cannot be {value!r} ({field.metadata['help']}). "
                f"Hint: {default_text(field)} is the default."
            ) from None
    return options


def whole(name: str, value: object) -> int | None:
    """A whole number of the form, None where it was left blank.

    Raises:
        OptionError: it is none.
    """
    value = number(name, value)
    if value is None:
        return None
    if value != int(value):
        raise OptionError(f"{name} must be a whole number, got {value:g}")
    return int(value)


def number(name: str, value: object) -> int | float | None:
    """A number of the form, None where it was left blank.

    Raises:
        OptionError: it is none.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptionError(f"{name.replace('_', ' ')} must be a number, got {value!r}")
    return int(value) if value == int(value) else value


def _name(what: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise OptionError(f"unknown {what} {value!r}")
    return value or None


def _read_amount(name: str, value: object) -> int | float:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise OptionError(f"{name} must be a count (3) or a share (0.24), got {value!r}")
    try:
        return amount(str(value)) if str(value).strip() else 0
    except click.BadParameter as error:
        raise OptionError(f"{name}: {error.message}") from None


def _text(value: object) -> str:
    """A value as one types it on the command line."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    # the browser knows one kind of number: 16 and 16.0 are the same to it.
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _number(label: str, value: int, step: int = 1) -> gr.Number:
    # no bounds: gradio would complain of a number without saying which.
    return gr.Number(
        value=value,
        label=label,
        precision=0,
        step=step,
        min_width=90,
    )
