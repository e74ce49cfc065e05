"""States of sequences: a toy recurrence in the engine, and the contract of tests/engine/test_exactness.py for it.

Random schedules - batches, chunks, preemption, prefix hits, two snapshots only, aborts, drafts, steps launched ahead -
against plain runs of one sequence.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recurrent
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer, MockModel, Oracle, alone, record
from one_sequence import PROMPT, close
from recurrent import GRID, NAMES, ForgetfulHybrid, Hybrid, Pure, Recurrence
from schedules import LONGEST, compare, requests, run_at_random, tiny
from state_faults import move_after_the_call, save_under_a_shorter_prefix, skip_the_load

from whorl import nn
from whorl.bench.filled_cache import fill
from whorl.engine import graphs, roofline, tensor_parallel
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.speculate.draft_model import DraftModel
from whorl.engine.speculate.mtp import MTP
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.states import StatePool
from whorl.models import ARCHITECTURES

MODELS = {model.__name__: model for model in (Hybrid, ForgetfulHybrid, Pure)}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_k": 20, "top_p": 0.9},
    {"temperature": 0, "frequency_penalty": 0.7},
    {"temperature": 1.0, "seed": 9, "prompt_logprobs": 0},
]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy models, while these tests run: others compare the list of those that whorl has."""
    for name, where in NAMES.items():
        monkeypatch.setitem(ARCHITECTURES, name, where)


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


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(100, 200), marks=pytest.mark.slow)])
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
    monkeypatch.setattr(graphs, "wants_graphs", lambda *_: True)
    monkeypatch.setattr(graphs, "record_graph", record_graph)
    for seed in range(3):
        recorder = check("Hybrid", seed, prompt_graphs=64)[0].runner
        assert recorder.graphs.decoding or recorder.graphs.prompts


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


# ---- snapshots


def drain(llm: LLM) -> None:
    while llm.has_work:
        llm.step()


def engine(name: str = "Hybrid", **options: Any) -> LLM:
    sizes = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_model_len": 120, "draft_length": "fixed"}
    return LLM(model=setting(name).model, device="cpu", **{**sizes, **options})


