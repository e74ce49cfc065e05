"""Draft models: greedy output bit for bit, sampled output of the target's distribution, a cache that keeps in step."""

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from mock_model import ByteTokenizer, MockModel, alone, record
from schedules import LONGEST, MODELS, compare, random_settings, requests, run_at_random, seeded
from torch import Tensor

from whorl.engine import sampler
from whorl.engine.call import Sample
from whorl.engine.llm import LLM
from whorl.engine.sampler import Sampler
from whorl.engine.scheduler import Chunk
from whorl.engine.sequence import SamplingParams
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.speculate import Draft, DraftLength, one_by_one
from whorl.engine.speculate.draft_model import DraftModel
from whorl.nn import KVCache, PagedKV, Step
from whorl.ops.sample import _cut, _near, probabilities

# ---- greedy: the target's own output, bit for bit


def disturbed(name: str, amount: float) -> Any:
    """The target with noise in its weights: it guesses right sometimes."""
    torch.manual_seed(0)
    model = MODELS[name]()
    torch.manual_seed(1)
    with torch.inference_mode():
        for weight in [model.head] if name == "mock" else model.parameters():
            weight += amount * weight.std() * torch.randn_like(weight)
    return model


GREEDY: list[dict[str, Any]] = [{}, {"frequency_penalty": 0.7, "repetition_penalty": 1.2}, {"min_tokens": 3}]


class Case:
    """A target, drafts of different quality, greedy requests and what each gives alone."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = MODELS[name]()
        self.tokenizer = ByteTokenizer() if name == "mock" else None
        self.drafts = [self.model, disturbed(name, 0.03), disturbed(name, 0.3)]
        vocab_size = 200 if name == "mock" else self.model.vocab_size
        kinds = [{"temperature": 0, **kind} for kind in GREEDY * 2]
        self.requests = list(requests(random.Random(3), vocab_size, kinds, fewest=6))
        self.plain = [alone(self.model, self.tokenizer, *request) for request in self.requests]
        if self.tokenizer is not None:
            self._add_stops()

    def _add_stops(self) -> None:
        """Requests that end in the middle of an answer, often in the middle of a draft."""
        for (prompt, _), (seq, _) in zip(list(self.requests), list(self.plain), strict=True):
            text = seq.text.value
            request = prompt, SamplingParams(temperature=0, max_tokens=12, stop=(text[2:4], text[5:6]))
            self.requests.append(request)
            self.plain.append(alone(self.model, self.tokenizer, *request))


_CASES: dict[str, Case] = {}


def case(name: str) -> Case:
    if name not in _CASES:
        _CASES[name] = Case(name)
    return _CASES[name]


def schedule(rng: random.Random, prepared: Case) -> tuple[LLM, DraftModel]:
    """An engine with a draft model, both caches sometimes too small for all."""
    seqs, block_size = rng.choice((1, 4, 6)), rng.choice((1, 2, 4, 5))
    own_size = rng.choice((1, 3, 4))
    proposer = DraftModel(
        model=rng.choice(prepared.drafts),
        tokenizer=prepared.tokenizer,
        k=rng.randint(1, 6),
        device="cpu",
        block_size=own_size,
        num_blocks=rng.choice((20, LONGEST, 8 * LONGEST)) // own_size,
        max_num_batched_tokens=rng.choice((3, 64)),
    )
    llm = LLM(
        model=prepared.model,
        tokenizer=prepared.tokenizer,
        settings=random_settings(rng, seqs=seqs, block_size=block_size),
        speculate=proposer,
        draft_length="fixed",
    )
    return llm, proposer


def check(name: str, seed: int) -> Counter[str]:
    rng, prepared = random.Random(seed), case(name)
    llm, proposer = schedule(rng, prepared)
    recorded = record(llm)
    for index, seq in run_at_random(rng, llm, prepared.requests):
        compare(*prepared.plain[index], seq, recorded.get(seq.id, {}))
    assert llm.pool.num_used == 0
    proposer.propose([], 1)
    assert proposer.pool.num_used == 0, "finished and aborted sequences keep no blocks of the draft model"
    seen = Counter(llm.stats()) + Counter(num_rejected=llm.num_drafted - llm.num_accepted)
    return seen + Counter(num_draft_hits=proposer.pool.num_hit)


MANY = seeded(range(100, 600), range(100, 160), pytest.mark.slow)


@pytest.mark.parametrize(("name", "seeds"), [*seeded(range(16), range(4)), *MANY])
def test_greedy_output_is_the_targets(name: str, seeds: range) -> None:
    seen = sum((check(name, seed) for seed in seeds), Counter())
    for event in ("num_preemptions", "num_tokens_hit", "num_accepted", "num_rejected", "num_draft_hits"):
        assert seen[event] > 1, f"hardly any {event} in these schedules: {seen}"


# ---- the draft model's own cache


class Checked(DraftModel):
    """Compares what it drafts with what its model would say from an empty cache."""

    num_checked = 0

    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        drafts = super().propose(sequences, k)
        for seq, draft in zip(sequences, drafts, strict=True):
            if draft.token_ids:
                expected, _ = alone(self.model, None, seq.token_ids, SamplingParams(temperature=0, max_tokens=k))
                assert draft.token_ids == expected.output_ids[: len(draft.token_ids)]
                self.num_checked += 1
        return drafts


class Wandering(DraftLength):
    """Any length, often none: the target goes on without the draft model, which has old guesses to forget."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__({1: 1.0})
        self.rng = rng

    def choose(self, k: int, num_sequences: int) -> int:
        return self.rng.choice((0, 0, 1, k))


