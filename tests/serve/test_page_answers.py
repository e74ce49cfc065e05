"""Answers on the page: Markdown whole, growing without jumps, and what only this engine can show."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import missing, until, window
from page_steps import MARKDOWN, answering, begin, end, said, say, visit
from serving import Served, serving, told

from whorl.engine.drafting import DraftOptions

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

CHAT = "**/v1/chat/completions"
ANSWERS = {"md": MARKDOWN, "hello": "hello hello hello there", "long": "word " * 150, "fence": "```\nx = 1\n```\nafter"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    llm = told(ANSWERS, delay=0.002, speculate=DraftOptions(pld=True).lookup(), draft_length="fixed")
    with serving(llm) as running:
        yield running


@pytest.fixture
def page(opened: Any, served: Served) -> Iterator[Any]:
    with window(opened, color_scheme="light") as tab:
        visit(tab, served, formatted=True)
        yield tab


def stream(tokens: list[str]) -> str:
    """A stream of these tokens, one an event."""

    def event(text: str, reason: str | None) -> str:
        details = {"tokens": [{"id": 1, "text": text, "source": "model"}]}
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason, "token_details": details}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    return "".join(event(text, None) for text in tokens) + event("", "stop") + "data: [DONE]\n\n"


# ---- Markdown


def test_markdown_whole(page: Any) -> None:
    say(page, "md")
    text = "article.assistant > .said"
    for selector, content in (
        ("h1", "Title"),
        ("strong", "bold"),
        ("em", "italic"),
        ("s", "gone"),
        ("ol > li > ul > li", "nested"),
        ("blockquote", "a quote"),
        ("th.right", "b"),
        ("td.left", "left"),
        (".code .h-keyword >> nth=0", "def"),
        (".code .h-comment", "# more"),
        (".bar-of span", "python"),
    ):
        assert page.text_content(f"{text} {selector}").strip() == content, selector
    assert page.get_attribute(f"{text} ol", "start") == "3"
    assert page.locator(f"{text} hr").count() == 1
    assert page.locator(f"{text} math").count() == 3
    assert page.locator(f"{text} .formula math").count() == 1
    assert "but $5 and $6 are prices" in page.inner_text(text)
    assert "<b>raw</b>" in page.inner_text(text)
    links = page.eval_on_selector_all(f"{text} a", "all => all.map(one => [one.href, one.rel, one.target])")
    safe = ["noopener noreferrer nofollow", "_blank"]
    assert links == [["https://example.org/a", *safe], ["https://example.org/x.png", *safe]]
    assert page.locator(f"{text} img").count() == 0  # nothing is fetched for a model


FORMULAS = r"""text => markdown.parse(text, {}).flatMap(one => [one, ...(one.children || [])])
    .filter(one => one.type === "math").map(one => one.content.trim())"""


def test_a_formula_ends_where_it_says(page: Any) -> None:
    """With text behind it, too; and what never ends is looked for within limits."""
    for text, formulas in (
        ("$$a$$ is nice\n\nfoo\n\n$$b$$", ["a", "b"]),
        ("\\[x\\] where it is\n\n- and \\[y\\]", ["x", "y"]),
        ("text\n$$\nx\n\ny\n$$\nmore", ["x\n\ny"]),
        ("$$\nx$$ and\n$$y", ["x"]),
        ("$$x\n" + "\n" * 300 + "$$", []),
    ):
        assert page.evaluate(FORMULAS, text) == formulas, text
    for text in ("$$ a\n" * 3000, "\\( " * 9000):
        took = page.evaluate(
            "text => { const t = performance.now(); markdown.parse(text, {}); return performance.now() - t; }", text
        )
        assert took < 5000, text[:8]


def test_a_block_of_code_is_copied(opened: Any, served: Served) -> None:
    with window(opened, permissions=["clipboard-read", "clipboard-write"]) as page:
        visit(page, served, formatted=True)
        say(page, "md")
        page.click("[aria-label='Copy this code']")
        until(page, "document.querySelector('#status').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == "def add(a): return a + 1  # more\n"


def test_what_grows_is_what_it_is_at_the_end(page: Any) -> None:
    """However the text is cut: blocks that are over are not made again, and none is lost."""
    script = """text => {
        const [whole, grown] = [0, 1].map(() => document.createElement("div"));
        new Formatted(whole).draw(text, true);
        const growing = new Formatted(grown);
        for (let at = 1; at < text.length; at += 3) growing.draw(text.slice(0, at), false);
        const first = grown.firstChild;
        growing.draw(text, true);
        return [whole.outerHTML.replace(/ class="many"/, ""), grown.outerHTML, first === grown.firstChild];
    }"""
    for text in (
        MARKDOWN,
        "a\n\nb\n\n* c\n\n  d\n* e\n\n```\nf\n\ng\n```\nh",
        "[x][1] and\n\nmore\n\n[1]: https://example.org",
    ):
        whole, grown, is_same = page.evaluate(script, text)
        assert whole == grown
        assert is_same == ("[1]:" not in text)


def test_the_reader_is_not_moved(page: Any, served: Served) -> None:
    page.set_viewport_size({"width": 320, "height": 380})
    with served.llm.model.held_after(150):  # type: ignore[attr-defined]
        begin(page, "long")
        until(page, "document.querySelector('#log').scrollTop > 20")  # it follows
        until(page, "(document.querySelector('#log').scrollTop = 0, !document.querySelector('#newest').hidden)")
    end(page)
    assert page.evaluate("document.querySelector('#log').scrollTop") == 0
    page.click("#newest")
    until(page, "(log => log.scrollHeight - log.scrollTop - log.clientHeight < 2)(document.querySelector('#log'))")
    assert not page.is_visible("#newest")


def test_twenty_thousand_tokens_stay_smooth(page: Any) -> None:
    words = [f"word{i} " if i % 20 else "\n\n" for i in range(20000)]
    page.route(CHAT, answering(stream(words)))
    page.evaluate(
        """() => { window.longest = 0; new PerformanceObserver(list => { for (const one of list.getEntries())
        window.longest = Math.max(window.longest, one.duration); }).observe({entryTypes: ["longtask"]}); }"""
    )
    began = time.monotonic()
    say(page, "hello")
    assert len(page.text_content("article.assistant > .said")) > 100_000
    took, longest = time.monotonic() - began, page.evaluate("window.longest")
    assert longest < 2000, "milliseconds in which the page does not answer, on a busy machine"
    assert took < 60
    page.unroute(CHAT)
    scroll = (
        "(log => { const t = performance.now(); log.scrollTop = 0; log.offsetHeight; return performance.now() - t; })"
    )
    assert page.evaluate(f"{scroll}(document.querySelector('#log'))") < 1000


# ---- what only this engine can show


def test_another_token_goes_on(page: Any) -> None:
    """Why this token: the alternatives; one of them starts a branch."""
    page.click("#tokens")
    say(page, "hello")
    page.locator("article.assistant > .said > .t").nth(5).click()
    row = page.locator("#token tbody tr").nth(1)
    other = row.locator("button").text_content()
    with page.expect_request(CHAT) as request:
        row.locator("button").click()
    end(page)
    body = request.value.post_data_json
    assert body["messages"][-1] == {"role": "assistant", "content": f"hello{other}"}
    assert body["continue_final_message"]
    assert said(page).startswith(f"hello{other}")
    assert page.text_content("article.assistant .branch") == "2/2"
    assert page.text_content("article.assistant .t.you") == other
    page.click("[aria-label='Branch before']")
    assert said(page) == ANSWERS["hello"]


def test_an_answer_is_recomputed_as_a_prompt(page: Any) -> None:
    say(page, "hello")
    page.click("text=Same bits?")
    page.wait_for_selector("article.assistant .badge")
    count = len(ANSWERS["hello"]) + 1
    assert page.text_content(".badge") == f"\u2713 same bits: {count} tokens recomputed as a prompt"

    def change(route: Any) -> None:
        reply = route.fetch()
        answer = reply.json()
        scores = answer["choices"][0]["prompt_logprobs"]
        for score in scores[-3].values():
            score["logprob"] -= 2**-20
        route.fulfill(response=reply, body=json.dumps(answer))

    page.route("**/v1/completions", change)
    page.click("text=Same bits?")
    page.wait_for_selector(f"article.assistant .foot .error >> text=token {count - 2} of {count} differs as a prompt")


def test_one_message_through_two_settings(page: Any) -> None:
    page.click("#show-compare")
    page.fill("#compare-prompt", "hello")
    page.click("#compare-form >> text=Compare")
    until(page, "document.querySelector('#compare-verdict').textContent.startsWith('Equal:')")
    sides = page.eval_on_selector_all("#compare .said", "all => all.map(one => one.textContent)")
    assert sides == [ANSWERS["hello"]] * 2
    numbers = iter([0, 9])

    def change(route: Any) -> None:
        bias = next(numbers)
        body = route.request.post_data_json | ({"logit_bias": {"1": 100}, "max_tokens": 5} if bias else {})
        route.continue_(post_data=json.dumps(body))

    page.route(CHAT, change)
    page.click("#compare-form >> text=Compare")
    until(page, "document.querySelector('#compare-verdict').textContent.startsWith('They part at token 1.')")
    assert "99.6% left" in page.text_content("#compare-verdict")
    assert page.locator("#compare .apart").count() == 2
    page.keyboard.press("Escape")
    assert not page.is_visible("#compare")


def compare(page: Any, right: str) -> str:
    """What is said of an answer with the settings as they are, and of another one."""
    page.click("#show-compare")
    page.fill("#compare-prompt", "hello")
    page.select_option("#compare-right", label=right)
    page.click("#compare-form >> text=Compare")
    until(page, "!['', 'Answering ...'].includes(document.querySelector('#compare-verdict').textContent)")
    return page.text_content("#compare-verdict")


def test_drafts_and_none(page: Any) -> None:
    """A request may go without drafts, and has the same bits."""
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    assert compare(page, "Without drafts").startswith("Equal:")
    assert [body.get("drafts") for body in bodies if "messages" in body] == [None, False]
    left, right = page.eval_on_selector_all("#compare .side > .hint", "all => all.map(one => one.textContent)")
    assert "drafted" in left
    assert "drafted" not in right
    assert all("tok/s" in facts for facts in (left, right))


def test_another_server(opened: Any) -> None:
    """Other weights, such as quantised ones, have a server of their own, which must allow this page."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, other_port = (listener.getsockname()[1] for listener in (one, two))
    name = f"127.0.0.1:{other_port}"
    with serving(told(ANSWERS), port=port, compare_with=(f"http://{name}",)) as served:
        other = told({"hello": "hello, my friend"})
        with serving(other, port=other_port, origins=(served.url,)) as another, window(opened) as page:
            visit(page, served, formatted=True)
            page.evaluate("key = 'sk-of-this-server'")
            with page.expect_request(f"{another.url}/v1/chat/completions") as request:
                verdict = compare(page, f"The server at {name}")
            assert verdict.startswith("They part at token 6.")
            assert "authorization" not in request.value.headers
        with serving(other, port=other_port) as another, window(opened, refusing="CORS") as page:
            visit(page, served, formatted=True)
            verdict = compare(page, f"The server at {name}")
            assert verdict.startswith(f"{name} cannot be reached from this page. It needs whorl serve --allow-origin")


