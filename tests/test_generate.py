"""Generation with a tiny model: loading it, its videos and their records, and how runs end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import a_request, save_tiny_model
from tiny_pipelines import tiny_wan

from vidsparse.errors import (
    ModelError,
    NonFiniteError,
    OptionError,
    UnsupportedError,
    VidsparseError,
)
from vidsparse.files import file_hash
from vidsparse.methods import make_method
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.compilation import compilations
from vidsparse.pipelines.generate import (
    Generated,
    GenerationCancelled,
    generate,
    generate_batch,
)
from vidsparse.pipelines.models import LoadedPipeline, load
from vidsparse.pipelines.weights import lora_hash, lora_stamp

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedPipeline:
    return load(folder, device="cpu")


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


def test_offload_without_cuda_is_an_error(folder: Path) -> None:
    with pytest.raises(OptionError, match="offload model needs a CUDA device"):
        load(folder, device="cpu", offload="model")


def test_compiling_without_a_compiler_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler"):
        load(folder, device="cpu", compile=True)


def save_lora(folder: Path) -> Path:
    """The file of a LoRA for the tiny model, made in ``folder``."""
    peft = pytest.importorskip("peft")
    from diffusers import WanPipeline

    pipe = tiny_wan()
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    pipe.transformer.add_adapter(config)
    layers = peft.get_peft_model_state_dict(pipe.transformer)
    WanPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
    (file,) = folder.glob("*.safetensors")
    return file


def test_a_lora_changes_the_video(folder: Path, loaded: LoadedPipeline, tmp_path: Path) -> None:
    file = save_lora(tmp_path)
    with_lora = load(folder, device="cpu", lora=str(file))
    request = a_request(method="dense")
    changed = generate(with_lora, request)
    assert changed.record["total"] == 1.0
    assert not np.array_equal(changed.frames, generate(loaded, request).frames)
    assert changed.record["options"]["lora"] == str(file)
    # a path may hold another LoRA by the time that the record is read, or when the video is made.
    digest = file_hash(file)
    # another file: the weights of the first one are read from where it lies.
    file.unlink()
    file.write_bytes(b"another")
    assert changed.record["lora"] == generate(with_lora, request).record["lora"] == digest
    assert generate(loaded, request).record["lora"] is None


def test_a_lora_of_the_hub_is_recorded_by_the_weights_that_its_cache_holds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    commit = "0" * 40
    cached = tmp_path / "models--somebody--style"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit, encoding="utf-8")
    held = cached / "snapshots" / commit
    held.mkdir(parents=True)
    file = save_lora(held)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    # which file it is, diffusers asks the hub.
    said = SimpleNamespace(siblings=[SimpleNamespace(rfilename=file.name)])
    monkeypatch.setattr("diffusers.loaders.lora_base.model_info", lambda name: said)
    loaded = load(folder, device="cpu", lora="somebody/style")
    # that of a folder with the same files.
    assert loaded.lora_hash == lora_stamp(str(held))
    # the id of one that is not there: nothing is fetched.
    assert lora_hash("somebody/other") == "somebody/other"


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
        ("vae", "decoder.conv_out.bias", "decoding returned NaN or infinity in frame 1 of"),
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
