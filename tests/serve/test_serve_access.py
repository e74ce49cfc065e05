"""Who may ask: pages by their origin, keys from a file with their limits. And what the log says of a request."""

import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, in_background, own_process, serving, told, wait_until
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from typer.testing import CliRunner

from whorl.cli import app
from whorl.serve import openai
from whorl.serve.api_error import ApiError
from whorl.serve.gate import Gate
from whorl.serve.key_limits import ApiKey, KeyUse, read_keys
from whorl.serve.options import ServeOptions
from whorl.serve.request_log import RequestIdFilter
from whorl.serve.running import Running
from whorl.serve.settings import ServerSettings

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("yes")(scope, receive, send)


def gate(**options: Any) -> TestClient:
    settings = ServerSettings(max_body=100, body_seconds=5.0, allowed_hosts=("localhost",), **options)
    return TestClient(Gate(_answer, settings, running=Running()), base_url="http://localhost:8000")


# ---- pages


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # no browser
        ({"Origin": "http://localhost:8000"}, 200),  # the server's own page
        ({"Origin": "https://localhost:8000"}, 200),  # the same behind a proxy that speaks TLS
        ({"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"}, 403),  # another program's page
        ({"Origin": "http://localhost"}, 403),
        ({"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://localhost:8000.evil.example"}, 403),
        ({"Origin": "http://evil.example/localhost:8000"}, 403),
        ({"Origin": "null"}, 403),  # a file, or a frame in a sandbox
        ({"Origin": ""}, 403),
        ({"Origin": "http://evil.example", "Host": "evil.example"}, 421),  # DNS rebinding
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),  # <img src=...>
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),  # a link that the reader followed
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, 200),  # typed
    ],
)
def test_pages_of_other_origins_are_refused(headers: dict[str, str], status: int) -> None:
    assert gate().get("/", headers=headers).status_code == status


def test_a_form_of_another_page_is_no_link() -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Content-Type": "application/json"}
    assert gate().post("/", headers=headers, content=b"{}").status_code == 403


def test_pages_that_are_allowed() -> None:
    one = gate(origins=("http://page:3000",))
    for origin, status in (("http://page:3000", 200), ("http://localhost:8000", 200), ("http://page", 403)):
        assert one.get("/", headers={"Origin": origin}).status_code == status
    assert gate(origins=("*",)).get("/", headers={"Origin": "http://anybody"}).status_code == 200


