"""What tests of the page do in a browser again and again."""

from collections.abc import Callable
from typing import Any

from serving import Served

# The likeliest token each time, unless a test says something else.
GREEDY = "localStorage.getItem('whorl.settings') ?? localStorage.setItem('whorl.settings', '{\"temperature\": \"0\"}')"


def visit(page: Any, served: Served) -> None:
    page.add_init_script(GREEDY)
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


GIVE = """([numbers, event]) => {
    const given = new DataTransfer(), options = {bubbles: true, cancelable: true};
    given.items.add(new File([new Uint8Array(numbers)], "picture.png", {type: "image/png"}));
    const made = event === "paste" ? new ClipboardEvent(event, {...options, clipboardData: given})
        : new DragEvent(event, {...options, dataTransfer: given});
    document.getElementById("prompt").dispatchEvent(made);
}"""


def give(page: Any, picture: bytes, event: str) -> None:
    """Paste or drop it."""
    page.evaluate(GIVE, [list(picture), event])
