"""States of sequences: a toy recurrence in the engine, and the contract of tests/test_exactness.py for it.

Random schedules - batches, chunks, preemption, prefix hits, two snapshots only, aborts, drafts, steps launched ahead -
against plain runs of one sequence.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mock_model import Oracle, alone, record
from one_sequence import PROMPT, close
from recurrent import GRID, ForgetfulHybrid, Hybrid, Pure, Recurrence
from schedules import LONGEST, compare, requests, run_at_random, tiny

from whorl import nn
from whorl.engine import runner
from whorl.engine.llm import LLM
from whorl.engine.runner import Runner
from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.states import StatePool

MODELS = {model.__name__: model for model in (Hybrid, ForgetfulHybrid, Pure)}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_k": 20, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.7},
    {"temperature": 1.0, "seed": 9, "prompt_logprobs": 0},
]


class Setting:
    """A model, requests, and what each gives when it runs alone."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = tiny(MODELS[name])
        self.requests = list(requests(random.Random(5), self.model.vocab_size, KINDS * 2, fewest=4))
        self.plain = [alone(self.model, None, *request) for request in self.requests]
        for seq, _ in self.plain[:4]:  # prompts that resend what was generated
            request = seq.token_ids[:-1], SamplingParams(max_tokens=4, temperature=0)
            self.requests.append(request)
            self.plain.append(alone(self.model, None, *request))


_SETTINGS: dict[str, Setting] = {}


def setting(name: str) -> Setting:
    if name not in _SETTINGS:
        _SETTINGS[name] = Setting(name)
    return _SETTINGS[name]