@pytest.mark.parametrize("origin", ["http://page:3000/", "page:3000", "http://page/x", "HTTP://Page", "", "localhost"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="expected one such as http://localhost:3000"):
        ServerSettings(origins=(origin,))


def test_a_page_elsewhere_makes_the_server_do_nothing() -> None:
    """Neither the question before, nor the request itself; and both in the shape of their address."""
    with serving(told(), allowed_hosts=("127.0.0.1",)) as served:
        body = {"messages": [{"role": "user", "content": "hi"}], "model": "told", "max_tokens": 5}
        for path in (CHAT, MESSAGES):
            evil = {"Origin": "http://evil.example"}
            headers = evil | {"Access-Control-Request-Method": "POST"}
            refused = [served.http.options(path, headers=headers), served.http.post(path, headers=evil, json=body)]
            for response in refused:
                assert response.status_code == 403
                assert "access-control-allow-origin" not in response.headers
                kind = response.json()["error"]["type"]
                assert kind == "permission_error"
                assert "--allow-origin http://evil.example" in response.json()["error"]["message"]
            assert served.llm.num_steps == 0
        own = {"Origin": served.url}
        assert served.http.post(CHAT, headers=own, json=body).status_code == 200


# ---- keys


FILE = """# who may ask
sk-plain

sk-alice alice max_running=2   # at once
sk-bob   bob requests_per_minute=3 tokens_per_minute=50
"""


def test_a_file_of_keys(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text(FILE)
    assert read_keys(file) == (
        ApiKey(key="sk-plain", name="#1"),
        ApiKey(key="sk-alice", name="alice", max_running=2),
        ApiKey(key="sk-bob", name="bob", requests_per_minute=3, tokens_per_minute=50),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no key in it"),
        ("# sk-secret\n", "there is no key in it"),
        ("sk-a\nsk-secret x tokens=3", "line 2: 'tokens' is not known; a key may have max_running"),
        ("sk-secret max_running=0", "line 1: max_running is '0', expected a whole number from 1"),
        ("sk-secret max_running=1.5", "max_running is '1.5'"),
        ("sk-secret a b", "line 1: a key has one name, here are 2: a b"),
        ("sk-secret a\nsk-secret b", "line 2: the key is in an earlier line, too"),
    ],
)
def test_what_is_wrong_with_a_file_of_keys(tmp_path: Path, text: str, says: str) -> None:
    (file := tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match="--api-key-file") as caught:
        openai.build_server("told", llm=told(), port=0, api_key_file=file)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(tmp_path / "none")


def test_a_key_is_given_once() -> None:
    with pytest.raises(ValueError, match="given twice"):
        ServerSettings(api_key="k", more_keys=(ApiKey(key="k", name="k"),))


@pytest.mark.parametrize(
    ("variable", "arguments"),
    [("", []), (" \t\n", []), (None, ["--api-key", ""]), (None, ["--api-key-file", ""]), ("", ["--api-key-file", "x"])],
)
def test_a_key_that_is_empty_starts_no_server(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, arguments: list[str]
) -> None:
    if variable is not None:
        monkeypatch.setenv("WHORL_API_KEY", variable)
    monkeypatch.setattr(openai, "_load", lambda *arguments: pytest.fail("it loads the model"))
    ended = CliRunner().invoke(app, ["serve", "--port", "0", *arguments])
    assert ended.exit_code == 2, ended.output
    assert "empty" in ended.output


def test_no_key_is_not_an_empty_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHORL_API_KEY", raising=False)
    assert ServeOptions().settings()["api_key"] is None
    monkeypatch.setenv("WHORL_API_KEY", "")
    assert ServeOptions(api_keys=("k",)).settings()["api_key"] == ("k",)
    with pytest.raises(ValueError, match="is empty"):
        ServerSettings(api_key=())


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_limits_fill_up_again() -> None:
    clock = Clock()
    use = KeyUse(ApiKey(key="k", name="k", max_running=2, requests_per_minute=3, tokens_per_minute=60), clock)

    def wait() -> str | None:
        try:
            with use.request():
                return None
        except ApiError as error:
            return (error.headers or {})["Retry-After"]

    with use.request(), use.request():
        assert wait() == "1"  # two are in progress
    assert wait() is None  # the third of this minute
    assert wait() == "20"
    clock.now += 20
    assert wait() is None
    clock.now += 60
    use.charge(90)  # an answer may exceed what is left
    assert wait() == "30"
    clock.now += 29
    assert wait() == "1"
    clock.now += 1.5
    assert wait() is None


def keyed(served: Served, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def test_limits_of_keys_over_http() -> None:
    keys = (
        ApiKey(key="sk-one", name="one", max_running=1),
        ApiKey(key="sk-few", name="few", requests_per_minute=1),
        ApiKey(key="sk-short", name="short", tokens_per_minute=10),
    )
    with serving(told(delay=0.01), more_keys=keys) as served:
        ask = {"prompt": "a", "max_tokens": 30, "temperature": 0}
        answered: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answered.append(keyed(served, "sk-one", **ask)))
        thread.start()
        wait_until(lambda: served.llm.pool.num_used > 0)
        refused = keyed(served, "sk-one", **ask)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "1 requests of this key are in progress" in refused.json()["error"]["message"]
        assert keyed(served, "sk-few", **ask | {"max_tokens": 1}).status_code == 200  # the others are not in the way
        thread.join(20)
        assert answered[0].status_code == 200
        assert keyed(served, "sk-one", **ask | {"max_tokens": 1}).status_code == 200
        second = keyed(served, "sk-few", MESSAGES, model="told", max_tokens=1, messages=[])
        assert (second.status_code, second.json()["error"]["type"]) == (429, "rate_limit_error")
        assert 0 < int(second.headers["retry-after"]) <= 60
        listed = httpx.get(f"{served.url}/v1/models", headers={"X-Api-Key": "sk-few"})
        assert listed.status_code == 200  # what generates nothing is not counted
        assert keyed(served, "sk-short", **ask).status_code == 200  # 31 tokens, of 10 that a minute has
        over = keyed(served, "sk-short", **ask)
        assert over.status_code == 429
        assert "10 tokens a minute" in over.json()["error"]["message"]


# ---- the log


def test_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "whorl.serve.access")
    with serving(told(), more_keys=(ApiKey(key="sk-secret", name="alice"),)) as served:
        headers = {"Authorization": "Bearer sk-secret", "X-Request-Id": "n-7"}
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers)
        httpx.get(f"{served.url}/v1/mod%0aels", headers={"X-Request-Id": "n-8"})
    lines = [record.getMessage() for record in caplog.records if record.name == "whorl.serve.access"]
    first, second = (next(line for line in lines if f"request {number}" in line) for number in ("n-7", "n-8"))
    assert '"POST /v1/completions" 200 in ' in first
    assert first.endswith("s, request n-7, key alice")
    assert answer.json()["id"] == "cmpl-n-7"
    assert '"get /v1/mod%0aels" 401 in ' in second.lower()
    assert "sk-secret" not in "".join(lines)


