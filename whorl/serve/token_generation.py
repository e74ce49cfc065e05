"""`/inference/v1/generate`: token ids in, token ids out, by vLLM's address and fields. No text is made or read.

For programs that hold the tokenizer themselves, as trainers that sample do: what a model was given and what it chose,
with the log-probability of each, exactly.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from whorl.engine.sequence import Logprob

from .engine_thread import StepOutput
from .logprobs import finite
from .replies import Reply, Run
from .schema_parts import Count, Ids, StreamOptions, Strict, TokenId
from .schemas import MAX_N, MAX_TOP_LOGPROBS, CompletionRequest
from .validation import validation_error

if TYPE_CHECKING:
    from .service import Service


class GenerateParams(Strict):
    """What is left out is the model's own, as elsewhere."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(16, description="null: as many as fit")
    min_tokens: Count = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    detokenize: bool = Field(False, description="no effect: there is no text")


class GenerateRequest(Strict):
    token_ids: Annotated[Ids, Field(min_length=1)]
    sampling_params: GenerateParams = Field(default_factory=lambda: GenerateParams.model_validate({}))
    model: str | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def completion(self) -> CompletionRequest:
        """The same request of a completion, which checks what both have."""
        left = {"prompt_logprobs", "detokenize"}
        given = self.sampling_params.model_dump(exclude=left, exclude_none=True)
        given["max_tokens"] = self.sampling_params.max_tokens
        whole = {name: getattr(self, name) for name in ("model", "cache_salt", "stream", "stream_options")}
        given |= {name: value for name, value in whole.items() if value is not None}
        try:
            return CompletionRequest(prompt=self.token_ids, **given)
        except ValidationError as error:
            raise validation_error(error.errors(), given) from None


class TokensApi:
    def __init__(self, service: "Service") -> None:
        self._service = service

    async def generate(self, request: GenerateRequest, http: Request) -> Response:
        """What comes after token ids, as token ids."""
        asked = request.completion()
        prepare = self._service.preparer.tokens(request.sampling_params.prompt_logprobs)
        return await self._service.generate(asked, http, prepare, lambda run: TokensReply(request, asked, run))


class TokensReply(Reply):
    """Of one prompt, as many choices as copies."""

    def __init__(self, request: GenerateRequest, asked: CompletionRequest, run: Run) -> None:
        super().__init__(asked, run)
        self._number, self._asked = run.number, request.sampling_params
        self._ids: list[list[int]] = [[] for _ in self.job.sequences]
        self._logprobs: list[list[Logprob]] = [[] for _ in self.job.sequences]
        self._reasons: list[str | None] = [None] * len(self.job.sequences)

    async def whole(self, deadline: float) -> dict[str, Any]:
        async for output in self.job.outputs(deadline):
            self.collect(output)
        choices = [self.choice(index) for index in range(len(self.job.sequences))]
        return {**self._about(), "choices": choices, "prompt_logprobs": self._prompt(), "usage": self.usage()}

    def opening(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def collect(self, output: StepOutput) -> None:
        self._ids[output.index] += output.token_ids
        self._logprobs[output.index] += output.logprobs
        if output.finish_reason is not None:
            self._reasons[output.index] = str(output.finish_reason)

    def advance(self, output: StepOutput) -> Iterator[dict[str, Any]]:
        self.collect(output)
        yield self.choice(output.index)
        self._ids[output.index], self._logprobs[output.index] = [], []

    def choice(self, index: int) -> dict[str, Any]:
        has_logprobs = self._asked.logprobs is not None
        logprobs = {"content": [_entry(one) for one in self._logprobs[index]]} if has_logprobs else None
        reason = self._reasons[index]
        return {"index": index, "token_ids": self._ids[index], "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = super()._chunk(choices)
        return {**self._about(), "choices": choices} | {n: chunk[n] for n in ("usage",) if n in chunk}

    def _about(self) -> dict[str, Any]:
        return {"request_id": self._number, "model": self._head["model"]}

    def _prompt(self) -> list[Any] | None:
        """Of each token of the prompt, by vLLM's form: the first has none."""
        if self._asked.prompt_logprobs is None:
            return None
        return [None, *(_by_id(one) for one in self.job.sequences[0].prompt_logprobs)]


def _entry(one: Logprob) -> dict[str, Any]:
    """OpenAI's form, with ids in the place of texts, as vLLM writes them."""
    tops = [_token(*other) for other in one.top]
    return _token(one.token_id, one.logprob) | {"top_logprobs": tops}


def _token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": finite(logprob), "bytes": None}


def _by_id(one: Logprob) -> dict[str, Any]:
    pairs: Sequence[tuple[int, float]] = [(one.token_id, one.logprob), *one.top]
    return {str(token_id): {"logprob": finite(logprob)} for token_id, logprob in reversed(pairs)}
