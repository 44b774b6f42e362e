"""Logins of the page: wrong passwords slow down whoever tries them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")

from vidsparse.apps.page import logins


class _Door:
    """A login that knows one password, and the pauses before its answers."""

    def __init__(self, monkeypatch: Any) -> None:
        self.pauses: list[float] = []
        self.tried: list[bytes] = []
        really = asyncio.sleep

        async def pause(seconds: float) -> None:
            self.pauses.append(seconds)
            await really(0)

        monkeypatch.setattr(logins.asyncio, "sleep", pause)
        self.slow = logins.SlowLogins(self._login)

    async def _login(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        self.tried.append(body)
        await send(
            {
                "type": "http.response.start",
                "status": 200 if body == b"right" else 400,
                "headers": [],
            }
        )
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, password: bytes, address: str = "203.0.113.7", path: str = "/login") -> int:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": password, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "client": (address, 1)}
        await self.slow(scope, receive, send)
        status: int = sent[0]["status"]
        return status


def test_every_wrong_password_is_answered_later_than_the_one_before(monkeypatch: Any) -> None:
    door = _Door(monkeypatch)

    async def try_them() -> None:
        for _ in range(7):
            assert await door.ask(b"wrong") == 400
        assert door.pauses == [0.5, 1, 2, 4, 8, 8, 8]
        assert await door.ask(b"right") == 200
        # who knows it starts anew, and others were never slowed down.
        assert await door.ask(b"wrong") == 400
        assert await door.ask(b"wrong", "203.0.113.8") == 400
        assert door.pauses[7:] == [0.5, 0.5]
        # one line has many addresses in IPv6.
        assert await door.ask(b"wrong", "2001:db8::1") == 400
        assert await door.ask(b"wrong", "2001:db8::2", "/login/") == 400
        assert door.pauses[9:] == [0.5, 1]

    asyncio.run(try_them())


def test_many_tries_at_once_are_answered_one_after_the_other(monkeypatch: Any) -> None:
    door = _Door(monkeypatch)

    async def try_them() -> list[int]:
        return await asyncio.gather(*(door.ask(b"wrong") for _ in range(50)))

    statuses = asyncio.run(try_them())
    assert statuses.count(429) == 50 - logins.MOST_WAITING
    assert len(door.tried) == logins.MOST_WAITING
    assert door.pauses == [0.5, 1, 2, 4, 8]
