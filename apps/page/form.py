"""The form: controls on the page, and the one ``GenerateRequest`` that they make.

A method's controls come from its own declarations, as its command line options do, so a new method
needs no line here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gradio as gr

from vidsparse.apps.page import draw
from vidsparse.apps.page.fields import IMAGES, control_for, holds, number_field, upload
from vidsparse.apps.page.host import Host, HostPreset
from vidsparse.apps.page.offers import (
    BY_HAND,
    BY_HAND_CHOICE,
    among,
    examples_of,
    first_method,
    needs_image,
    needs_preset,
    offered,
    preset_choices,
    takes,
    titled,
)
from vidsparse.apps.page.sizes import length_choices, size_choices
from vidsparse.apps.page.values import (
    amount_text,
    check_seed,
    check_texts,
    form_number,
    method_options,
    name_of,
    parameter,
    read_amount,
    typed,
    whole,
)
from vidsparse.errors import OptionError
from vidsparse.kernels import IMPLEMENTATIONS
from vidsparse.methods import METHODS, Method, make_method
from vidsparse.order import ORDERS
from vidsparse.pipelines.caching import CACHES
from vidsparse.pipelines.family import SCHEDULED
from vidsparse.pipelines.models import ModelRef, unknown_words
from vidsparse.pipelines.request import GenerateRequest, check_kernels, resolve
from vidsparse.pipelines.speed import SPEEDS, own_cache, runs_as_high
from vidsparse.presets import preset_files

OWN_ORDER = ""
"""The choice of no token order."""

_WHOLE = ("steps", "frames", "width", "height", "seed", "reuse")
# a video of less or more no player shows, and no model was made with such guidance.
_BETWEEN = {"fps": (1, 240), "guidance": (0, 100)}
_AMOUNTS = ("dense_steps", "dense_last_steps", "dense_layers", "dense_last_layers", "refresh")
_SELDOM = (
    "guidance", "fps", "negative_prompt", *_AMOUNTS, "order", "reuse", "cache", "cache_threshold",
    "implementation",
)  # fmt: skip
CACHED = ("cache", "cache_threshold")
"""The controls of a step cache, which goes with the method as the schedule does."""

_FROM_MODEL = ("frames", "width", "height", "steps", "guidance", "fps")


def schedule_values(schedule: Mapping[str, int | float | None]) -> dict[str, Any]:
    """Dense steps and the like as their controls hold them: a number of steps, else amounts."""
    return {
        name: value if name == "reuse" else amount_text(value) for name, value in schedule.items()
    }


class Form:
    """The controls, made where the page is built.

    Attributes:
        controls: name to component; those of ``GenerateRequest`` and each method's own.
        groups: method to the group that holds its own controls.
        folds: method to the part of its group that is folded away.
        images: ``image`` and ``last_image`` to the upload of a picture, and the picture as it
            will be used.
        pictures: what holds them, for models that take one.
        card: what the model is and knows, and which words of the prompt it does not know.
        size: fills width and height; ``length`` the frames.
        dice: fills the seed.
        videos: how many Generate makes, with a seed each.
        share: makes a link that carries all settings.
        link: shows it.
        speed: the one control that fills those by hand.
        target: the quality that a speed is to have, where it is chosen by that.
        speed_facts: what its choice stands for.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.controls: dict[str, Any] = {}
        self.groups: dict[str, gr.Group] = {}
        self.folds: dict[str, gr.Accordion] = {}
        self._prompt(host.models[0])
        self._speed()
        self._sparsity(host.models[0])
        self._video(host.models[0])
        self._seldom(host.models[0])
        self._link()

    def _add(self, name: str, control: Any, word: str | None = None) -> Any:
        """Keep a control. ``word`` is what errors call it, where that is not its name."""
        self.controls[name] = control
        # the page's script finds the field that an error names.
        control.elem_classes = [*(control.elem_classes or []), f"vs-field-{word or name}"]
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
        self.card = gr.HTML(draw.model_card(model), elem_id="model-card")
        shown = takes(model)
        with gr.Column(visible=any(shown.values())) as self.pictures:
            with gr.Row():
                uploads = {name: upload(name, shown[name]) for name in IMAGES}
            with gr.Row():
                previews = {
                    name: gr.Image(
                        label=label, interactive=False, visible=False, buttons=[], height=160
                    )
                    for name, label in IMAGES.items()
                }
        self.images = {name: (uploads[name], previews[name]) for name in IMAGES}

    def once_pictures_are_in(self, button: gr.Button) -> Any:
        """The event of a button whose job uses the pictures, for its ``success``.

        It waits for those that are being uploaded or looked at; where one is refused, it fails.
        """
        uploads = {name: upload for name, (upload, _) in self.images.items()}
        return button.click(
            None,
            # gradio gives the values of uploads once they have arrived.
            js=f"(...files) => vidsparsePictures({json.dumps([*uploads])}, files)",
            inputs=[*uploads.values()],
            show_progress="hidden",
            api_visibility="private",
        )

    def _speed(self) -> None:
        self.speed = gr.Radio(
            [*((speed, speed) for speed in SPEEDS), BY_HAND_CHOICE],
            label="Quality and speed",
            elem_id="speed",
        )
        # no number field: gradio shows 0 in one that is blank at first.
        self.target = gr.Textbox(
            label="or the fastest that gives at least",
            placeholder="a PSNR, such as 33 dB",
            elem_id="target",
            max_length=20,
        )
        self.speed_facts = gr.HTML(elem_id="speed-facts")

    def _sparsity(self, model: ModelRef) -> None:
        methods = offered(self.host.presets)
        own_words = {each.name for name in methods for each in METHODS[name].option_fields()}
        folded = gr.Accordion(
            "By hand",
            open=False,
            elem_id="by-hand",
            elem_classes=holds(["method", "preset", *sorted(own_words)]),
        )
        with folded, gr.Group():
            self._add(
                "method",
                gr.Dropdown(
                    [titled(name) for name in methods],
                    value=first_method(model),
                    label="Method",
                    info=METHODS[first_method(model)].summary,
                    elem_id="method",
                ),
            )
            # what fits any model, so that calls may name it; the page asks for its model's own.
            self._add(
                "preset",
                gr.Dropdown(
                    preset_choices(self.host.presets),
                    value=BY_HAND,
                    label="Preset",
                    info="numbers calibrated for this model",
                    visible=bool(self.host.presets_of(model)),
                    elem_id="preset",
                ),
            )
            for name, cls in methods.items():
                own = model.defaults.method_options.get(name, {})
                with gr.Group(visible=name == first_method(model)) as group:
                    self._own_controls(name, cls, own)
                self.groups[name] = group

    def _own_controls(self, name: str, cls: type[Method], own: Mapping[str, Any]) -> None:
        """The method's first option, which says how much is kept, and the others folded away."""
        fields = cls.option_fields()

        def add(field: dataclasses.Field[Any]) -> None:
            control = control_for(field, own.get(field.name, field.default))
            self._add(parameter(name, field.name), control, word=field.name)

        for field in fields[:1]:
            add(field)
        if fields[1:]:
            self.folds[name] = gr.Accordion(
                f"More of {cls.title}",
                open=False,
                elem_classes=holds([field.name for field in fields[1:]]),
            )
            with self.folds[name]:
                for field in fields[1:]:
                    add(field)

    def _video(self, model: ModelRef) -> None:
        defaults, first = model.defaults, self.defaults_of(model)
        with gr.Group():
            with gr.Row():
                self._add("seed", number_field("Seed", 0))
                self.videos = gr.Number(
                    value=1,
                    label="Videos",
                    step=1,
                    min_width=90,
                    elem_id="videos",
                    elem_classes=["vs-field-videos"],
                )
                self._add("steps", number_field("Steps", first["steps"]))
            self.dice = gr.Button("Another seed", size="sm", elem_id="dice")
            with gr.Row():
                limits = self.host.limits
                sizes, lengths = size_choices(model, limits), length_choices(model, limits)
                width, height, frames = (first[name] for name in ("width", "height", "frames"))
                self.size = gr.Dropdown(
                    [*sizes, BY_HAND_CHOICE],
                    value=among(sizes, f"{width}x{height}"),
                    label="Size",
                    min_width=200,
                    elem_id="size",
                )
                self.length = gr.Dropdown(
                    [*lengths, BY_HAND_CHOICE],
                    value=among(lengths, str(frames)),
                    label="Length",
                    min_width=200,
                    elem_id="length",
                )
            with gr.Row():
                label, step = f"Frames ({defaults.frame_factor}k+1)", defaults.frame_factor
                self._add("frames", number_field(label, first["frames"], step))
                for side in ("width", "height"):
                    control = number_field(side.capitalize(), first[side], defaults.size_factor)
                    self._add(side, control)

    def _seldom(self, model: ModelRef) -> None:
        first = self.defaults_of(model)
        with gr.Accordion("More settings", open=False, elem_id="more", elem_classes=holds(_SELDOM)):
            with gr.Group():
                with gr.Row():
                    for name, label in (("guidance", "Guidance"), ("fps", "Frames a second")):
                        self._add(name, number_field(label, first[name]))
                self._add(
                    "negative_prompt",
                    gr.Textbox(value="", label="Negative prompt", placeholder="what not to show"),
                )
            self._schedule(model, first)

    def _link(self) -> None:
        self.share = gr.Button("A link with these settings", size="sm", elem_id="make-link")
        self.link = gr.Textbox(
            label="Link", interactive=False, visible=False, buttons=["copy"], elem_id="link"
        )

    def _schedule(self, model: ModelRef, first: Mapping[str, Any]) -> None:
        gr.Markdown(
            "Where attention stays dense: a count (3), or a share with a point (0.24).",
            elem_classes="note",
        )
        with gr.Group():
            for pair in (_AMOUNTS[:2], _AMOUNTS[2:4]):
                with gr.Row():
                    for name in pair:
                        label = name.removeprefix("dense_").replace("_", " ")
                        label = label if label.startswith("last") else f"first {label}"
                        self._add(
                            name,
                            gr.Textbox(
                                value=first.get(name, "0"),
                                label=label,
                                min_width=110,
                                placeholder=str(first.get(name, "0")),
                            ),
                        )
            with gr.Row():
                self._add(
                    "order",
                    gr.Dropdown(
                        [
                            ("the method's, else the model's", OWN_ORDER),
                            *zip(ORDERS, ORDERS, strict=True),
                        ],
                        value=OWN_ORDER,
                        label="Token order",
                        min_width=150,
                    ),
                )
                self._add("reuse", number_field("Steps a plan serves", first["reuse"]))
                self._add(
                    "refresh",
                    gr.Textbox(
                        value=first.get("refresh", ""),
                        label="Refreshes",
                        placeholder="the method's",
                        min_width=110,
                    ),
                )
            self._add(
                "cache",
                gr.Dropdown(
                    list(CACHES),
                    value=first["cache"],
                    label="Step cache",
                    info="leaves out blocks, or a branch of guidance, that change little",
                ),
            )
            self._add(
                "cache_threshold",
                gr.Textbox(
                    value=first["cache_threshold"],
                    label="Its threshold",
                    info="first-block: a change; the others: run one of so many",
                    placeholder="its own",
                ),
            )
            self._add(
                "implementation",
                gr.Dropdown(["auto", *IMPLEMENTATIONS], value="auto", label="Kernel"),
            )

    # ---- values ----

    def request(
        self, values: Mapping[str, Any], images: Mapping[str, Path] = MappingProxyType({})
    ) -> tuple[GenerateRequest, list[str]]:
        """The request that the controls' values make, its defaults filled in, and warnings.

        ``images`` are the pictures handed in, by their names in the request.

        Raises:
            OptionError: a value that cannot be used, or more than the host allows.
        """
        check_texts(values)
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
        request = self.settings({**values, "prompt": prompt.strip()}, images)
        return request, warnings

    def settings(
        self, values: Mapping[str, Any], images: Mapping[str, Path] | None = MappingProxyType({})
    ) -> GenerateRequest:
        """As ``request``, whatever the prompt; whatever the pictures, where ``images`` is None.

        Raises:
            OptionError: as ``request``.
        """
        check_texts(values)
        model = self.host.model(values.get("model"))
        method = values.get("method")
        if not isinstance(method, str) or method not in self.groups:
            names = ", ".join(self.groups)
            raise OptionError(f"unknown method {method!r}. Hint: choose from {names}.")
        own: dict[str, Any] = {name: whole(name, values.get(name)) for name in _WHOLE}
        written = (*_AMOUNTS, "cache_threshold")
        amounts = {name: read_amount(name, values.get(name, "")) for name in written}
        # the others are left to the model, the method and the cache.
        own |= {name: value for name, value in amounts.items() if value is not None}
        own |= {name: form_number(name, values.get(name)) for name in ("guidance", "fps")}
        for name, (least, most) in _BETWEEN.items():
            if own[name] is not None and not least <= own[name] <= most:
                raise OptionError(
                    f"{name} must lie between {least} and {most} on this page, got {own[name]}"
                )
        own["seed"] = own["seed"] or 0
        check_seed(own["seed"])
        preset = name_of("preset", values.get("preset"))
        if preset is not None:
            own["preset"] = self._preset_path(preset, model, method)
        elif needs_preset(method):
            raise OptionError(f"{method} works by calibrated numbers only. Hint: choose a preset.")
        if images is not None:
            own |= _pictures_for(model, images)
        request = GenerateRequest(
            prompt=values.get("prompt") or "",
            negative_prompt=values.get("negative_prompt") or "",
            model=model.name,
            method=method,
            method_options=method_options(
                method, values, model.defaults.method_options.get(method, {})
            ),
            order=name_of("token order", values.get("order")),
            cache=name_of("step cache", values.get("cache")) or "none",
            # they belong to the loaded model, which is shared.
            linear="none",
            implementation=name_of("implementation", values.get("implementation")) or "auto",
            device=self.host.devices[0],
            dtype=self.host.dtype,
            **own,
        )
        # the limits come first: a size far too large should not be told its nearest multiple.
        within = self._within_limits(model)
        filled: dict[str, Any] = {
            name: value for name, value in within.items() if getattr(request, name) is None
        }
        self.host.limits.check(dataclasses.replace(request, **filled))
        sides = ("width", "height")
        if request.image and all(within[side] == getattr(model.defaults, side) for side in sides):
            # what no limit lowers stays open, and takes the picture's shape.
            filled = {name: value for name, value in filled.items() if name not in sides}
        request = resolve(dataclasses.replace(request, **filled), model.defaults)
        check_kernels(request)
        # that shape may be longer than what is allowed.
        self.host.limits.check(request)
        return request

    def _preset_path(self, name: str, model: ModelRef, method: str) -> str:
        preset = self.host.preset(name, model)
        if preset.preset.method != method:
            raise OptionError(
                f"the preset {name} is for {preset.preset.method}, not for {method}. "
                "Hint: choose that method."
            )
        return preset.path

    def values_of(self, request: GenerateRequest, digest: str | None = None) -> dict[str, Any]:
        """The controls' values that make ``request``; those it says nothing about are left out.

        ``digest`` is that of its preset's contents, where it is known.

        Raises:
            OptionError: this page does not offer its preset.
        """
        values = {name: getattr(request, name) for name in self.controls if hasattr(request, name)}
        values |= {name: amount_text(values[name]) for name in _AMOUNTS}
        own = request.cache_threshold == CACHES[request.cache or "none"]
        values["cache_threshold"] = "" if own else amount_text(request.cache_threshold)
        values["preset"] = self._preset_name(request, digest)
        values |= self._options(request.method, request.method_options)
        return {name: value for name, value in values.items() if name in self.controls}

    def _preset_name(self, request: GenerateRequest, digest: str | None) -> str:
        """The name of a request's preset on this page, by what stands in it.

        By its file where that is not known: one that was made anew since has other numbers.
        """
        if request.preset is None:
            return BY_HAND
        file = preset_files(request.preset)[0]
        for each in self.host.presets:
            if digest is None:
                same = Path(each.path).resolve() == file.resolve()
            else:
                same = each.preset.digest == digest
            if same and request.model in each.models:
                return each.name
        raise OptionError(
            f"this page does not offer the preset {file.stem}, which these settings are made with. "
            "Hint: its host offers presets with --preset."
        )

    def defaults_of(self, model: ModelRef) -> dict[str, Any]:
        """The controls' values that the model brings, as far as the host allows."""
        values: dict[str, Any] = {name: getattr(model.defaults, name) for name in _FROM_MODEL}
        values |= self._within_limits(model)
        values |= {"order": OWN_ORDER, **self.beside(model, first_method(model))}
        for method in self.groups:
            values |= self.values_of_options(model, method, {})
        return values

    def _within_limits(self, model: ModelRef) -> dict[str, int]:
        """The model's steps, frames, width and height, or the most below that the host allows."""
        limits, defaults = self.host.limits, model.defaults
        return {
            name: min(getattr(defaults, name), (most - first) // unit * unit + first)
            for name, most, unit, first in (
                ("steps", limits.steps, 1, 0),
                ("frames", limits.frames, defaults.frame_factor, 1),
                ("width", limits.side, defaults.size_factor, 0),
                ("height", limits.side, defaults.size_factor, 0),
            )
        }

    def values_of_options(
        self, model: ModelRef, method: str, values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The controls' values of a method's own options, as it reads those among ``values``.

        What is left blank the model has, and what the model does not say, the method.

        Raises:
            OptionError: one of them cannot be read.
        """
        own = model.defaults.method_options.get(method, {})
        made = make_method(method, **{**own, **method_options(method, values, own)})
        return self._options(method, made.options())

    def blanks(self, model: ModelRef, method: str) -> dict[str, str]:
        """What each written number will be where it is left blank, by the names of controls."""
        values = {**self.defaults_of(model), **self.beside(model, method)}
        return {
            name: typed(value)
            for name, value in values.items()
            # refreshes are left to the method, and say so.
            if isinstance(self.controls.get(name), gr.Number | gr.Textbox) and name != "refresh"
        }

    def beside(self, model: ModelRef, method: str) -> dict[str, Any]:
        """The controls' values for the schedule and the step cache the model has for a method."""
        settings = model.defaults.with_method(method)
        cache, threshold = "none", None
        if runs_as_high(method, settings):
            cache, threshold = own_cache(settings, settings.steps)
        return {
            **schedule_values({name: getattr(settings, name) for name in SCHEDULED}),
            "cache": cache,
            "cache_threshold": amount_text(threshold),
        }

    def options_of(self, method: str) -> dict[str, str]:
        """A method's own options, and the names of their controls."""
        fields = METHODS[method].option_fields()
        return {field.name: parameter(method, field.name) for field in fields}

    def values_of_preset(self, preset: HostPreset) -> dict[str, Any]:
        """The controls' values that a preset settles or was made with."""
        own = preset.preset
        return {**own.video, "order": own.order, **self._options(own.method, own.options)}

    def _options(self, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """A method's options as the values of their controls.

        None is a value like others, where a field that is left blank stands for the default.
        """
        values = {parameter(method, name): value for name, value in options.items()}
        return {
            name: typed(value) if isinstance(self.controls.get(name), gr.Textbox) else value
            for name, value in values.items()
        }


def _pictures_for(model: ModelRef, images: Mapping[str, Path]) -> dict[str, str]:
    """Those of the pictures that the model takes.

    Raises:
        OptionError: it makes nothing without another one.
    """
    own = {name: str(path) for name, path in images.items() if takes(model)[name]}
    if "image" not in own and needs_image(model):
        raise OptionError(f"{model.name} starts from a picture. Hint: upload its first frame.")
    if "last_image" not in own and model.needs_last_image:
        raise OptionError(f"{model.name} ends with a picture. Hint: upload its last frame.")
    return own
