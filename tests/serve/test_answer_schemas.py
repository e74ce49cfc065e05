"""That answers are what /openapi.json says of them: whole ones of every address, with all that can be in them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Served, serving, told

from whorl.serve import answer_schemas as answers

CALL = '<think>hm</think><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL = {"name": "weather", "parameters": {"type": "object"}}
USER = [{"role": "user", "content": "call"}]
RENDER = "/v1/chat/completions/render"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told({"call": CALL})) as running:
        yield running


CASES: dict[str, tuple[type[answers.Answer], list[dict[str, Any]]]] = {
    "/v1/chat/completions": (
        answers.ChatCompletion,
        [
            {"messages": USER, "tools": [{"type": "function", "function": TOOL}]},
            {"messages": USER, "logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 4},
            {"messages": USER, "token_details": {"top": 1, "prompt": True}},
        ],
    ),
    RENDER: (answers.Rendered, [{"messages": USER, "max_tokens": 3}]),
    "/v1/completions": (
        answers.Completion,
        [{"prompt": ["a", "b"]}, {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}],
    ),
    "/v1/responses": (
        answers.Response,
        [{"input": "call", "tools": [{"type": "function", **TOOL}]}, {"input": "hi", "max_output_tokens": 3}],
    ),
    "/v1/responses/input_tokens": (answers.InputTokens, [{"input": "hi"}]),
    "/v1/messages": (
        answers.MessageAnswer,
        [
            {
                "messages": USER,
                "max_tokens": 200,
                "thinking": {"type": "adaptive"},
                "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
            },
            {"messages": USER, "max_tokens": 3},
        ],
    ),
    "/v1/messages/count_tokens": (answers.MessageTokens, [{"messages": USER}]),
    "/inference/v1/generate": (
        answers.GeneratedIds,
        [{"token_ids": [64, 65], "sampling_params": {"max_tokens": 3, "logprobs": 1, "prompt_logprobs": 1}}],
    ),
    "/api/chat": (
        answers.OllamaMessageLine,
        [
            {"model": "told", "messages": USER, "tools": [{"type": "function", "function": TOOL}], "stream": False},
            {"model": "told", "messages": USER, "logprobs": True, "stream": False, "options": {"num_predict": 3}},
        ],
    ),
    "/api/generate": (answers.OllamaTextLine, [{"model": "told", "prompt": "call", "stream": False}]),
    "/api/show": (answers.OllamaShown, [{"model": "told"}]),
    "/tokenize": (answers.Tokens, [{"prompt": "ab"}, {"prompt": "ab", "return_token_strs": True}]),
    "/detokenize": (answers.Detokenized, [{"tokens": [64]}]),
}

OLLAMA = (("/api/tags", answers.OllamaModels), ("/api/ps", answers.OllamaModels))


@pytest.mark.parametrize("path", CASES)
def test_answers_are_what_is_said_of_them(served: Served, path: str) -> None:
    kind, bodies = CASES[path]
    for body in bodies:
        model = {"model": "told"} if path.startswith("/v1/messages") else {}
        kind.model_validate_json(json.dumps(served.post(path, **model, **body)), strict=True)


def test_every_address_says_what_it_answers(served: Served) -> None:
    paths = served.http.get("/openapi.json").json()["paths"]
    said = {path: work["post"]["responses"]["200"]["content"] for path, work in paths.items() if "post" in work}
    texts = {path: said.pop(path) for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")}
    assert all("text/plain" in content for content in texts.values())
    elsewhere = {"/v1/embeddings", "/api/embed", "/api/embeddings", "/page/mcp/tools", "/page/mcp/call"}
    assert said.keys() == CASES.keys() | elsewhere
    assert all("$ref" in content["application/json"]["schema"] for content in said.values())
    streams = {path for path, content in said.items() if content.keys() - {"application/json"}}
    # A conversation may be rendered with the fields of any request, and is one object.
    streamable = {path for path in CASES if "stream" in _fields(served, path)} - {RENDER}
    assert streams == streamable, "what can stream says so"
    for path, kind in (("/v1/models", answers.ModelList), ("/v1/models/told", answers.ModelCard), *OLLAMA):
        kind.model_validate_json(served.http.get(path).text, strict=True)


def _fields(served: Served, path: str) -> set[str]:
    document = served.http.get("/openapi.json").json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return set(document["components"]["schemas"][body.rpartition("/")[2]]["properties"])
