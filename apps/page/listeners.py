"""Who listens to what the page tells: a job that nobody ever asks after is not worth its time."""

from __future__ import annotations

from collections import OrderedDict
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from vidsparse.apps.page.guard import API

# of sessions and events: far more than visits are remembered.
MOST_HEARD = 10_000


class Listeners:
    """The sessions, and single calls, whose answers somebody has come to hear."""

    def __init__(self) -> None:
        self._came: OrderedDict[str, None] = OrderedDict()

    def come(self, name: str) -> None:
        """Note a listener of a session or of one call."""
        self._came[name] = None
        self._came.move_to_end(name)
        while len(self._came) > MOST_HEARD:
            self._came.popitem(last=False)

    def came(self, *names: str | None) -> bool:
        """Whether somebody listened to any of them. Gradio itself hears when they leave."""
        return any(name in self._came for name in names if name is not None)


class Ears:
    """ASGI middleware that notes who listens.

    Args:
        app: what it stands before.
        listeners: where it notes them.
    """

    def __init__(self, app: ASGIApp, listeners: Listeners) -> None:
        self._app = app
        self._listeners = listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] == "http" and scope["method"] == "GET":
            path = scope["path"].partition(API)[2].rstrip("/")
            if path == "queue/data":
                asked = parse_qs(scope.get("query_string", b"").decode("latin-1"))
                for session in asked.get("session_hash", []):
                    self._listeners.come(session)
            elif path.startswith("call/"):
                self._listeners.come(path.rpartition("/")[2])
        await self._app(scope, receive, send)
