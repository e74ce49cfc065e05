"""The page for everybody: what axe-core finds, keys alone, names, narrow windows, the dark."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chromium import missing, until, window
from page_steps import MARKDOWN, axe_findings, begin_another, end, ready, said, say, use_axe, visit
from serving import ALPHABET, Served, serving, told

from whorl.engine.drafting import DraftOptions

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWERS = {"md": MARKDOWN, "hello": "hello hello hello there", "call": CALL, "code": "```\nx = 1\n```\n- one\n- two"}
TOOL = '{"name": "weather", "parameters": {"type": "object"}}'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(ANSWERS, speculate=DraftOptions(pld=True).lookup(), draft_length="fixed")) as running:
        yield running


@pytest.fixture
def page(opened: Any, served: Served) -> Iterator[Any]:
    with window(opened, color_scheme="light") as tab:
        visit(tab, served, formatted=True)
        yield tab


# ---- axe-core: the rules of WCAG 2.2 A and AA


def show_answer(page: Any) -> None:
    say(page, "md")


def show_why(page: Any) -> None:
    page.click("#tokens")
    page.click("article.assistant .t >> nth=2")


def show_badge(page: Any) -> None:
    page.keyboard.press("Escape")
    page.click("text=Same bits?")
    page.wait_for_selector(".badge")


def show_engine(page: Any) -> None:
    page.click("#show-engine")
    page.wait_for_selector("text=Save as a Chrome trace")


def show_settings(page: Any) -> None:
    page.click("#show-settings")
    page.fill("[data-setting=tools]", TOOL)


def show_tools(page: Any) -> None:
    page.click("#show-settings")
    begin_another(page)
    say(page, "call")


def show_comparison(page: Any) -> None:
    page.click("#show-compare")
    page.fill("#compare-prompt", "hello")
    page.click("#compare-form >> text=Compare")
    until(page, "document.querySelector('#compare-verdict').textContent.startsWith('Equal:')")


def show_conversations(page: Any) -> None:
    page.keyboard.press("Escape")
    page.evaluate("showTalks(true)")
    page.click("[aria-label='Rename md']", force=True)


def show_undo_and_key(page: Any) -> None:
    page.keyboard.press("Escape")
    page.click("[aria-label='Delete call']", force=True)
    page.evaluate("note('the API key is wrong', true)")


VIEWS: tuple[Callable[[Any], None], ...] = (
    show_answer,
    show_why,
    show_badge,
    show_engine,
    show_settings,
    show_tools,
    show_comparison,
    show_conversations,
    show_undo_and_key,
)
DESK, PHONE = {"width": 1200, "height": 800}, {"width": 390, "height": 780}


@pytest.mark.parametrize(("scheme", "rules"), [("light", "all"), ("dark", "colors")])
def test_axe_finds_nothing(opened: Any, served: Served, scheme: str, rules: str) -> None:
    """In every view, at a desk and on a phone; in the dark nothing but the colors is another."""
    with window(opened, color_scheme=scheme) as page:
        visit(page, served, formatted=True)
        use_axe(page)
        findings = []
        for show in VIEWS:
            page.set_viewport_size(DESK)
            show(page)
            for size in (DESK, PHONE) if rules == "all" else (DESK,):
                page.set_viewport_size(size)
                findings += [(show.__name__, size["width"], finding) for finding in axe_findings(page, rules)]
        assert findings == []


# ---- keys and names


CONTROLS = """() => {
    const all = "a, button, input, select, textarea, summary, [tabindex]";
    window.controls = [...document.querySelectorAll(all)].filter(one => one.tabIndex >= 0 && !one.disabled
        && one.checkVisibility());
    document.activeElement.blur();
    return window.controls.map(one => one.id || one.ariaLabel || one.textContent);
}"""
FOCUSED = """() => {
    const one = document.activeElement, ring = one.id === "prompt" ? one.closest(".box") : one;
    const isSeen = getComputedStyle(ring).outlineStyle !== "none" && getComputedStyle(one).opacity === "1";
    return [window.controls.indexOf(one), isSeen];
}"""


def test_tab_reaches_everything_and_shows_where_it_is(page: Any) -> None:
    say(page, "md")
    page.click("#tokens")
    page.click("#show-settings")
    names = page.evaluate(CONTROLS)
    seen = {}
    for _ in range(len(names) + 2):  # past the end of the page, too
        page.keyboard.press("Tab")
        at, is_seen = page.evaluate(FOCUSED)
        seen[at] = is_seen
    assert [name for at, name in enumerate(names) if at not in seen] == []
    assert [names[at] for at, is_seen in seen.items() if at >= 0 and not is_seen] == []
    assert len(names) > 40


def test_everything_that_can_be_used_has_a_name(page: Any) -> None:
    """As a screen reader is told by the browser."""
    say(page, "hello")
    for panel in ("#show-settings", "#show-engine"):
        page.click(panel)
        session = page.context.new_cdp_session(page)
        tree = session.send("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "textbox", "combobox", "spinbutton", "checkbox", "image", "dialog", "status", "article")
        controls = [
            (n["role"]["value"], n.get("name", {}).get("value")) for n in tree if not n.get("ignored") and "role" in n
        ]
        used = [(role, name) for role, name in controls if role in roles]
        assert len(used) > 10
        assert [role for role, name in used if not name and role != "status"] == []
        assert any(role == "status" for role, _ in used)


def test_keys_alone(page: Any) -> None:
    assert page.evaluate("document.activeElement.id") == "prompt"  # one may write at once
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    assert page.input_value("#prompt") == "hello\nthere"
    page.keyboard.press("Enter")
    end(page)
    assert said(page) == ALPHABET
    page.keyboard.press("ArrowUp")
    assert page.input_value("#prompt") == "hello\nthere"
    page.keyboard.press("Escape")
    assert page.input_value("#prompt") == ""
    page.click("#show-settings")
    page.focus("#system")
    page.keyboard.press("Escape")
    assert not page.is_visible("#settings")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.press("Alt+n")
    page.wait_for_selector(".empty")
    assert page.locator("article").count() == 0


# ---- small windows, dark ones


CUT_OFF = """[...document.querySelectorAll("button, input, select, textarea")].filter(one => one.checkVisibility()
    && !one.closest(".table, pre") && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.id)"""


def test_colors_follow_the_system_until_they_are_chosen(opened: Any, served: Served) -> None:
    paper, drawn = "getComputedStyle(document.body).backgroundColor", "document.querySelector('#blocks').toDataURL()"
    with window(opened, color_scheme="light") as page:
        visit(page, served)
        page.click("#show-engine")
        until(page, "document.querySelector('#blocks-text').textContent !== ''")
        page.route("**/page/stats", lambda route: None)  # nothing is drawn for other reasons
        light = page.evaluate(drawn)
        page.emulate_media(color_scheme="dark")
        until(page, f"{drawn} !== '{light}'")
        assert page.evaluate(paper) == "rgb(21, 23, 26)"
        page.click("#theme")
        assert page.text_content("#theme") == "Light"
        assert page.evaluate(drawn) == light
        page.reload()
        ready(page)
        assert page.evaluate(paper) == "rgb(255, 255, 255)"
        assert page.evaluate("document.getAnimations().length") == 0


def test_a_narrow_window(page: Any) -> None:
    """320 pixels: nothing is cut off, and everything can be reached."""
    page.set_viewport_size({"width": 320, "height": 640})
    say(page, "md")
    for step in (None, "#show-talks", "#show-talks", "#show-settings", "#show-engine", "#show-engine", "#show-compare"):
        if step is not None:
            page.click(step)
        assert page.evaluate(CUT_OFF) == [], step
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 320
