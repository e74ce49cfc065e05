"""Tools and thinking over HTTP, in each form that models write them, with the openai client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import MODEL, Served, Told, byte_tokenizer, serving, told
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from whorl.engine.call_forms import FORMS
from whorl.engine.llm import LLM
from whorl.engine.tokenizer import Tokenizer
from whorl.serve.openai import build_server
from whorl.serve.settings import ServerSettings

D = "\uff5cDSML\uff5c"
ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo"}'
CITY: Any = {"$ref": "#/$defs/city"}
PLACE: Any = {"type": "string", "enum": ["Rome", "Oslo"]}


def tool(name: str, city: Any = None, **more: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"city": city or PLACE},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema | more}}


TOOLS: Any = [tool("weather"), tool("map")]
ENGINE: Any = {"device": "cpu", "max_num_seqs": 4, "block_size": 8, "num_blocks": 2048}


def dsml(*cities: str) -> str:
    parameter = f'<{D}parameter name="city" string="true">%s</{D}parameter>'
    invokes = [f'<{D}invoke name="weather">\n{parameter % city}\n</{D}invoke>\n' for city in cities]
    return f"\n\n<{D}function_calls>\n{''.join(invokes)}</{D}function_calls>"


def coder(*cities: str) -> str:
    inner = "<function=weather>\n<parameter=city>\n%s\n</parameter>\n</function>"
    return "\n".join(f"<tool_call>\n{inner % city}\n</tool_call>" for city in cities)


def hermes(*cities: str) -> str:
    inner = '{"name": "weather", "arguments": {"city": "%s"}}'
    return "\n".join(f"<tool_call>\n{inner % city}\n</tool_call>" for city in cities)


def llama(*cities: str) -> str:
    inner = '{"name": "weather", "parameters": {"city": "%s"}}'
    return "; ".join(inner % city for city in cities)


def glm(*cities: str) -> str:
    inner = "weather\n<arg_key>city</arg_key>\n<arg_value>%s</arg_value>"
    return "\n".join(f"<tool_call>{inner % city}\n</tool_call>" for city in cities)


WRITERS = {"deepseek_v32": dsml, "qwen3_coder": coder, "glm4": glm, "hermes": hermes, "llama3": llama}


def speaker() -> Tokenizer:
    """With DeepSeek's marker a token of its own."""
    state = byte_tokenizer().state()
    backend = Backend.from_str(state.pop("backend"))
    backend.add_tokens([AddedToken(D, normalized=False)])
    return Tokenizer(backend, **state)


def test_every_form_is_served_here() -> None:
    assert WRITERS.keys() == FORMS.keys()


# Hermes's is served in test_serve.py, too.
SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in ("glm4", "hermes", "qwen3_coder")]


@pytest.fixture(scope="module", params=["deepseek_v32", "llama3", *SLOW])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    write = WRITERS[request.param]
    answers = {
        "hi": "Hello there!",
        "call": write("Rome"),
        "calls": write("Rome", "Oslo"),
        "think": f"<think>\nhm\n</think>\n\n{write('Rome')}",
        "broken": write("Rome").replace("weather", '"<x"', 1)[:-3],
    }
    tokenizer = speaker()
    model: Any = Told(tokenizer, answers)
    with serving(LLM(model=model, tokenizer=tokenizer, **ENGINE), tool_parser=request.param) as running:
        yield running


def ask(served: Served, text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 400, "tools": TOOLS, **options}


def client(served: Served) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60).chat.completions