def run_checked(seed: int) -> int:
    """Drafts of a whole random schedule are what the draft model says of the target's tokens, nothing left behind."""
    rng = random.Random(seed)
    target, model = MockModel(vocab_size=64), MockModel(vocab_size=64)
    model.head = target.head + 0.3 * torch.randn(target.head.shape, generator=torch.Generator().manual_seed(seed))
    proposer = Checked(
        model=model, k=4, device="cpu", block_size=rng.choice((1, 3, 4)), num_blocks=rng.choice((60, 200))
    )
    llm = LLM(
        model=target,  # type: ignore[arg-type]
        device="cpu",
        max_num_seqs=3,
        block_size=2,
        num_blocks=30,
        max_model_len=LONGEST,
        speculate=proposer,
        draft_length=Wandering(rng),
    )
    common = [rng.randrange(64) for _ in range(8)]
    for _ in range(6):
        own = [rng.randrange(64) for _ in range(rng.randint(1, 9))]
        llm.add(common + own, SamplingParams(temperature=0, max_tokens=rng.randint(4, 20)))
    while llm.has_work:
        llm.step()
    return proposer.num_checked


def test_the_draft_models_cache_keeps_in_step() -> None:
    assert sum(run_checked(seed) for seed in range(6)) > 50


def forget_rollback(patch: pytest.MonkeyPatch) -> None:
    from whorl.engine.speculate.draft_model import _Mirror

    sync = _Mirror.sync

    def wrong(self: Any) -> None:
        before = self.copy.num_computed
        sync(self)
        self.copy.num_computed = min(before, len(self.copy.token_ids) - 1)

    patch.setattr(_Mirror, "sync", wrong)


def forget_a_row(patch: pytest.MonkeyPatch) -> None:
    """Only the newest token is computed, the one before it not."""
    pending = one_by_one.pending

    def wrong(seq: Seq) -> Chunk:
        if seq.num_computed >= seq.prompt_len:
            seq.num_computed = seq.length - 1
        return pending(seq)

    patch.setattr(one_by_one, "pending", wrong)


