"""Request schemas. A field that is not declared here is refused by name; none is ignored silently.

Fields marked "no effect" are OpenAI's and do not change this server's answers.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from .refused_fields import Refused, RefusedChat, RefusedCompletion, RefusedSampling
from .schema_parts import (
    MAX_IDS,
    Count,
    Ids,
    Messages,
    NamedTool,
    Priority,
    ResponseFormat,
    SamplingFields,
    Stop,
    StreamOptions,
    Strict,
    TokenId,
    Tools,
    at_most,
)
from .structured import Guided

MAX_N = 128
MAX_TOP_LOGPROBS = 20
# The server has a limit of its own on these, `max_logprobs`.
Alternatives = Annotated[int, Field(ge=0, le=2**20)]
MAX_BIASES = 1024
MAX_PROMPTS = 4096


class Sampling(Guided, SamplingFields, RefusedSampling):
    """The fields that chat and completions share."""

    model: str | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_IDS), at_most(MAX_IDS)] | None
    ) = Field(None, description="no other token is sampled, not even one that ends the answer")
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="the prefix cache is shared only with requests of the same salt"
    )
    drafts: bool = Field(True, description="false: this request has no drafts; its answer is the same")
    ignore_eos: bool = False
    logit_bias: (
        Annotated[
            dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES), at_most(MAX_BIASES)
        ]
        | None
    ) = None
    min_tokens: Count = 0
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    priority: Priority = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool | None = Field(None, description="no effect: the tokenizer's files say it")
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    include_stop_str_in_output: bool = False
    prompt_logprobs: Alternatives | None = Field(
        None, description="also report the log-probabilities of the prompt's tokens, with so many alternatives"
    )
    return_token_ids: bool = Field(False, description="also report the token ids of the prompt and of the answer")
    return_tokens_as_token_ids: bool = Field(False, description="logprobs name tokens token_id:N")
    on_update: Literal["continue", "restart", "abort"] = Field(
        "continue",
        description="when the weights change before its end, the answer goes on with the new ones, is computed again, "
        "or ends with the reason abort",
    )
    routed_experts_prompt_start: Count = Field(
        0, description="with --routed-experts: leave out the experts of so many tokens of the prompt"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None, description="a longer prompt loses its beginning; -1: as much of it as does not fit"
    )
    metadata: dict[str, Any] | None = Field(None, description="no effect")
    user: str | None = Field(None, description="no effect")

    @property
    def has_grammar(self) -> bool:
        """Whether the answer must follow a grammar."""
        raise NotImplementedError

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_top(self) -> int | None:
        """How many alternatives to report with each token; None: no log-probabilities at all."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream = true")
        if self.best_of not in (None, n := self.n or 1):
            raise ValueError(f"best_of is {self.best_of} and n {n}: all answers are returned, so they must be equal")
        if self.on_update == "restart" and self.stream:
            raise ValueError("on_update restart and stream exclude each other: what was sent cannot be taken back")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens is 0, which leaves no prompt; -1 keeps as much as fits")
        if self.allowed_token_ids is not None and self.has_grammar:
            raise ValueError("allowed_token_ids and a grammar exclude each other")
        return self


class TokenDetails(Strict):
    """What to report about each token, beside its source."""

    top: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        None, description="its log-probability and this many alternatives; null: neither, and the engine may run ahead"
    )
    prompt: bool = Field(False, description="also the prompt's last tokens, and how many the prefix cache had")


class ChatRequest(Sampling, RefusedChat):
    messages: Messages
    token_details: TokenDetails | None = Field(None, description="an extension of this server: see docs/serve.md")
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="none turns thinking off, minimal leaves it to the template, the others turn it on"
    )
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="the answer continues the last message")
    documents: Annotated[list[dict[str, str]], Field(fail_fast=True, max_length=1024)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    prediction: dict[str, Any] | None = Field(None, description="no effect: drafts come from the text itself")
    prompt_cache_key: str | None = Field(None, description="no effect: the prefix cache is always used")
    prompt_cache_retention: str | None = Field(None, description="no effect")
    safety_identifier: str | None = Field(None, description="no effect")
    service_tier: str | None = Field(None, description="no effect")
    store: bool | None = Field(None, description="no effect: nothing is stored")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="no effect")

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        check_continuation(self)
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed only with logprobs = true")
        if self.logprobs and self.token_details is not None:
            raise ValueError("token_details and logprobs exclude each other: token_details.top has the same numbers")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError(f"tools: a name comes twice in {names[:64]}")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: {self.tool_choice.function.name!r} is not in tools {names[:64]}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools, and there are none")
        if self.forces_a_tool and _is_json(self.response_format):
            raise ValueError("response_format: JSON and a forced tool call exclude each other")
        if self.constraint is not None and (self.forces_a_tool or _is_json(self.response_format)):
            other = "a forced tool call" if self.forces_a_tool else "response_format"
            raise ValueError(f"{self.constraint.param} and {other} exclude each other")
        return self

    @property
    def has_grammar(self) -> bool:
        return self.forces_a_tool or _is_json(self.response_format) or self.constraint is not None

    @property
    def num_top(self) -> int | None:
        if self.token_details is not None:
            return self.token_details.top
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forces_a_tool(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


def kind_of_prompt(prompt: Any) -> str:
    """Tell the kind of a prompt from its first entry.

    Without this, pydantic would try every kind and report errors for every entry of a long list.
    """
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


_SOME = Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)


class CompletionRequest(Sampling, RefusedCompletion):
    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[Ids, Field(min_length=1), Tag("ids")]
        | Annotated[list[str], _SOME, at_most(MAX_PROMPTS), Tag("texts")]
        | Annotated[list[Ids], _SOME, at_most(MAX_PROMPTS), Tag("lists")],
        Discriminator(kind_of_prompt),
    ]
    echo: bool = False
    logprobs: Alternatives | None = None
    max_tokens: Count | None = Field(16, description="0 with echo: only score the prompt")
    add_special_tokens: bool = True
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0 is allowed only with echo = true")
        if self.prompt_logprobs is not None and self.echo and self.logprobs is not None:
            raise ValueError("prompt_logprobs and echo with logprobs exclude each other: both score the prompt")
        if self.constraint is not None and _is_json(self.response_format):
            raise ValueError(f"{self.constraint.param} and response_format exclude each other")
        return self

    @property
    def has_grammar(self) -> bool:
        return _is_json(self.response_format) or self.constraint is not None

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def num_prompts(self) -> int:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return 1 if is_one else len(self.prompt)


def _is_json(response_format: ResponseFormat | None) -> bool:
    return response_format is not None and response_format.type != "text"


def check_continuation(request: "ChatRequest | TokenizeRequest") -> None:
    """Raise ValueError unless the last message can be continued as requested; then no new message is begun."""
    if not request.continue_final_message:
        return
    last = None if request.messages is None else request.messages[-1]
    if request.add_generation_prompt and "add_generation_prompt" in request.model_fields_set:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other: leave out the latter")
    if last is None or last.tool_calls or not last.text():
        raise ValueError("continue_final_message: the last message has no text to continue")
    request.add_generation_prompt = False


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[None, Refused("a template is a program, and none is taken from a request")] = None
    mm_processor_kwargs: Annotated[None, Refused("pictures and videos are read in one way", ({},))] = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        check_continuation(self)
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Ids


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody
