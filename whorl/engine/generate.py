"""Generation for several prompts in one call: what `LLM.generate` does with `add`, `step` and `abort`."""

from collections import abc
from typing import TYPE_CHECKING

from whorl.media import MediaItem

from .output import Output, shown_progress
from .sampling_params import SamplingParams
from .sequence import Sequence

if TYPE_CHECKING:
    from .llm import LLM

Prompt = str | abc.Sequence[int]


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
            llm.step()
            update()
