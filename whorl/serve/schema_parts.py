"""Parts of request schemas: numbers, messages, tools, formats, sampling. Undeclared fields are refused by name."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
    model_validator,
)

from whorl.engine.sampling_params import PARAMETERS, Parameter

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Priority = Annotated[
    int,
    Field(ge=-(2**31), le=2**31 - 1, description="lower numbers run earlier; above 0: after others' requests, too"),
]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
MAX_IDS = 2**20
MAX_PARTS = 4096  # validated on the event loop, which takes about 10 microseconds for each
_FEW = 16  # up to this many unknown fields are all counted in the error; of more, only the first is named


def at_most(count: int) -> BeforeValidator:
    """Check the size before the entries: collecting the errors of a million entries would take seconds."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"has {len(value)} entries; up to {count} are allowed")
        return value

    return BeforeValidator(check)


# fail_fast: validation stops at the first invalid entry of a list.
Ids = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_IDS), at_most(MAX_IDS)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


@functools.cache
def _names(schema: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in schema.model_fields.items())


class Strict(BaseModel):
    """A schema that refuses undeclared fields, infinities and NaN."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > len(known := _names(cls)) + _FEW:
            unknown = next(name for name in value if name not in known)
            raise ValueError(f"{str(unknown)[:64]!r} is not a parameter that this server knows, nor are many others")
        return value


# Fields that client libraries add to messages and send back. No model needs them.
_CLIENT_FIELDS = frozenset(
    {
        *("provider_specific_fields", "annotations", "cache_control", "citations", "logprobs", "parsed"),
        *("parsed_arguments", "phase", "reasoning_details", "status", "thinking_blocks", "weight"),
    }
)


class Lenient(Strict):
    """Part of a conversation: fields that client libraries add, and unknown fields that are null, are dropped."""

    @model_validator(mode="before")
    @classmethod
    def _drop_client_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known = _names(cls)
        return {
            name: value
            for name, value in fields.items()
            if name in known or (value is not None and name not in _CLIENT_FIELDS)
        }


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # no effect


class TextPart(Lenient):
    type: Literal["text"]
    text: str


class ImageUrl(Lenient):
    url: str
    detail: Literal["auto", "low", "high"] | None = Field(None, description="low: up to 512 x 512 pixels")


class ImagePart(Lenient):
    type: Literal["image_url"]
    image_url: ImageUrl | str


class VideoUrl(Lenient):
    url: str


class VideoPart(Lenient):
    type: Literal["video_url"]
    video_url: VideoUrl | str


def by_type(thing: str, tags: Mapping[str, str], message: str, default: str | None = None) -> Discriminator:
    """Choose the schema of a value by its field `type`.

    thing, message: for the error of a value without a known type. tags: of the schemas, by type. pydantic puts a tag
    into the path of an error, between field names, and `validation` removes every step of the path that is not in the
    body; so a tag must not be the name of a field. default: the type of a value without one.
    """

    def tag(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return tags.get(kind) if isinstance(kind, str) else None

    return Discriminator(tag, custom_error_type=f"kind_of_{thing}", custom_error_message=message)


_TAGS = {"text": "words", "image_url": "picture", "video_url": "video"}
Part = Annotated[
    Annotated[TextPart, Tag("words")] | Annotated[ImagePart, Tag("picture")] | Annotated[VideoPart, Tag("video")],
    by_type("part", _TAGS, "a part's type is 'text', 'image_url' or 'video_url'"),
]


class FunctionCall(Lenient):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Lenient):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(Lenient):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = Field(None, description="reasoning_content by its other name")

    @model_validator(mode="after")
    def _has_one_reasoning(self) -> "ChatMessage":
        if self.reasoning_content is None:
            self.reasoning_content = self.reasoning
        self.reasoning = None
        return self

    def text(self) -> str | None:
        """Return the text at the message's end; None if it ends otherwise."""
        last = self.content[-1] if isinstance(self.content, list) and self.content else self.content
        return last.text if isinstance(last, TextPart) else last if isinstance(last, str) else None


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Strict):
    name: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema and a field json_schema go together")
        return self


def few_parts(fields: tuple[str, ...], things: str) -> BeforeValidator:
    """Count entries and their parts before they are validated: each takes a few microseconds to validate.

    fields: of an entry, whose lists are counted. things: what is counted, for the error.
    """

    def check(entries: Any) -> Any:
        outer = entries if isinstance(entries, list) else []
        inner = [entry.get(name) for entry in outer if isinstance(entry, dict) for name in fields]
        count = len(outer) + sum(len(parts) for parts in inner if isinstance(parts, list))
        if count > MAX_PARTS:
            raise ValueError(f"has {count} {things}; up to {MAX_PARTS} are allowed")
        return entries

    return BeforeValidator(check)


Messages = Annotated[
    list[ChatMessage],
    Field(fail_fast=True, min_length=1, max_length=MAX_PARTS),
    few_parts(("content", "tool_calls"), "messages, parts and calls"),
]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=1024)]


# ---- sampling parameters: every API that generates has them, under the parameters' own names

SAMPLING = tuple(name for name, (_, declared) in PARAMETERS.items() if declared.is_in_apis)


def _field(hint: Any, declared: Parameter) -> tuple[Any, Any]:
    """Return the annotation and the default of a parameter's field; null means the model's recommendation."""
    kind = int if int in (hint, *get_args(hint)) else float
    least, most = declared.api_bounds
    bounds: dict[str, Any] = {"ge": least, "gt": declared.above, "le": most}
    bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    return Annotated[kind, Field(**bounds)] | None, Field(None, description=declared.text)


if TYPE_CHECKING:

    class SamplingFields(Strict):
        """Whose fields only the table of parameters knows."""

else:
    fields = {name: _field(*PARAMETERS[name]) for name in SAMPLING}
    SamplingFields = create_model("SamplingFields", __base__=Strict, __module__=__name__, **fields)


def sampling_values(request: SamplingFields) -> dict[str, Any]:
    """Return the fields that a request sets."""
    return {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
