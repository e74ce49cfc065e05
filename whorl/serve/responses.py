"""`/v1/responses`: OpenAI's newer interface. A request becomes a conversation, and the answer a list of items."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .conversation import Content, Conversation, function_tool, named_function, picture, words
from .dialects import error_event
from .gate import STEERING, ApiError
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
from .schemas import ChatRequest
from .structured import Guided
from .turns import Event, Kind, Section, TurnReply

if TYPE_CHECKING:
    from .service import Service

_SAME = ("stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "cache_salt", "chat_template_kwargs")
_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


class ResponsesApi:
    def __init__(self, service: "Service") -> None:
        self._service = service

    async def create(self, request: ResponsesRequest, http: Request) -> Response:
        """A reply to a conversation, as a list of items."""
        asked = chat_request(request)
        prepare = self._service.preparer.chat
        return await self._service.generate(asked, http, prepare, lambda run: ResponsesReply(request, asked, run))

    async def input_tokens(self, request: TokensRequest) -> Response:
        """How many tokens a conversation has."""
        self._service.model_name(request.model)
        count = await self._service.preparer.count(chat_request(request))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


# ---- from items to messages


def chat_request(request: TokensRequest) -> ChatRequest:
    fields: dict[str, Any] = {
        "model": request.model,
        "response_format": None if request.text is None else _format(request.text.format),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "tools": [function_tool(t.name, t.description, t.parameters, t.strict) for t in request.tools or ()] or None,
        "tool_choice": _choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
    }
    if isinstance(request, ResponsesRequest):
        fields |= {name: getattr(request, name) for name in _SAME}
        fields |= request.model_dump(include=set(Guided.model_fields), by_alias=True, exclude_none=True)
        fields["max_completion_tokens"] = request.max_output_tokens
        if request.has_logprobs:
            fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return _conversation(request).request(**fields)


def _conversation(request: TokensRequest) -> Conversation:
    made = Conversation()
    if request.instructions:
        made.system(request.instructions)
    if isinstance(request.input, str):
        made.user(request.input)
        return made
    for item in request.input:
        if isinstance(item, CallItem):
            made.called(item.call_id, item.name, item.arguments)
        elif isinstance(item, ResultItem):
            made.result(item.call_id, _content(item.output))
        elif isinstance(item, ReasoningItem):
            made.thought("".join(part.text for part in item.content or ()))
        elif item.role == "user":
            made.user(_content(item.content))
        else:
            (made.said if item.role == "assistant" else made.system)(_text(item.content))
    return made


def _content(given: str | Sequence[Part]) -> Content:
    return given if isinstance(given, str) else [_part(part) for part in given]


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return picture(part.image_url, part.detail)
    return words(part.refusal if isinstance(part, Refusal) else part.text)


def _text(given: str | Sequence[Part]) -> str:
    if isinstance(given, str):
        return given
    if any(isinstance(part, InputImage) for part in given):
        raise ApiError(400, "input: a picture is in a message of the user's, or in a tool's output", param="input")
    return "".join(_part(part)["text"] for part in given)


def _choice(given: FunctionChoice | str | None) -> Any:
    return named_function(given.name) if isinstance(given, FunctionChoice) else given


def _format(given: TextFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.schema_ is None:
        raise ApiError(400, "text.format: type json_schema and a field schema go together", param="text.format")
    return {"type": "json_schema", "json_schema": {"name": given.name or "answer", "schema": given.schema_}}


# ---- from sections to items


class ResponsesReply(TurnReply):
    prefix = "resp"

    def __init__(self, asked: ResponsesRequest, request: ChatRequest, run: Run) -> None:
        super().__init__(request, run)
        self._asked, self._run = asked, run
        self._created, self._num_events = int(time.time()), 0

    async def chunks(self, deadline: float) -> AsyncIterator[Event]:
        """A failure is told twice: of the response, and as an event that clients raise."""
        try:
            async for event in super().chunks(deadline):
                yield event
        except STEERING:
            raise
        except BaseException as error:
            told = ApiError.of(error)
            what = {"code": told.code or "server_error", "message": told.body()["error"]["message"]}
            yield self._event("response.failed", response=self._response("failed") | {"error": what})
            yield error_event(told, self._num_events)

    def begin(self) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def opened(self, section: Section) -> Iterator[Event]:
        yield self._event("response.output_item.added", output_index=section.index, item=self._item(section))
        if section.kind is not Kind.CALL:
            yield self._of("response.content_part.added", section, content_index=0, part=_part_of(section))

    def added(self, section: Section, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if section.kind is Kind.CALL:
            yield self._of("response.function_call_arguments.delta", section, delta=text)
        elif section.kind is Kind.REASONING:
            yield self._of("response.reasoning_text.delta", section, content_index=0, delta=text)
        else:
            more = {"content_index": 0, "delta": text, "logprobs": logprobs}
            yield self._of("response.output_text.delta", section, **more)

    def closed(self, section: Section) -> Iterator[Event]:
        text = section.text
        if section.kind is Kind.CALL:
            done = "response.function_call_arguments.done"
            yield self._of(done, section, name=section.name, arguments=text)
        else:
            if section.kind is Kind.REASONING:
                yield self._of("response.reasoning_text.done", section, content_index=0, text=text)
            else:
                more = {"content_index": 0, "text": text, "logprobs": section.logprobs}
                yield self._of("response.output_text.done", section, **more)
            yield self._of("response.content_part.done", section, content_index=0, part=_part_of(section))
        yield self._event("response.output_item.done", output_index=section.index, item=self._item(section))

    def end(self) -> Iterator[Event]:
        result = self.result()
        yield self._event(f"response.{result['status']}", response=result)

    def result(self) -> dict[str, Any]:
        return self._response("incomplete" if self.finished == "length" else "completed")

    def _event(self, kind: str, **more: Any) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **more}

    def _of(self, kind: str, section: Section, **more: Any) -> Event:
        return self._event(kind, item_id=self._id(section), output_index=section.index, **more)

    def _id(self, section: Section) -> str:
        return f"{_PREFIXES[section.kind]}_{self._run.number}_{section.index}"

    def _item(self, section: Section) -> dict[str, Any]:
        is_cut = section.is_closed and self.finished == "length"
        status = "in_progress" if not section.is_closed else "incomplete" if is_cut else "completed"
        about = {"id": self._id(section), "status": status}
        if section.kind is Kind.CALL:
            call = {"type": "function_call", "call_id": section.call_id, "name": section.name}
            return about | call | {"arguments": section.text}
        parts = [_part_of(section)] if section.is_closed else []
        if section.kind is Kind.REASONING:
            return about | {"type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
        return about | {"type": "message", "role": "assistant", "content": parts}

    def _response(self, status: str) -> dict[str, Any]:
        is_over, asked, params = status != "in_progress", self._asked, self.prepared.params
        tools = [tool.model_dump(by_alias=True) for tool in asked.tools or ()]
        choice = asked.tool_choice if isinstance(asked.tool_choice, str | None) else asked.tool_choice.model_dump()
        form = asked.text.format if asked.text else None
        return {
            "id": f"resp_{self._run.number}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": self._run.model,
            "output": [self._item(section) for section in self.sections],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": choice or "auto",
            "tools": tools,
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": asked.user,
        }

    def _usage(self) -> dict[str, Any]:
        found = self.usage()
        cached = found["prompt_tokens_details"]["cached_tokens"]
        thought = found["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": found["total_tokens"],
        }


def _part_of(section: Section) -> dict[str, Any]:
    if section.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": section.text}
    return {"type": "output_text", "text": section.text, "annotations": [], "logprobs": section.logprobs}
