"""A picture of a page, as the README shows it."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from remind.core.errors import ConfigError, DataError
from remind.core.files import atomic_path


@dataclass
class PictureConfig:
    """Photograph a page of the inspector with a token chosen, in a headless Chromium."""

    page: str
    """The page, from inspect_grounding.py."""
    out: str = "docs/images/inspector.png"
    """PNG file to write."""
    turn: int | None = None
    """Turn to go to, by the number the page shows; None: the first that is gold evidence in a block, or in a block."""
    word: str | None = None
    """Token of that turn to choose; None: its most strongly shaded."""
    scheme: Literal["light", "dark"] = "light"
    """Colours."""
    width: int = 1360
    """Width of the window in pixels."""
    height: int = 1200
    """Height of the window in pixels."""
    chromium: str | None = None
    """The browser's program; None: chromium or google-chrome as found on the path."""


def take_picture(cfg: PictureConfig) -> Path:
    """Write the picture; prints where.

    Raises:
        DataError: no such page, turn or token. ConfigError: no playwright, or no Chromium.
    """
    page_path = Path(cfg.page).resolve()
    if not page_path.is_file():
        raise DataError("no such page; write it with inspect_grounding.py", cfg.page)
    program = cfg.chromium or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        raise ConfigError("no Chromium is installed; name one with --chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise ConfigError("taking pictures needs playwright: pip install playwright") from None
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": cfg.width, "height": cfg.height}, color_scheme=cfg.scheme)
        page.goto(page_path.as_uri())
        page.wait_for_function("document.documentElement.dataset.ready === 'true'")
        if not page.evaluate(_CHOOSE, [cfg.turn, cfg.word]):
            browser.close()
            raise DataError("the page has no such turn or token to show", cfg.page)
        shot = page.screenshot()
        browser.close()
    _save(shot, Path(cfg.out))
    print(f"picture: {cfg.out}")
    return Path(os.path.abspath(cfg.out))


#: Run in the page; uses its own functions, so that the picture shows what a click shows.
_CHOOSE = """([turn, word]) => {
  const first = (pattern) => document.querySelector(pattern)?.id.slice(1);
  const n = turn === null ? Number(first(".turn.gold.marked") ?? first(".turn.marked") ?? first(".turn")) : turn - 1;
  if (!turnOf(n)) return false;
  const tokens = spansOf(n).filter((span) => span.closest(".said, .caption"));
  const value = (span) => shading.values[strongest(span)];
  const best = tokens.toSorted((a, b) => value(b) - value(a))[0];
  const span = word === null ? best : tokens.find((one) => one.innerText === word);
  if (!span) return false;
  choose(strongest(span));
  scrollTo(0, 0);
  const beyond = turnOf(n).getBoundingClientRect().bottom - innerHeight * 0.9;
  if (beyond > 0) scrollBy(0, beyond);
  return new Promise((done) => setTimeout(() => done(true), 500));
}"""


def _save(shot: bytes, out: Path) -> None:
    """As PNG with a palette: flat colours lose nothing to see, and the file is a third of the size."""
    from PIL import Image

    picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    with atomic_path(out) as temporary:
        picture.save(temporary, format="PNG", optimize=True)


if __name__ == "__main__":
    from remind.core.cli import main

    main(PictureConfig, take_picture, "Photograph a page of the inspector, as the README shows one.")
