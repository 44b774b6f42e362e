"""A page with a tiny model, served from this process, and ways to talk to it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urljoin

import httpx

from vidsparse.apps.page.host import Limits
from vidsparse.apps.page.start import load_first, make_desk, require_gradio

# a video that takes a moment.
TINY: dict[str, Any] = {"steps": 4, "frames": 9, "width": 64, "height": 64}
# what one visitor may ask of a page with a tiny model.
MOST: dict[str, Any] = {"steps": 6, "frames": 17, "side": 96, "prompts": 2, "settings": 2}


@contextmanager
def served(
    models: tuple[str, ...],
    out: Path,
    presets: tuple[str, ...] = (),
    *,
    serving: Mapping[str, Any] = MappingProxyType({}),
    **limits: int,
) -> Iterator[tuple[Any, str]]:
    """The desk of a page that runs while the block does, and its address."""
    require_gradio()
    desk = make_desk(models, ("cpu",), None, out, Limits(**limits), presets)
    from vidsparse.apps.page.build import serve

    page = serve(desk, port=free_port(), **serving)
    try:
        load_first(desk)
        yield desk, page.url
    finally:
        desk.queue.close()
        page.close()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Caller:
    """One session with the page, speaking what its own script speaks."""

    def __init__(self, url: str, session: str) -> None:
        self.session = session
        # no certificate is looked at, and to read those of this machine takes longer than a call.
        self.http = httpx.Client(base_url=url, timeout=120, verify=False)
        config = self.http.get("config").json()
        self.functions = {fn["id"]: fn for fn in config["dependencies"]}
        self.components = {each["id"]: each for each in config["components"]}
        self._named = {fn["api_name"]: fn["id"] for fn in self.functions.values()}

    def start(self, function: int, data: list[Any]) -> Any:
        """Put a call into Gradio's queue; answers the response."""
        body = {"data": data, "fn_index": function, "session_hash": self.session}
        # escaped, as a half of a character can be sent in no other way.
        return self.http.post(
            "gradio_api/queue/join",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )

    def ends(self, wanted: set[str]) -> dict[str, dict[str, Any]]:
        """Listen until the calls of these events are over; answers their last messages."""
        found: dict[str, dict[str, Any]] = {}
        ask = {"session_hash": self.session}
        with self.http.stream("GET", "gradio_api/queue/data", params=ask) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                message = json.loads(line[5:])
                if message["msg"] == "process_completed":
                    found[message["event_id"]] = message
                if not wanted - set(found):
                    return found
        raise AssertionError(f"the stream ended without {wanted - set(found)}")

    def defaults(self, function: int) -> list[Any]:
        """What the page would send with nothing changed."""
        return [
            self.components[number]["props"].get("value")
            for number in self.functions[function]["inputs"]
        ]

    def parameters(self, name: str) -> list[dict[str, Any]]:
        """What a function of the interface takes, in order."""
        found = self.http.get("gradio_api/info").json()["named_endpoints"][name]["parameters"]
        return list(found)

    def ask_for_a_video(self, **changes: Any) -> Any:
        """Put a small video into the queue; answers the response."""
        function = self.function("generate")
        names = [each["parameter_name"] for each in self.parameters("/generate")]
        data = dict(zip(names, self.defaults(function), strict=True))
        data |= {"prompt": "a red circle", **TINY, **changes}
        return self.start(function, list(data.values()))

    def function(self, name: str) -> int:
        """The number of a function by the name it has in the interface."""
        number: int = self._named[name]
        return number


def client_of(url: str) -> Any:
    """Gradio's own client of the page."""
    from gradio_client import Client

    # its own patience is five seconds, in which a busy machine may answer nothing.
    patience = {"timeout": 120}
    return Client(url, verbose=False, download_files=False, httpx_kwargs=patience)


def record_of(answer: Any) -> dict[str, Any]:
    """The record among a generation's answers."""
    (record,) = [each for each in answer if isinstance(each, dict) and "versions" in each]
    return record


def video_of(answer: Any) -> Path:
    """The video among a generation's answers."""
    values = [each.get("value", each) for each in answer if isinstance(each, dict)]
    (path,) = re.findall(r"'path': '([^']+\.mp4)'", str(values))
    return Path(path)


def address(url: str, path: str) -> str:
    """A file of the page's, as it names it."""
    return urljoin(url, path)
