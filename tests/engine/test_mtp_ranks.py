"""Multi-token prediction on two ranks: each is a process with its shard of the model and of the layer, over gloo."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mock_model import ByteTokenizer, Logits, record
from safetensors.torch import save_file
from test_draft_model import misfit
from test_mtp import SIZES, make_pair, run_whole

from whorl import nn
from whorl.engine import launch, sampler
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.speculate import Draft, Proposer
from whorl.engine.speculate.mtp import MTP
from whorl.models.deepseek import DeepSeek
from whorl.ops.sample import probabilities

HEADS = 5  # not shared evenly by two ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a target and a layer that often agree."""
    folder = tmp_path_factory.mktemp("pair")
    tensors = {}
    for model in make_pair(num_attention_heads=HEADS):
        tensors |= {name: part.tensor() for name, part in nn.destinations(model).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(DeepSeek.tiny(**SIZES, num_attention_heads=HEADS)))
    return folder


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(tp: int, proposer: Proposer | None = None, **options: Any) -> LLM:
        for llm in made:
            llm.close()
        options = {"max_num_seqs": 4, "block_size": 4, "num_blocks": 12, "max_model_len": 40} | options
        options |= {"tokenizer": ByteTokenizer(), "device": "cpu", "dtype": "float32", "draft_length": "fixed"}
        made.append(LLM(folder, tp=tp, speculate=proposer, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


class Recorded(MTP):
    """Keeps what it drafted, and behind how many tokens."""

    def __init__(self, k: int) -> None:
        super().__init__(k=k)
        self.drafts: list[tuple[int, list[int]]] = []

    def propose(self, sequences: list[Sequence], k: int) -> list[Draft]:  # type: ignore[override]
        drafts = super().propose(sequences, k)
        self.drafts += [(len(seq.token_ids), draft.token_ids) for seq, draft in zip(sequences, drafts, strict=True)]
        return drafts


PROMPTS = [[5, 4, 3, 8], [60, 7, 7, 12, 9, 31, 2, 2, 40], [1], list(range(20, 33))]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalised": {"temperature": 0, "frequency_penalty": 0.7},  # drafts wait for the host, token by token
    "sampled": {"temperature": 0.8, "seed": 5, "top_k": 20},
}


def outputs(llm: LLM) -> dict[str, list[tuple[list[int], Logits]]]:
    """Tokens and logits of each kind of request, four at a time in a cache that is too small for them."""
    recorded, by_kind = record(llm), {}
    for kind, values in KINDS.items():
        params = SamplingParams(max_tokens=14, ignore_eos=True, **values)
        added = [llm.add(prompt, params)[0] for prompt in PROMPTS]
        while llm.has_work:
            llm.step()
        by_kind[kind] = [(seq.output_ids, recorded[seq.id]) for seq in added]
    assert llm.pool.num_used == 0
    return by_kind


@pytest.mark.slow
def test_two_ranks(engine: Callable[..., LLM]) -> None:
    """Greedy output has the bits of plain decoding on two ranks; drafts, and what is sampled, are those of one rank."""
    plain = outputs(engine(2))
    proposer, alone = Recorded(k=3), Recorded(k=3)
    llm = engine(2, proposer)
    drafted, one_rank = outputs(llm), outputs(engine(1, alone))
    for kind in ("greedy", "penalised"):
        for (expected, logits), (actual, actual_logits) in zip(plain[kind], drafted[kind], strict=True):
            assert actual == expected
            for place in range(len(expected)):
                assert torch.equal(actual_logits[place], logits[place]), f"{kind}: logits of output {place} differ"
    assert [ids for ids, _ in drafted["sampled"]] == [ids for ids, _ in one_rank["sampled"]]
    assert proposer.drafts == alone.drafts
    assert proposer.draft_head.parts.self_attn.num_heads == 2  # type: ignore[union-attr]
    stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["num_accepted"] > 40, stats
    assert stats["num_drafted"] - stats["num_accepted"] > 40, stats


@pytest.mark.slow
def test_sampled_outputs_have_the_targets_distribution(engine: Callable[..., LLM]) -> None:
    """Three tokens with three outcomes each, two of them drafted, and a fourth: a last token is never drafted."""
    prompt, proposer = [5, 4, 3, 8], Recorded(k=2)
    llm = engine(2, proposer, max_num_seqs=64, num_blocks=200)
    params = SamplingParams(temperature=1.0, top_k=3, seed=1, max_tokens=4, ignore_eos=True, n=600)
    drawn = [tuple(output.token_ids[:3]) for output in llm.generate([prompt], params, progress=False)]
    target, _ = make_pair(num_attention_heads=HEADS)
    filters = sampler._filters([params], torch.device("cpu"))
    expected = {(): 1.0}
    for _ in range(3):
        longer = {}
        for before, share in expected.items():
            logits = target.logits(run_whole(target, [*prompt, *before])[-1:])
            for token, probability in enumerate(probabilities(logits, **filters)[0].tolist()):
                if probability:
                    longer[*before, token] = share * probability
        expected = longer
    assert len(expected) == 27
    assert set(drawn) <= set(expected)
    counts = torch.tensor([drawn.count(outcome) for outcome in expected])
    assert misfit(counts, torch.tensor(list(expected.values()))) < 1, (counts, expected)
    assert llm.num_accepted > 100
    assert llm.num_drafted - llm.num_accepted > 100


@pytest.mark.slow
def test_its_cache_takes_its_part_of_the_memory(engine: Callable[..., LLM]) -> None:
    """Of every rank's: latents are not sharded. The default draft length is measured on all ranks together."""
    target, layer = make_pair(num_attention_heads=HEADS)
    token = sum(spec.token_bytes for spec in (*target.cache_specs(), *layer.cache_specs()))
    proposer = MTP()
    llm = engine(2, proposer, num_blocks=None, memory=10 * 4 * token + 7)
    assert llm.pool.num_blocks == 10
    assert proposer.drafter.runner.caches[0].latent.shape[:2] == (10, 4)
    assert proposer.cost(seconds=0.0).keys() == {1, 4}


def test_refusals(engine: Callable[..., LLM], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any rank starts."""
    monkeypatch.setattr(launch, "_spawn", lambda *_: pytest.fail("a rank was started"))
    _, layer = make_pair(num_attention_heads=HEADS)
    with pytest.raises(ValueError, match="pass its path, so that every rank can load it"):
        engine(2, MTP(layer=layer))

    class Other(MTP):
        shared_path = Proposer.shared_path

    with pytest.raises(ValueError, match=r"Other: .* it has no `shared_path`; use tp=1"):
        engine(2, Other())
    (folder / "config.json").write_text(json.dumps(DeepSeek.tiny(**SIZES | {"num_nextn_predict_layers": 0})))
    with pytest.raises(ValueError, match="has no layer of multi-token prediction"):
        engine(2, MTP())
