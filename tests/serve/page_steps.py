"""What tests of the page do in a browser again and again."""

from collections.abc import Callable
from typing import Any

from client_environments import environment
from serving import Served

# The likeliest token each time, and tokens are shown, unless a test says something else.
USUAL = '{"temperature": "0", "coloured": true}'
GREEDY = f"localStorage.getItem('whorl.settings') ?? localStorage.setItem('whorl.settings', '{USUAL}')"


def visit(page: Any, served: Served, *, formatted: bool = False) -> None:
    page.add_init_script(GREEDY.replace("true", "false") if formatted else GREEDY)
    page.goto(f"{served.url}/")
    ready(page)


def ready(page: Any) -> None:
    page.wait_for_selector("body[data-ready]")


def begin(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def end(page: Any) -> None:
    """Wait for the answer's end: its buttons come then."""
    page.wait_for_selector("#send:visible")
    page.wait_for_selector("article.assistant:last-of-type .foot button >> text=Regenerate")


def say(page: Any, text: str) -> None:
    begin(page, text)
    end(page)


def said(page: Any) -> str:
    """What the last answer shows, without marks."""
    script = "all => all.at(-1) ? [...all.at(-1).childNodes].filter(n => !n.classList?.contains('special'))"
    return page.eval_on_selector_all("article.assistant > .said", f"{script}.map(n => n.textContent).join('') : ''")


def answering(body: str) -> Callable[[Any], None]:
    return lambda route: route.fulfill(body=body, content_type="text/event-stream")


def again_is_told(page: Any, verdict: str) -> str:
    page.click("text=Ask again among others")
    return compared(page, verdict)


def compared(page: Any, verdict: str) -> str:
    """What the page says of the second answer, once it is compared."""
    page.wait_for_selector(f".again .{verdict}")
    return page.text_content("article.assistant .again")


RULES = {"all": "['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa']", "colors": "{type: 'rule', values: ['color-contrast']}"}


def use_axe(page: Any) -> None:
    """Load axe-core into the page, past its policy."""
    (axe,) = environment("axe").parent.rglob("axe.min.js")
    page.context.new_cdp_session(page).send("Runtime.evaluate", {"expression": axe.read_text(encoding="utf-8")})


def axe_findings(page: Any, rules: str = "all") -> list[tuple[str, str]]:
    """What axe-core finds in the view: each rule with the first element that breaks it."""
    report = page.evaluate(f"axe.run(document, {{runOnly: {RULES[rules]}}})")
    assert len(report["passes"]) > (10 if rules == "all" else 0), "it looks at the page"
    return [(one["id"], one["nodes"][0]["html"]) for one in report["violations"]]


GIVE = """([numbers, event, name, type]) => {
    const given = new DataTransfer(), options = {bubbles: true, cancelable: true};
    given.items.add(new File([new Uint8Array(numbers)], name, {type}));
    const made = event === "paste" ? new ClipboardEvent(event, {...options, clipboardData: given})
        : new DragEvent(event, {...options, dataTransfer: given});
    document.getElementById("prompt").dispatchEvent(made);
}"""


def give(page: Any, file: bytes, event: str, name: str = "picture.png", kind: str = "image/png") -> None:
    """Paste or drop it."""
    page.evaluate(GIVE, [list(file), event, name, kind])
