"""``generate`` on saved tiny pipelines of every family, from text and from an image."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from PIL import Image
from quick import slow_but
from tiny_families import (
    TINY,
    cogvideox,
    latents,
    wan_image_to_video,
    wan_per_token_timesteps,
)
from tiny_hunyuan import hunyuan_image_to_video, with_little_text
from tiny_ltx import ltx2
from tiny_parts import IMAGE, LAST_IMAGE

from vidsparse.apps.cli import main
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.generate import GenerationCancelled, generate, generate_batch
from vidsparse.pipelines.image import fit_image, read_image
from vidsparse.pipelines.models import LoadedPipeline, describe, load, resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve, settings_hash

pytestmark = pytest.mark.usefixtures("one_thread")

FROM_TEXT = [
    "skyreels-v2",
    "anyflow",
    "hunyuan",
    "hunyuan15",
    "cogvideox-dpm",
    "cogvideox1.5",
    "mochi",
    "allegro",
    "easyanimate",
    "ltx",
    "ltx2",
    "kandinsky5",
    "motif",
]

BUILDERS: dict[str, Callable[[], Any]] = {
    **{name: tiny.build for name, tiny in TINY.items()},
    "hunyuan-image": lambda: hunyuan_image_to_video("token_replace", towers=True),
    "hunyuan-image-concat": lambda: hunyuan_image_to_video("latent_concat", towers=True),
}

# the weights, and whether they are loaded for videos from an image.
FROM_IMAGE = [
    "wan-image",
    "wan-two-experts",
    "wan-ti2v",
    "skyreels-v2-image",
    "hunyuan-image",
    "hunyuan-image-concat",
    "hunyuan15-image",
    "cogvideox-image",
    "ltx",
    "kandinsky5-image",
    "motif",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / name
            BUILDERS[name]().save_pretrained(made[name])
        return made[name]

    return folder


Opened = Callable[..., LoadedPipeline]


@pytest.fixture(scope="module")
def opened(folders: Callable[[str], Path]) -> Opened:
    made: dict[tuple[str, bool], LoadedPipeline] = {}

    def load_once(name: str, *, image: bool = False) -> LoadedPipeline:
        if (name, image) not in made:
            made[name, image] = load(folders(name), device="cpu", image=image)
            if "hunyuan15" in name:
                with_little_text(made[name, image].pipe)
        return made[name, image]

    return load_once


@pytest.fixture
def image(tmp_path: Path) -> str:
    IMAGE.save(tmp_path / "first.png")
    return str(tmp_path / "first.png")


def a_request(**changes: Any) -> GenerateRequest:
    small = {"frames": 9, "width": 64, "height": 64, "steps": 3}
    return GenerateRequest(**{"prompt": "a red circle", "method": "fg-attn", **small, **changes})


def processors_of(loaded: LoadedPipeline) -> list[Any]:
    return [getattr(module, "processor", None) for module in loaded.pipe.transformer.modules()]


def check_made(loaded: LoadedPipeline, request: GenerateRequest, frames: int) -> dict[str, Any]:
    """Generate twice, dense and sparse; the sparse record."""
    assert request.width is not None
    assert request.height is not None
    told: list[tuple[int, int]] = []
    dense = generate(loaded, replace(request, method="dense", method_options={}))
    made = generate(loaded, request, progress=lambda step, steps, _: told.append((step, steps)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert made.frames.shape == dense.frames.shape == (frames, request.height, request.width, 3)
    assert made.record["notes"] == []
    assert made.record["selected"] is not None
    assert made.record["times"]["denoise"] > 0
    assert len(made.record["density_map"]) == 3
    json.dumps(made.record)
    return made.record


@pytest.mark.parametrize("name", slow_but(["wan", "hunyuan"], FROM_TEXT))
def test_videos_from_text(opened: Opened, name: str) -> None:
    frames = TINY[name].size[0]
    loaded = opened(name)
    before = processors_of(loaded)
    record = check_made(loaded, a_request(frames=frames, dense_steps=1), frames)
    assert record["dense_step_share"] == pytest.approx(1 / 3)
    assert record["images"] == {}
    assert processors_of(loaded) == before
    assert "step" not in vars(loaded.pipe.scheduler)


@pytest.mark.parametrize("name", slow_but(["wan-image", "hunyuan-image"], FROM_IMAGE))
def test_videos_from_an_image(opened: Opened, name: str, image: str) -> None:
    loaded = opened(name, image=True)
    assert loaded.takes_image
    frames = TINY[name].size[0]
    request = a_request(image=image, frames=frames, dense_steps=1, width=96)
    record = check_made(loaded, request, frames)
    content = hashlib.sha256(Path(image).read_bytes()).hexdigest()
    assert record["images"] == {"image": content}
    assert record["options"]["image"] == image


def test_the_image_changes_the_video(opened: Opened, tmp_path: Path) -> None:
    loaded = opened("wan-image", image=True)
    IMAGE.save(tmp_path / "a.png")
    LAST_IMAGE.save(tmp_path / "b.png")
    a, b = (generate(loaded, a_request(image=str(tmp_path / f"{n}.png"))).frames for n in "ab")
    assert not np.array_equal(a, b)


def test_the_first_and_the_last_frame(tmp_path: Path) -> None:
    wan_image_to_video(last=True).save_pretrained(tmp_path / "model")
    IMAGE.save(tmp_path / "first.png")
    LAST_IMAGE.save(tmp_path / "last.png")
    loaded = load(tmp_path / "model", device="cpu", image=True)
    first, last = str(tmp_path / "first.png"), str(tmp_path / "last.png")
    both = generate(loaded, a_request(image=first, last_image=last))
    assert set(both.record["images"]) == {"image", "last_image"}
    same = generate(loaded, a_request(image=first, last_image=first))
    with pytest.raises(OptionError, match="makes videos between two images"):
        generate(loaded, a_request(image=first))
    assert not np.array_equal(both.frames, same.frames)


@pytest.mark.parametrize("name", ["hunyuan", "hunyuan15", "cogvideox-dpm", "ltx"])
def test_a_batch_and_its_prompts_alone(opened: Opened, name: str) -> None:
    loaded = opened(name)
    requests = [a_request(prompt=p) for p in ("a red circle", "a blue square that moves left")]
    together = generate_batch(loaded, requests)
    alone = generate(loaded, requests[1])
    difference = np.abs(together[1].frames.astype(int) - alone.frames.astype(int))
    assert difference.max() <= 1


def test_guidance_that_is_a_component_is_set_for_the_call_alone(
    opened: Opened,
) -> None:
    loaded = opened("hunyuan15")
    guider = loaded.pipe.guider
    assert loaded.defaults.guidance == 3.0
    one = generate(loaded, a_request(guidance=1.0))
    two = generate(loaded, a_request(guidance=2.0))
    assert loaded.pipe.guider is guider
    assert not np.array_equal(one.frames, two.frames)
    assert two.record["options"]["guidance"] == 2.0


def test_cancelling_works_without_a_callback_of_the_pipeline(
    opened: Opened,
) -> None:
    loaded, steps = opened("hunyuan15"), []
    with pytest.raises(GenerationCancelled, match="after step 1 of 3"):
        generate(
            loaded,
            a_request(),
            progress=lambda step, *_: steps.append(step),
            cancel=lambda: bool(steps),
        )
    assert "step" not in vars(loaded.pipe.scheduler)
    assert generate(loaded, a_request()).record["notes"] == []


def test_ltx_is_told_the_frame_rate(opened: Opened) -> None:
    loaded = opened("ltx")
    slow, fast = (generate(loaded, a_request(fps=fps, guidance=1.0)).frames for fps in (5, 50))
    assert not np.array_equal(slow, fast)


def test_components_of_the_pipelines_own_modules_load(folders: Callable[[str], Path]) -> None:
    index = json.loads((folders("ltx2") / "model_index.json").read_text())
    assert index["vocoder"][0] == "ltx2"
    assert resolve_model(folders("ltx2")).family.name == "LTX-2"


def test_a_package_that_the_host_misses_is_named(
    opened: Opened, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.pipelines.ltx2 import utils

    monkeypatch.setattr(utils, "is_av_available", lambda: False)
    loaded = opened("ltx2", image=True)
    with pytest.raises(UnsupportedError, match=r"LTX2ConditionPipeline needs .*install av"):
        generate(loaded, a_request(image=image))


@pytest.fixture
def uncompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """LTX-2's images as they are: compressing them like video takes a package that tests lack."""
    for name in ("condition", "image2video"):
        host = importlib.import_module(f"diffusers.pipelines.ltx2.pipeline_ltx2_{name}")
        monkeypatch.setattr(host, "apply_image_conditioning_crf", lambda image, crf: image)


