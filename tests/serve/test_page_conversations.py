"""Conversations of the page: the list, its search, what is cut and goes on, two tabs, files and the context."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import missing, until, window
from media_files import drawn, encoded, film
from page_steps import begin, begin_another, choose, end, give, ready, said, say, visit
from seeing import looking, seeing
from serving import Served, serving, told

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

CHAT = "**/v1/chat/completions"
LONG = "abcd efgh " * 40
ANSWERS = {"hello": "Hello there!", "long": LONG, "other": "Another one.", "form": '{"a": 1}'}
TITLES = "all => all.map(one => one.textContent)"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(ANSWERS, delay=0.003)) as running:
        yield running


@pytest.fixture
def page(opened: Any, served: Served) -> Iterator[Any]:
    with window(opened) as tab:
        visit(tab, served, formatted=True)
        yield tab


def titles(page: Any) -> Any:
    return page.eval_on_selector_all("#list .open", TITLES)


def test_list_search_rename_delete_and_undo(page: Any) -> None:
    say(page, "hello")
    begin_another(page)
    say(page, "other")
    assert titles(page) == ["other", "hello"]
    page.fill("#search", "THERE")  # it is in an answer
    until(page, "document.querySelectorAll('#list .open').length === 1")
    assert titles(page) == ["hello"]
    page.fill("#search", "")
    until(page, "document.querySelectorAll('#list .open').length === 2")
    page.hover("#list .one >> nth=1")
    page.click("[aria-label='Rename hello']")
    page.fill("[aria-label='New name']", "A greeting")
    page.press("[aria-label='New name']", "Enter")
    page.reload()
    ready(page)
    assert titles(page) == ["other", "A greeting"]
    choose(page, "A greeting")
    page.click("[aria-label='Delete A greeting']")
    until(page, "document.querySelectorAll('#list .open').length === 1")
    page.click("#toast >> text=Undo")
    until(page, "document.querySelectorAll('#list .open').length === 2")
    assert said(page) == "Hello there!"
    page.reload()
    ready(page)
    assert set(titles(page)) == {"other", "A greeting"}
    assert said(page) == "Hello there!"


def test_what_is_not_sent_yet_stays(page: Any) -> None:
    """In its conversation, and after a reload of the tab."""
    say(page, "hello")
    page.fill("#prompt", "half a question")
    begin_another(page)
    assert page.input_value("#prompt") == ""
    page.fill("#prompt", "another one")
    choose(page, "hello")
    assert page.input_value("#prompt") == "half a question"
    page.reload()
    ready(page)
    assert page.input_value("#prompt") == "half a question"
    assert page.title() == "hello \u2013 whorl"
    page.press("#prompt", "Enter")
    end(page)
    page.reload()
    ready(page)
    assert page.input_value("#prompt") == ""
    begin_another(page)
    assert page.input_value("#prompt") == "another one"


def test_two_tabs_agree(page: Any, served: Served) -> None:
    say(page, "hello")
    other = page.context.new_page()
    visit(other, served, formatted=True)
    assert said(other) == "Hello there!"
    say(other, "other")
    until(page, "[...document.querySelectorAll('article > .said')].at(-1).textContent === 'Another one.'")
    assert page.locator("article").count() == 4
    say(page, "hello")
    until(other, "document.querySelectorAll('article').length === 6")
    other.click("[aria-label='Delete hello']", force=True)
    until(page, "document.querySelectorAll('article').length === 0")


def test_a_reload_in_the_middle_of_an_answer_goes_on_with_it(page: Any, served: Served) -> None:
    with served.llm.model.held_after(60):  # type: ignore[attr-defined]
        begin(page, "long")
        until(page, "document.querySelector('article.assistant > .said')?.textContent.length > 20")
        page.wait_for_timeout(1200)  # kept every second
        page.reload()
    ready(page)
    end(page)
    assert said(page) == LONG.strip()
    assert page.locator("article").count() == 2


def test_a_cut_answer_is_continued(page: Any, served: Served) -> None:
    page.click("#show-settings")
    page.fill("[data-setting=max_tokens]", "7")
    say(page, "long")
    assert said(page) == "abcd ef"
    assert "cut off at the limit" in page.text_content("article.assistant .facts")
    page.fill("[data-setting=max_tokens]", "")
    with page.expect_request(CHAT) as request:
        page.click("text=Continue")
    end(page)
    body = request.value.post_data_json
    assert (body["continue_final_message"], body["messages"][-1]["content"]) == (True, "abcd ef")
    assert said(page) == "abcd efgh abcd"  # the setting of the answer, once more


def test_the_servers_end_is_survived(opened: Any) -> None:
    with window(opened) as page:
        with serving(told(ANSWERS, delay=0.05), drain_seconds=0.1) as first:
            port = int(first.url.rpartition(":")[2])
            visit(page, first, formatted=True)
            begin(page, "long")
            until(page, "document.querySelector('article.assistant > .said')?.textContent.length > 10")
        end(page)
        assert "the server is shutting down" in page.text_content("article.assistant .error")
        assert LONG.startswith(said(page))  # what came is kept
        page.wait_for_selector("text=The server cannot be reached. This page tries again by itself.")
        with serving(told(ANSWERS), port=port):
            page.wait_for_selector("#note", state="hidden")
            page.click("text=Continue")
            end(page)
            assert said(page) == LONG.strip()


def test_a_text_file_goes_into_the_prompt_with_its_tokens(page: Any) -> None:
    give(page, b"x = 1\n", "drop", "script.py", "text/x-python")
    page.wait_for_selector("#attached >> text=6 tokens")
    page.fill("#prompt", "hello")
    until(page, "document.querySelector('#room-text').textContent === '11 tokens of 1,024'")
    with page.expect_request(CHAT) as request:
        say(page, "hello")
    assert request.value.post_data_json["messages"][0]["content"] == "script.py:\n```\nx = 1\n\n```\n\nhello"
    assert page.text_content("article.user .text-file") == "script.py 6 tokens"
    give(page, b"\xff\xfe\x00", "drop", "program.bin", "application/octet-stream")
    page.wait_for_selector("#note-text >> text=program.bin is neither a picture nor text.")


def test_every_kind_of_picture_that_the_page_takes_the_server_takes(opened: Any) -> None:
    llm = looking({})
    with seeing(llm=llm, max_media_body=1 << 20) as served, window(opened) as page:
        visit(page, served)
        for kind in ("PNG", "JPEG", "WEBP", "GIF"):
            give(page, encoded(drawn(48, 48), kind), "drop", f"a.{kind}", f"image/{kind.lower()}")
            until(page, "document.querySelectorAll('#attached img').length === 1")
            say(page, "it")
            assert page.locator("article.assistant .error:visible").count() == 0
        give(page, film(), "drop", "a.webm", "video/webm")
        until(page, "document.querySelectorAll('#attached video').length === 1")
        say(page, "it")
        assert [item.kind for item in llm.seen[-1][1]] == ["image"] * 4 + ["video"]
        give(page, encoded(drawn(9, 9), "BMP"), "drop", "a.bmp", "image/bmp")
        page.wait_for_selector("#note-text >> text=a.bmp is image/bmp")


def test_presets_and_the_models_own_defaults(opened: Any) -> None:
    llm = told(ANSWERS)
    llm.tokenizer.sampling = {"temperature": 0.6, "top_k": 20}  # type: ignore[union-attr]
    with serving(llm) as served, window(opened) as page:
        page.on("dialog", lambda dialog: dialog.accept("mine"))
        visit(page, served, formatted=True)
        page.click("#show-settings")
        hint = "document.querySelector('[data-setting={}]').placeholder"
        shown = [page.evaluate(hint.format(name)) for name in ("temperature", "top_k", "top_p")]
        assert shown == ["0.6", "20", "1"]
        page.fill("[data-setting=top_p]", "0.5")
        page.click("#keep-preset")
        page.select_option("#presets", "The model's defaults")
        assert page.input_value("[data-setting=temperature]") == page.input_value("[data-setting=top_p]") == ""
        page.select_option("#presets", "mine")
        assert page.input_value("[data-setting=top_p]") == "0.5"
        with page.expect_request(CHAT) as request:
            say(page, "hello")
        body = request.value.post_data_json
        assert (body["top_p"], body["temperature"]) == (0.5, 0)
        page.click("#drop-preset")
        assert "mine" not in page.text_content("#presets")


def test_a_system_prompt_for_each_conversation(page: Any) -> None:
    page.click("#show-settings")
    page.fill("#system", "Be brief.")
    say(page, "hello")
    begin_another(page)
    assert page.input_value("#system") == ""
    choose(page, "hello")
    assert page.input_value("#system") == "Be brief."


def test_an_answer_follows_a_schema_made_with_the_form(page: Any) -> None:
    page.click("#show-settings")
    page.fill("#field-name", "a")
    page.select_option("#field-type", "integer")
    page.click("#field >> text=Add")
    schema = json.loads(page.input_value("[data-setting=schema]"))
    assert (schema["properties"], schema["required"]) == ({"a": {"type": "integer"}}, ["a"])
    say(page, "form")
    assert json.loads(said(page)) == {"a": 1}
    page.fill("[data-setting=schema]", "{")
    begin(page, "form")
    page.wait_for_selector("#schema-wrong:visible")


def test_export_and_import_of_branches(page: Any, tmp_path: Path) -> None:
    """Ids come in any order from the browser's store; what was exported could not be imported."""
    say(page, "hello")
    for _ in range(3):
        page.click("article.user >> text=Edit")
        say(page, "other")
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    page.set_input_files("#import-file", file)
    until(page, "document.querySelectorAll('#list .open').length === 2")
    assert page.text_content("article.user .branch") == "4/4"
    assert not page.is_visible("#note")
    page.click("article.user >> [aria-label='Branch before']")
    assert page.text_content("article.user .branch") == "3/4"


