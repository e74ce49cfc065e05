"""What may take for ever is ended: schemas, chat templates, tokenizer files. Others are served meanwhile."""

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import MODEL, SPECIAL, Served, byte_tokenizer, own_process, serving, told, wait_until
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from whorl.engine.chat_template import ChatTemplate
from whorl.engine.llm import LLM
from whorl.engine.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BOMB = {"type": "integer", "multipleOf": 99400891}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a + b %}{% endfor %}{% endfor %}"


def shaped(schema: Any, **others: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": MESSAGES, "response_format": form, "temperature": 0, **others}


def with_tokenizer(tokenizer: Tokenizer) -> LLM:
    llm = told()
    llm.tokenizer = tokenizer
    return llm


def templated(template: str) -> LLM:
    state = byte_tokenizer().state()
    return with_tokenizer(Tokenizer.from_state(state | {"templates": {"default": template}}))


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    return response.json()["error"]


@contextlib.contextmanager
def asking(served: Served, *bodies: dict[str, Any]) -> Iterator[list[httpx.Response]]:
    """All at once, beside what is done inside."""
    responses: list[httpx.Response] = []

    def ask(body: dict[str, Any]) -> None:
        responses.append(httpx.post(f"{served.url}{CHAT}", json=body, timeout=120))

    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    yield responses
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


@pytest.mark.slow
def test_schemas_that_never_compile_end_and_others_are_served_meanwhile() -> None:
    with serving(told(), job_seconds=6) as served:
        bombs = [shaped(BOMB | {"multipleOf": BOMB["multipleOf"] + i}) for i in range(3)]
        with asking(served, *bombs) as responses:
            assert served.complete("a", max_tokens=3)["choices"][0]["text"] == "bcd"
            assert served.http.get("/health").status_code == 200, "busy workers are no fault of the server"
            assert not responses
        assert [refusal(each)["code"] for each in responses] == ["too_costly"] * 3
        assert "the JSON schema cannot be compiled" in refusal(responses[0])["message"]
        assert served.http.get("/health").status_code == 200
        started = time.monotonic()
        refusal(served.http.post(CHAT, json=bombs[0]))  # it is known by now, and not tried for its 3 seconds again
        assert time.monotonic() - started < 3
        small = served.http.post(CHAT, json=shaped({"type": "integer", "multipleOf": 7}, max_tokens=20))
        assert int(small.json()["choices"][0]["message"]["content"]) % 7 == 0


@pytest.mark.slow
def test_a_server_whose_workers_are_all_busy_stops_when_told() -> None:
    with own_process("llm=told(), drain_seconds=1", output=subprocess.DEVNULL) as (process, url):
        bombs = [shaped(BOMB | {"multipleOf": BOMB["multipleOf"] + i}) for i in range(6)]
        threads = [threading.Thread(target=_post, args=(url, body)) for body in bombs]
        for thread in threads:
            thread.start()
        wait_until(lambda: _num_children(process.pid) >= 3, seconds=60)  # one for prompts, two for schemas
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        for thread in threads:
            thread.join(30)


def _post(url: str, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.TransportError):
        httpx.post(f"{url}{CHAT}", json=body, timeout=60)


def _num_children(pid: int) -> int:
    done = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return len(done.stdout.split())


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (LOOPS, "longer than 1 seconds"),
        ("{{ 'a' * 10**10 }}", "more memory"),
        ("{{ 'a' | center(10**10) }}", "more memory"),
        ("{{ '%9999999999d' | format(1) }}", "more memory"),
    ],
)
def test_a_template_that_never_ends(template: str, says: str) -> None:
    with serving(templated(template), job_seconds=1, job_memory=1 << 28) as served:
        for path in (CHAT, "/tokenize"):
            assert says in refusal(served.http.post(path, json={"messages": MESSAGES}))["message"]
        assert served.complete("a", max_tokens=3)["choices"][0]["text"] == "bcd"
        assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize("source", ["{{ 'a' * 5 }}", "{{ 'a' | center(5) }}", "{% set x = 'a' * 5 %}{{ x }}"])
def test_reading_a_template_computes_nothing_of_it(source: str) -> None:
    template = ChatTemplate({"default": source}, {})
    environment = template._templates["default"].environment
    assert "aaaaa" not in environment.compile(source, raw=True)
    assert "  a" not in environment.compile(source, raw=True).replace("\n    ", "")
    assert template.render([]) in ("aaaaa", "  a  ")


def test_padding_and_cutting_of_a_tokenizer_file_are_left_out() -> None:
    file = json.loads(byte_tokenizer().to_json())
    file["padding"] = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": SPECIAL[0],
    }
    file["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    state = byte_tokenizer().state() | {"backend": json.dumps(file)}
    assert len(Tokenizer.from_state(state).encode("abcd")) == 4


@pytest.mark.slow
def test_a_tokenizer_that_grows_without_end() -> None:
    state = byte_tokenizer().state()
    backend = Backend.from_str(state["backend"])
    backend.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)
    llm = with_tokenizer(Tokenizer.from_state(state | {"backend": backend.to_str()}))
    with serving(llm, job_memory=1 << 28) as served:
        assert refusal(served.http.post(COMPLETIONS, json={"prompt": "a"}))["code"] == "too_costly"
        assert served.complete("k", max_tokens=2, model=MODEL)["choices"][0]["text"] == "lm"


def test_a_worker_that_was_killed_is_replaced() -> None:
    with serving(told()) as served:
        worker = served.app.state.service._prompts.workers[0]
        worker._process.kill()
        worker._process.wait()
        assert served.complete("a", max_tokens=3)["choices"][0]["text"] == "bcd"
