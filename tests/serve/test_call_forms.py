"""Tool calls and thinking in every form that models write them: the same however the reply is cut, and nothing lost."""

import codecs
import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.engine.call_forms import FORMS, OTHER_NAMES, CallReader, form_named, form_of
from whorl.engine.deepseek_v32_prompt import DeepSeekV32Prompt
from whorl.engine.reply_parser import Parts, ReplyParser

SCHEMAS: Any = {"f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "any": {"anyOf": []}}}}
D = "\uff5cDSML\uff5c"
Result = tuple[str, str, list[tuple[str, str]]]


def parse(pieces: Iterable[str], form: str | None, **options: Any) -> Result:
    """Reasoning, content and calls of a reply that comes in pieces."""
    chosen = None if form is None else FORMS[form]
    parser = ReplyParser(**({"may_think": True, "is_thinking": False, "schemas": SCHEMAS} | options), form=chosen)
    whole = Parts()
    for piece in pieces:
        whole.join(parser.add(piece))
    whole.join(parser.add("", is_last=True))
    calls = whole.whole_calls()
    assert parser.num_calls == len({call.id for call in calls}) == len(calls)
    return whole.reasoning, whole.content, [(call.name, call.arguments) for call in calls]


# ---- replies as models write them


def deepseek(calls: Any) -> str:
    history = [{"role": "user", "content": ""}, {"role": "assistant", "tool_calls": calls}]
    return DeepSeekV32Prompt({}).render(history).partition("</think>")[2].rpartition("<\uff5cend")[0]


def coder(calls: Any) -> str:
    texts = []
    for function in (call["function"] for call in calls):
        pairs = function["arguments"].items()
        lines = [f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>" for k, v in pairs]
        texts.append(
            "\n".join(["<tool_call>", f"<function={function['name']}>", *lines, "</function>", "</tool_call>"])
        )
    return "\n" + "\n".join(texts)


def hermes(calls: Any) -> str:
    texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    return "".join(f"\n<tool_call>\n{text}\n</tool_call>" for text in texts)


def llama(calls: Any) -> str:
    functions = [call["function"] for call in calls]
    texts = [json.dumps({"name": f["name"], "parameters": f["arguments"]}, ensure_ascii=False) for f in functions]
    return "<|python_tag|>" + "; ".join(texts)


def glm(calls: Any) -> str:
    """As the templates of GLM-4.5 and GLM-4.6 write them."""
    texts = []
    for function in (call["function"] for call in calls):
        lines = [f"<tool_call>{function['name']}"]
        for key, value in function["arguments"].items():
            written = value if isinstance(value, str) else json.dumps(value)
            lines.append(f"<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>")
        texts.append("\n".join([*lines, "</tool_call>"]))
    return "\n" + "\n".join(texts)


WRITERS = {"deepseek_v32": deepseek, "qwen3_coder": coder, "glm4": glm, "hermes": hermes, "llama3": llama}
TEXT = st.text(st.sampled_from('ab<>/"\\\n\u00e9\u2603{}|\uff5c'), max_size=8)
ARGUMENTS = st.fixed_dictionaries({}, optional={"n": st.integers(), "s": TEXT})
CALLS = st.lists(st.tuples(st.sampled_from(["f", "g.h-2"]), ARGUMENTS), min_size=1, max_size=3)


def test_every_form_is_written_here() -> None:
    assert WRITERS.keys() == FORMS.keys()


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(calls=CALLS, before=st.sampled_from(["", "Let me see."]), thought=st.sampled_from(["", "hm"]), data=st.data())
def test_calls_are_read_back_however_they_are_cut(
    form: str, calls: list[tuple[str, dict[str, Any]]], before: str, thought: str, data: st.DataObject
) -> None:
    # Qwen3-Coder's schema has types for f alone; a value of another tool is a text.
    given_calls = [
        ("f", arguments) if form in ("qwen3_coder", "glm4") else (name, arguments) for name, arguments in calls
    ]
    written = WRITERS[form]([{"function": {"name": name, "arguments": a}} for name, a in given_calls])
    text = f"<think>\n{thought}\n</think>\n\n{before}{written}" if thought else f"{before}{written}"
    cuts = [0, *sorted(data.draw(st.sets(st.integers(0, len(text))))), len(text)]
    reasoning, content, read_calls = parse([text[a:b] for a, b in itertools.pairwise(cuts)], form)
    assert (reasoning, content) == (thought, before)
    assert [(name, json.loads(arguments)) for name, arguments in read_calls] == given_calls


PIECES = {
    "deepseek_v32": [
        *(f"<{D}function_calls>", f"</{D}function_calls>", f'<{D}invoke name="f">', f"</{D}invoke>"),
        *(f'<{D}parameter name="s" string="true">', f'<{D}parameter name="n" string="false">', f"</{D}parameter>"),
        *(f"<{D}", f"</{D}param", f'<{D}parameter name="n">'),
    ],
    "qwen3_coder": [
        *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>", "<parameter=n>"),
        *("</parameter>", "<parameter=", "<func", "</param"),
    ],
    "glm4": [
        *("<tool_call>f\n", "<tool_call>f<", "</tool_call>", "<arg_key>s</arg_key>", "<arg_value>", "</arg_value>"),
        *("<arg_key>n</arg_key>\n<arg_value>", "<arg_key>", "</arg_", "<tool_call>", "f"),
    ],
    "hermes": [
        *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {"a":', "}"),
        *('{"arguments": {}, "name": "f"}', '"', "{", ', "id": 1}', "</tool"),
    ],
    "llama3": [
        *("<|python_tag|>", '{"name": "f", "parameters": {}}', '{"name": "f", "parameters": {"a":', "; ", "}", "{"),
        *('{"name": "x", "count": 1}', '{"type": "function", "name": "f", "parameters": {}}', '"', "<|py"),
    ],
}
COMMON = ["<think>", "</think>", " ", "\n", "a", "<", "1"]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_malformed_is_the_same_however_it_is_cut(form: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[form] + COMMON), max_size=9)))
    options = {name: data.draw(st.booleans()) for name in ("may_think", "is_thinking", "is_parallel")}
    reasoning, content, calls = parse([text], form, **options)
    assert parse(text, form, **options) == (reasoning, content, calls)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(0, len(text))))), len(text)]
    assert parse([text[a:b] for a, b in itertools.pairwise(cuts)], form, **options) == (reasoning, content, calls)
    assert options["is_parallel"] or len(calls) <= 1
    if not calls and not options["may_think"] and options["is_parallel"]:
        assert content == text, "without a call all of it is text"


