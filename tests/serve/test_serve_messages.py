"""`/v1/messages` over HTTP, in Anthropic's shape: blocks, streams, tools, thinking, errors; and their own client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import MODEL, Served, serving, told
from test_serve import ANSWERS, SCHEMA

MESSAGES = "/v1/messages"
KEY = "sk-test"
WEATHER: Any = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
MORE = {
    "thinkcall": f"<think>\nhm\n</think>\n\n{ANSWERS['call']}",
    "cut": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom',
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(ANSWERS | MORE), api_key=KEY, strict_model_name=True) as running:
        running.http.headers.pop("authorization")
        running.http.headers["x-api-key"] = KEY
        yield running


def body(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    fields = {"model": MODEL, "max_tokens": 200, "temperature": 0, "messages": messages}
    return fields | {"thinking": {"type": "enabled", "budget_tokens": 1024}} | more


def ask(served: Served, text: str, **more: Any) -> Any:
    return served.post(MESSAGES, **body(text, **more))


def events(served: Served, text: str, **more: Any) -> list[Any]:
    response = served.http.post(MESSAGES, json=body(text, stream=True, **more))
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n")]
    assert all(name == f"event: {json.loads(data[6:])['type']}" for name, data in blocks)
    return [json.loads(data[6:]) for _, data in blocks]


def joined(stream: list[Any]) -> dict[str, Any]:
    """The message that a stream adds up to, as a client of Anthropic's adds it up."""
    message = stream[0]["message"]
    inputs: dict[int, str] = {}
    for event in stream[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                block[kind] += delta[kind]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for at, text in inputs.items():
        message["content"][at]["input"] = json.loads(text)
    return message


def test_a_whole_answer(served: Served) -> None:
    response = served.http.post(MESSAGES, json=body("hi"), headers={"X-Request-Id": "n-7"})
    message = response.json()
    assert response.headers["request-id"] == response.headers["x-request-id"] == "n-7"
    assert (message["id"], message["type"], message["role"], message["model"]) == (
        "msg_n-7",
        "message",
        "assistant",
        MODEL,
    )
    assert message["content"] == [{"type": "text", "text": "Hello there!"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert usage["output_tokens"] == len("Hello there!") + 1
    request = {name: value for name, value in body("hi").items() if name in ("model", "messages", "thinking")}
    counted = served.post(f"{MESSAGES}/count_tokens", **request)
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    again = ask(served, "hi")["usage"]
    assert again["cache_read_input_tokens"] > 0
    assert again["input_tokens"] + again["cache_read_input_tokens"] == counted["input_tokens"]


@pytest.mark.parametrize("question", ["hi", "thinkcall", "calls", "snow", "broken"])
def test_a_stream_adds_up_to_the_whole(served: Served, question: str) -> None:
    tools = [WEATHER, CLOCK]
    whole, stream = ask(served, question, tools=tools), events(served, question, tools=tools)
    assert stream[-1] == {"type": "message_stop"}
    ours = joined(stream)
    for one in (ours, whole):
        del one["id"]
        one["usage"] = {"output_tokens": one["usage"]["output_tokens"]}
        for block in one["content"]:
            block.pop("id", None)
    assert ours == whole
    starts = [event["index"] for event in stream if event["type"] == "content_block_start"]
    stops = [event["index"] for event in stream if event["type"] == "content_block_stop"]
    assert starts == stops == list(range(len(whole["content"])))


def test_thinking_and_a_call_are_blocks(served: Served) -> None:
    message = ask(served, "thinkcall", tools=[WEATHER])
    thought, said, call = message["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert said["text"] == "Let me see."
    assert (call["name"], call["input"], message["stop_reason"]) == ("weather", {"city": "Rome"}, "tool_use")


def test_thinking_is_off_unless_asked_for(served: Served) -> None:
    """The template closes the tag itself, so the prompt is longer."""
    request = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    counts = [
        served.post(f"{MESSAGES}/count_tokens", **request, **more)["input_tokens"]
        for more in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}})
    ]
    assert counts[0] == counts[1] > counts[2]


def test_a_conversation_is_the_chats(served: Served) -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "call"} | marked]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "See.", "citations": None}, use]},
        {"role": "user", "content": [result | marked, {"type": "text", "text": "and now?"}]},
    ]
    system = [{"type": "text", "text": "Be kind."} | marked, {"type": "text", "text": "Be short."}]
    request = {"model": MODEL, "system": system, "tools": [WEATHER | marked], "thinking": {"type": "adaptive"}}
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    messages = [
        {"role": "system", "content": "Be kind.\n\nBe short."},
        {"role": "user", "content": "call"},
        {"role": "assistant", "reasoning_content": "hm", "content": "See.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "and now?"},
    ]
    about = {"name": "weather", "description": "The weather.", "parameters": WEATHER["input_schema"]}
    theirs = served.post("/tokenize", messages=messages, tools=[{"type": "function", "function": about}])["count"]
    assert served.post(f"{MESSAGES}/count_tokens", messages=blocks, **request) == {"input_tokens": theirs}


def test_choices_of_tools(served: Served) -> None:
    tools = [WEATHER, CLOCK]
    named = ask(served, "hi", tools=tools, tool_choice={"type": "tool", "name": "weather"})
    assert [block["name"] for block in named["content"]] == ["weather"]
    assert named["content"][0]["input"].keys() == {"city"}
    once = {"type": "any", "disable_parallel_tool_use": True}
    assert [b["type"] for b in ask(served, "calls", tools=tools, tool_choice=once)["content"]] == ["tool_use"]
    assert ask(served, "call", tools=tools, tool_choice={"type": "none"})["content"][0]["text"] == ANSWERS["call"]


def test_a_call_that_is_not_whole_is_nobodys(served: Served) -> None:
    call = ask(served, "cut", tools=[WEATHER])["content"][0]
    assert (call["name"], list(call["input"])) == ("weather", ["INVALID_JSON"])


def test_how_an_answer_ends(served: Served) -> None:
    cut = ask(served, "hi", max_tokens=5)
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "Hello")
    stopped = ask(served, "hi", stop_sequences=["zzz", " there"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " there")
    assert stopped["content"][0]["text"] == "Hello"
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert json.loads(ask(served, "json", output_config=form)["content"][0]["text"]) == {"n": 3, "kind": "b"}


# ---- errors


def refused(response: httpx.Response, status: int, kind: str, says: str) -> None:
    assert response.status_code == status, response.text
    reply = response.json()
    assert (reply["type"], reply["error"]["type"]) == ("error", kind)
    assert reply["request_id"] == response.headers["request-id"]
    assert says in reply["error"]["message"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 5000}, "5000 more are asked for"),
        ({"topp": 1}, "topp: is not a parameter that this server knows"),
        ({"messages": [{"role": "user", "content": []}]}, "messages: none has any content"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "the last message has no text to continue"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages.0.content.0: a block's type is",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
            "is not allowed in a message of the user",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: type tool and a field name go together"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: required needs tools, and there are none"),
        ({"messages": [{"role": "user", "content": "x"}] * 20000}, "has 20000 messages and blocks"),
    ],
)
def test_what_is_wrong_is_named(served: Served, more: Any, says: str) -> None:
    refused(served.http.post(MESSAGES, json=body("hi") | more), 400, "invalid_request_error", says)


