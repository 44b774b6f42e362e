"""A visitor of the page in a real browser, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playwright import sync_api as playwright

# milliseconds that anything may take on a busy machine.
PATIENCE = 90_000
# pixels up to which the page stands in one column, and its form is folded at first.
NARROW = 900
SMALL = {"Steps": 3, "Frames (4k+1)": 5, "Width": 64, "Height": 64}


# a walk by Tab from the page's beginning: where it stops, until it is past the end, and whether the
# focus is seen there.
BEGIN = """() => {
  document.querySelectorAll("[data-met]").forEach((each) => delete each.dataset.met);
  document.activeElement.blur();
  document.body.tabIndex = -1;
  document.body.focus();
  document.body.removeAttribute("tabindex");
}"""
STOP = """() => {
  const place = document.activeElement;
  if (place === document.body) return true;
  place.dataset.met = getComputedStyle(place).outlineStyle === "none" ? "unseen" : "";
}"""
MISSED = """() => [
  ...document.querySelectorAll("a[href], button, input, textarea, summary, [tabindex]"),
].filter((each) => (
  each.dataset.met !== "" && each.tabIndex >= 0 && !each.disabled
  && each.checkVisibility({ visibilityProperty: true, opacityProperty: true })
)).map((each) => each.outerHTML.slice(0, 200))"""


class Visitor:
    """A tab of a browser, and everything it asked for or complained of.

    Args:
        context: whose tab it is: a visitor's cookies, storage and cache.
        url: of the page.
        by_hand: open the fold of the method's numbers.
        newcomer: leave the page as it opens.
        viewport: width and height in pixels.
        color_scheme: light or dark.
        reduced_motion: by itself no video plays, which would take a core from what is tested.
    """

    def __init__(
        self,
        context: Any,
        url: str,
        *,
        by_hand: bool = True,
        newcomer: bool = False,
        viewport: Mapping[str, int] | None = None,
        color_scheme: str = "light",
        reduced_motion: str = "reduce",
    ) -> None:
        self.page = context.new_page()
        if viewport is not None:
            self.page.set_viewport_size(viewport)
        self.page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        self.page.set_default_timeout(PATIENCE)
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)
        self.page.goto(url)
        self.page.wait_for_selector("#generate")
        if newcomer:
            return
        if viewport is not None and viewport["width"] <= NARROW:
            self.page.get_by_role("button", name="Settings", exact=True).click()
        if by_hand:
            self.unfold("By hand")
        for label, value in SMALL.items():
            self.set(label, value)

    def _hear(self, said: Any) -> None:
        # what the page's own policy forbids it is missed by somebody.
        if "Content Security Policy" in said.text:
            self.errors.append(said.text)

    def unfold(self, fold: str) -> None:
        self.page.get_by_role("button", name=fold).click()
        # gradio fills the fields once more just after a fold has opened, over what is in them.
        self.page.wait_for_timeout(300)

    def set(self, label: str, value: object) -> None:
        field = self.page.get_by_label(label, exact=True)
        field.fill(str(value))
        field.press("Tab")

    def prompt(self, text: str) -> None:
        self.page.fill("#prompt textarea", text)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()
        # as with a fold: when it is first seen, its fields are filled once more.
        self.page.wait_for_timeout(300)

    def see(self, area: str, text: str) -> None:
        playwright.expect(self.page.locator(area)).to_contain_text(text)

    def download(self, link: Any) -> Path:
        """The file that a click on ``link`` brings."""
        with self.page.expect_download() as waiting:
            link.click()
        return Path(waiting.value.path())

    def calls(self) -> int:
        """How often the page has called a function of the server's."""
        return sum(url.split("?")[0].endswith("/queue/join") for url in self.asked)

    def calls_at_rest(self) -> int:
        """``calls`` once the page has asked nothing for two seconds."""
        calls = -1
        while calls != (calls := self.calls()):
            self.page.wait_for_timeout(2000)
        return calls

    def value(self, script: str) -> Any:
        return self.page.evaluate(script)

    def missed_by_tab(self) -> list[str]:
        """Go by Tab; what the mouse reaches and Tab does not, or nobody sees there."""
        self.page.evaluate(BEGIN)
        for _ in range(150):
            self.page.keyboard.press("Tab")
            if self.page.evaluate(STOP):
                break
        return list(self.page.evaluate(MISSED))
