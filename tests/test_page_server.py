"""The served page without a browser: many clients, calls that nobody meant, and what it costs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from fault_runs import form
from tiny_families import wan_image_to_video

pytest.importorskip("gradio", reason="the page needs the ui extra")

from page_server import TINY, Caller, free_port, served

from vidsparse.pipelines.calibrate import calibrate
from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.pipelines.video import read_video, write_video

MOST: dict[str, Any] = {"steps": 6, "frames": 17, "side": 96, "prompts": 2, "settings": 2}

timing = pytest.mark.skipif(
    not os.environ.get("VIDSPARSE_TIMINGS"),
    reason="a timing, for a quiet machine: set VIDSPARSE_TIMINGS=1",
)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> str:
    return str(tiny_model)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "out"


@pytest.fixture(scope="module")
def page(model: str, out: Path) -> Iterator[tuple[Any, str]]:
    with served((model,), out, waiting=40, upload=1, **MOST) as running:
        yield running


def _client(url: str) -> Any:
    from gradio_client import Client

    return Client(url, verbose=False, download_files=False)


def _record(answer: Any) -> dict[str, Any]:
    """The record among a generation's answers."""
    (record,) = [each for each in answer if isinstance(each, dict) and "versions" in each]
    return record


def _video(answer: Any) -> Path:
    """The video among a generation's answers."""
    values = [each.get("value", each) for each in answer if isinstance(each, dict)]
    (path,) = re.findall(r"'path': '([^']+\.mp4)'", str(values))
    return Path(path)


# ---- one request for page, command line and tests ----


def test_the_page_makes_the_video_of_the_same_request(
    page: tuple[Any, str], model: str, tmp_path: Path
) -> None:
    _, url = page
    asked: dict[str, Any] = {"prompt": "a red circle", "seed": 5, "method": "spargeattn", **TINY}
    answer = _client(url).predict(
        api_name="/generate", spargeattn_tau=0.6, dense_steps="1", fps=16, **asked
    )
    request = GenerateRequest(
        model=model, method_options={"tau": 0.6}, dense_steps=1, fps=16, **asked
    )
    direct = generate(load(model, device="cpu"), request)
    record = _record(answer)
    assert record["options"] == direct.record["options"]
    for name in ("selected", "computed", "density_map", "seed", "prompt"):
        assert record[name] == direct.record[name], name
    write_video(direct.frames, tmp_path / "direct.mp4", 16)
    assert np.array_equal(read_video(_video(answer)), read_video(tmp_path / "direct.mp4"))


def test_files_of_a_visit_are_the_command_line_s(page: tuple[Any, str], out: Path) -> None:
    _, url = page
    answer = _client(url).predict("a blue square", api_name="/generate", seed=11, **TINY)
    (record,) = [
        path
        for path in (out / "page").glob("*/*.json")
        # beside what is shown, the file holds the size and hash of its video.
        if _record(answer).items() <= json.loads(path.read_text(encoding="utf-8")).items()
    ]
    assert record.name == "0001-a-blue-square.json"
    assert read_video(record.with_suffix(".mp4")).shape == (9, 64, 64, 3)


def test_a_visitor_who_comes_back_finds_the_job_and_the_videos(page: tuple[Any, str]) -> None:
    from vidsparse.apps.page.queue import Job

    desk, url = page
    gate = threading.Event()
    desk.queue.submit(Job(lambda bench, job: gate.wait(60)))
    first, again, other = (Caller(url, name) for name in ("first", "again", "other"))
    key = first.http.get("").headers["set-cookie"]
    assert "HttpOnly" in key
    assert "SameSite=Lax" in key
    cookie = key.partition(";")[0]
    # the page is loaded anew: another session, and the browser's cookie.
    for caller in (first, again):
        caller.http.headers["Cookie"] = cookie
    first.ask_for_a_video(prompt="a red circle that waits")
    with first.http.stream("GET", "gradio_api/queue/data?session_hash=first") as answer:
        next(line for line in answer.iter_lines() if "before yours" in line)
    first.http.close()
    visit = desk.visits.of("", cookie.partition("=")[2])
    _until(lambda: visit.present == 0)
    (errand,) = visit.open("generate")
    resume = next(
        number for number, fn in again.functions.items()
        if ("load" in [event for _, event in fn["targets"]])
        and {again.functions[again.function("generate")]["outputs"][0]} <= set(fn["outputs"])
    )  # fmt: skip
    event = again.start(resume, []).json()["event_id"]
    _until(lambda: visit.present == 1)
    gate.set()
    ended = again.ends({event})[event]
    assert ended["success"]
    assert errand.job.snapshot().state == "done"
    assert "a red circle that waits" in json.dumps(ended["output"])
    assert [each.prompt for each in visit.gallery.find()] == ["a red circle that waits"]
    # nobody else finds either.
    event = other.start(resume, []).json()["event_id"]
    assert "a red circle that waits" not in json.dumps(other.ends({event})[event]["output"])


