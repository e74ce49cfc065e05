"""Which parsers take a model's replies apart: by name, or by what the model was taught."""

from typing import TYPE_CHECKING

from whorl.engine.call_forms import CallReader, form_named, form_of
from whorl.engine.reply_parser import END_THINK, REASONING

if TYPE_CHECKING:
    from whorl.engine.tokenizer import Tokenizer

AUTO, OFF = "auto", "off"


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """ValueError: one of them is not known."""
    if tool_parser != AUTO:
        form_named(tool_parser)
    if reasoning_parser not in (AUTO, OFF, *REASONING):
        has = ", ".join([AUTO, OFF, *REASONING])
        raise ValueError(f"the reasoning parser {reasoning_parser!r} is not known. Has: {has}")


def choose_form(name: str, tokenizer: "Tokenizer") -> type[CallReader]:
    """Of tool calls."""
    if name != AUTO:
        return form_named(name)
    return form_of(tokenizer.prompt_format, tokenizer.template.sources.values())


def tells_thinking(name: str, tokenizer: "Tokenizer") -> bool:
    """Whether thinking is told apart from what is said."""
    has_tag = tokenizer.token_id(END_THINK) is not None
    if name not in (AUTO, OFF) and not has_tag:
        raise ValueError(f"the reasoning parser {name!r} needs a token {END_THINK}, which this model has not: say auto")
    return has_tag and name != OFF
