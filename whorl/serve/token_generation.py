"""`/inference/v1/generate`: token ids in, token ids out, with vLLM's route and fields. There is no text.

It is for programs that have the tokenizer themselves, such as trainers that sample: they get exactly the tokens that
the model read and generated, with the log-probability of each.
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
from .schema_parts import Count, Ids, Priority, SamplingFields, StreamOptions, Strict, TokenId
from .schemas import MAX_N, MAX_TOP_LOGPROBS, CompletionRequest
from .validation import validation_error

if TYPE_CHECKING:
    from .service import Service


class GenerateParams(SamplingFields):
    """Sampling parameters. Those that are left out come from the model's recommendations, as for the other routes."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(16, description="null: as many as fit")
    min_tokens: Count = 0
    # As in vLLM: what trains on samples wants those of the model itself.
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0  # type: ignore[misc]
    logit_bias: dict[int, float] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    detokenize: bool = Field(False, description="no effect: there is no text")
    skip_special_tokens: bool = Field(True, description="no effect: there is no text")
    spaces_between_special_tokens: bool = Field(True, description="no effect: there is no text")


class GenerateRequest(Strict):
    token_ids: Annotated[Ids, Field(min_length=1)]
    sampling_params: GenerateParams = Field(default_factory=lambda: GenerateParams.model_validate({}))
    model: str | None = None
    cache_salt: str | None = None
    priority: Priority = 0
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def completion(self) -> CompletionRequest:
        """Return the equivalent completion request, which validates the fields that both have."""
        excluded = {"prompt_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"}
        fields = self.sampling_params.model_dump(exclude=excluded, exclude_none=True)
        fields["max_tokens"] = self.sampling_params.max_tokens
        outer = {name: getattr(self, name) for name in ("model", "cache_salt", "priority", "stream", "stream_options")}
        fields |= {name: value for name, value in outer.items() if value is not None}
        try:
            return CompletionRequest(prompt=self.token_ids, **fields)
        except ValidationError as error:
            raise validation_error(error.errors(), fields) from None


class TokensApi:
    """The handler of `/inference/v1/generate`."""

    def __init__(self, service: "Service") -> None:
        self._service = service

    async def generate(self, request: GenerateRequest, http: Request) -> Response:
        """Continue token ids with token ids."""
        completion = request.completion()
        prepare = self._service.preparer.tokens(request.sampling_params.prompt_logprobs)
        return await self._service.generate(
            completion, http, prepare, lambda run: TokensReply(request, completion, run)
        )


class TokensReply(Reply):
    """Formats the n choices for one prompt as token ids."""

    def __init__(self, request: GenerateRequest, completion: CompletionRequest, run: Run) -> None:
        super().__init__(completion, run)
        self._request_id, self._params = run.request_id, request.sampling_params
        self._ids: list[list[int]] = [[] for _ in self.job.sequences]
        self._logprobs: list[list[Logprob]] = [[] for _ in self.job.sequences]
        self._reasons: list[str | None] = [None] * len(self.job.sequences)

    async def complete(self, deadline: float) -> dict[str, Any]:
        async for output in self.job.outputs(deadline):
            self.collect(output)
        choices = [self.choice(index) for index in range(len(self.job.sequences))]
        return {**self._header(), "choices": choices, "prompt_logprobs": self._prompt(), "usage": self.usage()}

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
        has_logprobs = self._params.logprobs is not None
        logprobs = {"content": [_entry(token) for token in self._logprobs[index]]} if has_logprobs else None
        reason = self._reasons[index]
        return {"index": index, "token_ids": self._ids[index], "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = super()._chunk(choices)
        return {**self._header(), "choices": choices} | {n: chunk[n] for n in ("usage",) if n in chunk}

    def _header(self) -> dict[str, Any]:
        return {"request_id": self._request_id, "model": self._head["model"]}

    def _prompt(self) -> list[Any] | None:
        """Return the log-probabilities of the prompt's tokens in vLLM's form: the first token has none."""
        if self._params.prompt_logprobs is None:
            return None
        return [None, *(_logprobs_by_id(token) for token in self.job.sequences[0].prompt_logprobs)]


def _entry(token: Logprob) -> dict[str, Any]:
    """Return OpenAI's form of a log-probability, with ids in place of texts, as vLLM writes them."""
    tops = [_token(*other) for other in token.top]
    return _token(token.token_id, token.logprob) | {"top_logprobs": tops}


def _token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": finite(logprob), "bytes": None}


def _logprobs_by_id(token: Logprob) -> dict[str, Any]:
    pairs: Sequence[tuple[int, float]] = [(token.token_id, token.logprob), *token.top]
    return {str(token_id): {"logprob": finite(logprob)} for token_id, logprob in reversed(pairs)}