@pytest.mark.usefixtures("uncompressed")
def test_ltx2_takes_one_prompt_with_an_image(opened: Opened, image: str) -> None:
    loaded = opened("ltx2", image=True)
    check_made(loaded, a_request(image=image, dense_steps=1), 9)
    with pytest.raises(OptionError, match="one video from an image at a time"):
        generate_batch(loaded, [a_request(image=image)] * 2)


@pytest.mark.usefixtures("uncompressed")
def test_a_model_of_ltx2_s_image_pipeline_makes_videos_from_one(image: str, tmp_path: Path) -> None:
    ltx2("LTX2ImageToVideoPipeline").save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model", device="cpu", image=True)
    assert generate(loaded, a_request(image=image)).record["notes"] == []
    with pytest.raises(OptionError, match="takes no last image"):
        generate(loaded, a_request(image=image, last_image=image))


@pytest.mark.usefixtures("uncompressed")
def test_ltx2_is_conditioned_on_the_images_where_they_stand(opened: Opened, tmp_path: Path) -> None:
    loaded = opened("ltx2", image=True)
    files = [tmp_path / f"{n}.png" for n in range(3)]
    for file, picture in zip(files, (IMAGE, LAST_IMAGE, IMAGE.rotate(90)), strict=True):
        picture.save(file)
    first, last, middle = map(str, files)
    request = a_request(image=first, last_image=last, keyframes={1: middle}, frames=17)
    made = generate(loaded, request)
    host = loaded.pipe
    conditions = [
        LTX2VideoCondition(fit_image(read_image(file), 64, 64), index)
        for file, index in ((first, 0), (last, 2), (middle, 1))
    ]
    with sparsify(host, "fg-attn", **request.method_options, dense_steps=0.24) as handle:
        expected = host(
            conditions,
            prompt="a red circle",
            negative_prompt="",
            width=64,
            height=64,
            num_frames=17,
            num_inference_steps=3,
            guidance_scale=loaded.defaults.guidance,
            frame_rate=loaded.defaults.fps,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        )
        grid = handle._session._layout.grid
    # of three latent frames and two keyframes.
    assert grid == TokenGrid(5, 8, 8)
    assert np.array_equal(made.frames, (expected.frames[0] * 255).round().astype(np.uint8))
    assert made.sound is not None
    assert np.array_equal(made.sound.samples, expected.audio[0].numpy().clip(-1, 1))
    assert made.record["notes"] == []
    assert list(made.record["images"]) == ["image", "last_image", "keyframe 1"]
    without = generate(loaded, a_request(image=first, last_image=last, frames=17))
    assert not np.array_equal(made.frames, without.frames)


