"""`/api`, Ollama's interface: bodies as its programs send them, and what they read of the lines that come back."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from media_files import png
from seeing import looking, seeing
from serving import MODEL, Served, serving, told
from typer.testing import CliRunner

from whorl.cli import app

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWERS = {
    "hi": "Hello there!",
    "why": "<think>since</think>so",
    "call": CALL,
    "sunny": "Take a hat.",
    "one": '{"a": 1}',
    "nan": CALL.replace('"Rome"', "NaN"),
    "half": CALL.replace("Rome", "\\ud83d"),
    "huge": CALL.replace('"Rome"', "1e999"),
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(ANSWERS)) as running:
        yield running


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def lines(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with served.http.stream("POST", path, json=body) as response:
        text = response.read().decode()
    assert response.status_code == 200, text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_stream_is_the_default_and_its_last_line_has_the_times(served: Served) -> None:
    body = {"model": MODEL, "messages": user("hi"), "options": None, "stream": None, "format": None}
    *parts, last = lines(served, "/api/chat", body)
    assert "".join(part["message"]["content"] for part in parts) == "Hello there!"
    assert not any(part["done"] for part in parts)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 13)
    assert last["prompt_eval_count"] > 10
    assert last["total_duration"] == pytest.approx(last["prompt_eval_duration"] + last["eval_duration"], abs=2)
    assert last["eval_duration"] > 0


def test_a_whole_answer_is_the_sum_of_its_stream(served: Served) -> None:
    for question in ("hi", "why", "call"):
        body = {"model": MODEL, "messages": user(question), "tools": [TOOL], "logprobs": True, "top_logprobs": 1}
        whole = served.post("/api/chat", **body, stream=False)
        parts = lines(served, "/api/chat", body)
        assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"]
        thoughts = "".join(part["message"].get("thinking", "") for part in parts)
        assert thoughts == whole["message"].get("thinking", "")
        calls = [call["function"] for part in parts for call in part["message"].get("tool_calls", ())]
        assert calls == [call["function"] for call in whole["message"].get("tool_calls", ())]
        logprobs = [token for part in parts for token in part.get("logprobs", ())]
        assert logprobs == whole["logprobs"]
        assert len(logprobs) == whole["eval_count"]
    assert calls == [{"index": 0, "name": "weather", "arguments": {"city": "Rome"}}]


def test_arguments_that_no_json_can_have_are_told_as_text(served: Served) -> None:
    """Python reads them; the answer was lost, or was no JSON."""
    for question in ("nan", "half", "huge"):
        text = json.dumps({"INVALID_JSON": ANSWERS[question].split('"arguments": ')[1].removesuffix("}\n</tool_call>")})
        body = {"model": MODEL, "messages": user(question), "tools": [TOOL]}
        whole = served.post("/api/chat", **body, stream=False)["message"]["tool_calls"]
        (streamed,) = [part["message"] for part in lines(served, "/api/chat", body) if "tool_calls" in part["message"]]
        tools = [{"name": "weather", "input_schema": {"type": "object"}}]
        said = served.post("/v1/messages", model=MODEL, messages=user(question), tools=tools, max_tokens=200)
        calls = (whole[0]["function"], streamed["tool_calls"][0]["function"])
        assert [json.dumps(call["arguments"]) for call in calls] == [text, text]
        assert json.dumps(said["content"][0]["input"]) == text


def test_thinking_is_apart_and_can_be_turned_off(served: Served) -> None:
    body = {"model": MODEL, "messages": user("why"), "stream": False}
    assert served.post("/api/chat", **body)["message"] == {"role": "assistant", "content": "so", "thinking": "since"}
    message = served.post("/api/chat", **body | {"messages": user("hi"), "think": False})["message"]
    assert message == {"role": "assistant", "content": "Hello there!"}


def test_generate_in_the_template_and_raw(served: Served) -> None:
    greedy = {"temperature": 0, "num_predict": 4}
    body = {"model": MODEL, "stream": False, "options": greedy, "keep_alive": "5m"}
    answer = served.post("/api/generate", prompt="hi", system="Be brief.", **body)
    assert (answer["response"], answer["done_reason"]) == ("Hell", "length")
    assert served.post("/api/generate", prompt="a", raw=True, **body)["response"] == "bcde"
    unlimited = served.post("/api/generate", prompt="a", raw=True, **body | {"options": {"temperature": 0}})
    assert unlimited["eval_count"] > 100
    whole = served.post("/api/generate", **body | {"prompt": "hi", "options": {"num_predict": 0}})  # as -1: no limit
    assert (whole["response"], whole["done_reason"]) == ("Hello there!", "stop")
    *parts, _ = lines(served, "/api/generate", body | {"prompt": "hi", "stream": True})
    assert "".join(part["response"] for part in parts) == "Hell"


def test_without_a_message_the_model_is_said_to_be_loaded(served: Served) -> None:
    (line,) = lines(served, "/api/chat", {"model": MODEL})
    assert (line["done"], line["done_reason"], line["message"]["content"]) == (True, "load", "")
    answer = served.post("/api/generate", model=MODEL, keep_alive=0, stream=False)
    assert (answer["done_reason"], answer["response"]) == ("unload", "")
    with serving(told(ANSWERS), strict_model_name=True) as strict:
        for path in ("/api/chat", "/api/generate"):
            assert strict.http.post(path, json={"model": "other"}).status_code == 404
            assert strict.post(path, model=f"{MODEL}:latest", stream=False)["model"] == MODEL


def test_json_and_schemas_are_enforced(served: Served) -> None:
    body = {"model": MODEL, "messages": user("hi"), "stream": False, "options": {"num_predict": 40}}
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(served.post("/api/chat", **body, format=schema)["message"]["content"]) == {"a": 7}
    body["messages"] = user("one")
    assert json.loads(served.post("/api/chat", **body, format="json")["message"]["content"]) == {"a": 1}


# As these programs send them: Open WebUI 0.6 behind its own server, Continue 1.0 from an editor.
RECORDED = {
    "open webui": {
        "model": f"{MODEL}:latest",
        "messages": user("hi"),
        "options": {"temperature": 0, "num_ctx": 4096, "repeat_last_n": 64, "mirostat": 0, "num_keep": 24},
        "stream": True,
    },
    "open webui, a tool's result": {
        "model": MODEL,
        "messages": [
            *user("call"),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
        "tools": [TOOL],
        "stream": True,
    },
    "continue": {
        "model": MODEL,
        "messages": [{"role": "system", "content": "You edit code."}, *user("hi")],
        "options": {"num_predict": 400, "num_ctx": 8192, "stop": ["\n\n\n"], "temperature": 0, "use_mmap": True},
        "keep_alive": 1800,
        "stream": True,
    },
    # It sends neither the call nor whose result it is.
    "continue, a tool's result": {
        "model": MODEL,
        "messages": [*user("call"), {"role": "assistant", "content": ""}, {"role": "tool", "content": "sunny"}],
        "options": {"num_predict": 400, "num_ctx": 8192},
        "keep_alive": 1800,
        "stream": True,
    },
}


@pytest.mark.parametrize("program", RECORDED)
def test_recorded_bodies(served: Served, program: str) -> None:
    parts = lines(served, "/api/chat", RECORDED[program])
    said = "Take a hat." if "tool" in program else "Hello there!"
    assert "".join(part["message"]["content"] for part in parts) == said
    assert parts[-1]["done"]


def test_recorded_bodies_of_other_endpoints(served: Served) -> None:
    shown = served.post("/api/show", name=MODEL)  # Continue, when it starts
    assert shown["model_info"]["told.context_length"] == 1024
    assert "tools" in shown["capabilities"]
    for line in filter(None, shown["parameters"].split("\n")):  # Continue splits each into a name and a value
        assert len(line.split(" ")) == 2
    body = {"model": MODEL, "prompt": "a", "raw": True, "options": {"num_predict": 2, "temperature": 0}, "stream": True}
    parts = lines(served, "/api/generate", body | {"keep_alive": 1800})  # Continue completes a line
    assert "".join(part["response"] for part in parts) == "bc"
    (model,) = served.http.get("/api/tags").json()["models"]
    assert model["model"] == model["name"] == MODEL
    assert len(model["digest"]) == 64
    (loaded,) = served.http.get("/api/ps").json()["models"]
    assert loaded["context_length"] == 1024
    version = served.http.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]  # below, editors refuse to talk to it


def test_ps_reads_what_runs(served: Served) -> None:
    done = CliRunner().invoke(app, ["ps", "--url", served.url])
    assert done.output == f"{MODEL}  0 bytes  context 1024  0 running, 0 waiting  {served.url}\n"


def test_pictures() -> None:
    llm = looking({})
    with seeing(llm=llm) as served:
        message = {"role": "user", "content": "it", "images": [base64.b64encode(png(48, 40, seed=1)).decode()]}
        served.post("/api/chat", model="m", messages=[message], stream=False)
        assert len(llm.seen[-1][1]) == 1
        assert "vision" in served.post("/api/show", model=served.app.state.service.settings.names[0])["capabilities"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"messages": user("hi")}, 400, "model: Field required"),
        ("/api/chat", {"model": MODEL, "messages": user("hi"), "option": {}}, 400, "option: is not a parameter"),
        ("/api/chat", {"model": MODEL, "messages": user("hi"), "options": {"mirostat": 2}}, 400, "is no mirostat"),
        ("/api/generate", {"model": MODEL, "prompt": "hi", "context": [1, 2]}, 400, "send the conversation"),
        ("/api/generate", {"model": MODEL, "prompt": "hi", "suffix": "x"}, 400, "nothing is filled in"),
        ("/api/generate", {"model": MODEL, "prompt": "hi", "raw": True, "images": ["AA=="]}, 400, "raw: the prompt"),
        ("/api/generate", {"model": MODEL, "prompt": "hi", "raw": True, "system": "x"}, 400, "raw: the prompt is all"),
        ("/api/chat", {"model": MODEL, "messages": user("x" * 2000)}, 400, "up to 1024 are allowed"),
        ("/api/embed", {"model": MODEL, "input": "a"}, 400, "was not made for embeddings"),
        ("/api/embeddings", {"model": MODEL, "prompt": "a"}, 400, "was not made for embeddings"),
        ("/api/show", {"model": "other"}, 200, ""),
        ("/api/pull", {"model": "other"}, 404, "no such endpoint"),
    ],
)
def test_an_error_is_its_message(served: Served, path: str, body: dict[str, Any], status: int, words: str) -> None:
    response = served.http.post(path, json=body)
    assert response.status_code == status, response.text
    if status != 200:
        assert response.json().keys() == {"error"}
        assert words in response.json()["error"]


def test_an_error_in_a_stream_is_its_last_line() -> None:
    with serving(told(ANSWERS)) as served:
        model: Any = served.llm.model
        model.failure = RuntimeError("the device is gone")
        response = served.http.post("/api/chat", json={"model": MODEL, "messages": user("hi")})
    last = json.loads(response.text.splitlines()[-1])
    assert last.keys() == {"error"}
    assert "the device is gone" in last["error"]
