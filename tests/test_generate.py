"""Requests, models, generation and video files."""

from __future__ import annotations

import gc
import json
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_pipelines import WORDS, save_tiny_wan, tiny_wan

from vidsparse.errors import (
    FolderError,
    ModelError,
    NonFiniteError,
    OptionError,
    OutputError,
    UnsupportedError,
    VidsparseError,
)
from vidsparse.methods import make_method
from vidsparse.pipelines import models, sparsify
from vidsparse.pipelines.compilation import compilations
from vidsparse.pipelines.families import WAN
from vidsparse.pipelines.generate import (
    Generated,
    GenerationCancelled,
    generate,
    generate_batch,
)
from vidsparse.pipelines.models import LoadedPipeline, describe, load, resolve_model, unknown_words
from vidsparse.pipelines.placement import check_device
from vidsparse.pipelines.request import GenerateRequest, resolve, settings_hash
from vidsparse.pipelines.speed import measured
from vidsparse.pipelines.video import read_video, require_encoder, write_video

pytestmark = pytest.mark.usefixtures("one_thread")

CARD = {
    "name": "tiny",
    "description": "A tiny model for tests.",
    "license": "Apache-2.0",
    "frames": 5,
    "size": "48x32",
    "steps": 3,
    "guidance": 2.0,
    "fps": 8,
    "order": "columnmajor",
    "vocabulary": list(WORDS),
    "example_prompts": ["a red circle"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_wan(tmp_path_factory.mktemp("models") / "tiny")
    (path / "vidsparse.json").write_text(json.dumps(CARD), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedPipeline:
    return load(folder, device="cpu")


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def a_request(**changes: Any) -> GenerateRequest:
    return GenerateRequest(**{"prompt": "a red circle that moves right", **changes})


def rewrite_index(folder: Path, **changes: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# requests


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "x" * 10_001}, "prompt must have at most 10,000 characters, got 10,001"),
        ({"negative_prompt": "x" * 10_001}, "negative_prompt must have at most"),
        ({"prompt": None}, "prompt must be text, got NoneType"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 2.5}, "steps must be a whole number, got 2.5"),
        ({"frames": -4}, "frames must be at least 1, got -4"),
        ({"width": True}, "width must be a whole number, got True"),
        ({"fps": 0}, "fps must be at least 0.1, got 0"),
        ({"fps": 1e-300}, "fps must be at least 0.1, got 1e-300"),
        ({"fps": 1e20}, r"fps must be at most 1000, got 1e\+20"),
        ({"fps": 10**400}, "fps must be at most 1000, got a number of more than 20"),
        ({"guidance": 1e300}, r"guidance must be at most 100, got 1e\+300"),
        ({"steps": 1001}, "steps must be at most 1,000, got 1001"),
        ({"frames": 10**400}, "frames must be at most 10,000, got a number of more than 20"),
        ({"width": 16384}, "width must be at most 8,192, got 16384"),
        ({"height": 10**25}, "height must be at most 8,192, got a number of more than 20"),
        ({"seed": 10**5000}, "seed must be .* got a number of more than 20"),
        ({"fps": float("nan")}, "fps must be a number, got nan"),
        ({"guidance": -1.0}, "guidance must be at least 0, got -1"),
        ({"guidance": "high"}, "guidance must be a number, got 'high'"),
        ({"seed": "lucky"}, "seed must be a whole number .* got 'lucky'"),
        ({"seed": -1}, "seed must be a whole number from 0 to 2.63 - 1, got -1"),
        ({"seed": 2**63}, "seed must be"),
        ({"method": "magic"}, "unknown method 'magic'. Hint: choose from fg-attn"),
        ({"method_options": {"top_p": 0}}, r"top_p must lie in \(0, 1\], got 0"),
        ({"method_options": {"top_p": 1.01}}, "top_p must lie in"),
        ({"method_options": {"tau": 0.5}}, "foresight has no option 'tau': it belongs to sparge"),
        ({"method_options": {"tile": "17x16"}}, "tile"),
        ({"order": "zigzag"}, "unknown token order 'zigzag'"),
        ({"dense_steps": -1}, "dense_steps"),
        ({"dense_layers": 1.5}, "dense_layers"),
        ({"reuse": 0}, "reuse"),
        ({"refresh": -1}, "refresh"),
        ({"device": "tpu"}, "unknown device 'tpu'. Hint: use cpu, cuda"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'. Hint: choose from fp32, bf16, fp16"),
        ({"offload": "disk"}, "unknown offload 'disk'. Hint: choose from none, model, group"),
        ({"linear": "int4"}, "unknown linear 'int4'. Hint: choose from none, fp8, int8"),
        ({"implementation": "magic"}, "unknown implementation 'magic'"),
    ],
)
def test_bad_values_are_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        a_request(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 80}, r"^frames must be 4k\+1 for Wan, got 80\. Hint: use 81\.$"),
        ({"frames": 2}, "Hint: use 1"),
        ({"width": 250}, "^width must be a multiple of 16 for Wan, got 250. Hint: use 256.$"),
        ({"height": 8}, "height must be a multiple of 16 for Wan, got 8. Hint: use 16"),
    ],
)
def test_sizes_follow_the_models_units(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        resolve(a_request(**changes), WAN.defaults)


def test_resolving_fills_what_is_open_and_keeps_what_is_given() -> None:
    resolved = resolve(a_request(frames=17, guidance=1.0, device="cpu"), WAN.defaults)
    assert (resolved.frames, resolved.width, resolved.height) == (17, 832, 480)
    assert (resolved.steps, resolved.guidance, resolved.fps) == (50, 1.0, 16)
    assert resolved.order == "hilbert"
    assert resolved.dtype == "fp32"
    assert resolve(resolved, WAN.defaults) == resolved


def test_cuda_asked_for_and_absent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=r"cuda was asked for, .* no CUDA device .* use cpu"):
        check_device("cuda")
    assert check_device(None) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert check_device(None) == "cuda"
    assert check_device("cuda:0") == "cuda:0"
    with pytest.raises(OptionError, match="cuda:1 was asked for, but PyTorch finds 1 CUDA device"):
        check_device("cuda:1")


