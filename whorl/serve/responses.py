"""`/v1/responses`: OpenAI's newer interface. A request becomes a chat request, and the reply a list of items."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .api_error import ApiError
from .conversation import Content, Conversation, function_tool, image_part, named_function, text_part
from .dialects import error_event
from .gate import STEERING
from .replies import Run
from .response_schemas import (
    CallItem,
    FunctionChoice,
    InputImage,
    Part,
    ReasoningItem,
    Refusal,
    ResponsesRequest,
    ResultItem,
    TextFormat,
    TokensRequest,
)
from .schema_parts import SAMPLING
from .schemas import ChatRequest
from .structured import Guided
from .turns import Event, Kind, Section, TurnReply

if TYPE_CHECKING:
    from .service import Service

_SAME_FIELDS = (
    "stream",
    *SAMPLING,
    "stop",
    "cache_salt",
    "priority",
    "chat_template_kwargs",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


class ResponsesApi:
    """The handlers of `/v1/responses`."""

    def __init__(self, service: "Service") -> None:
        self._service = service

    async def create(self, request: ResponsesRequest, http: Request) -> Response:
        """Reply to a conversation with a list of items."""
        chat = chat_request(request)
        prepare = self._service.preparer.chat
        return await self._service.generate(chat, http, prepare, lambda run: ResponsesReply(request, chat, run))

    async def input_tokens(self, request: TokensRequest) -> Response:
        """Count the tokens of a conversation."""
        self._service.model_name(request.model)
        count = await self._service.preparer.count(chat_request(request))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


# ---- the request: from items to chat messages


def chat_request(request: TokensRequest) -> ChatRequest:
    """Translate a request to the chat request that means the same; raise ApiError 400 where that is not possible."""
    fields: dict[str, Any] = {
        "model": request.model,
        "response_format": None if request.text is None else _format(request.text.format),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "tools": [function_tool(t.name, t.description, t.parameters, t.strict) for t in request.tools or ()] or None,
        "tool_choice": _choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
    }
    if isinstance(request, ResponsesRequest):
        fields |= {name: getattr(request, name) for name in _SAME_FIELDS}
        fields |= request.model_dump(include=set(Guided.model_fields), by_alias=True, exclude_none=True)
        fields["max_completion_tokens"] = request.max_output_tokens
        if request.has_logprobs:
            fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return _conversation(request).to_request(**fields)


def _conversation(request: TokensRequest) -> Conversation:
    conversation = Conversation()
    if request.instructions:
        conversation.add_system(request.instructions)
    if isinstance(request.input, str):
        conversation.add_user(request.input)
        return conversation
    for item in request.input:
        if isinstance(item, CallItem):
            conversation.add_tool_call(item.call_id, item.name, item.arguments)
        elif isinstance(item, ResultItem):
            conversation.add_tool_result(item.call_id, _content(item.output))
        elif isinstance(item, ReasoningItem):
            conversation.add_reasoning("".join(part.text for part in item.content or ()))
        elif item.role == "user":
            conversation.add_user(_content(item.content))
        elif item.role == "assistant":
            conversation.add_assistant(_text(item.content))
        else:
            conversation.add_system(_text(item.content))
    return conversation


def _content(content: str | Sequence[Part]) -> Content:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return image_part(part.image_url, part.detail)
    return text_part(part.refusal if isinstance(part, Refusal) else part.text)


def _text(content: str | Sequence[Part]) -> str:
    if isinstance(content, str):
        return content
    if any(isinstance(part, InputImage) for part in content):
        message = "input: pictures are allowed only in messages of the user and in the output of tools"
        raise ApiError(400, message, param="input")
    return "".join(_part(part)["text"] for part in content)


def _choice(choice: FunctionChoice | str | None) -> Any:
    return named_function(choice.name) if isinstance(choice, FunctionChoice) else choice


def _format(text_format: TextFormat | None) -> dict[str, Any] | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return {"type": "json_object"}
    if text_format.schema_ is None:
        raise ApiError(400, "text.format: type json_schema and a field schema go together", param="text.format")
    return {"type": "json_schema", "json_schema": {"name": text_format.name or "answer", "schema": text_format.schema_}}


# ---- the reply: from sections to items


class ResponsesReply(TurnReply):
    """Formats a reply as OpenAI's response object and its events."""

    prefix = "resp"

    def __init__(self, request: ResponsesRequest, chat: ChatRequest, run: Run) -> None:
        super().__init__(chat, run)
        self._request, self._run = request, run
        self._created, self._num_events = int(time.time()), 0

    async def chunks(self, deadline: float) -> AsyncIterator[Event]:
        """Yield the events. A failure is sent twice: as `response.failed`, and as the `error` that clients raise."""
        try:
            async for event in super().chunks(deadline):
                yield event
        except STEERING:
            raise
        except BaseException as error:
            api_error = ApiError.from_exception(error)
            details = {"code": api_error.code or "server_error", "message": api_error.body()["error"]["message"]}
            yield self._event("response.failed", response=self._response("failed") | {"error": details})
            yield error_event(api_error, self._num_events)

    def begin_events(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def open_events(self, section: Section) -> Iterator[Event]:
        yield self._event("response.output_item.added", output_index=section.index, item=self._item(section))
        if section.kind is not Kind.CALL:
            yield self._section_event(
                "response.content_part.added", section, content_index=0, part=_section_part(section)
            )

    def text_events(self, section: Section, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if section.kind is Kind.CALL:
            yield self._section_event("response.function_call_arguments.delta", section, delta=text)
        elif section.kind is Kind.REASONING:
            yield self._section_event("response.reasoning_text.delta", section, content_index=0, delta=text)
        else:
            fields = {"content_index": 0, "delta": text, "logprobs": logprobs}
            yield self._section_event("response.output_text.delta", section, **fields)

    def close_events(self, section: Section) -> Iterator[Event]:
        text = section.text
        if section.kind is Kind.CALL:
            done = "response.function_call_arguments.done"
            yield self._section_event(done, section, name=section.name, arguments=text)
        else:
            if section.kind is Kind.REASONING:
                yield self._section_event("response.reasoning_text.done", section, content_index=0, text=text)
            else:
                fields = {"content_index": 0, "text": text, "logprobs": section.logprobs}
                yield self._section_event("response.output_text.done", section, **fields)
            yield self._section_event(
                "response.content_part.done", section, content_index=0, part=_section_part(section)
            )
        yield self._event("response.output_item.done", output_index=section.index, item=self._item(section))

    def end_events(self) -> Iterator[Event]:
        result = self.result()
        yield self._event(f"response.{result['status']}", response=result)

    def result(self) -> dict[str, Any]:
        return self._response("incomplete" if self.finish_reason == "length" else "completed")

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _section_event(self, kind: str, section: Section, **fields: Any) -> Event:
        return self._event(kind, item_id=self._id(section), output_index=section.index, **fields)

    def _id(self, section: Section) -> str:
        return f"{_PREFIXES[section.kind]}_{self._run.request_id}_{section.index}"

    def _item(self, section: Section) -> dict[str, Any]:
        is_truncated = section.is_closed and self.finish_reason == "length"
        status = "in_progress" if not section.is_closed else "incomplete" if is_truncated else "completed"
        common = {"id": self._id(section), "status": status}
        if section.kind is Kind.CALL:
            call = {"type": "function_call", "call_id": section.call_id, "name": section.name}
            return common | call | {"arguments": section.text}
        parts = [_section_part(section)] if section.is_closed else []
        if section.kind is Kind.REASONING:
            return common | {"type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
        return common | {"type": "message", "role": "assistant", "content": parts}

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response object; it repeats fields of the request, as OpenAI's does."""
        is_over, request, params = status != "in_progress", self._request, self.prepared.params
        tools = [tool.model_dump(by_alias=True) for tool in request.tools or ()]
        choice = (
            request.tool_choice if isinstance(request.tool_choice, str | None) else request.tool_choice.model_dump()
        )
        form = request.text.format if request.text else None
        return {
            "id": f"resp_{self._run.request_id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self._run.model,
            "output": [self._item(section) for section in self.sections],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": choice or "auto",
            "tools": tools,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": request.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }


def _section_part(section: Section) -> dict[str, Any]:
    if section.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": section.text}
    return {"type": "output_text", "text": section.text, "annotations": [], "logprobs": section.logprobs}
