"""`/v1/messages`: Anthropic's interface. A request becomes a chat request, and the reply a list of blocks."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .api_error import ApiError
from .conversation import Content, Conversation, function_tool, image_part, named_function, text_part
from .message_schemas import (
    Base64Source,
    Block,
    CountRequest,
    ImageBlock,
    MessagesRequest,
    RedactedBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from .replies import Run, arguments_of
from .schema_parts import SAMPLING
from .schemas import ChatRequest
from .turns import Event, Kind, Section, TurnReply

if TYPE_CHECKING:
    from .service import Service

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesApi:
    """The handlers of `/v1/messages`."""

    def __init__(self, service: "Service") -> None:
        self._service = service

    async def create(self, request: MessagesRequest, http: Request) -> Response:
        """Reply to a conversation with a list of blocks."""
        chat = chat_request(request)
        prepare = self._service.preparer.chat
        return await self._service.generate(chat, http, prepare, lambda run: MessagesReply(chat, run))

    async def count_tokens(self, request: CountRequest) -> Response:
        """Count the tokens of a conversation."""
        self._service.model_name(request.model)
        return JSONResponse({"input_tokens": await self._service.preparer.count(chat_request(request))})


# ---- the request: from blocks to chat messages


def chat_request(request: CountRequest) -> ChatRequest:
    """Translate a request to the chat request that means the same; raise ApiError 400 where that is not possible."""
    form = request.output_config.format if request.output_config else None
    choice = request.tool_choice
    # Thinking is off unless the request enables it, as with Anthropic. Templates without thinking ignore the variable.
    is_thinking = request.thinking is not None and request.thinking.type != "disabled"
    fields: dict[str, Any] = {
        "model": request.model,
        "chat_template_kwargs": {"enable_thinking": is_thinking},
        "response_format": None
        if form is None
        else {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}},
        "tools": [function_tool(t.name, t.description, t.input_schema, t.strict) for t in request.tools or ()] or None,
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
    }
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in ("stream", *SAMPLING)}
        fields |= {"max_completion_tokens": request.max_tokens, "stop": request.stop_sequences}
    conversation = _conversation(request)
    # A last message of the assistant is the beginning of the answer.
    fields["continue_final_message"] = conversation.messages[-1]["role"] == "assistant"
    return conversation.to_request(**fields)


def _choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise ApiError(400, "tool_choice: type tool and a field name go together", param="tool_choice")
    return named_function(choice.name)


def _conversation(request: CountRequest) -> Conversation:
    conversation = Conversation()
    if request.system:
        conversation.add_system(_text(request.system))
    for number, message in enumerate(request.messages):
        blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        where = f"messages.{number}"
        if message.role == "system":
            conversation.add_system("\n\n".join(block.text for block in blocks if isinstance(block, TextBlock)))
        elif message.role == "assistant":
            _add_assistant(conversation, blocks, where)
        else:
            _add_user(conversation, blocks, where)
    if not conversation.messages:
        raise ApiError(400, "messages: none has any content, expected at least one block", param="messages")
    return conversation


def _add_assistant(conversation: Conversation, blocks: Sequence[Block], where: str) -> None:
    for block in blocks:
        if isinstance(block, TextBlock):
            conversation.add_assistant(block.text)
        elif isinstance(block, ThinkingBlock):
            conversation.add_reasoning(block.thinking)
        elif isinstance(block, ToolUseBlock):
            conversation.add_tool_call(block.id, block.name, block.input)
        elif not isinstance(block, RedactedBlock):
            raise _misplaced(block, where, "assistant")


def _add_user(conversation: Conversation, blocks: Sequence[Block], where: str) -> None:
    """Add a user's blocks; tool results come first, as they answer the calls of the message before."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            conversation.add_tool_result(block.tool_use_id, _content(block.content))
        elif isinstance(block, TextBlock | ImageBlock):
            parts.append(_part(block))
        else:
            raise _misplaced(block, where, "user")
    if parts:
        conversation.add_user(parts)


def _misplaced(block: Any, where: str, role: str) -> ApiError:
    message = f"{where}: a block of type {block.type!r} is not allowed in a message of the {role}"
    return ApiError(400, message, param=where)


def _content(content: str | Sequence[TextBlock | ImageBlock]) -> Content:
    return content if isinstance(content, str) else [_part(block) for block in content]


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return text_part(block.text)
    source = block.source
    if isinstance(source, Base64Source):
        return image_part(f"data:{source.media_type};base64,{source.data}")
    return image_part(source.url)


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content)


# ---- the reply: from sections to blocks


class MessagesReply(TurnReply):
    """Formats a reply as Anthropic's message and its events."""

    prefix = "msg"

    def __init__(self, request: ChatRequest, run: Run) -> None:
        super().__init__(request, run)
        self._run = run

    def begin_events(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message(None)}

    def open_events(self, section: Section) -> Iterator[Event]:
        empty = Section(section.kind, section.index, call_id=section.call_id, name=section.name)
        yield {"type": "content_block_start", "index": section.index, "content_block": _block(empty)}

    def text_events(self, section: Section, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        yield _delta(section, _DELTAS[section.kind](text))

    def close_events(self, section: Section) -> Iterator[Event]:
        if section.kind is Kind.REASONING:
            yield _delta(section, {"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": section.index}

    def end_events(self) -> Iterator[Event]:
        message = self.result()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def result(self) -> dict[str, Any]:
        reason = _REASONS.get(self.finish_reason or "", self.finish_reason)
        return self._message("stop_sequence" if self.stop_string is not None and reason == "end_turn" else reason)

    def _message(self, reason: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._run.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._run.model,
            "content": [_block(section) for section in self.sections],
            "stop_reason": reason,
            "stop_sequence": self.stop_string if reason == "stop_sequence" else None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Count tokens as Anthropic does: input_tokens excludes the tokens that the prefix cache had."""
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }


_DELTAS = {
    Kind.TEXT: lambda text: {"type": "text_delta", "text": text},
    Kind.REASONING: lambda text: {"type": "thinking_delta", "thinking": text},
    Kind.CALL: lambda text: {"type": "input_json_delta", "partial_json": text},
}


def _delta(section: Section, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": section.index, "delta": delta}


def _block(section: Section) -> dict[str, Any]:
    if section.kind is Kind.TEXT:
        return {"type": "text", "text": section.text}
    if section.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": section.text, "signature": ""}
    return {"type": "tool_use", "id": section.call_id, "name": section.name, "input": arguments_of(section.text)}
