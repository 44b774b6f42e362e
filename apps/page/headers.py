"""What browsers are told about answers: which files they may show, and what pages may do."""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vidsparse.apps.page.guard import API

# of what the page makes itself: all that is shown under its address.
SHOWN = (".mp4", ".jpg", ".json", ".html")

_FILE = ("file=", "file/")


_EVERYWHERE = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # not no-referrer: browsers then hide the Origin of some calls, and the guard refuses those.
    "Referrer-Policy": "same-origin",
}


def page_policy(outside: str = "") -> str:
    """What the page may load and do: nothing of other places, in no frame.

    Gradio's page holds its settings in scripts of its own, makes functions of texts and styles its
    parts one by one, so none of this can be told from markup that was slipped in; what such markup
    finds it cannot send anywhere.

    Args:
        outside: the one place from which scripts, styles and fonts may come as well.
    """
    own = f"'self' {outside}".rstrip()
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {own} 'unsafe-inline' 'unsafe-eval'",
            f"style-src {own} 'unsafe-inline'",
            f"font-src {own} data:",
            f"img-src {own} data: blob:",
            "media-src 'self' data: blob:",
            f"connect-src {own} data: blob:",
            "worker-src 'self' blob:",
            "manifest-src 'self'",
            "base-uri 'self'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )


# a report holds all that it needs; shown, it is a place of its own that cannot ask the page's.
FILE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "media-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; sandbox allow-scripts"
)


class PageHeaders:
    """ASGI middleware that says of every answer how browsers may use it.

    They show what the page made; every other file is a download. An uploaded page or drawing that
    is shown runs its scripts as if they were this page's own.

    Args:
        app: what it stands before.
        folder: where the page puts what it makes.
        outside: the one place from which the page's own scripts may come as well.
    """

    def __init__(self, app: ASGIApp, folder: Path, outside: str = "") -> None:
        self._app = app
        self._folder = folder
        self._policy = page_policy(outside)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, and say of its answer how it may be used."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = scope["path"].partition(API)[2]
        is_file = name.startswith(_FILE)
        shown = not is_file or self._is_shown(name[len("file=") :])

        async def described(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_EVERYWHERE)
                headers["Content-Security-Policy"] = FILE_POLICY if is_file else self._policy
                if not shown and message["status"] < 400:
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
