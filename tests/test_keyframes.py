"""Images that stand in LTX-2's videos: the first, the last, and keyframes between them."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from saved_families import Opened, a_request, check_made
from tiny_ltx import ltx2
from tiny_parts import IMAGE, LAST_IMAGE

from vidsparse.apps.cli import main
from vidsparse.errors import OptionError, UnsupportedError
from vidsparse.grid import TokenGrid
from vidsparse.pipelines import sparsify
from vidsparse.pipelines.generate import generate, generate_batch
from vidsparse.pipelines.image import fit_image, read_image
from vidsparse.pipelines.models import load, resolve_model
from vidsparse.pipelines.request import resolve

pytest_plugins = ["saved_families"]
pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.usefixtures("uncompressed")
def test_videos_with_keyframes_are_compared(
    folders: Callable[[str], Path], image: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\n")
    arguments = ["compare", str(tmp_path / "prompts.txt"), "--model", str(folders("ltx2"))]
    arguments += ["--image", image, "--keyframe", f"9={image}", "--out", str(tmp_path / "out")]
    arguments += ["--frames", "25", "--size", "64x64", "--steps", "2", "--device", "cpu"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output


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
