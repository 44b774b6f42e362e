"""What the page's guard turns away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest


def _ask(
    path: str,
    body: bytes | None = None,
    kind: bytes = b"application/json",
    guard: Any = None,
    **headers: str,
) -> tuple[int, list[bytes]]:
    pytest.importorskip("starlette")
    from vidsparse.apps.page.guard import Guard

    guard = guard or Guard
    reached: list[bytes] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        received, more = b"", True
        while more:
            message = await receive()
            received += message.get("body", b"")
            more = message.get("more_body", False)
        reached.append(received)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent: list[dict[str, Any]] = []
    # in two pieces, as servers deliver them.
    whole = body or b""
    pieces = [
        {"type": "http.request", "body": whole[: len(whole) // 2], "more_body": True},
        {"type": "http.request", "body": whole[len(whole) // 2 :], "more_body": False},
    ]

    async def receive() -> dict[str, Any]:
        return pieces.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "headers": [
            (b"content-type", kind),
            *((name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()),
        ],
        "client": ("203.0.113.7", 1),
    }
    asyncio.run(guard(inner, upload=1, hosts=["named.example"])(scope, receive, send))
    return sent[0]["status"], reached


def test_the_guard_passes_on_what_is_fine_unchanged() -> None:
    body = json.dumps({"data": ["see https://example.org", {"path": "/tmp/x.png"}]}).encode()
    assert _ask("/gradio_api/queue/join", body) == (200, [body])
    assert _ask("/gradio_api/file=/tmp/x.mp4")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=http://example.org/x",
        "/gradio_api/file=HTTPS://example.org/x",
        "/sub/gradio_api/proxy=https://example.hf.space/x",
    ],
)
def test_the_guard_lets_nobody_fetch_through_the_server(path: str) -> None:
    assert _ask(path) == (403, [])


def test_the_guard_takes_no_file_by_its_address() -> None:
    file = {"path": "http://example.org/x.png", "meta": {"_type": "gradio.FileData"}}
    for value in ({"data": [file]}, {"data": [[{"a": file}]]}):
        assert _ask("/gradio_api/queue/join", json.dumps(value).encode()) == (400, [])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[" * 200 + b"]" * 200, 400),
        (b"[" * 100_000, 400),
        (b'"' + b"a" * (3 * 2**20) + b'"', 413),
    ],
)
def test_the_guard_turns_away_what_is_no_request(body: bytes, status: int) -> None:
    assert _ask("/gradio_api/queue/join", body) == (status, [])


@pytest.mark.parametrize(
    "kind",
    [b"application/problem+json", b"application/json;x=1", b"Application/JSON", b"text/plain", b"",
     b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x"],
)  # fmt: skip
def test_no_type_of_body_goes_past_the_guard(kind: bytes) -> None:
    file = {"path": "http://example.org/x.png", "meta": {"_type": "gradio.FileData"}}
    for body in (json.dumps({"data": [file]}).encode(), b'"' + b"a" * (3 * 2**20) + b'"'):
        status, reached = _ask("/gradio_api/queue/join", body, kind)
        assert status in (400, 413, 415)
        assert reached == []
        status, reached = _ask("/login", b"a" * (3 * 2**20), kind)
        assert (status, reached) == (413, [])


HERE = "127.0.0.1:7860"
FOREIGN: tuple[dict[str, Any], ...] = (
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
    {"origin": "https://evil.example", "host": HERE},
    {"origin": "http://127.0.0.1:3000", "host": HERE},
    {"origin": "null", "host": HERE},
    {"origin": "http://[::1", "host": HERE},
)


@pytest.mark.parametrize("said", FOREIGN)
def test_other_sites_pages_make_no_calls(said: dict[str, Any]) -> None:
    assert _ask("/gradio_api/queue/join", b"{}", **said) == (403, [])
    assert _ask("/gradio_api/upload", b"x", b"multipart/form-data; boundary=x", **said) == (403, [])
    assert _ask("/login", b"x", b"application/x-www-form-urlencoded", **said) == (403, [])
    assert _ask("/gradio_api/heartbeat/x", **said) == (403, [])
    assert _ask("/config", **said, sec_fetch_mode="cors") == (403, [])
    assert _ask("/config", **said, sec_fetch_mode="no-cors") == (403, [])


def test_a_link_to_the_page_is_followed() -> None:
    said: dict[str, Any] = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert _ask("/", None, **said) == (200, [b""])
    assert _ask("/gradio_api/heartbeat/x", None, **said) == (403, [])


@pytest.mark.parametrize(
    "said",
    [
        {"sec_fetch_site": "same-origin", "origin": f"http://{HERE}", "host": HERE},
        {"sec_fetch_site": "none"},
        {"origin": "https://Box.example", "host": "box.example"},
        {"origin": "https://named.example", "host": HERE},
        {},
    ],
)  # fmt: skip
def test_the_page_s_own_calls_are_answered(said: dict[str, Any]) -> None:
    assert _ask("/gradio_api/queue/join", b"{}", **said) == (200, [b"{}"])


def _parts(count: int, size: int = 10) -> bytes:
    part = b"--mark\r\nContent-Disposition: form-data; name=files; filename=a\r\n\r\n"
    return (part + b"x" * size + b"\r\n") * count + b"--mark--\r\n"


def _hand_in(body: bytes, length: str | None = None, **more: Any) -> tuple[int, list[bytes]]:
    said: dict[str, Any] = {} if length == "" else {"content_length": length or str(len(body))}
    return _ask("/gradio_api/upload", body, b"multipart/form-data; boundary=mark", **said, **more)


def test_an_upload_has_a_length_a_limit_and_few_files() -> None:
    from starlette.formparsers import MultiPartException

    fine = _parts(1, 2**19)
    assert _hand_in(fine) == (200, [fine])
    assert _hand_in(fine, "") == (411, [])
    assert _hand_in(fine, "-1") == (411, [])
    assert _hand_in(fine, "9" * 400) == (413, [])
    assert _hand_in(_parts(1, 2**21)) == (413, [])
    assert _ask("/gradio_api/upload", b"x", b"text/plain", content_length="1") == (415, [])
    # gradio answers this one itself, and removes what it has written.
    with pytest.raises(MultiPartException, match="maximum allowed size"):
        _hand_in(_parts(60))


def test_visitors_fill_no_disk_with_uploads(monkeypatch: Any) -> None:
    from vidsparse.apps.page import uploads

    now = [0.0]
    monkeypatch.setattr(uploads.time, "monotonic", lambda: now[0])
    allowance = uploads.Allowance(each=3 * 2**20, together=5 * 2**20)
    assert [allowance.take("one", 2**20) for _ in range(4)] == [True, True, True, False]
    assert [allowance.take("two", 2**20) for _ in range(3)] == [True, True, False]
    # by then the first are deleted.
    now[0] = uploads.CLEAN_AFTER + 1
    assert allowance.take("one", 2**20)
    # empty files are files.
    assert sum(allowance.take("three", 0) for _ in range(1000)) == 48
