"""What visitors upload: pictures and prompt files."""

from __future__ import annotations

import io
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile

from vidsparse.apps.page.uploads import read_prompt_file, read_prompt_lines, rewrite_image
from vidsparse.errors import OptionError, OutputError
from vidsparse.pipelines.image import read_image

PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def _png(tmp_path: Path, size: tuple[int, int] = (32, 16), kind: str = "PNG") -> Path:
    path = tmp_path / "up.bin"
    Image.new("RGBA" if kind == "PNG" else "RGB", size, (200, 10, 10)).save(path, format=kind)
    return path


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_decoded_and_written_anew(tmp_path: Path, kind: str) -> None:
    made = rewrite_image(_png(tmp_path, kind=kind), tmp_path / "new.png", megabytes=1)
    with Image.open(made) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (32, 16))
        assert np.allclose(np.asarray(image)[8, 16], (200, 10, 10), atol=8)


def test_nothing_of_the_upload_but_its_pixels_stays(tmp_path: Path) -> None:
    path = _png(tmp_path, kind="JPEG")
    image = Image.open(path)
    exif = image.getexif()
    exif[0x010E] = "where I live"
    image.save(path, format="JPEG", exif=exif, icc_profile=PROFILE)
    path.write_bytes(path.read_bytes() + b"<script>")
    made = rewrite_image(path, tmp_path / "new.png", megabytes=1)
    data = made.read_bytes()
    assert b"where I live" not in data
    assert b"<script>" not in data
    with Image.open(made) as written:
        assert written.info == {}


@pytest.mark.parametrize("kind", ["transparent", "deep", "turned"])
def test_the_page_makes_of_a_picture_what_the_command_line_does(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "picture.png"
    numbers = np.arange(32 * 48).reshape(32, 48)
    if kind == "transparent":
        picture = np.zeros((32, 48, 4), np.uint8)
        picture[:, 24:, 3] = 255
        Image.fromarray(picture).save(path)
    elif kind == "deep":
        Image.fromarray((numbers * 40).astype(np.uint16)).save(path)
    else:
        # an entry of another type than its name has, as some programs write them.
        exif = b"MM\0*" + struct.pack(
            ">LHHHLHHHHLLL", 8, 2, 0x0112, 3, 1, 6, 0, 0x0100, 2, 2, 0x33000000, 0
        )
        Image.fromarray((numbers % 256).astype(np.uint8)).save(path, exif=b"Exif\0\0" + exif)
    made = Image.open(rewrite_image(path, tmp_path / "new.png", megabytes=1))
    told = read_image(path)
    assert made.size == told.size == ((32, 48) if kind == "turned" else (48, 32))
    assert np.array_equal(np.asarray(made), np.asarray(told))
    if kind != "turned":
        assert 0 < np.asarray(made).mean() < 254


def _bomb() -> bytes:
    # a header that promises 60,000 x 60,000 pixels in a hundred bytes.
    file = io.BytesIO()
    Image.new("L", (1, 1)).save(file, format="PNG")
    data = bytearray(file.getvalue())
    data[16:24] = (60_000).to_bytes(4, "big") * 2

    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no picture"),
        (b"GIF89a" + b"\0" * 50, "no picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture"),
        (_bomb(), "broken|megapixels"),
        (b"x" * (2**20 + 1), "at most 1 MB"),
    ],
)
def test_what_is_no_picture_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "up.png"
    path.write_bytes(data)
    with pytest.raises(OptionError, match=words):
        rewrite_image(path, tmp_path / "new.png", megabytes=1)
    assert not (tmp_path / "new.png").exists()


@pytest.mark.parametrize("size", [(4001, 4000), (10_001, 10), (10, 10_001)])
def test_a_picture_that_grows_too_large_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    path = tmp_path / "up.png"
    # a few kilobytes of one colour.
    Image.new("1", size).save(path, format="PNG")
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(OptionError, match="16 megapixels and 10,000 pixels a side, this one has"):
        rewrite_image(path, tmp_path / "new.png", megabytes=1)


def test_pictures_are_decoded_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now, most = _png(tmp_path), [], []
    load = ImageFile.ImageFile.load

    def slowly(self: Any) -> Any:
        now.append(self)
        most.append(len(now))
        time.sleep(0.02)
        now.remove(self)
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", slowly)
    with ThreadPoolExecutor(12) as pool:
        made = pool.map(
            lambda number: rewrite_image(path, tmp_path / f"{number}.png", megabytes=1), range(12)
        )
        assert all(each.is_file() for each in made)
    assert max(most) == 1


def test_a_copy_that_cannot_be_written_is_not_the_picture_s_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be written"):
        rewrite_image(_png(tmp_path), tmp_path / "file" / "new.png", megabytes=1)


def test_a_cut_picture_is_refused(tmp_path: Path) -> None:
    path = _png(tmp_path, (640, 480), "JPEG")
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(OptionError, match="broken"):
        rewrite_image(path, tmp_path / "new.png", megabytes=1)


def test_a_prompt_file_is_read_like_the_command_line_s(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeff# comment\na ball\r\n\n  a ring  \n".encode())
    assert read_prompt_file(path, megabytes=1, most=2) == ["a ball", "a ring"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xfe\x00a", "not UTF-8"),
        (b"# nothing\n", "there are no prompts"),
        (b"a\nb\nc\n", "at most 2 prompts"),
        (b"a\0b\n", "NUL"),
        (b"a" * (2**20 + 1), "at most 1 MB"),
    ],
)
def test_a_bad_prompt_file_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(data)
    with pytest.raises(OptionError, match=words):
        read_prompt_file(path, megabytes=1, most=2)


def test_an_upload_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="did not arrive"):
        read_prompt_file(tmp_path / "none.txt", megabytes=1, most=2)
    assert read_prompt_lines("one", most=1) == ["one"]
