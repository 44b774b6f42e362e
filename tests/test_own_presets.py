"""Calibrated numbers that come with a model: taken where they fit, and said to be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from vidsparse.apps.cli import main
from vidsparse.apps.small_model.prompts import CALIBRATION_SEED
from vidsparse.errors import OptionError
from vidsparse.methods import METHODS, SparseMethod, make_method
from vidsparse.pipelines.calibrate import calibrate
from vidsparse.pipelines.cards import PRESETS
from vidsparse.pipelines.models import MODELS, load, resolve_model
from vidsparse.pipelines.request import GenerateRequest, check_ready, resolve, settings_hash
from vidsparse.pipelines.weights import weights_hash
from vidsparse.presets import load_preset

FITTING: dict[str, Any] = {"frames": 9, "width": 64, "height": 64}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with numbers of two methods."""
    folder = tmp_path_factory.mktemp("own") / "tiny"
    shutil.copytree(tiny_model, folder)
    loaded = load(folder, device="cpu")
    for method, settings in (("bsfa", {"groups": 1, "fractions": (0.3, 0.6)}), ("sale", {})):
        request = GenerateRequest(
            prompt="", method=method, steps=3, dense_steps=1, device="cpu", **FITTING
        )
        calibrate(loaded, request, ["a red circle"], folder / "presets" / method, settings=settings)
    return folder


def resolved(model: Path, method: str, **changes: Any) -> GenerateRequest:
    request = GenerateRequest(
        prompt="a red circle", model=str(model), method=method, device="cpu", **changes
    )
    return resolve(request, resolve_model(str(model)).defaults)


def test_a_request_that_fits_takes_them(model: Path) -> None:
    made = resolved(model, "sale", **FITTING)
    assert made.preset == str(model / "presets" / "sale.json")
    # options that need no new numbers may differ.
    assert resolved(model, "bsfa", **FITTING, method_options={"keep": 0.6}).preset is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"frames": 13},
        {"width": 96},
        {"order": "random"},
        {"method_options": {"tau": 0.01}},
        # what the numbers stand for, although it is the option's default.
        {"method_options": {"tau": 0.004}},
        {"method_options": {"local": 16}},
        {"speed": "high"},
    ],
)
def test_other_requests_run_by_what_they_say(model: Path, changes: dict[str, Any]) -> None:
    assert resolved(model, "sale", **{**FITTING, **changes}).preset is None


def test_a_method_without_numbers_of_its_own_has_none(model: Path) -> None:
    assert resolved(model, "spargeattn", **FITTING).preset is None


def test_a_run_is_the_same_wherever_the_model_lies(model: Path, tmp_path: Path) -> None:
    request = GenerateRequest(prompt="", model=str(model), method="sale", device="cpu", **FITTING)
    first = settings_hash(request)
    preset = model / "presets" / "sale.json"
    written = preset.read_text(encoding="utf-8")
    try:
        preset.write_text(written.replace('"prompts": 1', '"prompts": 2'), encoding="utf-8")
        assert settings_hash(request) != first
    finally:
        preset.write_text(written, encoding="utf-8")
    assert settings_hash(request) == first


def invoke(model: Path, out: Path, *more: str) -> Result:
    prompts = out / "prompts.txt"
    out.mkdir(parents=True, exist_ok=True)
    prompts.write_text("a red circle\n", encoding="utf-8")
    return CliRunner().invoke(
        main,
        ["generate", str(prompts), "--model", str(model), "--out", str(out), "--steps", "3",
         "--device", "cpu", *more],
    )  # fmt: skip


def test_generate_runs_a_method_that_needs_numbers(model: Path, tmp_path: Path) -> None:
    result = invoke(model, tmp_path, "--method", "bsfa", "--frames", "9", "--size", "64x64")
    assert result.exit_code == 0, result.output
    assert "Numbers of bsfa: those that come with " in result.output
    (record,) = tmp_path.glob("*/0001*.json")
    assert json.loads(record.read_text())["options"]["preset"].endswith("bsfa.json")