@pytest.mark.usefixtures("uncompressed")
def test_keyframes_from_the_command_line_and_the_sound_beside_them(
    folders: Callable[[str], Path], image: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    LAST_IMAGE.save(tmp_path / "last.png")
    images = ["--image", image, "--last-image", str(tmp_path / "last.png")]
    arguments = ["generate", str(tmp_path / "prompts.txt"), "--model", str(folders("ltx2"))]
    arguments += [*images, "--keyframe", f"9={image}", "--out", str(tmp_path / "out")]
    arguments += ["--frames", "25", "--size", "64x64", "--steps", "2", "--device", "cpu"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    # the next command is one that can be run.
    assert f"--keyframe 9={image}" in " ".join(result.output.split())
    (file,) = (tmp_path / "out").glob("*/*.json")
    record = json.loads(file.read_text())
    assert set(record["images"]) == {"image", "last_image", "keyframe 9"}
    assert record["sound"]["rate"] == 16_000
    (video,) = (tmp_path / "out").glob("*/*.mp4")
    said = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(video)], capture_output=True, check=False
    )
    assert b"Audio: aac" in said.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keyframes": {8: ""}}, r"must be 8k\+1, counted from 0, and at most 17 in 25.* use 9"),
        ({"keyframes": {0: ""}}, "got 0. Hint: use 1"),
        ({"keyframes": {25: ""}}, "at most 17 in 25 frames, got 25. Hint: use 17"),
        ({"keyframes": {1: ""}, "frames": 1}, "1 frames has no room for keyframes"),
        ({"keyframes": {17: ""}, "last_image": ""}, "17 and last_image are the same frame"),
    ],
)
def test_keyframes_stand_where_a_frame_of_the_latent_begins(
    folders: Callable[[str], Path], image: str, changes: dict[str, Any], message: str
) -> None:
    given = {"frames": 25, **changes, "keyframes": dict.fromkeys(changes["keyframes"], image)}
    if "last_image" in given:
        given["last_image"] = image
    with pytest.raises(OptionError, match=message):
        resolve(a_request(image=image, **given), resolve_model(folders("ltx2")).defaults)