def test_half_precision_is_refused_on_the_cpu() -> None:
    with pytest.raises(OptionError, match=r"fp16 does not run on the CPU. Hint: use fp32 or bf16"):
        resolve(a_request(dtype="fp16", device="cpu"), WAN.defaults)


def test_equal_options_are_equal_requests_however_written() -> None:
    short = a_request(method="fg-attn", method_options={"tile": "16x16"})
    assert short == a_request(method="fg-attn", method_options={"tile": (16, 16)})
    complete = a_request(method_options={"tile": (16, 16), "top_p": 0.9})
    assert resolve(short, WAN.defaults) == resolve(complete, WAN.defaults)
    assert json.loads(json.dumps(short.options()))["method_options"]["tile"] == "16x16"


def test_the_settings_hash_tells_settings_apart_but_not_prompts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = a_request(model=str(folder), device="cpu")
    monkeypatch.chdir(folder.parent)
    same = [
        replace(base, prompt="a blue square"),
        replace(base, model="tiny"),
        replace(base, model="./tiny/"),
        replace(base, steps=3),
        replace(base, method_options={"top_p": 0.9}),
    ]
    assert {settings_hash(request) for request in same} == {settings_hash(base)}
    other = [
        replace(base, seed=1),
        replace(base, steps=4),
        replace(base, dense_steps=0.5),
        replace(base, negative_prompt="blue"),
        replace(base, method_options={"top_p": 0.8}),
        replace(base, method="dense", method_options={}),
        replace(base, fps=9),
    ]
    assert len({settings_hash(request) for request in [base, *other]}) == 1 + len(other)


# finding models


