"""Models: where they are found, and what of their folders is read and refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import a_request, save_tiny_model

from vidsparse.errors import (
    ModelError,
    VidsparseError,
)
from vidsparse.pipelines import models
from vidsparse.pipelines.families import WAN
from vidsparse.pipelines.models import describe, load, resolve_model, unknown_words
from vidsparse.pipelines.request import resolve
from vidsparse.pipelines.speed import measured

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def rewrite_index(folder: Path, **changes: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_brings_its_own_settings_and_words(folder: Path) -> None:
    ref = resolve_model(folder)
    assert (ref.source, ref.pipeline_class) == ("folder", "WanPipeline")
    assert (ref.defaults.frames, ref.defaults.width, ref.defaults.height) == (5, 48, 32)
    assert (ref.defaults.steps, ref.defaults.guidance, ref.defaults.fps) == (3, 2.0, 8)
    assert ref.defaults.order == "columnmajor"
    assert describe(str(folder))["size"] == "48x32"
    assert describe(str(folder))["license"] == "Apache-2.0"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (5, "on_cpu in .* must be an object of frames and size, got 5"),
        ({"steps": 3}, "must be an object of frames and size, got {'steps': 3}"),
        ({"size": "48"}, "size in .* must look like 256x256, got '48'"),
        ({"frames": "9"}, "frames on_cpu in .* must be a whole number from 1, got '9'"),
        ({"size": "0x48"}, "width on_cpu in .* must be a whole number from 1, got 0"),
    ],
)
def test_what_a_card_says_of_a_cpu_is_checked(copied: Path, said: object, message: str) -> None:
    path = copied / "vidsparse.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "on_cpu": said}))
    with pytest.raises(ModelError, match=message):
        resolve_model(copied)


def test_a_folder_without_a_card_has_the_familys_settings(copied: Path) -> None:
    (copied / "vidsparse.json").unlink()
    ref = resolve_model(copied)
    assert ref.defaults == replace(WAN.defaults, features=32)
    assert unknown_words(ref, "anything at all") == []


def test_units_come_from_the_models_own_configuration(copied: Path) -> None:
    path = copied / "vae" / "config.json"
    config = {**json.loads(path.read_text()), "scale_factor_spatial": 16}
    path.write_text(json.dumps(config))
    assert resolve_model(copied).defaults.size_factor == 32


def test_unknown_words_are_named_once_in_order(folder: Path) -> None:
    ref = resolve_model(folder)
    prompt = "A RED dragon, that moves right; a dragon breathing fire!"
    assert unknown_words(ref, prompt) == ["dragon", "breathing", "fire"]


@pytest.mark.parametrize("name", ["nowhere", "./no/such/folder", "/no/such/folder", ""])
def test_a_model_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(ModelError, match=r"Hint: .*shapes"):
        resolve_model(name or "no such model")


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"is a file. Hint: give the folder"):
        resolve_model(folder / "model_index.json")


def test_a_folder_without_index_names_the_supported_pipelines(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model_index.json. Hint: .* WanPipeline"):
        resolve_model(tmp_path)


def test_a_modular_pipeline_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "modular_model_index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"modular pipeline, and commands run none. Hint"):
        resolve_model(tmp_path)


def test_another_pipeline_names_the_supported_ones(copied: Path) -> None:
    rewrite_index(copied, _class_name="StableDiffusionPipeline")
    with pytest.raises(ModelError, match=r"StableDiffusionPipeline, which cannot .* WanPipeline"):
        resolve_model(copied)


def test_code_that_comes_with_a_model_is_refused(copied: Path) -> None:
    rewrite_index(copied, transformer=["my_code", "WanTransformer3DModel"])
    with pytest.raises(ModelError, match="transformer from 'my_code'; only components of"):
        load(copied, device="cpu")


ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2.5, 1e300, 10**400, "", "x", [], {}, [[]], [None], ["x"], [{}]),
    *({"fg-attn": 1}, {"fg-attn": {"tile": []}}, {"fg-attn": {"merge": []}}, [1, 0, 0]),
    *({"fg-attn": {"dense_steps": "x"}}, {"fast": {"schedule": 1}}, {"high": {"psnr": "x"}}),
    *({"fast": {"schedule": {"refresh": []}}}, {"fast": {"cache": 1}}, {"slow": {}}),
    {"fast": {"linear": ["bf16"]}},
)


@pytest.mark.parametrize(
    "file", ["vidsparse.json", "model_index.json", "vae/config.json", "transformer/config.json"]
)
def test_files_of_a_model_with_odd_types_are_refused_in_one_sentence(
    copied: Path, file: str
) -> None:
    path = copied / file
    whole = json.loads(path.read_text())
    told = dict.fromkeys(
        (
            *whole,
            *("size", "frames", "steps", "fps", "dense_steps", "reuse", "method_options"),
            *("method", "schedules", "speeds", "on_cpu"),
            *("sample_frames", "target_size", "patch_size", "scale_factor_spatial", "license"),
        )
    )
    said = []
    for name in told:
        for odd in ODD:
            path.write_text(json.dumps({**whole, name: odd}))
            try:
                ref = resolve_model(copied)
                for speed in (None, "high", "fast"):
                    resolve(a_request(model=str(copied), speed=speed), ref.defaults)
                    measured(ref.name, speed or "high", ref.defaults)
                unknown_words(ref, "a red circle")
                describe(str(copied))
            except VidsparseError as error:
                said.append(str(error))
    assert len(said) > len(told)
    assert [text for text in said if "\n" in text or len(text) > 2000] == []


@pytest.mark.parametrize("text", ["[" * 100_000, '{"steps": 1e400}', '{"guidance": NaN}'])
def test_a_card_that_no_reader_can_hold_is_refused(copied: Path, text: str) -> None:
    (copied / "vidsparse.json").write_text(text)
    with pytest.raises(ModelError, match="cannot be read"):
        resolve_model(copied)


@pytest.mark.parametrize("damage", ["{", "[]", None])
def test_a_damaged_index_is_an_error(copied: Path, damage: str | None) -> None:
    if damage is None:
        (copied / "vae" / "config.json").unlink()
    else:
        (copied / "model_index.json").write_text(damage)
    with pytest.raises(ModelError):
        resolve_model(copied)


def test_pickled_weights_are_refused(copied: Path) -> None:
    weights = copied / "text_encoder" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(ModelError, match=r"text_encoder in pytorch_model.bin, which can run code"):
        load(copied, device="cpu")


@pytest.mark.parametrize("cut", [0, 100])
def test_damaged_weights_are_an_error(copied: Path, cut: int) -> None:
    weights = copied / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    with pytest.raises(ModelError, match="could not be loaded as WanPipeline"):
        load(copied, device="cpu")


def test_missing_weights_are_an_error(copied: Path) -> None:
    (copied / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelError, match="could not be loaded as WanPipeline"):
        load(copied, device="cpu")


def test_a_hub_id_without_connection_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"not in the local hub cache.*Hint: connect once"):
        resolve_model("nobody/such-model")


def test_a_hub_model_is_read_from_its_snapshot(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: str(folder))
    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", lambda *_, **__: str(folder))
    ref = resolve_model("owner/tiny")
    assert (ref.source, ref.location, ref.defaults.frames) == ("hub", "owner/tiny", 5)
    assert load(ref, device="cpu").weights_hash == models.weights_hash(folder)


def test_a_hub_model_in_another_format_is_told_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: str(tmp_path))
    with pytest.raises(ModelError, match="ends in -Diffusers"):
        resolve_model("owner/original")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "must be granted first. Hint: accept its terms"),
        ("RepositoryNotFoundError", "neither as a folder here nor on the hub"),
        ("LocalEntryNotFoundError", "Hint: connect once"),
        ("OfflineModeIsEnabled", "Hint: connect once"),
    ],
)
def test_the_hubs_refusals_say_what_to_do(
    error: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    kind = getattr(huggingface_hub.errors, error)

    def refuse(*_: Any, **__: Any) -> str:
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=message):
        resolve_model("owner/model")


def test_the_weights_hash_follows_the_weights(copied: Path, folder: Path) -> None:
    before = models.weights_hash(copied)
    assert before == models.weights_hash(folder)
    weights = copied / "vae" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert models.weights_hash(copied) != before
