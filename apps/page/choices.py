"""What the form shows once another model, method or preset is chosen.

A preset settles its method, most of its options, the token order and the size of the video: what
it leaves open is all that is shown beside it.

The file has over 600 lines because every choice changes what the others show.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import gradio as gr

from vidsparse.apps.page import draw
from vidsparse.apps.page.desk import Desk, toast
from vidsparse.apps.page.form import CACHED, Form
from vidsparse.apps.page.offers import (
    BY_HAND,
    BY_HAND_CHOICE,
    among,
    examples_of,
    first_method,
    first_preset,
    needs_preset,
    offered,
    preset_choices,
    settles,
    takes,
    titled,
)
from vidsparse.apps.page.report_tab import ReportTab
from vidsparse.apps.page.sizes import length_choices, size_choices
from vidsparse.apps.page.speeds import first_speed, speed_of, speed_text, values_of_speed
from vidsparse.apps.page.values import check_texts
from vidsparse.errors import OptionError
from vidsparse.files import parse_json
from vidsparse.methods import METHODS
from vidsparse.pipelines.family import SCHEDULED
from vidsparse.pipelines.speed import SPEEDS, quality_of, speed_reaching

if TYPE_CHECKING:
    from vidsparse.apps.page.host import HostPreset
    from vidsparse.pipelines.models import ModelRef
    from vidsparse.pipelines.request import GenerateRequest

# what a preset settles beside the method and its options.
_SETTLED = ("order", "frames", "width", "height")
# what a visitor writes, whatever the model; the page's script has the same list.
_WRITTEN = ("prompt", "negative_prompt", "seed", "videos", "prompt_lines")
_NO_LINK = (
    "the link's settings do not fit this page: at most its prompts and its seed are taken. Hint: "
    "its host may offer other models or presets than the page that the link is from."
)
_NO_SETTINGS = (
    "the settings that this browser kept do not fit this page any more: prompts and seed alone are "
    "back. Hint: its host may offer other models or presets than before."
)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
# of events that are no business of a client's, and that nobody waits for.
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}

# another address of the open page is an event of a component, as gradio has none of its own for it.
_FORWARD_LINK = "addEventListener('hashchange', () => trigger('select'));"


class Choices:
    """Events of the form's dropdowns that change what else it shows.

    Args:
        desk: whose host offers models and presets.
        form: the controls.
        report: what can be varied there follows the method.
    """

    def __init__(self, desk: Desk, form: Form, report: ReportTab) -> None:
        self._desk = desk
        self._host = desk.host
        self._form = form
        self._report = report
        # what a visitor can change while a choice is answered.
        self._fields: dict[str, Any] = {
            **form.controls,
            "videos": form.videos,
            "size": form.size,
            "length": form.length,
            "speed": form.speed,
            "target": form.target,
            **report.own,
        }
        # what is shown in keeping with that.
        self._places: dict[str, Any] = {
            **self._fields,
            **{f"group {method}": group for method, group in form.groups.items()},
            **{f"fold {method}": fold for method, fold in form.folds.items()},
            "speed facts": form.speed_facts,
        }
        # what nobody writes into.
        uploads = [upload for upload, _ in form.images.values()]
        self._others = [form.pictures, *uploads, form.examples, form.card]
        self._question = gr.Textbox(visible="hidden", show_label=False, elem_id="question")
        self._answer = gr.Textbox(visible="hidden", show_label=False, elem_id="answer")
        self._pasted = gr.HTML(visible="hidden", js_on_load=_FORWARD_LINK)

    def connect(self, page: gr.Blocks, reuse: gr.Button, named: gr.Textbox) -> None:
        """Attach the events, once every control of the page is there.

        Args:
            page: asks for what its browser kept.
            reuse: chooses the settings of the video that is shown.
            named: holds its name.
        """
        held, fields = _by_name(self._fields), list(self._fields.values())
        controls = self._form.controls
        for control, name in (
            # not change: what the page itself puts there should not be answered by defaults. Nor
            # select, which the keyboard does not cause.
            (controls["model"].input, "model"),
            (controls["method"].input, "method"),
            (controls["preset"].input, "preset"),
            # not input, which gradio does not tell of what is pasted.
            (self._form.target.change, "target"),
        ):
            control(
                None,
                js=f"(...values) => vidsparseChoose('{name}', {held})",
                inputs=fields,
                outputs=[self._question],
                **_QUIET,
            )
        # what a speed stands for is known before its numbers are there: it is read at once.
        self._form.speed.input(
            None,
            js=f"(...values) => vidsparseSpeed({held}, {json.dumps(self._speed_notes())})",
            inputs=fields,
            outputs=[self._question, self._form.speed_facts],
            **_QUIET,
        )
        # another window of the visitor may show another video: the name goes with the question.
        reuse.click(
            None,
            js=f"(shown, ...values) => vidsparseAsk('settings', {{ ...{held}, shown }})",
            inputs=[named, *fields],
            outputs=[self._question],
            **_QUIET,
        )
        # gradio asks one question at a time, and of those that wait only the last.
        answered = self._question.change(
            self.choose,
            inputs=[self._question],
            outputs=[self._answer, self._report.vary, *self._others],
            trigger_mode="always_last",
            **_QUIET,
        )
        # by the browser, which knows what was written while the answer was on its way.
        placed = answered.success(
            None,
            js=f"(answer, ...values) => vidsparseAnswered(answer, {held}, "
            f"{json.dumps(list(self._places))})",
            inputs=[self._answer, *fields],
            outputs=[self._question, *self._places.values()],
            **_QUIET,
        )
        said = json.dumps(draw.note(speed_text(self._form, self._host.models[0], BY_HAND)))
        speed = [self._form.speed, self._form.target, self._form.speed_facts]
        # what waited for an answer that does not come is asked for without it.
        failed = answered.failure(
            None,
            js=f"(...values) => vidsparseUnanswered({held}, {said})",
            inputs=fields,
            outputs=[self._question, *speed],
            **_QUIET,
        )
        # numbers written by hand are no named speed any more; the server need not be asked.
        for name in self._by_hand():
            # of a text, gradio's input does not tell what is taken away or pasted.
            text = isinstance(controls[name], gr.Textbox)
            (controls[name].change if text else controls[name].input)(
                None,
                js=f"(value) => vidsparseByHand('{name}', value, {said})",
                inputs=[controls[name]],
                outputs=speed,
                **_QUIET,
            )
        self._form.controls["prompt"].change(
            None,
            js="(prompt) => { document.querySelector('vs-words')?.look(prompt); }",
            inputs=[self._form.controls["prompt"]],
            **_QUIET,
        )
        self._connect_sizes()
        self._keep(page, [placed, failed])

    def _speed_notes(self) -> dict[str, dict[str, str]]:
        """By model and speed, what is said below the speeds."""
        return {
            model.name: {
                speed: draw.note(speed_text(self._form, model, speed))
                for speed in (*SPEEDS, BY_HAND)
            }
            for model in self._host.models
        }

    def choose(self, request: gr.Request, question: Any) -> dict[Any, Any]:
        """Answer a choice.

        Args:
            request: of the event.
            question: JSON of its number, of what was chosen, and of what the form held then; of a
                page that was opened, what its browser kept.

        Returns:
            The answer for the browser, JSON of the same number and of the updates of places, and
            the updates of what nobody writes into.

        Raises:
            gr.Error: no page asks like that.
        """
        try:
            told = parse_json(question)
            at, name, held = told["at"], told["name"], told["held"]
        except (ValueError, TypeError, KeyError):
            at, name, held = None, None, None
        return self._told(at, self._answer_of(request, name, held))

    def _answer_of(self, request: gr.Request, name: Any, held: Any) -> dict[Any, Any]:
        """The updates that answer a choice made beside what the form held."""
        match name, held:
            case "model", {"model": model}:
                return self.choose_model(model)
            case "method" | "preset", {"model": model, "method": method, "preset": preset}:
                choose = self.choose_method if name == "method" else self.choose_preset
                return choose(model, method, preset, held)
            case "speed", {"model": model, "speed": str(speed)}:
                return self.choose_speed(model, speed)
            case "target", {"model": model, "target": target}:
                return self.choose_target(model, target)
            case "settings", {"shown": str(name)}:
                try:
                    clip = self._desk.visit(request).video(name)
                    return self.choose_settings(clip.request, clip.record.get("preset"))
                except OptionError as error:
                    raise toast(error) from error
            case "kept", _:
                return self.restore(request, held)
        raise toast(OptionError("a choice is the name of a control and what the form holds"))

    def _told(self, at: Any, updates: Mapping[Any, Any]) -> dict[Any, Any]:
        """The same updates, those of places as the browser's own script reads them."""
        places = {
            place: update if isinstance(update := updates[control], dict) else {"value": update}
            for place, control in self._places.items()
            if control in updates
        }
        told = {control: updates[control] for control in self._others if control in updates}
        if "vary" in places:
            # the server looks at it as well: a run may vary no option that was not offered.
            told[self._report.vary] = gr.update(choices=places["vary"]["choices"])
        return {**told, self._answer: json.dumps({"at": at, "updates": places})}

    def _connect_sizes(self) -> None:
        """Named sizes fill the numbers, and other numbers are by hand; the server is not asked."""
        form = self._form
        sides = [form.controls[name] for name in ("width", "height")]
        frames = [form.controls["frames"]]
        for choice, numbers, split in ((form.size, sides, "x"), (form.length, frames, " ")):
            choice.input(
                None,
                js=f"(chosen, ...now) => chosen ? chosen.split('{split}').map(Number) : now",
                inputs=[choice, *numbers],
                outputs=numbers,
                **_QUIET,
            )
            for number in numbers:
                number.input(None, js="() => ''", outputs=[choice], **_QUIET)
        form.dice.click(
            None,
            js="() => Math.floor(Math.random() * 2 ** 31)",
            outputs=[form.controls["seed"]],
            **_QUIET,
        )

    def choose_model(self, name: Any) -> dict[Any, Any]:
        """Another model: its own settings, and what it takes."""
        model = self._model(name)
        values = self._form.defaults_of(model)
        return {
            **self.updates(
                model, first_method(model), None, values, first_speed(self._form, model)
            ),
            **self._pictures(model),
            **self._introduced(model),
        }

    def choose_method(
        self, name: Any, method: Any, preset: Any, beside: Mapping[str, Any] = _NOTHING
    ) -> dict[Any, Any]:
        """Another method: no preset but one of its own.

        ``beside`` is what the form holds: a schedule written by hand stays, and so does a video
        that a preset is not for.
        """
        model, method = self._model(name), self._method(method)
        made = self._made(preset, model)
        # a dropdown that is merely left says so as well, and should change nothing.
        if made is None or made.preset.method != method:
            made = first_preset(self._host.presets_of(model), model, method, beside)
        return self._chosen(model, method, made, beside)

    def choose_preset(
        self, name: Any, method: Any, preset: Any, beside: Mapping[str, Any] = _NOTHING
    ) -> dict[Any, Any]:
        """A preset, which brings its method, or none; ``beside`` as in ``choose_method``."""
        model, method = self._model(name), self._method(method)
        made = self._made(preset, model)
        if made is not None:
            method = made.preset.method
        elif needs_preset(method):
            # its numbers cannot be written by hand.
            method = first_method(model)
        return self._chosen(model, method, made, beside)

    def choose_speed(self, name: Any, speed: Any) -> dict[Any, Any]:
        """A named speed: the numbers that it stands for; "by hand" leaves them as they are."""
        model = self._model(name)
        if speed not in SPEEDS:
            return {
                self._form.target: "",
                self._form.speed_facts: draw.note(speed_text(self._form, model, BY_HAND)),
            }
        values = values_of_speed(self._form, model, speed)
        return self.updates(model, values["method"], None, values, speed)

    def choose_target(self, name: Any, target: Any) -> dict[Any, Any]:
        """The fastest speed that was measured to give a PSNR."""
        model = self._model(name)
        text = str(target or "").strip()
        psnr = quality_of(text) or quality_of(f"{text} dB")
        if psnr is None:
            note = "A quality is a number of dB, such as 33."
            return {self._form.speed_facts: draw.note(note)}
        try:
            speed = speed_reaching(psnr, model.name, model.defaults)
        except OptionError as error:
            return {self._form.speed_facts: draw.note(str(error))}
        values = values_of_speed(self._form, model, speed)
        updates = self.updates(model, values["method"], None, values, speed)
        # what is typed meanwhile stays.
        del updates[self._form.target]
        return updates

    def choose_settings(
        self, request: GenerateRequest, digest: str | None = None
    ) -> dict[Any, Any]:
        """Everything that a request says; ``digest`` is that of its preset.

        Raises:
            OptionError: this page does not offer its preset, or a picture of it is gone.
        """
        for name, path in request.images().items():
            if not Path(path).is_file():
                raise OptionError(
                    f"the {name.replace('_', ' ')} of these settings is gone from this machine. "
                    "Hint: put the picture in anew, and the settings by hand."
                )
        values = self._form.values_of(request, digest)
        model = self._model(request.model)
        made = self._host.preset(values["preset"], model) if values["preset"] else None
        # a changed upload is looked at like a new one.
        paths = {name: getattr(request, name) for name in self._form.images}
        speed = speed_of(self._form, model, values)
        return {
            **self.updates(model, request.method, made, values, speed),
            **self._pictures(model, **paths),
            **self._introduced(model),
        }

    def _keep(self, page: gr.Blocks, answered: Sequence[Any]) -> None:
        """Keep the settings in the browser, or in a link, and put them back when it is opened.

        Args:
            page: asks for them.
            answered: events that end what a choice, or an opened page, has asked for.
        """
        kept = {**self._form.controls, "videos": self._form.videos, **self._report.own}
        named, controls = _by_name(kept), list(kept.values())
        # no secret: what a visitor typed stays with the visitor.
        state = gr.BrowserState(None, storage_key="vidsparse-settings", secret="vidsparse")
        gr.on(
            [control.change for control in controls],
            None,
            # what was there before is kept until it has been put back, which takes a while.
            js=f"(kept, ...values) => vidsparseKeep(kept, {named})",
            inputs=[state, *controls],
            outputs=[state],
            **_QUIET,
        )
        self._form.share.click(
            None,
            js=f"(...values) => vidsparseLink({named})",
            inputs=controls,
            outputs=[self._form.link],
            **_QUIET,
        )
        # asked for like a choice, beside the page as it was made: what is written before the answer
        # comes stays, also what was written before a page that is being built could ask.
        made = {name: control.value for name, control in self._fields.items()}
        page.load(
            None,
            js=f"(kept) => vidsparseReturn(kept, {json.dumps(made)})",
            inputs=[state],
            outputs=[self._question],
            **_QUIET,
        )
        self._pasted.select(
            None,
            js=f"(...values) => vidsparsePasted({_by_name(self._fields)})",
            inputs=[*self._fields.values()],
            outputs=[self._question],
            **_QUIET,
        )
        for event in answered:
            # what was typed meanwhile is kept as well.
            event.then(
                None,
                js=f"(kept, ...values) => vidsparseBack(kept, {named})",
                inputs=[state, *controls],
                outputs=[state],
                **_QUIET,
            )

    def restore(self, request: gr.Request, stored: Any) -> dict[Any, Any]:
        """The settings that a browser kept or a link carries, where this page can use them."""
        values = self._kept(stored)
        if values is None:
            return self._written_of(stored)
        model = self._model(values["model"])
        made = self._made(values["preset"], model)
        speed = speed_of(self._form, model, values)
        if stored.get("linked"):
            # it carries no pictures, and those of the visitor's last window are no part of it.
            self._desk.keep_images(request, {})
            images: dict[str, str | None] = dict.fromkeys(self._form.images)
        else:
            last = self._desk.last_images(request, stored.get("pictures"))
            images = {name: str(path) for name, path in last.items()}
        method = values["method"]
        return {
            **self.updates(model, method, made, values, speed),
            **self._report.restored(values, method, calibrated=made is not None),
            **({self._form.videos: values["videos"]} if "videos" in values else {}),
            **self._pictures(model, **images),
            **self._introduced(model),
        }

    def _kept(self, stored: object) -> dict[str, Any] | None:
        """What a browser kept of the controls' values, None where it is of no use any more.

        A link need not name all, and an older page had fewer controls. What is not among it, but
        for what a visitor writes, is what the page was made with, or the model or its preset has.
        """
        if not isinstance(stored, Mapping):
            return None
        values = {
            name: value
            for name, value in stored.items()
            if name in (*self._form.controls, *self._report.own, "videos")
            and isinstance(value, str | int | float | bool | None)
        }
        method = values.get("method")
        if not isinstance(method, str) or method not in self._form.groups:
            return None
        try:
            model = self._host.model(values.get("model"))
            made = self._host.preset(values["preset"], model) if values.get("preset") else None
            check_texts(values)
        except OptionError:
            return None
        own = {name: control.value for name, control in self._form.controls.items()}
        return {
            **{name: value for name, value in own.items() if name not in _WRITTEN},
            **self._form.defaults_of(model),
            **self._beside(model, method, made),
            **self._values(made),
            **values,
            "preset": BY_HAND if made is None else made.name,
        }

    def _written_of(self, stored: object) -> dict[Any, Any]:
        """Of settings that do not fit this page, what a visitor wrote, which any model can take.

        Beside it stands what the page was made with: a visitor may be at the form already.
        """
        first = self._host.models[0]
        presets = self._host.presets_of(first)
        updates = {self._form.controls["preset"]: gr.skip()}
        if len(self._host.models) > 1:
            # of several models' presets only the first one's are offered.
            choices = gr.update(choices=preset_choices(presets), visible=bool(presets))
            updates[self._form.controls["preset"]] = choices
        if not isinstance(stored, Mapping):
            return updates
        gr.Warning(_NO_LINK if stored.get("linked") else _NO_SETTINGS)
        for name in _WRITTEN:
            value = stored.get(name)
            # what cannot be written down is in no field either.
            with suppress(OptionError):
                check_texts({name: value})
                if isinstance(value, str | int | float):
                    updates[self._fields[name]] = gr.update(value=value)
        return updates

    def _chosen(
        self,
        model: ModelRef,
        method: str,
        made: HostPreset | None,
        beside: Mapping[str, Any],
    ) -> dict[Any, Any]:
        """The updates once a method or preset was chosen, and what goes with it."""
        own = {one: self._form.beside(model, one) for one in self._form.groups}
        wanted = self._beside(model, method, made)
        values: dict[str, Any] = {}
        for names in (SCHEDULED, CACHED):
            held = {one: beside[one] for one in names if one in beside}
            # what belongs to no method was chosen by hand.
            if held in [{one: each[one] for one in names} for each in own.values()]:
                values |= {one: wanted[one] for one in names}
        return self.updates(model, method, made, {**values, **self._values(made)})

    def _beside(self, model: ModelRef, method: str, made: HostPreset | None) -> dict[str, Any]:
        """What goes with a method; a preset's promise was measured without a step cache."""
        own = self._form.beside(model, method)
        return own if made is None else {**own, "cache": "none", "cache_threshold": ""}

    def _by_hand(self) -> list[str]:
        """The controls that a speed fills."""
        own = [
            name for method in self._form.groups for name in self._form.options_of(method).values()
        ]
        return [*own, "method", "preset", *SCHEDULED, *CACHED]

    def updates(
        self,
        model: ModelRef,
        method: str,
        preset: HostPreset | None,
        values: Mapping[str, Any],
        speed: str = BY_HAND,
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
            "info": "numbers calibrated for this model" if preset is None else settles(preset),
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
        for name, text in form.blanks(model, method).items():
            facts.setdefault(name, {})["placeholder"] = text
        updates = {form.controls[name]: gr.update(**each) for name, each in facts.items()}
        updates[form.speed] = speed
        updates[form.target] = ""
        updates[form.speed_facts] = draw.note(speed_text(form, model, speed))
        updates |= self._sizes(model, values, by_hand=preset is None)
        for name, group in form.groups.items():
            updates[group] = gr.update(visible=name == method and any(shown.values()))
        if method in form.folds:
            updates[form.folds[method]] = gr.update(visible=any([*shown.values()][1:]))
        updates[self._report.vary] = self._report.vary_update(method, calibrated=preset is not None)
        return updates

    def _sizes(
        self, model: ModelRef, values: Mapping[str, Any], *, by_hand: bool
    ) -> dict[Any, Any]:
        """The updates for the names of sizes and lengths; a preset settles both."""
        form, limits = self._form, self._host.limits
        sizes, lengths = size_choices(model, limits), length_choices(model, limits)
        facts: dict[Any, dict[str, Any]] = {
            form.size: {"choices": [*sizes, BY_HAND_CHOICE], "visible": by_hand},
            form.length: {"choices": [*lengths, BY_HAND_CHOICE], "visible": by_hand},
        }
        if "width" in values and "height" in values:
            facts[form.size]["value"] = among(sizes, f"{values['width']}x{values['height']}")
        if "frames" in values:
            facts[form.length]["value"] = among(lengths, str(values["frames"]))
        return {control: gr.update(**each) for control, each in facts.items()}

    def _pictures(self, model: ModelRef, **paths: str | None) -> dict[Any, Any]:
        """The updates for what pictures the model takes; ``paths`` are put there."""
        shown = takes(model)
        updates = {self._form.pictures: gr.update(visible=any(shown.values()))}
        for name, (upload, _) in self._form.images.items():
            value = {"value": paths[name]} if name in paths else {}
            updates[upload] = gr.update(visible=shown[name], **value)
        return updates

    def _introduced(self, model: ModelRef) -> dict[Any, Any]:
        """The updates for what is said of the model, and for its example prompts."""
        examples = gr.update(samples=examples_of(model), visible=bool(model.example_prompts))
        return {self._form.card: draw.model_card(model), self._form.examples: examples}

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

    def _values(self, preset: HostPreset | None) -> dict[str, Any]:
        return {} if preset is None else self._form.values_of_preset(preset)


def _by_name(controls: Iterable[str]) -> str:
    """A script's ``values``, one of each of the controls, by their names."""
    return f"Object.fromEntries({json.dumps([*controls])}.map((name, i) => [name, values[i]]))"
