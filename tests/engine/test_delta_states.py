"""Qwen3.5 in the engine: a token's logits are the same however it came to be computed, bit for bit.

Random schedules against plain runs of one sequence, and against the training forward. The models' weights are such that
their states matter: see `lively`.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer, Oracle, alone, record
from one_sequence import close
from schedules import compare, run_at_random, tiny
from state_faults import move_after_the_call, save_under_a_shorter_prefix, skip_the_load

from whorl import nn
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.states import StatePool
from whorl.models.gated_delta import GatedDelta
from whorl.models.qwen3_5 import Qwen3_5Text
from whorl.models.qwen3_next import Qwen3Next
from whorl.ops.gated_delta import CHUNK

LONGEST, BLOCK = 200, 16
SIZES = {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
MODELS: dict[str, Callable[[], Any]] = {
    "dense": lambda: tiny(Qwen3_5Text, **SIZES),
    "experts_bfloat16": lambda: tiny(Qwen3_5Text, torch.bfloat16, num_experts=8, **SIZES),
    "next": lambda: tiny(Qwen3Next, **SIZES),
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 1.0, "seed": 3},
]


def lively(model: Any) -> Any:
    """Values, keys and gates large enough that what a token reads from the state decides what follows.

    The decay rates of random heads keep 0.3 to 0.99 of a state over 64 tokens.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "in_proj.weight" in name or "conv1d" in name:
                parameter.mul_(2)
            elif "linear_attn.out_proj" in name:
                parameter.mul_(4)
    return model


_MADE: dict[str, Any] = {}


class Setting:
    """A model, requests, and what each gives when it runs alone."""

    def __init__(self, name: str) -> None:
        self.model, rng = lively(MODELS[name]()), random.Random(5)
        common = [rng.randrange(97) for _ in range(140)]
        self.requests: list[tuple[list[int], SamplingParams]] = []
        for shared in (0, 50, 64, 100, 128, 140):
            own = [rng.randrange(97) for _ in range(rng.randint(1, 20))]
            params = SamplingParams(max_tokens=rng.randint(4, 24), ignore_eos=True, **rng.choice(KINDS))
            self.requests.append((common[:shared] + own, params))
        self.plain = [alone(self.model, None, *request) for request in self.requests]
        for seq, _ in self.plain[2:4]:  # prompts that resend what was generated
            request = seq.token_ids[:-1], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            self.requests.append(request)
            self.plain.append(alone(self.model, None, *request))


def setting(name: str) -> Setting:
    if name not in _MADE:
        _MADE[name] = Setting(name)
    return _MADE[name]  # type: ignore[no-any-return]


