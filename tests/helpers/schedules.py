"""Random schedules of small engines: their models, requests, sizes, and requests that come and go."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from mock_model import Logits, MockModel

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import random_model
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3

Request = tuple[list[int], SamplingParams]


def tiny(model_class: type[Llama], dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    # Wide enough that torch sums a row alone and a row among others in different orders.
    sizes = {"hidden_size": 96, "intermediate_size": 160}
    return random_model(model_class.tiny(**sizes, **changes), device="cpu", dtype=dtype)


MODELS = {
    "mock": MockModel,
    "llama": lambda: tiny(Llama),
    "qwen3": lambda: tiny(Qwen3),
    "qwen3_window": lambda: tiny(Qwen3, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3_moe": lambda: tiny(Qwen3, num_experts=8),
    "qwen3_bfloat16": lambda: tiny(Qwen3, torch.bfloat16),
}
QUICK = ("mock", "qwen3_moe")  # the others take part where all tests run
LONGEST = 40


def seeded(mock: range, others: range, *marks: Any) -> list[Any]:
    """Seeds of each model's schedules, for tests that take `name` and `seeds`; the mock model is quick."""
    slow = [*marks, pytest.mark.slow]
    return [
        pytest.param(
            name,
            mock if name == "mock" else others,
            marks=list(marks) if name in QUICK else slow,
            id=f"{name}-{others.start}",
        )
        for name in MODELS
    ]


def requests(rng: random.Random, vocab_size: int, kinds: Iterable[dict[str, Any]], *, fewest: int) -> Iterator[Request]:
    """One of each kind: prompts that share beginnings, repeat themselves and end anywhere in a block."""
    common = [rng.randrange(vocab_size) for _ in range(12)]
    for kind in kinds:
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 6))]
        prompt = (common[: rng.choice((0, 4, 8, 12))] + own * rng.randint(1, 3))[: LONGEST - 20]
        yield prompt, SamplingParams(max_tokens=rng.randint(fewest, 20), **kind)


def random_settings(rng: random.Random, *, seqs: int, block_size: int) -> EngineSettings:
    """The cache is sometimes too small for all."""
    least = -(-LONGEST // block_size)
    return EngineSettings(
        device="cpu",
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice((seqs, seqs + 3, 16, 64)),
        block_size=block_size,
        num_blocks=rng.choice((least, least, 8 * least)),
        max_model_len=LONGEST,
        use_prefix_cache=rng.random() < 0.8,
    )


def run_at_random(rng: random.Random, llm: LLM, requests: list[Request]) -> list[tuple[int, Seq]]:
    """Requests arrive over time, some twice; some neighbours are aborted. Which of those given, and what it became."""
    chosen = [rng.randrange(len(requests)) for _ in range(rng.randint(3, 8))]
    added: list[tuple[int, Seq]] = []
    while chosen or llm.has_work:
        while chosen and rng.random() < 0.8:
            index = chosen.pop()
            added.append((index, llm.add(*requests[index])[0]))
        llm.step()
        for seq in llm.scheduler.running:
            assert len(seq.block_table) <= llm.pool.blocks_for(seq.length), "a rejected draft keeps its blocks"
        if added and rng.random() < 0.03:
            llm.abort(rng.choice(added)[1])
    return added


def compare(plain: Seq, expected: Logits, seq: Seq, actual: Logits) -> None:
    assert seq.output_ids == plain.output_ids[: seq.num_outputs]
    assert seq.finish_reason in (plain.finish_reason, "abort")
    if seq.finish_reason != "abort":
        assert seq.text.value == plain.text.value
    for place in range(seq.num_outputs):
        assert torch.equal(actual[place], expected[place]), f"{seq!r}: logits of output {place} differ"