def test_keyframes_that_cannot_be(
    folders: Callable[[str], Path], opened: Opened, image: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="keyframes need image"):
        a_request(keyframes={9: image})
    with pytest.raises(OptionError, match="must map whole frame numbers to files"):
        a_request(image=image, keyframes={"9": image})
    with pytest.raises(OptionError, match="there is no image file"):
        a_request(image=image, keyframes={9: str(tmp_path / "missing.png")})
    with pytest.raises(OptionError, match=r"takes no keyframes\. Hint: choose a model of LTX-2"):
        generate(opened("wan-image", image=True), a_request(image=image, keyframes={1: image}))
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    asked = ["generate", str(tmp_path / "prompts.txt"), "--model", str(folders("ltx2"))]
    for words, message in (
        (["--keyframe", "middle.png"], "write N=FILE"),
        (["--keyframe", "9=a", "--keyframe", "9=b"], "was given two keyframes"),
    ):
        result = CliRunner().invoke(main, [*asked, "--image", image, *words])
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())


def test_a_lora_that_the_host_does_not_load_is_refused(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="cannot load a LoRA into a HunyuanVideo15Pipeline"):
        load(folders("hunyuan15"), device="cpu", lora=str(tmp_path / "style.safetensors"))


# which model takes what


def test_what_a_model_takes_is_read_from_its_files(folders: Callable[[str], Path]) -> None:
    def classes(name: str) -> tuple[str | None, str | None, bool]:
        ref = resolve_model(folders(name))
        return ref.text_class, ref.image_class, ref.takes_last_image

    image_class = "WanImageToVideoPipeline"
    assert classes("wan") == ("WanPipeline", None, False)
    assert classes("wan-image") == (None, image_class, True)
    assert classes("wan-ti2v") == ("WanPipeline", image_class, False)
    assert classes("ltx") == ("LTXPipeline", "LTXImageToVideoPipeline", False)
    assert classes("ltx2") == ("LTX2Pipeline", "LTX2ConditionPipeline", True)
    assert classes("mochi") == ("MochiPipeline", None, False)


def test_an_image_for_a_model_of_text_is_refused(opened: Opened, image: str) -> None:
    with pytest.raises(OptionError, match=r"from text alone.* WanImageToVideoPipeline"):
        opened("mochi", image=True)
    loaded = opened("mochi")
    with pytest.raises(OptionError, match="a video from an image was asked for"):
        generate(loaded, a_request(image=image, frames=13))


def test_no_image_for_a_model_of_images_is_refused(opened: Opened) -> None:
    with pytest.raises(OptionError, match=r"none was given\. Hint: add --image FILE"):
        opened("wan-image")


def test_a_last_image_is_refused_where_it_would_be_forgotten(opened: Opened, image: str) -> None:
    loaded = opened("wan-ti2v", image=True)
    with pytest.raises(OptionError, match="takes no last image"):
        generate(loaded, a_request(image=image, last_image=image))
    with pytest.raises(OptionError, match="last_image needs image"):
        a_request(last_image=image)


# images


def test_images_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no image file"):
        a_request(image=str(tmp_path / "missing.png"))
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(OptionError, match="holds no image that can be read"):
        a_request(image=str(tmp_path / "text.png"))
    IMAGE.save(tmp_path / "whole.png")
    cut = (tmp_path / "whole.png").read_bytes()[:200]
    (tmp_path / "cut.png").write_bytes(cut)
    with pytest.raises(OptionError, match="holds no image that can be read"):
        a_request(image=str(tmp_path / "cut.png"))
    Image.new("RGB", (8, 64)).save(tmp_path / "thin.png")
    with pytest.raises(OptionError, match=r"8x64 pixels\. Hint: an image needs at least 16"):
        a_request(image=str(tmp_path / "thin.png"))
    with pytest.raises(OptionError, match="must be the path of a file, got 3"):
        a_request(image=3)


