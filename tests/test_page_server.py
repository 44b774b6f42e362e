"""The served page without a browser: what it makes, shows and refuses, and who may ask."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")

from page_server import MOST, TINY, Caller, client_of, record_of, served, video_of

from vidsparse.pipelines.generate import generate
from vidsparse.pipelines.models import load
from vidsparse.pipelines.request import GenerateRequest
from vidsparse.pipelines.video import read_video, write_video


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


# ---- one request for page, command line and tests ----


def test_the_page_makes_the_video_of_the_same_request(
    page: tuple[Any, str], model: str, tmp_path: Path
) -> None:
    _, url = page
    asked: dict[str, Any] = {"prompt": "a red circle", "seed": 5, "method": "spargeattn", **TINY}
    answer = client_of(url).predict(
        api_name="/generate", spargeattn_tau=0.6, dense_steps="1", fps=16, **asked
    )
    request = GenerateRequest(
        model=model, method_options={"tau": 0.6}, dense_steps=1, fps=16, **asked
    )
    direct = generate(load(model, device="cpu"), request)
    record = record_of(answer)
    assert record["options"] == direct.record["options"]
    for name in ("selected", "computed", "density_map", "seed", "prompt"):
        assert record[name] == direct.record[name], name
    write_video(direct.frames, tmp_path / "direct.mp4", 16)
    assert np.array_equal(read_video(video_of(answer)), read_video(tmp_path / "direct.mp4"))


def test_files_of_a_visit_are_the_command_line_s(page: tuple[Any, str], out: Path) -> None:
    _, url = page
    answer = client_of(url).predict("a blue square", api_name="/generate", seed=11, **TINY)
    (record,) = [
        path
        for path in (out / "page").glob("*/*.json")
        # beside what is shown, the file holds the size and hash of its video.
        if record_of(answer).items() <= json.loads(path.read_text(encoding="utf-8")).items()
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
    client = client_of(url)
    answer = client.predict("a red circle", api_name="/generate", seed=5, videos=2, **TINY)
    assert "Your 2 videos are ready" in str(answer)
    assert record_of(answer)["seed"] == 6
    found = desk.visits.of(client.session_hash).gallery.find()
    assert [each.seed for each in found] == [6, 5]
    for wrong in (0, 9, 1.5):
        with pytest.raises(AppError, match="videos must be"):
            client.predict("a", api_name="/generate", videos=wrong, **TINY)


def test_bad_input_is_a_sentence_for_clients_too(page: tuple[Any, str]) -> None:
    from gradio_client.exceptions import AppError

    client = client_of(page[1])
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
        ({"seed": 2**53 - 2, "videos": 3}, "seed can be at most 9,007,199,254,740,991"),
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

    client, path = client_of(page[1]), tmp_path / "p.txt"
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
    monkeypatch.setattr(build, "rewrite_image", lambda path, *_, **__: decoded.append(path))
    Image.new("RGB", (40, 30), "red").save(tmp_path / "first.png")
    with pytest.raises(AppError, match="no model of this page takes such a picture"):
        client_of(page[1]).predict(handle_file(str(tmp_path / "first.png")), api_name=f"/{name}")
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


def test_a_page_comes_in_a_third_of_its_bytes_where_the_browser_can_read_that(
    page: tuple[Any, str],
) -> None:
    import httpx

    sent = {}
    with httpx.Client(base_url=page[1]) as http:
        for encoding in ("gzip, deflate, br", "identity"):
            with http.stream("GET", "", headers={"Accept-Encoding": encoding}) as answer:
                sent[encoding] = b"".join(answer.iter_raw())
            assert int(answer.headers["content-length"]) == len(sent[encoding])
            assert "Accept-Encoding" in answer.headers["vary"]
            zipped = encoding != "identity"
            assert answer.headers.get("content-encoding") == ("gzip" if zipped else None)
    short, plain = sent.values()
    assert 3 * len(short) < len(plain)
    assert b"gradio_config" in plain
    assert gzip.decompress(short) == plain


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


# ---- reports and comparisons ----


def test_a_report_of_two_settings_is_one_page_and_one_zip(page: tuple[Any, str], out: Path) -> None:
    def reports() -> set[Path]:
        return set((out / "page").glob("*/*-report"))

    before = reports()
    answer = client_of(page[1]).predict(
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
        client_of(page[1]).predict(
            api_name="/report", prompt_lines="a red circle", vary="nothing", over="0.3", **TINY
        )
    with pytest.raises(AppError, match="no values for top_p"):
        client_of(page[1]).predict(
            api_name="/report", prompt_lines="a red circle", vary="top_p", over=" ", **TINY
        )


def test_a_cell_is_recorded_when_asked_for(page: tuple[Any, str]) -> None:
    from gradio_client.exceptions import AppError

    client = client_of(page[1])
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
    with pytest.raises(AppError, match="comparison that is shown here was too long ago"):
        client.predict(2, 2, "0000-gone", api_name="/record_cell")


# ---- many clients ----


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


def _messages(caller: Caller) -> Iterator[dict[str, Any]]:
    """What the page's server says to one session until it ends the connection."""
    with caller.http.stream(
        "GET", "gradio_api/queue/data", params={"session_hash": caller.session}, timeout=8
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                yield json.loads(line[5:])


def test_a_connection_that_has_no_answer_left_to_bring_is_let_go(
    page: tuple[Any, str],
) -> None:
    # a browser makes six to one host, for all of its windows together.
    caller = Caller(page[1], "owed nothing")
    event = caller.ask_for_a_video().json()["event_id"]
    caller.ends({event})
    said = [message["msg"] for message in _messages(caller)]
    assert said == ["process_completed", "close_stream"]


def test_a_connection_stays_for_a_call_that_begins_while_nothing_is_owed(
    page: tuple[Any, str],
) -> None:
    from vidsparse.apps.page.queue import Job

    desk, url = page
    caller = Caller(url, "owed late")
    caller.ends({caller.ask_for_a_video().json()["event_id"]})
    gate = threading.Event()
    desk.queue.submit(Job(lambda bench, job: gate.wait(60)))
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(lambda: list(_messages(caller)))
        time.sleep(0.4)
        event = caller.ask_for_a_video().json()["event_id"]
        time.sleep(2.5)
        gate.set()
        completed = [each for each in heard.result() if each["msg"] == "process_completed"]
    assert [each["event_id"] for each in completed] == [event]
    assert completed[0]["success"]


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
