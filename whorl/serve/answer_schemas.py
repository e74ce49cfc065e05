"""Schemas of the server's answers, for `/openapi.json`.

Answers are built elsewhere and are not validated when they are sent; the tests compare them with these schemas.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """An answer has every field that has no default, and no fields that are not declared."""

    model_config = ConfigDict(extra="forbid")


# ---- counts


class CachedTokens(Answer):
    cached_tokens: int


class OutputTokens(Answer):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputTokens


# ---- chat and completions


class WeightVersion(Answer):
    version: str
    start: int
    end: int


class PromptLogprob(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class _Choice(Answer):
    """token_ids: with return_token_ids; weight_versions: of a server with --rl; routed_experts: with --routed-experts,
    [tokens, layers, experts of a token] as a file of numpy in base64."""

    index: int
    token_ids: list[int] = []
    weight_versions: list[WeightVersion] = []
    routed_experts: str = ""


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str


class Call(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswer(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[Call] = []


class ChatChoice(_Choice):
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    token_details: dict[str, Any] = {}


class _Generated(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    weight_version: str | None = None


class ChatCompletion(_Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []


class CompletionLogprobs(Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []


class Completion(_Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


# ---- embeddings, tokens, models


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="a string with encoding_format base64")


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Answer):
    id: str
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class IdLogprobs(Answer):
    content: list[TokenLogprob]


class IdChoice(Answer):
    index: int
    token_ids: list[int]
    logprobs: IdLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: list[WeightVersion] = []
    routed_experts: str = ""


class GeneratedIds(Answer):
    request_id: str
    model: str
    choices: list[IdChoice]
    prompt_logprobs: PromptLogprobs | None
    usage: Usage
    weight_version: str | None = None


class Rendered(Answer):
    request_id: str
    model: str
    token_ids: list[int]
    features: dict[str, Any] | None
    sampling_params: dict[str, Any]


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class Detokenized(Answer):
    prompt: str


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    parent: str | None = None  # of an adapter: the model


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Health(Answer):
    status: Literal["ok"]


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


# ---- Ollama's interface


class OllamaError(Answer):
    error: str


class OllamaFunction(Answer):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Answer):
    id: str
    function: OllamaFunction


class OllamaMessage(Answer):
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class _OllamaLine(Answer):
    """Times are in nanoseconds; only the last line of a stream has them."""

    model: str
    created_at: str
    done: bool
    done_reason: str = ""
    logprobs: list[TokenLogprob] = []
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaMessageLine(_OllamaLine):
    message: OllamaMessage


class OllamaTextLine(_OllamaLine):
    response: str
    thinking: str = ""


class OllamaVectors(Answer):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(Answer):
    embedding: list[float]


class OllamaDetails(Answer):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    """size_vram, context_length, expires_at: of a model that is loaded."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str = ""
    size_vram: int = 0
    context_length: int = 0


class OllamaModels(Answer):
    models: list[OllamaModel]


class OllamaShown(Answer):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
