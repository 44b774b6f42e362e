"""Who is there, and connections to them that have nothing left to bring.

A job that nobody ever asks after is not worth its time, nor is one of who left.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import parse_qs

from gradio.server_messages import ProcessCompletedMessage
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vidsparse.apps.page.guard import API

# of sessions and events: far more than visits are remembered.
MOST_HEARD = 10_000

# where Gradio brings the answers of a session's calls.
ANSWERS = "queue/data"

# seconds in which nothing may be owed to a connection before it is let go.
OWED_NOTHING = 1.0


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
        path = _asked(scope)
        if path == ANSWERS:
            for session in _sessions(scope):
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


class LettingGo:
    """ASGI middleware that ends the connections of answers that have nothing left to bring.

    Gradio's page opens one when it learns of a call whose answer an earlier connection may have
    brought already. Gradio ends a connection with the last answer that it owes, so that such a one
    stays open, one or more for each window, and a browser makes no more than six to one host: with
    three or four windows open none of them hears anything any more.

    Args:
        app: what it stands before.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        watches = []
        if _asked(scope) == ANSWERS:
            queue = scope["app"].get_blocks()._queue
            watches = [asyncio.create_task(_let_go(queue, each)) for each in _sessions(scope)]
        try:
            await self._app(scope, receive, send)
        finally:
            for watch in watches:
                watch.cancel()


async def _let_go(queue: Any, session: str) -> None:
    """Owe a connection one last answer, of no call, once it has been owed none for a while."""
    owed_nothing = 0
    while owed_nothing < 2:
        await asyncio.sleep(OWED_NOTHING / 2)
        owed_nothing = 0 if queue.pending_event_ids_session.get(session) else owed_nothing + 1
    messages = queue.pending_messages_per_session.get(session)
    if messages is not None:
        # as Gradio does it itself, which does not end it where a call has begun meanwhile.
        name = secrets.token_hex(16)
        queue.pending_event_ids_session.setdefault(session, set()).add(name)
        messages.put_nowait(ProcessCompletedMessage(event_id=name, output={}, success=True))


def _asked(scope: Scope) -> str:
    """What of Gradio's interface a call reads; empty where it reads nothing there."""
    if scope["type"] != "http" or scope["method"] != "GET":
        return ""
    return str(scope["path"]).partition(API)[2].rstrip("/")


def _sessions(scope: Scope) -> list[str]:
    """The sessions whose answers a call asks for."""
    return parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_hash", [])