TWO = [{"function": {"name": "f", "arguments": a}} for a in ({"s": '\u2603 </"\n', "n": 3}, {"s": "<b>"})]
REPLIES = {form: f"<think>\nh\u00e9 <|\n</think>\n\nLook \u2603:{write(TWO)}" for form, write in WRITERS.items()}


@pytest.mark.parametrize("form", FORMS)
def test_every_cut_of_the_bytes(form: str) -> None:
    """In two pieces at every byte, and byte by byte, as the engine turns bytes into text."""
    data = REPLIES[form].encode()
    whole = parse([data.decode()], form)
    assert whole[:2] == ("h\u00e9 <|", "Look \u2603:")
    assert [json.loads(arguments) for _, arguments in whole[2]] == [{"s": '\u2603 </"\n', "n": 3}, {"s": "<b>"}]
    every = [[data[:at], data[at:]] for at in range(len(data))] + [[data[i : i + 1] for i in range(len(data))]]
    for pieces in every:
        decoder = codecs.getincrementaldecoder("utf-8")()
        assert parse(map(decoder.decode, pieces), form) == whole


@pytest.mark.parametrize("form", FORMS)
def test_a_reply_that_is_cut_off_loses_nothing(form: str) -> None:
    """Its content is what was said before the first call; of a call without a name yet, all there is of it, too."""
    text, opens = REPLIES[form], (FORMS[form].tags[0], ";" if form == "llama3" else "\0")
    start = text.find("Look")
    for end in range(start, len(text)):
        _, content, calls = parse([text[:end]], form)
        unread = content.removeprefix("Look \u2603:") if calls else ""
        assert text[:end].endswith(unread)
        assert not unread or any(each.startswith(unread[: len(each)]) for each in opens)
        if not calls:
            assert content.rstrip() == text[start:end].rstrip()


# ---- forms one by one