def test_errors_are_logged_with_their_reason_and_polls_only_when_they_fail(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "whorl.serve.access")
    with serving(told()) as served:
        for path in ("/health", "/metrics", "/page/stats"):
            assert served.http.get(path).status_code == 200
        assert not [record for record in caplog.records if record.name == "whorl.serve.access"]
        for path, body in (
            ("/v1/completions", {"prompt": "a", "temprature": 1}),
            ("/v1/completions", {"prompt": "a" * 5000}),
            ("/v1/messages", {"model": "told", "max_tokens": 5, "messages": []}),
            ("/tokenize", {"prompt": "a", "mod\nforged": 1}),
        ):
            assert served.http.post(path, json=body).status_code == 400
        served.http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
        wait_until(lambda: "double quotes" in caplog.text)  # the line follows the answer, and the next one may pass it
        served.http.post("/v1/completions", content=b"{}")
        served.app.state.service.engine.failure = ValueError("it broke")
        assert served.http.get("/health").status_code == 503
        served.app.state.service.engine.failure = None
    lines = [record.getMessage() for record in caplog.records if record.name == "whorl.serve.access"]
    reasons = (
        ": temprature: is not a parameter that this server knows",
        ": the text has 5000 tokens; up to 1024 are allowed",
        ": messages: List should have at least 1 item after validation, not 0",
        ": 'mod\\nforged: is not a parameter that this server knows'",
        " Expecting property name enclosed in double quotes at line 1, column 2, where the end is",
        ": the header Content-Type is missing: send application/json",
        ": the engine failed: ValueError: it broke",
    )
    for line, reason in zip(lines, reasons, strict=True):
        assert line.endswith(reason), line


def test_every_line_of_the_log_has_its_time(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as out, own_process("llm=told()", output=out) as (_, url):
        httpx.post(f"{url}/v1/completions", json={"prompt": "a", "n": 0})
        wait_until(lambda: "POST" in (tmp_path / "log").read_text())  # the line follows the answer
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "INFO" in line]
    assert any('"POST /v1/completions" 400 in ' in line for line in lines)
    assert any("Started server process" in line for line in lines), "uvicorn's lines are in the same form"
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO: ", line), line


def test_what_is_logged_for_a_request_has_its_number(caplog: pytest.LogCaptureFixture) -> None:
    request_ids, log = RequestIdFilter(), logging.getLogger("whorl.serve")
    log.addFilter(request_ids)
    try:
        with serving(told()) as served:
            served.app.state.service.metrics.render = lambda: 1 / 0
            refused = served.http.get("/metrics", headers={"X-Request-Id": "100%d"})
            assert refused.status_code == 500
    finally:
        log.removeFilter(request_ids)
    assert "request 100%d: a request failed" in [record.getMessage() for record in caplog.records]


# ---- the end of the server, in every shape


@pytest.mark.parametrize("path", ["/v1/responses", MESSAGES])
def test_the_end_of_the_drain_is_told_in_the_streams_own_words(path: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {"stream": True, "model": "told"}
    body |= {"input": "hi"} if path == "/v1/responses" else {"messages": messages, "max_tokens": 500}
    with serving(told({"hi": "x" * 900}, delay=0.02), drain_seconds=0.3) as served:
        thread, responses = in_background(served, body, path)
        wait_until(lambda: served.llm.pool.num_used > 0)
        served.server.should_exit = True
        thread.join(20)
    name, data = responses[0].text.rstrip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert "gave running requests 0.3 seconds" in json.loads(data[6:])["error"]["message"]
    assert served.server.exit_code == 1