def test_errors_of_every_kind_have_anthropics_shape(served: Served) -> None:
    url = f"{served.url}{MESSAGES}"
    refused(httpx.post(url, json=body("hi")), 401, "authentication_error", "is missing")
    refused(httpx.post(url, json=body("hi"), headers={"x-api-key": "no"}), 401, "authentication_error", "is wrong")
    refused(served.http.post(MESSAGES, json=body("hi", model="claude")), 404, "not_found_error", "is not served here")
    refused(served.http.get(MESSAGES), 405, "invalid_request_error", "this endpoint takes POST")
    refused(served.http.post(MESSAGES, content=b"{"), 415, "invalid_request_error", "Content-Type")
    large = body("x" * (5 << 20))
    refused(served.http.post(MESSAGES, json=large), 413, "request_too_large", "up to 4194304 are allowed")
    refused(served.http.post(f"{MESSAGES}/batches", json={}), 404, "not_found_error", "no such endpoint")
    assert "error" in served.http.post("/v1/completions", json={}).json()  # the others keep theirs
    assert "type" not in served.http.post("/v1/completions", json={}).json()


def test_an_error_in_a_stream_is_its_last_event() -> None:
    with serving(told(delay=0.02), timeout=0.3) as slow:
        text = httpx.post(f"{slow.url}{MESSAGES}", json=body("hi", stream=True), timeout=30).text
        name, data = text.rstrip().split("\n\n")[-1].split("\n")
        assert name == "event: error"
        assert json.loads(data[6:])["error"]["type"] == "overloaded_error"


# ---- Anthropic's client


@pytest.mark.slow
def test_anthropics_client(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0)
    history: list[Any] = [{"role": "user", "content": "thinkcall"}]
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER], "extra_body": {"temperature": 0}}
    options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    whole = client.messages.create(messages=[{"role": "user", "content": "hi"}], **options)
    assert whole.content[0].text == ANSWERS["hi"]
    with client.messages.stream(messages=history, **options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"thinking", "text", "input_json"} <= set(kinds)
    thought, said, call = final.content
    assert (thought.thinking, said.text, call.input) == ("hm", "Let me see.", {"city": "Rome"})
    assert final.stop_reason == "tool_use"
    # The answer goes back as the client has it, with the tool's result.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history += [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=history, **options).stop_reason == "end_turn"
    counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert counted.input_tokens > 10
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(model="claude", max_tokens=5, messages=history[:1])
    with pytest.raises(anthropic.BadRequestError, match="5000 more") as caught:
        client.messages.create(model=MODEL, max_tokens=5000, messages=history[:1])
    assert caught.value.request_id
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=served.url, api_key="wrong").models.list()


@pytest.mark.slow
def test_anthropics_client_meets_an_error_in_a_stream() -> None:
    anthropic = pytest.importorskip("anthropic")
    with serving(told(delay=0.02), timeout=0.3) as slow:
        client = anthropic.Anthropic(base_url=slow.url, api_key="none", max_retries=0)
        options = {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
        with (
            pytest.raises(anthropic.APIError, match="longer than this server allows"),
            client.messages.stream(**options) as stream,
        ):
            list(stream)