def test_a_click_may_ask_for_several_videos(page: tuple[Any, str]) -> None:
    from gradio_client.exceptions import AppError

    desk, url = page
    client = _client(url)
    answer = client.predict("a red circle", api_name="/generate", seed=5, videos=2, **TINY)
    assert "Your 2 videos are ready" in str(answer)
    assert _record(answer)["seed"] == 6
    found = desk.visits.of(client.session_hash).gallery.find()
    assert [each.seed for each in found] == [6, 5]
    for wrong in (0, 9, 1.5):
        with pytest.raises(AppError, match="videos must be"):
            client.predict("a", api_name="/generate", videos=wrong, **TINY)


def test_bad_input_is_a_sentence_for_clients_too(page: tuple[Any, str]) -> None:
    from gradio_client.exceptions import AppError

    client = _client(page[1])
    for wrong, words in (
        ({"prompt": " "}, "there is no prompt"),
        ({"steps": 50}, "steps can be at most 6 on this page, got 50"),
        ({"fg_attn_top_p": 3}, "top_p must lie in"),
    ):
        with pytest.raises(AppError, match=words):
            client.predict(api_name="/generate", **{"prompt": "a", **TINY, **wrong})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"frames": int("1" + "0" * 400)}, "frames must be a number, got 1000"),
        ({"steps": 2.7}, "steps must be a whole number, got 2.7"),
        ({"steps": [2]}, "steps must be a number, got [2]"),
        ({"fps": 1e-308}, "fps must lie between 1 and 240 on this page"),
        ({"prompt": "a \ud800 ball"}, "prompt holds half of a character"),
    ],
)
def test_values_that_no_browser_sends_are_a_sentence_before_anything_runs(
    page: tuple[Any, str], wrong: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, url = page
    monkeypatch.setattr(desk.queue, "submit", lambda *_: pytest.fail("it was to run"))
    caller = Caller(url, f"odd-{words}")
    function = caller.function("generate")
    names = [each["parameter_name"] for each in caller.parameters("/generate")]
    data = dict(zip(names, caller.defaults(function), strict=True))
    data |= {"prompt": "a red circle", **TINY, **wrong}
    event = caller.start(function, list(data.values())).json()["event_id"]
    (message,) = caller.ends({event}).values()
    assert not message["success"]
    assert words in message["output"]["error"]


def test_an_uploaded_prompt_file_is_read_and_others_are_not(
    page: tuple[Any, str], tmp_path: Path
) -> None:
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError

    client, path = _client(page[1]), tmp_path / "p.txt"
    path.write_text("# two\na red circle\na blue square\n", encoding="utf-8")
    prompts, _ = client.predict(handle_file(str(path)), api_name="/prompt_file")
    assert prompts == "a red circle\na blue square"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(AppError, match="not UTF-8"):
        client.predict(handle_file(str(path)), api_name="/prompt_file")


@pytest.mark.parametrize("name", ["image", "last_image"])
def test_no_picture_is_decoded_where_no_model_takes_one(
    page: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError
    from PIL import Image

    from vidsparse.apps.page import build

    decoded: list[Path] = []
    monkeypatch.setattr(build, "read_image", lambda path, *_, **__: decoded.append(path))
    Image.new("RGB", (40, 30), "red").save(tmp_path / "first.png")
    with pytest.raises(AppError, match="no model of this page takes such a picture"):
        _client(page[1]).predict(handle_file(str(tmp_path / "first.png")), api_name=f"/{name}")
    assert decoded == []


# ---- what a browser may show ----


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.html", b"<script>fetch('/config')</script>"),
        ("x.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>"),
        ("x.xhtml", b"<html xmlns='http://www.w3.org/1999/xhtml'><script>1</script></html>"),
        ("x.txt", b"<script>1</script>"),
        ("x.json", b"{}"),
        ("x.mp4", b"<script>1</script>"),
    ],
)
def test_no_upload_is_shown_by_the_page_s_address(
    page: tuple[Any, str], name: str, data: bytes
) -> None:
    import httpx

    desk, url = page
    with httpx.Client(base_url=url) as http:
        (path,) = http.post("gradio_api/upload", files={"files": (name, data)}).json()
        assert not Path(path).is_relative_to(desk.host.folder)
        for ask in ({}, {"Range": "bytes=0-3"}):
            for spelling in (f"file={path}", f"file/{path}", f"file={desk.host.folder}/../{path}"):
                answer = http.get(f"gradio_api/{spelling}", headers=ask)
                if answer.status_code >= 400:
                    continue
                assert answer.headers["content-disposition"].startswith("attachment"), spelling
                assert answer.headers["x-content-type-options"] == "nosniff"
                if name.endswith(("ml", "svg")):
                    assert answer.headers["content-type"] == "application/octet-stream"