# ---- what people come for


CLICKS = "window.clicks = 0; addEventListener('click', event => { window.clicks += event.isTrusted; }, true)"
YESTERDAY = """() => { talk.changed = Date.now() - 86400000; return store.put("talks", talk); }"""


def test_three_tasks_take_two_clicks_each(opened: Any) -> None:
    """First answer, yesterday's conversation, send a picture: of each the clicks."""
    llm = looking({"hello": "Hello there!"})
    with seeing(llm=llm) as served, window(opened) as page:
        page.add_init_script(CLICKS)
        visit(page, served, formatted=True)
        clicks: dict[str, int] = {}

        def done(task: str) -> None:
            clicks[task] = page.evaluate("[window.clicks, window.clicks = 0][0]")

        page.keyboard.type("hello")
        page.keyboard.press("Enter")
        end(page)
        done("first answer")
        page.evaluate(YESTERDAY)
        begin_another(page)
        say(page, "other")
        page.evaluate("window.clicks = 0")
        assert page.text_content("#list h2 >> nth=1") == "Yesterday"
        choose(page, "hello")
        assert said(page) == "Hello there!"
        done("yesterday's conversation")
        with page.expect_file_chooser() as chooser:
            page.click("#attach")
        picture = {"name": "a.png", "mimeType": "image/png", "buffer": encoded(drawn(48, 48))}
        chooser.value.set_files(picture)
        page.wait_for_selector("#attached img")
        page.click("#send")
        end(page)
        done("send a picture")
    assert len(llm.seen[-1][1]) == 1
    assert clicks == {"first answer": 0, "yesterday's conversation": 1, "send a picture": 2}