def test_adapters_states_and_blocks_beyond_the_device(opened: Any, served: Served) -> None:
    """As a server tells of them that has all three."""
    more = {"num_state_bytes": 2e9, "num_snapshots": 3, "num_states_loaded": 1}
    more |= {"num_host_bytes": 4e9, "num_disk_bytes": 5e9, "num_blocks_fetched": 6}

    def told_too(name: str, add: Callable[[Any], Any]) -> None:
        page.route(f"**/page/{name}", lambda route: route.fulfill(json=add(route.fetch().json())))

    with window(opened) as page:
        told_too("about", lambda about: about | {"adapters": ["poet"]})
        told_too("stats", lambda stats: stats | {"engine": stats["engine"] | more})
        visit(page, served, formatted=True)
        page.click("#show-engine")
        page.wait_for_selector("#states >> text=States take 2.00 GB, with 3 snapshots; 1 prompt began with one.")
        page.wait_for_selector(
            "#states >> text=4.00 GB in memory and 5.00 GB in files; 6 blocks fetched. Adapters: poet."
        )
        bodies: list[Any] = []
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
        assert compare(page, "adapter poet").startswith("Equal:")
        assert [body.get("model") for body in bodies if "messages" in body] == [None, "poet"]
        page.unroute_all()


def test_the_time_of_a_request_is_a_chrome_trace(page: Any, tmp_path: Path) -> None:
    say(page, "hello")
    page.click("#show-engine")
    assert "queue" in page.text_content("#timeline")
    with page.expect_download() as download:
        page.click("text=Save as a Chrome trace")
    download.value.save_as(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert {"request", "queue", "prompt", "decode"} <= spans.keys()
    assert all(span["dur"] >= 0 for span in spans.values())
    assert spans["decode"]["ts"] + spans["decode"]["dur"] <= spans["request"]["dur"] + 2
    assert sum(event["ph"] == "i" for event in events) == len(ANSWERS["hello"]) + 1
