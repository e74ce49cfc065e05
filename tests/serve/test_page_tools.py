"""Tools of MCP servers on the page: chosen, called by the model, seen, run by the person, answered."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import missing, until, window
from mcp_servers import sdk_server
from page_steps import axe_findings, begin, begin_another, choose, end, ready, said, say, use_axe, visit
from serving import TEMPLATE, Served, serving, told

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

CHAT = "**/v1/chat/completions"
SUNNY = "It is sunny in Paris."


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ANSWERS = {
    "call": calling("weather", '{"city": "Paris"}'),
    "slow": calling("slow", '{"seconds": 120}'),
    "broken": calling("broken", "{}"),
    "hello": "Hello!",
    SUNNY: "Take your sunglasses.",
    "The person refused this call.": "As you like.",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with sdk_server("mcp") as running:
        yield running


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(ANSWERS), mcp_servers=("loopback",)) as running:
        yield running


@pytest.fixture
def page(opened: Any, served: Served, url: str) -> Iterator[Any]:
    """A page that uses the server."""
    with window(opened, color_scheme="light") as tab:
        visit(tab, served, formatted=True)
        tab.click("#show-settings")
        assert tab.locator("#servers input").count() == 0  # off by default
        tab.fill("#server-url", url.removeprefix("http://"))
        tab.click("#server-form button")
        tab.wait_for_selector("#servers summary >> text=4 tools")
        yield tab


def test_a_call_is_seen_run_and_answered(page: Any, url: str, tmp_path: Path) -> None:
    with page.expect_request(CHAT) as request:
        say(page, "call")
    functions = {one["function"]["name"]: one["function"] for one in request.value.post_data_json["tools"]}
    assert functions.keys() == {"weather", "slow", "broken", "table"}
    assert functions["weather"]["parameters"]["properties"]["city"]["type"] == "string"
    assert "Paris" in page.text_content(".call pre")
    host = url.split("/")[2]
    assert page.locator("article.tool").count() == 0  # nothing runs by itself
    page.click("#servers summary")
    use_axe(page)
    assert axe_findings(page) == []
    shown = tmp_path / "page_tools.png"
    page.locator("#server-form").scroll_into_view_if_needed()
    page.screenshot(path=shown)
    if folder := os.environ.get("WHORL_PICTURES"):
        shutil.copy(shown, folder)
    with page.expect_request(CHAT) as request:
        page.click(f"text=Run at {host}")
    end(page)
    *_, call, answer = request.value.post_data_json["messages"]
    assert answer == {"role": "tool", "content": SUNNY, "tool_call_id": call["tool_calls"][0]["id"]}
    assert said(page) == "Take your sunglasses."
    assert page.text_content("article.tool > .said") == SUNNY


def test_a_call_is_refused(page: Any) -> None:
    say(page, "call")
    page.click(".call >> text=Refuse")
    end(page)
    assert said(page) == "As you like."


def test_a_call_is_cancelled_or_fails(page: Any) -> None:
    say(page, "slow")
    page.click(".call >> text=Run at")
    page.click(".call >> text=Cancel")
    page.wait_for_selector(".call >> text=Cancelled. The server may have done some of it.")
    assert page.is_enabled(".call >> text=Return this")
    say(page, "broken")
    with page.expect_request(CHAT) as request:
        page.click("article.assistant:last-of-type .call >> text=Run at")
    assert request.value.post_data_json["messages"][-1]["content"].startswith("Error: ")
    end(page)


def test_the_choice_stays_and_can_be_taken_back(page: Any, url: str) -> None:
    say(page, "call")
    page.reload()
    ready(page)
    page.wait_for_selector(".call >> text=Run at")  # after a reload, too
    page.click("#show-settings")
    page.wait_for_selector("#servers summary >> text=4 tools")
    page.click("#servers input")
    begin_another(page)
    with page.expect_request(CHAT) as request:
        say(page, "hello")
    assert "tools" not in request.value.post_data_json
    choose(page, "call")
    assert page.locator(".call >> text=Run at").count() == 0  # the server is not used any more
    page.click(f"[aria-label='Remove {url}']")
    assert page.locator("#servers input").count() == 0


def test_other_machines_are_not_asked(page: Any, url: str) -> None:
    page.fill("#server-url", "http://10.0.0.1/mcp")
    page.click("#server-form button")
    page.wait_for_selector("#note-text >> text=http://10.0.0.1/mcp is not on this machine.")
    page.fill("#server-url", url.replace("/mcp", "/nothing"))
    page.click("#server-form button")
    page.wait_for_selector("#servers .error >> text=it answers with status 404")


def test_a_session_that_ended_begins_again(opened: Any, served: Served) -> None:
    """A server with sessions was started anew: the call runs, in another session."""
    with window(opened) as page:
        visit(page, served, formatted=True)
        page.click("#show-settings")
        with sdk_server("mcp-sessions") as first:
            page.fill("#server-url", first)
            page.click("#server-form button")
            page.wait_for_selector("#servers summary >> text=4 tools")
            say(page, "call")
        with sdk_server("mcp-sessions", int(first.split(":")[2].split("/")[0])):
            page.click(".call >> text=Run at")
            until(page, "document.querySelectorAll('article.assistant').length === 2")
            end(page)
            assert said(page) == "Take your sunglasses."


def test_a_model_that_does_not_see_tools_says_so(opened: Any) -> None:
    without = TEMPLATE[TEMPLATE.index("{% for m in") :]
    with serving(told(), mcp_servers=("loopback",), chat_template=without) as served, window(opened) as page:
        visit(page, served, formatted=True)
        page.click("#show-settings")
        assert "has no place for tools: it will not see them" in page.text_content("#servers")


def test_without_the_option_it_is_off(opened: Any) -> None:
    with serving(told(ANSWERS)) as served, window(opened) as page:
        visit(page, served, formatted=True)
        page.click("#show-settings")
        assert "Off. Start the server with --mcp-server URL" in page.text_content("#servers")
        assert not page.is_visible("#server-form")
        begin(page, "hello")
        end(page)
