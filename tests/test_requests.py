"""Requests for a video: what is refused, what is filled in, and which are alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import a_request, save_tiny_model

from vidsparse.errors import (
    OptionError,
)
from vidsparse.pipelines.families import WAN
from vidsparse.pipelines.models import MODELS, resolve_model
from vidsparse.pipelines.placement import check_device
from vidsparse.pipelines.request import resolve, settings_hash

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


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
        ({"linear": "int4"}, "unknown linear 'int4'. Hint: choose from none, fp8, int8, bf16"),
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


def test_a_cpu_makes_the_smaller_video_that_a_model_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = replace(WAN.defaults, on_cpu={"frames": 33, "width": 320, "height": 256})

    def made(**asked: Any) -> tuple[int | None, ...]:
        request = resolve(a_request(**asked), own)
        return request.frames, request.width, request.height

    assert made(device="cpu") == (33, 320, 256)
    assert made(device="cpu", frames=81) == (81, 320, 256)
    assert made(device="cpu", width=640, height=640) == (33, 640, 640)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert made(device="cuda") == (81, 832, 480)
    # 21 latent frames in the place of 9.
    assert own.tokens_beyond(own.on("cpu")) == 21 * 832 * 480 / (9 * 320 * 256)


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


# ---- a card's options beside a request's ----


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("speed", [None, "high", "balanced", "fast"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fg-attn", {"topk": 0.3}),
        ("spargeattn", {"topk": 0.3}),
        ("xattention", {"topk": 0.3}),
        ("xattention", {"blocks": 2}),
    ],
)
def test_a_share_of_tiles_takes_the_place_of_a_card_s_share_of_the_mass(
    model: str, speed: str | None, method: str, options: dict[str, Any]
) -> None:
    request = a_request(model=model, device="cpu", speed=speed, method=method)
    request = replace(request, method_options=options)
    found = resolve(request, resolve_model(model).defaults).method_options
    assert {name: found[name] for name in options} == options
    assert found.get("top_p") is None
    assert found.get("tau") is None


def test_what_stands_beside_given_options() -> None:
    own = replace(WAN.defaults, method_options={"fg-attn": {"top_p": 0.7, "tile": "32x32"}})
    assert own.options_beside("fg-attn", {"top_p": 0.5}) == {"top_p": 0.7, "tile": "32x32"}
    assert own.options_beside("fg-attn", {"topk": None}) == {"top_p": 0.7, "tile": "32x32"}
    assert own.options_beside("fg-attn", {"topk": 0.5}) == {"tile": "32x32"}
    assert own.options_beside("spargeattn", {"topk": 0.5}) == {}


@pytest.mark.parametrize("model", MODELS)
def test_a_guidance_given_as_a_whole_number_is_the_same_run(model: str) -> None:
    own = resolve_model(model).defaults.guidance
    assert own == int(own)
    hashes = {
        settings_hash(a_request(model=model, device="cpu", guidance=each))
        for each in (None, own, int(own))
    }
    assert len(hashes) == 1