def test_an_image_is_turned_as_its_camera_was_held(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    IMAGE.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == (IMAGE.height, IMAGE.width)


def test_an_image_is_cut_evenly_never_stretched() -> None:
    wide = Image.new("RGB", (300, 100), (255, 0, 0))
    wide.paste((0, 255, 0), (100, 0, 200, 100))
    middle = np.asarray(fit_image(wide, 50, 50))
    assert middle.shape == (50, 50, 3)
    assert np.abs(middle[:, 4:-4].astype(int) - (0, 255, 0)).max() <= 1


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ({}, (768, 512)),
        ({"width": 96}, (96, 64)),
        ({"height": 64}, (96, 64)),
        ({"width": 64, "height": 128}, (64, 128)),
    ],
)
def test_a_size_left_open_follows_the_image(
    image: str, asked: dict[str, Any], size: tuple[int, int]
) -> None:
    request = resolve(GenerateRequest(prompt="", image=image, **asked), FAMILIES[0].defaults)
    assert (request.width, request.height) == size


def test_the_settings_hash_follows_the_image_not_its_name(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(folders("wan-image"))
    IMAGE.save(tmp_path / "a.png")
    IMAGE.save(tmp_path / "b.png")
    LAST_IMAGE.save(tmp_path / "c.png")
    a, b, c = (
        settings_hash(a_request(model=model, device="cpu", image=str(tmp_path / f"{n}.png")))
        for n in "abc"
    )
    assert a == b != c


# defaults


def test_defaults_follow_the_files_of_a_model(tmp_path: Path) -> None:
    cogvideox(version="1.5").save_pretrained(tmp_path / "cog")
    defaults = resolve_model(tmp_path / "cog").defaults
    assert (defaults.frames, defaults.width, defaults.height, defaults.fps) == (9, 128, 128, 16)
    wan_per_token_timesteps("WanPipeline").save_pretrained(tmp_path / "wan")
    defaults = resolve_model(tmp_path / "wan").defaults
    assert (defaults.frames, defaults.width, defaults.height, defaults.fps) == (121, 1280, 704, 24)


def test_sparse_settings_are_the_familys_unless_asked_for(
    folders: Callable[[str], Path], opened: Opened
) -> None:
    loaded = opened("hunyuan")
    steps = {"steps": 10, "guidance": 1.0}
    assert generate(loaded, a_request(**steps)).record["dense_step_share"] == pytest.approx(0.1)
    asked = generate(loaded, a_request(**steps, dense_steps=5)).record
    assert asked["dense_step_share"] == 0.5
    assert asked["options"]["method_options"]["top_p"] == 0.9
    assert describe(str(folders("hunyuan")))["dense_steps"] == 0.1


def test_a_card_may_bring_sparse_settings(folders: Callable[[str], Path], tmp_path: Path) -> None:
    TINY["wan"].build().save_pretrained(tmp_path)
    card = {
        "dense_steps": 2, "dense_layers": 1, "dense_last_layers": 2, "reuse": 3,
        "order": "rowmajor",
    }  # fmt: skip
    (tmp_path / "vidsparse.json").write_text(json.dumps(card))
    request = resolve(a_request(), resolve_model(tmp_path).defaults)
    assert {name: getattr(request, name) for name in card} == card


def test_the_method_of_a_request_is_the_card_s_or_the_one_whose_options_are_given(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    TINY["wan"].build().save_pretrained(tmp_path)
    card = {"method": "foresight", "schedules": {"foresight": {"dense_steps": 1, "refresh": 2}}}
    (tmp_path / "vidsparse.json").write_text(json.dumps(card))

    def made(model: Path | str, **options: Any) -> GenerateRequest:
        return GenerateRequest(prompt="", model=str(model), device="cpu", **options)

    defaults = resolve_model(tmp_path).defaults
    one = resolve(made(tmp_path), defaults)
    assert (one.method, one.dense_steps, one.refresh) == ("foresight", 1, 2)
    # its schedule is for that method alone.
    other = resolve(made(tmp_path, method="spargeattn"), defaults)
    assert (other.method, other.dense_steps, other.refresh) == ("spargeattn", 0.24, 0)
    assert made(tmp_path, method_options={"top_p": 0.5}).method == "fg-attn"
    assert made(tmp_path, speed="exact").method == "dense"
    assert made(folders("wan")).method == made("owner/model").method == "fg-attn"
    # of several that have it one must be chosen.
    with pytest.raises(OptionError, match="foresight has no option 'tau': it belongs to sparge"):
        made(tmp_path, method_options={"tau": 0.5})
    card["method"] = "nearest"
    (tmp_path / "vidsparse.json").write_text(json.dumps(card))
    with pytest.raises(OptionError, match="unknown method 'nearest'"):
        made(tmp_path)


def test_a_family_may_set_options_of_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    from vidsparse.pipelines import wan

    defaults = replace(wan.WAN.defaults, method_options={"fg-attn": {"top_p": 0.5}}, dense_layers=1)
    defaults = replace(defaults, dense_last_layers=1, reuse=2)
    request = resolve(GenerateRequest(prompt="", method="fg-attn"), defaults)
    assert request.method_options["top_p"] == 0.5
    assert (request.dense_layers, request.dense_last_layers, request.reuse) == (1, 1, 2)
    other = resolve(GenerateRequest(prompt="", method_options={"top_p": 0.7}), defaults)
    assert other.method_options["top_p"] == 0.7
    assert "top_p" not in resolve(GenerateRequest(prompt="", method="dense"), defaults).options()
    adapter = replace(wan.ADAPTER, family=replace(wan.WAN, defaults=defaults))
    monkeypatch.setattr(wan, "ADAPTER", adapter)
    pipe = TINY["wan"].build()
    with sparsify(pipe) as handle:
        assert handle.method.options()["top_p"] == 0.5
        schedule = handle.engine.schedule
        assert (schedule.dense_layers, schedule.dense_last_layers, schedule.reuse) == (1, 1, 2)
    own: dict[str, Any] = {"dense_layers": 0, "dense_last_layers": 0, "reuse": 1}
    with sparsify(pipe, top_p=0.7, **own) as handle:
        assert handle.method.options()["top_p"] == 0.7
        assert {name: getattr(handle.engine.schedule, name) for name in own} == own


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_familys_own_settings_are_valid(family: Any) -> None:
    request = resolve(GenerateRequest(prompt="", method=family.defaults.method), family.defaults)
    assert request.options()["method_options"]["tile"] == "16x16"
    assert family.defaults.source


# the command line


def test_generate_from_an_image_by_command(
    folders: Callable[[str], Path], image: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n")
    arguments = ["generate", str(prompts), "--model", str(folders("ltx")), "--image", image]
    arguments += ["--size", "96x64", "--frames", "9", "--steps", "2", "--out", str(tmp_path / "o")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (record,) = (tmp_path / "o").glob("*/*.json")
    assert json.loads(record.read_text())["images"]["image"]
    # without the image, the settings are others and so is the folder.
    result = CliRunner().invoke(main, [a for a in arguments if a not in ("--image", image)])
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "o").glob("*/*.mp4"))) == 2
    arguments[3] = str(folders("mochi"))
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "makes videos from text alone" in result.output


def test_the_catalog_shows_the_families_and_their_settings() -> None:
    shown = CliRunner().invoke(main, ["models"]).output
    for family in FAMILIES:
        assert family.name in shown
        assert all(name in shown for name in family.pipelines)
    assert "dense steps 0.1" in shown
    assert "top_p 0.9, tile 16x16" in shown


def test_guidance_by_more_forwards_has_names_of_its_own() -> None:
    pipe = ltx2(perturbed_attn=True)
    with sparsify(pipe, dense_steps=0, reuse=2) as handle:
        latents("ltx2-guidance", pipe)
        actions = {(c.branch, c.step, c.action) for c in handle.trace.cells}
    # a plan made for one forward of a step serves no other.
    assert ("uncond_modality", 1, "reuse") in actions
    assert {branch for branch, step, _ in actions if step == 1} == {
        "conditional",
        "uncond_stg",
        "uncond_modality",
    }
