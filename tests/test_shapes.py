"""The world of the small models of shapes: its pictures, its words, and the reader of videos."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from small_models import PROMPTS
from transformers import PreTrainedTokenizerFast

from vidsparse.apps.small_model import (
    fidelity,
    reading,
    text,
    words,
    world,
)
from vidsparse.apps.small_model.export import build_tokenizer
from vidsparse.apps.small_model.worlds import SHAPES_WORLD

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_example_prompts_are_made_of_known_words() -> None:
    assert len(text.EXAMPLE_PROMPTS) == 6
    for prompt in text.EXAMPLE_PROMPTS:
        assert text.VOCABULARY.unknown(prompt) == []
        assert re.fullmatch(r"an? .* on an? \w+ \w+ background", prompt)


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
