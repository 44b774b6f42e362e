"""The world of the small model ``scenes``: its pictures, its captions, and the reader of videos."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vidsparse.apps.small_model.drawing import SHAPES, distance
from vidsparse.apps.small_model.scenes import captions, outlines, reading, render, world
from vidsparse.apps.small_model.verdicts import Verdict
from vidsparse.apps.small_model.words import words

pytestmark = pytest.mark.usefixtures("one_thread")


def scenes(count: int, seed: int = 0) -> list[world.Scene]:
    rng = random.Random(seed)
    return [world.sample_scene(rng) for _ in range(count)]


def body(**changes: Any) -> world.Body:
    given = {
        "shape": "ball",
        "colour": "red",
        "size": "large",
        "pattern": "plain",
        "motion": "stays still",
    }
    return world.Body(**given | changes)


def scene(*bodies: world.Body, **changes: Any) -> world.Scene:
    given = {"ground": "meadow", "camera": "still", "light": "steady"}
    return world.Scene(bodies=bodies or (body(),), **given | changes)


# --- pictures ---


def test_a_seed_draws_the_same_scenes_and_pictures() -> None:
    assert scenes(20) == scenes(20)
    assert scenes(20) != scenes(20, seed=1)
    first, second = (render.render(scenes(3), 5, 32, 32) for _ in range(2))
    assert torch.equal(first, second)


def test_clips_have_the_size_asked_for_and_stay_in_range() -> None:
    clip = render.render(scenes(3), 7, 40, 57)
    assert clip.shape == (3, 3, 7, 40, 57)
    assert clip.dtype == torch.float32
    assert clip.abs().max() <= 1


@pytest.mark.parametrize("ground", world.GROUNDS)
def test_a_scene_is_the_same_picture_at_any_resolution(ground: str) -> None:
    drawn = scene(body(motion="moves right"), ground=ground, camera="zoom in", seed=5)
    small = render.render([drawn], 2, 96, 128)
    large = render.render([drawn], 2, 288, 384)
    # small pictures leave out what is finer than their pixels, so that places are compared
    coarse, fine = F.avg_pool3d(small, (1, 12, 12)), F.avg_pool3d(large, (1, 36, 36))
    assert (coarse - fine).abs().mean() < 0.03
    assert (coarse - fine.flip(-1)).abs().mean() > 0.1


def test_a_scene_takes_the_same_course_at_any_length() -> None:
    drawn = scenes(6)
    short, long = render.render(drawn, 5, 32, 32), render.render(drawn, 9, 32, 32)
    assert torch.allclose(short, long[:, :, ::2], atol=1e-4)


@pytest.mark.parametrize(
    ("camera", "shift"),
    [
        ("pan left", (1, 0)),
        ("pan right", (-1, 0)),
        ("pan up", (0, 1)),
        ("pan down", (0, -1)),
    ],
)
def test_a_pan_moves_the_ground_the_other_way_as_one_piece(
    camera: str, shift: tuple[int, int]
) -> None:
    small = body(size="small", x=-1.0, y=-1.0)
    clip = render.render([scene(small, camera=camera, seed=3)], 2, 100, 100)[0]
    # 0.6 half short sides are 30 of 100 pixels
    step_x, step_y = (30 * step for step in shift)
    moved = torch.roll(clip[:, 0], (step_y, step_x), (1, 2))[:, 35:65, 35:65]
    assert (moved - clip[:, 1, 35:65, 35:65]).abs().mean() < 0.02


def test_a_zoom_enlarges_ground_and_bodies_alike() -> None:
    drawn = scene(camera="zoom in", ground="desert")
    clip = render.render([drawn], 2, 120, 120)[0]
    # the middle 80 of 120 pixels fill the frame at a zoom of 1.5
    near = F.interpolate(clip[None, :, 0, 20:100, 20:100], size=(120, 120), mode="bilinear")
    difference = (near[0] - clip[:, 1]).abs()
    assert difference.mean() < 0.05


def test_later_bodies_cover_earlier_ones() -> None:
    under, over = body(colour="red"), body(colour="blue", shape="star", size="medium")
    for first, second, seen in ((under, over, "blue"), (over, under, "red")):
        clip = render.render([scene(first, second)], 1, 64, 64)[0]
        colour = (clip[:, 0, 34, 34] + 1) / 2
        assert int(colour.argmax()) == {"red": 0, "blue": 2}[seen]


def test_shadows_fall_on_ground_and_bodies_and_follow_the_sun() -> None:
    ground_only = render.render([scene(body(size="small", x=-1.0, y=-1.0))], 1, 64, 64)
    shaded = render.render([scene(body(x=0.0))], 1, 64, 64)
    darker = (ground_only - shaded)[0, :, 0].mean(0)
    # the light comes from above left
    assert darker[40:43, 40:43].mean() > 0.1 > darker[18:22, 18:22].abs().mean()
    turning = render.render([scene(light="sun moves")], 2, 64, 64)[0].mean(0)
    first, last = turning
    right, left = (slice(30, 40), slice(45, 50)), (slice(30, 40), slice(14, 19))
    assert first[right].mean() < last[right].mean()
    assert last[left].mean() < first[left].mean()


@pytest.mark.parametrize(("light", "sign"), [("brightens", 1), ("darkens", -1)])
def test_light_changes_over_the_clip(light: str, sign: int) -> None:
    clip = render.render([scene(light=light)], 5, 32, 32)[0].mean((0, 2, 3))
    assert ((clip[1:] - clip[:-1]) * sign > 0).all()


@pytest.mark.parametrize("frame", [(1.0, 1.0), (1.5, 1.0), (1.0, 1.5)])
def test_no_body_leaves_the_frame(frame: tuple[float, float]) -> None:
    time = np.linspace(0, 1, 33)
    for drawn in scenes(200):
        at_x, at_y, zoom = world.camera_path(drawn.camera, time)
        for one in drawn.bodies:
            x, y, _ = world.track(drawn, one, time, frame)
            extent = world.SIZES[one.size] * zoom
            # a large body that crosses a zoom's narrow end may be cut by a sixth of its half
            assert (np.abs((x - at_x) * zoom) + extent <= frame[0] + 0.17 * extent).all()
            assert (np.abs((y - at_y) * zoom) + extent <= frame[1] + 0.17 * extent).all()


def test_bodies_stand_where_centres_says() -> None:
    drawn = scene(body(motion="moves right", size="small"), camera="zoom out", ground="snow")
    frames = (render.render([drawn], 5, 96, 96)[0] + 1) / 2
    for frame, (x, y) in zip(frames.unbind(1), world.centres(drawn, 5)[0], strict=True):
        rows, columns = np.nonzero((frame[0] > 2 * frame[2]).numpy())
        assert columns.mean() / 96 == pytest.approx(x, abs=0.02)
        assert rows.mean() / 96 == pytest.approx(y, abs=0.02)


def test_training_never_draws_what_is_held_out() -> None:
    assert len(set(world.HELD_OUT)) == 24
    drawn = {(b.colour, b.shape, s.camera) for s in scenes(600) for b in s.bodies}
    assert not drawn & set(world.HELD_OUT)
    held = [(s.bodies[0].colour, s.bodies[0].shape, s.camera) for s in world.held_out_scenes()]
    assert held == list(world.HELD_OUT)
    assert {s.ground for s in world.held_out_scenes()} == set(world.GROUNDS)


@pytest.mark.parametrize(
    ("name", "value"),
    [("shape", "cone"), ("colour", "white"), ("size", "tall"), ("pattern", "wavy")],
)
def test_a_body_refuses_what_cannot_be_drawn(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be one of .*, got '{value}'"):
        body(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("ground", "moon"), ("camera", "roll"), ("light", "strobe")]
)
def test_a_scene_refuses_what_cannot_be_filmed(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be one of .*, got '{value}'"):
        scene(**{name: value})


# --- captions ---


def test_the_canonical_caption_names_camera_ground_and_bodies() -> None:
    pan = scene(
        body(motion="moves right"),
        body(shape="square", colour="blue", size="small", pattern="dotted"),
        ground="snow",
        camera="pan left",
        light="darkens",
    )
    assert captions.caption(pan) == (
        "a camera pan left over a snowy field, a large red ball rolls right, "
        "a small dotted blue square stays still, as it gets dark"
    )


def test_different_scenes_have_different_canonical_captions() -> None:
    def said(one: world.Scene) -> tuple[Any, ...]:
        things = [(b.size, b.pattern, b.colour, b.shape, b.motion) for b in one.bodies]
        return (*things, one.ground, one.camera, one.light)

    drawn = scenes(300)
    assert len({captions.caption(s) for s in drawn}) == len({said(s) for s in drawn})


def test_every_caption_word_is_in_the_vocabulary_and_used() -> None:
    rng = random.Random(1)
    used: set[str] = set()
    for drawn in [*scenes(600), *world.held_out_scenes()]:
        for said in (captions.caption(drawn), captions.caption(drawn, rng)):
            assert captions.VOCABULARY.unknown(said) == []
            assert len(captions.VOCABULARY.token_ids(said)) < captions.VOCABULARY.caption_tokens
            used.update(words(said))
    assert used | {"an"} == set(captions.VOCABULARY.words)


def test_varied_captions_keep_colours_or_their_synonyms() -> None:
    synonyms = {"purple": {"violet"}, "cyan": {"turquoise"}}
    rng = random.Random(3)
    for drawn in scenes(200):
        said = set(words(captions.caption(drawn, rng)))
        for one in drawn.bodies:
            assert said & ({one.colour} | synonyms.get(one.colour, set()))


def test_example_prompts_are_made_of_known_words() -> None:
    assert len(captions.EXAMPLE_PROMPTS) == 6
    for prompt in captions.EXAMPLE_PROMPTS:
        assert captions.VOCABULARY.unknown(prompt) == []
        assert re.match(r"an? [a-z ]+ over ", prompt)


# --- the reader of bodies and cameras ---


def film(drawn: world.Scene, frames: int = 9, height: int = 128, width: int = 128) -> np.ndarray:
    clip = render.render([drawn], frames, height, width)[0]
    return ((clip + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()


@pytest.fixture(scope="module")
def held_out_films() -> list[np.ndarray]:
    torch.set_num_threads(1)
    # a shake is five swings: fewer frames do not show it
    return [film(drawn, 17) for drawn in world.held_out_scenes()]


@pytest.fixture(scope="module")
def verdicts(held_out_films: list[np.ndarray]) -> list[Verdict]:
    return reading.judge(held_out_films)


@pytest.mark.slow
def test_the_reader_is_right_on_every_true_clip(verdicts: list[Verdict]) -> None:
    assert [verdict for verdict in verdicts if not verdict.right] == []
    assert [verdict.shown.twice for verdict in verdicts if verdict.faults["twice"]] == []


@pytest.mark.slow
def test_the_reader_tells_every_wrong_clip(
    verdicts: list[Verdict], held_out_films: list[np.ndarray]
) -> None:
    shown = [verdict.shown for verdict in verdicts]
    for verdict, other in zip(verdicts, shown[1:] + shown[:1], strict=True):
        assert not replace(verdict, shown=other).right
    # a clip run backwards pans and zooms the other way, and holds the same bodies
    for verdict, clip in list(zip(verdicts, held_out_films, strict=True))[::3]:
        backwards = replace(verdict, shown=reading.read_clip(clip[::-1]))
        assert backwards.parts["bodies"]
        assert backwards.parts["camera"] == (verdict.asked.camera in ("still", "shake"))


@pytest.mark.slow
def test_the_reader_is_right_where_bodies_cross_and_light_changes() -> None:
    for drawn in scenes(12, seed=11):
        assert reading.read_clip(film(drawn, 17)) == reading.asked_of(drawn)


@pytest.mark.slow
def test_the_reader_is_right_at_other_shapes_of_frame_and_with_noise() -> None:
    rng = np.random.default_rng(0)
    for drawn in world.held_out_scenes()[:6]:
        clip = film(drawn, 17, 128, 192)
        noisy = np.clip(clip + rng.normal(0, 8, clip.shape), 0, 255).astype(np.uint8)
        assert reading.read_clip(noisy) == reading.asked_of(drawn)


@pytest.mark.parametrize("camera", ["still", "pan left", "zoom out"])
def test_the_reader_names_the_camera(camera: str) -> None:
    assert reading.read_clip(film(scene(camera=camera))).camera == camera


def test_a_missing_a_further_and_a_recoloured_body_are_told() -> None:
    red, blue = body(x=-1.0), body(shape="star", colour="blue", x=1.0)
    shown = reading.read_clip(film(scene(red), 3))
    assert shown.bodies == (("red", "ball"),)
    both = reading.read_clip(film(scene(red, blue), 3))
    assert both.bodies == (("blue", "star"), ("red", "ball"))
    assert shown != both
    assert reading.read_clip(film(scene(body(colour="green"), ground="sea"), 3)) != shown


def test_a_body_that_stands_in_two_places_is_told_and_counts_as_one() -> None:
    here, there, blue = body(x=-1.0), body(x=1.0), body(shape="star", colour="blue", y=1.0)
    shown = reading.read_clip(film(scene(here, there, blue), 11))
    assert shown.twice == ("red",)
    single = reading.read_clip(film(scene(here, blue), 11))
    assert single.twice == ()
    # what was asked for says nothing of it.
    assert shown == single
    verdict = Verdict(prompt="", asked=single, shown=shown)
    assert verdict.right
    assert verdict.parts == {"bodies": True, "camera": True}
    assert verdict.faults == {"twice": True}


def outline(shape: str, stretch: float, turn: float, side: int = 40) -> torch.Tensor:
    axis = ((torch.arange(side) + 0.5) / side * 2 - 1) * 1.6
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    cos, sin = np.cos(turn), np.sin(turn)
    u, v = (cos * x + sin * y) / stretch, cos * y - sin * x
    return distance(shape, u, v) < 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stretched_and_turned_body_is_still_the_shape_that_it_is(shape: str) -> None:
    masks = torch.stack([outline(shape, 1.2, turn) for turn in (0.0, 0.4, 1.1, 2.0, 2.9)])
    assert outlines.overlaps(masks).argmax(1).tolist() == [SHAPES.index(shape)] * 5


def test_a_bar_is_like_no_shape() -> None:
    bar = torch.zeros(1, 40, 40, dtype=torch.bool)
    bar[:, 18:22, 2:38] = True
    assert outlines.overlaps(bar).max() < 0.5


def test_the_reader_sees_no_body_in_plain_grey() -> None:
    assert reading.read_clip(np.full((3, 64, 64, 3), 128, np.uint8)).bodies == ()
