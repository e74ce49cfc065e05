"""A real browser for tests of the page: any Chromium of this machine, driven by playwright."""

import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_HOW = "apt-get install chromium-headless-shell, or name one in WHORL_CHROMIUM"
SECONDS = 90  # until something appears, on a busy machine
# Not the browser's own words about requests that a test refuses or whose server it stops.
_OF_THE_NETWORK = "Failed to load resource"


def chromium() -> str | None:
    return os.environ.get("WHORL_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


def missing() -> str | None:
    """Why there is no browser."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[dev]'"
    return f"there is no Chromium: {_HOW}" if chromium() is None else None


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The sandbox needs rights that containers often lack; what is opened here is our own page.
        opened = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    """The browser of a file's tests. It ends with them: its event loop would be in the way of other tests' own."""
    with browser() as running:
        yield running


@contextlib.contextmanager
def window(opened: Any, *, refusing: str | None = None, **options: Any) -> Iterator[Any]:
    """A page of its own storage. What it complains of, a broken policy above all, fails the test. refusing: words of a
    complaint that must come."""
    context = opened.new_context(viewport={"width": 1200, "height": 800}, **options)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.set_default_timeout(1000 * SECONDS)
    try:
        yield page
    finally:
        context.close()
    errors = [text for text in complaints if not text.startswith(_OF_THE_NETWORK)]
    assert len(errors) == 0 if refusing is None else refusing in "".join(errors), errors


def until(page: Any, expression: str, seconds: float = SECONDS) -> None:
    """Wait until it is true. playwright's own way compiles text inside the page, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not within {seconds} seconds: {expression}"
        page.wait_for_timeout(30)