def test_what_the_page_made_is_shown_and_nothing_else_in_its_folder(
    page: tuple[Any, str],
) -> None:
    import httpx

    desk, url = page
    folder = desk.host.folder / "a-visit"
    folder.mkdir()
    shown = {".mp4": "video/mp4", ".jpg": "image/jpeg", ".json": "application/json"}
    with httpx.Client(base_url=url) as http:
        for suffix, kind in (shown | {".html": "text/html"}).items():
            (folder / f"0001-a{suffix}").write_bytes(b"made here")
            answer = http.get(f"gradio_api/file={folder}/0001-a{suffix}")
            assert answer.content == b"made here"
            assert answer.headers["content-disposition"].startswith("inline")
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["x-content-type-options"] == "nosniff"
        (folder / "other.svg").write_bytes(b"<svg/>")
        answer = http.get(f"gradio_api/file={folder}/other.svg")
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["content-type"] == "application/octet-stream"
        # what an older version left among the page's own files.
        (desk.host.folder / "gradio").mkdir()
        (desk.host.folder / "gradio" / "old.html").write_bytes(b"<script>")
        assert http.get(f"gradio_api/file={desk.host.folder}/gradio/old.html").status_code == 403


# ---- who may ask, and by which name ----


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("[::1]:{port}", 200),
        ("LOCALHOST", 200),
        ("rebind.example", 400),
        ("rebind.example:{port}", 400),
        ("127.0.0.1.rebind.example:{port}", 400),
        ("localhost@rebind.example", 400),
        ("", 400),
    ],
)
def test_a_page_for_this_machine_answers_to_its_own_names(
    page: tuple[Any, str], host: str, status: int
) -> None:
    import httpx

    _, url = page
    host = host.format(port=url.rstrip("/").rpartition(":")[2])
    for path in ("", "config", "gradio_api/info"):
        assert httpx.get(url + path, headers={"Host": host}).status_code == status
    asked = {"data": [], "fn_index": 0, "session_hash": "rebound"}
    answer = httpx.post(f"{url}gradio_api/queue/join", json=asked, headers={"Host": host})
    assert (answer.status_code == 400 and b"Invalid host" in answer.content) == (status == 400)


def test_a_host_may_name_others_and_a_password_allows_any() -> None:
    from vidsparse.apps.page.build import _asked_for_by

    own = ["127.0.0.1", "localhost", "[::1]"]
    assert _asked_for_by([], listen=False, share=False) == own
    assert _asked_for_by(["a.b"], listen=False, share=False) == [*own, "a.b"]
    assert _asked_for_by(["a.b"], listen=True, share=False) == [*own, "a.b"]
    assert _asked_for_by([], listen=True, share=False) == ["*"]
    assert _asked_for_by(["a.b"], listen=False, share=True) == ["*"]


def test_nobody_forwards_the_page_to_another_host(page: tuple[Any, str]) -> None:
    import httpx

    _, url = page
    for path in ("", "config"):
        answer = httpx.get(url + path, headers={"X-Forwarded-Host": "rebind.example"})
        assert answer.status_code == 200
        assert b"rebind.example" not in answer.content