def random_engine(rng: random.Random, prepared: Setting) -> LLM:
    seqs, block_size = rng.choice((1, 3, 4)), rng.choice((4, 16, 64))
    least = -(-LONGEST // block_size)
    texts = [seq.token_ids for seq, _ in prepared.plain]
    drafts = [Oracle(texts, k=rng.randint(1, 20), wrong=rng.randint(2, 9)), PromptLookup(k=3, min_hist=1, guard=False)]
    return LLM(
        model=prepared.model,
        device="cpu",
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice((seqs + CHUNK - 1, seqs + CHUNK + 9, 200)),
        block_size=block_size,
        num_blocks=rng.choice((least, least + least // 2, least + 3 * least // 4, 4 * least)),
        max_model_len=LONGEST,
        num_snapshots=rng.choice((2, 2, 16)),
        snapshot_tokens=rng.choice((CHUNK, 4096)),
        use_prefix_cache=rng.random() < 0.9,
        speculate=rng.choice(drafts) if rng.random() < 0.6 else None,
        run_ahead=rng.random() < 0.7,
        draft_length="fixed",
    )


def check(name: str, seed: int) -> Counter[str]:
    """One random schedule; what it went through."""
    rng, prepared = random.Random(seed), setting(name)
    llm = random_engine(rng, prepared)
    recorded = record(llm)
    for index, seq in run_at_random(rng, llm, prepared.requests):
        plain, logits = prepared.plain[index]
        compare(plain, logits, seq, recorded.get(seq.id, {}))
        assert seq.prompt_logprobs == plain.prompt_logprobs[: len(seq.prompt_logprobs)]
    assert llm.pool.num_used == 0
    return Counter(llm.stats()) + Counter(num_rejected=llm.num_drafted - llm.num_accepted)


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(100, 130), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["dense", "experts_bfloat16", pytest.param("next", marks=pytest.mark.slow)])
def test_logits_do_not_depend_on_the_schedule(name: str, seeds: range) -> None:
    seen = sum((check(name, seed) for seed in seeds), Counter())
    for event in (
        "num_tokens_hit",
        "num_states_saved",
        "num_states_loaded",
        "num_accepted",
        "num_rejected",
    ):
        assert seen[event] > 0, f"no {event} in these schedules: {seen}"


@pytest.mark.parametrize("num_snapshots", [0, 2])
def test_the_preempted_go_on_with_the_same_bits(num_snapshots: int) -> None:
    """In the middle of a prompt, of a chunk's rows, and right behind a multiple of 64."""
    prepared = setting("dense")
    for index, steps in ((3, 1), (3, 2), (2, 7), (4, 3)):
        seq, logits = prepared.plain[index]
        sizes = {"block_size": BLOCK, "num_blocks": 32, "max_num_seqs": 2, "max_num_batched_tokens": CHUNK + 1}
        llm = LLM(model=prepared.model, device="cpu", num_snapshots=num_snapshots, run_ahead=False, **sizes)
        recorded = record(llm)
        (again,) = llm.add(*prepared.requests[index])
        for _ in range(steps):
            llm.step()
        llm.scheduler.preempt_all()
        while llm.has_work:
            llm.step()
        assert again.num_preempted == 1
        compare(seq, logits, again, recorded[again.id])


@pytest.mark.parametrize("name", ["dense", "experts_bfloat16"])
def test_a_trainer_has_the_same_bits(name: str) -> None:
    """Packed with others, and each token of a prompt and of an answer."""
    prepared = setting(name)
    sequences = [seq.token_ids for seq, _ in prepared.plain[1:4]]
    llm = LLM(
        model=prepared.model, device="cpu", block_size=BLOCK, num_blocks=64, max_num_seqs=3, max_num_batched_tokens=100
    )
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = llm.generate(sequences, params, progress=False)
    engine = [each.logprob for output in outputs for each in output.prompt_logprobs]
    with torch.no_grad():
        trained = prepared.model.logprobs(nn.pack(sequences, "cpu"))
    assert engine == trained.tolist()


def test_the_state_matters() -> None:
    """Without it the greedy text is another one within three tokens, so these tests would see a wrong state."""
    model = setting("dense").model
    decays = model.decoder.layers[0].mixer.decays
    kept = (-CHUNK * decays.A_log.exp() * torch.nn.functional.softplus(decays.dt_bias)).exp()
    assert float(kept.min()) > 0.3
    assert float(kept.max()) < 0.995
    prompt, params = setting("dense").requests[3][0], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    prompt = (prompt * 2)[: 2 * CHUNK]
    outputs = []
    for forgets in (False, True):
        llm = LLM(model=model, device="cpu", block_size=BLOCK, num_blocks=64, run_ahead=False)
        (seq,) = llm.add(prompt, params)
        llm.step()
        if forgets:
            assert llm.runner.states is not None
            llm.runner.states.clear(seq.lane)
        while llm.has_work:
            llm.step()
        outputs.append(seq.output_ids)
    assert outputs[0] != outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_ranks_move_states_together(name: str, tmp_path: Path) -> None:
    """Two ranks have the same bits with sequence parallelism and without, after hits and preemptions too."""
    more = {"num_experts": 4} if name == "experts" else {}
    folder = write_checkpoints(tmp_path, {name: Qwen3_5Text.tiny(**SIZES, **more)})[name]
    long, outputs = [(5 * i + 2) % 91 for i in range(140)], []
    for tp, sp in ((1, "off"), (2, "off"), (2, "on")):
        sizes = {"block_size": BLOCK, "num_blocks": 16, "max_num_seqs": 3, "dtype": "float32", "num_snapshots": 2}
        llm = LLM(folder, tokenizer=ByteTokenizer(), device="cpu", tp=tp, sp=sp, max_num_batched_tokens=70, **sizes)
        recorded, answers = record(llm), []
        for _ in range(2):
            params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
            sequences = [llm.add(prompt, params)[0] for prompt in (long, long[:70], long[:100])]
            while llm.has_work:
                llm.step()
            answers += [(seq.output_ids, recorded[seq.id]) for seq in sequences]
        assert llm.stats()["num_states_loaded"] > 0
        outputs.append(answers)
        llm.close()
    for (one, alone_logits), (two, logits), (three, sp_logits) in zip(*outputs, strict=True):
        assert one == two == three
        close(torch.stack(list(logits.values())), torch.stack(list(alone_logits.values())))
        assert all(torch.equal(sp_logits[place], logits[place]) for place in logits)


@pytest.mark.parametrize("kind", ["full", "short"])
def test_a_warm_up_leaves_nothing(kind: Any) -> None:
    model, prompt = setting("dense").model, setting("dense").requests[3]
    llm = LLM(model=model, device="cpu", block_size=BLOCK, num_blocks=16, max_num_seqs=3, max_num_batched_tokens=70)
    llm.warm_up(kind, progress=False)
    assert llm.stats()["num_snapshots"] == 0
    (seq,) = llm.add(*prompt)
    while llm.has_work:
        llm.step()
    assert seq.output_ids == setting("dense").plain[3][0].output_ids


# ---- the test can fail


def keep_the_rows_of_another(patch: pytest.MonkeyPatch) -> None:
    """The convolution's last inputs before the snapshot are lost."""
    load = nn.States.load

    def without_tail(self: nn.States, lane: int, snapshot: int) -> None:
        load(self, lane, snapshot)
        for cache in self.caches:
            cache["tail"][lane].zero_()

    patch.setattr(nn.States, "load", without_tail)


def keep_states_of_half_a_chunk(patch: pytest.MonkeyPatch) -> None:
    """The engine takes the state at the last multiple of 64 for that at the last multiple of 32."""
    spec = GatedDelta.cache_spec
    patch.setattr(GatedDelta, "cache_spec", lambda self, dtype: replace(spec(self, dtype), grid=CHUNK // 2))


def draft_across_the_grid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "draft_room", lambda self, start: 15)


def round_the_state_twice(patch: pytest.MonkeyPatch) -> None:
    """A state that is stored in 16 bits when its chunk ends."""
    from whorl.ops.gated_delta import lanes

    store = lanes._store

    def narrow(chunk: Any, stored: Any, *where: Any) -> None:
        store(chunk, stored, *where)
        stored.state.copy_(stored.state.bfloat16())

    patch.setattr(lanes, "_store", narrow)


FAULTS = [
    skip_the_load,
    keep_the_rows_of_another,
    save_under_a_shorter_prefix,
    keep_states_of_half_a_chunk,
    draft_across_the_grid,
    move_after_the_call,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_shows(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    setting("dense")
    fault(monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(40):
            check("dense", seed)


def test_a_rounded_state_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = setting("dense")
    round_the_state_twice(monkeypatch)
    seq, logits = prepared.plain[3]
    _, others = alone(prepared.model, None, *prepared.requests[3])
    assert not torch.equal(logits[seq.num_outputs - 1], others[seq.num_outputs - 1])
