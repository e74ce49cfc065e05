"""The page with the model that answers when none is named, and pictures of it: those in docs/ are made here."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import browser, missing, until, window
from default_model import default_llm
from page_steps import begin_another, choose, end, ready, said
from serving import Served, serving

from whorl.engine.drafting import DraftOptions

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

MOST_BYTES = 200_000
SECONDS = 300.0  # for an answer on a busy machine
QUESTION = "Write a Python function that adds two numbers, and call it twice."
SETTINGS = '{"temperature": "0", "max_tokens": "32"}'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    drafts = {"speculate": DraftOptions(pld=True).lookup(), "draft_length": "fixed"}
    with serving(default_llm(num_blocks=96, max_num_seqs=8, **drafts), names=("SmolLM2-135M-Instruct",)) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(os.environ.get("WHORL_PICTURES") or tmp_path)


def picture(page: Any, path: Path) -> None:
    page.screenshot(path=path)
    assert 10_000 < path.stat().st_size < MOST_BYTES


SHOWN = """# What the page shows

A **table**, a formula such as $e^{i\\pi} + 1 = 0$, and code:

| view | what it is for |
|:--|:--|
| answer | to read |
| tokens | to see where each one came from |

$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$

```python
def add(a: int, b: int) -> int:
    return a + b  # and no more
```"""


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_pictures_of_a_real_answer(served: Served, folder: Path) -> None:
    """A formatted answer is put into the model's mouth: the small default model writes no formulas."""
    with browser() as opened, window(opened, color_scheme="light") as page:
        page.set_default_timeout(1000 * SECONDS)
        page.add_init_script(f"localStorage.setItem('whorl.settings', '{SETTINGS}')")
        page.goto(f"{served.url}/")
        page.wait_for_selector("body[data-ready]")
        page.evaluate(
            "text => { add({role: 'user', parent: null, content: 'What does the page show?'});"
            "add({role: 'assistant', parent: talk.leaf, content: text}); render(); listTalks(); }",
            SHOWN,
        )
        picture(page, folder / "page_light.png")
        page.click("#show-settings")
        picture(page, folder / "page_settings.png")
        page.click("#show-settings")
        begin_another(page)
        page.click("#tokens")
        page.click("#show-engine")
        page.wait_for_selector("#roofline >> text=of the roofline")  # measured, as nothing runs
        ask(page, QUESTION)
        until(page, "document.querySelectorAll('article.assistant .t').length > 12", SECONDS)
        page.wait_for_selector("#running .bar")
        page.wait_for_selector("article.assistant >> text=Regenerate")
        assert "of the roofline" in page.text_content("article.assistant .facts")
        page.locator("article.assistant .t.lookup").first.click()
        picture(page, folder / "page_tokens.png")
        page.keyboard.press("Escape")
        page.click("text=Ask again among others")
        page.wait_for_selector("#running .bar")
        until(page, "document.querySelectorAll('#running .bar').length > 3", SECONDS)
        page.wait_for_selector(".again .equal, .again .unequal")
        # Other sequences, the cache and drafts have changed no bit of it.
        assert page.text_content(".again .equal").startswith("Equal: ")
        page.emulate_media(color_scheme="dark")
        picture(page, folder / "page_dark.png")
        page.emulate_media(color_scheme="light")
        page.click("#show-engine")
        page.click("#show-compare")
        page.select_option("#compare-right", "Varied")
        page.click("#compare-form >> text=Compare")
        page.wait_for_selector(".side:last-child > .hint >> text=tok/s")  # both are over
        picture(page, folder / "page_compare.png")
        page.keyboard.press("Escape")
        page.set_viewport_size({"width": 390, "height": 780})
        page.evaluate("document.querySelector('#log').scrollTop = 0")
        picture(page, folder / "page_phone.png")
        page.click("#show-talks")
        picture(page, folder / "page_phone_list.png")


def test_two_tasks_in_time(served: Served) -> None:
    """To the first word of an answer, and to yesterday's conversation; the seconds are printed (`pytest -s`)."""
    with browser() as opened, window(opened) as page:
        page.set_default_timeout(1000 * SECONDS)
        page.add_init_script(f"localStorage.setItem('whorl.settings', '{SETTINGS}')")
        began = time.monotonic()
        page.goto(f"{served.url}/")
        ready(page)
        opened_after = time.monotonic() - began
        began = time.monotonic()
        ask(page, "What is the capital of France?")
        until(page, "(document.querySelector('article.assistant > .said')?.textContent ?? '') !== ''", SECONDS)
        first = time.monotonic() - began
        end(page)
        assert "Paris" in said(page)
        begin_another(page)
        page.wait_for_selector(".empty")
        began = time.monotonic()
        choose(page, "What is the capital")
        assert "Paris" in said(page)
        print(f"\npage {opened_after:.2f} s, first word {first:.2f} s, conversation {time.monotonic() - began:.2f} s")
