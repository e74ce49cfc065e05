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


class ChatChoice(Answer):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_details: dict[str, Any] = {}


class _Generated(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(_Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


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
    finish_reason: Literal["stop", "length"]


class PromptLogprob(Answer):
    logprob: float


class GeneratedIds(Answer):
    request_id: str
    model: str
    choices: list[IdChoice]
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    usage: Usage


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


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Health(Answer):
    status: Literal["ok"]
