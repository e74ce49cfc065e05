"""Replies in harmony: reasoning, content and calls by their channels, the same however the reply is cut."""

import itertools
import json
from typing import Any

import pytest

from whorl.engine.harmony import HarmonyParser, is_harmony, last_ids
from whorl.engine.reply_parser import Parts

START = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Think \u2603 <|.<|end|>"
FINAL = "<|channel|>final<|message|>Hello <b>.<|return|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 3}<|call|>'
BEFORE = '{START} to=functions.g<|channel|>commentary json<|message|>{"s": "<"}<|call|>'.replace("{START}", START)
REPLIES: dict[str, tuple[str, tuple[str, str, list[tuple[str, Any]]]]] = {
    "final": (THOUGHT + START + FINAL, ("Think \u2603 <|.", "Hello <b>.", [])),
    "final alone": (FINAL, ("", "Hello <b>.", [])),
    "a call": (THOUGHT + START + CALL, ("Think \u2603 <|.", "", [("f", {"n": 3})])),
    "a recipient before the channel": (THOUGHT + BEFORE, ("Think \u2603 <|.", "", [("g", {"s": "<"})])),
    "a preamble and two calls": (
        "<|channel|>commentary<|message|>I will look.<|end|>" + START + CALL + BEFORE,
        ("", "I will look.", [("f", {"n": 3}), ("g", {"s": "<"})]),
    ),
    "plain text": ('{"forced": "by a grammar"}', ("", '{"forced": "by a grammar"}', [])),
    "cut short": (THOUGHT[:-8], ("Think \u2603 <|", "", [])),
    "cut in a header": (THOUGHT + START + "<|chan", ("Think \u2603 <|.", "", [])),
    "nothing": ("", ("", "", [])),
}


def parse(pieces: Any, **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    parser = HarmonyParser(**{"may_think": True, "has_tools": True} | options)
    whole = Parts()
    for piece in pieces:
        whole.join(parser.add(piece))
    whole.join(parser.add("", is_last=True))
    return whole.reasoning, whole.content, [(call.name, call.arguments) for call in whole.whole_calls()]


@pytest.mark.parametrize("name", REPLIES)
def test_every_cut_gives_the_same_parts(name: str) -> None:
    text, (reasoning, content, calls) = REPLIES[name]
    every = [[text[:at], text[at:]] for at in range(len(text) + 1)] + [list(text)]
    for pieces in every:
        read_reasoning, read_content, read_calls = parse(pieces)
        assert (read_reasoning, read_content) == (reasoning, content)
        assert [(name, json.loads(arguments)) for name, arguments in read_calls] == calls


def test_what_is_off_is_content() -> None:
    text = REPLIES["a call"][0]
    assert parse([text], may_think=False)[:2] == ("", "Think \u2603 <|.")
    assert parse([text], has_tools=False) == ("Think \u2603 <|.", '{"n": 3}', [])
    both = REPLIES["a preamble and two calls"][0]
    assert [name for name, _ in parse([both], is_parallel=False)[2]] == ["f"]


class _Tokens:
    def __init__(self, *tokens: str) -> None:
        self._ids = dict(zip(tokens, itertools.count(7), strict=False))

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)


def test_a_model_of_harmony_is_known_by_its_tokens() -> None:
    tokens = _Tokens("<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    assert is_harmony(tokens)
    assert last_ids(tokens) == (10, 11)
    assert not is_harmony(_Tokens("<|channel|>", "<|end|>"))
