"""What a request comes to when all of it is generated."""

from dataclasses import dataclass

from .sequence import FinishReason, Logprob, Sequence, Timings


@dataclass(frozen=True, slots=True)
class Output:
    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timings: Timings
    logprobs: list[Logprob]
    prompt_logprobs: list[Logprob]
    num_cached: int  # prompt tokens that the prefix cache held
    num_drafted: int
    num_accepted: int


def output_of(seq: Sequence) -> Output:
    assert seq.finish_reason is not None
    if seq.error is not None:
        raise seq.error
    return Output(
        prompt_ids=seq.token_ids[: seq.prompt_len],
        text=seq.text.value,
        token_ids=seq.output_ids,
        finish_reason=seq.finish_reason,
        timings=seq.timings,
        logprobs=seq.logprobs,
        prompt_logprobs=seq.prompt_logprobs,
        num_cached=seq.num_cached,
        num_drafted=seq.num_drafted,
        num_accepted=seq.num_accepted,
    )
