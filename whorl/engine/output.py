"""Outputs of the engine: after each step, and of a finished sequence."""

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from .sequence import FinishReason, Logprob, Sequence, Timings


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
