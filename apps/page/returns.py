"""Who comes back: a browser keeps a key to what it has made, and shows it with every call."""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vidsparse.apps.page.guard import API

# seconds that a browser keeps its key after the page was last opened.
KEPT_FOR = 180 * 24 * 3600

_KEY = re.compile(r"[A-Za-z0-9_-]{43}")


def cookie_name(folder: Path) -> str:
    """The name of a page's cookie: browsers do not tell apart the ports of one machine."""
    return f"vidsparse-{sha256(str(folder).encode()).hexdigest()[:12]}"


def key_in(cookies: str, name: str) -> str | None:
    """The key that a browser shows in its header of cookies, None where it has none."""
    # as browsers write it, split by hand: a host's cookies are those of all that it serves, and
    # Python's own reader gives up at the first one that it cannot read.
    pairs = (each.strip().partition("=") for each in cookies.split(";"))
    keys = [value for own, _, value in pairs if own == name and _KEY.fullmatch(value)]
    # ours is for all paths, and browsers send those for longer ones first.
    return keys[-1] if keys else None


class Returns:
    """ASGI middleware that gives every browser a key, which no script can read.

    Args:
        app: what it stands before.
        name: of the cookie.
    """

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app = app
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on; the page itself comes with a key, the browser's own or a new one."""
        if scope["type"] != "http" or scope["method"] != "GET" or API in scope["path"]:
            await self._app(scope, receive, send)
            return
        key = key_in(Headers(scope=scope).get("cookie", ""), self._name) or secrets.token_urlsafe()
        # lax, not strict: whoever follows a link to the page shall find what is theirs.
        cookie = f"{self._name}={key}; Max-Age={KEPT_FOR}; Path=/; HttpOnly; SameSite=Lax"
        if scope["scheme"] == "https":
            cookie += "; Secure"

        async def keyed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("Content-Type", "").startswith("text/html"):
                    headers.append("Set-Cookie", cookie)
            await send(message)

        await self._app(scope, receive, keyed)
