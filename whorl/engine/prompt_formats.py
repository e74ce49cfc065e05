"""What writes a model's chat prompts: its Jinja template or, if it ships none, built-in code for its format.

To add a format, add a file with a `render` like `ChatTemplate`'s and a line in `_FORMATS`.
"""

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
