"""The page's form makes the command line's requests, within what the host allows."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from page_host import (
    METHODS_OFFERED,
    choices_of,
    command_line,
    form_of,
    host_of,
    once_chosen,
    save_preset,
    values_of,
)
from page_jobs import queue_of
from PIL import Image

from vidsparse.apps.page.host import Limits, read_presets
from vidsparse.apps.page.visits import Visits
from vidsparse.errors import OptionError
from vidsparse.methods import METHODS
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.family import SCHEDULED, Family
from vidsparse.pipelines.models import resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve
from vidsparse.pipelines.speed import SPEEDS
from vidsparse.pipelines.video import read_video


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(OptionError, match="limit of steps"):
        Limits(steps=0)


@pytest.mark.parametrize(
    ("limit", "name"), [("frames", "frames"), ("side", "width"), ("steps", "steps")]
)
def test_a_request_beyond_a_limit_is_refused(limit: str, name: str) -> None:
    request = resolve(GenerateRequest(prompt="a"), resolve_model("shapes").defaults)
    Limits().check(request)
    with pytest.raises(OptionError, match=f"{name} can be at most 3 on this page"):
        Limits(**{limit: 3}).check(request)


def test_visitors_choose_from_the_host_s_models_only(tmp_path: Path) -> None:
    host = host_of(tmp_path)
    assert host.model("shapes").name == "shapes"
    for name in ("/etc", "../shapes", "owner/name", None, ["shapes"]):
        with pytest.raises(OptionError, match="this page has no model"):
            host.model(name)


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return form_of(host_of(tmp_path_factory.mktemp("form"), frames=49, side=512))


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A form with the numbers that come with its model, and what choices put there."""
    host = host_of(tmp_path_factory.mktemp("chosen"), frames=49, side=512)
    presets = read_presets([], host.models, host.limits)
    built = choices_of(dataclasses.replace(host, presets=presets))
    yield built.form, built.choices
    built.desk.queue.close()


@pytest.mark.parametrize("method", [name for name in METHODS if name != "dense"])
def test_a_method_chosen_makes_the_command_line_s_request(
    chosen: tuple[Any, Any], method: str
) -> None:
    form, choices = chosen
    beside = (*SCHEDULED, "cache", "cache_threshold")
    held = {name: form.controls[name].value for name in beside}
    updates = choices.choose_method("shapes", method, "", held)
    put = _put(form, updates)
    request, warnings = form.request(values_of(form, **{"method": method, **put}))
    # linear layers are those of the model that visitors share.
    assert request == dataclasses.replace(command_line(method=method), linear="none")
    assert warnings == []


@pytest.mark.parametrize("method", ["foresight", "fg-attn"])
def test_an_amount_left_blank_is_what_its_grey_text_says(form: Any, method: str) -> None:
    (model,) = form.host.models
    grey = form.blanks(model, method)
    for name in ("dense_steps", "dense_last_steps", "dense_layers", "dense_last_layers"):
        request = form.settings(once_chosen(form, method, **{name: " "}))
        said = grey.get(name, form.controls[name].placeholder)
        assert (name, str(getattr(request, name))) == (name, said)


def test_what_a_browser_kept_is_answered_to_the_browser_alone(chosen: tuple[Any, Any]) -> None:
    form, choices = chosen
    own = {"prompt": "a blue ring", "seed": 11, "prompt_lines": "a red ball"}
    asked = {"at": 1, "name": "kept", "held": {**values_of(form), **own}}
    visitor = SimpleNamespace(session_hash="returned", request=None)
    told = choices.choose(visitor, json.dumps(asked))
    (answer,) = [told[control] for control in told if control.elem_id == "answer"]
    updates = json.loads(answer)["updates"]
    assert {name: updates[name]["value"] for name in own} == own
    # it knows what was written by then, which the server does not.
    assert not set(told) & set(form.controls.values())


def _put(form: Any, updates: dict[Any, Any]) -> dict[str, Any]:
    """The values that updates put into the form's controls."""
    return {
        name: updates[control]["value"]
        for name, control in form.controls.items()
        if "value" in updates.get(control, {})
    }


