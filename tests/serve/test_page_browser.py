"""The page in a real browser, against a real server whose model says what it is told."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import missing, until, window
from media_files import png
from page_steps import again_is_told, answering, begin, begin_another, compared, end, give, ready, said, say, visit
from seeing import looking, seeing
from serving import Served, serving, told, wait_until

from whorl.engine.drafting import DraftOptions

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

IMAGE = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
BIDI = "\u202eevil\u202c \u200fright\u2066to\u2069 left"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWERS = {
    "hello": "hello hello hello hello hello hello hello there",
    "long": "abcd efgh " * 60,
    "why": "<think>since it is so</think>It is **so**.",
    "img": IMAGE,
    "bidi": BIDI,
    "call": CALL,
    "sunny": "It is sunny.",
    "code": "Here:\n```\nx = 1\n```\n- one\n- two `y`",
}
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
CHAT = "**/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        told(ANSWERS, delay=0.003, speculate=DraftOptions(pld=True).lookup(), draft_length="fixed")
    ) as running:
        yield running


@pytest.fixture
def page(opened: Any, served: Served) -> Iterator[Any]:
    with window(opened) as tab:
        visit(tab, served)
        yield tab


# ---- asking


def test_send_and_stream(page: Any, served: Served) -> None:
    with served.llm.model.held_after(20):  # type: ignore[attr-defined]
        begin(page, "long")
        until(page, "document.querySelectorAll('article.assistant .t').length > 5")
        assert page.is_visible("#stop")  # it shows tokens before the answer is over
        assert page.get_attribute("#log", "aria-busy") == "true"
    end(page)
    assert said(page) == ANSWERS["long"]
    assert page.text_content("#status").startswith("abcd efgh")  # for those who listen
    facts = page.text_content("article.assistant .facts")
    assert f"{len(ANSWERS['long']) + 1} tokens" in facts
    assert "tok/s" in facts
    assert "drafted accepted" in facts
    until(page, "document.querySelector('#room-text').textContent.includes('of 1,024')")
    assert page.is_enabled("#prompt")
    assert page.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_request_and_keeps_what_was_said(page: Any, served: Served, how: str) -> None:
    with served.llm.model.held_after(20):  # type: ignore[attr-defined]
        begin(page, "long")
        until(page, "document.querySelectorAll('article.assistant .t').length > 5")
        if how == "button":
            page.click("#stop")
        else:
            page.press("#prompt", "Escape")
        end(page)
    assert "stopped by you" in page.text_content("article.assistant .facts")
    assert 5 < len(said(page)) < len(ANSWERS["long"])
    assert ANSWERS["long"].startswith(said(page))
    wait_until(served.is_idle)  # its blocks are free


@pytest.mark.slow
def test_branches_and_a_reload(page: Any) -> None:
    say(page, "hello")
    page.click("article.user >> text=Edit")
    assert page.input_value("#prompt") == "hello"
    say(page, "code")
    assert page.text_content("article.user .branch") == "2/2"
    page.click("text=Regenerate")
    end(page)
    assert page.text_content("article.assistant .branch") == "2/2"
    page.click("article.user >> [aria-label='Branch before']")
    assert said(page) == ANSWERS["hello"]
    page.reload()
    ready(page)
    assert page.text_content("article.user > .said") == "hello"
    assert said(page) == ANSWERS["hello"]
    assert page.locator("article.assistant .t.lookup").count() > 5  # its tokens were kept, too
    page.click("article.user >> [aria-label='Branch behind']")
    assert page.text_content("article.user > .said") == "code"
    assert page.text_content("article.assistant .branch") == "2/2"


def test_what_was_said_comes_with_the_next_question(page: Any) -> None:
    say(page, "hello")
    with page.expect_request(CHAT) as request:
        say(page, "long")
    roles = [(one["role"], one["content"]) for one in request.value.post_data_json["messages"]]
    assert roles == [("user", "hello"), ("assistant", ANSWERS["hello"]), ("user", "long")]


def test_settings_reach_the_server_and_stay(page: Any) -> None:
    page.click("#show-settings")
    page.fill("#system", "Be brief.")
    page.click("#system-default")
    for name, value in (("temperature", "0.5"), ("top_k", "7"), ("max_tokens", "3")):
        page.fill(f"[data-setting={name}]", value)
    page.fill("[data-setting=stop]", "zz\nyy")
    page.fill("[data-setting=seed]", "11")
    page.reload()
    ready(page)
    with page.expect_request(CHAT) as request:
        say(page, "hello")
    body = request.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    expected = {"temperature": 0.5, "top_k": 7, "max_tokens": 3, "stop": ["zz", "yy"], "seed": 11}
    assert {name: body[name] for name in expected} == expected
    assert "cut off at the limit" in page.text_content("article.assistant .facts")
    assert said(page) == "hel"


def test_reasoning_is_folded(page: Any) -> None:
    say(page, "why")
    assert page.is_visible("article.assistant details.thinking > summary")
    assert not page.is_visible("article.assistant details.thinking .said")
    page.click("article.assistant details.thinking > summary")
    assert "since it is so" in page.text_content("article.assistant details.thinking .said")
    assert said(page) == "It is **so**."
    page.click("#tokens")  # as text
    assert page.inner_text("article.assistant > .said") == "It is so."
    assert page.text_content("article.assistant > .said strong") == "so"


def test_tool_calls_are_shown_and_answered(page: Any) -> None:
    page.click("#show-settings")
    page.fill("[data-setting=tools]", TOOLS[:-1])
    begin(page, "call")
    page.wait_for_selector("#tools-wrong:visible")
    assert "The list of tools is not JSON" in page.text_content("#note-text")
    page.fill("[data-setting=tools]", TOOLS)
    begin_another(page)
    say(page, "call")
    assert "Call: weather" in page.text_content(".call")
    assert json.loads(page.text_content(".call pre")) == {"city": "Paris"}
    page.fill(".call textarea", "sunny")
    with page.expect_request(CHAT) as request:
        page.click("text=Return this")
    *_, call, result = request.value.post_data_json["messages"]
    assert result == {"role": "tool", "content": "sunny", "tool_call_id": call["tool_calls"][0]["id"]}
    end(page)
    assert said(page) == "It is sunny."


# ---- tokens


def test_a_token_tells_where_it_came_from_and_what_else_was_likely(page: Any) -> None:
    say(page, "hello")
    shown = page.locator("article.assistant > .said > .t")
    assert shown.first.get_attribute("class") == "t"
    shown.first.click()
    assert "From the model" in page.text_content("#token")
    rows = page.locator("#token tbody tr")
    assert rows.count() == 5
    assert rows.first.text_content().startswith("h99.6%")
    page.press("body", "Escape")
    assert not page.is_visible("#token")
    page.locator("article.assistant .t.lookup").first.click()
    assert "prompt lookup" in page.text_content("#token .source")
    page.click("#log", position={"x": 3, "y": 3})
    assert not page.is_visible("#token")
    page.click("article.assistant details.asked > summary")
    until(page, "document.querySelector('article.assistant details.asked .said').textContent.includes('hello')")
    assert page.locator("details.asked .cache").count() % 8 == 0  # whole blocks


def test_tokens_by_keyboard(page: Any) -> None:
    say(page, "hello")
    page.locator("article.assistant .t[tabindex='0']").focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert "Token 3," in page.text_content("#token")
    page.keyboard.press("ArrowLeft")
    assert "Token 2," in page.text_content("#token")
    assert "Token 2," in page.text_content("#status")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.last") == "1"
    assert page.locator("article.assistant .t[tabindex='0']").count() == 1


def test_asked_again_among_others_the_bits_are_equal(page: Any, served: Served) -> None:
    say(page, "long")
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    with served.llm.model.held_after(0):  # type: ignore[attr-defined]
        page.click("text=Ask again among others")
        wait_until(lambda: served.app.state.service.engine.num_waiting == 13)  # none comes after the answer's end
    verdict = compared(page, "equal")
    count = len(ANSWERS["long"]) + 1
    assert f"Equal: {count} of {count} tokens and log-probabilities, bit by bit." in verdict
    assert "while 12 other sequences ran" in verdict
    same, others = [one for one in bodies if "n" not in one], [one for one in bodies if "n" in one]
    assert [one["messages"][-1]["content"] for one in same] == ["long"]
    assert sum(one["n"] for one in others) == 12  # no more than that
    assert all(one["max_tokens"] <= 256 for one in others)
    wait_until(served.is_idle)  # the others are ended with it


def test_a_bit_that_differs_is_found(page: Any) -> None:
    say(page, "hello")

    def change(route: Any) -> None:
        reply = route.fetch()
        lines = reply.text().split("\n")
        at = next(i for i, line in enumerate(lines) if '"logprob":' in line)
        event = json.loads(lines[at].removeprefix("data: "))
        event["choices"][0]["token_details"]["tokens"][0]["logprob"] *= 1 + 2**-52
        lines[at] = f"data: {json.dumps(event)}"
        route.fulfill(response=reply, body="\n".join(lines))

    page.route(CHAT, lambda route: route.continue_() if "n" in route.request.post_data_json else change(route))
    assert "Not equal: token 1 of" in again_is_told(page, "unequal")


# ---- what goes wrong


def test_a_key_is_asked_for(opened: Any) -> None:
    with serving(told(ANSWERS), api_key="sk-right") as locked, window(opened) as page:
        visit(page, locked)
        expected = locked.http.get("/page/about", headers={"Authorization": ""}).json()["error"]["message"]
        assert page.text_content("#note-text") == expected
        page.fill("#key", "sk-wrong")
        page.press("#key", "Enter")
        until(page, "document.querySelector('#note-text').textContent === 'the API key is wrong'")
        page.fill("#key", "sk-right")
        page.press("#key", "Enter")
        page.wait_for_selector("#note", state="hidden")
        say(page, "hello")
        assert said(page) == ANSWERS["hello"]
        page.reload()
        ready(page)
        assert not page.is_visible("#note")
        assert page.evaluate("JSON.stringify(localStorage)").count("sk-right") == 0  # gone with the tab


def test_errors_are_told_as_the_server_words_them(page: Any, served: Served) -> None:
    page.click("#show-settings")
    page.fill("[data-setting=max_tokens]", "5000")
    say(page, "hello")
    shown = page.text_content("article.assistant .error")
    assert "5000 more are asked for; this model's maximum context length is 1024 tokens. Shorten one of them." in shown
    assert "(request " in shown
    page.fill("[data-setting=max_tokens]", "")
    with page.expect_request(CHAT) as request:
        page.click("text=Regenerate")
    assert [one["role"] for one in request.value.post_data_json["messages"]] == ["user"]
    end(page)
    assert said(page) == ANSWERS["hello"]


def test_a_hostile_answer_is_text(page: Any) -> None:
    for coloured in (True, False):
        say(page, "img")
        assert page.inner_text("article.assistant:last-of-type > .said").removesuffix("<|im_end|>") == IMAGE
        assert page.locator("#log img, #log script").count() == 0
        assert page.title() == "img \u2013 whorl"
        if coloured:
            page.click("#tokens")


def test_a_mistake_that_makes_markup_of_text_is_refused(opened: Any, served: Served) -> None:
    """By the browser, as the policy says."""
    with window(opened, refusing="TrustedHTML") as page:
        visit(page, served)
        script = "(() => { try { document.body['inner' + 'HTML'] = '<b>'; } catch (error) { return error.name; } })()"
        assert page.evaluate(script) == "TypeError"


def test_marks_of_direction_stay_inside_the_answer(page: Any) -> None:
    say(page, "bidi")
    assert said(page) == BIDI
    style = "all => all.map(one => getComputedStyle(one).unicodeBidi)"
    assert set(page.eval_on_selector_all("article .said", style)) <= {"isolate", "plaintext"}
    page.locator("article.assistant > .said > .t").first.click()
    assert "\\u{202e}" in page.text_content("#token .shows")  # and can be seen


@pytest.mark.slow
def test_a_line_of_a_megabyte(page: Any) -> None:
    line = "<b>x" * (1 << 18)
    for coloured in (True, False):
        token = {"id": 1, "text": line, "source": "model"}
        choice = {"index": 0, "delta": {"content": line}, "finish_reason": "stop", "token_details": {"tokens": [token]}}
        body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        page.route(CHAT, answering(body))
        say(page, "hello")
        assert page.evaluate("[...document.querySelectorAll('article.assistant > .said')].at(-1).textContent") == line
        width = page.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1]
        page.unroute(CHAT)
        if coloured:
            page.click("#tokens")
    begin_another(page)
    say(page, "hello")  # the page is still of use
    assert page.inner_text("article.assistant > .said") == ANSWERS["hello"]


# ---- pictures


def test_pictures_by_paste_and_drop(opened: Any) -> None:
    llm = looking({"it": "A picture."})
    with seeing(llm=llm) as served, window(opened) as page:
        visit(page, served)
        assert page.is_visible("#attach")
        give(page, png(48, 48, seed=1), "paste")
        until(page, "document.querySelectorAll('#attached img').length === 1")
        give(page, png(48, 40, seed=2), "drop")
        until(page, "document.querySelectorAll('#attached img').length === 2")
        give(page, png(48, 40, seed=3), "drop")
        page.click("[aria-label='Remove picture 3']")
        say(page, "it")
        (_, items) = llm.seen[-1]
        assert len(items) == 2  # the server decoded both
        assert page.locator("article.user img").count() == 2
        assert page.evaluate("[...document.images].every(one => one.naturalWidth === 48)")
        assert page.locator("#attached img").count() == 0


def test_a_model_that_does_not_see_says_so(page: Any) -> None:
    give(page, png(8, 8, seed=1), "paste")
    page.wait_for_selector("text=This model takes text only.")


# ---- the rest


def test_export_and_import(page: Any, tmp_path: Path) -> None:
    say(page, "hello")
    page.click("text=Regenerate")
    end(page)
    page.click("#show-settings")
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    kept = json.loads(file.read_text())
    assert sorted(node["content"] for node in kept["nodes"]) == ["hello", ANSWERS["hello"], ANSWERS["hello"]]
    last = next(node for node in kept["nodes"] if node["id"] == kept["leaf"])
    last |= {"content": IMAGE, "tokens": []}
    first = next(node for node in kept["nodes"] if node["role"] == "user")
    first["pictures"] = ["javascript:alert(1)"]
    kept["nodes"] = [*(node for node in kept["nodes"] if node is not first), first]  # children first, as ids may sort
    file.write_text(json.dumps(kept))
    page.set_input_files("#import-file", file)
    until(page, "document.querySelectorAll('#list .open').length === 2")
    assert said(page) == IMAGE
    assert page.locator("#log img").count() == 0
    assert page.text_content("article.assistant .branch") == "2/2"
    page.reload()
    ready(page)
    assert said(page) == IMAGE
    for wrong, why in (
        ({"nodes": []}, "it is no conversation of this page"),
        (kept | {"version": 9}, "its version is 9, and this page reads 1"),
        (kept | {"nodes": kept["nodes"][:-1]}, "the parent of node 1 is missing"),
        (kept | {"nodes": [first | {"parent": first["id"]}]}, "a node is its own ancestor"),
    ):
        file.write_text(json.dumps(wrong))
        page.set_input_files("#import-file", file)
        page.wait_for_selector(f"#note-text >> text=kept.json cannot be imported: {why}")


OTHERS = """() => {
    const body = JSON.stringify({messages: [{role: "user", content: "long"}], temperature: 0});
    const asked = {method: "POST", headers: {"Content-Type": "application/json"}, body};
    for (let i = 0; i < 3; i += 1) fetch("/v1/chat/completions", asked).catch(() => {});
}"""


@pytest.mark.slow
def test_the_engine_is_drawn_as_it_fills(opened: Any) -> None:
    with serving(told(ANSWERS, delay=0.02, max_num_seqs=2)) as served, window(opened) as page:
        visit(page, served)
        page.click("#show-engine")
        page.wait_for_selector("text=No roofline: this model does not say what a step reads.")
        begin(page, "long")
        page.wait_for_selector("#running .bar")
        until(page, "!document.querySelector('#blocks-text').textContent.startsWith('0 of')")
        assert re.match(r"[1-9]\d* of 512 blocks", page.get_attribute("#blocks", "aria-label"))
        tints = "new Set(document.querySelector('#blocks').getContext('2d').getImageData(0, 0, 300, 8).data).size"
        assert page.evaluate(tints) > 3  # something is painted
        until(page, "parseFloat(document.querySelector('#speed').textContent) > 1")
        page.evaluate(OTHERS)
        page.wait_for_selector("#queue .waiting")
        page.click("#stop")
        end(page)
