"""Every state of the page in Chromium: it fits, and everybody can use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="the page needs the ui extra")
pytest.importorskip("playwright", reason="playwright drives the browser")

from page_browser import MARKS, Latch, commanded
from page_states import looks, states
from playwright import sync_api as playwright

pytest_plugins = ["page_browser"]
pytestmark = MARKS

CONTRAST = ("color-contrast", "link-in-text-block")
# where axe looks, a second each time: in between there is nothing that neither of them shows.
LOOKED_AT = (1440, 390)


@pytest.fixture(scope="module")
def latch(tmp_path_factory: pytest.TempPathFactory) -> Latch:
    return Latch(tmp_path_factory.mktemp("latch") / "lifted")


@pytest.fixture(scope="module")
def url(out: Path, latch: Latch) -> Iterator[str]:
    with commanded(out, setup=latch) as address:
        yield address


def _serious(page: Any, rules: Sequence[str] = ()) -> list[tuple[Any, ...]]:
    """What axe finds on the page that keeps somebody from using it, by all rules or by these."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    if page.evaluate("'axe' in window"):
        # half a megabyte, once for each document.
        axe.axe_script = "0"
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if rules:
        options["runOnly"] = {"type": "rule", "values": list(rules)}
    return [
        (each["id"], node["target"], node.get("failureSummary"))
        for each in axe.run(page, options=options).response["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def test_every_state_fits_at_every_width_and_can_be_used_by_everybody_in_light_and_dark(
    visit: Any, url: str, latch: Latch
) -> None:
    visitor = visit(newcomer=True)
    page, seen = visitor.page, []
    for state, area in states(visitor, lambda: visit(by_hand=False), latch):
        for width, scheme in looks(page, area):
            where = state, width, scheme
            assert page.evaluate("document.documentElement.scrollWidth") <= width, where
            playwright.expect(page.locator(area).first).to_be_in_viewport()
            # what is no matter of colours is the same in the dark.
            if width in LOOKED_AT:
                assert _serious(page, CONTRAST if scheme == "dark" else ()) == [], where
        seen.append(state)
    assert len(seen) == 24
    # and nothing of all that was loaded from elsewhere.
    here = (url, "data:", "blob:", "about:")
    assert [each for each in visitor.asked if not each.startswith(here)] == []
