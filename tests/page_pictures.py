"""The docs' pictures of the page: ``python tests/page_pictures.py [docs/images]``.

A contact sheet for each width with every state, light beside dark, and the first screens whole. It
takes a Chromium, as the tests that look do, and about five minutes on two cores.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from page_browser import CHROMIUM, FLAGS, Latch, commanded
from page_states import SCHEMES, WIDTHS, looks, states
from page_visitor import PATIENCE, Visitor
from PIL import Image, ImageDraw, ImageFont
from playwright import sync_api as playwright

# large enough to show something, small enough to wait for.
VIDEOS = {"Steps": 12, "Frames (4k+1)": 17, "Width": 128, "Height": 128}
# of a sheet: pixels that a window is drawn in, pairs in a row, and WebP's quality.
SHEETS = {1440: (520, 2), 760: (300, 3), 390: (214, 4)}
QUALITY = 55
GAP, CAPTION = 10, 26


def main(folder: Path) -> None:
    """Make all pictures anew."""
    seen: dict[str, dict[tuple[int, str], Image.Image]] = {}
    with (
        tempfile.TemporaryDirectory() as out,
        commanded(Path(out) / "out", setup=(latch := Latch(Path(out) / "lifted"))) as url,
        playwright.sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        # larger videos than the tests make.
        playwright.expect.set_options(timeout=4 * PATIENCE)
        visitor = Visitor(browser.new_context(), url, newcomer=True, reduced_motion="no-preference")
        another = lambda: Visitor(browser.new_context(), url, newcomer=True)  # noqa: E731
        for state, area in states(visitor, another, latch, VIDEOS):
            print(state, file=sys.stderr)
            for look in looks(visitor.page, area):
                shot = Image.open(io.BytesIO(visitor.page.screenshot())).convert("RGB")
                seen.setdefault(state, {})[look] = shot
        browser.close()
    for width in WIDTHS:
        _sheet(seen, width).save(folder / f"page-{width}.webp", quality=QUALITY, method=6)
    for state, name in (("as it opens", "page"), ("studies of every method", "page-studies")):
        picture = seen[state][1440, "light"].quantize(128, dither=Image.Dither.NONE)
        picture.save(folder / f"{name}.png", optimize=True)


def _sheet(seen: dict[str, dict[tuple[int, str], Image.Image]], width: int) -> Image.Image:
    """Every state at one width, light and dark beside each other, with its name above."""
    wide, pairs = SHEETS[width]
    high = round(WIDTHS[width] * wide / width)
    across, down = 2 * wide + 3 * GAP, CAPTION + high + GAP
    rows = -(-len(seen) // pairs)
    sheet = Image.new("RGB", (pairs * across, rows * down), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for place, (state, shots) in enumerate(seen.items()):
        left, top = place % pairs * across + GAP, place // pairs * down
        pen.text((left, top + 5), state, fill="black", font=font)
        for beside, scheme in enumerate(SCHEMES):
            small = shots[width, scheme].resize((wide, high), Image.Resampling.LANCZOS)
            sheet.paste(small, (left + beside * (wide + GAP), top + CAPTION))
    return sheet


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
