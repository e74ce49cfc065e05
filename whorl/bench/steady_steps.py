"""Steps in which all sequences decode and none starts or ends: how long they take, and how many experts they read."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from whorl import device as devices
from whorl.bench.provenance import Document
from whorl.engine.llm import LLM
from whorl.engine.sequence import Sequence as Seq
from whorl.nn import Experts, weighted

# Tokens of a sequence beside those of the timed steps: one from its prompt, one that may be in flight, and one more, so
# that it does not end. The end of a long sequence frees thousands of blocks, which is not decoding.
SPARE_TOKENS = 3
_COUNTED = 16  # steps whose experts are counted

Distinct = dict[Experts, float]


def time_steps(llm: LLM, sequences: Sequence[Seq], num_steps: int) -> float:
    """Return the mean seconds of `num_steps` steps of sequences that have `SPARE_TOKENS` of room; then abort them."""
    before, device = sum(seq.num_outputs for seq in sequences), llm.runner.device
    devices.synchronize(device)
    started = time.perf_counter()
    for _ in range(num_steps):
        llm.step()
    devices.synchronize(device)
    seconds = time.perf_counter() - started
    num_tokens = sum(seq.num_outputs for seq in sequences) - before
    assert num_tokens == num_steps * len(sequences), f"{num_steps} steps of {len(sequences)} gave {num_tokens} tokens"
    end(llm, sequences)
    return seconds / num_steps


def end(llm: LLM, sequences: Sequence[Seq]) -> None:
    """Abort sequences, and read the step that was launched ahead.

    The last goes first, so that the next run's sequences get the same lanes, and the same blocks but for those added
    while decoding.
    """
    for seq in reversed(sequences):
        llm.abort(seq)
    llm.step()


def count_experts(llm: LLM, start: Callable[[], Sequence[Seq]], num_steps: int) -> Distinct:
    """Return how many different experts of each layer a step reads, in the mean; {} for a model without experts.

    start: returns sequences as `time_steps` takes them. Of their `num_steps` steps some are counted: these run without
    graphs, which call no hooks of modules.
    """
    counts: dict[Experts, list[int]] = {layer: [] for layer in expert_layers(llm.model)}
    if not counts:
        return {}
    sequences, stride = start(), max(1, num_steps // _COUNTED)
    for step in range(num_steps):
        with _counting(counts, llm) if step % stride == 0 else contextlib.nullcontext():
            llm.step()
    end(llm, sequences)
    return {layer: sum(numbers) / len(numbers) for layer, numbers in counts.items()}


@contextlib.contextmanager
def _counting(counts: Mapping[Experts, list[int]], llm: LLM) -> Iterator[None]:
    """Append the number of experts that each layer reads to `counts`, in steps that are launched in this context."""

    def count(layer: Experts, inputs: tuple[Any, ...]) -> None:
        counts[layer].append(len(inputs[2].cpu().unique()))  # the ids of `Experts.forward`

    handles = [layer.register_forward_pre_hook(count) for layer in counts]
    try:
        with llm.runner.eager():
            yield
    finally:
        for handle in handles:
            handle.remove()


def expert_layers(model: Any) -> list[Experts]:
    """Return the layers of experts of a model."""
    return [layer for _, layer in weighted(model) if isinstance(layer, Experts)]


def expert_figures(model: Any, batch: int, distinct: Mapping[Experts, float]) -> Document:
    """Return the fields of a result about experts, in the mean over layers; None for a model without experts.

    distinct_experts: different experts of a layer that a step read. independent_experts: as many as it would read if
    `batch` tokens chose uniformly and independently of each other.
    """
    layers = expert_layers(model)
    if not layers:
        return {"distinct_experts": None, "independent_experts": None}
    return {
        "distinct_experts": sum(distinct[layer] for layer in layers) / len(layers),
        "independent_experts": sum(layer.independent(batch) for layer in layers) / len(layers),
    }
