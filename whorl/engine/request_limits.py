"""Check a request before it is queued: one that could never run raises ValueError."""

from .sampling_params import SamplingParams


def check_request(
    prompt_ids: list[int], params: SamplingParams, *, vocab_size: int, limit: int, has_tokenizer: bool
) -> None:
    """Raise ValueError if a request could never run. limit: tokens of the longest sequence."""
    if not prompt_ids:
        raise ValueError("prompt: it has 0 tokens, expected at least 1")
    if bad := [i for i in prompt_ids if not 0 <= i < vocab_size]:
        raise ValueError(f"prompt: token ids {bad[:4]} are outside the vocabulary of {vocab_size}")
    _check_lengths(len(prompt_ids), params, limit)
    if params.stop and not has_tokenizer:
        raise ValueError("stop: strings need a tokenizer, and this LLM has none; use stop_token_ids")
    ids = [*params.logit_bias, *params.stop_token_ids]
    if bad := [i for i in ids if not 0 <= i < vocab_size]:
        raise ValueError(f"logit_bias, stop_token_ids: {bad[:4]} are outside the vocabulary")
    if params.n > 1 and params.prompt_logprobs is not None:
        raise ValueError(f"prompt_logprobs: n is {params.n}, expected 1, because they are the same for every copy")


def _check_lengths(length: int, params: SamplingParams, limit: int) -> None:
    if length >= limit:
        raise ValueError(f"prompt: {length} tokens leave no room for an answer: sequences have up to {limit}")
    if params.max_tokens is not None and length + params.max_tokens > limit:
        raise ValueError(
            f"prompt of {length} tokens and max_tokens {params.max_tokens} make {length + params.max_tokens}: "
            f"sequences have up to {limit}. Set max_tokens to at most {limit - length}, or None for as many as fit"
        )
    if params.min_tokens > (room := limit - length):
        raise ValueError(f"min_tokens is {params.min_tokens}, expected at most {room}, the room after this prompt")
