"""Request schemas of `/v1/messages`, with Anthropic's names. A field that is not declared here is refused by name."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Tag

from .refused_fields import RefusedMessages
from .schema_parts import MAX_PARTS, Lenient, SamplingFields, Stop, Strict, by_type, few_parts

_MEDIA = Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


# ---- blocks


class TextBlock(Lenient):
    type: Literal["text"]
    text: str


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: _MEDIA
    data: str


class UrlSource(Strict):
    type: Literal["url"]
    url: str


class ImageBlock(Lenient):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(None, description="no effect")


_INNER = {"text": "words", "image": "picture"}
InnerBlock = Annotated[
    Annotated[TextBlock, Tag("words")] | Annotated[ImageBlock, Tag("picture")],
    by_type("block", _INNER, "a block in a tool's result has the type 'text' or 'image'"),
]


class ToolResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[InnerBlock], Field(fail_fast=True)] = ""
    is_error: bool = Field(False, description="no effect: the content says so")


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="no effect: nothing is signed here")


class RedactedBlock(Lenient):
    """Encrypted thinking of another server, which this one cannot read and ignores."""

    type: Literal["redacted_thinking"]
    data: str


_BLOCKS = {
    "text": "words",
    "image": "picture",
    "tool_use": "call",
    "tool_result": "result",
    "thinking": "thought",
    "redacted_thinking": "hidden",
}
Block = Annotated[
    Annotated[TextBlock, Tag("words")]
    | Annotated[ImageBlock, Tag("picture")]
    | Annotated[ToolUseBlock, Tag("call")]
    | Annotated[ToolResultBlock, Tag("result")]
    | Annotated[ThinkingBlock, Tag("thought")]
    | Annotated[RedactedBlock, Tag("hidden")],
    by_type("block", _BLOCKS, "a block's type is 'text', 'image', 'tool_use', 'tool_result' or 'thinking'"),
]


class Message(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


# ---- tools, thinking, format


class CustomTool(Lenient):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = Field(None, description="no effect: arguments are always streamed")
    input_examples: list[dict[str, Any]] | None = Field(None, description="no effect")
    defer_loading: Literal[False] | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="no effect: max_tokens counts thinking, too")
    display: Literal["summarized", "omitted"] | None = Field(None, description="no effect: never summarized")


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(None, description="no effect")
    format: JsonFormat | None = None


class CountRequest(Strict):
    """The fields that make up the prompt."""

    model: str
    messages: Annotated[
        list[Message],
        Field(fail_fast=True, min_length=1, max_length=MAX_PARTS),
        few_parts(("content",), "messages and blocks"),
    ]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[CustomTool], Field(fail_fast=True, max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = Field(None, description="no effect: the prefix cache is always used")


class MessagesErrorBody(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    type: Literal["error"]
    error: MessagesErrorBody
    request_id: str | None


class MessagesRequest(CountRequest, SamplingFields, RefusedMessages):
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=16)] | None = None
    metadata: dict[str, Any] | None = Field(None, description="no effect")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="no effect")
    inference_geo: str | None = Field(None, description="no effect")
    speed: Literal["standard", "fast"] | None = Field(None, description="no effect")
