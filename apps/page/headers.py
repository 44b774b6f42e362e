"""What browsers are told about answers: which files they may show, and what pages may do."""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vidsparse.apps.page.guard import API

# of what the page makes itself: all that is shown under its address.
SHOWN = (".mp4", ".jpg", ".json", ".html")

_FILE = ("file=", "file/")


class FileHeaders:
    """ASGI middleware that lets browsers show what the page made; everything else is a download.

    An uploaded page or drawing that is shown runs its scripts as if they were this page's own.

    Args:
        app: what it stands before.
        folder: where the page puts what it makes.
    """

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self._app = app
        self._folder = folder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, and say of a file's answer how it may be used."""
        name = scope["path"].partition(API)[2] if scope["type"] == "http" else ""
        if not name.startswith(_FILE):
            await self._app(scope, receive, send)
            return
        shown = self._is_shown(name[len("file=") :])

        async def described(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                if not shown:
                    headers["Content-Disposition"] = "attachment"
                    if not _is_media(headers.get("Content-Type", "")):
                        headers["Content-Type"] = "application/octet-stream"
            await send(message)

        await self._app(scope, receive, described)

    def _is_shown(self, path: str) -> bool:
        try:
            real = Path(path).resolve()
        except (OSError, ValueError):
            return False
        return real.suffix in SHOWN and real.is_relative_to(self._folder)


def _is_media(kind: str) -> bool:
    """Whether a page can use it as a picture or video, in which no script runs."""
    return kind.startswith(("video/", "image/")) and "svg" not in kind