def test_a_folder_brings_its_own_settings_and_words(folder: Path) -> None:
    ref = resolve_model(folder)
    assert (ref.source, ref.pipeline_class) == ("folder", "WanPipeline")
    assert (ref.defaults.frames, ref.defaults.width, ref.defaults.height) == (5, 48, 32)
    assert (ref.defaults.steps, ref.defaults.guidance, ref.defaults.fps) == (3, 2.0, 8)
    assert ref.defaults.order == "columnmajor"
    assert describe(str(folder))["size"] == "48x32"
    assert describe(str(folder))["license"] == "Apache-2.0"


def test_a_folder_without_a_card_has_the_familys_settings(copied: Path) -> None:
    (copied / "vidsparse.json").unlink()
    ref = resolve_model(copied)
    assert ref.defaults == WAN.defaults
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
            *("method", "schedules", "speeds"),
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


# loading


def test_loading_gives_the_saved_weights(folder: Path, loaded: LoadedPipeline) -> None:
    fresh = tiny_wan()
    for name, weight in loaded.pipe.transformer.state_dict().items():
        assert torch.equal(weight, fresh.transformer.state_dict()[name]), name
    assert (loaded.device, loaded.dtype, loaded.offload) == ("cpu", "fp32", "none")
    assert loaded.load_seconds > 0


def test_the_vae_stays_in_fp32(folder: Path) -> None:
    pipe = load(folder, device="cpu", dtype="bf16").pipe
    assert pipe.transformer.dtype == pipe.text_encoder.dtype == torch.bfloat16
    assert pipe.vae.dtype == torch.float32


def test_the_weights_hash_follows_the_weights(copied: Path, folder: Path) -> None:
    before = models.weights_hash(copied)
    assert before == models.weights_hash(folder)
    weights = copied / "vae" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert models.weights_hash(copied) != before


def test_offload_without_cuda_is_an_error(folder: Path) -> None:
    with pytest.raises(OptionError, match="offload model needs a CUDA device"):
        load(folder, device="cpu", offload="model")


def test_compiling_without_a_compiler_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler"):
        load(folder, device="cpu", compile=True)


