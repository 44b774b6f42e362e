"""Presets on the page: which are offered, and what may change beside one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from page_host import (
    choices_of,
    command_line,
    form_of,
    host_of,
    once_chosen,
    save_preset,
    values_of,
)

from vidsparse.apps.page.host import HostPreset, Limits, read_presets
from vidsparse.errors import OptionError
from vidsparse.pipelines.models import resolve_model


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return form_of(host_of(tmp_path_factory.mktemp("form"), frames=49, side=512))


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    folder = tmp_path / "presets"
    for method in ("spargeattn", "bsfa"):
        save_preset(folder / f"small-{method}", method)
    return folder


def _read(*paths: Path, **limits: int) -> tuple[HostPreset, ...]:
    return read_presets([str(path) for path in paths], [resolve_model("shapes")], Limits(**limits))


def test_a_folder_offers_its_presets_that_fit_and_leaves_the_others(
    presets: Path, caplog: Any
) -> None:
    (presets / "notes.json").write_text("{}", encoding="utf-8")
    save_preset(presets / "deeper", layers=99)
    found = _read(presets)
    own = [(f"shapes-{method}", method) for method in resolve_model("shapes").defaults.presets]
    assert [(each.name, each.preset.method) for each in found] == [
        ("small-bsfa", "bsfa"), ("small-spargeattn", "spargeattn"), *own,
    ]  # fmt: skip
    assert all(each.models == ("shapes",) for each in found)
    (warning,) = caplog.messages
    assert "deeper.json was calibrated for shapes, and this page has shapes" in warning


def test_numbers_that_come_with_a_model_are_offered_where_the_page_s_limits_allow(
    tmp_path: Path, caplog: Any
) -> None:
    (own,) = (each for each in _read() if each.preset.method == "bsfa")
    assert (own.name, own.models) == ("shapes-bsfa", ("shapes",))
    form = form_of(dataclasses.replace(host_of(tmp_path, frames=49, side=512), presets=(own,)))
    request, warnings = form.request(once_chosen(form, "bsfa", preset="shapes-bsfa"))
    assert request.preset == own.path
    assert warnings == []
    assert _read(side=128) == ()
    assert "width can be at most 128" in caplog.text


def test_what_cannot_be_offered_is_refused_with_a_reason(presets: Path, tmp_path: Path) -> None:
    deeper = save_preset(tmp_path / "deeper", layers=99)
    same = save_preset(tmp_path / "small-bsfa")
    for paths, limits, words in (
        ([deeper], {}, "Hint: offer that model with --model"),
        ([tmp_path / "none"], {}, "there is no preset file"),
        ([tmp_path / "page"], {}, "there is no preset in"),
        ([presets / "small-bsfa.json"], {"side": 96}, "cannot be offered: width can be at most 96"),
        ([presets, same], {}, "have one name, small-bsfa"),
    ):
        (tmp_path / "page").mkdir(exist_ok=True)
        with pytest.raises(OptionError, match=words):
            _read(*paths, **limits)


@pytest.fixture
def calibrated(presets: Path, tmp_path: Path) -> Any:
    return form_of(dataclasses.replace(host_of(tmp_path), presets=_read(presets)))


def test_bsfa_is_offered_once_there_is_a_preset_for_it(calibrated: Any, form: Any) -> None:
    assert "bsfa" in calibrated.groups
    assert "bsfa" not in form.groups
    assert form.controls["preset"].visible is False
    assert calibrated.controls["preset"].visible is True
    with pytest.raises(OptionError, match=r"calibrated numbers only\. Hint: choose a preset"):
        calibrated.request(values_of(calibrated, method="bsfa"))


@pytest.mark.parametrize("name", ["small-spargeattn", "small-bsfa"])
def test_a_chosen_preset_makes_the_command_line_s_request(
    calibrated: Any, presets: Path, name: str
) -> None:
    (made,) = [each for each in calibrated.host.presets if each.name == name]
    values = {
        "preset": name, **calibrated.values_of_preset(made),
    }  # fmt: skip
    request, _ = calibrated.request(once_chosen(calibrated, made.preset.method, **values))
    assert request == command_line(method=None, preset=str(presets / f"{name}.json"))
    again, _ = calibrated.request({**values_of(calibrated), **calibrated.values_of(request)})
    assert again == request


def test_settings_bring_their_preset_however_its_path_is_written_now(
    presets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def built(*folders: str) -> Any:
        found = _read(*map(Path, folders))
        return choices_of(dataclasses.replace(host_of(tmp_path), presets=found))

    made = built("presets")
    (chosen,) = (each for each in made.form.host.presets if each.name == "small-spargeattn")
    values = {"preset": chosen.name, **made.form.values_of_preset(chosen)}
    request, _ = made.form.request(once_chosen(made.form, "spargeattn", **values))
    assert request.preset == "presets/small-spargeattn.json"
    shutil.copytree(presets, tmp_path / "moved")
    digest = chosen.preset.digest
    for again in (built("./presets/../presets"), built(str(presets)), built("moved")):
        put = again.choices.choose_settings(request, digest)
        assert put[again.form.controls["preset"]]["value"] == chosen.name
        again.desk.queue.close()
    # what stands under the same name has other numbers by now.
    with pytest.raises(OptionError, match=r"does not offer the preset small-spargeattn, which"):
        made.choices.choose_settings(request, "0" * len(digest))
    # by the path alone, where a record does not tell what stood there.
    assert made.form.values_of(request)["preset"] == chosen.name
    none = built()
    with pytest.raises(OptionError, match=r"does not offer the preset small-spargeattn, which"):
        none.choices.choose_settings(request, digest)
    for each in (made, none):
        each.desk.queue.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "/etc/passwd"}, "no preset '/etc/passwd'. Hint: those for shapes are: small-b"),
        ({"preset": ["small-bsfa"]}, "unknown preset"),
        ({"preset": "small-bsfa"}, "the preset small-bsfa is for bsfa, not for spargeattn"),
        ({"frames": 33}, "was calibrated on 17 frames of 128x96, not on 33"),
        ({"order": "rowmajor"}, "calibrated in hilbert order"),
        ({"spargeattn_tau": 0.5}, "sets tau"),
    ],
)
def test_what_does_not_fit_a_preset_is_refused(
    calibrated: Any, changes: dict[str, Any], words: str
) -> None:
    (chosen,) = [each for each in calibrated.host.presets if each.name == "small-spargeattn"]
    values = {
        "method": "spargeattn", "preset": chosen.name, **calibrated.values_of_preset(chosen),
        "spargeattn_merge": "consecutive",
    }  # fmt: skip
    calibrated.request(values_of(calibrated, **values))
    with pytest.raises(OptionError, match=words):
        calibrated.request(values_of(calibrated, **{**values, **changes}))


def test_a_preset_for_another_model_names_it(calibrated: Any) -> None:
    other = dataclasses.replace(calibrated.host.models[0], name="other")
    with pytest.raises(OptionError, match="was made for shapes, not for other"):
        calibrated.host.preset("small-bsfa", other)


def test_only_what_may_change_is_shown_beside_a_preset(presets: Path, tmp_path: Path) -> None:
    built = choices_of(dataclasses.replace(host_of(tmp_path), presets=_read(presets)))
    form, report, choices = built.form, built.report, built.choices

    def shown(updates: dict[Any, Any], names: str) -> list[Any]:
        return [updates[form.controls[name]]["visible"] for name in names.split()]

    settled = "order frames width height"
    updates = choices.choose_preset("shapes", "fg-attn", "small-spargeattn")
    assert updates[form.controls["method"]]["value"] == "spargeattn"
    assert shown(updates, f"{settled} spargeattn_tau spargeattn_tile") == [False] * 6
    assert shown(updates, "spargeattn_quantize spargeattn_merge") == [True, True]
    assert updates[form.controls["frames"]]["value"] == 17
    assert "settles tau by head" in updates[form.controls["preset"]]["info"]
    assert updates[report.vary]["choices"] == ["nothing", "quantize", "merge"]

    # a method that does nothing without a preset brings its first.
    updates = choices.choose_method("shapes", "bsfa", "")
    assert updates[form.controls["preset"]]["value"] == "small-bsfa"
    assert shown(updates, f"bsfa_keep bsfa_tile {settled}") == [True] + [False] * 5
    assert updates[form.groups["bsfa"]]["visible"]
    assert not updates[form.folds["bsfa"]]["visible"]

    # and none of it is left when the preset is.
    updates = choices.choose_preset("shapes", "bsfa", "")
    assert updates[form.controls["method"]]["value"] == "foresight"
    assert shown(updates, f"{settled} foresight_share foresight_tile") == [True] * 6
    assert not updates[form.groups["bsfa"]]["visible"]
    built.desk.queue.close()


def test_another_method_brings_its_schedule_unless_one_was_written_by_hand(tmp_path: Path) -> None:
    from vidsparse.pipelines.family import SCHEDULED

    built = choices_of(host_of(tmp_path))
    form, choices = built.form, built.choices
    first = {name: form.controls[name].value for name in SCHEDULED}

    def put(schedule: dict[str, Any]) -> dict[str, Any]:
        updates = choices.choose_method("shapes", "fg-attn", "", schedule)
        of = {name: updates.get(form.controls[name], {}) for name in SCHEDULED}
        return {name: update["value"] for name, update in of.items() if "value" in update}

    own = {
        "dense_steps": "0.24", "dense_layers": "1", "dense_last_layers": "1", "reuse": 2,
        "refresh": "",
    }  # fmt: skip
    assert put(first) == own
    assert put({**first, "dense_steps": "5"}) == {}
    built.desk.queue.close()


def test_a_blank_number_says_what_the_model_and_the_method_chosen_would_make_of_it(
    tmp_path: Path,
) -> None:
    both = tuple(map(resolve_model, ("shapes", "shapes-joint")))
    built = choices_of(dataclasses.replace(host_of(tmp_path), models=both))
    form, choices = built.form, built.choices

    def blank(updates: dict[Any, Any], *names: str) -> list[str]:
        return [updates[form.controls[name]]["placeholder"] for name in names]

    for model in both:
        method = model.defaults.method
        updates = choices.choose_model(model.name)
        own = model.defaults.with_method(method)
        assert blank(updates, "steps", "guidance", "dense_steps") == [
            f"{value:g}" for value in (own.steps, own.guidance, own.dense_steps)
        ]
        assert blank(updates, "foresight_rows") == ["none"]
    first = choices.choose_method("shapes", "fg-attn", "")
    assert blank(first, "dense_steps", "fg_attn_top_p") == ["0.24", "0.8"]
    # words are not numbers: what they say when blank stays.
    assert "placeholder" not in first.get(form.controls["prompt"], {})
    built.desk.queue.close()


@pytest.mark.parametrize(
    "chosen",
    [
        None, "speed", [], {}, 3, {"name": "speed"},
        *(
            {"at": 1, "name": name, "held": held}
            for name, held in (
                ("speed", {"model": "shapes"}), ("speed", {"model": "shapes", "speed": ["fast"]}),
                ("speed", {"model": {}, "speed": "fast"}), ("model", {"model": ["shapes"]}),
                ("method", {"model": "shapes", "method": "fg-attn"}), ("method", ["shapes"]),
                ("method", {"model": "shapes", "method": {}, "preset": ""}),
                ("preset", {"model": "shapes", "method": "fg-attn", "preset": ["small"]}),
                ("target", {"model": "none", "target": 33}), (["x"], {}),
            )
        ),
    ],
)  # fmt: skip
def test_a_choice_that_no_page_sends_is_refused_in_one_sentence(
    chosen: Any, tmp_path: Path
) -> None:
    import gradio as gr

    built = choices_of(host_of(tmp_path))
    for sent in (chosen, json.dumps(chosen)):
        with pytest.raises(gr.Error) as refused:
            built.choices.choose(SimpleNamespace(), sent)
        assert len(str(refused.value).splitlines()) == 1
    built.desk.queue.close()