@pytest.mark.parametrize("fault", [forget_rollback, forget_a_row], ids=lambda f: f.__name__)
def test_a_cache_out_of_step_shows(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(12):
            run_checked(seed)


def test_a_sequence_that_does_not_fit_gets_no_draft() -> None:
    proposer = DraftModel(model=MockModel(), k=2, device="cpu", block_size=4, num_blocks=5)
    llm = LLM(model=MockModel(), device="cpu", num_blocks=64, speculate=proposer, draft_length="fixed")  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.generate([[1, 2, 3], [5] * 30], params, progress=False)
    assert [output.num_drafted > 0 for output in outputs] == [True, False]


# ---- another tokenizer


class Renamed(ByteTokenizer):
    def token(self, token_id: int) -> str:
        return "other" if token_id == 65 else super().token(token_id)


class Longer(ByteTokenizer):
    def __len__(self) -> int:
        return super().__len__() + 1


@pytest.mark.parametrize(
    ("tokenizer", "difference"), [(Renamed(), "token 65 is 'other' against"), (Longer(), "260 tokens against 259")]
)
def test_another_tokenizer_is_refused(tokenizer: ByteTokenizer, difference: str) -> None:
    proposer = DraftModel(model=MockModel(), tokenizer=tokenizer, device="cpu", num_blocks=8)
    with pytest.raises(ValueError, match=difference):
        LLM(model=MockModel(), tokenizer=ByteTokenizer(), device="cpu", num_blocks=8, speculate=proposer)  # type: ignore[arg-type]
    same = DraftModel(model=MockModel(), tokenizer=ByteTokenizer(), device="cpu", num_blocks=8)
    LLM(model=MockModel(), tokenizer=ByteTokenizer(), device="cpu", num_blocks=8, speculate=same)  # type: ignore[arg-type]


def test_another_vocabulary_is_refused_where_there_are_no_tokenizers() -> None:
    proposer = DraftModel(model=MockModel(vocab_size=50), device="cpu", num_blocks=8)
    with pytest.raises(ValueError, match="50 tokens against 264"):
        LLM(model=MockModel(), device="cpu", num_blocks=8, speculate=proposer)  # type: ignore[arg-type]


# ---- sampled: the target's distribution

VOCAB = 8
DRAWS = 20_000
TARGET = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -8.0])
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8, "temperature": 0.8},
    "min_p": {"min_p": 0.15},
    "all": {"top_k": 6, "top_p": 0.95, "min_p": 0.02, "temperature": 0.9},
    "penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {6: 3.0, 0: -math.inf}},
}
DRAFTS = {
    "near": TARGET + torch.tensor([0.3, -0.3, 0.2, 0.0, -0.4, 0.5, 0.1, 0.0]),
    "far": TARGET.flip(0),
    "narrow": torch.tensor([0.0, 3.0, 0.0, *[-math.inf] * 5]),
    "short": TARGET[:5],  # a table that ends before the target's
    "equal": TARGET,
}


def limit(cells: int) -> float:
    """Of chi-square with `cells` - 1 degrees of freedom: exceeded once in 30000 (Wilson and Hilferty)."""
    freedom = max(1, cells - 1)
    return freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


def misfit(counts: Tensor, expected: Tensor) -> float:
    """Chi-square over its limit; infinite where something came that cannot."""
    if bool((counts[expected == 0] > 0).any()):
        return math.inf
    counts, expected = counts[expected > 0].double(), expected[expected > 0].double()
    expected = expected / expected.sum() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum()) / limit(len(counts))


@functools.lru_cache(2)  # one takes 100 MB
def rows_of(way: str, num: int) -> tuple[SamplingParams, list[Sample]]:
    params = SamplingParams(**{"temperature": 1.0, **WAYS[way]})
    rows = []
    for seed in range(num):
        seq = Seq([3, 1], params, max_len=99, seed=seed)
        for token in (0, 0, 4):
            seq.append(token)
        rows.append(Sample(Chunk(seq, 1), 0, seq.num_outputs))
    return params, rows