def random_engine(rng: random.Random, prepared: Setting, **options: Any) -> LLM:
    seqs, block_size = rng.choice((1, 4, 6)), rng.choice((1, 2, 4, 4, 8))
    least, grid = -(-LONGEST // block_size), max(GRID, block_size)
    texts = [seq.token_ids for seq, _ in prepared.plain]
    drafts = [Oracle(texts, k=rng.randint(1, 5), wrong=rng.randint(2, 9)), PromptLookup(k=3, min_hist=1, guard=False)]
    is_drafted = not isinstance(prepared.model, ForgetfulHybrid) and rng.random() < 0.5
    return LLM(
        model=prepared.model,
        device="cpu",
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice((seqs + grid - 1, seqs + grid + 2, 64)),
        block_size=block_size,
        num_blocks=rng.choice((least, least, 8 * least)),
        max_model_len=LONGEST,
        num_snapshots=rng.choice((2, 2, 16)),
        snapshot_tokens=rng.choice((GRID, 4096)),
        use_prefix_cache=rng.random() < 0.9,
        speculate=rng.choice(drafts) if is_drafted else None,
        run_ahead=rng.random() < 0.7,
        draft_length="fixed",
        **options,
    )


def check(name: str, seed: int, **options: Any) -> tuple[LLM, Counter[str]]:
    """One random schedule; what it went through."""
    rng, prepared = random.Random(seed), setting(name)
    llm = random_engine(rng, prepared, **options)
    recorded = record(llm)
    for index, seq in run_at_random(rng, llm, prepared.requests):
        plain, logits = prepared.plain[index]
        compare(plain, logits, seq, recorded.get(seq.id, {}))
        assert seq.prompt_logprobs == plain.prompt_logprobs[: len(seq.prompt_logprobs)]
    assert llm.pool.num_used == 0
    return llm, Counter(llm.stats()) + Counter(num_rejected=llm.num_drafted - llm.num_accepted)


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(100, 500), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_the_schedule(name: str, seeds: range) -> None:
    seen = sum((check(name, seed)[1] for seed in seeds), Counter())
    events = ["num_preemptions", "num_tokens_hit", "num_states_saved", "num_states_loaded"]
    for event in events if name == "ForgetfulHybrid" else [*events, "num_accepted", "num_rejected"]:
        assert seen[event] > 2, f"hardly any {event} in these schedules: {seen}"


def test_a_recorded_call_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a replay is the same Python again: padding and lanes as data are what is tested."""

    def record_graph(_: str, function: Callable[[], None], *, pool: object) -> Callable[[], None]:
        function()
        return function

    setting("Hybrid")
    monkeypatch.setattr(runner, "wants_graphs", lambda *_: True)
    monkeypatch.setattr(runner, "record_graph", record_graph)
    for seed in range(3):
        recorder = check("Hybrid", seed, prompt_graphs=64)[0].runner
        assert recorder._graphs or recorder._prompt_graphs


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_equals_plain_code(name: str) -> None:
    """The recurrence over all tokens at once, without the engine, its lanes or its chunks."""
    model = setting(name).model
    llm = LLM(model=model, device="cpu", block_size=4, num_blocks=32, max_num_seqs=2, max_num_batched_tokens=GRID + 2)
    (seq,) = llm.add(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0))
    drain(llm)
    caches = nn.States(
        [mixer.cache_spec(model.dtype) for mixer in model.mixers if isinstance(mixer, Recurrence)], 1, 0, "cpu"
    )
    states = iter(caches.caches)
    step = nn.Step(
        token_ids=torch.tensor(PROMPT),
        positions=torch.arange(len(PROMPT)),
        slots=torch.arange(len(PROMPT)),
        block_tables=torch.arange(32, dtype=torch.int32)[None],
        query_starts=torch.tensor([0, len(PROMPT)], dtype=torch.int32),
        context_lens=torch.tensor([len(PROMPT)], dtype=torch.int32),
        max_position=len(PROMPT),
        lanes=torch.tensor([0]),
    )
    kinds = [spec if isinstance(spec, nn.StateSpec) else spec.empty(32, 4, "cpu") for spec in model.cache_specs()]
    with torch.inference_mode():
        hidden = model.forward(step, [next(states) if isinstance(kind, nn.StateSpec) else kind for kind in kinds])
        expected = model.logits(hidden).log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]]
    close(torch.tensor([token.logprob for token in seq.prompt_logprobs]), expected)


def drain(llm: LLM) -> None:
    while llm.has_work:
        llm.step()


# ---- the test can fail


def skip_the_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.States, "load", lambda self, lane, snapshot: self.clear(lane))


def leave_what_was_in_the_lane(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.States, "clear", lambda self, lane: None)


def hit_one_block_too_deep(patch: pytest.MonkeyPatch) -> None:
    begin = StatePool.begin

    def deeper(self: StatePool, seq: Sequence) -> None:
        begin(self, seq)
        if 0 < seq.num_computed < len(seq.token_ids) - self.grid:
            seq.num_computed += self.grid

    patch.setattr(StatePool, "begin", deeper)


def save_under_a_shorter_prefix(patch: pytest.MonkeyPatch) -> None:
    save = StatePool.save

    def wrong(self: StatePool, seq: Sequence) -> None:
        seq.num_in_state -= self.grid
        save(self, seq)
        seq.num_in_state += self.grid

    patch.setattr(StatePool, "save", wrong)


def draft_across_the_grid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "draft_room", lambda self, start: max(0, GRID - 1 - start % GRID))


def cut_chunks_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "chunk_length", lambda self, seq, length: length)


def move_after_the_call(patch: pytest.MonkeyPatch) -> None:
    run_call = Runner.run_call

    def late(self: Runner, call: Any, states: Any = None) -> Any:
        moves, call.moves = call.moves, []
        result = run_call(self, call, states)
        for move in moves:
            self._move(move)
        return result

    patch.setattr(Runner, "run_call", late)


FAULTS = [
    skip_the_load,
    leave_what_was_in_the_lane,
    hit_one_block_too_deep,
    save_under_a_shorter_prefix,
    draft_across_the_grid,
    cut_chunks_anywhere,
    move_after_the_call,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_shows(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    setting("Hybrid")
    fault(monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(60):
            check("Hybrid", seed)
