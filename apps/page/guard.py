"""Turns away requests that would make the server fetch or read something for a visitor.

Gradio can load files from addresses that a client names, and pass other servers' answers on. This
page has no use for either: files come by upload, and nothing is loaded from outside.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vidsparse.logs import logger

# a form's values fit many times; files come by multipart upload, which has a limit of its own.
MOST_BODY = 2 * 2**20

API = "/gradio_api/"
_FETCHING = ("file=http:", "file=https:", "file=//", "proxy=")


class Guard:
    """ASGI middleware around the page.

    Args:
        app: what it guards.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403, 413 or 400 where a request is not wanted, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # gradio would make the page's addresses of it, and a caller writes what it likes.
        headers = [pair for pair in scope["headers"] if pair[0] != b"x-forwarded-host"]
        scope = {**scope, "headers": headers}
        path = scope["path"].partition(API)[2].lower()
        if path.startswith(_FETCHING):
            await _refuse(403, "this page loads nothing from other addresses", scope, receive, send)
            return
        if scope["method"] != "POST" or _content_type(scope) != b"application/json":
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            await _refuse(413, "the request is too large", scope, receive, send)
            return
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            await _refuse(400, "the request is not JSON", scope, receive, send)
            return
        if names_address(value):
            await _refuse(400, "files come by upload, not by address", scope, receive, send)
            return
        await self._understood(scope, _replay(body, receive), send)

    async def _understood(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a call; one that Gradio stumbles over before it answers is the caller's fault.

        What a page's own function raises comes as an answer, so only a call that names nothing
        there is, or has no sense, ends here.
        """
        answering = False

        async def watched(message: Message) -> None:
            nonlocal answering
            answering = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if answering:
                raise
            logger.info("a call was not understood: %r", error)
            await _refuse(400, "the request makes no sense here", scope, receive, send)


def names_address(value: Any) -> bool:
    """Whether a JSON value holds a file that lies at an address, or one of too deep a nest."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > 64:
            return True
        if isinstance(item, dict):
            path = item.get("path")
            if isinstance(path, str) and "://" in path:
                return True
            waiting += [(each, depth + 1) for each in item.values()]
        elif isinstance(item, list):
            waiting += [(each, depth + 1) for each in item]
    return False


def _content_type(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name.lower() == b"content-type":
            kind: bytes = value.split(b";")[0].strip().lower()
            return kind
    return b"application/json"


async def _read(receive: Receive) -> bytes | None:
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        body += message.get("body", b"")
        if len(body) > MOST_BODY:
            return None
        if not message.get("more_body", False):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _refuse(status: int, reason: str, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"detail": reason}, status_code=status)(scope, receive, send)
