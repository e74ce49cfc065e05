"""White space in constrained JSON: every printer's is allowed, and a model that loves it cannot waste tokens on it."""

import json
import re
from typing import Any

import pytest
from serving import byte_tokenizer, serving, told

from whorl.engine.call_forms.json_calls import HermesCalls
from whorl.engine.grammar_masks import Allow, _depth, json_layout
from whorl.serve.grammar import Grammar, Grammars
from whorl.serve.schema_parts import Tool
from whorl.serve.tools import call_grammar

FIELDS = {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}}
FLAT = {"type": "object", "properties": FIELDS, "required": ["city", "days"], "additionalProperties": False}
NESTED = {"type": "object", "properties": {"a": {"type": "array", "items": FLAT}}, "required": ["a"]}
VALUE = {"city": "Rome", "days": 3}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": FLAT}}
WORDS = byte_tokenizer()
GRAMMARS = Grammars(WORDS, len(WORDS))


def allow_json(schema: Any) -> Allow:
    return GRAMMARS.compile(GRAMMARS.json_schema(schema), is_thinking=False)


def allow_call() -> Allow:
    grammar = call_grammar(HermesCalls, [Tool(**TOOL)], "required", is_parallel=False, tokenizer=WORDS)  # type: ignore[arg-type]
    return GRAMMARS.compile(Grammar(grammar), is_thinking=False)


def is_allowed(allow: Allow, text: str) -> bool:
    ids: list[int] = []
    for token_id in [*WORDS.encode(text), WORDS.eos_ids[0]]:
        mask = allow(ids)
        if mask is None or not mask[token_id]:
            return False
        ids.append(token_id)
    return True


PRINTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compact": {"separators": (",", ":")},
    "two spaces": {"indent": 2},
    "four spaces": {"indent": 4},
    "tabs": {"indent": "\t"},
    "no indent": {"indent": 0},
}


@pytest.mark.parametrize("printer", PRINTERS)
def test_what_printers_write(printer: str) -> None:
    def printed(value: Any) -> str:
        return json.dumps(value, **PRINTERS[printer])

    assert is_allowed(allow_json(FLAT), printed(VALUE))
    assert is_allowed(allow_json(NESTED), printed({"a": [VALUE, VALUE]}))
    assert is_allowed(allow_json({"type": "object"}), printed({"a": {"b": [[1, {"c": {}}], None]}}))
    call = f"<tool_call>\n{printed({'name': 'weather', 'arguments': VALUE})}\n</tool_call>"
    assert is_allowed(allow_call(), call)


@pytest.mark.parametrize(
    "text",
    ['{"city":  "Rome", "days": 3}', '{\n\n"city": "Rome", "days": 3}', '{\r"city": "Rome", "days": 3}']
    + ['{"city" : "Rome", "days": 3}', '{"city": "Rome" , "days": 3}', '{\n \t"city": "Rome", "days": 3}', ' {"city"'],
)  # fmt: skip
def test_what_no_printer_writes(text: str) -> None:
    assert not is_allowed(allow_json(FLAT), text)


def most_blanks(allow: Allow, letters: str) -> str:
    """What a model writes that prefers white space to everything else."""
    blank = [WORDS.encode(letter)[0] for letter in letters]
    ids: list[int] = []
    while not ids or ids[-1] not in WORDS.eos_ids:
        mask = allow(ids)
        assert mask is not None
        ids.append(next((i for i in blank if mask[i]), int(mask.nonzero()[0])))
        assert len(ids) < 500
    return WORDS.decode(ids[:-1], skip_special=False)


@pytest.mark.parametrize("letters", [" \n\t\r", "\n \t\r", "\n\t \r", "\r\t\n "])
def test_a_model_that_loves_white_space(letters: str) -> None:
    """Where any of it may stand, 20 between any two of the call's 17 parts were 340."""
    call = most_blanks(allow_call(), letters)
    body = json.loads(call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert body["name"] == "weather"
    num_blanks = sum(letter.isspace() for letter in call)
    assert num_blanks <= 160
    assert max(len(run) for run in re.findall(r"\s+", call)) <= 10  # a line break and two levels, behind a separator


def assert_printable(text: str, depth: int) -> None:
    """No white space but a blank behind a separator, and a line break with its indentation."""
    for run in re.findall(r"\s+", text):
        assert re.fullmatch(rf" ?(\n( {{0,{4 * depth}}}|\t{{0,{depth}}}))?", run), (run, text)


def test_the_server_has_it() -> None:
    """All three ways to ask for JSON; the model says what it is told, which is what no printer writes."""
    wasteful = '{"city":   "Rome",\n\n\n"days":\r\n3}'
    call = f'<tool_call>\n{{"name":    "weather", "arguments":  {wasteful}}}\n</tool_call>'
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": FLAT}}
    with serving(told({"json": wasteful, "call": call})) as served:
        for response_format, depth in ((form, 1), ({"type": "json_object"}, 8)):
            answer = served.chat("json", response_format=response_format, max_tokens=60)
            assert_printable(answer["choices"][0]["message"]["content"], depth)
        answer = served.chat(
            "call", tools=[TOOL], tool_choice="required", max_tokens=200, parallel_tool_calls=False, logprobs=True
        )
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}
        said = "".join(one["token"] for one in answer["choices"][0]["logprobs"]["content"])
        assert_printable(said, depth=2)


@pytest.mark.parametrize(
    ("schema", "depth"),
    [
        (FLAT, 1),
        (NESTED, 3),
        ({"type": "string"}, 0),
        ({"type": ["string", "null"]}, 0),
        ({"type": "object"}, 8),
        ({}, 8),
        (True, 8),
        ({"anyOf": [FLAT, {"type": "array", "items": FLAT}]}, 2),
        ({"properties": {"a": {"$ref": "#"}}}, 8),
        ({"properties": {"a": {"type": "array"}}}, 8),
        ({"properties": 3, "anyOf": {"x": 1}, "items": "?", "type": 7}, 0),
    ],
)
def test_depth(schema: Any, depth: int) -> None:
    assert _depth(schema, 8) == depth
    assert json_layout(schema)["whitespace_pattern"] == rf"\n(\x20{{0,{4 * max(1, depth)}}}|\t{{0,{max(1, depth)}}})"
