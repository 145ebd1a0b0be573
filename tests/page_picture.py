"""Makes docs/page.png: a report's page as it opens, at its shortest code length, and below it at the longest one.

python tests/page_picture.py out/digits/full/report/page.html docs/page.png
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from test_page import Browser, set_length

WIDTH, HEIGHT = 1192, 800


def main(page: Path, target: Path) -> None:
    """Opens the page in Chromium and writes both states, one below the other."""
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(Path(folder))
        try:
            browser.window(WIDTH, HEIGHT)
            browser.prefer(color_scheme="light", reduced_motion="reduce")
            browser.open(page)
            parts = [shot(browser, "body", Path(folder, "a.png"))]
            set_length(browser, int(browser.run("by('length').max")))
            parts.append(shot(browser, "main", Path(folder, "b.png")))
        finally:
            browser.close()
    both = Image.new("RGB", (WIDTH, sum(part.height for part in parts)))
    both.paste(parts[0], (0, 0))
    both.paste(parts[1], (0, parts[0].height))
    both.quantize(128).save(target, optimize=True)


def shot(browser: Browser, selector: str, path: Path) -> Image.Image:
    """The part of the page from the top of an element to its bottom, with a margin."""
    top, bottom = browser.run(
        "(r => [Math.floor(r.top + scrollY), Math.ceil(r.bottom + scrollY) + 20])"
        f"(document.querySelector({selector!r}).getBoundingClientRect())"
    )
    browser.window(WIDTH, bottom)
    browser.picture(path)
    return Image.open(io.BytesIO(path.read_bytes())).convert("RGB").crop((0, top, WIDTH, bottom))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
