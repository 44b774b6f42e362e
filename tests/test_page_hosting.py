"""Pages as their hosts set them up: with a password, presets and pictures, and for long."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_families import wan_image_to_video

pytest.importorskip("gradio", reason="the page needs the ui extra")

from page_server import MOST, TINY, Caller, client_of, record_of, served

from vidsparse.pipelines.calibrate import calibrate
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> str:
    return str(tiny_model)


def test_a_host_may_name_others_and_a_password_allows_any() -> None:
    from vidsparse.apps.page.build import _asked_for_by

    own = ["127.0.0.1", "localhost", "[::1]"]
    assert _asked_for_by([], listen=False, share=False) == own
    assert _asked_for_by(["a.b"], listen=False, share=False) == [*own, "a.b"]
    assert _asked_for_by(["a.b"], listen=True, share=False) == [*own, "a.b"]
    assert _asked_for_by([], listen=True, share=False) == ["*"]
    assert _asked_for_by(["a.b"], listen=False, share=True) == ["*"]


def test_a_page_on_a_cpu_offers_the_smaller_video_of_a_large_model(tmp_path: Path) -> None:
    from vidsparse.apps.page.host import Limits
    from vidsparse.apps.page.sizes import lengths_of, sizes_of
    from vidsparse.apps.page.start import make_desk

    desk = make_desk(("scenes",), ("cpu",), None, tmp_path / "out", Limits())
    try:
        model = desk.host.model("scenes")
        assert sizes_of(model, desk.host.limits)["usual"] == (320, 320)
        assert lengths_of(model, desk.host.limits)["usual"] == 33
    finally:
        desk.queue.close()


@pytest.fixture(scope="module")
def locked(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A page with a password."""
    out = tmp_path_factory.mktemp("locked") / "out"
    with served((model,), out, serving={"auth": ("anna", "secret")}, **MOST) as (_, url):
        yield url


def test_wrong_passwords_are_answered_slowly_and_the_right_one_opens_the_page(
    locked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    from vidsparse.apps.page import logins

    monkeypatch.setattr(logins, "FIRST_PAUSE", 0.2)
    with httpx.Client(base_url=locked) as http:
        assert http.get("config").status_code == 401
        seconds = []
        for _ in range(3):
            began = time.monotonic()
            given = {"username": "anna", "password": "wrong"}
            assert http.post("login", data=given).status_code == 400
            seconds.append(time.monotonic() - began)
        assert [spent > pause for spent, pause in zip(seconds, (0.2, 0.4, 0.8), strict=True)] == (
            [True] * 3
        )
        given = {"username": "anna", "password": "secret"}
        assert http.post("login", data=given).json() == {"success": True}
        assert http.get("config").status_code == 200


@pytest.fixture(scope="module")
def preset(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers for BSFA on the tiny model."""
    path = tmp_path_factory.mktemp("presets") / "tiny-bsfa.json"
    request = GenerateRequest(prompt="", method="bsfa", device="cpu", dense_steps=1, **TINY)
    settings = {"groups": 1, "fractions": (0.3, 1.0)}
    calibrate(load(model, device="cpu"), request, ["a red circle"], path, settings=settings)
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that makes videos between two pictures."""
    folder = tmp_path_factory.mktemp("model") / "pictures"
    wan_image_to_video(last=True).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def richer(
    model: str, pictures: str, preset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, str]]:
    """A page with a preset and a second model."""
    out = tmp_path_factory.mktemp("richer") / "out"
    with served((model, pictures), out, (str(preset),), upload=1, **MOST) as running:
        yield running


def test_an_uploaded_picture_is_decoded_on_arrival(richer: tuple[Any, str], tmp_path: Path) -> None:
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError
    from PIL import Image

    client, path = client_of(richer[1]), tmp_path / "first.png"
    Image.new("RGB", (40, 30), "red").save(path)
    preview = client.predict(handle_file(str(path)), api_name="/image")
    assert "-first-frame" in json.dumps(preview)
    path.write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    with pytest.raises(AppError, match=r"no picture|broken"):
        client.predict(handle_file(str(path)), api_name="/image")


def test_an_upload_that_is_refused_does_not_stand_in_its_field(richer: tuple[Any, str]) -> None:
    functions = Caller(richer[1], "refused").functions
    uploads = {
        fn["id"]: fn["inputs"] for fn in functions.values() if "image" in str(fn["api_name"])
    }
    assert len(uploads) == 2
    for asked, upload in uploads.items():
        after = [fn for fn in functions.values() if fn["trigger_after"] == asked]
        (emptied,) = (fn for fn in after if not fn["trigger_only_on_success"])
        assert (emptied["trigger_only_on_failure"], emptied["outputs"]) == (True, upload)
        assert "null" in emptied["js"]


def test_a_preset_makes_the_command_line_s_video(
    richer: tuple[Any, str], model: str, preset: Path, tmp_path: Path
) -> None:
    from gradio_client.exceptions import AppError

    desk, url = richer
    client = client_of(url)
    asked: dict[str, Any] = {"prompt": "a red circle", "seed": 5, "dense_steps": "1", **TINY}
    given = {"order": "hilbert", "bsfa_keep": 0.3, "bsfa_tile": "128x64"}
    answer = client.predict(
        api_name="/generate", method="bsfa", preset="tiny-bsfa", **given, **asked
    )
    request = GenerateRequest(model=model, preset=str(preset), **{**asked, "dense_steps": 1})
    direct = generate(load(model, device="cpu"), request)
    record = record_of(answer)
    assert record["preset"] == direct.record["preset"]
    for name in ("method", "method_options", "order", "frames"):
        assert record["options"][name] == direct.record["options"][name], name
    assert record["skipped"] == direct.record["skipped"]
    assert "preset tiny-bsfa" in str(answer)

    with pytest.raises(AppError, match="the preset tiny-bsfa is for bsfa, not for fg-attn"):
        client.predict(api_name="/generate", preset="tiny-bsfa", **asked)
    with pytest.raises(AppError, match="the preset tiny-bsfa was made for"):
        client.predict(
            api_name="/generate", model=desk.host.models[1].name, method="bsfa",
            preset="tiny-bsfa", **asked,
        )  # fmt: skip


def test_a_video_between_two_pictures(
    richer: tuple[Any, str], pictures: str, tmp_path: Path
) -> None:
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError
    from PIL import Image

    client, broken = client_of(richer[1]), tmp_path / "broken.png"
    asked: dict[str, Any] = {
        "prompt": "a red circle",
        "model": pictures,
        **TINY,
        "dense_steps": "1",
    }
    with pytest.raises(AppError, match="upload its first frame"):
        client.predict(api_name="/generate", **asked)
    for name, colour in (("image", "red"), ("last_image", "blue")):
        path = tmp_path / f"{name}.png"
        Image.new("RGB", (80, 60), colour).save(path)
        client.predict(handle_file(str(path)), api_name=f"/{name}")
    record = record_of(client.predict(api_name="/generate", **asked))
    assert sorted(record["images"]) == ["image", "last_image"]
    assert record["images"]["image"] != record["images"]["last_image"]

    # a last frame is checked like a first one, and one that is refused leaves none behind.
    broken.write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    with pytest.raises(AppError, match=r"no picture|broken"):
        client.predict(handle_file(str(broken)), api_name="/last_image")
    with pytest.raises(AppError, match=r"ends with a picture\. Hint: upload its last frame"):
        client.predict(api_name="/generate", **asked)


@pytest.fixture
def cleaned(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, str]]:
    """A page that forgets its copies after five seconds."""
    from vidsparse.apps.page import build

    monkeypatch.setattr(build, "CLEAN_EVERY", 1)
    monkeypatch.setattr(build, "CLEAN_AFTER", 5)
    with served((model,), tmp_path / "out", upload=1, **MOST) as running:
        yield running


