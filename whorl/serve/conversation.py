"""Builds chat messages from the items and blocks that other interfaces send."""

from typing import Any

from .schemas import ChatRequest
from .validation import validated

Content = str | list[dict[str, Any]]


class Conversation:
    """Messages as `ChatRequest` takes them. Consecutive reasoning, text and calls of an assistant are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_system(self, text: str) -> None:
        """Add a system text; consecutive ones are joined, as most templates accept only one, at the beginning."""
        if self._is_last("system"):
            self.messages[-1]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def add_user(self, content: Content) -> None:
        self.messages.append({"role": "user", "content": content})

    def add_tool_result(self, call_id: str, content: Content) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def add_reasoning(self, text: str) -> None:
        message = self._assistant()
        message["reasoning_content"] = f"{message.get('reasoning_content', '')}{text}"

    def add_assistant(self, text: str) -> None:
        message = self._assistant()
        message["content"] = f"{message['content']}\n\n{text}" if message["content"] else text

    def add_tool_call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def to_request(self, **fields: Any) -> ChatRequest:
        """Build the chat request; fields that are None are left out. Raises ApiError for an invalid combination."""
        return validated(ChatRequest, {"messages": self.messages, **fields})

    def _assistant(self) -> dict[str, Any]:
        if not self._is_last("assistant"):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _is_last(self, role: str) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == role


def text_part(text: str) -> dict[str, Any]:
    """Return a text part of a message's content."""
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    """Return an image part of a message's content."""
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """Return a tool as `ChatRequest` takes it."""
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def named_function(name: str) -> dict[str, Any]:
    """Return a tool_choice that forces one tool."""
    return {"type": "function", "function": {"name": name}}