def test_every_answer_says_what_browsers_may_do_with_it(page: tuple[Any, str]) -> None:
    import httpx

    desk, url = page
    (desk.host.folder / "report.html").write_bytes(b"<script>fetch('/config')</script>")
    paths = ("", "config", "gradio_api/file=/etc/passwd", "no-such-page", "theme.css")
    with httpx.Client(base_url=url) as http:
        answers = [http.get(path) for path in paths]
        answers.append(http.get("", headers={"Host": "rebind.example"}))
        answers.append(http.post("gradio_api/queue/join", content=b"{", headers={"a": "b"}))
        report = http.get(f"gradio_api/file={desk.host.folder}/report.html")
    for answer in answers:
        if not answer.url.path.startswith("/gradio_api/file="):
            scripts = _directive(answer.headers["content-security-policy"], "script-src")
            assert "'unsafe-inline'" not in scripts
    for answer in [*answers, report]:
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "http" not in policy
    # what a report may hold cannot ask the page for anything.
    assert "sandbox allow-scripts" in report.headers["content-security-policy"]
    assert "connect-src" not in report.headers["content-security-policy"]


def _directive(policy: str, name: str) -> list[str]:
    """What a policy allows for one kind of thing."""
    return next(each.split()[1:] for each in policy.split("; ") if each.startswith(f"{name} "))


def test_the_page_s_own_scripts_are_named_and_no_others(page: tuple[Any, str]) -> None:
    import httpx

    from vidsparse.apps.page.headers import inline_scripts, script_hash

    answer = httpx.get(page[1])
    scripts = inline_scripts(answer.text)
    assert any("gradio_config" in text for text in scripts)
    named = _directive(answer.headers["content-security-policy"], "script-src")
    assert {f"'{script_hash(text)}'" for text in scripts} < set(named)
    # of files, none may run beyond those of the page.
    sources = [each for each in named if not each.startswith("'sha256-")]
    assert sources == ["'self'", "'unsafe-eval'"]


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


# ---- presets and pictures ----


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

    client, path = _client(richer[1]), tmp_path / "first.png"
    Image.new("RGB", (40, 30), "red").save(path)
    preview = client.predict(handle_file(str(path)), api_name="/image")
    assert "-first-frame" in json.dumps(preview)
    path.write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    with pytest.raises(AppError, match=r"no picture|broken"):
        client.predict(handle_file(str(path)), api_name="/image")


def test_a_preset_makes_the_command_line_s_video(
    richer: tuple[Any, str], model: str, preset: Path, tmp_path: Path
) -> None:
    from gradio_client.exceptions import AppError

    desk, url = richer
    client = _client(url)
    asked: dict[str, Any] = {"prompt": "a red circle", "seed": 5, "dense_steps": "1", **TINY}
    given = {"order": "hilbert", "bsfa_keep": 0.3, "bsfa_tile": "128x64"}
    answer = client.predict(
        api_name="/generate", method="bsfa", preset="tiny-bsfa", **given, **asked
    )
    request = GenerateRequest(model=model, preset=str(preset), **{**asked, "dense_steps": 1})
    direct = generate(load(model, device="cpu"), request)
    record = _record(answer)
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

    client, broken = _client(richer[1]), tmp_path / "broken.png"
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
    record = _record(client.predict(api_name="/generate", **asked))
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


@pytest.mark.slow
def test_a_report_is_the_command_line_s(page: tuple[Any, str], out: Path) -> None:
    answer = _client(page[1]).predict(
        api_name="/report", prompt_lines="a red circle\na blue square", vary="top_p",
        over="0.3, 0.9", dense_steps="1", prompt="not used", **TINY,
    )  # fmt: skip
    text = "".join(str(each) for each in answer)
    assert "The report is ready" in text
    assert text.count("top_p 0.3") >= 4
    documents = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((out / "page").glob("*/*-report/*/report.json"))
    ]
    assert sorted(each["settings"]["method_options"]["top_p"] for each in documents) == [0.3, 0.9]
    for document in documents:
        assert document["format"] == "vidsparse-report/1"
        assert [each["prompt"] for each in document["prompts"]] == ["a red circle", "a blue square"]
    low, high = sorted(documents, key=lambda each: each["summary"]["computed"])
    # one dense video serves both settings.
    assert [each["dense"]["times"] for each in low["prompts"]] == [
        each["dense"]["times"] for each in high["prompts"]
    ]
    for one, other in zip(low["prompts"], high["prompts"], strict=True):
        # made one after the other in this job.
        assert one["dense"]["began"] <= one["sparse"]["began"] <= other["sparse"]["began"]


