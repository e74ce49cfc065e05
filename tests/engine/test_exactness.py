"""The exactness contract: a token's logits are a function of the tokens before it.

Random schedules - batching, chunking, preemption, prefix hits, aborted neighbours, drafts - against plain runs of one
sequence, one token a step. Logits are compared bit by bit: tokens agree by luck too often to prove anything.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels import without_cpu_kernels
from mock_model import ByteTokenizer, Logits, Oracle, alone, record
from schedules import MODELS, compare, random_settings, requests, run_at_random, seeded

from whorl.engine import batch, graphs
from whorl.engine.blocks import BlockPool
from whorl.engine.llm import LLM
from whorl.engine.runner import Runner
from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.speculate import DraftLength
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.nn import Step

Plain = list[tuple[Sequence, Logits]]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 9, "min_tokens": 4, "presence_penalty": 0.5},
]


class Setting:
    """A model, requests, and what each gives when it runs alone."""

    def __init__(self, name: str) -> None:
        self.model = MODELS[name]()
        self.tokenizer = ByteTokenizer() if name == "mock" else None
        vocab_size = 200 if name == "mock" else self.model.vocab_size
        self.requests = list(requests(random.Random(5), vocab_size, KINDS * 2, fewest=4))
        self.plain: Plain = [alone(self.model, self.tokenizer, *request) for request in self.requests]
        for seq, _ in self.plain[:4]:  # prompts that resend what was generated
            request = seq.token_ids[:-1], SamplingParams(max_tokens=4, temperature=0)
            self.requests.append(request)
            self.plain.append(alone(self.model, self.tokenizer, *request))


_SETTINGS: dict[str, Setting] = {}


def setting(name: str) -> Setting:
    if name not in _SETTINGS:
        torch.manual_seed(0)
        _SETTINGS[name] = Setting(name)
    return _SETTINGS[name]


def random_engine(rng: random.Random, prepared: Setting, **options: Any) -> LLM:
    seqs, block_size = rng.choice((1, 4, 6)), rng.choice((1, 2, 4, 5))
    texts = [seq.token_ids for seq, _ in prepared.plain]
    proposer = rng.choice(
        [
            None,
            Oracle(texts, k=rng.randint(1, 20), wrong=rng.randint(2, 9)),
            Oracle(texts, k=6, wrong=10**6),
            PromptLookup(k=rng.randint(1, 12), ngram=rng.randint(1, 2), min_hist=1, guard=rng.random() < 0.5),
        ]
    )
    return LLM(
        model=prepared.model,
        tokenizer=prepared.tokenizer,
        settings=random_settings(rng, seqs=seqs, block_size=block_size),
        speculate=proposer,
        run_ahead=rng.random() < 0.7,
        draft_length=DraftLength({1: 1.0, 8: 1.3, 64: 4.0}) if rng.random() < 0.3 else "fixed",
        **options,
    )


def check(name: str, seed: int, **options: Any) -> tuple[LLM, Counter[str]]:
    """One random schedule; what it went through."""
    rng, prepared = random.Random(seed), setting(name)
    llm = random_engine(rng, prepared, **options)
    recorded = record(llm)
    for index, seq in run_at_random(rng, llm, prepared.requests):
        compare(*prepared.plain[index], seq, recorded.get(seq.id, {}))
    assert llm.pool.num_used == 0
    return llm, Counter(llm.stats()) + Counter(num_rejected=llm.num_drafted - llm.num_accepted)


MANY = seeded(range(100, 1000), range(100, 200), pytest.mark.slow)


@pytest.mark.parametrize(("name", "seeds"), [*seeded(range(40), range(9)), *MANY])
def test_logits_do_not_depend_on_the_schedule(name: str, seeds: range) -> None:
    seen = sum((check(name, seed)[1] for seed in seeds), Counter())
    for event in ("num_preemptions", "num_tokens_hit", "num_accepted", "num_rejected"):
        assert seen[event] > 2, f"hardly any {event} in these schedules: {seen}"


@pytest.mark.parametrize("name", ["mock", "llama"])
def test_a_recorded_call_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a replay is the same Python again: padding and copying are what is tested."""

    def record_graph(_: str, function: Callable[[], None], *, pool: object) -> Callable[[], None]:
        function()
        return function

    setting(name)
    monkeypatch.setattr(graphs, "wants_graphs", lambda *_: True)
    monkeypatch.setattr(graphs, "record_graph", record_graph)
    sizes, prompts = set(), set()
    for seed in range(6 if name == "mock" else 2):
        recorder = check(name, seed, prompt_graphs=64)[0].runner
        sizes |= recorder.graphs.decoding.keys()
        prompts |= recorder.graphs.prompts.keys()
    assert len(sizes) > 3
    assert {tokens for tokens, _ in prompts} == {16, 64}, "one short prompt, and several together"
    assert {beside for _, beside in prompts} >= {0, 16}, "alone, and beside decoding sequences"