def test_a_lora_changes_the_video(folder: Path, loaded: LoadedPipeline, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from diffusers import WanPipeline

    pipe = tiny_wan()
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    pipe.transformer.add_adapter(config)
    layers = peft.get_peft_model_state_dict(pipe.transformer)
    WanPipeline.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    (file,) = tmp_path.glob("*.safetensors")
    with_lora = load(folder, device="cpu", lora=str(file))
    request = a_request(method="dense")
    changed = generate(with_lora, request)
    assert changed.record["total"] == 1.0
    assert not np.array_equal(changed.frames, generate(loaded, request).frames)
    assert changed.record["options"]["lora"] == str(file)


@pytest.mark.parametrize("lora", ["nowhere.safetensors", "folder", "file.bin", "other"])
def test_a_lora_that_does_not_fit_is_an_error(folder: Path, tmp_path: Path, lora: str) -> None:
    pytest.importorskip("peft")
    from safetensors.torch import save_file

    (tmp_path / "folder").mkdir()
    (tmp_path / "file.bin").touch()
    save_file({"unrelated.weight": torch.zeros(2)}, tmp_path / "other")
    (tmp_path / "other").rename(tmp_path / "other.safetensors")
    path = tmp_path / (f"{lora}.safetensors" if lora == "other" else lora)
    with pytest.raises(ModelError, match="LoRA"):
        load(folder, device="cpu", lora=str(path))


def test_a_lora_of_a_hub_that_is_not_reached_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    from huggingface_hub import HfApi, hf_api

    # where nobody listens.
    monkeypatch.setattr(hf_api, "api", api := HfApi(endpoint="http://127.0.0.1:9"))
    monkeypatch.setattr("diffusers.loaders.lora_base.model_info", api.model_info)
    with pytest.raises(
        ModelError, match=r"hub cannot be reached \(ConnectError\).*give --lora the"
    ):
        load(folder, device="cpu", lora="nobody/nothing")


# generating


def stock_frames(loaded: LoadedPipeline, **changes: Any) -> np.ndarray:
    call = {
        "prompt": a_request().prompt,
        "num_frames": 5,
        "width": 48,
        "height": 32,
        "num_inference_steps": 3,
        "guidance_scale": 2.0,
        "generator": torch.Generator("cpu").manual_seed(0),
    }
    frames = loaded.pipe(**{**call, **changes}).frames[0]
    return (frames * 255).round().astype(np.uint8)


@pytest.mark.parametrize(
    ("changes", "call"),
    [
        ({}, {}),
        ({"frames": 1, "width": 16, "height": 112}, {"num_frames": 1, "width": 16, "height": 112}),
        ({"guidance": 1.0}, {"guidance_scale": 1.0}),
        ({"negative_prompt": "blue"}, {"negative_prompt": "blue"}),
        ({"seed": 3}, {"generator": torch.Generator("cpu").manual_seed(3)}),
    ],
)
def test_dense_frames_are_the_stock_pipelines(
    loaded: LoadedPipeline, changes: dict[str, Any], call: dict[str, Any]
) -> None:
    made = generate(loaded, a_request(method="dense", **changes))
    assert np.array_equal(made.frames, stock_frames(loaded, **call))
    assert made.frames.dtype == np.uint8
    assert made.record["times"]["attention"] is None
    assert made.record["implementation"] == "the stock pipeline"


@pytest.mark.parametrize("method", ["fg-attn", "spargeattn"])
def test_sparse_frames_are_those_of_a_pipeline_made_sparse(
    loaded: LoadedPipeline, method: str
) -> None:
    # the model's own order is another than sparsify's, and sums are rounded in it.
    made = generate(loaded, a_request(method=method, dense_steps=1, order="hilbert"))
    with sparsify(loaded.pipe, method, dense_steps=1, order="hilbert") as handle:
        assert np.array_equal(made.frames, stock_frames(loaded))
        assert made.record["computed"] == handle.summary().computed


def test_the_pipeline_is_untouched_after_generating(loaded: LoadedPipeline) -> None:
    before = dict(loaded.pipe.transformer.attn_processors)
    stock = stock_frames(loaded)
    generate(loaded, a_request())
    assert loaded.pipe.transformer.attn_processors == before
    assert not loaded.pipe.transformer._forward_pre_hooks
    assert np.array_equal(stock_frames(loaded), stock)


def test_dense_on_a_pipeline_made_sparse_is_refused(loaded: LoadedPipeline) -> None:
    with sparsify(loaded.pipe), pytest.raises(UnsupportedError, match="but this one is sparse"):
        generate(loaded, a_request(method="dense"))


def test_running_out_of_gpu_memory_says_what_to_do(loaded: LoadedPipeline) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UnsupportedError, match=r"memory is too small.*--offload model"):
        generate(loaded, a_request(), progress=full)
    assert not loaded.pipe.transformer._forward_pre_hooks


def test_bf16_runs_on_the_cpu(folder: Path) -> None:
    made = generate(load(folder, device="cpu", dtype="bf16"), a_request(dense_steps=0))
    assert made.frames.shape == (5, 32, 48, 3)
    assert made.record["options"]["dtype"] == "bf16"


def test_a_batch_equals_single_runs_wherever_a_prompt_stands(loaded: LoadedPipeline) -> None:
    prompts = ["a red circle", "a blue square that moves left", "a red circle"]
    requests = [a_request(prompt=prompt, dense_steps=1) for prompt in prompts]
    batch = generate_batch(loaded, requests)
    assert [made.record["prompt"] for made in batch] == prompts
    assert [made.record["batch"] for made in batch] == [3, 3, 3]
    for made, request in zip(batch, requests, strict=True):
        single = generate(loaded, request)
        difference = np.abs(made.frames.astype(int) - single.frames)
        assert difference.max() <= 1
    assert np.abs(batch[0].frames.astype(int) - batch[2].frames).max() <= 1
    assert generate_batch(loaded, []) == []


def test_a_batch_of_different_settings_is_refused(loaded: LoadedPipeline) -> None:
    with pytest.raises(OptionError, match="these differ in steps and seed"):
        generate_batch(loaded, [a_request(), a_request(steps=2, seed=4)])


