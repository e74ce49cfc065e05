"""Builds the conversation that a chat template is given of what other interfaces send piece by piece."""

from typing import Any

from pydantic import ValidationError

from .schemas import ChatRequest
from .validation import validation_error

Content = str | list[dict[str, Any]]


class Conversation:
    """Messages as `ChatRequest` takes them. What an assistant thought, said and called in a row is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def system(self, text: str) -> None:
        """Several in a row are one: most templates know one, at the beginning."""
        if self._is_last("system"):
            self.messages[-1]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, content: Content) -> None:
        self.messages.append({"role": "user", "content": content})

    def result(self, call_id: str, content: Content) -> None:
        """Of a tool."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def thought(self, text: str) -> None:
        message = self._assistant()
        message["reasoning_content"] = f"{message.get('reasoning_content', '')}{text}"

    def said(self, text: str) -> None:
        message = self._assistant()
        message["content"] = f"{message['content']}\n\n{text}" if message["content"] else text

    def called(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def request(self, **fields: Any) -> ChatRequest:
        """ApiError where the fields do not go together; None: not given."""
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            return ChatRequest.model_validate({"messages": self.messages, **given})
        except ValidationError as error:
            raise validation_error(error.errors(), given) from None

    def _assistant(self) -> dict[str, Any]:
        if not self._is_last("assistant"):
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _is_last(self, role: str) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == role


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def picture(url: str, detail: str | None = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    about = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in about.items() if value is not None}}


def named_function(name: str) -> dict[str, Any]:
    """A choice of tools that leaves one."""
    return {"type": "function", "function": {"name": name}}
