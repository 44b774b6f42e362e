"""The image that a video begins with: which model takes one, and what is made of its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from saved_families import Opened, a_request
from tiny_parts import IMAGE, LAST_IMAGE

from vidsparse.errors import OptionError
from vidsparse.pipelines.families import FAMILIES
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.image import fit_image, read_image
from vidsparse.pipelines.models import resolve_model
from vidsparse.pipelines.request import GenerateRequest, resolve, settings_hash

pytest_plugins = ["saved_families"]
pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_16_bits_are_scaled_to_8_and_numbers_without_a_white_refused(tmp_path: Path) -> None:
    deep = np.linspace(0, 2**16 - 1, 64 * 64).reshape(64, 64).astype(np.uint16)
    for name, image in {
        "grey.png": Image.fromarray(deep),
        "big-endian.tif": Image.fromarray(deep.astype(">u2")),
        "wide.tif": Image.fromarray(deep.astype(np.int32)),
    }.items():
        image.save(tmp_path / name)
        shown = np.asarray(read_image(tmp_path / name)).astype(float)
        assert np.abs(shown - deep[..., None] / 257).max() <= 0.5, name
    without: dict[str, Any] = {
        "float.tif": deep.astype(np.float32) / 2**16,
        "wide.tif": deep.astype(np.int32) * 2,
        "below.tif": deep.astype(np.int32) - 1,
    }
    for name, numbers in without.items():
        Image.fromarray(numbers).save(tmp_path / name)
        with pytest.raises(OptionError, match=r"none is known to be white\. Hint: .* 8 or 16 bits"):
            read_image(tmp_path / name)


def test_whatever_a_decoder_trips_over_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "broken.png")

    def trip(*_: Any) -> None:
        raise RuntimeError("Failed to decode image")

    monkeypatch.setattr(Image.Image, "getexif", trip)
    with pytest.raises(OptionError, match=r"broken\.png holds no image that can be read: Failed"):
        read_image(tmp_path / "broken.png")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str, tmp_path: Path) -> None:
    picture = np.zeros((64, 64, 4), np.uint8)
    picture[:, 32:, 3] = 255
    if mode == "P":
        indexed = Image.fromarray(picture[..., 3] // 255, "P")
        indexed.putpalette([0, 0, 0, 0, 0, 0])
        indexed.save(tmp_path / "half.png", transparency=0)
    else:
        Image.fromarray(picture).convert(mode).save(tmp_path / "half.png")
    assert Image.open(tmp_path / "half.png").mode == mode
    shown = np.asarray(read_image(tmp_path / "half.png"))
    assert (shown[:, :32] == 255).all()
    assert not shown[:, 32:].any()


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