def test_a_preset_runs_without_the_model_s_step_cache(tmp_path: Path) -> None:
    host = host_of(tmp_path, frames=49, side=512)
    save_preset(tmp_path / "own.json", "foresight")
    presets = read_presets([str(tmp_path / "own.json")], host.models, host.limits)
    (own,) = (each.name for each in presets if each.preset.method == "foresight")
    built = choices_of(dataclasses.replace(host, presets=presets))
    beside = (*SCHEDULED, "cache", "cache_threshold")
    held = {name: built.form.controls[name].value for name in beside}
    assert held["cache"] == "guidance"
    choose = built.choices.choose_preset
    with_it = _put(built.form, choose("shapes", "foresight", own, held))
    assert with_it["cache"] == "none"
    # without it again it is the model's; what was chosen by hand stays.
    back = _put(built.form, choose("shapes", "foresight", "", {**held, **with_it}))
    by_hand = {**held, "cache": "first-block"}
    kept = _put(built.form, choose("shapes", "foresight", own, by_hand))
    built.desk.queue.close()
    assert (back["cache"], kept.get("cache")) == ("guidance", None)


@pytest.mark.parametrize("method", ["fg-attn", "foresight"])
def test_what_a_link_does_not_name_is_the_model_s(chosen: tuple[Any, Any], method: str) -> None:
    form, choices = chosen
    visitor = SimpleNamespace(session_hash="linked", request=None)
    few = {"model": "shapes", "method": method, "prompt": "a red ball"}
    put = _put(form, choices.restore(visitor, {**few, "linked": True}))
    request, _ = form.request(put)
    assert request == dataclasses.replace(command_line(method=method), linear="none")
    # what stands there of these is the visitor's own.
    assert not {"seed", "negative_prompt"} & set(put)


def test_what_an_older_page_did_not_keep_is_the_model_s(chosen: tuple[Any, Any]) -> None:
    form, choices = chosen
    visitor = SimpleNamespace(session_hash="older", request=None)
    kept = values_of(form)
    whole, speed = form.request(kept), choices.restore(visitor, kept)[form.speed]
    for name in set(kept) - {"model", "method", "prompt"}:
        older = {key: value for key, value in kept.items() if key != name}
        updates = choices.restore(visitor, older)
        assert form.request(_put(form, updates)) == whole, name
        assert updates[form.speed] == speed, name


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": "another"}, "that this browser kept do not fit this page any more"),
        ({"preset": "gone"}, "that this browser kept do not fit this page any more"),
        ({"method": "of-old"}, "that this browser kept do not fit this page any more"),
        ({"model": "another", "linked": True}, "the link's settings do not fit this page"),
    ],
)
def test_what_a_visitor_wrote_comes_back_where_the_other_settings_do_not_fit(
    chosen: tuple[Any, Any], wrong: dict[str, Any], words: str
) -> None:
    form, choices = chosen
    own = {"prompt": "a", "negative_prompt": "b", "seed": 11, "prompt_lines": "c\nd"}
    kept = {**values_of(form), **own, "steps": 3}
    visitor = SimpleNamespace(session_hash="returned", request=None)

    def put(stored: dict[str, Any]) -> dict[str, Any]:
        with pytest.warns(UserWarning, match=words):
            told = choices.choose(visitor, json.dumps({"at": 1, "name": "kept", "held": stored}))
        (answer,) = [told[control] for control in told if control.elem_id == "answer"]
        updates = json.loads(answer)["updates"]
        return {name: each["value"] for name, each in updates.items() if "value" in each}

    assert put({**kept, **wrong}) == own
    # what no field can hold is left out.
    assert put({**kept, **wrong, "prompt": "half \ud800", "seed": [1]}) == {
        name: own[name] for name in ("negative_prompt", "prompt_lines")
    }


def test_a_newcomer_is_told_nothing(chosen: tuple[Any, Any], recwarn: Any) -> None:
    _, choices = chosen
    choices.restore(SimpleNamespace(session_hash="new", request=None), None)
    assert not recwarn.list


