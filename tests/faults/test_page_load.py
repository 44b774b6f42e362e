"""A page of its own process: many clients at once, hours of visits, and kills."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fault_runs import PATIENCE, Commands, chance, form, hidden, until_left_alone

pytest.importorskip("gradio", reason="the page needs the ui extra")

from page_server import Caller, free_port

from vidsparse.pipelines.video import read_video

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

CLIENTS = form(short=16, long=50)
ROUNDS = form(short=3, long=8)
# two hours of somebody coming every twelve seconds.
VISITS = form(short=24, long=600)
KILLS = form(short=2, long=20)
GROWTH = 1.05
IDLE = 10.5
SMALL = {"steps": 2, "frames": 5, "width": 32, "height": 32}


class Page:
    """``vidsparse ui`` in a process of its own.

    Args:
        model: a folder.
        folder: where it runs and what it writes to.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self.out = folder / "o"
        port = free_port()
        self.log = folder / f"log-{port}.txt"
        self.url = f"http://127.0.0.1:{port}/"
        command = ["ui", "--port", str(port), "--model", str(model), "--device", "cpu"]
        command += ["--out", str(self.out), "--max-waiting", "200"]
        self.process, address = Commands(folder).serve(command, folder / "out.txt", self.log)
        assert address == self.url

    def end(self, how: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end; answers the exit status."""
        if self.process.is_alive():
            assert self.process.pid is not None
            os.kill(self.process.pid, how)
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None
        return self.process.exitcode

    def holds(self) -> tuple[int, int, int]:
        """Bytes in memory, open files and threads."""
        proc = Path(f"/proc/{self.process.pid}")
        # of clients that went a moment ago, the server may not have heard yet.
        pages = int((proc / "statm").read_text(encoding="ascii").split()[1])
        files, threads = len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir()))
        return pages * os.sysconf("SC_PAGE_SIZE"), files, threads


@pytest.fixture
def page(tiny_model: Path, tmp_path: Path) -> Iterator[Page]:
    made = Page(tiny_model, tmp_path)
    yield made
    made.end(signal.SIGKILL)


def with_key(page: Page, session: str, key: str | None = None) -> tuple[Caller, str]:
    """A browser's session, and its key."""
    caller = Caller(page.url, session)
    if key is None:
        key = caller.http.get("").headers["set-cookie"].partition(";")[0]
    caller.http.headers["Cookie"] = key
    return caller, key


def video_of(caller: Caller, **changes: Any) -> bytes:
    """A video that is made and fetched."""
    event = caller.ask_for_a_video(**{**SMALL, **changes}).json()["event_id"]
    message = caller.ends({event})[event]
    assert message["success"], message
    (url,) = set(re.findall(r'"url": "([^"]+\.mp4)"', json.dumps(message)))
    answer = caller.http.get(url)
    assert answer.status_code == 200
    return bytes(answer.content)


def visit(page: Page, number: int) -> None:
    """What a visitor does, good and bad."""
    rng = random.Random(number)
    caller, _ = with_key(page, f"visit {number}")
    with closing(caller.http):
        assert caller.http.get("gradio_api/info").status_code == 200
        video_of(caller, seed=number, method=rng.choice(["fg-attn", "spargeattn", "dense"]))
        wrong: dict[str, Any] = rng.choice(
            [{"steps": 0}, {"prompt": ""}, {"method": "magic"}, {"fps": 1e300}]
        )
        event = caller.ask_for_a_video(**{**SMALL, **wrong}).json()["event_id"]
        assert not caller.ends({event})[event]["success"]
        # one that is given up: nobody listens any more.
        caller.ask_for_a_video(**{**SMALL, "steps": 5})
        cancel = caller.function("cancel")
        event = caller.start(cancel, caller.defaults(cancel)).json()["event_id"]
        caller.ends({event})
        answer = caller.http.post("gradio_api/upload", files={"files": ("a.svg", b"<svg/>")})
        assert answer.status_code == 200
        answer = caller.http.get(f"gradio_api/file={answer.json()[0]}")
        assert answer.headers["content-disposition"].startswith("attachment")
        assert caller.http.get("gradio_api/file=/etc/passwd").status_code >= 400


def settled(page: Page) -> tuple[int, int, int]:
    """What the page holds once what its clients left is let go of."""
    # the server's idle threads end when there is work again after this long (anyio's own number).
    time.sleep(IDLE)
    with_key(page, "looks")[0].http.close()
    before = page.holds()
    for _ in range(30):
        time.sleep(1)
        now = page.holds()
        if now[1:] == before[1:]:
            return now
        before = now
    return now


def test_many_clients_at_once_are_all_answered_and_leave_nothing(
    page: Page, record_property: Callable[[str, object], None]
) -> None:
    def client(number: int) -> bytes:
        caller, _ = with_key(page, f"client {number}")
        with closing(caller.http):
            return video_of(caller, seed=number, prompt=f"a red circle {number}")

    held = []
    for turn in range(ROUNDS):
        with ThreadPoolExecutor(CLIENTS) as pool:
            made = list(pool.map(client, range(turn * CLIENTS, (turn + 1) * CLIENTS)))
        # everybody got a video of their own.
        assert len(set(made)) == CLIENTS
        held.append(settled(page))
    record_property("held", held)
    # the first clients bring threads and caches that stay, and in the long form all the sessions
    # that are remembered.
    (memory, files, threads), after = held[ROUNDS // 2], held[-1]
    assert after[0] <= memory * GROWTH, held
    assert after[1] <= files + 2, held
    assert after[2] <= threads + 2, held
    assert "Traceback" not in page.log.read_text(encoding="utf-8")


def test_visit_after_visit_the_page_holds_no_more(
    page: Page, record_property: Callable[[str, object], None]
) -> None:
    third = VISITS // 3
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: visit(page, number), range(third)))
        before = settled(page)
        list(pool.map(lambda number: visit(page, number), range(third, VISITS)))
    after = settled(page)
    record_property("held", [before, after])
    assert after[0] <= before[0] * GROWTH, (before, after)
    assert after[1] <= before[1] + 2, (before, after)
    assert after[2] <= before[2] + 2, (before, after)
    assert "Traceback" not in page.log.read_text(encoding="utf-8")