def draws(way: str, draft: str, num: int = DRAWS) -> tuple[Tensor, Tensor, float]:
    """What comes out of `num` drafts of one token, the target's distribution, and the share accepted."""
    model: Any = None
    params, rows = rows_of(way, num)
    target = Sampler(model, VOCAB)
    for row in rows:
        row.chunk.draft, row.chunk.probs = [], None
    ids, probs = Sampler(model, len(DRAFTS[draft])).draw(DRAFTS[draft].expand(num, -1), rows)
    for row, token, each in zip(rows, ids.tolist(), probs[:, None], strict=True):
        row.chunk.draft, row.chunk.probs = [token], each
    drawn = target.sample(TARGET.expand(num, -1), rows)
    adjusted = target._adjuster.adjust(TARGET[None], rows[:1])
    right = probabilities(adjusted, **sampler._filters([params], adjusted.device))[0]
    return drawn.bincount(minlength=VOCAB), right, float((drawn == ids).float().mean())


_QUICK = ("plain", "all", "penalties")


@pytest.mark.parametrize("way", [w if w in _QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WAYS])
def test_the_distribution_is_the_targets(way: str) -> None:
    counts, right, share = draws(way, "near")
    assert misfit(counts, right) < 1, (counts, right * DRAWS)
    assert 0.5 < share < 1


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_distribution_does_not_depend_on_the_draft(draft: str) -> None:
    counts, right, share = draws("plain", draft)
    assert misfit(counts, right) < 1, (counts, right * DRAWS)
    overlap = torch.minimum(right, torch.nn.functional.pad(DRAFTS[draft].softmax(0), (0, VOCAB - len(DRAFTS[draft]))))
    assert share == pytest.approx(float(overlap.sum()), abs=0.015), "as much is accepted as can be"


BIASES: dict[str, tuple[str, Any]] = {
    "swapped": ("_is_accepted", lambda p, q, uniform: uniform * p < q),
    "always": ("_is_accepted", lambda p, q, uniform: p > -1),
    "never": ("_is_accepted", lambda p, q, uniform: p < -1),
    "no residual": ("_residual", lambda p, q: p),
    "residual of the wrong sign": ("_residual", lambda p, q: (q - p).clamp_min(0)),
    "the draft's noise again": ("_DRAFT", 0),
    "acceptance by the draft's noise": ("_ACCEPT", sampler._DRAFT),
}


@pytest.mark.parametrize("bias", BIASES)
def test_a_planted_bias_shows(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, *BIASES[bias])
    misfits = []
    for draft in ("near", "far"):
        counts, right, _ = draws("plain", draft, 6000)
        misfits.append(misfit(counts, right))
    assert max(misfits) > 1, misfits


def test_probabilities_keep_what_sampling_keeps() -> None:
    rng = random.Random(4)
    for seed in range(200):
        torch.manual_seed(seed)
        logits = (torch.randn(1, 40) * rng.choice((0.5, 2, 6))).round(decimals=rng.choice((0, 1, 6)))
        k, p, m, t = rng.choice((0, 1, 5, 40, 99)), rng.choice((1.0, 0.9, 0.3, 1e-6)), rng.choice((0.0, 0.1, 1.0)), 0.7
        sigmas = torch.tensor([rng.choice((0.0, 0.3, 1.5))])
        actual = probabilities(logits, *(torch.tensor([value]) for value in (t, k, p, m)), sigmas)
        expected = _cut((_near(logits, sigmas)[0] - logits.max()) / t, k, p, m).softmax(0)
        assert torch.equal(actual[0] > 0, expected > 0), (k, p, m)
        torch.testing.assert_close(actual[0], expected)


# ---- the same through the engine


class Chain:
    """A token's successor depends on the token alone, so that every distribution is known."""

    config, dtype, max_length = None, torch.float32, 512

    def __init__(self, seed: int, size: int = 4) -> None:
        self.vocab_size = size
        self.table = 1.5 * torch.randn(size, size, generator=torch.Generator().manual_seed(seed))

    def cache_specs(self) -> list[PagedKV]:
        return [PagedKV(num_kv_heads=1, head_dim=1, dtype=self.dtype)]

    def forward(self, step: Step, caches: Sequence[KVCache]) -> Tensor:
        return step.token_ids[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0].long()]


