"""Request schemas of `/v1/responses`. A field that is not declared here is refused by name, as in `schemas`."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, field_validator

from .refused_fields import Refused, RefusedResponses
from .schema_parts import Lenient, Priority, SamplingFields, StreamOptions, Strict, by_type, few_parts
from .schemas import MAX_TOP_LOGPROBS, Stop
from .structured import Guided

# ---- parts of a message


class InputText(Lenient):
    type: Literal["input_text", "text"]
    text: str


class OutputText(Lenient):
    type: Literal["output_text"]
    text: str


class Refusal(Lenient):
    type: Literal["refusal"]
    refusal: str


class InputImage(Lenient):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None


_PARTS = {"input_text": "words", "text": "words", "output_text": "said", "refusal": "refused", "input_image": "picture"}
Part = Annotated[
    Annotated[InputText, Tag("words")]
    | Annotated[OutputText, Tag("said")]
    | Annotated[Refusal, Tag("refused")]
    | Annotated[InputImage, Tag("picture")],
    by_type("part", _PARTS, "a part's type is 'input_text', 'input_image', 'output_text' or 'refusal'"),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]


# ---- items of the conversation


class Item(Lenient):
    """An item of the conversation. Items that a client sends back carry the id that the server gave them."""

    id: str | None = Field(None, description="no effect")


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningText(Lenient):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default=[], description="no effect: the model is shown its own thinking")
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = Field(None, description="no effect: nothing is encrypted here")


_ITEMS = {"message": "said", "function_call": "call", "function_call_output": "result", "reasoning": "thought"}
AnyItem = Annotated[
    Annotated[MessageItem, Tag("said")]
    | Annotated[CallItem, Tag("call")]
    | Annotated[ResultItem, Tag("result")]
    | Annotated[ReasoningItem, Tag("thought")],
    by_type(
        "item",
        _ITEMS,
        "an item's type is 'message', 'function_call', 'function_call_output' or 'reasoning'",
        default="message",
    ),
]


Input = Annotated[
    str | Annotated[list[AnyItem], Field(fail_fast=True, min_length=1)],
    few_parts(("content", "output"), "items and parts"),
]


# ---- tools, format and reasoning of the answer


class FunctionTool(Lenient):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="no effect")


class ReasoningOptions(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="no effect: never summarized")
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="no effect")


class TokensRequest(Strict):
    """The fields that make up the prompt."""

    input: Input
    model: str | None = None
    instructions: str | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Annotated[None, Refused("nothing is left out of a conversation: shorten it", ("disabled",))] = None
    previous_response_id: None = None
    conversation: None = None

    @field_validator("previous_response_id", "conversation", mode="before")
    @classmethod
    def _is_not_stored(cls, value: Any) -> None:
        if value is not None:
            raise ValueError("this server keeps no responses: send the whole conversation in input")


class ResponsesRequest(TokensRequest, Guided, SamplingFields, RefusedResponses):
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    # Fields of chat completions that this interface takes too.
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Priority = 0
    chat_template_kwargs: dict[str, Any] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=16)] | None = None
    # OpenAI's fields that have no effect here.
    background: Annotated[None, Refused("nothing is stored here: send stream for a long answer", (False,))] = None
    max_tool_calls: int | None = Field(None, description="no effect: the client runs the tools")
    metadata: dict[str, Any] | None = Field(None, description="returned with the response")
    prompt_cache_key: str | None = Field(None, description="no effect: the prefix cache is always used")
    prompt_cache_retention: str | None = Field(None, description="no effect")
    safety_identifier: str | None = Field(None, description="no effect")
    service_tier: str | None = Field(None, description="no effect")
    store: bool | None = Field(None, description="no effect: nothing is stored")
    user: str | None = Field(None, description="no effect")

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
