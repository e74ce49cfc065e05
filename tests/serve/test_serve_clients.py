"""The openai client against the server, and the real model. Programs with requirements of their own: `test_clients`."""

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from serving import ALPHABET, MODEL, Served, own_process, serving, stopped_in_a_stream, told, wait_until

from whorl.engine.llm import LLM
from whorl.serve.settings import DEFAULT_NAME

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWERS = {"hi": "Hello there!", "call": CALL, "fruit": '{"name": "fig", "count": 3}'}
PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Fruit(BaseModel):
    name: str
    count: int


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(ANSWERS), api_key="sk-test", strict_model_name=True) as running:
        yield running


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    """The default model."""
    with serving(LLM(device="cpu", max_model_len=1024, max_num_seqs=32), names=(DEFAULT_NAME,)) as running:
        yield running


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="sk-test", max_retries=0, timeout=60)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


# ---- openai


def test_chat(served: Served) -> None:
    answer = client(served).chat.completions.create(model=MODEL, messages=user("hi"), temperature=0)
    assert answer.choices[0].message.content == "Hello there!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 13
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert [model.id for model in client(served).models.list()] == [MODEL]
    assert client(served).models.retrieve(MODEL).id == MODEL


def test_streams(served: Served) -> None:
    options: Any = {"include_usage": True}
    create = client(served).chat.completions.create
    chunks = list(create(model=MODEL, messages=user("hi"), temperature=0, stream=True, stream_options=options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there!"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 13
    with client(served).chat.completions.stream(model=MODEL, messages=user("hi"), temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello there!"
    texts = client(served).completions.create(model=MODEL, prompt="a", max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts) == "bcdef"


def test_tools(served: Served) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    ask: Any = {"model": MODEL, "messages": user("call"), "tools": tools, "temperature": 0}
    message = client(served).chat.completions.create(**ask).choices[0].message
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Rome"}
    # The answer goes back as the client has it, with the tool's result.
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    history: Any = [*user("call"), message, result]
    assert client(served).chat.completions.create(model=MODEL, messages=history, tools=tools).choices
    with client(served).chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.name == "weather"


def test_logprobs(served: Served) -> None:
    create = client(served).chat.completions.create
    choice = create(model=MODEL, messages=user("hi"), temperature=0, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(one.token for one in choice.logprobs.content[:-1]) == "Hello there!"
    assert {len(one.top_logprobs) for one in choice.logprobs.content} == {2}
    text = client(served).completions.create(
        model=MODEL, prompt="a", echo=True, logprobs=2, max_tokens=2, temperature=0
    )
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]


def test_json_schema(served: Served) -> None:
    parse = client(served).chat.completions.parse
    answer = parse(model=MODEL, messages=user("fruit"), response_format=Fruit, temperature=0)
    assert answer.choices[0].message.parsed == Fruit(name="fig", count=3)
    with pytest.raises(openai.LengthFinishReasonError):
        parse(model=MODEL, messages=user("hi"), response_format=Fruit, temperature=0, max_tokens=20)


def test_errors_are_the_clients_own(served: Served) -> None:
    create = client(served).chat.completions.create
    with pytest.raises(openai.NotFoundError, match="not served here"):
        create(model="gpt-9", messages=user("hi"))
    with pytest.raises(openai.BadRequestError, match="2000 more") as caught:
        create(model=MODEL, messages=user("hi"), max_tokens=2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong").models.list()


def test_an_error_in_a_stream_reaches_the_client() -> None:
    with serving(told(delay=0.02), timeout=0.3, api_key="sk-test") as served:
        stream = client(served).completions.create(model=MODEL, prompt="a", max_tokens=500, temperature=0, stream=True)
        with pytest.raises(openai.APIError, match="longer than this server allows"):
            list(stream)


# ---- the process


def test_sigterm_lets_running_requests_finish() -> None:
    with own_process("llm=told(delay=0.05)") as (process, url):
        body = {"prompt": "a", "max_tokens": 25, "temperature": 0}
        text = stopped_in_a_stream(process, url, signal.SIGTERM, body)
        assert text[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in text[:-1]) == ALPHABET[1:]
        assert process.wait(30) == 0  # stopped as asked


# ---- the real model


def test_the_default_model_answers(real: Served) -> None:
    create = client(real).chat.completions.create
    answer = create(model=DEFAULT_NAME, messages=PARIS, temperature=0, max_tokens=8)
    assert "Paris" in (answer.choices[0].message.content or "")
    stream = create(model=DEFAULT_NAME, messages=PARIS, temperature=0, max_tokens=8, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content


@pytest.mark.slow
def test_the_default_model_keeps_to_a_schema(real: Served) -> None:
    parse = client(real).chat.completions.parse
    question = user("Describe a bowl of apples in JSON, with name and count.")
    answer = parse(model=DEFAULT_NAME, messages=question, response_format=Fruit, temperature=0, max_tokens=80)
    assert isinstance(answer.choices[0].message.parsed, Fruit)
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "maxLength": 20}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    forced: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80}
    ask = user("What is the weather in Paris?")
    message = client(real).chat.completions.create(model=DEFAULT_NAME, messages=ask, temperature=0, **forced)
    (call,) = message.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments).keys() == {"city"}


@pytest.mark.slow
def test_two_hundred_streams_some_of_which_leave(real: Served) -> None:
    """Every request ends as it should, and nothing of it stays."""
    rng, ends = random.Random(0), []

    async def one(http: httpx.AsyncClient) -> None:
        await asyncio.sleep(rng.random() * 10)
        leaves_after = rng.choice([None, rng.uniform(0, 10)])
        body = {"prompt": f"The number {rng.randint(0, 50)} is", "max_tokens": rng.randint(1, 12), "stream": True}
        started = time.monotonic()
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if leaves_after is not None and time.monotonic() - started > leaves_after:
                    ends.append("left")
                    return
                if line == "data: [DONE]":
                    ends.append("done")
                    return
                assert not line.startswith('data: {"error"'), line
        raise AssertionError("the stream broke off")

    async def everybody() -> None:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=real.url, timeout=500, limits=limits) as http:
            await asyncio.gather(*(one(http) for _ in range(200)))

    asyncio.run(everybody())
    wait_until(real.is_idle)
    assert len(ends) == 200
    assert ends.count("done") > 20
    assert real.http.get("/health").status_code == 200