def test_arguments_come_as_they_are_written() -> None:
    parser = ReplyParser(may_think=False, is_thinking=False, form=FORMS["hermes"])
    parts = [parser.add(piece) for piece in ('<tool_call>{"name": "f", "argu', 'ments": {"a": "x', 'y"', "}}</tool_c")]
    assert [part.name for part in parts[1].calls] == ["f"]
    assert [[part.arguments for part in each.calls] for each in parts] == [[], ['{"a": "x'], ['y"'], ["}"]]
    assert [part.content for part in parts] == [""] * 4
    dsml = f'<{D}function_calls><{D}invoke name="f"><{D}parameter name="s" string="true">one "two'
    parser = ReplyParser(may_think=False, is_thinking=False, form=FORMS["deepseek_v32"])
    (call,) = parser.add(dsml).calls
    assert (call.index, call.name, call.arguments) == (0, "f", '{"s": "one \\"two')


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
        (
            "hermes",
            '<tool_call>{"arguments": {"a": "</tool_call>"}, "name": "f"}',
            "",
            [("f", '{"a": "</tool_call>"}')],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": 1}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} so</tool_call>', " so</tool_call>", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>', "", [("f", '{"a": [1')]),
        ("hermes", "a <tool_call> is a tag", "a <tool_call> is a tag", []),
        ("hermes", '<tool_call>{"name": "\\x", "arguments": {}}', '<tool_call>{"name": "\\x", "arguments": {}}', []),
        ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        ("llama3", '{"name": "f", "parameters": {}} ', "", [("f", "{}")]),
        ("llama3", '{"name": "f", "parameters": {}}; {"x": 1}', '; {"x": 1}', [("f", "{}")]),
        ("llama3", 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
        ("llama3", '{"name": "f"}', '{"name": "f"}', []),
        ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (
            "deepseek_v32",
            f"<{D}function_calls>\n</{D}function_calls>",
            f"<{D}function_calls>\n</{D}function_calls>",
            [],
        ),
        ("deepseek_v32", f'<{D}function_calls><{D}invoke name="f">so', "so", [("f", "{")]),
        (
            "deepseek_v32",
            f'<{D}function_calls><{D}invoke name="f"><{D}parameter name="n" string="false">NaN</{D}parameter>',
            "",
            [("f", '{"n": "NaN"')],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=n>3</parameter><parameter=any>\nTrue\n</parameter><parameter=x>1"
            "</parameter></function></tool_call>",
            "",
            [("f", '{"n": 3, "any": true, "x": "1"}')],
        ),
    ],
)
def test_edges(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text], form, may_think=False) == ("", content, calls)


def test_without_a_form_nothing_is_a_call() -> None:
    for text in REPLIES.values():
        said = text.partition("</think>\n\n")[2]
        assert parse([text], None) == ("h\u00e9 <|", said, [])
        assert parse(text, None, may_think=False) == ("", text, [])


def test_a_long_call_that_never_begins_takes_little_time() -> None:
    """Held text is looked at once, not again with every token."""
    body = '{"arguments": {"x": "' + "x" * 100_000
    parser = ReplyParser(may_think=False, is_thinking=False, form=FORMS["hermes"])
    pieces = ["<tool_call>", *(body[at : at + 10] for at in range(0, len(body), 10))]
    assert all(parser.add(piece) == Parts() for piece in pieces)
    assert parser.add("", is_last=True).content == f"<tool_call>{body}"


# ---- which one


def test_names() -> None:
    assert {form_named(name) for name in (*FORMS, *OTHER_NAMES)} == set(FORMS.values())
    with pytest.raises(ValueError, match=r"parser 'mine' is not known\. Has: auto, deepseek_v32, "):
        form_named("mine")


@pytest.mark.parametrize(
    ("prompt_format", "template", "expected"),
    [
        ("deepseek_v32", "", "deepseek_v32"),
        (None, f"write <{D}function_calls>", "deepseek_v32"),
        (None, "<tool_call>\n<function=example_function_name>", "qwen3_coder"),
        (None, "return a json object within <tool_call></tool_call> XML tags", "hermes"),
        (None, '{"name": function name, "parameters": dictionary of argument name and its value}', "llama3"),
        (None, "{{ '<|python_tag|>' }}", "llama3"),
        (None, "{{ messages }}", "hermes"),
    ],
)
def test_a_models_template_tells_its_form(prompt_format: str | None, template: str, expected: str) -> None:
    assert form_of(prompt_format, [template]) is FORMS[expected]


def test_a_form_of_ones_own() -> None:
    """One class is enough for a newcomer: what opens its calls, and how one is read."""
    from whorl.engine.call_forms import ReadStatus

    class Shouted(CallReader):
        tags = ("CALL ",)
        marks = ("CALL ",)

        def read(self, text: str, *, is_last: bool) -> tuple[int, ReadStatus]:
            name, stop, _ = text.partition("!")
            if not stop:
                return 0, ReadStatus.MORE
            self.calls.begin(name)
            self.calls.add("{}")
            return len(name) + 1, ReadStatus.END

    for pieces in (["hey CALL clock! bye CALL x"], "hey CALL clock! bye CALL x"):
        parser, whole = ReplyParser(may_think=False, is_thinking=False, form=Shouted), Parts()
        for piece in pieces:
            whole.join(parser.add(piece))
        whole.join(parser.add("", is_last=True))
        assert (whole.content, [call.name for call in whole.whole_calls()]) == ("heybye CALL x", ["clock"])
