"""Prompts of DeepSeek-V3.2 against what its makers published: parts of the vectors beside their encoding_dsv32.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from serving import byte_tokenizer

from whorl.engine.deepseek_v32_prompt import DeepSeekV32Prompt
from whorl.engine.tokenizer import Tokenizer

BEGIN, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT, D = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "\uff5cDSML\uff5c"
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather for a specific date and location",
    "parameters": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "The city name, e.g. New York, San Francisco"},
            "date": {"type": "string", "description": "The date in YYYY-MM-DD format"},
        },
        "required": ["location", "date"],
    },
}
WEATHER_LINE = (
    '{"name": "get_weather", "description": "Get the weather for a specific date and location", "parameters": '
    '{"type": "object", "properties": {"location": {"type": "string", "description": "The city name, e.g. New York, '
    'San Francisco"}, "date": {"type": "string", "description": "The date in YYYY-MM-DD format"}}, "required": '
    '["location", "date"]}}'
)
TOOLS = [{"type": "function", "function": WEATHER}]


def tools_section(*lines: str) -> str:
    return "\n".join(
        [
            "## Tools",
            "",
            "You have access to a set of tools you can use to answer the user's question.",
            f'You can invoke functions by writing a "<{D}function_calls>" block like the following as part of your '
            "reply to the user:",
            f"<{D}function_calls>",
            f'<{D}invoke name="$FUNCTION_NAME">',
            f'<{D}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{D}parameter>',
            "...",
            f"</{D}invoke>",
            f'<{D}invoke name="$FUNCTION_NAME2">',
            "...",
            f"</{D}invoke>",
            f"</{D}function_calls>",
            "",
            "String and scalar parameters should be specified as is without any escaping or quotes, while lists and "
            'objects should use JSON format. The "string" attribute should be set to "true" for string type parameters '
            'and "false" for other types (numbers, booleans, arrays, objects).',
            "",
            "If the thinking_mode is enabled, then after function results you should strongly consider outputting a "
            "thinking block. Here is an example:",
            "",
            f"<{D}function_calls>",
            "...",
            f"</{D}function_calls>",
            "",
            "<function_results>",
            "...",
            "</function_results>",
            "",
            "<think>...thinking about results</think>",
            "",
            "Here are the functions available in JSONSchema format:",
            "<functions>",
            *lines,
            "</functions>",
            "",
        ]
    )


def invoke(location: str, date: str) -> str:
    return (
        f'<{D}invoke name="get_weather">\n<{D}parameter name="location" string="true">{location}</{D}parameter>\n'
        f'<{D}parameter name="date" string="true">{date}</{D}parameter>\n</{D}invoke>\n'
    )


def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def render(messages: Any, tools: Any = None, **options: Any) -> str:
    return DeepSeekV32Prompt({}).render(messages, tools, **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


TALK = [
    user("hello"),
    {"role": "assistant", "content": "Hello! I am DeepSeek.", "reasoning_content": "thinking..."},
    user("1+1=?"),
]


def test_the_example_of_the_models_own_page() -> None:
    said = f"{BEGIN}{USER}hello{ASSISTANT}</think>Hello! I am DeepSeek.{END}{USER}1+1=?{ASSISTANT}"
    assert render(TALK, enable_thinking=True) == f"{said}<think>"
    assert render(TALK, thinking=True) == f"{said}<think>"
    assert render(TALK) == render(TALK, enable_thinking=False) == f"{said}</think>"
    assert render(TALK, add_generation_prompt=False) == said.removesuffix(ASSISTANT)


# Of test_input.json: two turns with tools in a loop, the second with its reasoning.
LOOP = [
    {"role": "system", "content": "You are a helpful Assistant."},
    user("What's the weather tomorrow in San Francisco and New York?"),
    {
        "role": "assistant",
        "reasoning_content": "Now I know today is 2024-01-15, so tomorrow is 2024-01-16.",
        "tool_calls": [
            call("get_weather", 1, location="San Francisco", date="2024-01-16"),
            call("get_weather", 2, location="New York", date="2024-01-16"),
        ],
    },
    result(1, '{"location": "San Francisco", "weather": "partly cloudy", "humidity": "70%"}'),
    result(2, '{"location": "New York", "weather": "sunny", "humidity": "35%"}'),
    {
        "role": "assistant",
        "reasoning_content": "Retrieved weather data for both cities.",
        "content": "Based on the forecast, here's tomorrow's weather:\n\n- High: 65\u00b0F",
    },
    user("Thanks! What about the day after tomorrow?"),
    {
        "role": "assistant",
        "reasoning_content": "I can query directly since I already know today's date.",
        "tool_calls": [call("get_weather", 3, location="San Francisco", date="2024-01-17")],
    },
    result(3, '{"weather": "light rain"}'),
    {"role": "assistant", "reasoning_content": "Let me format this for the user.", "content": "Here's the forecast."},
]
LOOP_HEAD = f"{BEGIN}You are a helpful Assistant.\n\n{tools_section(WEATHER_LINE)}"
LOOP_FIRST = (
    f"{USER}What's the weather tomorrow in San Francisco and New York?{ASSISTANT}</think>\n\n<{D}function_calls>\n"
    f"{invoke('San Francisco', '2024-01-16')}{invoke('New York', '2024-01-16')}</{D}function_calls>{END}"
    '\n\n<function_results>\n<result>{"location": "San Francisco", "weather": "partly cloudy", "humidity": "70%"}'
    '</result>\n<result>{"location": "New York", "weather": "sunny", "humidity": "35%"}</result>\n</function_results>'
    f"\n\n</think>Based on the forecast, here's tomorrow's weather:\n\n- High: 65\u00b0F{END}"
)
LOOP_SECOND = (
    f"{USER}Thanks! What about the day after tomorrow?{ASSISTANT}<think>I can query directly since I already know "
    f"today's date.</think>\n\n<{D}function_calls>\n{invoke('San Francisco', '2024-01-17')}</{D}function_calls>{END}"
    '\n\n<function_results>\n<result>{"weather": "light rain"}</result>\n</function_results>\n\n<think>'
)


def test_tools_in_a_loop_keep_what_was_thought_since_the_last_question() -> None:
    whole = f"{LOOP_HEAD}{LOOP_FIRST}{LOOP_SECOND}Let me format this for the user.</think>Here's the forecast.{END}"
    assert render(LOOP, TOOLS, enable_thinking=True) == whole
    assert render(LOOP[:-1], TOOLS, enable_thinking=True) == f"{LOOP_HEAD}{LOOP_FIRST}{LOOP_SECOND}"
    rendered = render(LOOP[:-1], TOOLS, enable_thinking=True, add_generation_prompt=False)
    assert rendered == f"{LOOP_HEAD}{LOOP_FIRST}{LOOP_SECOND}".removesuffix("\n\n<think>")


def test_without_thinking_no_thought_is_shown() -> None:
    rendered = render(LOOP, TOOLS)
    assert rendered.startswith(LOOP_HEAD + LOOP_FIRST)
    assert "<think>" not in rendered.removeprefix(LOOP_HEAD)
    assert "I can query directly" not in rendered
    assert rendered.endswith(f"</function_results>\n\n</think>Here's the forecast.{END}")


def test_the_developer_asks_with_tools_of_his_own() -> None:
    """As the search agents of the published vectors do; an earlier question keeps its place."""
    lookup = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
    messages = [
        user("question"),
        {"role": "developer", "content": "policy", "tools": [lookup]},
        {"role": "assistant", "reasoning_content": "thought", "content": "answer"},
    ]
    section = tools_section('{"name": "lookup", "parameters": {"type": "object"}}')
    question = f"{USER}\n\n{section}\n\n# The user's message is: policy{ASSISTANT}<think>thought</think>answer{END}"
    assert render(messages, thinking=True) == f"{BEGIN}{USER}question{ASSISTANT}</think>{question}"
    # The tools of a request go to the developer, too, where no system message is before.
    alone = [{key: value for key, value in message.items() if key != "tools"} for message in messages[1:]]
    assert render(alone, [lookup], thinking=True) == f"{BEGIN}{question}"


def test_tools_without_a_system_message_come_first() -> None:
    assert render([user("hi")], TOOLS) == f"{BEGIN}\n\n{tools_section(WEATHER_LINE)}{USER}hi{ASSISTANT}</think>"


def test_a_response_format_is_behind_the_tools() -> None:
    schema = {"type": "object", "title": "caf\u00e9"}
    told = (
        "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        '{"type": "object", "title": "caf\u00e9"}'
    )
    system = {"role": "system", "content": "Be brief.", "response_format": schema}
    assert render([system, user("hi")]) == f"{BEGIN}Be brief.\n\n{told}{USER}hi{ASSISTANT}</think>"
    rendered = render([user("hi")], TOOLS, response_format=schema)
    assert rendered == f"{BEGIN}\n\n{tools_section(WEATHER_LINE)}\n\n{told}{USER}hi{ASSISTANT}</think>"


def test_values_that_are_no_text_are_json() -> None:
    """test_input_search_wo_date.json has such calls."""
    arguments = {"query": '"16,201,670" vaccine doses', "topn": 10, "source": "web", "all": None, "ids": [1, "\u00e9"]}
    calls = [call("search", 1, **arguments)]
    rendered = render([user("q"), {"role": "assistant", "content": "See:", "tool_calls": calls}])
    shown = (
        f'<{D}parameter name="query" string="true">"16,201,670" vaccine doses</{D}parameter>\n'
        f'<{D}parameter name="topn" string="false">10</{D}parameter>\n'
        f'<{D}parameter name="source" string="true">web</{D}parameter>\n'
        f'<{D}parameter name="all" string="false">null</{D}parameter>\n'
        f'<{D}parameter name="ids" string="false">[1, "\u00e9"]</{D}parameter>\n'
    )
    block = f'\n\n<{D}function_calls>\n<{D}invoke name="search">\n{shown}</{D}invoke>\n</{D}function_calls>'
    assert rendered == f"{BEGIN}{USER}q{ASSISTANT}</think>See:{block}{END}"
    assert f'<{D}invoke name="now">\n\n</{D}invoke>' in render([{"role": "assistant", "tool_calls": [call("now", 1)]}])


def test_results_are_in_the_order_of_their_calls() -> None:
    calls = {"role": "assistant", "tool_calls": [call("f", 1), call("f", 2)]}
    ordered = render([user("q"), calls, result(1, "one"), result(2, "two")])
    assert "<function_results>\n<result>one</result>\n<result>two</result>\n</function_results>" in ordered
    assert render([user("q"), calls, result(2, "two"), result(1, "one")]) == ordered
    nameless = [{"role": "tool", "content": text} for text in ("one", "two")]
    assert render([user("q"), calls, *nameless]) == ordered


def test_a_turn_may_be_left_open() -> None:
    begun = {"role": "assistant", "content": "partial answer", "prefix": True}
    assert render([user("write"), begun]) == f"{BEGIN}{USER}write{ASSISTANT}</think>partial answer"
    thought = {"role": "assistant", "reasoning_content": "Well", "prefix": True}
    assert render([user("write"), thought], thinking=True) == f"{BEGIN}{USER}write{ASSISTANT}<think>Well"


def test_reasoning_that_came_back_inside_of_the_content() -> None:
    inside = [TALK[0], {"role": "assistant", "content": "thinking...</think>Hello! I am DeepSeek."}, TALK[2]]
    assert render(inside, thinking=True) == render(TALK, thinking=True)
    assert "thinking...</think>Hello" in render(inside[:2], thinking=True)


@pytest.mark.parametrize(
    ("messages", "options", "says"),
    [
        ([{"role": "critic", "content": "x"}], {}, "message 0 has the role 'critic', expected one of system, "),
        ([{"role": "developer", "content": ""}], {}, "message 0, of the developer, is empty"),
        ([user("q"), {"role": "assistant", "content": "a"}], {"thinking": True}, "neither reasoning_content nor"),
        ([user("q"), result(1, "x")], {}, "message 1: 1 results of tools after 0 calls"),
        (
            [{"role": "assistant", "tool_calls": [call("f", 1)]}, result(2, "x")],
            {},
            "have the tool_call_ids .'call_2'.",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            {},
            "of 'f' are not",
        ),
        ([user("q")], {"colour": "red"}, "has no variable 'colour'. Has: enable_thinking, "),
    ],
)
def test_what_cannot_be_said(messages: Any, options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        render(messages, **options)


def write_model(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_json())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_models_configuration_chooses_it_where_no_template_is(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write_model(tmp_path, model_type="deepseek_v32"))
    expected = render(TALK, enable_thinking=True)
    assert tokenizer.apply_chat_template(TALK, enable_thinking=True) == expected
    again = Tokenizer.from_state(json.loads(json.dumps(tokenizer.state())))
    assert again.apply_chat_template(TALK, enable_thinking=True) == expected
    assert again.with_template("{{ messages | length }}").apply_chat_template(TALK) == "3"
    assert again.apply_chat_template(TALK, enable_thinking=True) == expected
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_path(tmp_path).apply_chat_template(TALK) == "from the file"
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no 'default' template"):
        Tokenizer.from_path(write_model(tmp_path, model_type="deepseek_v3")).apply_chat_template(TALK)
