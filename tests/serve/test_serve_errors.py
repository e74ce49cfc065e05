"""Every way in which a request can fail ends in the documented error, as JSON or as the last event of a stream."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from serving import (
    Served,
    byte_tokenizer,
    in_background,
    own_process,
    serving,
    stopped_in_a_stream,
    told,
    wait_until,
)
from tokenizers import Regex, pre_tokenizers

from whorl.engine.llm import LLM
from whorl.serve.gate import STEERING
from whorl.serve.worker_pool import Worker

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "a", "max_tokens": 5},
    "/tokenize": {"prompt": "a", "return_token_strs": True},
    "/detokenize": {"tokens": [1]},
}


class Panic(BaseException):
    """As a library in Rust raises it."""


def is_documented(error: Any) -> bool:
    return error.keys() == {"error"} and error["error"].keys() == {"message", "type", "param", "code"}


def ends_well(response: httpx.Response, *, status: int | None = None) -> dict[str, Any]:
    """The error of a response, which has the documented form, whole or as the last event."""
    if response.headers["content-type"].startswith("text/event-stream"):
        *_, last, done, empty = response.text.split("\n\n")
        assert (done, empty) == ("data: [DONE]", "")
        error = json.loads(last.removeprefix("data: "))
    else:
        assert response.status_code >= 400
        assert status is None or response.status_code == status
        error = response.json()
    assert is_documented(error)
    return error["error"]


# ---- exceptions planted everywhere


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told()) as running:
        yield running


FAULTS = [
    RuntimeError("x"),
    KeyError("x"),
    MemoryError(),
    OSError(5, "x"),
    TimeoutError(),
    AssertionError(),
    Panic("x"),
]
FAULTS += [ValueError("x"), UnicodeDecodeError("utf-8", b"x", 0, 1, "x"), RecursionError("x"), NotImplementedError()]


def fails_with(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_a_fault_of_one_request_is_answered(served: Served, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    service = served.app.state.service
    places = [
        (Worker, "ask", (COMPLETIONS, CHAT, "/tokenize", "/detokenize")),
        (service._preparer, "render", (CHAT,)),
        (service._preparer, "_params", (COMPLETIONS, CHAT)),
        (service._texts, "name", ("/tokenize",)),
        (service.metrics, "render", ("/metrics",)),
        (service, "_card", ("/v1/models", "/v1/models/told")),
        (served.llm, "add", (COMPLETIONS, CHAT)),
    ]
    for owner, name, paths in places:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails_with(error))
            for path in paths:
                question = ASK.get(path)
                for body in (
                    [question] if question is None or path[1] != "v" else [question, question | {"stream": True}]
                ):
                    send = served.http.get(path) if body is None else served.http.post(path, json=body)
                    assert ends_well(send)["message"], (name, path)
    assert served.complete("a", max_tokens=2)["choices"][0]["text"] == "bc"
    wait_until(served.is_idle)


@pytest.mark.parametrize("error", [RuntimeError("x"), Panic("x"), ValueError("x")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("place", ["opening", "advance", "usage", "_chunk"])
def test_a_fault_in_the_middle_of_a_stream_is_its_last_event(
    served: Served, monkeypatch: pytest.MonkeyPatch, error: BaseException, place: str
) -> None:
    from whorl.serve.replies import CompletionReply, Reply

    monkeypatch.setattr(CompletionReply if place in ("opening", "advance") else Reply, place, fails_with(error))
    body = ASK[COMPLETIONS] | {"stream": True, "stream_options": {"include_usage": True}}
    ends_well(served.http.post(COMPLETIONS, json=body))
    wait_until(served.is_idle)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("place", ["sampler", "detokenizer", "scheduler", "pool"])
def test_a_fault_of_the_engine_is_everybodys(monkeypatch: pytest.MonkeyPatch, place: str, is_stream: bool) -> None:
    from whorl.engine.tokenizer import Detokenizer

    with serving(told(delay=0.01)) as served:
        body = {"prompt": "a", "max_tokens": 400, "stream": is_stream}
        thread, responses = in_background(served, body)
        wait_until(lambda: served.llm.pool.num_used > 0)
        llm = served.llm
        owner, name = {
            "sampler": (llm.sampler, "start"),
            "detokenizer": (Detokenizer, "add"),
            "scheduler": (llm.scheduler, "schedule"),
            "pool": (llm.pool, "grow"),
        }[place]
        monkeypatch.setattr(owner, name, fails_with(Panic("it broke")))
        thread.join(20)
        assert "it broke" in ends_well(responses[0], status=503)["message"]
        assert "it broke" in ends_well(served.http.post(COMPLETIONS, json=body), status=503)["message"]


def test_what_steers_the_program_is_not_answered() -> None:
    assert {kind.__name__ for kind in STEERING} == {
        *("CancelledError", "GeneratorExit", "KeyboardInterrupt", "SystemExit")
    }


# ---- a text that the tokenizers package panics over


def panicking() -> LLM:
    """As real tokenizers do, with fewer characters: the expression gives up on a long run of a."""
    llm = told()
    backend = llm.tokenizer._backend  # type: ignore[union-attr]
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    return llm


def test_a_text_that_the_tokenizer_panics_over() -> None:
    text = "a" * 40 + "b"
    with serving(panicking()) as served:
        for path, body in (
            (COMPLETIONS, {"prompt": text}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            ("/tokenize", {"prompt": text}),
        ):
            assert "cannot be split into tokens" in ends_well(served.http.post(path, json=body), status=400)["message"]
        assert served.complete("b", max_tokens=1)["choices"][0]["text"] == "c"


def test_a_panic_is_a_value_error_of_the_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    tokenizer._backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(ValueError, match="this text of 41 characters cannot be split into tokens"):
        tokenizer.encode("a" * 40 + "b")


# ---- the end of the server


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_end_of_the_drain_is_told(is_stream: bool) -> None:
    with serving(told(delay=0.02), drain_seconds=0.3) as served:
        thread, responses = in_background(served, {"prompt": "a", "max_tokens": 1000, "stream": is_stream})
        wait_until(lambda: served.llm.pool.num_used > 0)
        served.server.should_exit = True
        thread.join(20)
    assert "gave running requests 0.3 seconds" in ends_well(responses[0], status=503)["message"]
    assert served.server.exit_code == 1
    assert served.is_idle()


def test_a_request_that_is_still_prepared_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    held, is_asked = threading.Event(), threading.Event()
    with serving(told(), drain_seconds=0.3) as served:
        monkeypatch.setattr(Worker, "ask", lambda worker, name, **more: (is_asked.set(), held.wait(20)))
        thread, responses = in_background(served, {"prompt": "a"})
        assert is_asked.wait(20)
        served.server.should_exit = True
        thread.join(20)
        held.set()
    assert "shutting down" in ends_well(responses[0], status=503)["message"]


@pytest.mark.slow
def test_the_exit_code_says_that_not_all_were_answered() -> None:  # 0: tests/serve/test_serve_clients.py
    with own_process("drain_seconds=1, llm=told(delay=0.05)") as (process, url):
        lines = stopped_in_a_stream(process, url, signal.SIGINT, {"prompt": "a", "max_tokens": 500})
        assert lines[-1] == "data: [DONE]"
        assert is_documented(json.loads(lines[-2].removeprefix("data: ")))
        assert process.wait(30) == 1
