"""Every state of the page in Chromium: it fits, and everybody can use it."""

from __future__ import annotations

from collections.abc import Iterator
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


# Marks what looks as it did when it was last judged in this look, all of which contrast depends on:
# text, colours, what is above it and behind it, sizes and places. Elements get numbers by that, the
# same for those alike.
MARK = """(look) => {
  const numbers = (window.numbers ??= new Map());
  const judged = ((window.judged ??= {})[look] ??= new Set());
  const number = (words) => {
    if (!numbers.has(words)) numbers.set(words, numbers.size);
    return numbers.get(words);
  };
  const within = (each) => [...(each.shadowRoot?.children ?? []), ...each.children];
  const own = new Map(), whole = new Map();
  const read = (each, x, y) => {
    const style = getComputedStyle(each), box = each.getBoundingClientRect();
    const paint = [
      "color", "backgroundColor", "backgroundImage", "opacity", "filter", "visibility", "display",
      "fontSize", "fontWeight", "textShadow", "textDecorationLine", "position", "zIndex",
    ].map((name) => style[name]);
    const place = [box.x - x, box.y - y, box.width, box.height].map(Math.round);
    const text = [...each.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
    const words = [each.tagName, each.disabled, each.value, ...text.map((node) => node.data)];
    own.set(each, number(JSON.stringify(paint)));
    const inside = within(each).map((child) => read(child, box.x, box.y));
    whole.set(each, number(JSON.stringify([paint, place, words, inside])));
    return whole.get(each);
  };
  const mark = (each, above) => {
    const key = `${above} ${whole.get(each)}`;
    if (judged.has(key)) return each.setAttribute("data-judged", "");
    judged.add(key);
    const here = number(`${above} ${own.get(each)}`);
    within(each).forEach((child) => mark(child, here));
  };
  read(document.body, 0, 0);
  mark(document.body, 0);
}"""
UNMARK = """() => document.querySelectorAll("[data-judged]").forEach(
  (each) => each.removeAttribute("data-judged")
)"""


def _serious(page: Any, look: tuple[int, str]) -> list[tuple[Any, ...]]:
    """What axe finds on the page that keeps somebody from using it, in a look of width and scheme.

    Contrast takes most of the time, and most of a page is as it was in the state before: it is
    judged of what is new.
    """
    every = {"rules": {rule: {"enabled": False} for rule in CONTRAST}}
    # what is no matter of colours is the same in the dark.
    found = _violations(page, every) if look[1] != "dark" else []
    page.evaluate(MARK, str(look))
    contrast = {"runOnly": {"type": "rule", "values": list(CONTRAST)}}
    found += _violations(page, contrast, {"exclude": ["[data-judged]"]})
    page.evaluate(UNMARK)
    return found


def _violations(page: Any, options: Any, context: Any = None) -> list[tuple[Any, ...]]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    if page.evaluate("'axe' in window"):
        # half a megabyte, once for each document.
        axe.axe_script = "0"
    options = {"resultTypes": ["violations"], **options}
    return [
        (each["id"], node["target"], node.get("failureSummary"))
        for each in axe.run(page, context=context, options=options).response["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


# on a busy machine it has taken 268 seconds.
@pytest.mark.timeout(600)
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
            if width in LOOKED_AT:
                assert _serious(page, (width, scheme)) == [], where
        seen.append(state)
    assert len(seen) == 24
    # what was judged before is judged again once it looks otherwise, be it by what is behind it.
    look = (LOOKED_AT[0], "light")
    assert _serious(page, look) == []
    for change in ("style.color = 'silver'", "parentElement.style.background = 'silver'"):
        page.locator(".vs-study summary").first.evaluate(f"(each) => {{ each.{change}; }}")
        assert {rule for rule, *_ in _serious(page, look)} == {"color-contrast"}, change
    # and nothing of all that was loaded from elsewhere.
    here = (url, "data:", "blob:", "about:")
    assert [each for each in visitor.asked if not each.startswith(here)] == []
