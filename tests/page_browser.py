"""A real browser in front of the page as its command serves it; fixtures of the tests that look.

The browser is VIDSPARSE_CHROMIUM, or the first of ``chromium`` and ``google-chrome`` on the path.
"""

from __future__ import annotations

import os
import pkgutil
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fault_runs import Commands
from page_server import free_port
from page_visitor import PATIENCE, Visitor
from playwright import sync_api as playwright

CHROMIUM = os.environ.get("VIDSPARSE_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: set VIDSPARSE_CHROMIUM to one"),
    pytest.mark.timeout(600),
]

# no sandbox: continuous integration runs as root, and the only page is our own. No popups of the
# address line, which headless windows have too: two pages of the browser's own for each window, 0.7
# of the 1.2 seconds of a core that an empty one takes. Of two such lists the last one counts, so
# that this one repeats what Playwright switches off.
FLAGS = [
    "--no-sandbox",
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,WebUIOmniboxFullPopup,AimEnabled,"
    "AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose,HttpsUpgrades,"
    "HttpsFirstBalancedModeAutoEnable,LensOverlay,MediaRouter,PaintHolding,"
    "ThirdPartyStoragePartitioning,AvoidCorsURLLoaderRestartOnRedirect,OptimizationHints,"
    "NetworkTimeServiceQuerying,PreconnectToSearch",
]

# from so many steps on a video is there to be seen while it is made; seconds that each rests then.
LONG, PAUSE = 8, 0.4

# by address, the process that serves there.
_SERVING: dict[str, int] = {}


def log_of(out: Path) -> Path:
    """The log of the page whose output folder that is."""
    return out.with_suffix(".log")


@dataclass(frozen=True, slots=True)
class Latch:
    """Keeps a page's process from one thing until it is lifted: a fast machine shows no waiting.

    Args:
        path: of a file that is there while it is lifted.
        holds: full name of the function that waits; the one that loads models.
    """

    path: Path
    holds: str = "vidsparse.apps.page.workbench.Workbench.load"

    def __call__(self) -> None:
        """In the page's process, before it serves."""
        place, _, name = self.holds.rpartition(".")
        owner = pkgutil.resolve_name(place)
        held = getattr(owner, name)

        def later(*arguments: Any, **named: Any) -> Any:
            while not self.path.exists():
                time.sleep(0.02)
            return held(*arguments, **named)

        setattr(owner, name, later)

    def lift(self) -> None:
        """Let it go on."""
        self.path.touch()

    def close(self) -> None:
        """Have it wait again."""
        self.path.unlink()


@dataclass(frozen=True, slots=True)
class Unhurried:
    """What a page's process does before it serves: the steps of long videos take their time asleep.

    A long one is there to be seen at work, to be waited behind or called off. It lasts as long on
    any machine then, and keeps no core from what is tested meanwhile.

    Args:
        setup: what it does besides.
    """

    setup: Callable[[], object] | None

    def __call__(self) -> None:
        from vidsparse.apps.page.queue import Job

        jobs: Any = Job
        advance = jobs.advance

        def slowly(job: Any, step: int, steps: int, seconds: float) -> None:
            if steps >= LONG:
                time.sleep(PAUSE)
            advance(job, step, steps, seconds)

        jobs.advance = slowly
        if self.setup is not None:
            self.setup()


@contextmanager
def commanded(out: Path, *options: str, setup: Callable[[], object] | None = None) -> Iterator[str]:
    """The address of a page as the command serves it while the block runs.

    What it says of its work comes into ``log_of(out)``. ``setup`` is called in its process before.
    """
    command = ["-v", "ui", "--port", str(free_port()), "--out", str(out)]
    command += ["--max-steps", "400", "--away", "10", *options]
    process, address = Commands(out.parent).serve(
        command, out.with_suffix(".txt"), log_of(out), Unhurried(setup)
    )
    assert process.pid is not None
    _SERVING[address] = process.pid
    try:
        yield address
    finally:
        process.terminate()
        process.join()


@contextmanager
def held(address: str) -> Iterator[None]:
    """The page that a command serves there says and computes nothing while the block runs."""
    process = _SERVING[address]
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser") / "out"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        playwright.expect.set_options(timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def window(chromium: Any) -> Any:
    """The browser's window of a module's first visitors, which has read the page's scripts."""
    opened = chromium.new_context()
    # stays open, and empty: from it what a visitor left is forgotten.
    opened.new_page()
    return opened


@pytest.fixture
def visit(chromium: Any, window: Any, url: str) -> Iterator[Any]:
    """Opens the page for one visitor after the other, of whom it and the browser know nothing."""
    opened: list[Visitor] = []

    def open_page(**options: Any) -> Visitor:
        opened.append(Visitor(chromium.new_context() if opened else window, url, **options))
        return opened[-1]

    yield open_page
    for visitor in opened:
        if visitor.page.context is not window:
            visitor.page.context.close()
    _forget(window, url)
    for visitor in opened:
        assert visitor.errors == []


def _forget(window: Any, url: str) -> None:
    """Close what is open in a window and forget all but what the cache holds."""
    blank, *visited = window.pages
    for page in visited:
        page.close()
    window.clear_cookies()
    session = window.new_cdp_session(blank)
    everything = {"origin": url.rstrip("/"), "storageTypes": "all"}
    session.send("Storage.clearDataForOrigin", everything)
    session.detach()
