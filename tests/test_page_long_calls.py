"""The served page at length: whole reports, many clients at once, and calls that nobody meant."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from fault_runs import form

pytest.importorskip("gradio", reason="the page needs the ui extra")

from page_server import MOST, TINY, Caller, client_of, record_of, served, video_of


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "out"


@pytest.fixture(scope="module")
def page(tiny_model: Path, out: Path) -> Iterator[tuple[Any, str]]:
    with served((str(tiny_model),), out, waiting=40, upload=1, **MOST) as running:
        yield running


@pytest.mark.slow
def test_a_report_is_the_command_line_s(page: tuple[Any, str], out: Path) -> None:
    answer = client_of(page[1]).predict(
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


@pytest.mark.slow
def test_twenty_requests_of_four_clients_all_end_and_none_is_mixed_up(
    page: tuple[Any, str],
) -> None:
    _, url = page
    colours = ("red", "blue")
    seen: dict[int, Any] = {}

    def visitor(number: int) -> None:
        client = client_of(url)
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
        record = record_of(answer)
        assert (record["seed"], record["prompt"]) == (seed, f"a {colours[seed % 2]} circle")
        videos.add(video_of(answer).read_bytes())
    # every seed has a video of its own.
    assert len(videos) == sum("Cancelled" not in str(answer) for answer in seen.values())
    assert len(videos) >= 16


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


def test_a_call_of_what_only_browsers_do_is_one_line_in_the_log(
    page: tuple[Any, str], caplog: Any, capfd: Any
) -> None:
    caller = Caller(page[1], "asks a browser")
    function = next(number for number, fn in caller.functions.items() if not fn["backend_fn"])
    with caplog.at_level("INFO", "vidsparse"):
        event = caller.start(function, caller.defaults(function)).json()["event_id"]
        answer = caller.ends({event})[event]
    assert not answer["success"]
    assert "runs in its browser" in answer["output"]["error"]
    # the model may load meanwhile, which is told as well.
    told = [record.getMessage() for record in caplog.records if record.name == "vidsparse"]
    assert len([line for line in told if "refused" in line]) == 1
    assert "Traceback" not in capfd.readouterr().err


def _inputs(caller: Caller, function: int, whole: bool = False) -> list[Any]:
    found = [caller.components[number] for number in caller.functions[function]["inputs"]]
    return found if whole else [each["props"] for each in found]


def test_a_window_whose_session_gave_way_to_others_is_told_to_reload(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vidsparse.apps.page import build

    monkeypatch.setattr(build, "MOST_SESSIONS", 2)
    with served((str(tiny_model),), tmp_path / "out", **MOST) as (_, url):
        window = Caller(url, "window")
        window.ends({window.ask_for_a_video().json()["event_id"]})
        compare = window.functions[window.function("compare")]
        # gradio's own name of the video, as the window offers it once it has asked.
        (offer,) = {
            fn["id"]
            for fn in window.functions.values()
            if fn["inputs"] == fn["outputs"] == compare["inputs"][-2:]
            and fn["trigger_after"] is not None
        }
        window.ends({window.start(offer, ["dense", "form"]).json()["event_id"]})
        names = [each["parameter_name"] for each in window.parameters("/compare")]
        data = dict(zip(names, window.defaults(compare["id"]), strict=True))
        data |= {"prompt": "a red circle", **TINY, "side_a": "0001-a-red-circle", "side_b": "form"}

        def asked() -> dict[str, Any]:
            event = window.start(compare["id"], list(data.values())).json()["event_id"]
            (message,) = window.ends({event}).values()
            return message

        assert asked()["success"]
        for number in range(2):
            other = Caller(url, f"other {number}")
            other.ends({other.start(offer, ["dense", "form"]).json()["event_id"]})
        message = asked()
        assert not message["success"]
        assert message["output"]["error"] == (
            "'0001-a-red-circle' is none of the choices that this page knows of this window. "
            "Hint: reload the page; your videos, settings and jobs are kept."
        )
        # the page as it is loaded again offers it.
        window.ends({window.start(offer, ["dense", "form"]).json()["event_id"]})
        assert asked()["success"]
