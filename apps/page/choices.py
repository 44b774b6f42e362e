"""What the form shows once another model, method or preset is chosen.

A preset settles its method, most of its options, the token order and the size of the video: what
it leaves open is all that is shown beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gradio as gr

from vidsparse.apps.page.desk import Desk, toast
from vidsparse.apps.page.form import (
    BY_HAND,
    DEFAULT_METHOD,
    Form,
    examples_of,
    needs_preset,
    offered,
    preset_choices,
    takes,
    titled,
)
from vidsparse.apps.page.report_tab import ReportTab
from vidsparse.errors import OptionError
from vidsparse.methods import METHODS

if TYPE_CHECKING:
    from vidsparse.apps.page.host import HostPreset
    from vidsparse.pipelines.models import ModelRef
    from vidsparse.pipelines.request import GenerateRequest

# what a preset settles beside the method and its options.
_SETTLED = ("order", "frames", "width", "height")


class Choices:
    """Events of the form's dropdowns that change what else it shows.

    Args:
        desk: whose host offers models and presets.
        form: the controls.
        report: what can be varied there follows the method.
    """

    def __init__(self, desk: Desk, form: Form, report: ReportTab) -> None:
        self._host = desk.host
        self._form = form
        self._report = report
        uploads = [upload for upload, _ in form.images.values()]
        self.outputs = [
            *form.controls.values(), *form.groups.values(), *form.folds.values(),
            form.pictures, *uploads, form.examples, report.vary,
        ]  # fmt: skip

    def connect(self, page: gr.Blocks) -> None:
        """Attach the events, once every control of the page is there."""
        model, method, preset = (
            self._form.controls[name] for name in ("model", "method", "preset")
        )
        # not change: what the page itself puts there should not be answered by defaults. Nor
        # select, which the keyboard does not cause.
        shared = {
            "outputs": self.outputs,
            "show_progress": "hidden",
            "api_visibility": "private",
            # a choice made while the one before it is answered counts.
            "trigger_mode": "always_last",
        }
        model.input(self.choose_model, inputs=[model], **shared)
        triggers = [method.input, preset.input]
        if len(self._host.models) > 1:
            triggers.append(page.load)

        # one event for both, so that their answers cannot overtake each other.
        def choose(event: gr.EventData, model: Any, method: Any, preset_name: Any) -> Any:
            # not by identity: gradio makes every visitor a new control when it changes.
            if getattr(event.target, "elem_id", None) == preset.elem_id:
                return self.choose_preset(model, method, preset_name)
            return self.choose_method(model, method, preset_name)

        gr.on(triggers, choose, inputs=[model, method, preset], **shared)

    def choose_model(self, name: Any) -> dict[Any, Any]:
        """Another model: its own settings, and what it takes."""
        # not asked for the method: gradio tells of one choice twice, and would hold that method the
        # second time against choices that the first has taken away.
        model = self._model(name)
        values = self._form.defaults_of(model)
        return {
            **self.updates(model, DEFAULT_METHOD, None, values),
            **self._pictures(model),
            self._form.examples: gr.update(
                samples=examples_of(model), visible=bool(model.example_prompts)
            ),
        }

    def choose_method(self, name: Any, method: Any, preset: Any) -> dict[Any, Any]:
        """Another method: no preset but its own, unless it does nothing without."""
        model, method = self._model(name), self._method(method)
        made = self._made(preset, model)
        # a dropdown that is merely left says so as well, and should change nothing.
        if made is None or made.preset.method != method:
            made = self._first_preset(model, method)
        return self._without_echo(model, method, made, method)

    def choose_preset(self, name: Any, method: Any, preset: Any) -> dict[Any, Any]:
        """A preset, which brings its method, or none."""
        model, shown = self._model(name), self._method(method)
        made, method = self._made(preset, model), shown
        if made is not None:
            method = made.preset.method
        elif needs_preset(method):
            # its numbers cannot be written by hand.
            method = DEFAULT_METHOD
        return self._without_echo(model, method, made, shown)

    def choose_settings(self, request: GenerateRequest) -> dict[Any, Any]:
        """Everything that a request says."""
        values = self._form.values_of(request)
        model = self._model(request.model)
        made = self._host.preset(values["preset"], model) if values["preset"] else None
        # a changed upload is looked at like a new one.
        paths = {name: getattr(request, name) for name in self._form.images}
        return {
            **self.updates(model, request.method, made, values),
            **self._pictures(model, **paths),
        }

    def _without_echo(
        self, model: ModelRef, method: str, made: HostPreset | None, shown: str
    ) -> dict[Any, Any]:
        """The updates, without the method that is shown: by now another may have been chosen."""
        updates = self.updates(model, method, made, self._values(made))
        if method == shown:
            updates[self._form.controls["method"]].pop("value")
        return updates

    def updates(
        self, model: ModelRef, method: str, preset: HostPreset | None, values: Mapping[str, Any]
    ) -> dict[Any, Any]:
        """What can be chosen and what is shown; ``values`` are put into the controls on the way."""
        form = self._form
        presets = self._host.presets_of(model)
        facts: dict[str, dict[str, Any]] = {
            name: {"value": value} for name, value in values.items() if name in form.controls
        }
        facts["method"] = {
            "choices": [titled(name) for name in offered(presets)],
            "value": method,
            "info": METHODS[method].summary,
        }
        facts["preset"] = {
            "choices": preset_choices(presets),
            "value": BY_HAND if preset is None else preset.name,
            "info": "numbers calibrated for this model" if preset is None else _settles(preset),
            "visible": bool(presets),
        }
        for name in _SETTLED:
            facts.setdefault(name, {})["visible"] = preset is None
        free = METHODS[method].free_options
        shown = {
            name: preset is None or option in free
            for option, name in form.options_of(method).items()
        }
        for name, visible in shown.items():
            facts.setdefault(name, {})["visible"] = visible
        updates = {form.controls[name]: gr.update(**each) for name, each in facts.items()}
        for name, group in form.groups.items():
            updates[group] = gr.update(visible=name == method and any(shown.values()))
        if method in form.folds:
            updates[form.folds[method]] = gr.update(visible=any([*shown.values()][1:]))
        updates[self._report.vary] = self._report.vary_update(method, calibrated=preset is not None)
        return updates

    def _pictures(self, model: ModelRef, **paths: str | None) -> dict[Any, Any]:
        """The updates for what pictures the model takes; ``paths`` are put there."""
        shown = takes(model)
        updates = {self._form.pictures: gr.update(visible=any(shown.values()))}
        for name, (upload, _) in self._form.images.items():
            value = {"value": paths[name]} if name in paths else {}
            updates[upload] = gr.update(visible=shown[name], **value)
        return updates

    def _model(self, name: Any) -> ModelRef:
        try:
            return self._host.model(name)
        except OptionError as error:
            raise toast(error) from error

    def _method(self, name: Any) -> str:
        if not isinstance(name, str) or name not in self._form.groups:
            raise toast(OptionError(f"unknown method {name!r}"))
        return name

    def _made(self, preset: Any, model: ModelRef) -> HostPreset | None:
        try:
            return self._host.preset(preset, model) if preset else None
        except OptionError as error:
            raise toast(error) from error

    def _first_preset(self, model: ModelRef, method: str) -> HostPreset | None:
        """The preset to begin with, for methods that do nothing without."""
        if not needs_preset(method):
            return None
        fitting = self._host.presets_of(model)
        return next((each for each in fitting if each.preset.method == method), None)

    def _values(self, preset: HostPreset | None) -> dict[str, Any]:
        return {} if preset is None else self._form.values_of_preset(preset)


def _settles(preset: HostPreset) -> str:
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
