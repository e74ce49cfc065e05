"""Chooses the parsers of a model's replies: by name, or from the model's tokens and chat template."""

from typing import TYPE_CHECKING

from whorl.engine.call_forms import CallReader, form_named, form_of
from whorl.engine.harmony import is_harmony
from whorl.engine.reply_parser import END_THINK, REASONING

if TYPE_CHECKING:
    from whorl.engine.tokenizer import Tokenizer

AUTO, OFF = "auto", "off"


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raise ValueError when one of the names is unknown."""
    if tool_parser != AUTO:
        form_named(tool_parser)
    if reasoning_parser not in (AUTO, OFF, *REASONING):
        known = ", ".join([AUTO, OFF, *REASONING])
        raise ValueError(f"the reasoning parser {reasoning_parser!r} is not known. Has: {known}")


def choose_form(name: str, tokenizer: "Tokenizer") -> type[CallReader]:
    """Return the reader of the model's form of tool calls."""
    if name != AUTO:
        return form_named(name)
    return form_of(tokenizer.prompt_format, tokenizer.template.sources.values())


def separates_thinking(name: str, tokenizer: "Tokenizer") -> bool:
    """Return whether replies separate reasoning from content; raise ValueError when the model has no think tags."""
    has_tag = tokenizer.token_id(END_THINK) is not None or is_harmony(tokenizer)
    if name not in (AUTO, OFF) and not has_tag:
        raise ValueError(f"the reasoning parser {name!r} needs a token {END_THINK}, which this model has not: use auto")
    return has_tag and name != OFF
