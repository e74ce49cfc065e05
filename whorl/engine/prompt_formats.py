"""Who writes a model's prompts: its own Jinja template or, where it ships none, a program that knows its format.

A format is one file with a `render` like `ChatTemplate`'s, and one line in `_FORMATS`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .chat_template import ChatTemplate, Message
from .deepseek_v32_prompt import DeepSeekV32Prompt

# By the model_type of config.json.
_FORMATS = {"deepseek_v32": DeepSeekV32Prompt}


class PromptWriter(Protocol):
    """sources: templates by name, empty where there are none. variables: the special tokens by what they are for."""

    sources: dict[str, str]
    variables: dict[str, Any]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str: ...


def format_of(config: Mapping[str, Any], templates: Mapping[str, str]) -> str | None:
    """The format of a model without a template, by its config.json; None: it has one, or none is known."""
    kind = config.get("model_type")
    return kind if not templates and kind in _FORMATS else None


def prompt_writer(templates: Mapping[str, str], roles: Mapping[str, str], format: str | None) -> PromptWriter:
    return ChatTemplate(templates, roles) if format is None else _FORMATS[format](roles)