def test_the_page_s_script_and_its_server_mean_the_same_by_what_is_written() -> None:
    pytest.importorskip("gradio")
    from vidsparse.apps.page import choices

    script = Path(choices.__file__).with_name("viewer.js").read_text(encoding="utf-8")
    assert f"const WRITTEN = {json.dumps(choices._WRITTEN)};" in script


def test_a_link_brings_none_of_the_visitor_s_own_pictures(tmp_path: Path) -> None:
    shapes = resolve_model("shapes")
    model = dataclasses.replace(shapes, image_class="WanImageToVideoPipeline")
    built = choices_of(dataclasses.replace(host_of(tmp_path), models=(model,)))
    built.desk.queue.close()
    cookies = {"cookie": f"{built.desk.cookie}={'k' * 43}"}
    windows = [
        SimpleNamespace(session_hash=name, request=SimpleNamespace(headers=cookies))
        for name in ("first", "opened anew", "of a link", "of a link, opened anew")
    ]
    picture, kept = tmp_path / "mine.png", values_of(built.form)
    built.desk.keep_images(windows[0], {"image": picture})
    upload, _ = built.form.images["image"]
    own, linked, after = (
        built.choices.restore(window, stored)[upload]
        for window, stored in zip(windows[1:], (kept, {**kept, "linked": True}, kept), strict=True)
    )
    assert own["value"] == str(picture)
    assert linked["value"] is None
    # nor once the link's settings are the browser's own.
    assert "value" not in after
    shown = [built.desk.images(window) for window in windows]
    assert shown == [{"image": picture}, {"image": picture}, {}, {}]