def test_a_report_of_two_settings_is_one_page_and_one_zip(page: tuple[Any, str], out: Path) -> None:
    def reports() -> set[Path]:
        return set((out / "page").glob("*/*-report"))

    before = reports()
    answer = _client(page[1]).predict(
        api_name="/report", prompt_lines="a red circle", vary="top_p", over="0.3, 0.9",
        dense_steps="1", **TINY,
    )  # fmt: skip
    (folder,) = reports() - before
    links = re.findall(r'download="([^"]+)"', str(answer))
    assert links == ["report.html", f"{folder.name}.zip"]
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.count("data:video/mp4;base64,") == 2
    for words in (
        "1 prompt at 2 settings: top_p 0.3, top_p 0.9",
        'class="curve"',
        ">top_p 0.9</h2>",
    ):
        assert words in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    with zipfile.ZipFile(folder / f"{folder.name}.zip") as archive:
        names = sorted(archive.namelist())
    parts = [
        f"{side}/{name}"
        for side in ("1-top-p-0-3", "2-top-p-0-9")
        for name in ("0001-a-red-circle.mp4", "report.json", "report.md")
    ]
    assert names == sorted(f"{folder.name}/{name}" for name in [*parts, "report.html"])


def test_values_without_an_option_to_vary_are_refused(page: tuple[Any, str]) -> None:
    from gradio_client.exceptions import AppError

    with pytest.raises(AppError, match="no option to vary"):
        _client(page[1]).predict(
            api_name="/report", prompt_lines="a red circle", vary="nothing", over="0.3", **TINY
        )
    with pytest.raises(AppError, match="no values for top_p"):
        _client(page[1]).predict(
            api_name="/report", prompt_lines="a red circle", vary="top_p", over=" ", **TINY
        )


def test_a_cell_is_recorded_when_asked_for(page: tuple[Any, str]) -> None:
    from gradio_client.exceptions import AppError

    client = _client(page[1])
    with pytest.raises(AppError, match="no comparison with dense yet"):
        client.predict(2, 1, api_name="/record_cell")
    client.predict("a red circle", api_name="/compare", dense_steps="1", **TINY)
    answer = client.predict(2, 2, api_name="/record_cell")
    assert "step 2, layer 2, head 1" in str(answer)
    assert str(answer).count("data:image/png;base64,") == 2
    with pytest.raises(AppError, match="step 1, layer 1 made no plan"):
        client.predict(1, 1, api_name="/record_cell")
    with pytest.raises(AppError, match="layer must be a number from 1 to 2"):
        client.predict(2, 3, api_name="/record_cell")


# ---- many clients ----


@pytest.mark.slow
def test_twenty_requests_of_four_clients_all_end_and_none_is_mixed_up(
    page: tuple[Any, str],
) -> None:
    _, url = page
    colours = ("red", "blue")
    seen: dict[int, Any] = {}

    def visitor(number: int) -> None:
        client = _client(url)
        jobs = {}
        for each in range(5):
            seed = number * 5 + each
            jobs[seed] = client.submit(
                f"a {colours[seed % 2]} circle", api_name="/generate", seed=seed, **TINY
            )
            if number == 3 and each == 3:
                # this one changes its mind about what it has asked for so far.
                client.predict(api_name="/cancel")
        for seed, job in jobs.items():
            seen[seed] = job.result(timeout=120)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(visitor, range(4)))

    assert sorted(seen) == list(range(20))
    videos = set()
    for seed, answer in seen.items():
        text = str(answer)
        if "Cancelled" in text:
            assert seed in (15, 16, 17, 18)
            continue
        record = _record(answer)
        assert (record["seed"], record["prompt"]) == (seed, f"a {colours[seed % 2]} circle")
        videos.add(_video(answer).read_bytes())
    # every seed has a video of its own.
    assert len(videos) == sum("Cancelled" not in str(answer) for answer in seen.values())
    assert len(videos) >= 16


