"""The small models: their world, their words, the training command, and the folders that ship."""

from __future__ import annotations

import json
import math
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from vidsparse.apps.small_model import (
    benchmark,
    card,
    fidelity,
    muon,
    reading,
    text,
    train,
    vae,
    vae_psnr,
    words,
    world,
)
from vidsparse.apps.small_model.cogvideox import SHAPES_JOINT, rotary_angles
from vidsparse.apps.small_model.drawing import SHAPES as SHAPES_DRAWN
from vidsparse.apps.small_model.export import build_tokenizer, export
from vidsparse.apps.small_model.model import ClipSize, Recipe, SmallModel
from vidsparse.apps.small_model.registry import SMALL_MODELS
from vidsparse.apps.small_model.scenes import world as scenes_world
from vidsparse.apps.small_model.together import Together
from vidsparse.apps.small_model.wan import SHAPES
from vidsparse.apps.small_model.wan_scenes import SCENES
from vidsparse.apps.small_model.worlds import SHAPES_WORLD
from vidsparse.calibration import CALIBRATORS
from vidsparse.metrics import compare_videos
from vidsparse.pipelines.generate import generate as generate_for_commands
from vidsparse.pipelines.models import MODELS, resolve_model, unknown_words
from vidsparse.pipelines.models import load as load_for_commands
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.pipelines.video import read_video

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
MEGABYTE = 1_000_000


def scenes(count: int, seed: int = 0) -> list[world.Scene]:
    rng = random.Random(seed)
    return [world.sample_scene(rng) for _ in range(count)]


def body(**changes: Any) -> world.Body:
    return world.Body(
        **{"shape": "ball", "colour": "red", "size": "large", "motion": "moves right"} | changes
    )


def to_bytes(clips: torch.Tensor) -> list[np.ndarray]:
    """Clips [B, 3, T, H, W] in [-1, 1] as RGB bytes [T, H, W, 3] each."""
    pixels = ((clips + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1)
    return list(pixels.numpy())


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection fails."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was asked for something")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# --- the world ---


def test_a_seed_draws_the_same_scenes_and_pictures() -> None:
    assert scenes(20) == scenes(20)
    assert scenes(20) != scenes(20, seed=1)
    first, second = (world.render(scenes(4), 5, 32, 32) for _ in range(2))
    assert torch.equal(first, second)


def test_a_scene_looks_the_same_alone_and_in_a_batch() -> None:
    drawn = scenes(6)
    together = world.render(drawn, 5, 32, 48)
    alone = torch.cat([world.render([scene], 5, 32, 48) for scene in drawn])
    assert (together - alone).abs().max() < 1e-5


def test_clips_have_the_size_asked_for_and_stay_in_range() -> None:
    clip = world.render(scenes(3), 7, 40, 56)
    assert clip.shape == (3, 3, 7, 40, 56)
    assert clip.dtype == torch.float32
    assert clip.abs().max() <= 1


def test_a_scene_is_the_same_picture_at_any_resolution() -> None:
    drawn = scenes(12)
    small = world.render(drawn, 3, 48, 64)
    large = world.render(drawn, 3, 144, 192)
    shrunk = torch.nn.functional.avg_pool3d(large, (1, 3, 3))
    # edges are sampled, not integrated, so that a few pixels on them differ
    assert (small - shrunk).abs().mean() < 0.01


def test_a_scene_takes_the_same_course_at_any_length() -> None:
    drawn = scenes(4)
    short, long = world.render(drawn, 5, 32, 32), world.render(drawn, 9, 32, 32)
    assert torch.allclose(short, long[:, :, ::2], atol=1e-5)


@pytest.mark.parametrize("frame", [(1.0, 1.0), (1.5, 1.0), (1.0, 1.5)])
def test_no_body_leaves_the_frame(frame: tuple[float, float]) -> None:
    time = np.linspace(0, 1, 33)
    for scene in scenes(200):
        for one in scene.bodies:
            x, y, extent, _ = world.track(one, time, frame)
            assert (np.abs(x) + extent <= frame[0]).all()
            assert (np.abs(y) + extent <= frame[1]).all()


def test_bodies_stand_where_centres_says() -> None:
    ball = body(colour="white", motion="moves down", size="small")
    scene = world.Scene(bodies=(ball,), texture="plain", background="black")
    picture = to_bytes(world.render([scene], 9, 64, 64))[0].astype(float).sum(-1)
    for frame, (x, y) in zip(picture, world.centres(scene, 9)[0], strict=True):
        rows, columns = np.nonzero(frame > 300)
        assert columns.mean() / 64 == pytest.approx(x, abs=0.03)
        assert rows.mean() / 64 == pytest.approx(y, abs=0.03)


def test_training_never_draws_what_is_held_out() -> None:
    assert len(set(world.HELD_OUT)) == 24
    drawn = {(b.colour, b.shape, b.motion) for scene in scenes(3000) for b in scene.bodies}
    assert not drawn & set(world.HELD_OUT)
    held = [scene.bodies[0] for scene in world.held_out_scenes()]
    assert [(b.colour, b.shape, b.motion) for b in held] == list(world.HELD_OUT)


