"""Who is there: a job that nobody ever asks after is not worth its time, nor is one of who left."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from urllib.parse import parse_qs

from starlette.datastructures import Headers
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
    """ASGI middleware that notes who listens, and which windows are open.

    Args:
        app: what it stands before.
        listeners: where it notes them.
        window: entered with its session and its browser's cookies while a window is open.
    """

    def __init__(
        self,
        app: ASGIApp,
        listeners: Listeners,
        window: Callable[[str, str], AbstractContextManager[None]],
    ) -> None:
        self._app = app
        self._listeners = listeners
        self._window = window

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
            elif path.startswith("heartbeat/"):
                # gradio's page holds this call for as long as it is open.
                session, cookies = path.rpartition("/")[2], Headers(scope=scope).get("cookie", "")
                with self._window(session, cookies):
                    await self._app(scope, receive, send)
                return
        await self._app(scope, receive, send)