def until_killed(
    page: Page, keys: list[str | None], fetched: set[bytes], turn: int, rng: random.Random
) -> None:
    """Two visitors who ask for video after video, until the page is killed."""
    ending = threading.Event()

    def ask(place: int) -> None:
        caller, keys[place] = with_key(page, f"{place} of {turn}", keys[place])
        with closing(caller.http):
            for number in range(1000 * turn, 1000 * turn + 500):
                try:
                    fetched.add(video_of(caller, seed=2 * number + place))
                except Exception:
                    if not ending.is_set():
                        raise
                    return

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, place) for place in range(2)]
        before, last = len(fetched), time.monotonic() + PATIENCE
        while len(fetched) == before and time.monotonic() < last:
            time.sleep(0.01)
        last = time.monotonic() + rng.uniform(0, 3)
        while time.monotonic() < last:
            # half of them while a file is written.
            if turn % 2 and next(page.out.rglob(".*.tmp"), None):
                break
            time.sleep(0.002)
        ending.set()
        page.end(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        for each in asking:
            each.result()


def test_a_killed_page_keeps_every_finished_video_and_goes_on(
    tiny_model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    rng = chance("page")
    keys: list[str | None] = [None, None]
    fetched: set[bytes] = set()
    for turn in range(KILLS):
        page = Page(tiny_model, tmp_path)
        try:
            until_killed(page, keys, fetched, turn, rng)
        finally:
            page.end(signal.SIGKILL)
            assert page.process.pid is not None
            until_left_alone(page.process.pid)
    # a page that starts takes what was left alone for so long for what a killed one left.
    for left in page.out.rglob(".*.tmp"):
        os.utime(left, (time.time() - 1000,) * 2)
    page = Page(tiny_model, tmp_path)
    try:
        for place, key in enumerate(keys):
            caller, _ = with_key(page, f"{place} again", key)
            with closing(caller.http):
                fetched.add(video_of(caller, seed=10**6 + place))
    finally:
        assert page.end() == 0
    records = sorted(page.out.rglob("[0-9]*.json"))
    # a video is there with its record, and what a visitor had seen is there.
    for record in records:
        told = json.loads(record.read_text(encoding="utf-8"))
        video = record.with_suffix(".mp4")
        assert video.stat().st_size == told["file"]["bytes"]
        assert len(read_video(video)) == SMALL["frames"]
    kept = {record.with_suffix(".mp4").read_bytes() for record in records}
    assert fetched <= kept
    assert hidden(page.out) == []
    assert len({record.parent for record in records}) == 2
    record_property("kills and videos", (KILLS, len(kept)))
    logs = [log.read_text(encoding="utf-8") for log in tmp_path.glob("log-*.txt")]
    assert len(logs) == KILLS + 1
    assert not any("Traceback" in log for log in logs)
