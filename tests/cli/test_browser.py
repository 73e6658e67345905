"""The page of `pyrofl report` in a real browser: a phone, a dark screen, and paper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import run

from pyrofl.cli import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("chromium"), reason="needs the browser chromium"),
]

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Parts that stick out of the page without a scroll bar of their own.
BOXES = "h1, h2, p, pre, figcaption, nav a, .wide, figure"
STICKING = f"""() => [...document.querySelectorAll('{BOXES}')]
  .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map(e => e.outerHTML.slice(0, 80))"""
COLORS = """() => [...document.querySelectorAll('p, pre, td, th, nav a, h1')].map(e => {
  const own = getComputedStyle(e);
  let at = e;
  while (getComputedStyle(at).backgroundColor === 'rgba(0, 0, 0, 0)' && at.parentElement)
    at = at.parentElement;
  return [own.color, getComputedStyle(at).backgroundColor];
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A comparison of twelve sites, made by command, with all its figures."""
    folder = tmp_path_factory.mktemp("browser")
    words = ["local", "fedavg", "--per-class", "40", "--net", "softmax", "--clients", "12"]
    words += ["--rounds", "3", "--seeds", "1", "--quiet", "--posterior-draws", "5"]
    assert main(["compare", *words, "--out", str(folder / "runs")]) == 0
    assert main(["report", str(folder / "runs")]) == 0
    return folder / "runs/report.html"


@pytest.fixture(scope="module")
def long_names(tmp_path_factory) -> Path:
    """A comparison of sites with names that have no room on a phone."""
    folder = tmp_path_factory.mktemp("browser")
    rng = np.random.default_rng(0)
    for method in ("local", "fedavg"):
        run(folder, method, 0, {80 * "W": rng.integers(0, 2, 12), "b" * 30: [1, 0, 1]})
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of the system."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    with playwright.sync_playwright() as driver:
        path = shutil.which("chromium")
        made = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


def opened(browser: Any, path: Path, **how: Any) -> Any:
    """Open a page that may fetch nothing."""
    page = browser.new_page(**how)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: asked.append(message.text))
    page.goto(path.as_uri())
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    return page


def contrast(colors: list[str]) -> float:
    """Return how far text stands out from what is behind it, by the rule of the W3C."""
    lights = []
    for text in colors:
        parts = [int(v) / 255 for v in text[4:-1].split(",")]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["page", "long_names"])
def test_it_is_read_without_scrolling_sideways(browser, request, tmp_path, size, scheme, which):
    shown = opened(browser, request.getfixturevalue(which), viewport=size, color_scheme=scheme)
    assert shown.evaluate(SIDEWAYS) == 0
    assert shown.evaluate(STICKING) == []
    dark = shown.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    assert min(map(contrast, shown.evaluate(COLORS))) >= 4.5
    shown.screenshot(path=tmp_path / f"{which}.png", full_page=True)
    shown.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["page", "long_names"])
def test_paper_is_white_and_shows_whole_tables(browser, request, tmp_path, scheme, which):
    shown = opened(browser, request.getfixturevalue(which), viewport={"width": 700, "height": 990})
    shown.emulate_media(media="print", color_scheme=scheme)
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert shown.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    ends = "[...document.querySelectorAll('table, img')].map(e => e.getBoundingClientRect().right)"
    assert max(shown.evaluate(ends)) <= 701
    shown.pdf(path=tmp_path / f"{which}.pdf", format="A4", print_background=True)
    assert (tmp_path / f"{which}.pdf").stat().st_size > 10_000
    shown.close()