def num_cached(llm: LLM, prompt: list[int], **options: Any) -> int:
    """How many tokens of a prompt the cache has when its request comes. Its output must be that of a plain run."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True} | options)
    (seq,) = llm.add(prompt, params)
    drain(llm)
    assert seq.output_ids == alone(llm.model, None, prompt, params)[0].output_ids
    return seq.num_cached


LONG = [(5 * i + 2) % 91 for i in range(50)]


def test_an_equal_prompt_and_the_next_turn_are_hits() -> None:
    llm = engine()
    for length in (50, 52):  # in the middle of the grid, and on it: one token is left to be computed
        prompt = [length, *LONG[: length - 1], 3, 3, 3][:length]
        assert [num_cached(llm, prompt) for _ in range(3)] == [0, 48, 48]
    (first,) = llm.add(LONG, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    drain(llm)
    assert num_cached(llm, [*first.token_ids, 4, 4]) == 56, "57 of 58 tokens were computed"


def test_a_beginning_that_others_share_is_a_hit_from_the_third_on() -> None:
    llm = engine()
    assert [num_cached(llm, [*LONG[:30], token, *LONG]) for token in (1, 2, 3, 4)] == [0, 0, 28, 28]


def test_long_prompts_get_more_snapshots() -> None:
    llm = engine(max_num_batched_tokens=15, snapshot_tokens=16)
    num_cached(llm, LONG)
    assert num_cached(llm, [*LONG[:40], 90, 90]) == 36, "the last of the chunks' ends that passed a multiple of 16"


def test_copies_of_a_prompt_share_its_state() -> None:
    llm = engine()
    copies = llm.add(LONG, SamplingParams(n=3, max_tokens=5, seed=3, ignore_eos=True))
    drain(llm)
    assert [seq.num_cached for seq in copies] == [0, 48, 48]


@pytest.mark.parametrize("num_snapshots", [0, 2])
def test_the_preempted_start_at_their_last_snapshot(num_snapshots: int) -> None:
    llm = engine(num_snapshots=num_snapshots, max_prompt_tokens=64)  # by default slow steps make the next ones small
    (seq,) = llm.add(LONG, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    while seq.num_outputs < 11:
        llm.step()
    llm.scheduler.preempt_all()
    llm.step()
    computed = seq.num_computed
    drain(llm)
    assert seq.output_ids == alone(llm.model, None, LONG, seq.params)[0].output_ids
    assert llm.stats()["num_states_loaded"] == (num_snapshots > 0)
    assert computed == 61
    assert llm.pool.num_hit == (60 if num_snapshots else 0)


def test_the_least_recently_used_snapshot_goes_first() -> None:
    llm = engine(num_snapshots=2)
    prompts = [[token] * 9 for token in (11, 12, 13)]
    assert [num_cached(llm, prompts[i], max_tokens=1) for i in (0, 1, 0, 2, 0, 1)] == [0, 0, 8, 0, 8, 0]
    assert llm.stats()["num_snapshots"] == 2


def test_a_snapshot_goes_with_its_block_and_with_the_weights() -> None:
    """The block is found again without its snapshot; a snapshot is not without its block."""
    llm = engine(num_blocks=8, max_model_len=32)
    prompt = [7] * 9
    num_cached(llm, prompt, max_tokens=1)
    states = llm.pool.states
    assert states is not None
    states.drop(next(iter(states._snapshots)))
    assert len(llm.pool._match(Sequence(prompt, SamplingParams(), max_len=20))) == 2
    assert [num_cached(llm, prompt, max_tokens=1) for _ in range(2)] == [0, 8]
    num_cached(llm, list(range(30)), max_tokens=1)  # takes all blocks
    assert set(states._snapshots) <= {name for _, name in llm.pool._prefixes.values()}
    assert num_cached(llm, prompt, max_tokens=1) == 0
    llm.forget()
    assert llm.stats()["num_snapshots"] == 0
    assert num_cached(llm, prompt, max_tokens=1) == 0


def test_an_error_in_a_step_leaves_no_state_of_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine()
    (seq,) = llm.add(LONG, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    while seq.num_outputs < 5:
        llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.model), "logits", lambda self, hidden: 1 / 0)  # all layers have run
        with pytest.raises(ZeroDivisionError):
            llm.step()
    drain(llm)
    assert seq.output_ids == alone(llm.model, None, LONG, seq.params)[0].output_ids


# ---- what cannot be, and what everything takes


def test_a_state_that_cannot_go_back_takes_no_drafts() -> None:
    expected = (
        "PromptLookup: ForgetfulHybrid keeps a state for each sequence .forgetful recurrence., which cannot go back"
    )
    with pytest.raises(ValueError, match=expected):
        engine("ForgetfulHybrid", speculate=PromptLookup())
    with pytest.raises(ValueError, match=r"DraftModel: Hybrid keeps a state for each sequence \(toy recurrence\)"):
        DraftModel(model=setting("Hybrid").model, device="cpu", num_blocks=4)


class Further(MockModel):
    """A layer of multi-token prediction, with a cache for each token, that is often wrong."""

    state_size = 48


@pytest.mark.parametrize("name", ["Hybrid", "Pure"])
def test_multi_token_prediction_drafts_for_states(name: str) -> None:
    """Its cache lies in the target's blocks, whose prefix hits end at snapshots."""
    head: Any = Further(vocab_size=setting(name).model.vocab_size, width=48)
    llm = engine(name, speculate=MTP(layer=head, k=3), max_num_batched_tokens=15, num_blocks=40, num_snapshots=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [LONG, LONG[:21], [*LONG[:30], 1, 2], LONG]
    sequences = [llm.add(prompt, params)[0] for prompt in prompts]
    drain(llm)
    sequences += [llm.add(prompt, params)[0] for prompt in prompts]
    drain(llm)
    for seq in sequences:
        assert seq.output_ids == alone(llm.model, None, seq.token_ids[: seq.prompt_len], params)[0].output_ids
    stats = llm.stats()
    assert min(stats["num_drafted"], stats["num_states_loaded"], stats["num_tokens_hit"]) > 0
    with pytest.raises(ValueError, match="MTP: ForgetfulHybrid keeps a state for each sequence"):
        engine("ForgetfulHybrid", speculate=MTP(layer=head))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"max_num_batched_tokens": 6},
            "max_num_batched_tokens is 6, expected at least 7: beside 3 sequences that",
        ),
        ({"max_prompt_tokens": 3}, "max_prompt_tokens is 3, expected at least 4, the tokens of a chunk"),
        ({"num_blocks": None, "memory": 2000}, "the cache has 2,000 bytes, and the states of 4 sequences and 4 snapsh"),
    ],
)
def test_settings_that_states_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine(**options)


def test_settings_without_states() -> None:
    with pytest.raises(ValueError, match="num_snapshots is 3, and no layer of MockModel keeps a state"):
        LLM(model=MockModel(), device="cpu", num_snapshots=3)


def test_a_layer_without_a_training_forward_says_so() -> None:
    with pytest.raises(ValueError, match="Recurrence: this layer has no training forward"):
        setting("Hybrid").model.logprobs(nn.pack([[1, 2, 3]], "cpu"))