def test_a_request_for_another_device_or_format_is_refused(loaded: LoadedPipeline) -> None:
    with pytest.raises(OptionError, match=r"dtype bf16 was asked for, .* loaded with fp32"):
        generate(loaded, a_request(dtype="bf16"))


def test_the_record_says_how_the_video_was_made(loaded: LoadedPipeline) -> None:
    asked = {"method": "fg-attn", "dense_steps": 1}
    made = generate(loaded, a_request(prompt="a red dragon", **asked))
    record = made.record
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["options"] == {
        **a_request(**asked).options(),
        "method_options": make_method("fg-attn").options(),
        "dense_layers": 0,
        "dense_last_layers": 0,
        "reuse": 1,
        "refresh": 0,
        "model": loaded.ref.name,
        "order": "columnmajor",
        "frames": 5,
        "width": 48,
        "height": 32,
        "steps": 3,
        "guidance": 2.0,
        "fps": 8,
        "device": "cpu",
        "dtype": "fp32",
        "linear": "none",
        "cache": "none",
        "compile": False,
    }
    assert record["linear"] is None
    assert [step["kind"] for step in record["steps"]] == ["dense", "sparse", "sparse"]
    assert record["scheduler"]["class"] == "UniPCMultistepScheduler"
    assert record["model"]["weights_hash"] == loaded.weights_hash
    assert record["unknown_words"] == ["dragon"]
    assert record["versions"]["torch"] == torch.__version__
    assert record["device"]["threads"] == 1
    assert 0 < record["selected"] <= record["computed"] <= 1
    assert record["dense_step_share"] == pytest.approx(1 / 3)
    assert record["work"]["dense_steps"] == pytest.approx(1 / 3)
    assert record["total"] == pytest.approx(1 / 3 + 2 / 3 * record["computed"])
    assert np.shape(record["density_map"]) == (3, 2)
    times = record["times"]
    assert times["attention"] < times["denoise"] < times["total"]
    phases = times["encode_text"] + times["denoise"] + times["decode"]
    assert phases == pytest.approx(times["total"])
    assert min(times.values()) > 0


def test_progress_is_told_after_every_step(loaded: LoadedPipeline) -> None:
    told: list[tuple[int, int]] = []

    def progress(step: int, steps: int, seconds: float) -> None:
        assert seconds > 0
        told.append((step, steps))

    generate(loaded, a_request(), progress=progress)
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_cancelling_stops_and_leaves_the_pipeline_as_it_was(loaded: LoadedPipeline) -> None:
    steps: list[int] = []
    with pytest.raises(GenerationCancelled, match="after step 2 of 3"):
        generate(
            loaded,
            a_request(),
            progress=lambda step, *_: steps.append(step),
            cancel=lambda: len(steps) == 2,
        )
    assert steps == [1, 2]
    assert issubclass(GenerationCancelled, VidsparseError)
    assert not loaded.pipe.transformer._forward_pre_hooks
    assert isinstance(generate(loaded, a_request()), Generated)


@pytest.mark.parametrize("while_decoding", [False, True])
def test_cancelling_is_heard_while_text_is_encoded_and_frames_are_decoded(
    loaded: LoadedPipeline, while_decoding: bool
) -> None:
    steps: list[int] = []
    # one for each of three latent frames: the decoder is stopped in its second.
    decoded: list[object] = []
    vae = loaded.pipe.vae
    counting = vae.decoder.mid_block.register_forward_hook(lambda *_: decoded.append(None))
    try:
        with pytest.raises(GenerationCancelled, match="while encoding or decoding"):
            generate(
                loaded,
                a_request(frames=9),
                progress=lambda step, *_: steps.append(step),
                cancel=lambda: len(decoded) == 2 if while_decoding else True,
            )
    finally:
        counting.remove()
    assert steps == ([1, 2, 3] if while_decoding else [])
    assert len(decoded) == (2 if while_decoding else 0)
    # features of the frames before are not kept, and nobody listens any more.
    assert all(feature is None for feature in vae._feat_map)
    for part in (loaded.pipe.text_encoder, vae):
        assert not any(module._forward_pre_hooks for module in part.modules())
    assert isinstance(generate(loaded, a_request()), Generated)