@pytest.fixture
def whole_page(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("gradio")
    from vidsparse.apps.page.build import build
    from vidsparse.apps.page.desk import Desk

    host = host_of(tmp_path)
    desk = Desk(host, queue_of(), Visits(host.folder))
    yield build(desk)
    desk.queue.close()


def test_gradio_looks_for_calls_no_more_often_than_a_page_needs(
    whole_page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gradio as gr

    looks: list[Any] = []

    def none_waits(queue: Any) -> int:
        looks.append(queue)
        return 0

    monkeypatch.setattr("gradio.queueing.Queue.__len__", none_waits)

    async def watched(queue: Any) -> int:
        looks.clear()
        looking = asyncio.create_task(queue.start_processing())
        await asyncio.sleep(0.3)
        looking.cancel()
        return len(looks)

    with gr.Blocks() as plain:
        pass
    # fifteen at its own pace.
    assert 1 <= asyncio.run(watched(whole_page._queue)) <= 16
    # by its own default, a thousand times a second where the machine is fast enough.
    assert asyncio.run(watched(plain.queue()._queue)) > 16


def test_no_event_has_a_browser_look_for_places_of_progress_that_nobody_sees(
    whole_page: Any,
) -> None:
    events = whole_page.config["dependencies"]
    assert len(events) > 100
    asked = [event["show_progress"] for event in events if event["backend_fn"]]
    assert set(asked) == {"hidden"}
    assert [event["id"] for event in events if event["show_progress_on"] != []] == []


def test_as_a_page_opens_the_server_puts_nothing_into_what_is_written(whole_page: Any) -> None:
    config = whole_page.config
    written = {
        each["id"]
        for each in config["components"]
        if "vs-field-" in str(each["props"].get("elem_classes"))
        or each["props"].get("elem_id") in ("prompts", "vary", "over")
    }
    assert len(written) > 40
    answers = [
        each["outputs"]
        for each in config["dependencies"]
        if each["backend_fn"] and any(event == "load" for _, event in each["targets"])
    ]
    assert len(answers) > 3
    assert [outputs for outputs in answers if written.intersection(outputs)] == []


def test_a_video_that_a_model_s_preset_is_not_for_stays(chosen: tuple[Any, Any]) -> None:
    form, choices = chosen
    preset = form.controls["preset"]
    own = {"frames": 33, "width": 256, "height": 256}
    for changes, name in (({}, "shapes-sale"), ({"width": 320}, ""), ({"frames": 17}, "")):
        updates = choices.choose_method("shapes", "sale", "", {**own, **changes})
        assert updates[preset]["value"] == name
        for side, value in changes.items():
            assert updates.get(form.controls[side], {}).get("value", value) == value


def test_every_option_of_every_method_has_a_control(form: Any) -> None:
    from vidsparse.apps.page.values import parameter

    assert list(form.groups) == METHODS_OFFERED
    for name in METHODS_OFFERED:
        for field in METHODS[name].option_fields():
            control = form.controls[parameter(name, field.name)]
            assert control.info == field.metadata["help"]


def test_what_is_left_blank_is_what_its_field_says_on_a_page_with_lower_limits(
    tmp_path: Path,
) -> None:
    form = form_of(host_of(tmp_path, frames=26, steps=10, side=200))
    (model,) = form.host.models
    names = ("frames", "steps", "width", "height")
    said = form.blanks(model, "fg-attn")
    assert [said[name] for name in names] == ["25", "10", "192", "192"]
    request, _ = form.request(values_of(form, **dict.fromkeys(names)))
    assert [str(getattr(request, name)) for name in names] == [said[name] for name in names]


def test_a_size_left_blank_takes_a_picture_s_shape_within_the_limits(tmp_path: Path) -> None:
    shapes = resolve_model("shapes")
    model = dataclasses.replace(shapes, image_class="WanImageToVideoPipeline")
    picture = tmp_path / "long.png"
    blank: dict[str, None] = dict.fromkeys(("width", "height"))
    own = shapes.defaults.width
    assert own == shapes.defaults.height == 256

    def size(across: int, side: int) -> tuple[int | None, int | None]:
        Image.new("RGB", (across, 64)).save(picture)
        form = form_of(dataclasses.replace(host_of(tmp_path, side=side), models=(model,)))
        request, _ = form.request(values_of(form, **blank), {"image": picture})
        return request.width, request.height

    assert size(256, side=512) == (512, 128)
    # as its fields say, where the limits are lower than the model's own.
    assert size(256, side=128) == (128, 128)
    with pytest.raises(OptionError, match="width can be at most 256 on this page, got 512"):
        size(256, side=256)


def test_a_new_method_s_controls_follow_its_declaration() -> None:
    gr = pytest.importorskip("gradio")
    from vidsparse.apps.page.fields import control_for
    from vidsparse.methods.base import option

    @dataclasses.dataclass
    class New:
        share: float = option(0.5, flag="--share", metavar="P", help="a share")
        blocks: int = option(4, flag="--blocks", metavar="N", help="a count", convert=int)
        fast: bool = option(False, flag="--fast", metavar="", help="a switch", convert=bool)
        kind: str = option("a", flag="--kind", metavar="K", help="a", convert=str, choices=("a",))
        gate: float | None = option(None, flag="--gate", metavar="L", help="a gate")

    with gr.Blocks():
        kinds = [type(control_for(field, field.default)) for field in dataclasses.fields(New)]
        gate = control_for(dataclasses.fields(New)[-1], None)
    assert kinds == [gr.Number, gr.Number, gr.Checkbox, gr.Dropdown, gr.Textbox]
    # what it will be where it is left blank, as it is typed.
    assert gate.placeholder == "none"


def test_the_form_reads_what_the_browser_sends(form: Any) -> None:
    changes = {
        "seed": 7.0, "steps": 5, "frames": 9, "width": 64, "height": 128.0, "guidance": 2,
        "dense_steps": "2", "dense_last_layers": "0.5", "order": "hilbert", "reuse": 2,
        "refresh": "0.2", "fg_attn_top_p": 1, "fg_attn_tile": "32x8", "fg_attn_merge": "xor",
        "spargeattn_tau": 7,
    }  # fmt: skip
    request, _ = form.request(once_chosen(form, "fg-attn", **changes))
    assert request == command_line(
        seed=7, steps=5, frames=9, size=(64, 128), guidance=2, dense_steps=2,
        dense_last_layers=0.5, order="hilbert", reuse=2, refresh=0.2, method_option_top_p="1",
        method_option_tile="32x8", method_option_merge="xor",
    )  # fmt: skip


def test_the_settings_of_a_request_make_it_again(form: Any) -> None:
    values = values_of(
        form, method="spargeattn", spargeattn_tau=0.7, spargeattn_tile="64x64", seed=3, steps=4,
        dense_steps="3", negative_prompt="blur", order="timemajor",
    )  # fmt: skip
    request, _ = form.request(values)
    again, _ = form.request({**values_of(form), **form.values_of(request)})
    assert again == request


FG = {"method": "fg-attn"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "  "}, "there is no prompt"),
        ({"prompt": None}, "there is no prompt"),
        ({"prompt": "a " * 6000}, "at most 10,000 characters"),
        ({"model": "/etc/passwd"}, "this page has no model"),
        ({"method": "magic"}, "unknown method"),
        ({"method": ["fg-attn"]}, "unknown method"),
        ({**FG, "fg_attn_top_p": 0}, "top_p must lie in"),
        ({**FG, "fg_attn_top_p": "much"}, "top_p cannot be 'much'"),
        ({**FG, "fg_attn_tile": "7x7"}, "tile must be MxN"),
        ({"frames": 10}, "Hint: use 9"),
        ({"frames": 53}, "at most 49 on this page"),
        ({"width": 1024}, "at most 512 on this page"),
        ({"height": 24}, "multiple of"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 2.5}, "must be a whole number"),
        ({"steps": 2.7}, "steps must be a whole number, got 2.7"),
        ({"steps": [2]}, r"steps must be a number, got \[2\]"),
        ({"steps": {"a": "b" * 100_000}}, r"steps must be a number, got .{60}\.\.\.$"),
        ({"frames": 10**400}, r"frames must be a number, got 1000.{56}\.\.\.$"),
        ({"seed": -(10**400)}, r"seed must be a number, got -1000"),
        ({"seed": 2**63}, "seed must be a number"),
        ({"fps": 1e-308}, "fps must lie between 1 and 240 on this page, got 1e-308"),
        ({"fps": 1e20}, "fps must"),
        ({"fps": float("inf")}, "fps must be a number"),
        ({"guidance": 1e300}, "guidance must"),
        ({"guidance": [1]}, "guidance must be a number"),
        ({"prompt": "a \ud800 ball"}, "prompt holds half of a character"),
        ({"negative_prompt": "\udfff"}, "negative prompt holds half of a character"),
        ({"dense_steps": "\ud800"}, "dense steps holds half of a character"),
        ({"dense_steps": [1]}, "must be a count"),
        ({**FG, "fg_attn_top_p": [0.5]}, "top_p cannot be"),
        ({**FG, "fg_attn_top_p": 10**400}, "top_p"),
        ({"steps": float("nan")}, "must be a number"),
        ({"steps": "5"}, "must be a number"),
        ({"seed": -1}, "seed must be"),
        # what a browser makes of 2^53 + 1.
        ({"seed": 2.0**53}, r"seed can be at most 9,007,199,254,740,991 .* Hint: `vidsparse gen"),
        ({"guidance": True}, "guidance must be a number"),
        ({"dense_steps": "some"}, "neither a count"),
        ({"dense_steps": "1.5"}, "dense_steps"),
        ({"dense_steps": None}, "must be a count"),
        ({"order": "spiral"}, "unknown token order"),
        ({"order": ["hilbert"]}, "unknown token order"),
        ({"implementation": "magic"}, "unknown implementation"),
        ({**FG, "implementation": "triton"}, "triton was asked for, and it runs on CUDA devices"),
    ],
)
def test_bad_input_is_one_clear_sentence(form: Any, changes: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        form.request(values_of(form, **changes))


NASTY: tuple[Any, ...] = (
    10**400, -(10**400), 1e-308, 1e308, float("nan"), float("inf"), 2.7, True, None, "", "\ud800",
    "\0", "9" * 5000, "1e999", "nan", [], [1], [[]], {}, {"a": 1}, "x" * 30_000,
)  # fmt: skip


def test_no_value_of_any_control_is_more_than_a_sentence(form: Any) -> None:
    for method in METHODS_OFFERED:
        for name in form.controls:
            for value in NASTY:
                # anything but this is what gradio calls an error, and prints.
                with suppress(OptionError):
                    form.request({**values_of(form, method=method), name: value})


def test_no_control_rounds_a_number(form: Any) -> None:
    numbers = [each for each in form.controls.values() if each.get_block_name() == "number"]
    assert len(numbers) > 8
    for control in numbers:
        assert control.preprocess(2.7) == 2.7
        assert control.preprocess([2]) == [2]


def test_words_the_model_never_learned_are_a_warning(form: Any) -> None:
    _, warnings = form.request(values_of(form, prompt="a red dragon"))
    assert warnings == ["shapes never learned dragon: it will guess."]


def test_a_model_that_takes_a_picture_gets_it_and_one_that_needs_it_asks(
    tmp_path: Path,
) -> None:
    shapes = resolve_model("shapes")
    picture = tmp_path / "first.png"
    Image.new("RGB", (64, 64)).save(picture)
    for text_class, needed in (("WanPipeline", False), (None, True)):
        model = dataclasses.replace(
            shapes,
            text_class=text_class,
            image_class="WanImageToVideoPipeline",
            takes_last_image=needed,
        )
        host = dataclasses.replace(host_of(tmp_path), models=(model,))
        form = form_of(host)
        assert form.images["image"][0].visible
        assert form.images["last_image"][0].visible == needed
        request, _ = form.request(values_of(form), {"image": picture, "last_image": picture})
        assert request.image == str(picture)
        # a picture that the model has no use for is left out.
        assert request.last_image == (str(picture) if needed else None)
        if needed:
            with pytest.raises(OptionError, match="upload its first frame"):
                form.request(values_of(form), {"last_image": picture})
        else:
            assert form.request(values_of(form))[0].image is None


def test_a_model_without_pictures_hides_their_upload(form: Any, tmp_path: Path) -> None:
    assert not any(upload.visible for upload, _ in form.images.values())
    pictures = dict.fromkeys(form.images, tmp_path / "first.png")
    request, _ = form.request(values_of(form), pictures)
    assert (request.image, request.last_image) == (None, None)


def test_the_model_s_own_settings_of_a_method_are_shown(tmp_path: Path) -> None:
    shapes = resolve_model("shapes")
    own = {"fg-attn": {"top_p": 0.7, "tile": "32x32"}}
    defaults = dataclasses.replace(
        shapes.defaults,
        method="fg-attn",
        method_options=own,
        dense_steps=3,
        dense_layers=1,
        frames=81,
    )
    host = host_of(tmp_path, frames=50)
    host = dataclasses.replace(host, models=(dataclasses.replace(shapes, defaults=defaults),))
    form = form_of(host)
    request, _ = form.request(values_of(form))
    assert (request.method_options["top_p"], request.method_options["tile"]) == (0.7, "32x32")
    # as many as the host allows, and no size that the model cannot make.
    assert (request.dense_steps, request.dense_layers, request.frames) == (3, 1, 49)


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_speed_is_the_command_line_s(form: Any, speed: str) -> None:
    from vidsparse.apps.page.speeds import speed_of, values_of_speed

    (model,) = form.host.models
    values = values_of(form, **values_of_speed(form, model, speed))
    request, _ = form.request(values)
    # the page names the numbers, not the bundle, and leaves linear layers as they are.
    asked = command_line(speed=speed, method=None)
    assert request == dataclasses.replace(asked, speed=None, linear="none")
    assert speed_of(form, model, form.values_of(request)) == speed


def test_what_is_left_to_a_method_is_the_speed_s_that_leaves_it_too(form: Any) -> None:
    from vidsparse.apps.page.speeds import first_speed, speed_of

    (model,) = form.host.models
    first = values_of(form)
    # as the page is made, and comes back after a reload.
    assert first["foresight_means"] == "auto"
    assert speed_of(form, model, first) == first_speed(form, model) == "high"
    assert speed_of(form, model, {**first, "foresight_share": None}) == "high"
    for wrong in ("much", [1], 7):
        assert speed_of(form, model, {**first, "foresight_means": wrong}) == ""


def test_numbers_by_hand_are_no_speed(form: Any) -> None:
    from vidsparse.apps.page.speeds import speed_of, speed_text

    (model,) = form.host.models
    request, _ = form.request(values_of(form, foresight_share=0.07))
    assert speed_of(form, model, form.values_of(request)) == ""
    assert "By hand" in speed_text(form, model, "")


def test_what_a_speed_stands_for_is_said_without_what_the_page_leaves_out(form: Any) -> None:
    from vidsparse.apps.page.speeds import speed_text

    text = speed_text(form, form.host.models[0], "fast")
    assert "foresight (share 0.08, unconditional_every 10), refresh 0.1" in text
    assert "step cache guidance 3" in text
    assert "36.7 dB on shapes, mean of 24 prompts" in text
    assert "step cache guidance" in speed_text(form, form.host.models[0], "balanced")
    assert "step cache" not in speed_text(form, form.host.models[0], "exact")


def test_a_line_of_settings_leaves_out_what_is_nothing(form: Any) -> None:
    from vidsparse.apps.page import draw

    request, _ = form.request(values_of(form, method="foresight"))
    assert request.method_options["rows"] is None
    line = draw.settings_line(request)
    assert "foresight (share" in line
    assert "None" not in line


def test_the_opening_comparison_ships_with_the_package_and_is_drawn_whole() -> None:
    from vidsparse.apps.page import draw
    from vidsparse.apps.page.opening import FOLDER, PROMPT, opening

    pair = opening()
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 600_000
    panels, request = read_video(pair.panels), pair.sparse.request
    assert request.height is not None
    assert request.width is not None
    assert panels.shape == (request.frames, 2 * request.height, 2 * request.width, 3)
    assert len(pair.quality.frames) == request.frames
    assert 20 < (pair.quality.psnr or 0) < 60
    assert len(pair.timed) >= 2
    page = draw.opening(pair)
    for words in (PROMPT, "data:video/mp4;base64,", "PSNR", "vs-heat", "threads"):
        assert words in page


def test_named_sizes_fit_the_model_and_the_host(tmp_path: Path) -> None:
    from vidsparse.apps.page.sizes import lengths_of, sizes_of

    shapes = resolve_model("shapes")
    own, wide = shapes.defaults, dataclasses.replace(shapes.defaults, width=832, height=480)
    wan = dataclasses.replace(shapes, defaults=dataclasses.replace(wide, size_factor=16))
    # what is far larger than a model was made for is left out, and so is what the host forbids.
    assert list(sizes_of(shapes, Limits())) == ["usual", "landscape", "portrait"]
    assert sizes_of(wan, Limits()) == {
        "usual": (832, 480), "720p": (1280, 720), "square": (624, 624), "portrait": (480, 832),
    }  # fmt: skip
    assert "720p" not in sizes_of(wan, Limits(side=1000))
    for model in (shapes, wan):
        unit = model.defaults.size_factor
        for size in sizes_of(model, Limits()).values():
            assert [side % unit for side in size] == [0, 0]
    lengths = lengths_of(shapes, Limits())
    assert lengths == {"usual": own.frames, "half": 17, "twice": 65}
    assert list(lengths_of(shapes, Limits(frames=own.frames))) == ["usual", "half"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_named_lengths_are_those_that_the_family_makes(family: Family) -> None:
    from vidsparse.apps.page.sizes import lengths_of

    own = family.defaults
    model = dataclasses.replace(resolve_model("shapes"), defaults=own)
    lengths = lengths_of(model, Limits(frames=10**6))
    assert lengths["usual"] == own.frames
    assert lengths["half"] < own.frames < lengths["twice"]
    for frames in lengths.values():
        assert own.frames_within(frames) == frames
