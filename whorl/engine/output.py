"""Outputs of the engine, after each step and of a finished sequence; and generation for several prompts in one call."""

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from whorl.media import MediaItem

from .sampling_params import SamplingParams
from .sequence import FinishReason, Logprob, Sequence, Timings, Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .llm import LLM

Prompt = str | abc.Sequence[int]


def token_ids_of(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids of a prompt; ValueError for text without a tokenizer."""
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise ValueError("prompt: it is text, and this LLM has no tokenizer; pass token ids")
    return tokenizer.encode(prompt)


class Delta(NamedTuple):
    """The tokens and text that one step added to a sequence. The possible beginning of a stop string is held back.

    num_drafted: how many of the tokens, from the first on, were drafted and accepted.
    """

    sequence: Sequence
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    num_drafted: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """A finished sequence, as `LLM.generate` returns it."""

    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    timings: Timings
    logprobs: list[Logprob]
    prompt_logprobs: list[Logprob]
    num_cached: int  # prompt tokens found in the prefix cache
    num_drafted: int
    num_accepted: int
    weight_versions: tuple[tuple[str, int], ...]  # version of the weights, and the first output token it has sampled
    routed_experts: "NDArray[Any] | None" = None  # [T - 1, L, K], with the setting of that name

    @classmethod
    def of(cls, seq: Sequence) -> "Output":
        """Return the output of a finished sequence; raise its error if it has one."""
        assert seq.finish_reason is not None
        if seq.error is not None:
            raise seq.error
        return cls(
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
            weight_versions=tuple(seq.weight_versions),
            routed_experts=seq.routed_experts,
        )


@contextmanager
def shown_progress(sequences: abc.Sequence[Sequence], is_shown: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar over the sequences; yield a function that updates it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=not is_shown)
    with bar:
        task = bar.add_task("", total=len(sequences), speed="")

        def update() -> None:
            num_tokens = sum(seq.num_outputs for seq in sequences)
            elapsed = bar.tasks[task].elapsed or 1e-9
            speed = f"{num_tokens / elapsed:.1f} tok/s" if num_tokens else _prefill_progress(sequences)
            bar.update(task, completed=sum(seq.is_finished for seq in sequences), speed=speed)

        yield update


def _prefill_progress(sequences: abc.Sequence[Sequence]) -> str:
    """Return how many prompt tokens are computed, to show before the first output token."""
    num_read = sum(min(seq.num_computed, seq.prompt_len) for seq in sequences)
    return f"{num_read} of {sum(seq.prompt_len for seq in sequences)} prompt tokens"


# ---- several prompts: what `LLM.generate` does with `add`, `step` and `abort`


def generate_all(
    llm: "LLM",
    prompts: Prompt | abc.Sequence[Prompt],
    params: SamplingParams | abc.Sequence[SamplingParams] | None,
    media: abc.Sequence[abc.Sequence[MediaItem]] | None,
    progress: bool,
) -> list[Output]:
    """Add all prompts, run steps until their sequences are finished, and return the outputs; see `LLM.generate`."""
    sequences = _add_all(llm, _as_prompts(prompts), params, media)
    try:
        _run(llm, sequences, progress)
    finally:  # after an error or Ctrl-C no sequence of this call may stay in the scheduler
        for seq in sequences:
            llm.abort(seq)
    return [Output.of(seq) for seq in sequences]


def _as_prompts(prompts: Prompt | abc.Sequence[Prompt]) -> abc.Sequence[Prompt]:
    """Return a list of prompts; a single string or a single list of token ids becomes a list of one."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_one else prompts  # type: ignore[list-item, return-value]


def _add_all(
    llm: "LLM",
    prompts: abc.Sequence[Prompt],
    params: SamplingParams | abc.Sequence[SamplingParams] | None,
    media: abc.Sequence[abc.Sequence[MediaItem]] | None,
) -> list[Sequence]:
    """Add every prompt, or none: after a ValueError the sequences that were added are aborted."""
    all_params = params if isinstance(params, list | tuple) else [params] * len(prompts)
    all_media = [()] * len(prompts) if media is None else media
    if len(all_params) != len(prompts):
        raise ValueError(
            f"generate: {len(prompts)} prompts and {len(all_params)} params; give one for all or one for each"
        )
    if len(all_media) != len(prompts):
        raise ValueError(
            f"generate: {len(prompts)} prompts and {len(all_media)} lists of media; pass one list for each prompt"
        )
    sequences: list[Sequence] = []
    try:
        for prompt, prompt_params, items in zip(prompts, all_params, all_media, strict=True):
            sequences += llm.add(prompt, prompt_params, media=items)
    except ValueError:
        for seq in sequences:
            llm.abort(seq)
        raise
    return sequences


def _run(llm: "LLM", sequences: list[Sequence], progress: bool) -> None:
    with shown_progress(sequences, progress) as update:
        while not all(seq.is_finished for seq in sequences):
            if not llm.may_step:
                raise RuntimeError("generate: the engine is paused; call resume first")
            llm.step()
            update()