def transitions(k: int, num: int = 1000, length: int = 20, **params: Any) -> tuple[Tensor, Tensor, LLM]:
    target: Any = Chain(1)
    proposer = DraftModel(model=Chain(2), k=k, device="cpu", block_size=4, num_blocks=4096)  # type: ignore[arg-type]
    llm = LLM(
        model=target,
        device="cpu",
        max_num_seqs=256,
        max_model_len=64,
        block_size=4,
        num_blocks=4096,
        speculate=proposer,
        draft_length="fixed",
        seed=7,
    )
    outputs = llm.generate([[1]] * num, SamplingParams(max_tokens=length, **params), progress=False)
    counts = torch.zeros(4, 4)
    for output in outputs:
        for before, after in zip([1, *output.token_ids], output.token_ids, strict=False):
            counts[before, after] += 1
    filters = sampler._filters([SamplingParams(**params)] * 4, target.table.device)
    return counts, probabilities(target.table, **filters), llm


FILTERED = {"temperature": 0.8, "top_k": 3, "top_p": 0.9}


@pytest.mark.slow
@pytest.mark.parametrize("params", [{"temperature": 1.0}, FILTERED], ids=str)
def test_sequences_have_the_targets_distribution(params: dict[str, Any]) -> None:
    counts, right, llm = transitions(3, **params)
    assert counts.sum() >= 20_000
    assert llm.num_accepted > 1000
    assert llm.num_drafted - llm.num_accepted > 1000
    for before in range(4):
        assert misfit(counts[before], right[before]) < 1, (counts, right)


@pytest.mark.slow
def test_a_planted_bias_shows_in_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_residual", lambda p, q: p)
    counts, right, _ = transitions(3, num=500, temperature=1.0)
    assert max(misfit(counts[before], right[before]) for before in range(4)) > 1


@pytest.mark.parametrize("params", [{"temperature": 1.0}, FILTERED, {"repetition_penalty": 1.3}], ids=str)
def test_a_seed_gives_the_text_of_plain_decoding(params: dict[str, Any]) -> None:
    """Whatever the draft model, its length and its neighbours: the drafts share the noise of the target's tokens."""

    def tokens(k: int | None, draft: int = 1) -> tuple[list[list[int]], LLM]:
        model, proposer = Chain(1), None
        if k is not None:
            proposer = DraftModel(model=Chain(draft), k=k, device="cpu", num_blocks=64)  # type: ignore[arg-type]
        llm = LLM(model=model, device="cpu", num_blocks=256, speculate=proposer, draft_length="fixed")  # type: ignore[arg-type]
        requests = [SamplingParams(max_tokens=40, seed=seed, n=2, **params) for seed in (5, 6)]
        return [output.token_ids for output in llm.generate([[1], [2]], requests, progress=False)], llm

    plain, _ = tokens(None)
    assert len({tuple(text) for text in plain}) == 4
    for k, draft in ((1, 2), (3, 2), (4, 1)):
        text, llm = tokens(k, draft)
        assert text == plain
        assert llm.num_drafted > 20
        share = llm.num_accepted / llm.num_drafted
        assert share > 0.2 if draft == 2 else share == 1  # the same model, the same noise: the same tokens


def test_the_same_seed_gives_the_same_text() -> None:
    def tokens(seed: int) -> list[int]:
        proposer = DraftModel(model=Chain(2), k=3, device="cpu", num_blocks=64)  # type: ignore[arg-type]
        llm = LLM(model=Chain(1), device="cpu", num_blocks=64, speculate=proposer, draft_length="fixed")  # type: ignore[arg-type]
        return llm.generate([1], SamplingParams(max_tokens=30, seed=seed), progress=False)[0].token_ids

    assert tokens(5) == tokens(5) != tokens(6)