@pytest.mark.slow
def test_a_page_that_runs_long_keeps_no_copies(cleaned: tuple[Any, str]) -> None:
    desk, url = cleaned
    copies = desk.host.folder.with_name("page-uploads")
    caller = Caller(url, "stays")
    function = caller.function("generate")
    names = [each["parameter_name"] for each in caller.parameters("/generate")]
    data = dict(zip(names, caller.defaults(function), strict=True))
    data |= {"prompt": "a red circle", **TINY}
    event = caller.start(function, list(data.values())).json()["event_id"]
    shown = json.dumps(caller.ends({event}))
    caller.http.post("gradio_api/upload", files={"files": ("mine.png", b"x" * 2**19)})
    (clip,) = desk.visits.of("stays").gallery.find()
    # what was made and shown had been copied, what was sent kept.
    assert str(copies) in shown

    def left() -> list[Path]:
        return [path for path in copies.rglob("*") if path.is_file()]

    until = time.monotonic() + 30
    while left():
        assert time.monotonic() < until, left()
        time.sleep(0.1)
    # the visit's own files stay, and are shown again when they are asked for.
    video = clip.record.with_suffix(".mp4")
    assert video.is_file()
    assert clip.record.with_suffix(".jpg").is_file()
    # of the two that choose something, the gallery; the other is the map of compare.
    (select,) = (
        number for number, fn in caller.functions.items() for target, event in fn["targets"]
        if event == "select" and caller.components[target]["type"] == "gallery"
    )  # fmt: skip

    def choose(value: Any) -> str:
        # whatever the place: what is shown there may have changed since.
        body = {
            "data": [], "fn_index": select, "session_hash": "stays",
            "event_data": {"index": 5, "value": value},
        }  # fmt: skip
        event = caller.http.post("gradio_api/queue/join", json=body).json()["event_id"]
        (answer,) = caller.ends({event}).values()
        return json.dumps(answer["output"])

    other, shown_there = (
        {"image": {"path": str(copies / "gone" / f"{stem}.jpg")}, "caption": ""}
        for stem in ("0001-other", clip.record.stem)
    )
    for nothing in (None, "0001", {}, {"image": None}, other):
        assert ".mp4" not in choose(nothing)
    output = choose(shown_there)
    (path,) = set(re.findall(r"\"path\": \"([^\"]+\.mp4)\"", output))
    assert Path(path).is_relative_to(copies)
    assert caller.http.get(f"gradio_api/file={path}").content == video.read_bytes()


def test_what_a_killed_page_left_is_removed_once_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vidsparse.apps.page import uploads
    from vidsparse.apps.page.start import make_folder

    monkeypatch.setenv("GRADIO_TEMP_DIR", "put back after the test")
    left = make_folder(tmp_path).with_name("page-uploads") / "5b1f" / "clip.mp4"
    left.parent.mkdir()
    left.write_bytes(b"x")
    make_folder(tmp_path)
    assert left.is_file()
    later = time.time() + uploads.CLEAN_AFTER + 60
    monkeypatch.setattr(uploads.time, "time", lambda: later)
    make_folder(tmp_path)
    assert not left.parent.exists()
