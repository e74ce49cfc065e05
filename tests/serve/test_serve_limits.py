"""What the server refuses, how it says so, and that nothing stays behind whichever way a request ends."""

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from serving import ALPHABET, MODEL, Served, in_background, serving, told, wait_until

from whorl.serve.openai import build_server

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(), max_body=20_000, strict_model_name=True) as running:
        yield running


@pytest.fixture
def slow() -> Iterator[Served]:
    with serving(told(delay=0.02), max_queue=2, timeout=20) as running:
        yield running


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


# ---- what is refused


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages.0.role"),
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "url": 1}]}
                ]
            },
            "messages.0.content.1.image_url: Field required (and 1 more)",
        ),
        (CHAT, {"messages": MESSAGES, "temperature": -1, "top_p": 7}, "greater than or equal to 0 (and 1 more)"),
        (CHAT, {"messages": MESSAGES, "temperature": -1}, "temperature"),
        (CHAT, {"messages": MESSAGES, "temperature": "warm"}, "temperature"),
        (CHAT, {"messages": MESSAGES, "n": 0}, "n"),
        (CHAT, {"messages": MESSAGES, "n": 100_000}, "n"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 10**30}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2000}, "2000 more are asked for"),
        (CHAT, {"messages": MESSAGES, "min_tokens": 5000}, "min_tokens"),
        (CHAT, {"messages": MESSAGES, "min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "stop": ""}, "stop: String should have at least 1 character"),
        (CHAT, {"messages": MESSAGES, "stop": ["a", ""]}, "stop.1: String should have at least 1 character"),
        (CHAT, {"messages": MESSAGES, "stop": ["a"] * 17}, "stop"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"99999": 1}}, "logit_bias"),
        (CHAT, {"messages": MESSAGES, "logit_bias": {"1": 101}}, "logit_bias"),
        (CHAT, {"messages": MESSAGES, "seed": 2**64}, "seed"),
        (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": MESSAGES, "temprature": 1}, "temprature: is not a parameter"),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {"type": "json_schema"}},
            "response_format: type json_schema and a",
        ),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tools"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL, TOOL]}, "twice"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1200}]}, "tokens"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "no tokens"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "no tokens"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**6]}, "vocabulary"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 50}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "n": 2}, "n is 2, expected 1"),
        (COMPLETIONS, {"prompt": ["a", "x" * 2000]}, "tokens"),
        (COMPLETIONS, {"prompt": "a\udfff"}, "Unicode"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"self": 1}}, "template failed"),
        ("/tokenize", {}, "prompt or messages"),
        ("/tokenize", {"prompt": "\ud800"}, "Unicode"),
        ("/detokenize", {"tokens": [10**6]}, "vocabulary"),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, body: Any, says: str) -> None:
    response = served.http.post(path, content=json.dumps(body), headers=JSON)
    assert says in refused(response, 400)["message"]
    assert served.is_idle()


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}])
def test_a_schema_that_cannot_be_followed(served: Served, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": MESSAGES, "response_format": form}
    assert "schema cannot be followed" in refused(served.http.post(CHAT, json=body), 400)["message"]
    body |= {"response_format": {"type": "json_object"}, "min_tokens": 3}
    assert "exclude each other" in refused(served.http.post(CHAT, json=body), 400)["message"]


def test_arguments_that_are_not_json(served: Served) -> None:
    call = {"function": {"name": "f", "arguments": "{"}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert "not JSON" in refused(served.http.post(CHAT, json=body), 400)["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b"null", b"\xff", b'{"a":' * 3900, b"1" * 5000])
def test_bodies_that_are_not_json_objects(served: Served, content: bytes) -> None:
    refused(served.http.post(CHAT, content=content, headers=JSON), 400)


def test_only_json_is_read(served: Served) -> None:
    content = json.dumps({"messages": MESSAGES})
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        assert "application/json" in refused(served.http.post(CHAT, content=content, headers=headers), 415)["message"]
    assert served.http.post(
        CHAT, content=content, headers={"Content-Type": "Application/JSON; charset=utf-8"}
    ).is_success


def test_an_overlong_prompt_has_openais_code(served: Served) -> None:
    error = refused(served.http.post(COMPLETIONS, json={"prompt": "a" * 1024}), 400)
    assert error["code"] == "context_length_exceeded"


def test_wrong_addresses_models_and_methods(served: Served) -> None:
    assert "GET /docs and /openapi.json list all" in refused(served.http.get("/nowhere"), 404)["message"]
    assert f"GET {CHAT}: this endpoint takes POST" in refused(served.http.get(CHAT), 405)["message"]
    error = refused(served.http.post(CHAT, json={"messages": MESSAGES, "model": "gpt-9"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    refused(served.http.get("/v1/models/gpt-9"), 404)


def test_a_body_too_large(served: Served) -> None:
    body = json.dumps({"prompt": "a" * 30_000})
    assert refused(served.http.post(COMPLETIONS, content=body, headers=JSON), 413)["code"] == "body_too_large"
    pieces = (body[i : i + 1000].encode() for i in range(0, len(body), 1000))  # no length announced
    refused(served.http.post(COMPLETIONS, content=pieces, headers=JSON), 413)


def test_a_body_that_never_comes() -> None:
    with serving(told(), body_seconds=0.2) as served, socket.create_connection(("127.0.0.1", _port(served))) as line:
        line.sendall(head(100) + b"{")
        assert line.recv(100).startswith(b"HTTP/1.1 408 ")


def _port(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


def head(size: int) -> bytes:
    lines = (f"POST {COMPLETIONS} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {size}")
    return "\r\n".join([*lines, "", ""]).encode()


def test_the_key() -> None:
    with serving(told(), api_key="s3cret") as served:
        assert served.complete("a", max_tokens=1)["choices"][0]["text"] == "b"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            response = httpx.get(f"{served.url}/v1/models", headers=headers)
            assert refused(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert httpx.get(f"{served.url}/metrics").status_code == 200


@pytest.mark.parametrize("right", ["s3cret-Key", "cl\u00e9-\u00e0", "\u043a\u043b\u044e\u0447"])
def test_no_key_but_the_whole_key(right: str) -> None:
    with serving(told(), api_key=right) as served:

        def status(value: str) -> int:
            headers = [(b"Authorization", value.strip().encode())]
            return httpx.get(f"{served.url}/v1/models", headers=headers).status_code

        assert [status(f"Bearer {right}"), status(f"bearer  {right}")] == [200, 200]
        parts = [right[:size] for size in range(len(right))] + [right[size:] for size in range(1, len(right) + 1)]
        longer = [f"{right}{right}", f"{right}x", f"x{right}", f"{right},other", f"other,{right}", f"{right} other"]
        alike = [right.swapcase(), f'"{right}"', right.encode("utf-8").decode("latin-1"), "*", "None", right[::-1]]
        for wrong in {*parts, *longer, *alike} - {right}:
            assert status(f"Bearer {wrong}") == 401, wrong
        for wrong in (right, f"Basic {right}", f"Bearer{right}", f"Token {right}", "Bearer", ""):
            assert status(wrong) == 401, wrong
        several = [(b"Authorization", b"Bearer wrong"), (b"Authorization", f"Bearer {right}".encode())]
        assert httpx.get(f"{served.url}/v1/models", headers=several).status_code == 401


def test_other_origins_only_when_asked_for(served: Served) -> None:
    headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in served.http.options(CHAT, headers=headers).headers
    with serving(told(), origins=("http://page",), api_key="k") as open_to:
        response = httpx.options(f"{open_to.url}{CHAT}", headers=headers)
        assert response.headers["access-control-allow-origin"] == "http://page"
        refused(httpx.options(f"{open_to.url}{CHAT}", headers=headers | {"Origin": "http://other"}), 400)
        refusal = httpx.post(f"{open_to.url}{CHAT}", headers={"Origin": "http://page"}, json={})
        assert refusal.headers["access-control-allow-origin"] == "http://page"


# ---- how requests end


def test_a_full_queue() -> None:
    with serving(told(delay=0.02, max_num_seqs=1), max_queue=2) as served:
        body = {"prompt": "a", "max_tokens": 40}
        assert "room for 2" in refused(served.http.post(COMPLETIONS, json=body | {"n": 3}), 400)["message"]
        threads, engine = [], served.app.state.service.engine
        for count in range(1, 4):  # one runs, two wait
            threads.append(in_background(served, body))
            wait_until(lambda count=count: (len(engine._owners), engine.num_waiting) == (count, count - 1))
        response = served.http.post(COMPLETIONS, json=body)
        assert refused(response, 429)["code"] == "queue_full"
        assert response.headers["retry-after"] == "1"
        for thread, responses in threads:
            thread.join()
            assert responses[0].status_code == 200
        assert served.complete("a", max_tokens=1)["choices"][0]["text"] == "b"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(slow: Served, is_stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 800, "stream": is_stream, "n": 2}
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", _port(slow))) as line:
        line.sendall(head(len(content)) + content)
        wait_until(lambda: slow.llm.pool.num_used > 0)
    wait_until(slow.is_idle, seconds=3)
    assert slow.app.state.service.engine.num_waiting == 0
    assert slow.complete("k", max_tokens=2)["choices"][0]["text"] == "lm"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_takes_too_long(is_stream: bool) -> None:
    with serving(told(delay=0.02), timeout=0.3) as served:
        body = {"prompt": "a", "max_tokens": 500, "stream": is_stream}
        if is_stream:
            *pieces, error, done = served.events(COMPLETIONS, **body)
            assert done == "[DONE]"
            assert len(pieces) > 2
            assert error["error"]["code"] == "timeout"
        else:
            assert refused(served.http.post(COMPLETIONS, json=body), 503)["code"] == "timeout"
        wait_until(served.is_idle, seconds=3)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_engine_that_fails_fails_everybody_and_says_so(slow: Served, is_stream: bool) -> None:
    failures: list[bool] = []
    slow.app.state.service.engine.on_failure = lambda: failures.append(True)
    body = {"prompt": "a", "max_tokens": 500, "stream": is_stream}
    thread, responses = in_background(slow, body)
    wait_until(lambda: slow.llm.pool.num_used > 0)
    slow.llm.model.failure = RuntimeError("device lost")  # type: ignore[attr-defined]
    thread.join(20)
    assert "device lost" in responses[0].text
    assert is_stream or refused(responses[0], 503)
    assert "device lost" in refused(slow.http.post(COMPLETIONS, json=body), 503)["message"]
    refused(slow.http.get("/health"), 503)
    assert failures == [True]


def test_a_step_that_hangs_is_unhealthy() -> None:
    with serving(told(delay=1.0), stall_seconds=0.2) as served:
        thread, _ = in_background(served, {"prompt": "a", "max_tokens": 1})
        wait_until(lambda: served.http.get("/health").status_code == 503)
        assert refused(served.http.get("/health"), 503)["code"] == "engine_stalled"
        thread.join()
        assert served.http.get("/health").status_code == 200


def test_a_request_waits_no_longer_than_its_time_for_a_step_that_hangs() -> None:
    with serving(told(delay=1.5), timeout=0.2) as served:
        thread, _ = in_background(served, {"prompt": "a", "max_tokens": 1})
        wait_until(lambda: served.llm.pool.num_used > 0)
        started = time.monotonic()
        refused(served.http.post(COMPLETIONS, json={"prompt": "a"}), 503)
        assert time.monotonic() - started < 1
        thread.join()


def test_shutdown_lets_running_requests_finish() -> None:
    with serving(told(delay=0.02)) as served:
        thread, responses = in_background(served, {"prompt": "a", "max_tokens": 25, "temperature": 0})
        wait_until(lambda: served.llm.pool.num_used > 0)
        served.server.should_exit = True  # what SIGTERM does
        thread.join(20)
        assert responses[0].json()["choices"][0]["text"] == ALPHABET[1:]


def test_shutdown_does_not_wait_for_ever() -> None:
    started = time.monotonic()
    with serving(told(delay=0.02), drain_seconds=1) as served:
        thread, _ = in_background(served, {"prompt": "a", "max_tokens": 1000})
        wait_until(lambda: served.llm.pool.num_used > 0)
    thread.join(5)
    assert time.monotonic() - started < 10
    assert served.is_idle()


# ---- soak


async def one_stream(client: httpx.AsyncClient, rng: random.Random, ends: list[str]) -> None:
    """Reads a stream to its end, or leaves somewhere on the way."""
    num_tokens, leaves_at = rng.randint(1, 60), rng.choice([None, rng.randint(0, 30)])
    start = rng.randrange(26)
    body = {"prompt": ALPHABET[start], "max_tokens": num_tokens, "temperature": 0, "stream": True}
    text = ""
    async with client.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                assert text == (ALPHABET * 4)[start + 1 : start + 1 + num_tokens]
                ends.append("done")
                return
            if line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if leaves_at is not None and len(text) >= leaves_at:
                ends.append("left")
                return
    raise AssertionError(f"the stream ended after {text!r}")


async def let_step(served: Served, count: int) -> None:
    """Lets the model compute once so many requests have arrived, however long it took to prepare them."""
    engine = served.app.state.service.engine
    while engine.num_waiting + len(engine._owners) < count:
        await asyncio.sleep(0.01)
    served.llm.model.may_step.set()  # type: ignore[attr-defined]


def soak(served: Served, count: int, *, rounds: int = 1) -> list[str]:
    rng, ends = random.Random(0), []

    async def all_at_once() -> None:
        served.llm.model.may_step.clear()  # type: ignore[attr-defined]
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as client:
            streams = [one_stream(client, rng, ends) for _ in range(count)]
            await asyncio.gather(let_step(served, count), *streams)

    for _ in range(rounds):
        asyncio.run(all_at_once())
        wait_until(served.is_idle)
    assert served.app.state.service.engine.num_waiting == 0
    assert not served.app.state.service.engine._owners
    return ends


def test_many_streams_at_once_some_of_which_leave() -> None:
    # 24 blocks of 8 tokens for 20 sequences of up to 61: some give way and are computed again.
    with serving(told(num_blocks=24, max_model_len=100, delay=0.005)) as served:
        ends = soak(served, 20)
        assert served.llm.stats()["num_preemptions"] > 0
        assert served.complete("a", max_tokens=2)["choices"][0]["text"] == "bc"
    assert len(ends) == 20
    assert set(ends) == {"done", "left"}


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    import resource

    with serving(told(num_blocks=128, max_model_len=100)) as served:
        soak(served, 100, rounds=2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert len(soak(served, 100, rounds=6)) == 600
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
        metrics = served.app.state.service.metrics
        assert not metrics._latest
        assert not metrics._admitted


def test_threads_of_torch_are_left_alone(served: Served) -> None:
    before = torch.get_num_threads()
    served.complete("a", max_tokens=1, model=MODEL)
    assert torch.get_num_threads() == before


def test_an_address_that_is_taken_is_refused_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1, port {port}: Address already in use"):
            build_server("no-such-model", port=port)
    with pytest.raises(ValueError, match="no-such-model: no such file or folder"):
        build_server("no-such-model", port=port)