def test_the_hosts_are_quiet_inside_and_as_before_after(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.set_verbosity_info()
    made = load(folder, device="cpu")
    made.pipe.set_progress_bar_config(leave=False)
    capfd.readouterr()
    try:
        load(folder, device="cpu")
        generate(made, a_request())
        out, err = capfd.readouterr()
        assert (out, err) == ("", "")
        assert diffusers_logging.get_verbosity() == diffusers_logging.INFO
        assert diffusers_logging.is_progress_bar_enabled()
        assert transformers_logging.is_progress_bar_enabled()
        assert made.pipe._progress_bar_config == {"leave": False}
    finally:
        diffusers_logging.set_verbosity_warning()


@pytest.mark.slow
def test_compiled_blocks_give_the_same_video(folder: Path, loaded: LoadedPipeline) -> None:
    torch._dynamo.reset()
    compiled = load(folder, device="cpu", compile=True)
    request = a_request(dense_steps=1)
    first = generate(compiled, request)
    difference = first.frames.astype(int) - generate(loaded, request).frames
    assert np.abs(difference).max() <= 2
    # the record says what compiling took, which the next video does not pay again.
    assert 0 < first.record["times"]["compile"] < first.record["times"]["denoise"]
    assert generate(compiled, request).record["times"]["compile"] == 0
    torch._dynamo.reset()


def test_compilation_is_told_where_it_begins_and_ends() -> None:
    torch._dynamo.reset()
    told: list[bool] = []
    double = torch.compile(lambda x: 2 * x, backend="eager")
    with compilations(told.append) as seconds:
        assert seconds() == 0
        double(torch.ones(3))
        assert told == [True, False]
        once = seconds()
        assert once > 0
        double(torch.ones(3))
        assert (told, seconds()) == ([True, False], once)
    # nobody is told once the block has ended.
    torch._dynamo.reset()
    double(torch.ones(3))
    assert told == [True, False]


@pytest.mark.parametrize(
    ("part", "name", "words"),
    [
        ("transformer", "proj_out.bias", "NaN or infinity in the transformer, step 1 of 2"),
        ("vae", "decoder.conv_out.bias", "decoding came to NaN or infinity in frame 1 of"),
    ],
)
def test_a_run_that_comes_to_nan_ends_and_says_where(
    loaded: LoadedPipeline, part: str, name: str, words: str
) -> None:
    broken = getattr(loaded.pipe, part).get_parameter(name)
    before = broken.detach().clone()
    with torch.no_grad():
        broken[0] = torch.nan
    try:
        with pytest.raises(NonFiniteError, match=words):
            generate(loaded, a_request(steps=2))
    finally:
        with torch.no_grad():
            broken.copy_(before)
    assert generate(loaded, a_request(steps=2)).frames.any()


# video files


@pytest.mark.parametrize("fps", [0.1, 1 / 3, 23.976, 240, 1000])
def test_every_frame_rate_that_is_taken_keeps_all_frames(tmp_path: Path, fps: float) -> None:
    write_video(ramp(5, 32, 32), tmp_path / "clip.mp4", fps=fps)
    assert len(read_video(tmp_path / "clip.mp4")) == 5


def ramp(frames: int, height: int, width: int) -> np.ndarray:
    """Smooth colours that differ everywhere: what a codec should keep almost exactly."""
    t, y, x = np.meshgrid(*(np.linspace(0, 1, n) for n in (frames, height, width)), indexing="ij")
    return (np.stack([x, y, (t + x) / 2], -1) * 200 + 20).astype(np.uint8)


@pytest.mark.parametrize("size", [(5, 64, 48), (1, 32, 32), (3, 33, 47)])
def test_a_video_comes_back_as_it_was(tmp_path: Path, size: tuple[int, int, int]) -> None:
    frames = ramp(*size)
    write_video(frames, tmp_path / "clip.mp4", fps=8)
    back = read_video(tmp_path / "clip.mp4")[:, : size[1], : size[2]]
    assert back.shape == frames.shape
    assert np.abs(back.astype(int) - frames).mean() < 2.5
    assert [p.name for p in tmp_path.iterdir()] == ["clip.mp4"]


def test_reading_a_video_leaves_no_pipe_open(tmp_path: Path) -> None:
    write_video(ramp(3, 32, 32), tmp_path / "clip.mp4", fps=8)
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(5):
            read_video(tmp_path / "clip.mp4")
        gc.collect()
    assert [str(each.message) for each in caught] == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        write_video(ramp(1, 16, 16), tmp_path / "missing" / "clip.mp4", fps=8)


# what becomes of ffmpeg, by what stands in its place; $FFMPEG is the real one.
FAULTS = {
    "killed": ("head -c 1000 > /dev/null; kill -9 $$", "SIGKILL"),
    "too-large": ('ulimit -f 1; exec "$FFMPEG" "$@"', "File|SIGXFSZ"),
    "refused": ("cat > /dev/null; echo no such codec >&2; exit 1", "exit code 1: no such codec"),
    "cut-short": (
        '"$FFMPEG" "$@"; for last; do :; done; test -s "$last" && truncate -s 900 "$last"',
        "0 of 5 frames",
    ),
    "one-frame": (
        'for last; do :; done; case "$last" in *.tmp) "$FFMPEG" "$@" < "$FIRST";;'
        ' *) exec "$FFMPEG" "$@";; esac; cat > /dev/null',
        "1 of 5 frames",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_encoder_that_fails_is_an_error_and_keeps_the_old_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ffmpeg: Callable[[str], None],
    fault: str,
) -> None:
    script, words = FAULTS[fault]
    path = tmp_path / "out" / "clip.mp4"
    path.parent.mkdir()
    write_video(ramp(2, 64, 64), path, fps=8)
    before = path.read_bytes()
    frames = np.random.default_rng(0).integers(0, 255, (5, 64, 64, 3), dtype=np.uint8)
    (tmp_path / "first").write_bytes(frames[0].tobytes())
    monkeypatch.setenv("FIRST", str(tmp_path / "first"))
    ffmpeg(script)
    with pytest.raises(OutputError, match=words) as failed:
        write_video(frames, path, fps=8)
    # another video may well succeed.
    assert not isinstance(failed.value, FolderError)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["clip.mp4"]


def test_an_encoder_that_cannot_be_started_is_no_fault_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "nowhere"))
    for use in (require_encoder, lambda: write_video(ramp(5, 64, 64), tmp_path / "clip.mp4", 8)):
        with pytest.raises(UnsupportedError, match=r"cannot be started at .*nowhere: No such"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_fault_of_the_folder(
    tmp_path: Path, ffmpeg: Callable[[str], None]
) -> None:
    ffmpeg("echo 'muxing: No space left on device' >&2; exit 228")
    with pytest.raises(FolderError, match="No space left on device"):
        write_video(ramp(5, 64, 64), tmp_path / "clip.mp4", fps=8)


@pytest.mark.timeout(60)
def test_ctrl_c_at_any_moment_of_the_writing_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ThreadPoolExecutor.submit

    def interrupted(self: ThreadPoolExecutor, *args: Any) -> Any:
        submit(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_video(ramp(5, 64, 64), tmp_path / "clip.mp4", fps=8)
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_raises_ends_the_writing_and_leaves_nothing(tmp_path: Path) -> None:
    told: list[None] = []

    def check() -> None:
        told.append(None)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_video(ramp(5, 16, 16), tmp_path / "clip.mp4", fps=8, check=check)
    assert len(told) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("frames", [np.zeros((2, 8, 8)), np.zeros((2, 8, 8, 4), np.uint8)])
def test_frames_of_another_kind_are_refused(tmp_path: Path, frames: np.ndarray) -> None:
    with pytest.raises(OptionError, match="frames must be uint8"):
        write_video(frames, tmp_path / "clip.mp4", fps=8)
