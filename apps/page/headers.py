"""What browsers are told about answers: which files they may show, and what pages may do.

Pages are sent compressed, which Gradio does with its files alone.
"""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vidsparse.apps.page.guard import API

# of what the page makes itself: all that is shown under its address.
SHOWN = (".mp4", ".jpg", ".json", ".html")

_FILE = ("file=", "file/")

# a page is a fifth of its length then, after a hundredth of a second; more effort saves little.
_LEVEL = 5


_EVERYWHERE = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # not no-referrer: browsers then hide the Origin of some calls, and the guard refuses those.
    "Referrer-Policy": "same-origin",
}


def page_policy(scripts: Iterable[str] = (), outside: str = "") -> str:
    """The content security policy of the page: nothing of other places, in no frame.

    What Gradio needs beyond files of the page's own:

    - scripts that stand in its page: its settings and some short ones. Each is allowed by its
      hash, so that scripts and event handlers in markup that slipped in do not run.
    - ``unsafe-eval``: it makes functions of the JavaScript texts that components bring
      (``new AsyncFunction``), and does not start without.
    - inline styles: its components write ``style`` attributes and insert ``<style>`` elements
      whose text depends on the theme and on the content.
    - ``data:`` and ``blob:`` for icons and previews that it makes itself.

    Args:
        scripts: texts of the scripts that may stand in the page.
        outside: the one place from which scripts, styles and fonts may come as well.
    """
    own = f"'self' {outside}".rstrip()
    hashes = "".join(f" '{each}'" for each in sorted(map(script_hash, scripts)))
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {own}{hashes} 'unsafe-eval'",
            f"style-src {own} 'unsafe-inline'",
            f"font-src {own}",
            f"img-src {own} data: blob:",
            # the comparison that the page opens with is part of it.
            "media-src 'self' data: blob:",
            f"connect-src {own}",
            "manifest-src 'self'",
            "base-uri 'self'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )


# an element with its attributes and its text, as browsers end it.
_SCRIPT = re.compile(r"<script\b([^>]*)>(.*?)</script", re.DOTALL | re.IGNORECASE)


def inline_scripts(html: str) -> list[str]:
    """The texts of the scripts that stand in a page, without those that it loads."""
    found = _SCRIPT.findall(html)
    return [text for attributes, text in found if not re.search(r"\bsrc\s*=", attributes)]


def script_hash(text: str) -> str:
    """How a content security policy names a script of that text."""
    # a browser's parser reads every end of line as a line feed before it takes the hash.
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    return "sha256-" + b64encode(sha256(plain.encode()).digest()).decode()


# a report holds all that it needs; shown, it is a place of its own that cannot ask the page's.
FILE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "media-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; sandbox allow-scripts"
)


@dataclass(slots=True)
class _Page:
    """An answer whose policy can be told only once all of it has been read."""

    start: Message
    body: bytearray = field(default_factory=bytearray)


class PageHeaders:
    """ASGI middleware that says of every answer how browsers may use it.

    They show what the page made; every other file is a download. An uploaded page or drawing that
    is shown runs its scripts as if they were this page's own.

    Args:
        app: what it stands before.
        folder: where the page puts what it makes.
        scripts: texts of the scripts that the page's own files insert into it.
        outside: the one place from which the page's own scripts may come as well.
        first: text of a script that is put into the page before all others.
    """

    def __init__(
        self,
        app: ASGIApp,
        folder: Path,
        scripts: Iterable[str] = (),
        outside: str = "",
        first: str = "",
    ) -> None:
        self._app = app
        self._folder = folder
        self._first = f"<head><script>{first}</script>" if first else "<head>"
        self._scripts = tuple(scripts)
        self._outside = outside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, and say of its answer how it may be used."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = scope["path"].partition(API)[2]
        is_file = name.startswith(_FILE)
        shown = not is_file or self._is_shown(name[len("file=") :])
        page: _Page | None = None

        async def described(message: Message) -> None:
            nonlocal page
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_EVERYWHERE)
                kind = headers.get("Content-Type", "")
                if not is_file and kind.startswith("text/html"):
                    page = _Page(message)
                    return
                headers["Content-Security-Policy"] = FILE_POLICY if is_file else self._policy()
                if not shown and message["status"] < 400:
                    headers["Content-Disposition"] = "attachment"
                    if not _is_media(kind):
                        headers["Content-Type"] = "application/octet-stream"
            elif page is not None and message["type"] == "http.response.body":
                page.body += message.get("body", b"")
                if message.get("more_body", False):
                    return
                html = page.body.decode().replace("<head>", self._first, 1)
                body = html.encode()
                headers = MutableHeaders(scope=page.start)
                headers["Content-Security-Policy"] = self._policy(html)
                headers.add_vary_header("Accept-Encoding")
                if body and "gzip" in Headers(scope=scope).get("Accept-Encoding", ""):
                    body = gzip.compress(body, _LEVEL, mtime=0)
                    headers["Content-Encoding"] = "gzip"
                if body:
                    headers["Content-Length"] = str(len(body))
                await send(page.start)
                message = {"type": "http.response.body", "body": body}
            await send(message)

        await self._app(scope, receive, described)

    def _policy(self, html: str = "") -> str:
        """What a page of that text may do."""
        return page_policy([*inline_scripts(html), *self._scripts], self._outside)

    def _is_shown(self, path: str) -> bool:
        try:
            real = Path(path).resolve()
        except (OSError, ValueError):
            return False
        return real.suffix in SHOWN and real.is_relative_to(self._folder)


def _is_media(kind: str) -> bool:
    """Whether a page can use it as a picture or video, in which no script runs."""
    return kind.startswith(("video/", "image/")) and "svg" not in kind
