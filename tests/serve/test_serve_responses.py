"""`/v1/responses` over HTTP, and through OpenAI's own client: items, streams, tools, formats, pictures, errors."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from serving import MODEL, Served, serving, told
from test_serve import ANSWERS, SCHEMA

RESPONSES = "/v1/responses"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
PICTURE = {"type": "input_image", "image_url": "data:,"}


class Answer(BaseModel):
    n: int
    kind: str


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(
        told(ANSWERS | {"thinkcall": f"<think>\nhm\n</think>\n\n{ANSWERS['call']}"}), strict_model_name=True
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(served: Served, prompt: Any, **options: Any) -> Any:
    return served.post(RESPONSES, input=prompt, **({"temperature": 0} | options))


def events(served: Served, prompt: Any, **options: Any) -> list[Any]:
    body = {"input": prompt, "temperature": 0, "stream": True} | options
    text = served.http.post(RESPONSES, json=body).text
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    assert all(name == f"event: {json.loads(data[6:])['type']}" for name, data in blocks)
    return [json.loads(data[6:]) for _, data in blocks]


def test_a_whole_answer(served: Served) -> None:
    response = ask(served, "hi", instructions="Be kind.", metadata={"a": "b"}, max_output_tokens=40)
    (item,) = response["output"]
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", MODEL)
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello there!", "annotations": [], "logprobs": []}]
    assert (response["instructions"], response["metadata"], response["store"]) == ("Be kind.", {"a": "b"}, False)
    usage = response["usage"]
    assert usage["output_tokens"] == len("Hello there!") + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    counted = served.post(f"{RESPONSES}/input_tokens", input="hi", instructions="Be kind.")
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


def test_a_number_is_in_the_ids_and_in_the_header(served: Served) -> None:
    response = served.http.post(RESPONSES, json={"input": "hi"}, headers={"X-Request-Id": "n-7"})
    assert response.headers["x-request-id"] == "n-7"
    assert (response.json()["id"], response.json()["output"][0]["id"]) == ("resp_n-7", "msg_n-7_0")


@pytest.mark.parametrize("question", ["hi", "thinkcall", "calls", "snow", "broken", "unfinished"])
def test_a_stream_adds_up_to_the_whole(served: Served, question: str) -> None:
    whole, stream = ask(served, question, tools=[WEATHER]), events(served, question, tools=[WEATHER])
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    last = stream[-1]
    assert last["type"] == "response.completed"
    number = last["response"]["id"].removeprefix("resp_")
    text = json.dumps(last["response"]).replace(number, whole["id"].removeprefix("resp_"))
    ours = json.loads(text)
    for field in ("created_at", "completed_at"):
        ours[field] = whole[field]
    ids = [[call.get("call_id") for call in one["output"]] for one in (ours, whole)]
    assert sum(map(bool, ids[0])) == sum(map(bool, ids[1]))
    for one in (*ours["output"], *whole["output"]):
        one.pop("call_id", None)
    ours["usage"]["input_tokens_details"] = whole["usage"]["input_tokens_details"]  # the first filled the cache
    assert ours == whole
    # What came piece by piece is what the items have at their end.
    for at, item in enumerate(whole["output"]):
        deltas = "".join(e["delta"] for e in stream if e["type"].endswith(".delta") and e["output_index"] == at)
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        done = [
            e["item"]["type"] for e in stream if e["type"] == "response.output_item.done" and e["output_index"] == at
        ]
        assert done == [item["type"]]


def test_thinking_and_a_call_are_items(served: Served) -> None:
    thought, said, call = ask(served, "thinkcall", tools=[WEATHER])["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert said["content"][0]["text"] == "Let me see."
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Rome"})


def test_a_conversation_is_the_chats(served: Served) -> None:
    """What items are made of is told by the prompt's tokens: the same as of the messages that they stand for."""
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
    items = [
        {"role": "developer", "content": "Again."},
        {"role": "user", "content": [{"type": "input_text", "text": "call"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]},
        call | {"id": "fc_1", "status": "completed", "caller": None},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]  # fmt: skip
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    messages = [
        {"role": "system", "content": "Be kind.\n\nAgain."},
        {"role": "user", "content": "call"},
        {"role": "assistant", "reasoning_content": "hm", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    tool = {"type": "function", "function": {name: WEATHER[name] for name in ("name", "parameters", "strict")}}
    theirs = served.post("/tokenize", messages=messages, tools=[tool])["count"]
    body = {"input": items, "instructions": "Be kind.", "tools": [WEATHER]}
    assert served.post(f"{RESPONSES}/input_tokens", **body)["input_tokens"] == theirs


def test_a_forced_call_and_a_schema(served: Served) -> None:
    forced = ask(served, "hi", tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert forced["output"][0]["type"] == "function_call"
    assert json.loads(forced["output"][0]["arguments"]).keys() == {"city"}
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    response = ask(served, "json", text=form)
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"n": 3, "kind": "b"}
    assert response["text"]["format"]["schema"] == SCHEMA


def test_an_answer_that_is_cut_off(served: Served) -> None:
    response = ask(served, "hi", max_output_tokens=5)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == ("incomplete", "Hello")
    assert events(served, "hi", max_output_tokens=5)[-1]["type"] == "response.incomplete"


def test_logprobs(served: Served) -> None:
    response = ask(served, "think", include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response["output"][1]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in logprobs).endswith("Yes.")
    assert "hm" not in "".join(one["token"] for one in logprobs)
    assert {len(one["top_logprobs"]) for one in logprobs} == {2}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id: this server keeps no responses"),
        ({"input": "hi", "conversation": "c"}, "conversation: this server keeps no responses"),
        ({"input": "hi", "background": True}, "background: is refused: nothing is stored here"),
        ({"input": "hi", "truncation": "auto"}, "truncation: is refused: nothing is left out of a conversation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0: an item's type is 'message'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0: a part's type is"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"input": "hi", "tool_choice": "required"}, "tool_choice: required needs tools, and there are none"),
        ({"input": "hi", "tool_choice": {"type": "function", "name": "x"}}, "tool_choice: 'x' is not in tools"),
        ({"input": "hi", "text": {"format": {"type": "json_schema"}}}, "text.format: type json_schema and a field"),
        ({"input": "hi", "topp": 1}, "topp: is not a parameter that this server knows"),
        ({"input": "hi", "max_output_tokens": 5000}, "5000 more are asked for"),
        ({"input": [{"role": "assistant", "content": [PICTURE]}]}, "input: pictures are allowed only in messages"),
        ({"input": [{"role": "user", "content": [PICTURE]}]}, "text only"),
        ({"input": [{"role": "user", "content": "x"}] * 20000}, "has 20000 items and parts"),
        ({}, "input: Field required"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(served: Served, body: Any, says: str) -> None:
    response = served.http.post(RESPONSES, json=body)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]


# ---- through OpenAI's client, which checks what it accumulates


def test_the_client_streams_text(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="think", temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (final.output_text, final.status) == ("Yes.", "completed")
    assert final.output[0].content[0].text == "hm, well"  # type: ignore[union-attr, index]
    assert kinds.count("response.reasoning_text.delta") > 1
    assert kinds.count("response.output_text.delta") > 1
    created = client.responses.create(model=MODEL, input="think", temperature=0)
    assert created.output_text == "Yes."
    assert created.usage is not None
    assert created.usage.output_tokens_details.reasoning_tokens > 0


def test_the_client_calls_a_tool_and_sends_everything_back(client: openai.OpenAI) -> None:
    history: Any = [{"role": "user", "content": "thinkcall"}]
    with client.responses.stream(model=MODEL, input=history, tools=[WEATHER], temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    call: Any = final.output[-1]
    assert (call.name, call.parsed_arguments, "".join(deltas)) == ("weather", {"city": "Rome"}, call.arguments)
    history += final.output
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    history.append({"role": "user", "content": "hi"})
    answer = client.responses.create(model=MODEL, input=history, tools=[WEATHER], temperature=0)
    assert answer.output_text == "Hello there!"


def test_the_client_parses(client: openai.OpenAI) -> None:
    response = client.responses.parse(model=MODEL, input="json", text_format=Answer, temperature=0)
    assert response.output_parsed == Answer(n=3, kind="b")


def test_the_client_meets_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.responses.create(model="gpt-9", input="hi")
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        client.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_an_error_in_a_stream_is_told_and_raised() -> None:
    with serving(told(delay=0.02), timeout=0.15) as served:
        body = {"input": "hi", "temperature": 0, "stream": True}
        text = httpx.post(f"{served.url}{RESPONSES}", json=body, timeout=30).text
        failed, error = (json.loads(block.split("data: ")[1]) for block in text.rstrip().split("\n\n")[-2:])
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"]["code"] == "timeout"
        assert (error["type"], error["sequence_number"]) == ("error", failed["sequence_number"] + 1)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.responses.create(model=MODEL, input="hi", temperature=0, stream=True)
            with pytest.raises(openai.APIError, match="longer than this server allows"):
                list(stream)
