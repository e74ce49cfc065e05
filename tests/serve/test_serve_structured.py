"""Answers that must look like something, in vLLM's spelling: by schema, regex, choice and grammar."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import MODEL, Served, serving, told
from test_serve import ANSWERS, FORMAT, SCHEMA

CHAT = "/v1/chat/completions"
GBNF = 'root ::= "n" digit digit\ndigit ::= [0-9]'
LARK = 'start: "n" DIGIT DIGIT\nDIGIT: /[0-9]/'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(ANSWERS | {"endless": "<think>\nhm"})) as running:
        yield running


def said(served: Served, text: str, **options: Any) -> str:
    return served.chat(text, max_tokens=60, **options)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"structured_outputs": {"regex": "[xyz]{3}-[0-9]{2}a?"}}, "[xyz]{3}-[0-9]{2}a?"),
        ({"structured_outputs": {"regex": "^[xyz]{3}$"}}, "[xyz]{3}"),
        ({"guided_regex": "[xyz]{3}"}, "[xyz]{3}"),
        ({"structured_outputs": {"choice": ["positive", "nega\"tive\n"]}}, 'positive|nega"tive\n'),
        ({"guided_choice": ["so", "or so"]}, "so|or so"),
        ({"structured_outputs": {"grammar": GBNF}}, "n[0-9]{2}"),
        ({"guided_grammar": LARK}, "n[0-9]{2}"),
    ],
)  # fmt: skip
def test_answers_match(served: Served, options: Any, pattern: str) -> None:
    """The model would say something else: "Hello there!" matches none of them."""
    assert re.fullmatch(pattern, said(served, "hi", **options))
    completed = served.complete("a", max_tokens=60, **options)["choices"][0]
    assert re.fullmatch(pattern, completed["text"])
    assert completed["finish_reason"] == "stop"
    item = served.post("/v1/responses", input="hi", temperature=0, max_output_tokens=60, **options)["output"][0]
    assert re.fullmatch(pattern, item["content"][0]["text"])


@pytest.mark.parametrize(
    "options",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA, "guided_decoding_backend": "guidance"},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_json(served: Served, options: Any) -> None:
    assert json.loads(said(served, "json", **options)) == {"n": 3, "kind": "b"}
    assert said(served, "hi", **options).startswith("{")


def test_thinking_is_free_before_it(served: Served) -> None:
    message = served.chat("thinkjson", structured_outputs={"json": SCHEMA})["choices"][0]["message"]
    assert (message["reasoning_content"], json.loads(message["content"])) == ("hm", {"n": 3, "kind": "b"})


def test_thinking_does_not_end_the_answer(served: Served) -> None:
    """The model would end after its thought, without the JSON that was asked for."""
    assert served.chat("endless")["choices"][0]["finish_reason"] == "stop"
    choice = served.chat("endless", structured_outputs={"json": SCHEMA}, max_tokens=30)["choices"][0]
    assert choice["finish_reason"] == "length"


def test_a_thought_is_not_opened_where_the_prompt_has_closed_it(served: Served) -> None:
    """The model would think without an end."""
    options: dict[str, Any] = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 80}
    for more in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        choice = served.chat("endless", **options, **more)["choices"][0]
        assert (choice["finish_reason"], choice["message"].get("reasoning_content")) == ("stop", None)
        assert json.loads(choice["message"]["content"]).keys() == {"n", "kind"}


def test_a_completion_has_no_thought(served: Served) -> None:
    """Its text is what the grammar allows, from the first token on."""
    prompt = "<|im_start|>user\nendless<|im_end|>\n<|im_start|>assistant\n"
    assert served.complete(prompt, max_tokens=8, temperature=0)["choices"][0]["text"].startswith("<think>")
    choice = served.complete(prompt, max_tokens=60, temperature=0, structured_outputs={"regex": "[xyz]{3}"})["choices"][
        0
    ]
    assert re.fullmatch("[xyz]{3}", choice["text"])


def test_openais_client_sends_it_as_vllms_users_do(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    more = {"structured_outputs": {"choice": ["yes", "no"]}}
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, extra_body=more)
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"structured_outputs": {}}, None, "give exactly one of json, json_object, regex, choice, grammar, not 0"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None, "grammar, not 2"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["b"]}, None, "guided_choice exclude each other"),
        ({"structured_outputs": {"structural_tag": "x"}}, None, "structural_tag: is not a parameter"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "the regex cannot be followed"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "the regex cannot be followed"),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"guided_grammar": 'root ::= "a" ('}, "guided_grammar", "the grammar cannot be read: Expected ')'"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "the grammar cannot be followed"),
        ({"guided_grammar": "a" * 300_000}, "guided_grammar", "the grammar has 300000 characters"),
        ({"guided_json": "{"}, "guided_json", "the schema is not JSON"),
        ({"guided_json": {"type": "nothing"}}, "guided_json", "the JSON schema cannot be followed"),
        ({"guided_json": SCHEMA, "response_format": FORMAT}, None, "guided_json and response_format exclude"),
        ({"guided_json": SCHEMA, "min_tokens": 3}, None, "min_tokens and a grammar exclude each other"),
    ],
)
def test_what_is_wrong_is_named(served: Served, options: Any, param: str | None, says: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20} | options
    response = served.http.post(CHAT, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert says in error["message"]
    assert param is None or error["param"] == param
    assert served.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 20} | options).status_code == 400