@pytest.mark.slow
def test_real_language() -> None:
    """The small default model, with prompt lookup and without: the same logits, the same text."""
    questions = (
        "What is the capital of France?",
        "Repeat this list: apple, banana, cherry, orange, grape, melon, plum.",
    )
    llm = LLM(device="cpu", num_blocks=64, speculate=PromptLookup(), draft_length="fixed")
    recorded, rounds = record(llm), []
    for proposer in (None, PromptLookup()):
        llm.proposer = proposer
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in questions]  # type: ignore[union-attr]
        sequences = [llm.add(p, SamplingParams(temperature=0, max_tokens=40))[0] for p in prompts]
        while llm.has_work:
            llm.step()
        rounds.append(sequences)
    assert "Paris" in rounds[0][0].text.value
    assert rounds[1][1].num_accepted > 0
    for plain, drafted in zip(*rounds, strict=True):
        assert plain.output_ids == drafted.output_ids
        assert all(torch.equal(recorded[plain.id][i], recorded[drafted.id][i]) for i in range(plain.num_outputs))


# ---- the test can fail: each of these is a fault that engines have had


def keep_rejected_keys(patch: pytest.MonkeyPatch) -> None:
    """No rollback: what a draft wrote is not written over."""
    written: set[int] = set()

    def forward(self: Runner, step: Step, is_decode: bool, is_adapted: bool) -> torch.Tensor:
        if is_decode:
            old = [-1 if slot in written else slot for slot in step.slots.tolist()]
            written.update(step.slots.tolist())
            step = replace(step, slots=torch.tensor(old))
        return self.model.forward(step, self.caches)

    patch.setattr(Runner, "_forward", forward)


def spoil(patch: pytest.MonkeyPatch, field: str, by: Callable[[Step], torch.Tensor]) -> None:
    def forward(self: Runner, step: Step, is_decode: bool, is_adapted: bool) -> torch.Tensor:
        return self.model.forward(replace(step, **{field: by(step)}), self.caches)

    patch.setattr(Runner, "_forward", forward)


def forget_positions_of_drafts(patch: pytest.MonkeyPatch) -> None:
    def first_of_each(step: Step) -> torch.Tensor:
        lengths = step.query_starts.diff()
        is_draft = int(lengths.max()) > 1
        return step.positions[step.query_starts[:-1].long()].repeat_interleave(lengths) if is_draft else step.positions

    spoil(patch, "positions", first_of_each)


def mask_out_the_last_key(patch: pytest.MonkeyPatch) -> None:
    def shorter(step: Step) -> torch.Tensor:
        lengths = step.query_starts.diff()
        is_draft = (lengths > 1) & (step.context_lens > lengths)
        return step.context_lens - is_draft.int()

    spoil(patch, "context_lens", shorter)


def forget_where_a_chunk_starts(patch: pytest.MonkeyPatch) -> None:
    spoil(patch, "context_lens", lambda s: s.query_starts.diff())


def share_across_prefixes(patch: pytest.MonkeyPatch) -> None:
    key = BlockPool._key
    patch.setattr(BlockPool, "_key", lambda *args, **options: (0, *key(*args, **options)[1:]))


def sample_by_row(patch: pytest.MonkeyPatch) -> None:
    """Noise that belongs to the batch and not to the request."""
    patch.setattr(batch, "_places", lambda chunk: range(len(chunk.draft) + 1))


FAULTS = [
    keep_rejected_keys,
    forget_positions_of_drafts,
    mask_out_the_last_key,
    forget_where_a_chunk_starts,
    share_across_prefixes,
    sample_by_row,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ["mock", "qwen3"])
def test_a_fault_shows(name: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    setting(name)
    fault(monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(60):
            check(name, seed)


def test_prompts_and_decoding_sequences_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a step, not two; and a key that its decoding sequences do not see shows."""
    setting("qwen3")
    calls, run, run_call, parts = [], Runner.run, Runner.run_call, Step.parts
    monkeypatch.setattr(Runner, "run", lambda *a, **k: (calls.append([]), run(*a, **k))[1])
    monkeypatch.setattr(Runner, "run_call", lambda s, c, *a: (calls[-1].append(c.decoding_from), run_call(s, c, *a))[1])
    for seed in range(12):
        check("qwen3", seed)
    assert {len(step) for step in calls} == {1}
    assert sum(step != [None] for step in calls) > 3

    def see_less(self: Step) -> tuple[Step, ...]:
        prompts, *decoding = parts(self)
        return prompts, *(replace(part, context_lens=part.context_lens - 1) for part in decoding)

    monkeypatch.setattr(Step, "parts", see_less)
    with without_cpu_kernels(), pytest.raises(AssertionError):  # noqa: PT012 (kernels take both parts together)
        for seed in range(12):
            check("qwen3", seed)


def test_ascend_keeps_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a row's bits may depend on how many rows there are."""
    llm = LLM(model=setting("qwen3").model, device="cpu", num_blocks=8)
    (seq,) = llm.add([1, 2, 3])
    chunks = llm.scheduler.schedule()
    assert [chunk.sequence for chunk in chunks] == [seq]
    assert llm.runner._joins(batch.Batch(chunks))
    monkeypatch.setattr(llm.runner, "device", "npu:0")
    assert not llm.runner._joins(batch.Batch(chunks))
