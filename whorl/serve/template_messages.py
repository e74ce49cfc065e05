"""Converts messages of a request to the form that chat templates expect."""

import json
from collections.abc import Sequence
from typing import Any

from .api_error import ApiError
from .schema_parts import ChatMessage, Part, TextPart


def _content(parts: Sequence[Part]) -> str | list[dict[str, str]]:
    """Join the parts if all are text; templates of vision models take the parts one by one."""
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.type.removesuffix("_url")}
        for part in parts
    ]


def template_message(message: ChatMessage) -> dict[str, Any]:
    """Convert a message: content becomes text or parts, the arguments of calls become objects.

    Raises ApiError 400 when the arguments are not JSON.
    """
    converted = message.model_dump(exclude_none=True, exclude={"content", "refusal"})
    content = message.content
    converted["content"] = _content(content) if isinstance(content, list) else content or ""
    for call in converted.get("tool_calls", ()):
        function = call["function"]
        if isinstance(function["arguments"], str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except json.JSONDecodeError:
                raise ApiError(400, f"messages: the arguments of {function['name']!r} are not JSON") from None
    return converted
