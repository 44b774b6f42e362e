"""Turns away requests that the page's own script would not make.

Gradio can load files from addresses that a client names, and pass other servers' answers on. This
page has no use for either: files come by upload, and nothing is loaded from outside. Nor has it for
calls that other sites' pages make with a visitor's browser, or for uploads without end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from ipaddress import IPv6Address, IPv6Network
from typing import Any
from urllib.parse import urlsplit

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vidsparse.apps.page.uploads import Allowance
from vidsparse.logs import logger

# a form's values fit many times; files come by multipart upload, which has a limit of its own.
MOST_BODY = 2 * 2**20

# files and fields of one upload; the page sends one file at a time.
MOST_PARTS = 4

# largest uploads that one visitor, and all together, may hand in before the first are forgotten.
VISITORS_UPLOADS = 20
ALL_UPLOADS = 100

API = "/gradio_api/"
_FETCHING = ("file=http:", "file=https:", "file=//", "proxy=")


class Guard:
    """ASGI middleware around the page.

    Args:
        app: what it guards.
        upload: megabytes of an uploaded file.
        hosts: names, beside the one that a call asks for, whose pages may call.
    """

    def __init__(self, app: ASGIApp, upload: int, hosts: Sequence[str] = ()) -> None:
        self._app = app
        # what stands around a file in a request is little.
        self._most_upload = upload * 2**20 + 2**16
        self._allowance = Allowance(
            each=VISITORS_UPLOADS * upload * 2**20, together=ALL_UPLOADS * upload * 2**20
        )
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a status from 400 on where a request is not wanted, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # gradio would make the page's addresses of it, and a caller writes what it likes.
        fields = [pair for pair in scope["headers"] if pair[0] != b"x-forwarded-host"]
        scope = {**scope, "headers": fields}
        try:
            await self._look(scope, Headers(scope=scope), receive, send)
        except HTTPException as error:
            # a server that answers before it has read everything closes the connection.
            answer = JSONResponse({"detail": error.detail}, status_code=error.status_code)
            await answer(scope, receive, send)

    async def _look(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Pass on what is wanted.

        Raises:
            HTTPException: it is not.
        """
        path = scope["path"].partition(API)[2].lower()
        if path.startswith(_FETCHING):
            raise HTTPException(403, "this page loads nothing from other addresses")
        reads = scope["method"] in ("GET", "HEAD", "OPTIONS")
        # whoever follows a link to the page comes from another site as well, and brings no Origin.
        linked = reads and not path and "origin" not in headers
        linked = linked and headers.get("sec-fetch-mode", "navigate") == "navigate"
        if not linked and self._is_foreign(headers):
            raise HTTPException(403, "another site's page has no business here")
        if reads:
            await self._app(scope, receive, send)
        elif path.rstrip("/") == "upload":
            await self._app(scope, self._upload(scope, headers, receive), send)
        else:
            body = await _read(receive)
            if scope["path"].rstrip("/").endswith("/login"):
                _require(headers, "application/x-www-form-urlencoded", "multipart/form-data")
            elif body:
                _require(headers, "application/json")
                _check_json(body)
            await self._understood(scope, _replay(body, receive), send)

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether a browser says that another site's page sends this."""
        if headers.get("sec-fetch-site", "none").lower() not in ("same-origin", "none"):
            return True
        origin = headers.get("origin")
        if origin is None:
            return False
        try:
            place = urlsplit(origin.lower())
            named = place.hostname in self._hosts
        except ValueError:
            return True
        # a proxy may ask under a name of its own, which is why the host may name its own.
        return not named and place.netloc != headers.get("host", "").lower()

    def _upload(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """The same call, if its sender may hand in so much; what comes in more files ends it.

        Raises:
            HTTPException: the sender may not.
        """
        _require(headers, "multipart/form-data")
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            raise HTTPException(411, "an upload must say how long it is")
        if len(length) > 15 or int(length) > self._most_upload:
            raise HTTPException(413, "the upload is too large")
        # every part has a line in front, and one ends them all.
        _, options = parse_options_header(headers["content-type"])
        mark = b"--" + options.get(b"boundary", b"")
        if len(mark) == 2:
            raise HTTPException(400, "the upload has no boundary")
        if not self._allowance.take(visitor_of(scope), int(length)):
            raise HTTPException(
                429, "as much was uploaded as this page takes for some hours. Try again later."
            )
        marks, tail = 0, b""

        async def counted() -> Message:
            nonlocal marks, tail
            message = await receive()
            if message["type"] == "http.request":
                text = tail + message.get("body", b"")
                marks += text.count(mark)
                tail = text[max(0, len(text) - len(mark) + 1) :]
                if marks > MOST_PARTS + 1:
                    # gradio's own way to say no: it removes what it has written so far.
                    raise MultiPartException("the files are over the maximum allowed size of one")
            return message

        return counted

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
            raise HTTPException(400, "the request makes no sense here") from None


def visitor_of(scope: Scope) -> str:
    """Where a call comes from: the address, or the network that one line is given in IPv6."""
    host: str = (scope.get("client") or ("",))[0]
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    return str(IPv6Network((address, 64), strict=False))


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


def _require(headers: Headers, *kinds: str) -> None:
    """Refuse a body of another kind.

    Raises:
        HTTPException: it is, and a browser may send some of those for any site's page unasked.
    """
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind not in kinds:
        raise HTTPException(415, f"send {' or '.join(kinds)}")


def _check_json(body: bytes) -> None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is not JSON") from None
    if names_address(value):
        raise HTTPException(400, "files come by upload, not by address")


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MOST_BODY:
            raise HTTPException(413, "the request is too large")
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
