"""The small models that ship: their folders, what these say of themselves, and what they draw."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import FILES, MEGABYTE, PROMPTS, ROOT, SHARDED_FILES, files, load

from vidsparse.apps.small_model import (
    card,
    vae,
    vae_psnr,
)
from vidsparse.apps.small_model.cogvideox import SHAPES_JOINT
from vidsparse.apps.small_model.export import build_tokenizer
from vidsparse.apps.small_model.model import ClipSize, SmallModel
from vidsparse.apps.small_model.registry import SMALL_MODELS
from vidsparse.apps.small_model.wan import SHAPES
from vidsparse.apps.small_model.wan_scenes import SCENES
from vidsparse.calibration import CALIBRATORS
from vidsparse.metrics import compare_videos
from vidsparse.pipelines.generate import generate as generate_for_commands
from vidsparse.pipelines.models import MODELS, resolve_model
from vidsparse.pipelines.models import load as load_for_commands
from vidsparse.pipelines.request import GenerateRequest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=list(MODELS))
def shipped(request: pytest.FixtureRequest) -> Any:
    return SMALL_MODELS[request.param]


@pytest.fixture(scope="module")
def pipe(shipped: SmallModel) -> Any:
    return load(shipped, MODELS[shipped.name])


def megabytes(name: str) -> float:
    files = (path for path in MODELS[name].rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files) / MEGABYTE


def test_every_small_model_with_weights_ships() -> None:
    assert list(MODELS) == list(SMALL_MODELS)


def test_the_shipped_folder_is_complete_and_safetensors_only(shipped: SmallModel) -> None:
    # numbers of methods that were calibrated for it, two files each: tests/test_own_presets.py.
    own = {name for name in files(MODELS[shipped.name]) if name.startswith("presets/")}
    assert own <= {f"presets/{m}.{kind}" for m in CALIBRATORS for kind in ("json", "safetensors")}
    expected = SHARDED_FILES if shipped is SCENES else FILES
    assert files(MODELS[shipped.name]) - own == expected
    assert all(file.stat().st_size < 2**24 for file in MODELS[SCENES.name].rglob("*"))


def test_the_shipped_folders_are_small() -> None:
    assert 20 < megabytes("shapes") < 28
    assert 8 < megabytes("shapes-joint") < 12
    assert 28 < megabytes("scenes") < 33
    assert sum(map(megabytes, MODELS)) < 75


@pytest.mark.usefixtures("offline")
def test_the_shipped_folder_loads_offline_as_a_stock_pipeline(shipped: SmallModel) -> None:
    pipe = load(shipped, MODELS[shipped.name])
    assert type(pipe) is shipped.pipeline_class
    assert type(pipe.scheduler) is type(shipped.build_scheduler())
    built, told = ({**one.config} for one in (shipped.build_scheduler(), pipe.scheduler))
    assert {key: told[key] for key in built if key[0] != "_"} == {
        key: value for key, value in built.items() if key[0] != "_"
    }


def test_the_shipped_model_has_the_sizes_its_code_builds(shipped: SmallModel, pipe: Any) -> None:
    def count(net: Any) -> int:
        return sum(p.numel() for p in net.parameters())

    for net, built in (
        (pipe.transformer, shipped.build_transformer()),
        (pipe.text_encoder, shipped.build_text_encoder()),
        (pipe.vae, shipped.build_vae()),
    ):
        assert count(net) == count(built)
    assert count(pipe.transformer) == pytest.approx(
        {SHAPES: 8.6e6, SHAPES_JOINT: 4.3e6, SCENES: 12.4e6}[shipped], rel=0.01
    )


def test_the_shipped_weights_are_trained_ones(pipe: Any) -> None:
    for net in (pipe.transformer, pipe.text_encoder, pipe.vae):
        assert all(p.isfinite().all() for p in net.parameters())
    # zero before training
    assert pipe.transformer.proj_out.weight.abs().max() > 0


def test_the_shipped_settings_are_those_of_the_code(shipped: SmallModel) -> None:
    told = json.loads((MODELS[shipped.name] / "vidsparse.json").read_text(encoding="utf-8"))
    assert told == card.settings(shipped)
    assert tuple(told["vocabulary"]) == shipped.world.vocabulary.words


def test_commands_find_the_shipped_model_and_its_settings(shipped: SmallModel) -> None:
    ref = resolve_model(shipped.name)
    assert ref.source == "bundled"
    assert ref.license == "Apache-2.0"
    assert "small demonstration model" in ref.description
    assert ref.vocabulary == shipped.world.vocabulary.words
    assert ref.example_prompts == shipped.world.example_prompts
    defaults, own = ref.defaults, shipped.card
    assert f"{defaults.frames} {defaults.width}x{defaults.height}" == f"{own.frames} {own.size}"
    small = defaults.on("cpu")
    frames, size = own.on_cpu or (own.frames, own.size)
    assert f"{small.frames} {small.width}x{small.height}" == f"{frames} {size}"
    for name in (
        "steps",
        "guidance",
        "fps",
        "order",
        "dense_layers",
        "dense_last_layers",
        "reuse",
        "method_options",
    ):
        assert getattr(defaults, name) == getattr(own, name)


def test_the_shipped_tokenizer_is_the_one_of_training(shipped: SmallModel, pipe: Any) -> None:
    tokenizer = build_tokenizer(shipped.world.vocabulary)
    for prompt in PROMPTS:
        assert pipe.tokenizer(prompt).input_ids == tokenizer(prompt).input_ids


def test_the_shipped_card_reports_measurements_that_meet_the_bars(shipped: SmallModel) -> None:
    told = (MODELS[shipped.name] / "README.md").read_text(encoding="utf-8")
    assert "small demonstration model" in told
    assert f"from diffusers import {shipped.pipeline_class.__name__}\n" in told
    psnr = re.findall(r"^\| \d+x\d+x\d+ \| ([\d.]+)", told, flags=re.MULTILINE)
    read = r"^\| (\d+x\d+), \d+ frames \| (?:(\d+) of 24|not measured) \|"
    right = dict(re.findall(read, told, flags=re.MULTILINE))
    assert len(psnr) == len(right) == len(shipped.recipe.sizes)
    assert min(map(float, psnr)) >= vae_psnr.BAR_DB
    assert int(right[shipped.card.size]) >= shipped.world.bar
    if shipped is not SCENES:
        # whose short clips are worse (they are for a CPU), and whose middle ones nobody has read.
        assert min(map(int, right.values())) >= shipped.world.bar


def test_the_shipped_card_is_the_one_the_code_writes(shipped: SmallModel, pipe: Any) -> None:
    told = (MODELS[shipped.name] / "README.md").read_text(encoding="utf-8")
    parts = shipped.parts(pipe.transformer, pipe.text_encoder, pipe.vae)
    assert parts in told
    tokens = [shipped.tokens(pipe.transformer, pipe.vae, s) for s in shipped.recipe.sizes]
    assert tokens[0] == (3600 if shipped is SCENES else 2304)
    assert all(f"are {count:,} tokens" in told for count in tokens)


def test_the_shipped_licence_is_that_of_the_repository(shipped: SmallModel) -> None:
    assert (MODELS[shipped.name] / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_shipped_autoencoder_rebuilds_a_clip_it_has_not_seen(
    shipped: SmallModel, pipe: Any
) -> None:
    clip = next(
        vae.held_out_clips(shipped.world, ClipSize(frames=9, side=128), 1, 1, torch.device("cpu"))
    )
    with torch.no_grad():
        mean, _ = shipped.encode(pipe.vae, clip)
        rebuilt = shipped.decode(pipe.vae, mean)
    # small pictures have finer detail for their size than the two the bar of 30 dB is for
    assert vae.clip_psnr(rebuilt, clip).item() > 25


def test_the_shipped_model_draws_finite_frames_that_move(shipped: SmallModel, pipe: Any) -> None:
    call = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 4}
    generator = torch.Generator("cpu").manual_seed(0)
    prompt = shipped.world.example_prompts[0]
    frames = pipe(prompt, generator=generator, output_type="pt", **call).frames
    assert frames.shape == (1, 9, 3, 64, 64)
    assert frames.isfinite().all()
    assert frames[0].std(dim=0).mean() > 0.005


@pytest.mark.slow
def test_a_short_sparse_run_is_close_to_the_dense_one(shipped: SmallModel) -> None:
    loaded = load_for_commands(shipped.name, device="cpu")
    request = GenerateRequest(
        prompt=shipped.world.example_prompts[0],
        model=shipped.name,
        width=128,
        height=128,
        frames=17,
        steps=6,
    )
    # most pairs are kept, but not all; at one top_p scenes leaves out more
    top_p = 0.99 if shipped is SCENES else 0.95
    sparse = replace(request, method="fg-attn", method_options={"top_p": top_p, "tile": "16x16"})
    expected, made = (
        generate_for_commands(loaded, one) for one in (replace(request, method="dense"), sparse)
    )
    assert made.frames.shape == expected.frames.shape == (17, 128, 128, 3)
    assert 0.2 < made.record["computed"] < 1
    psnr = compare_videos(expected.frames, made.frames).psnr
    assert psnr is not None
    assert psnr > 25
