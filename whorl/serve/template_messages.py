"""Messages as chat templates want them."""

import json
from collections.abc import Sequence
from typing import Any

from .gate import ApiError
from .schema_parts import ChatMessage, Part, TextPart


def _content(parts: Sequence[Part]) -> str | list[dict[str, str]]:
    """Text in one piece; templates that know pictures take the parts one by one."""
    if all(isinstance(part, TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.type.removesuffix("_url")}
        for part in parts
    ]


def template_message(message: ChatMessage) -> dict[str, Any]:
    """As templates want it: content is text or parts, arguments are objects."""
    found = message.model_dump(exclude_none=True, exclude={"content", "refusal"})
    content = message.content
    found["content"] = _content(content) if isinstance(content, list) else content or ""
    for call in found.get("tool_calls", ()):
        function = call["function"]
        if isinstance(function["arguments"], str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except json.JSONDecodeError:
                raise ApiError(400, f"messages: the arguments of {function['name']!r} are not JSON") from None
    return found