def arguments(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def test_whole_and_streamed(served: Served) -> None:
    choice = client(served).create(**ask(served, "calls")).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert arguments(choice.message) == [("weather", ROME), ("weather", OSLO)]
    chunks = [c.choices[0] for c in client(served).create(**ask(served, "calls"), stream=True)]
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert [(part.index, part.function.name) for part in parts if part.id] == [(0, "weather"), (1, "weather")]
    assert len({part.id for part in parts if part.id}) == 2
    for index, expected in enumerate((ROME, OSLO)):
        texts = [part.function.arguments for part in parts if part.index == index]
        assert "".join(texts) == expected
        assert len([text for text in texts if text]) > 3, "they come as they are written"


def test_thinking_and_a_call(served: Served) -> None:
    choice = client(served).create(**ask(served, "think")).choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", None)
    assert arguments(choice.message) == [("weather", ROME)]
    with client(served).stream(**ask(served, "think")) as stream:
        assert arguments(stream.get_final_completion().choices[0].message) == [("weather", ROME)]


def test_who_may_call_and_how_often(served: Served) -> None:
    one = client(served).create(**ask(served, "calls", parallel_tool_calls=False)).choices[0].message
    assert arguments(one) == [("weather", ROME)]
    none = client(served).create(**ask(served, "call", tool_choice="none")).choices[0]
    written = served.llm.model.tokenizer.decode(served.llm.model.answers["call"][:-1])  # type: ignore[attr-defined]
    assert (none.message.content, none.message.tool_calls, none.finish_reason) == (written, None, "stop")


def test_a_call_that_must_come(served: Served) -> None:
    """From a model that would say something else, and from one that calls of itself."""
    named = {"type": "function", "function": {"name": "map"}}
    for question in ("hi", "call"):
        options = ask(served, question, tool_choice="required", parallel_tool_calls=False)
        choice = client(served).create(**options).choices[0]
        assert choice.finish_reason == "tool_calls"
        ((name, text),) = arguments(choice.message)
        assert name in ("weather", "map")
        assert json.loads(text)["city"] in ("Rome", "Oslo")
        assert question == "hi" or (name, text) == ("weather", ROME)
        choice = client(served).create(**ask(served, question, tool_choice=named)).choices[0]
        assert [(name, json.loads(text).keys()) for name, text in arguments(choice.message)] == [("map", {"city"})]


def test_a_forced_call_of_a_schema_with_definitions(served: Served) -> None:
    tools = [tool("weather", CITY, **{"$defs": {"city": PLACE}})]
    choice = client(served).create(**ask(served, "hi", tools=tools, tool_choice="required", parallel_tool_calls=False))
    ((_, text),) = arguments(choice.choices[0].message)
    assert json.loads(text)["city"] in ("Rome", "Oslo")


def test_what_cannot_be_read_is_answered(served: Served) -> None:
    choice = client(served).create(**ask(served, "broken")).choices[0]
    streamed = [c.choices[0].delta for c in client(served).create(**ask(served, "broken"), stream=True)]
    assert "".join(delta.content or "" for delta in streamed) == (choice.message.content or "")
    assert choice.message.content or choice.message.tool_calls


# ---- DeepSeek-V3.2, from its prompt to its reply


class ToldDeepSeek(Told):
    """Says what `answers` has for the last question; for the results of tools, the answer to `results`."""

    max_length = 8192

    def next_id(self, ids: list[int]) -> int:
        openings = {self.tokenizer.token_id(tag): tag for tag in ("<think>", "</think>")}
        for at in reversed([at for at, token in enumerate(ids) if token in openings]):
            before = self.tokenizer.decode(ids[max(0, at - 200) : at], skip_special=False)
            is_question = before.endswith("<\uff5cAssistant\uff5c>")
            if is_question or before.endswith("</function_results>\n\n"):
                text = before.rpartition("<\uff5cUser")[2].partition(">")[2]
                question = text.partition("<")[0] if is_question else "results"
                answer = self.answers.get(f"{openings[ids[at]]}{question}", [])[len(ids) - at - 1 :]
                return next(iter(answer), self.tokenizer.eos_ids[0])
        return self.tokenizer.eos_ids[0]


@pytest.fixture(scope="module")
def deepseek() -> Iterator[Served]:
    plain = byte_tokenizer().state() | {"templates": {}, "prompt_format": "deepseek_v32"}
    tokenizer = Tokenizer.from_state(plain)
    answers = {
        "</think>hi": "Hello!",
        "<think>hi": "They greet me.</think>Hello!",
        "<think>weather": f"Two cities.</think>Let me look.{dsml('Rome', 'Oslo')}",
        "<think>results": "Sunny it is.</think>Sunny in both.",
    }
    model: Any = ToldDeepSeek(tokenizer, answers)
    with serving(LLM(model=model, tokenizer=tokenizer, **ENGINE)) as running:
        yield running


def thinking(served: Served, text: str, **options: Any) -> dict[str, Any]:
    return ask(served, text, extra_body={"chat_template_kwargs": {"thinking": True}}, **options)


def test_deepseek_thinks_when_asked(deepseek: Served) -> None:
    plain = client(deepseek).create(**ask(deepseek, "hi", tools=None)).choices[0].message
    assert plain.content == "Hello!"
    assert not hasattr(plain, "reasoning_content")
    for request in (thinking(deepseek, "hi", tools=None), ask(deepseek, "hi", tools=None, reasoning_effort="high")):
        message = client(deepseek).create(**request).choices[0].message
        assert (message.reasoning_content, message.content) == ("They greet me.", "Hello!")
        deltas = [c.choices[0].delta for c in client(deepseek).create(**request, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "They greet me."
        assert "".join(delta.content or "" for delta in deltas) == "Hello!"


def test_deepseek_calls_in_parallel_and_goes_on_from_its_thoughts(deepseek: Served) -> None:
    first = client(deepseek).create(**thinking(deepseek, "weather")).choices[0]
    assert (first.message.content, first.finish_reason) == ("Let me look.", "tool_calls")
    assert arguments(first.message) == [("weather", ROME), ("weather", OSLO)]
    # What the client got goes back as it is, with the results in another order.
    ids = [call.id for call in first.message.tool_calls]
    results = [{"role": "tool", "tool_call_id": name, "content": f"{n}"} for n, name in enumerate(ids)]
    history = [{"role": "user", "content": "weather"}, first.message, *results[::-1]]
    second = client(deepseek).create(**thinking(deepseek, "") | {"messages": history}).choices[0].message
    assert (second.reasoning_content, second.content) == ("Sunny it is.", "Sunny in both.")
    messages = [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in history]
    tokenized = deepseek.post("/tokenize", messages=messages, chat_template_kwargs={"thinking": True})
    text = deepseek.post("/detokenize", tokens=tokenized["tokens"])["prompt"]
    assert f"<think>Two cities.</think>Let me look.{dsml('Rome', 'Oslo')}<\uff5cend" in text
    assert text.endswith("<result>0</result>\n<result>1</result>\n</function_results>\n\n<think>")


def test_what_the_format_refuses_is_the_clients_error(deepseek: Served) -> None:
    history: Any = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="1 results of tools after 0 calls"):
        client(deepseek).create(model=MODEL, messages=history)


# ---- settings


def test_a_template_of_ones_own_and_thinking_as_content() -> None:
    template = "<|im_start|>user\nthink<|im_end|>\n<|im_start|>assistant\n\n"  # Jinja takes one line break off
    options = {"chat_template": template, "reasoning_parser": "off"}
    with serving(told({"think": "<think>\nhm\n</think>\n\nYes."}), **options) as served:
        message = served.chat("anything")["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes.", "refusal": None}
        assert served.http.get("/tokenizer_info").json()["chat_template"] == template


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tool_parser": "mine"}, r"tool parser 'mine' is not known\. Has: auto, deepseek_v32, "),
        ({"reasoning_parser": "mine"}, r"reasoning parser 'mine' is not known\. Has: auto, off, think, "),
    ],
)
def test_parsers_that_there_are_not(options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerSettings(**options)


def test_a_template_file_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--chat-template .*nowhere: cannot be read"):
        build_server("told", chat_template=tmp_path / "nowhere")
    (tmp_path / "bad.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="cannot be parsed"):
        build_server("told", chat_template=tmp_path / "bad.jinja")


def test_a_named_parser_of_thinking_needs_its_token() -> None:
    from whorl.serve.parsers import separates_thinking

    tokenizer = byte_tokenizer()
    assert separates_thinking("qwen3", tokenizer)
    assert not separates_thinking("off", tokenizer)
    state = tokenizer.state()
    bare = Tokenizer.from_state(state | {"backend": state["backend"].replace("</think>", "</thonk>")})
    assert not separates_thinking("auto", bare)
    with pytest.raises(ValueError, match="needs a token </think>"):
        separates_thinking("think", bare)