def test_states_are_on_one_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Recurrence.cache_spec
    monkeypatch.setattr(Recurrence, "cache_spec", lambda self, dtype: replace(spec(self, dtype), grid=4 * self.layer))
    with pytest.raises(ValueError, match=r"grids of \[4, 12\] tokens; all must have the same"):
        engine()


def test_memory_is_planned_with_states() -> None:
    model = setting("Hybrid").model
    token, lane, snapshot = 2 * 2 * 2 * 24 * 4, 2 * (128 + 384), 2 * 128  # two layers of each kind, aligned to 128
    room = tensor_parallel._cache_room(model, "cpu", 1)
    assert (room["token"], room["lane"], room["snapshot"]) == (token, lane, snapshot)
    states = 5 * lane + 3 * snapshot  # four sequences, and padding
    sizes = {"num_blocks": None, "max_model_len": 32, "num_snapshots": 3}
    assert engine(**sizes, memory=states + 9 * 4 * token + 5).pool.num_blocks == 9
    assert roofline.step_bytes(model, batch=3, context=10) - roofline.step_bytes(model, batch=3) == 3 * 10 * token
    assert roofline.step_bytes(model, batch=3) - roofline.step_bytes(model, batch=2) >= token + 2 * lane
    pure = LLM(model=setting("Pure").model, device="cpu", max_model_len=32, max_num_seqs=2, memory=1 << 20)
    assert (pure.pool.block_size, pure.pool.num_blocks) == (GRID, 2 * 32 // GRID), "blocks take no memory"


def test_an_eight_bit_cache_leaves_states_alone() -> None:
    llm = engine(kv_cache_dtype="int8")
    prompt = list(range(20))
    outputs = [llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6), progress=False)[0] for _ in range(2)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert llm.runner.caches[1]["state"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["full", "short"])
def test_a_warm_up_keeps_to_the_contract_and_leaves_no_snapshot(kind: Any) -> None:
    """The toy asserts where the tokens of a call begin."""
    llm = engine(max_num_batched_tokens=40, max_prompt_tokens=24, speculate=PromptLookup(k=5, min_hist=1))
    llm.warm_up(kind, progress=False)
    assert llm.stats()["num_snapshots"] == 0
    assert num_cached(llm, LONG) == 0


def test_a_benchmark_fills_states() -> None:
    """It decodes as if the prompt had been computed."""
    llm = engine(max_num_batched_tokens=8)
    fill(llm)
    (seq,) = llm.add(LONG, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    drain(llm)
    assert llm.num_steps == seq.num_outputs == 9


# ---- ranks


@pytest.mark.slow
def test_two_ranks_move_states_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the heads of its shard, and snapshots of them. The other rank learns of the toy by importing it."""
    folder = write_checkpoints(tmp_path, {"Hybrid": Hybrid.tiny()})["Hybrid"]
    monkeypatch.setattr(tensor_parallel, "__name__", recurrent.__name__)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    outputs = []
    sizes = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 20}
    for tp, sp in ((1, "off"), (2, "off"), (2, "on")):
        llm = LLM(folder, tokenizer=ByteTokenizer(), tp=tp, sp=sp, **sizes)
        recorded, by_kind = record(llm), []
        for kind in KINDS:
            params = SamplingParams(max_tokens=9, **kind)
            sequences = [llm.add(prompt, params)[0] for prompt in (LONG[:21], LONG[:33], [5, 4], LONG[:21])]
            drain(llm)
            by_kind += [(seq.output_ids, seq.prompt_logprobs, recorded[seq.id]) for seq in sequences]
        stats = llm.stats()
        assert min(stats["num_states_loaded"], stats["num_preemptions"]) > 0
        assert llm.runner.caches[1]["state"].shape[1] == 24 // tp
        outputs.append(by_kind)
        llm.close()
    for (one, _, alone_logits), (two, scores, logits), (three, sp_scores, sp_logits) in zip(*outputs, strict=True):
        assert one == two == three
        close(torch.stack(list(logits.values())), torch.stack(list(alone_logits.values())))
        assert scores == sp_scores
        assert all(torch.equal(sp_logits[place], logits[place]) for place in logits)


# ---- the test can fail


def leave_what_was_in_the_lane(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.States, "clear", lambda self, lane: None)


def hit_one_block_too_deep(patch: pytest.MonkeyPatch) -> None:
    begin = StatePool.begin

    def deeper(self: StatePool, seq: Sequence) -> None:
        begin(self, seq)
        if 0 < seq.num_computed < len(seq.token_ids) - self.grid:
            seq.num_computed += self.grid

    patch.setattr(StatePool, "begin", deeper)


def draft_across_the_grid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "draft_room", lambda self, start: max(0, GRID - 1 - start % GRID))


def cut_chunks_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "chunk_length", lambda self, seq, length: length)


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