@pytest.mark.parametrize(
    ("name", "value"), [("shape", "cone"), ("colour", "pink"), ("size", "tall"), ("motion", "hops")]
)
def test_a_body_refuses_what_cannot_be_drawn(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be one of .*, got '{value}'"):
        body(**{name: value})


# --- words ---


def test_the_canonical_caption_names_everything_in_the_scene() -> None:
    for scene in scenes(300):
        said = text.caption(scene)
        parts = re.split(" and | on ", said)
        assert len(parts) == len(scene.bodies) + 1
        for part, one in zip(parts, scene.bodies, strict=False):
            assert re.fullmatch(rf"an? {one.size} {one.colour} {one.shape} that {one.motion}", part)
        assert re.fullmatch(rf"an? {scene.texture} {scene.background} background", parts[-1])


def test_different_scenes_have_different_canonical_captions() -> None:
    def said(scene: world.Scene) -> tuple[Any, ...]:
        things = [(b.size, b.colour, b.shape, b.motion) for b in scene.bodies]
        return (*things, scene.texture, scene.background)

    drawn = scenes(2000)
    assert len({text.caption(scene) for scene in drawn}) == len({said(scene) for scene in drawn})


def test_varied_captions_keep_colours_or_their_synonyms() -> None:
    synonyms = {"purple": {"violet"}, "cyan": {"turquoise"}}
    rng = random.Random(3)
    for scene in scenes(300):
        said = set(words.words(text.caption(scene, rng)))
        for one in scene.bodies:
            assert said & ({one.colour} | synonyms.get(one.colour, set()))


def test_every_caption_word_is_in_the_vocabulary() -> None:
    rng = random.Random(1)
    for scene in [*scenes(1000), *world.held_out_scenes()]:
        for said in (text.caption(scene), *(text.caption(scene, rng) for _ in range(4))):
            assert text.VOCABULARY.unknown(said) == []
            assert len(text.VOCABULARY.token_ids(said)) <= text.VOCABULARY.caption_tokens


def test_no_word_of_the_vocabulary_is_never_used() -> None:
    rng = random.Random(2)
    used: set[str] = set()
    for scene in scenes(2000):
        used.update(words.words(text.caption(scene)), words.words(text.caption(scene, rng)))
    assert used | {"an"} == set(text.VOCABULARY.words)


def test_training_captions_are_padded_and_hold_one_end() -> None:
    rng = random.Random(4)
    rows = [SHAPES_WORLD.training_ids(scene, rng) for scene in scenes(300)]
    assert {len(row) for row in rows} == {text.VOCABULARY.caption_tokens}
    assert {row.count(words.END_ID) for row in rows} == {1}
    assert 0.03 < np.mean([words.UNKNOWN_ID in row for row in rows]) < 0.2


PROMPTS = (
    "a large red ball that moves right on a plain navy background",
    "A Large, RED ball!  (that moves... right) on a plain-navy\tbackground;",
    "a zebra that moves left",
    "a tiny violet donut falling & a big donut's rising, on a grey backdrop?",
    "ein großer roter Ball \N{EN DASH} 大きな赤いボール",
    "café under_score 3 balls",
    "the </s> ball <pad> moves <unk> up",
    "",
    "   ",
    "!?.",
)


@pytest.fixture(scope="module")
def saved_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(text.VOCABULARY).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_tokenizer_reads_prompts_as_training_did(prompt: str, saved_tokenizer: Any) -> None:
    # special tokens written into a prompt are the tokenizer's own; everything else is words
    expected = text.VOCABULARY.token_ids(prompt)
    if "</s>" not in prompt:
        assert build_tokenizer(text.VOCABULARY)(prompt).input_ids == expected
    assert saved_tokenizer(prompt).input_ids == build_tokenizer(text.VOCABULARY)(prompt).input_ids


def test_the_tokenizer_pads_and_cuts_as_the_pipeline_asks(saved_tokenizer: Any) -> None:
    long = "red " * 600
    batch = saved_tokenizer(
        ["a red ball", long],
        padding="max_length",
        max_length=512,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    assert batch.input_ids.shape == (2, 512)
    assert batch.input_ids[0, :5].tolist() == [
        *text.VOCABULARY.token_ids("a red ball"),
        words.PAD_ID,
    ]
    assert batch.attention_mask.sum(1).tolist() == [4, 512]
    assert batch.input_ids[1, -1] == words.END_ID


@pytest.mark.parametrize("prompt", PROMPTS[:6])
def test_the_commands_warn_of_the_words_the_tokenizer_does_not_know(
    prompt: str, trained: Run
) -> None:
    known = trained.model.world.vocabulary
    assert unknown_words(resolve_model(trained.folder), prompt) == known.unknown(prompt)


# --- the reader of colours and directions ---


def test_the_reader_is_right_on_every_true_clip() -> None:
    held_out = world.held_out_scenes()
    clips = to_bytes(world.render(held_out, 17, 64, 64))
    wrong = [verdict for verdict in reading.judge(clips) if not verdict.right]
    assert wrong == []


def test_the_reader_is_right_at_other_shapes_of_frame_and_with_noise() -> None:
    rng = np.random.default_rng(0)
    held_out = world.held_out_scenes()
    clips = to_bytes(world.render(held_out, 17, 64, 96))
    noisy = [np.clip(c + rng.normal(0, 6, c.shape), 0, 255).astype(np.uint8) for c in clips]
    assert all(verdict.right for verdict in reading.judge(noisy))


def test_the_reader_tells_a_wrong_clip() -> None:
    held_out = world.held_out_scenes()
    clips = to_bytes(world.render(held_out, 17, 64, 64))
    assert not any(verdict.right for verdict in reading.judge([clip[::-1] for clip in clips]))
    # eight colours, three clips each
    assert not any(verdict.right for verdict in reading.judge(clips[3:] + clips[:3]))


def test_the_reader_sees_nothing_where_nothing_moves() -> None:
    still = world.Scene(bodies=(body(motion="stays still"),), texture="plain", background="navy")
    clip = to_bytes(world.render([still], 9, 64, 64))[0]
    nothing = reading.Reading(colour="none", motion="none")
    assert reading.read_clip(clip) == nothing
    assert reading.read_clip(np.full((9, 64, 64, 3), 128, np.uint8)) == nothing


def test_a_contact_sheet_has_a_row_a_clip() -> None:
    clips = [np.full((9, 32, 32, 3), value, np.uint8) for value in (0, 128)]
    sheet = fidelity.contact_sheet(clips, columns=3, side=16)
    assert sheet.shape == (2 * 18, 3 * 18, 3)
    assert sheet[9, 9].tolist() == [0, 0, 0]
    assert sheet[27, 9].tolist() == [128, 128, 128]


# --- what the layouts declare ---


@pytest.fixture(params=SMALL_MODELS.values(), ids=list(SMALL_MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(("frames", "height", "width"), [(9, 16, 32), (17, 32, 16), (25, 16, 16)])
def test_the_forward_of_training_equals_that_of_diffusers(
    model: SmallModel, frames: int, height: int, width: int
) -> None:
    torch.manual_seed(0)
    stock = model.build_vae().eval()
    clip = torch.rand(2, 3, frames, height, width) * 2 - 1
    with torch.no_grad():
        posterior = stock.encode(clip).latent_dist
        expected = stock.decode(posterior.mean).sample
        fast = model.prepare_vae(deepcopy(stock))
        mean, log_variance = model.encode(fast, clip)
        rebuilt = model.decode(fast, mean)
    scale = posterior.mean.abs().max()
    assert (mean - posterior.mean).abs().max() < 1e-4 * scale
    assert (log_variance - posterior.logvar).abs().max() < 1e-4 * posterior.logvar.abs().max()
    # Wan's pictures come clamped
    assert (rebuilt.clamp(-1, 1) - expected.clamp(-1, 1)).abs().max() < 1e-4


def test_an_autoencoder_is_trained_in_the_precision_of_its_clip(model: SmallModel) -> None:
    torch.manual_seed(0)
    net = model.prepare_vae(model.build_vae())
    clip = torch.rand(1, 3, 9, 16, 16) * 2 - 1
    exact, _ = model.encode(net, clip)
    mean, _ = model.encode(net, clip.to(torch.bfloat16))
    assert mean.dtype == torch.bfloat16
    assert 0 < (mean - exact).abs().max() < 0.1 * exact.abs().max()
    model.decode(net, mean).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


def test_known_moments_change_what_the_pipeline_sees_and_not_the_picture(
    model: SmallModel,
) -> None:
    torch.manual_seed(0)
    net = model.build_vae().eval()
    clip = torch.rand(1, 3, 9, 16, 16) * 2 - 1
    with torch.no_grad():
        latents, spread = model.encode(net, clip)
        picture = model.decode(net, latents)
        channels = latents.shape[1]
        mean, deviation = torch.rand(channels) - 0.5, torch.rand(channels) + 0.5
        shift, scale = (x.view(-1, 1, 1, 1) for x in model.normalise(net, mean, deviation))
        after, its_spread = model.encode(net, clip)
        wanted = (latents - shift) / scale
        assert torch.allclose(seen_by_the_pipeline(net, after), wanted, atol=1e-4)
        assert torch.allclose(model.decode(net, after), picture, atol=1e-4)
        if model is SHAPES_JOINT:
            assert torch.allclose(its_spread, spread - 2 * scale.log(), atol=1e-4)
    assert torch.equal(scale.flatten(), deviation)


def seen_by_the_pipeline(net: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents of an autoencoder as its pipeline denoises them."""
    if "scaling_factor" in net.config:
        return latents * net.config.scaling_factor
    shape = (1, -1, 1, 1, 1)
    mean, deviation = net.config.latents_mean, net.config.latents_std
    return (latents - torch.tensor(mean).view(shape)) / torch.tensor(deviation).view(shape)


def stock_pipeline(model: SmallModel) -> Any:
    torch.manual_seed(0)
    return model.pipeline_class(
        tokenizer=build_tokenizer(model.world.vocabulary),
        text_encoder=model.build_text_encoder(),
        vae=model.build_vae(),
        transformer=model.build_transformer(),
        scheduler=model.build_scheduler(),
    )


def test_training_embeds_prompts_as_the_pipeline_does(model: SmallModel) -> None:
    pipe = stock_pipeline(model)
    known = model.world.vocabulary
    prompts = [model.world.example_prompts[0], ""]
    ids = [known.token_ids(prompt) for prompt in prompts]
    padded = torch.tensor([row + [words.PAD_ID] * (known.caption_tokens - len(row)) for row in ids])
    with torch.no_grad():
        expected = pipe.encode_prompt(
            prompts,
            do_classifier_free_guidance=False,
            max_sequence_length=226 if model is SHAPES_JOINT else 512,
        )[0]
        assert torch.allclose(model.embed(pipe.text_encoder, padded), expected, atol=1e-5)


@pytest.mark.parametrize("place", [0.02, 0.5, 0.999])
def test_a_perfect_prediction_is_where_the_sampler_finds_the_picture(
    model: SmallModel, place: float
) -> None:
    torch.manual_seed(0)
    clean, noise = torch.randn(2, 4, 3, 4, 4), torch.randn(2, 4, 3, 4, 4)
    noisy, timestep, target = model.corrupt(clean, noise, torch.full((2,), place))
    scheduler = model.build_scheduler()
    if model is not SHAPES_JOINT:
        sigma = timestep / 1000
        assert torch.allclose(noisy - sigma.view(-1, 1, 1, 1, 1) * target, clean, atol=1e-5)
        # the shift of the scheduler is that of the training times
        scheduler.set_timesteps(1000)
        nearest = (scheduler.timesteps - timestep[0]).abs().argmin()
        assert scheduler.sigmas[nearest] == pytest.approx(sigma[0].item(), abs=2e-3)
    else:
        scheduler.set_timesteps(25)
        step = scheduler.step(target, int(timestep[0]), noisy)
        assert torch.allclose(step.pred_original_sample, clean, atol=1e-4)


def test_training_sees_the_positions_of_the_pipeline() -> None:
    pipe = stock_pipeline(SHAPES_JOINT)
    for frames, height, width in ((9, 256, 256), (9, 128, 128), (5, 192, 320)):
        expected = pipe._prepare_rotary_positional_embeddings(
            height, width, frames, torch.device("cpu")
        )
        angles = rotary_angles(
            frames,
            height // 4,
            width // 4,
            patch=4,
            base=(64, 64),
            channels=64,
            device=torch.device("cpu"),
        )
        assert all(torch.equal(a, b) for a, b in zip(angles, expected, strict=True))


def test_muon_gets_every_projection_of_the_blocks_and_nothing_else(model: SmallModel) -> None:
    transformer, encoder = model.build_transformer(), model.build_text_encoder()
    chosen = muon.hidden_matrices(transformer, encoder)
    per_layer = 6 if model is SHAPES_JOINT else 10
    # four of attention and three of the gated feed-forward
    words = 7 * encoder.config.num_layers
    assert len(chosen) == per_layer * transformer.config.num_layers + words
    assert all(matrix.ndim == 2 for matrix in chosen)


@pytest.mark.parametrize("shape", [(12, 8), (8, 4, 3, 3, 3), (6, 4, 1, 1, 1)])
def test_muon_moves_every_direction_of_a_matrix_or_kernel_alike(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    # directions of very different strength
    for layer in layers:
        layer.grad = torch.randn(shape) * torch.logspace(0, -2, shape[0]).view(
            -1, *[1] * (len(shape) - 1)
        )
    muon.Muon(layers, weight_decay=0.0).step(0.1)
    for layer in layers:
        rows = layer.detach().flatten(1)
        strengths = torch.linalg.svdvals(rows) / (0.1 * 0.2 * max(rows.shape) ** 0.5)
        assert 0.3 < strengths.min() < strengths.max() < 1.5
        assert layer.grad is not None
        assert (rows * layer.grad.flatten(1)).sum() < 0


def test_psnr_of_a_known_error() -> None:
    black = torch.full((2, 3, 1, 4, 4), -1.0)
    # an error of a tenth of the range, and values beyond the range
    other = torch.stack([black[0] + 0.2, black[1] - 5])
    assert vae.psnr(black, other).tolist() == pytest.approx([20.0, 106.02], abs=0.01)


# --- the training command ---


@dataclass(frozen=True)
class Run:
    """What ``train --tiny`` leaves behind."""

    model: SmallModel
    out: Path

    @property
    def folder(self) -> Path:
        return self.out / self.model.name

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"


@pytest.fixture(
    scope="module",
    # one stands for all where time is short.
    params=[
        pytest.param(model, id=name, marks=[] if name == "shapes" else pytest.mark.slow)
        for name, model in SMALL_MODELS.items()
    ],
)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = Run(request.param, tmp_path_factory.mktemp("run"))
    train.main(["--model", run.model.name, "--out", str(run.out), "--tiny", "--device", "cpu"])
    yield run
    torch.set_num_threads(threads)


FILES = {
    "LICENSE",
    "README.md",
    "model_index.json",
    "vidsparse.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
}

_WEIGHTS = "transformer/diffusion_pytorch_model"
SHARDED = FILES - {f"{_WEIGHTS}.safetensors"} | {
    f"{_WEIGHTS}.safetensors.index.json",
    f"{_WEIGHTS}-00001-of-00002.safetensors",
    f"{_WEIGHTS}-00002-of-00002.safetensors",
}


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def load(model: SmallModel, folder: Path) -> Any:
    pipe = model.pipeline_class.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, prompts: list[str], batch: int) -> list[np.ndarray]:
    return fidelity.generate(
        pipe,
        prompts,
        frames=9,
        height=32,
        width=48,
        steps=2,
        guidance=4.0,
        seed=0,
        batch=batch,
    )


@pytest.mark.usefixtures("offline")
def test_a_miniature_training_run_exports_a_folder_that_loads_offline(trained: Run) -> None:
    assert files(trained.folder) == (SHARDED if trained.model is SCENES else FILES)
    pipe = load(trained.model, trained.folder)
    clip = generate(pipe, [trained.model.world.example_prompts[0]], 1)[0]
    assert clip.shape == (9, 32, 48, 3)
    # the latents' scale was measured, not left at one
    rng, drawn = random.Random(9), trained.model.world
    clips = drawn.render([drawn.sample(rng) for _ in range(24)], 9, 32, 32, torch.device("cpu"))
    with torch.no_grad():
        mean, log_variance = trained.model.encode(pipe.vae, clips)
    latents = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
    spread = seen_by_the_pipeline(pipe.vae, latents).std((0, 2, 3, 4))
    assert (spread - 1).abs().max() < 0.3


def test_the_export_does_not_say_where_it_was_made(trained: Run) -> None:
    for path in trained.folder.rglob("*"):
        if path.is_file():
            assert str(trained.out).encode() not in path.read_bytes(), path


def test_the_export_keeps_the_weights_to_the_last_bit_it_stores(trained: Run) -> None:
    pipe = load(trained.model, trained.folder)
    for name, cls, dtype in (
        ("transformer", trained.model.transformer_class, torch.bfloat16),
        ("vae", trained.model.vae_class, torch.float16),
    ):
        source = cls.from_pretrained(trained.checkpoints / name).state_dict()
        for key, stored in getattr(pipe, name).state_dict().items():
            rounded = source[key].to(dtype).float()
            assert torch.equal(stored, rounded) or torch.equal(stored, source[key]), key


def test_a_batch_of_prompts_draws_what_single_prompts_draw(trained: Run) -> None:
    pipe = load(trained.model, trained.folder)
    asked = trained.model.world
    prompts = [asked.caption(scene, None) for scene in asked.held_out()[:3]]
    alone, together = generate(pipe, prompts, 1), generate(pipe, prompts, 2)
    assert len(alone) == len(together) == 3
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1


@pytest.mark.slow
def test_fidelity_judges_a_folder_and_says_that_it_failed(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, sheet, videos = (tmp_path / name for name in ("fidelity.json", "sheet.png", "videos"))
    asked = f"--model {trained.folder} --size 32x32 --frames 9 --steps 1 --batch 24"
    kept = ["--json", str(report), "--sheet", str(sheet), "--videos", str(videos)]
    assert fidelity.main([*asked.split(), *kept]) == 1
    told = json.loads(report.read_text(encoding="utf-8"))
    assert len(told["verdicts"]) == 24
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"all right {told['right']}, " in last
    assert f"of 24 (bar {trained.model.world.bar})" in last
    assert sheet.stat().st_size > 0
    assert sorted(path.name for path in videos.iterdir()) == [f"{n:02d}.mp4" for n in range(24)]
    assert read_video(videos / "23.mp4").shape == (9, 32, 32, 3)


def test_vae_psnr_judges_a_folder_and_says_that_it_failed(
    trained: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(trained.model.recipe, sizes=(ClipSize(frames=9, side=32),))
    monkeypatch.setattr(type(trained.model), "recipe", small)
    assert vae_psnr.main(["--model", str(trained.folder), "--clips", "2"]) == 1
    assert re.match(r"9 frames of 32x32: mean \d+\.\d\d dB, ", capsys.readouterr().out)


def test_the_card_prints_what_was_measured_and_nothing_else(trained: Run, tmp_path: Path) -> None:
    unmeasured = (trained.folder / "README.md").read_text(encoding="utf-8")
    sizes = trained.model.recipe.sizes
    assert unmeasured.count("not measured") >= 1 + 2 * len(sizes)
    assert all(f"| {size} | not measured |" in unmeasured for size in sizes)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for part in trained.checkpoints.iterdir():
        (checkpoints / part.name).symlink_to(part, target_is_directory=True)
    measured: dict[str, Any] = {
        "hardware": "one abacus",
        "minutes": 23,
        "vae_psnr": {str(size): 31.4 + i for i, size in enumerate(sizes)},
        "fidelity": {f"{size.side}x{size.side}": f"{22 + i} of 24" for i, size in enumerate(sizes)},
    }
    (checkpoints / card.MEASURED).write_text(json.dumps(measured), encoding="utf-8")
    export(trained.model, checkpoints, tmp_path / "out")
    told = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "weights: one abacus, 23 minutes." in told
    for size in sizes:
        square = f"{size.side}x{size.side}"
        assert f"| {size} | {measured['vae_psnr'][str(size)]} |" in told
        assert f"| {square}, {size.frames} frames | {measured['fidelity'][square]} |" in told
    assert len(re.findall(r"^\| \d+x\d+x\d+ \|", told, flags=re.MULTILINE)) == len(sizes)


def test_training_goes_on_from_an_exported_model(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = f"--model {trained.model.name} --out {tmp_path} --tiny --device cpu"
    train.main([*asked.split(), "--start", "transformer", "--weights", str(trained.folder)])
    told = capsys.readouterr().out
    assert "vae step" not in told
    assert "transformer: " in told
    before, after = (load(trained.model, f / trained.model.name) for f in (trained.out, tmp_path))
    # the latents keep the scale that the transformer has learnt
    for old, new in zip(
        trained.model.moments(before.vae), trained.model.moments(after.vae), strict=True
    ):
        assert torch.equal(old, new)
    changes = [
        (new - old).norm() / old.norm()
        for old, new in zip(
            before.transformer.parameters(), after.transformer.parameters(), strict=True
        )
        if old.ndim == 2 and old.norm() > 1
    ]
    assert 0 < max(changes) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("trained", [SHAPES], ids=[SHAPES.name], indirect=True)
def test_two_processes_train_one_model_on_clips_of_their_own(trained: Run, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("together_worker.py")
    start = ["--start", "latents", "--weights", str(trained.checkpoints)]
    ran = subprocess.run(
        [sys.executable, str(worker), str(tmp_path), "--model", trained.model.name, *start],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    # one of them tells and writes
    assert ran.stdout.count("exported to") == 1
    assert files(tmp_path / trained.model.name) == files(trained.folder)
    drawn = [load_file(tmp_path / f"drawn{rank}.safetensors")["values"] for rank in range(2)]
    assert drawn[0].shape != drawn[1].shape or not torch.equal(*drawn)
    first, second = (load_file(tmp_path / f"weights{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_exported_model_is_written_again_bit_for_bit(trained: Run, tmp_path: Path) -> None:
    asked = f"--model {trained.model.name} --out {tmp_path} --start export"
    train.main([*asked.split(), "--weights", str(trained.folder)])
    for name in files(trained.folder):
        made = tmp_path / trained.model.name / name
        assert made.read_bytes() == (trained.folder / name).read_bytes(), name


def latents_of(model: SmallModel, weight: float) -> train.Latents:
    """What a moment of drawing leaves, at 9 frames of 64x64."""
    size = ClipSize(frames=9, side=64)
    plans = (train.LatentPlan(size=size, batch=2, batches=1),)
    torch.manual_seed(0)
    return train.draw_latents(
        model,
        model.build_vae(),
        seconds=0.001,
        device=torch.device("cpu"),
        seed=0,
        log=lambda _: None,
        plans=plans,
        body_weight=weight,
    )[0]


def test_the_loss_weighs_places_where_bodies_are() -> None:
    drawn = latents_of(SCENES, 6.0)
    assert drawn.weights is not None
    assert drawn.weights.shape == (2, 1, *drawn.values.shape[2:])
    assert set(drawn.weights.unique().tolist()) == {1.0, 6.0}
    assert (drawn.weights == 6).float().mean() < 0.7
    # one draw takes place before a caption's words do
    shown = SCENES.world.sample(random.Random(0))
    for places in SCENES.world.centres(shown, 9):
        for latent, (x, y) in enumerate((places[[0, 4, 8]] * 8).astype(int)):
            assert drawn.weights[0, 0, latent, y, x] == 6
    assert latents_of(SCENES, 1.0).weights is None
    # nothing there says where bodies are
    assert latents_of(SHAPES, 6.0).weights is None


def smaller(model: SmallModel) -> SmallModel:
    """The model with a transformer of two small blocks."""
    sizes = {"heads": 1, "layers": 2, "feed_forward": 64}
    made: SmallModel = type("Smaller", (type(model),), sizes)()
    return made


def learner_of(model: SmallModel, *, rate: float = 0.0, naming: float = 0.0) -> train.Learner:
    """A learner on a CPU whose weights and draws are the same each time."""
    torch.manual_seed(0)
    learner = train.Learner(
        model,
        model.build_transformer(),
        model.build_text_encoder(),
        device=torch.device("cpu"),
        learning_rate=rate,
        muon_rate=rate,
        naming=naming,
        together=Together(),
    )
    torch.manual_seed(1)
    return learner


def test_the_loss_is_the_mean_by_weight() -> None:
    drawn = latents_of(SHAPES, 1.0)
    plan = train.StepPlan(source=0, batch=2, share=1.0)
    first = torch.zeros(2, 1, *drawn.values.shape[2:])
    first[:, :, 0] = 1
    model = smaller(SHAPES)

    def loss(weights: torch.Tensor | None) -> float:
        return learner_of(model).step(replace(drawn, weights=weights), plan, 1.0).item()

    plain, one, others = loss(None), loss(first), loss(1 - first)
    assert one != pytest.approx(others, rel=1e-3)
    # one latent frame of three
    assert (one + 2 * others) / 3 == pytest.approx(plain, rel=1e-5)
    assert (2 * one + 2 * others) / 4 == pytest.approx(loss(1 + first), rel=1e-5)


def test_latents_say_which_kind_of_body_is_where() -> None:
    drawn = latents_of(SCENES, 1.0)
    assert drawn.kinds is not None
    assert drawn.kinds.shape == (2, *drawn.values.shape[2:])
    colours, shapes = list(scenes_world.COLOURS), list(SHAPES_DRAWN)
    shown = SCENES.world.sample(random.Random(0))
    wanted = {
        1 + colours.index(b.colour) * len(shapes) + shapes.index(b.shape) for b in shown.bodies
    }
    assert set(drawn.kinds[0].unique().tolist()) == {0, *wanted}
    # the latent's middle frames: 0, then those of 1 to 4 and of 5 to 8
    places = SCENES.world.centres(shown, 9)
    tops = shown.bodies[-1]
    for latent, (x, y) in enumerate((places[-1][[0, 2, 6]] * 8).astype(int)):
        if tops.shape != "ring":
            # nothing covers the last one.
            kind = 1 + colours.index(tops.colour) * len(shapes) + shapes.index(tops.shape)
            assert drawn.kinds[0, latent, y, x] == kind
    assert drawn.kinds.max() < SCENES.world.kinds
    assert latents_of(SHAPES, 1.0).kinds is None


def test_which_body_is_where_is_learnt_beside_the_loss_that_is_told() -> None:
    drawn = latents_of(SCENES, 6.0)
    plan = train.StepPlan(source=0, batch=2, share=1.0)
    model = smaller(SCENES)

    def learnt(naming: float, steps: int) -> tuple[float, float | None]:
        learner = learner_of(model, rate=1e-2, naming=naming)
        losses = [learner.step(drawn, plan, 1.0).item() for _ in range(steps)]
        return losses[0], None if learner.misnamed is None else learner.misnamed.item()

    plain, untold = learnt(0.0, 1)
    first, told = learnt(0.5, 1)
    assert untold is None
    assert first == plain
    # it begins with zeros: every kind is as likely
    assert told is not None
    assert told == pytest.approx(math.log(SCENES.world.kinds), rel=1e-5)
    _, later = learnt(0.5, 12)
    assert later is not None
    assert later < 0.8 * told


@pytest.mark.slow
def test_the_benchmark_prints_every_kind_of_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_SECONDS", 0.01)
    asked = f"--model shapes --out {tmp_path} --tiny --device cpu --benchmark"
    train.main(asked.split())
    told = capsys.readouterr().out
    assert re.search(r"draw 9x32x32 batch 4: [\d.]+ clips/s drawn, [\d.]+ clips/s encoded", told)
    assert re.search(r"crop 9x16x16 batch 2: [\d.]+ it/s", told)
    assert re.search(r"step 9x32x32 batch 4: .* tokens/s of 12 a clip", told)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("trained", [SCENES], ids=[SCENES.name], indirect=True)
def test_scenes_has_heads_of_128_and_fits_32_megabytes(trained: Run) -> None:
    net = SCENES.build_transformer()
    assert net.config.attention_head_dim == 128
    assert net.config.num_layers >= 8
    weights = [path.stat().st_size for path in trained.folder.rglob("*.safetensors")]
    assert sum(weights) <= 32 * MEGABYTE
    assert max(weights) < 16 * 2**20
    assert SCENES.tokens(net, SCENES.build_vae(), SCENES.recipe.sizes[-1]) == 33_600


@pytest.mark.parametrize("recipe", [SCENES.recipe, SCENES.further])
def test_a_session_of_scenes_fits_half_an_hour_and_reaches_the_long_size(recipe: Recipe) -> None:
    # the autoencoder has a session of its own, and two to three minutes of each go to starting,
    # compiling and checking
    assert recipe.vae_minutes <= 27
    assert recipe.latent_minutes + recipe.transformer_minutes <= 27
    for plan in recipe.step_plans:
        assert plan.source < len(recipe.latent_plans)
    last = [plan for plan in recipe.step_plans if plan.ends == 1.0]
    sizes = {recipe.latent_plans[plan.source].size for plan in last}
    assert sizes == set(recipe.sizes)
    # some plan is ready at any time
    for progress in np.linspace(0, 0.999, 50):
        assert any(plan.begins <= progress < plan.ends for plan in recipe.step_plans)


def test_no_placeholder_is_left_in_the_card(trained: Run) -> None:
    assert "$" not in (trained.folder / "README.md").read_text(encoding="utf-8")


def test_the_export_carries_the_licence(trained: Run) -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (trained.folder / "LICENSE").read_text(encoding="utf-8") == licence


def test_example_prompts_are_made_of_known_words() -> None:
    assert len(text.EXAMPLE_PROMPTS) == 6
    for prompt in text.EXAMPLE_PROMPTS:
        assert text.VOCABULARY.unknown(prompt) == []
        assert re.fullmatch(r"an? .* on an? \w+ \w+ background", prompt)


# --- the folders that ship ---


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
    # nobody is offered what has no weights yet
    assert set(SMALL_MODELS) - set(MODELS) == {SCENES.name}
    assert set(MODELS) <= set(SMALL_MODELS)


def test_the_shipped_folder_is_complete_and_safetensors_only(shipped: SmallModel) -> None:
    # numbers of methods that were calibrated for it, two files each: tests/test_own_presets.py.
    own = {name for name in files(MODELS[shipped.name]) if name.startswith("presets/")}
    assert own <= {f"presets/{m}.{kind}" for m in CALIBRATORS for kind in ("json", "safetensors")}
    assert files(MODELS[shipped.name]) - own == FILES


def test_the_shipped_folders_are_small() -> None:
    assert 20 < megabytes("shapes") < 28
    assert 8 < megabytes("shapes-joint") < 12
    assert sum(map(megabytes, MODELS)) < 40


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
        {SHAPES: 8.6e6, SHAPES_JOINT: 4.3e6}[shipped], rel=0.01
    )


def test_the_shipped_weights_are_trained_ones(pipe: Any) -> None:
    for net in (pipe.transformer, pipe.text_encoder, pipe.vae):
        assert all(p.isfinite().all() for p in net.parameters())
    # zero before training
    assert pipe.transformer.proj_out.weight.abs().max() > 0


def test_the_shipped_settings_are_those_of_the_code(shipped: SmallModel) -> None:
    told = json.loads((MODELS[shipped.name] / "vidsparse.json").read_text(encoding="utf-8"))
    assert told == card.settings(shipped)
    assert tuple(told["vocabulary"]) == text.VOCABULARY.words


def test_commands_find_the_shipped_model_and_its_settings(shipped: SmallModel) -> None:
    ref = resolve_model(shipped.name)
    assert ref.source == "bundled"
    assert ref.license == "Apache-2.0"
    assert "small demonstration model" in ref.description
    assert ref.vocabulary == text.VOCABULARY.words
    assert ref.example_prompts == text.EXAMPLE_PROMPTS
    defaults, own = ref.defaults, shipped.card
    assert (defaults.frames, defaults.width, defaults.height) == (33, 256, 256)
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


def test_the_shipped_tokenizer_is_the_one_of_training(pipe: Any) -> None:
    for prompt in PROMPTS:
        assert (
            pipe.tokenizer(prompt).input_ids == build_tokenizer(text.VOCABULARY)(prompt).input_ids
        )


def test_the_shipped_card_reports_measurements_that_meet_the_bars(shipped: SmallModel) -> None:
    told = (MODELS[shipped.name] / "README.md").read_text(encoding="utf-8")
    assert "small demonstration model" in told
    assert f"from diffusers import {shipped.pipeline_class.__name__}\n" in told
    psnr = re.findall(r"^\| \d+x\d+x\d+ \| ([\d.]+)", told, flags=re.MULTILINE)
    right = re.findall(r"^\| \d+x\d+, \d+ frames \| (\d+) of 24 \|", told, flags=re.MULTILINE)
    assert len(psnr) == len(right) == len(shipped.recipe.sizes)
    assert min(map(float, psnr)) >= vae_psnr.BAR_DB
    assert min(map(int, right)) >= shipped.world.bar


def test_the_shipped_card_is_the_one_the_code_writes(shipped: SmallModel, pipe: Any) -> None:
    told = (MODELS[shipped.name] / "README.md").read_text(encoding="utf-8")
    parts = shipped.parts(pipe.transformer, pipe.text_encoder, pipe.vae)
    assert parts in told
    tokens = [shipped.tokens(pipe.transformer, pipe.vae, s) for s in shipped.recipe.sizes]
    assert tokens[0] == 2304
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
    assert vae.psnr(rebuilt, clip).item() > 25


def test_the_shipped_model_draws_finite_frames_that_move(pipe: Any) -> None:
    call = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 4}
    generator = torch.Generator("cpu").manual_seed(0)
    frames = pipe(text.EXAMPLE_PROMPTS[0], generator=generator, output_type="pt", **call).frames
    assert frames.shape == (1, 9, 3, 64, 64)
    assert frames.isfinite().all()
    assert frames[0].std(dim=0).mean() > 0.005


@pytest.mark.slow
def test_a_short_sparse_run_is_close_to_the_dense_one(shipped: SmallModel) -> None:
    loaded = load_for_commands(shipped.name, device="cpu")
    request = GenerateRequest(
        prompt=text.EXAMPLE_PROMPTS[0],
        model=shipped.name,
        width=128,
        height=128,
        frames=17,
        steps=6,
    )
    # most pairs are kept, but not all
    sparse = replace(request, method="fg-attn", method_options={"top_p": 0.95, "tile": "16x16"})
    expected, made = (
        generate_for_commands(loaded, one) for one in (replace(request, method="dense"), sparse)
    )
    assert made.frames.shape == expected.frames.shape == (17, 128, 128, 3)
    assert 0.2 < made.record["computed"] < 1
    psnr = compare_videos(expected.frames, made.frames).psnr
    assert psnr is not None
    assert psnr > 25
