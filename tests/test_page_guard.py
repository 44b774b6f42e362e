"""What the page's guard turns away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest


def _ask(
    path: str, body: bytes | None = None, kind: bytes = b"application/json"
) -> tuple[int, list[bytes]]:
    pytest.importorskip("starlette")
    from vidsparse.apps.page.guard import Guard

    reached: list[bytes] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        reached.append(message.get("body", b""))
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
        "headers": [(b"content-type", kind)],
    }
    asyncio.run(Guard(inner)(scope, receive, send))
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