def test_a_visitor_who_leaves_takes_the_jobs_along(page: tuple[Any, str]) -> None:
    desk, url = page
    caller = Caller(url, "leaves")
    function = caller.function("generate")
    names = [each["parameter_name"] for each in caller.parameters("/generate")]
    data = dict(zip(names, caller.defaults(function), strict=True))
    data |= {"prompt": "a", **TINY}
    # a job in front keeps the device busy until this visitor has gone.
    gate = threading.Event()
    from vidsparse.apps.page.queue import Job

    blocker = desk.queue.submit(Job(lambda bench, job: gate.wait(30)))
    caller.start(function, list(data.values()))
    with (
        contextlib.closing(caller.http),
        caller.http.stream("GET", "gradio_api/queue/data?session_hash=leaves") as answer,
    ):
        for line in answer.iter_lines():
            if "before yours" in line:
                break
    visit = desk.visits.of("leaves")
    until = time.monotonic() + 20
    while visit.open():
        assert time.monotonic() < until, "the job was not given up"
        time.sleep(0.05)
    gate.set()
    assert not visit.gallery.find()
    assert blocker is not None


def _until(ready: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_one_visitor_has_a_share_of_the_queue_and_refusals_leave_no_folder(
    page: tuple[Any, str],
) -> None:
    from vidsparse.apps.page.queue import Job

    desk, url = page
    gate = threading.Event()
    desk.queue.submit(Job(lambda bench, job: gate.wait(60)))
    folders = set(desk.host.folder.iterdir())
    greedy, modest = Caller(url, "greedy"), Caller(url, "modest")
    events = {greedy.ask_for_a_video().json()["event_id"] for _ in range(14)}
    visit = desk.visits.of("greedy")
    # a quarter of forty places.
    _until(lambda: len(visit.open("generate")) == 10)
    event = modest.ask_for_a_video().json()["event_id"]
    _until(lambda: len(desk.visits.of("modest").open("generate")) == 1)
    assert set(desk.host.folder.iterdir()) == folders
    visit.cancel()
    desk.queue.forget_cancelled()
    ended = greedy.ends(events)
    refused = [each for each in ended.values() if not each["success"]]
    assert len(refused) == 4
    assert all("your share of this page" in each["output"]["error"] for each in refused)
    assert not visit.folder.exists()
    gate.set()
    assert modest.ends({event})[event]["success"]


def test_a_job_that_nobody_listens_to_is_given_up(
    page: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vidsparse.apps.page import desk as module
    from vidsparse.apps.page.queue import Job

    desk, url = page
    monkeypatch.setattr(module, "UNHEARD_AFTER", 1.0)
    gate = threading.Event()
    desk.queue.submit(Job(lambda bench, job: gate.wait(60)))
    unheard, heard = Caller(url, "unheard"), Caller(url, "heard")
    unheard.ask_for_a_video()
    event = heard.ask_for_a_video().json()["event_id"]
    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(heard.ends, {event})
        visit = desk.visits.of("unheard")
        _until(lambda: visit.open("generate"))
        (errand,) = visit.open("generate")
        _until(lambda: not visit.open("generate"))
        assert errand.job.snapshot().state == "cancelled"
        time.sleep(1.5)
        gate.set()
        assert listening.result()[event]["success"]
    assert not visit.gallery.find()


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"prompt": ""}, {"method": "magic"}, {"order": ["a"]}, {"model": {"a": 1}}],
)
def test_a_visitor_s_mistake_is_one_line_in_the_log(
    page: tuple[Any, str], wrong: dict[str, Any], caplog: Any, capfd: Any
) -> None:
    caller = Caller(page[1], f"mistaken {wrong}")
    with caplog.at_level("INFO", "vidsparse"):
        event = caller.ask_for_a_video(**wrong).json()["event_id"]
        assert not caller.ends({event})[event]["success"]
        bad = caller.start(caller.function("generate"), ["too few"]).json()["event_id"]
        assert not caller.ends({bad})[bad]["success"]
    lines = [record.getMessage() for record in caplog.records if record.name == "vidsparse"]
    assert len(lines) == 2
    assert all("\n" not in line for line in lines)
    assert "Traceback" not in capfd.readouterr().err


# ---- calls that nobody meant ----

