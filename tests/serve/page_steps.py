"""What tests of the page do in a browser again and again."""

from collections.abc import Callable
from typing import Any

from chromium import until
from client_environments import environment
from serving import Served

# The likeliest token each time, and tokens are shown, unless a test says something else.
SETTINGS = {True: '{"temperature": "0"}', False: '{"temperature": "0", "coloured": true}'}
MARKDOWN = r"""# Title

Some **bold**, *italic*, ~~gone~~ and `code`, a [link](https://example.org/a) and a [bad one](javascript:alert(1)),
$e^{i\pi} = -1$ and \(x_1\), but $5 and $6 are prices.

3. three
   - nested
4. four

> a quote

| a | b |
|:--|--:|
| left | 12 |

$$\int_0^1 x^2\,dx$$

```python
def add(a): return a + 1  # more
```

---
![picture](https://example.org/x.png) <b>raw</b>"""


def visit(page: Any, served: Served, *, formatted: bool = False) -> None:
    keep = f"localStorage.setItem('whorl.settings', '{SETTINGS[formatted]}')"
    page.add_init_script(f"localStorage.getItem('whorl.settings') ?? {keep}")
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


def choose(page: Any, title: str) -> None:
    """Open a conversation of the list, and wait until it is there."""
    page.click(f"#list .open >> text={title}")
    page.wait_for_selector(f"#list .open[aria-current='true'] >> text={title}")


def begin_another(page: Any) -> None:
    """Begin a conversation, and wait until it is there: then its message has the focus."""
    page.click("#new")
    until(page, "document.activeElement.id === 'prompt'")


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
    how = f"{{runOnly: {RULES[rules]}, resultTypes: ['violations']}}"
    report = page.evaluate(f"axe.run(document, {how})")
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
