"""`/v1/messages`: Anthropic's interface. A request becomes a conversation, and the answer a list of blocks."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .conversation import Content, Conversation, function_tool, named_function, picture, words
from .gate import ApiError
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
from .replies import Run
from .schemas import ChatRequest
from .turns import Event, Kind, Section, TurnReply

if TYPE_CHECKING:
    from .service import Service

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesApi:
    def __init__(self, service: "Service") -> None:
        self._service = service

    async def create(self, request: MessagesRequest, http: Request) -> Response:
        """A reply to a conversation, as a list of blocks."""
        asked = chat_request(request)
        prepare = self._service.preparer.chat
        return await self._service.generate(asked, http, prepare, lambda run: MessagesReply(asked, run))

    async def count_tokens(self, request: CountRequest) -> Response:
        """How many tokens a conversation has."""
        self._service.model_name(request.model)
        return JSONResponse({"input_tokens": await self._service.preparer.count(chat_request(request))})


# ---- from blocks to messages


def chat_request(request: CountRequest) -> ChatRequest:
    form = request.output_config.format if request.output_config else None
    choice = request.tool_choice
    # Off unless asked for, as with Anthropic. A template that knows no such thing looks at nothing.
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
        fields |= {name: getattr(request, name) for name in ("stream", "temperature", "top_k", "top_p")}
        fields |= {"max_completion_tokens": request.max_tokens, "stop": request.stop_sequences}
    return _conversation(request).request(**fields)


def _choice(given: ToolChoice) -> Any:
    if given.type != "tool":
        return _CHOICES[given.type]
    if given.name is None:
        raise ApiError(400, "tool_choice: type tool and a field name go together", param="tool_choice")
    return named_function(given.name)


def _conversation(request: CountRequest) -> Conversation:
    if request.messages[-1].role == "assistant":
        what = "messages: the last is the assistant's, and this server does not go on with one: end with the user's"
        raise ApiError(400, what, param="messages")
    made = Conversation()
    if request.system:
        made.system(_text(request.system))
    for number, message in enumerate(request.messages):
        blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        where = f"messages.{number}"
        if message.role == "system":
            made.system("\n\n".join(block.text for block in blocks if isinstance(block, TextBlock)))
        elif message.role == "assistant":
            _say(made, blocks, where)
        else:
            _ask(made, blocks, where)
    return made


def _say(made: Conversation, blocks: Sequence[Block], where: str) -> None:
    for block in blocks:
        if isinstance(block, TextBlock):
            made.said(block.text)
        elif isinstance(block, ThinkingBlock):
            made.thought(block.thinking)
        elif isinstance(block, ToolUseBlock):
            made.called(block.id, block.name, block.input)
        elif not isinstance(block, RedactedBlock):
            raise _misplaced(block, where, "assistant")


def _ask(made: Conversation, blocks: Sequence[Block], where: str) -> None:
    """Results first: they belong to the calls before."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            made.result(block.tool_use_id, _content(block.content))
        elif isinstance(block, TextBlock | ImageBlock):
            parts.append(_part(block))
        else:
            raise _misplaced(block, where, "user")
    if parts:
        made.user(parts)


def _misplaced(block: Any, where: str, role: str) -> ApiError:
    return ApiError(400, f"{where}: a block of type {block.type!r} is none of the {role}'s", param=where)


def _content(given: str | Sequence[TextBlock | ImageBlock]) -> Content:
    return given if isinstance(given, str) else [_part(block) for block in given]


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return words(block.text)
    source = block.source
    if isinstance(source, Base64Source):
        return picture(f"data:{source.media_type};base64,{source.data}")
    return picture(source.url)


def _text(given: str | Sequence[TextBlock]) -> str:
    return given if isinstance(given, str) else "\n\n".join(block.text for block in given)


# ---- from sections to blocks


class MessagesReply(TurnReply):
    prefix = "msg"

    def __init__(self, request: ChatRequest, run: Run) -> None:
        super().__init__(request, run)
        self._run = run

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message(None)}

    def opened(self, section: Section) -> Iterator[Event]:
        empty = Section(section.kind, section.index, call_id=section.call_id, name=section.name)
        yield {"type": "content_block_start", "index": section.index, "content_block": _block(empty)}

    def added(self, section: Section, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        yield _delta(section, _DELTAS[section.kind](text))

    def closed(self, section: Section) -> Iterator[Event]:
        if section.kind is Kind.REASONING:
            yield _delta(section, {"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": section.index}

    def end(self) -> Iterator[Event]:
        message = self.result()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def result(self) -> dict[str, Any]:
        reason = _REASONS.get(self.finished or "", self.finished)
        return self._message("stop_sequence" if self.stop is not None and reason == "end_turn" else reason)

    def _message(self, reason: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._run.number}",
            "type": "message",
            "role": "assistant",
            "model": self._run.model,
            "content": [_block(section) for section in self.sections],
            "stop_reason": reason,
            "stop_sequence": self.stop if reason == "stop_sequence" else None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """As Anthropic counts: what the cache gave is beside the rest of the prompt, not in it."""
        found = self.usage()
        cached = found["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": found["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": found["completion_tokens"],
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
    return {"type": "tool_use", "id": section.call_id, "name": section.name, "input": _input(section.text)}


def _input(arguments: str) -> dict[str, Any]:
    """What is not a whole object is under a name that Anthropic's documents give it: no tool takes it for its own."""
    if not arguments.strip():
        return {}
    try:
        found = json.loads(arguments)
    except json.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