NASTY: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, -1e308, 2**63, 1.5, "", " ", "0", "x" * 30_000, "\0", "\ud7ff🎬",
    "../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/x", "nan",
    "<img src=x onerror=alert(1)>", "{{7*7}}", "a\nb\nc\nd", [], {}, [[]], [None] * 50,
    {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}},
    {"path": "http://127.0.0.1:1/x.png", "meta": {"_type": "gradio.FileData"}},
    {"__type__": "update", "visible": False},
)  # fmt: skip


class _Opened:
    """What this process opens while it watches: an audit hook, which cannot be taken off."""

    def __init__(self) -> None:
        self.on = False
        self.written: set[str] = set()
        self.read: set[str] = set()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(arguments[0], str):
            path, mode, flags = arguments
            writes = bool(flags & 3) if mode is None else bool(set(mode) & set("wax+"))
            (self.written if writes else self.read).add(path)
        elif event in ("os.mkdir", "os.rename", "os.symlink", "os.link", "shutil.copyfile"):
            self.written.add(str(arguments[-1] if event == "shutil.copyfile" else arguments[0]))


def _value(component: dict[str, Any], default: Any, chance: random.Random, secret: Path) -> Any:
    """A value for a component: mostly what its schema allows, sometimes anything."""
    if chance.random() < 0.12:
        return chance.choice([*NASTY, str(secret), {
            "path": str(secret), "meta": {"_type": "gradio.FileData"}}])  # fmt: skip
    kind, props = component["type"], component["props"]
    if chance.random() < 0.5:
        return default
    if kind == "number":
        return chance.choice([0, 1, 2, 4, 5, 9, 16, 32, 64, 0.5, 0.9, 7, 100])
    if kind in ("dropdown", "radio"):
        return chance.choice([value for _, value in props["choices"]])
    if kind == "slider":
        return chance.uniform(props["minimum"], props["maximum"])
    if kind == "textbox":
        return chance.choice(["a red circle", "1", "0.5", "0", "0.3, 0.9", "a\nb", "top_p"])
    if kind == "checkbox":
        return chance.random() < 0.5
    return default


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_calls_that_nobody_meant(page: tuple[Any, str], out: Path, tmp_path: Path) -> None:
    _, url = page
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret of this host", encoding="utf-8")
    chance = random.Random(6)
    opened = _Opened()
    statuses: list[int] = []
    ended: list[dict[str, Any]] = []
    sessions = ["s", "../../x", "x" * 300, "ü/\\%00"]

    def call(number: int) -> None:
        mine = random.Random(number)
        # of its own: two listeners of one session would take each other's messages.
        session = f"{mine.choice(sessions)}{number}"
        caller = Caller(url, session)
        # some steps of the page run in the browser alone, and have nothing to answer here.
        here = [number for number, fn in caller.functions.items() if fn["backend_fn"]]
        function: Any = mine.choice(here if mine.random() < 0.9 else list(caller.functions))
        if mine.random() < 0.5:
            function = caller.function(mine.choice(["generate", "compare", "report"]))
        data: Any = []
        named = [each.get("label") for each in _inputs(caller, function)]
        small = {"Steps": 2, "Width": 64, "Height": 64, "Prompt": "a red circle"}
        for label, component, default in zip(
            named, _inputs(caller, function, whole=True), caller.defaults(function), strict=True
        ):
            fine = small.get(str(label), 5 if str(label).startswith("Frames (") else default)
            data.append(_value(component, fine, mine, secret))
        if mine.random() < 0.05:
            data = mine.choice([[], data[:-1], [*data, 1], "x", {"a": 1}, None])
        if mine.random() < 0.05:
            function = mine.choice([-1, 10_000, "1", None, 2.5])
        answer = caller.start(function, data)
        statuses.append(answer.status_code)
        if answer.status_code == 200:
            event = answer.json()["event_id"]
            ended.extend(caller.ends({event}).values())
        for path in (
            f"gradio_api/file={mine.choice([str(secret), '/etc/passwd', '../secret.txt', ''])}",
            f"gradio_api/file={out}/../../secret.txt",
            f"gradio_api/file={out}/page/../../{secret}",
        ):
            reply = caller.http.get(path)
            statuses.append(reply.status_code)
            assert b"secret of" not in reply.content
            assert b"root:" not in reply.content
        if number % 10 == 0:
            name = mine.choice(["../../evil.txt", "/tmp/evil.txt", "a" * 300, "..", "x\0y", ".txt"])
            reply = caller.http.post("gradio_api/upload", files={"files": (name, b"evil")})
            statuses.append(reply.status_code)
            reply = caller.http.post("gradio_api/upload", files={"files": ("b", b"x" * 2**21)})
            statuses.append(reply.status_code)
            assert reply.status_code == 413
        caller.http.close()

    # matplotlib, which gradio asks for, makes its folders when it is first asked for them.
    matplotlib.get_cachedir(), matplotlib.get_configdir()
    calls = form(short=200, long=500)
    numbers = [chance.randrange(10**9) for _ in range(calls)]
    opened.on = True
    try:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(call, numbers))
    finally:
        opened.on = False

    assert len(statuses) > 4 * calls
    assert [status for status in statuses if status >= 500] == []
    # most calls get past the door: a fuzzer that is turned away everywhere finds nothing.
    assert len(ended) > 0.7 * calls
    assert sum(message["success"] for message in ended) > 0.16 * calls
    for message in ended:
        text = json.dumps(message)
        assert "secret of" not in text
        assert "this is a defect" not in text, text
    assert str(secret) not in opened.read
    inside = str(out.resolve())
    outside = {
        path
        for path in opened.written
        if not path.startswith((inside, "/dev/", "/proc/")) and "__pycache__" not in path
    }
    assert outside == set()
    # an upload keeps its name's last part, in a folder of its own among the uploads.
    evil = [path.resolve() for path in tmp_path.parent.rglob("evil*")]
    assert [path for path in evil if not path.is_relative_to(inside)] == []
    assert not Path("/tmp/evil.txt").exists()


