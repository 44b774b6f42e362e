"""Logins: wrong passwords are answered ever later."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vidsparse.apps.page.guard import visitor_of

# seconds before the first wrong password is answered; twice as long for each one after it.
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 8.0

# tries of one visitor that may wait for an answer, and visitors whose tries are remembered.
MOST_WAITING = 5
MOST_VISITORS = 1000


class _Tries:
    def __init__(self) -> None:
        self.wrong = self.waiting = 0
        # one answer at a time, or many tries at once would wait no longer than one.
        self.turn = asyncio.Lock()


class SlowLogins:
    """ASGI middleware before the login.

    Args:
        app: what it stands before.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._tries: OrderedDict[str, _Tries] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, and keep the answer to a wrong password back for a while."""
        is_login = scope["type"] == "http" and scope["path"].rstrip("/").endswith("/login")
        if not is_login or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        tries = self._of(visitor_of(scope))
        if tries.waiting >= MOST_WAITING:
            refusal = JSONResponse({"detail": "too many tries. Try again later."}, status_code=429)
            await refusal(scope, receive, send)
            return

        async def later(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] >= 400:
                    pause = min(FIRST_PAUSE * 2**tries.wrong, LONGEST_PAUSE)
                    # what is counted from here on would pause no longer.
                    tries.wrong = min(tries.wrong + 1, 10)
                    await asyncio.sleep(pause)
                else:
                    tries.wrong = 0
            await send(message)

        tries.waiting += 1
        try:
            async with tries.turn:
                await self._app(scope, receive, later)
        finally:
            tries.waiting -= 1

    def _of(self, visitor: str) -> _Tries:
        tries = self._tries.setdefault(visitor, _Tries())
        self._tries.move_to_end(visitor)
        while len(self._tries) > MOST_VISITORS:
            self._tries.popitem(last=False)
        return tries
