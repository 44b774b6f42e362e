"""The small model: its world, its words, its training command, and the folder that ships."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from transformers import PreTrainedTokenizerFast

from vidsparse.apps.small_model import card, fidelity, text, train, vae, vae_psnr, world
from vidsparse.apps.small_model.export import build_tokenizer, export
from vidsparse.pipelines.models import MODELS, resolve_model, unknown_words

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
SHAPES = MODELS["shapes"]
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
        said = set(text.words(text.caption(scene, rng)))
        for one in scene.bodies:
            assert said & ({one.colour} | synonyms.get(one.colour, set()))


def test_every_caption_word_is_in_the_vocabulary() -> None:
    rng = random.Random(1)
    for scene in [*scenes(1000), *world.held_out_scenes()]:
        for said in (text.caption(scene), *(text.caption(scene, rng) for _ in range(4))):
            assert text.unknown_words(said) == []
            assert len(text.token_ids(said)) <= text.CAPTION_TOKENS


def test_no_word_of_the_vocabulary_is_never_used() -> None:
    rng = random.Random(2)
    used: set[str] = set()
    for scene in scenes(2000):
        used.update(text.words(text.caption(scene)), text.words(text.caption(scene, rng)))
    assert used | {"an"} == set(text.VOCABULARY)


def test_training_captions_are_padded_and_hold_one_end() -> None:
    rng = random.Random(4)
    rows = [text.training_ids(scene, rng) for scene in scenes(300)]
    assert {len(row) for row in rows} == {text.CAPTION_TOKENS}
    assert {row.count(text.END_ID) for row in rows} == {1}
    assert 0.03 < np.mean([text.UNKNOWN_ID in row for row in rows]) < 0.2


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
    build_tokenizer().save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_tokenizer_reads_prompts_as_training_did(prompt: str, saved_tokenizer: Any) -> None:
    # special tokens written into a prompt are the tokenizer's own; everything else is words
    expected = text.token_ids(prompt)
    if "</s>" not in prompt:
        assert build_tokenizer()(prompt).input_ids == expected
    assert saved_tokenizer(prompt).input_ids == build_tokenizer()(prompt).input_ids


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
    assert batch.input_ids[0, :5].tolist() == [*text.token_ids("a red ball"), text.PAD_ID]
    assert batch.attention_mask.sum(1).tolist() == [4, 512]
    assert batch.input_ids[1, -1] == text.END_ID


@pytest.mark.parametrize("prompt", PROMPTS[:6])
def test_the_commands_warn_of_the_words_the_tokenizer_does_not_know(
    prompt: str, trained: Path
) -> None:
    assert unknown_words(resolve_model(trained / "shapes"), prompt) == text.unknown_words(prompt)


# --- the reader of colours and directions ---


def test_the_reader_is_right_on_every_true_clip() -> None:
    held_out = world.held_out_scenes()
    clips = to_bytes(world.render(held_out, 17, 64, 64))
    wrong = [verdict for verdict in fidelity.judge(clips) if not verdict.right]
    assert wrong == []


def test_the_reader_is_right_at_other_shapes_of_frame_and_with_noise() -> None:
    rng = np.random.default_rng(0)
    held_out = world.held_out_scenes()
    clips = to_bytes(world.render(held_out, 17, 64, 96))
    noisy = [np.clip(c + rng.normal(0, 6, c.shape), 0, 255).astype(np.uint8) for c in clips]
    assert all(verdict.right for verdict in fidelity.judge(noisy))


def test_the_reader_tells_a_wrong_clip() -> None:
    held_out = world.held_out_scenes()
    clips = to_bytes(world.render(held_out, 17, 64, 64))
    assert not any(verdict.right for verdict in fidelity.judge([clip[::-1] for clip in clips]))
    # eight colours, three clips each
    assert not any(verdict.right for verdict in fidelity.judge(clips[3:] + clips[:3]))


def test_the_reader_sees_nothing_where_nothing_moves() -> None:
    still = world.Scene(bodies=(body(motion="stays still"),), texture="plain", background="navy")
    clip = to_bytes(world.render([still], 9, 64, 64))[0]
    nothing = fidelity.Reading(colour="none", motion="none")
    assert fidelity.read_clip(clip) == nothing
    assert fidelity.read_clip(np.full((9, 64, 64, 3), 128, np.uint8)) == nothing


def test_a_contact_sheet_has_a_row_a_clip() -> None:
    clips = [np.full((9, 32, 32, 3), value, np.uint8) for value in (0, 128)]
    sheet = fidelity.contact_sheet(clips, columns=3, side=16)
    assert sheet.shape == (2 * 18, 3 * 18, 3)
    assert sheet[9, 9].tolist() == [0, 0, 0]
    assert sheet[27, 9].tolist() == [128, 128, 128]


# --- the autoencoder on whole clips ---


@pytest.mark.parametrize(("frames", "height", "width"), [(5, 16, 16), (9, 32, 16), (13, 16, 32)])
def test_the_whole_clip_forward_equals_the_chunks_of_diffusers(
    frames: int, height: int, width: int
) -> None:
    torch.manual_seed(0)
    model = vae.build_vae().eval()
    clip = torch.rand(2, 3, frames, height, width) * 2 - 1
    with torch.no_grad():
        mean, log_variance = vae.encode(model, clip)
        posterior = model.encode(clip).latent_dist
        rebuilt = vae.decode(model, mean)
        stock = model.decode(mean).sample
    scale = posterior.mean.abs().max()
    assert (mean - posterior.mean).abs().max() < 1e-4 * scale
    assert (log_variance - posterior.logvar).abs().max() < 1e-4 * posterior.logvar.abs().max()
    # diffusers clamps its pictures
    assert (rebuilt.clamp(-1, 1) - stock).abs().max() < 1e-4


def test_psnr_of_a_known_error() -> None:
    black = torch.full((2, 3, 1, 4, 4), -1.0)
    # an error of a tenth of the range, and values beyond the range
    other = torch.stack([black[0] + 0.2, black[1] - 5])
    assert vae.psnr(black, other).tolist() == pytest.approx([20.0, 106.02], abs=0.01)


# --- the training command ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What ``train --tiny`` leaves behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("run")
    train.main(["--out", str(out), "--tiny", "--device", "cpu"])
    yield out
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


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def load(folder: Path) -> Any:
    pipe = WanPipeline.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, prompts: list[str], batch: int) -> list[np.ndarray]:
    return fidelity.generate(
        pipe,
        prompts,
        frames=5,
        height=32,
        width=48,
        steps=2,
        guidance=4.0,
        seed=0,
        batch=batch,
    )


@pytest.mark.usefixtures("offline")
def test_a_miniature_training_run_exports_a_folder_that_loads_offline(trained: Path) -> None:
    assert files(trained / "shapes") == FILES
    pipe = load(trained / "shapes")
    clip = generate(pipe, [card.EXAMPLE_PROMPTS[0]], 1)[0]
    assert clip.shape == (5, 32, 48, 3)
    # the latents' scale was measured, not left at one
    assert pipe.vae.config.latents_std != [1.0] * 16


def test_the_export_does_not_say_where_it_was_made(trained: Path) -> None:
    for path in (trained / "shapes").rglob("*"):
        if path.is_file():
            assert str(trained).encode() not in path.read_bytes(), path


def test_the_export_keeps_the_weights_to_the_last_bit_it_stores(trained: Path) -> None:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    pipe = load(trained / "shapes")
    for name, cls, dtype in (
        ("transformer", WanTransformer3DModel, torch.bfloat16),
        ("vae", AutoencoderKLWan, torch.float16),
    ):
        source = cls.from_pretrained(trained / "checkpoints" / name).state_dict()
        for key, stored in getattr(pipe, name).state_dict().items():
            rounded = source[key].to(dtype).float()
            assert torch.equal(stored, rounded) or torch.equal(stored, source[key]), key


def test_a_batch_of_prompts_draws_what_single_prompts_draw(trained: Path) -> None:
    pipe = load(trained / "shapes")
    prompts = [text.caption(scene) for scene in world.held_out_scenes()[:3]]
    alone, together = generate(pipe, prompts, 1), generate(pipe, prompts, 2)
    assert len(alone) == len(together) == 3
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1


def test_fidelity_judges_a_folder_and_says_that_it_failed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, sheet = tmp_path / "fidelity.json", tmp_path / "sheet.png"
    asked = f"--model {trained / 'shapes'} --size 32x32 --frames 5 --steps 1 --batch 24"
    assert fidelity.main([*asked.split(), "--json", str(report), "--sheet", str(sheet)]) == 1
    told = json.loads(report.read_text(encoding="utf-8"))
    assert len(told["verdicts"]) == 24
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"both {told['right']}, " in last
    assert "of 24 (bar 22)" in last
    assert sheet.stat().st_size > 0


def test_vae_psnr_judges_a_folder_and_says_that_it_failed(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (vae.ClipSize(frames=5, side=32),)
    monkeypatch.setattr(vae_psnr, "CLIP_SIZES", small)
    assert vae_psnr.main(["--model", str(trained / "shapes"), "--clips", "2"]) == 1
    assert re.match(r"5 frames of 32x32: mean \d+\.\d\d dB, ", capsys.readouterr().out)


def test_the_card_prints_what_was_measured_and_nothing_else(trained: Path, tmp_path: Path) -> None:
    unmeasured = (trained / "shapes" / "README.md").read_text(encoding="utf-8")
    assert unmeasured.count("not measured") >= 5
    assert "| 33x256x256 | not measured |" in unmeasured
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for part in (trained / "checkpoints").iterdir():
        (checkpoints / part.name).symlink_to(part, target_is_directory=True)
    measured = {
        "hardware": "one abacus",
        "minutes": 23,
        "vae_psnr": {"33x256x256": 31.4, "49x384x384": 33.2},
        "fidelity": {"256x256": "23 of 24", "384x384": "24 of 24"},
    }
    (checkpoints / card.MEASURED).write_text(json.dumps(measured), encoding="utf-8")
    export(checkpoints, tmp_path / "shapes")
    told = (tmp_path / "shapes" / "README.md").read_text(encoding="utf-8")
    for line in (
        "weights: one abacus, 23 minutes.",
        "| 33x256x256 | 31.4 |",
        "| 49x384x384 | 33.2 |",
        "| 256x256, 33 frames | 23 of 24 |",
        "| 384x384, 49 frames | 24 of 24 |",
    ):
        assert line in told


def test_no_placeholder_is_left_in_the_card(trained: Path) -> None:
    assert "$" not in (trained / "shapes" / "README.md").read_text(encoding="utf-8")


def test_the_export_carries_the_licence(trained: Path) -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (trained / "shapes" / "LICENSE").read_text(encoding="utf-8") == licence


def test_example_prompts_are_made_of_known_words() -> None:
    assert len(card.EXAMPLE_PROMPTS) == 6
    for prompt in card.EXAMPLE_PROMPTS:
        assert text.unknown_words(prompt) == []
        assert re.fullmatch(r"an? .* on an? \w+ \w+ background", prompt)


# --- the folder that ships ---


@pytest.fixture(scope="module")
def shapes() -> Any:
    return load(SHAPES)


def test_the_shipped_folder_is_complete_and_safetensors_only() -> None:
    assert files(SHAPES) == FILES


def test_the_shipped_folder_is_small() -> None:
    size = sum(path.stat().st_size for path in SHAPES.rglob("*") if path.is_file())
    assert 20 * MEGABYTE < size < 28 * MEGABYTE


@pytest.mark.usefixtures("offline")
def test_the_shipped_folder_loads_offline_as_a_stock_pipeline() -> None:
    pipe = load(SHAPES)
    assert type(pipe) is WanPipeline
    assert type(pipe.scheduler).__name__ == "UniPCMultistepScheduler"


def test_the_shipped_model_has_the_sizes_its_code_builds(shapes: Any) -> None:
    def count(model: Any) -> int:
        return sum(p.numel() for p in model.parameters())

    for model, built in (
        (shapes.transformer, train.build_transformer()),
        (shapes.text_encoder, train.build_text_encoder()),
        (shapes.vae, vae.build_vae()),
    ):
        assert count(model) == count(built)
    assert count(shapes.transformer) == pytest.approx(8.6e6, rel=0.01)


def test_the_shipped_weights_are_trained_ones(shapes: Any) -> None:
    for model in (shapes.transformer, shapes.text_encoder, shapes.vae):
        assert all(p.isfinite().all() for p in model.parameters())
    assert shapes.vae.config.latents_std != [1.0] * 16


def test_the_shipped_settings_are_those_of_the_code() -> None:
    told = json.loads((SHAPES / "vidsparse.json").read_text(encoding="utf-8"))
    assert told == card.settings()
    assert tuple(told["vocabulary"]) == text.VOCABULARY


def test_commands_find_the_shipped_model_and_its_settings() -> None:
    ref = resolve_model("shapes")
    assert ref.source == "bundled"
    assert ref.license == "Apache-2.0"
    assert "small demonstration model" in ref.description
    assert ref.vocabulary == text.VOCABULARY
    assert ref.example_prompts == card.EXAMPLE_PROMPTS
    defaults = ref.defaults
    assert (defaults.frames, defaults.width, defaults.height) == (33, 256, 256)
    assert (defaults.steps, defaults.guidance, defaults.fps, defaults.order) == (
        card.STEPS,
        card.GUIDANCE,
        card.FPS,
        card.ORDER,
    )


def test_the_shipped_tokenizer_is_the_one_of_training(shapes: Any) -> None:
    for prompt in PROMPTS:
        assert shapes.tokenizer(prompt).input_ids == build_tokenizer()(prompt).input_ids


def test_the_shipped_card_reports_measurements_that_meet_the_bars() -> None:
    told = (SHAPES / "README.md").read_text(encoding="utf-8")
    assert "small demonstration model" in told
    psnr = re.findall(r"^\| \d+x\d+x\d+ \| ([\d.]+)", told, flags=re.MULTILINE)
    right = re.findall(r"^\| \d+x\d+, \d+ frames \| (\d+) of 24 \|", told, flags=re.MULTILINE)
    assert len(psnr) == len(right) == 2
    assert min(map(float, psnr)) >= vae_psnr.BAR_DB
    assert min(map(int, right)) >= fidelity.BAR


def test_the_shipped_licence_is_that_of_the_repository() -> None:
    assert (SHAPES / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_shipped_autoencoder_rebuilds_a_clip_it_has_not_seen(shapes: Any) -> None:
    clip = next(vae.held_out_clips(vae.ClipSize(frames=9, side=128), 1, 1, torch.device("cpu")))
    with torch.no_grad():
        mean, _ = vae.encode(shapes.vae, clip)
        rebuilt = vae.decode(shapes.vae, mean)
    # small pictures have finer detail for their size than the two the bar of 30 dB is for
    assert vae.psnr(rebuilt, clip).item() > 25


def test_the_shipped_model_draws_finite_frames_that_move(shapes: Any) -> None:
    call = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 4}
    generator = torch.Generator("cpu").manual_seed(0)
    frames = shapes(card.EXAMPLE_PROMPTS[0], generator=generator, output_type="pt", **call).frames
    assert frames.shape == (1, 9, 3, 64, 64)
    assert frames.isfinite().all()
    assert frames[0].std(dim=0).mean() > 0.005