def _inputs(caller: Caller, function: int, whole: bool = False) -> list[Any]:
    found = [caller.components[number] for number in caller.functions[function]["inputs"]]
    return found if whole else [each["props"] for each in found]


# ---- bars ----


@timing
@pytest.mark.slow
def test_the_first_page_is_ready_within_eight_seconds(tmp_path: Path) -> None:
    import httpx

    seconds = []
    for _ in range(3):
        port, began = free_port(), time.monotonic()
        command = [sys.executable, "-m", "vidsparse", "ui", "--port", str(port)]
        with subprocess.Popen(
            [*command, "--out", str(tmp_path / "o")], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == f"page: http://127.0.0.1:{port}/\n"
                page = httpx.get(f"http://127.0.0.1:{port}/")
                seconds.append(time.monotonic() - began)
            finally:
                process.terminate()
        assert page.status_code == 200
        assert process.returncode == 0
    print("seconds to the first page:", seconds)
    # other work on the machine is not the page's: the best of three.
    assert min(seconds) <= 8, seconds


@timing
@pytest.mark.slow
def test_a_generation_from_the_page_costs_little_more_than_the_command_line_s(
    tmp_path: Path,
) -> None:
    # the model's own size; fewer steps than a visitor would ask for, so the page weighs more.
    asked: dict[str, Any] = {
        "prompt": "a red ball",
        "steps": 6,
        "frames": 33,
        "width": 256,
        "height": 256,
    }
    with served(("shapes",), tmp_path / "out") as (_, url):
        client = _client(url)
        # the page's own loading comes first: two threads cannot load at once.
        client.predict(api_name="/generate", **asked)
        loaded = load("shapes", device="cpu")

        def by_page() -> float:
            began = time.perf_counter()
            client.predict(api_name="/generate", **asked)
            return time.perf_counter() - began

        def by_command() -> float:
            # what the command does for each prompt once the model is loaded.
            began = time.perf_counter()
            made = generate(loaded, GenerateRequest(model="shapes", **asked))
            write_video(made.frames, tmp_path / "direct.mp4", 16)
            (tmp_path / "direct.json").write_text(json.dumps(made.record), encoding="utf-8")
            return time.perf_counter() - began

        by_page(), by_command()
        shares = []
        for number in range(6):
            # who goes first takes turns: a machine that slows down favours neither.
            pair = (by_page, by_command) if number % 2 else (by_command, by_page)
            seconds = {side: side() for side in pair}
            shares.append(seconds[by_page] / seconds[by_command])
    print(f"page over command: median {statistics.median(shares):.3f} of", sorted(shares))
    assert statistics.median(shares) <= 1.05
