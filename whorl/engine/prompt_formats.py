"""What writes a model's chat prompts: its Jinja template or, if it ships none, built-in code for its format.

To add a format, add a file with a `render` like `ChatTemplate`'s and a line in `_FORMATS`.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .chat_template import ChatTemplate, Message
from .deepseek_v32_prompt import DeepSeekV32Prompt

# By the model_type of config.json.
_FORMATS = {"deepseek_v32": DeepSeekV32Prompt}


class PromptWriter(Protocol):
    """Writes prompts. sources: templates by name, empty if there are none. variables: the special tokens by role."""

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
    """Return the built-in format of a model without a template, by its config.json; None if it has a template or no
    format is known."""
    kind = config.get("model_type")
    return kind if not templates and kind in _FORMATS else None


def prompt_writer(templates: Mapping[str, str], roles: Mapping[str, str], format: str | None) -> PromptWriter:
    """Return the built-in format of this name, or for None the model's templates."""
    return ChatTemplate(templates, roles) if format is None else _FORMATS[format](roles)


def write_open(
    writer: PromptWriter,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Return a prompt that ends where the text of the last message ends, for the model to continue it.

    Raises ValueError if the writer refuses the messages or leaves that end out.
    """
    mark = secrets.token_hex(16)  # in no text; behind white space, which a template might strip
    last, content = messages[-1], messages[-1]["content"]
    if isinstance(content, str):
        content += mark
    else:
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    messages = [*messages[:-1], {**last, "content": content}]
    text = writer.render(messages, tools, add_generation_prompt=False, **variables)
    if mark not in text:
        raise ValueError("the template leaves out the end of the last message, which therefore cannot be continued")
    return text[: text.rindex(mark)]