def test_what_numbers_were_made_for_is_said_of_the_settings_they_were_made_with(
    model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "tiny")
    file = tmp_path / "tiny" / "presets" / "bsfa.json"
    text = json.loads(file.read_text())
    text |= {"schedule": {"reuse": 1}, "measured": {**text["measured"], "psnr": 34.4}}
    file.write_text(json.dumps(text))
    asked = ("--method", "bsfa", "--frames", "9", "--size", "64x64")
    as_made = invoke(tmp_path / "tiny", tmp_path, *asked).output
    assert "made for 34.4 dB." in " ".join(as_made.split())
    other = invoke(tmp_path / "tiny", tmp_path, *asked, "--reuse", "2").output
    assert "made for 34.4 dB with other settings than these." in " ".join(other.split())


def test_another_size_is_refused_with_the_one_there_is(model: Path, tmp_path: Path) -> None:
    result = invoke(model, tmp_path, "--method", "bsfa", "--frames", "13", "--size", "64x64")
    assert result.exit_code == 2, result.output
    said = " ".join(result.output.split())
    assert "are for 9 frames of 64x64" in said
    assert "vidsparse calibrate --method bsfa" in said


def test_a_damaged_preset_of_a_model_is_one_sentence(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "tiny"
    shutil.copytree(model, broken)
    (broken / "presets" / "sale.json").write_text("{", encoding="utf-8")
    with pytest.raises(OptionError, match="is no JSON file"):
        resolved(broken, "sale", **FITTING)
    # other methods do not ask for it.
    assert resolved(broken, "fg-attn", **FITTING).preset is None


def test_all_options_said_are_a_run_without_them(model: Path) -> None:
    # as studies run methods with one number for all heads.
    options = make_method("sale").options()
    assert resolved(model, "sale", **FITTING, method_options=options).preset is None


SHIPPED = [
    (name, file.stem) for name in MODELS for file in sorted((MODELS[name] / PRESETS).glob("*.json"))
]


@pytest.mark.parametrize("name", MODELS)
def test_a_bundled_model_brings_numbers_for_every_method(name: str) -> None:
    found = {method for model, method in SHIPPED if model == name}
    # one number for all, where numbers by layer and head were no better.
    found |= set(resolve_model(name).defaults.method_options)
    assert found == {method for method, kind in METHODS.items() if issubclass(kind, SparseMethod)}


def test_a_preset_for_another_size_than_a_cpu_s_is_named_with_that_size() -> None:
    ref = resolve_model("scenes")
    request = GenerateRequest(prompt="a red circle", model="scenes", method="bsfa", device="cpu")
    made = resolve(request, ref.defaults)
    assert made.preset is None
    with pytest.raises(OptionError, match=r"for 81 frames of 640x640.*Hint: ask for that size"):
        check_ready(made, ref.defaults)


@pytest.mark.parametrize(("name", "method"), SHIPPED)
def test_what_a_bundled_model_brings_is_taken_out_of_the_box(name: str, method: str) -> None:
    ref = resolve_model(name)
    # of the model's own size, which on a CPU may be another.
    own = {size: getattr(ref.defaults, size) for size in ("frames", "width", "height")}
    request = GenerateRequest(prompt="a red circle", model=name, method=method, device="cpu", **own)
    made = resolve(request, ref.defaults)
    assert made.preset is not None
    check_ready(made, ref.defaults)
    preset = load_preset(made.preset)
    assert (preset.method, preset.model["name"]) == (method, name)
    # of these very weights, in the schedule that they were measured with, if they were by videos.
    assert preset.model["weights_hash"] == weights_hash(Path(ref.location))
    ours = {setting: getattr(made, setting) for setting in preset.schedule}
    assert ours == dict(preset.schedule)
    assert preset.measured.get("met", True)
    # on other prompts than those that everything is measured on, at the model's own steps.
    assert preset.measured["denoising_steps"] == ref.defaults.steps
    assert preset.measured["seed"] == CALIBRATION_SEED
