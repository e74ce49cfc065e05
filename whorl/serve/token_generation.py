"""`/inference/v1/generate`: token ids in, token ids out, with vLLM's route and fields. There is no text.

It is for programs that have the tokenizer themselves, such as trainers that sample: they get exactly the tokens that
the model read and generated, with the log-probability of each.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from whorl.engine.sequence import Logprob

from .engine_thread import StepOutput
from .logprobs import finite
from .refused_fields import Refused
from .rendering import Features
from .replies import Reply, Run
from .schema_parts import Count, Ids, Priority, SamplingFields, StreamOptions, Strict, TokenId
from .schemas import MAX_N, Alternatives, CompletionRequest
from .validation import validation_error

if TYPE_CHECKING:
    from .service import Service


_SHARED = ("model", "cache_salt", "priority", "stream", "stream_options", "on_update")  # fields of a completion


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
    logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    output_kind: int | None = Field(None, description="no effect: `stream` says it")
    routed_experts_prompt_start: Count = Field(
        0, description="with --routed-experts: leave out the experts of so many tokens of the prompt"
    )
    detokenize: bool = Field(False, description="no effect: there is no text")
    skip_special_tokens: bool = Field(True, description="no effect: there is no text")
    spaces_between_special_tokens: bool = Field(True, description="no effect: there is no text")


class GenerateRequest(Strict):
    token_ids: Annotated[Ids, Field(min_length=1)]
    sampling_params: GenerateParams = Field(default_factory=lambda: GenerateParams.model_validate({}))
    request_id: Annotated[str, Field(max_length=256)] | None = Field(None, description="the answer repeats it")
    features: Features | None = Field(None, description="pictures, as /v1/chat/completions/render has returned them")
    kv_transfer_params: Annotated[None, Refused("this server keeps its cache to itself", ({},))] = None
    model: str | None = None
    cache_salt: str | None = None
    on_update: Literal["continue", "restart", "abort"] = "continue"
    priority: Priority = 0
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def completion(self) -> CompletionRequest:
        """Return the equivalent completion request, which validates the fields that both have."""
        excluded = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"}
        fields = self.sampling_params.model_dump(exclude=excluded, exclude_none=True)
        fields["max_tokens"] = self.sampling_params.max_tokens
        outer = {name: getattr(self, name) for name in _SHARED}
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
        completion, preparer = request.completion(), self._service.preparer
        messages = [] if request.features is None else request.features.messages()

        return await self._service.generate(
            completion,
            http,
            lambda completion: preparer.completion(completion, messages),
            lambda run: TokensReply(request, completion, run),
        )


class TokensReply(Reply):
    """Formats the n choices for one prompt as token ids."""

    def __init__(self, request: GenerateRequest, completion: CompletionRequest, run: Run) -> None:
        super().__init__(completion, run)
        self._request_id, self._params = request.request_id or run.request_id, request.sampling_params
        self._ids: list[list[int]] = [[] for _ in self.job.sequences]
        self._logprobs: list[list[Logprob]] = [[] for _ in self.job.sequences]
        self._reasons: list[str | None] = [None] * len(self.job.sequences)

    async def complete(self, deadline: float) -> dict[str, Any]:
        async for output in self.job.outputs(deadline):
            self.collect(output)
        choices = [self.choice(index) | self.at_end(index) for index in range(len(self.job.sequences))]
        prompt = self.prompt_logprobs(0)
        return {**self._header(), "choices": choices, "prompt_logprobs": prompt, "usage": self.usage()} | self.version()

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


def _entry(token: Logprob) -> dict[str, Any]:
    """Return OpenAI's form of a log-probability, with ids in place of texts, as vLLM writes them."""
    tops = [_token(*other) for other in token.top]
    return _token(token.token_id, token.logprob) | {"top_logprobs": tops}


def _token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": finite(logprob), "bytes": None}
