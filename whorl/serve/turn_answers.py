"""Schemas of the answers of `/v1/responses` and `/v1/messages`, for `/openapi.json`; see `answer_schemas`."""

from typing import Any, Literal

from pydantic import ConfigDict

from .answer_schemas import Answer, TokenLogprob

# ---- responses


class OutputPart(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningPart(Answer):
    type: Literal["reasoning_text"]
    text: str


class _OutputItem(Answer):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputMessage(_OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputPart]


class OutputReasoning(_OutputItem):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningPart]
    encrypted_content: None


class OutputCall(_OutputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Answer):
    """OpenAI's response object, which repeats fields of the request beside the output."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage
    metadata: dict[str, Any]
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]


class InputTokens(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


# ---- messages


class TextOut(Answer):
    type: Literal["text"]
    text: str


class ThinkingOut(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseOut(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextOut | ThinkingOut | ToolUseOut]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(Answer):
    input_tokens: int
