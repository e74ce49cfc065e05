"""LoRA for each request: logits of a merged model, neighbours, caches, slots and faults."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import merge, write_adapter
from mock_model import alone, record
from one_sequence import close
from schedules import compare, random_settings, requests, run_at_random, tiny

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.models.deepseek import DeepSeek
from whorl.models.qwen3 import Qwen3

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = {
    "dense": (Qwen3, {}, LINEAR),
    "experts": (
        Qwen3,
        {"num_experts": 4},
        ("q_proj", "o_proj", "mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "latent": (DeepSeek, {}, ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "wk", "mlp.experts.down_proj")),
    "head": (Qwen3, {}, ("lm_head",)),
    "tied": (Qwen3, {"tie_word_embeddings": True}, ("lm_head",)),
}
PROMPT = [(7 * i + 3) % 89 + 1 for i in range(21)]


def built(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    model_class, changes, _ = KINDS[kind]
    torch.manual_seed(0)
    return tiny(model_class, dtype, **changes)


def untied(kind: str) -> Any:
    """The model with a head of its own: an adapter of a tied head does not update the embedding."""
    if kind != "tied":
        return built(kind)
    model = built("head")
    model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


def engine(model: Any, **changes: Any) -> LLM:
    return LLM(model=model, device="cpu", block_size=4, num_blocks=64, max_num_seqs=4, **changes)


def logits_of(llm: LLM, prompt: list[int], params: SamplingParams) -> torch.Tensor:
    recorded = record(llm)
    (seq,) = llm.add(prompt, params)
    while llm.has_work:
        llm.step()
    return torch.stack([recorded[seq.id][place] for place in range(seq.num_outputs)])


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_merged_model(kind: str, tmp_path: Path) -> None:
    model = built(kind)
    folder = write_adapter(tmp_path / "a", model, KINDS[kind][2])
    llm = engine(model, lora={"a": str(folder)})
    plain = logits_of(llm, PROMPT, SamplingParams(**GREEDY))
    actual = logits_of(llm, PROMPT, SamplingParams(lora="a", **GREEDY))
    expected = logits_of(engine(merge(untied(kind), folder)), PROMPT, SamplingParams(**GREEDY))
    close(actual[0], expected[0])
    assert float((actual[0] - plain[0]).abs().max()) > 1e-2, "the adapter changes nothing"
    assert torch.equal(plain, logits_of(engine(built(kind)), PROMPT, SamplingParams(**GREEDY))), "the base has changed"


@pytest.mark.parametrize("kind", ["dense", "experts", "latent"])
@pytest.mark.parametrize("seed", range(2))
def test_bits_do_not_depend_on_neighbours(kind: str, seed: int, tmp_path: Path) -> None:
    """Nor on the schedule, on which slot an adapter has, on others being there, nor on prefixes of other adapters."""
    model, rng = built(kind), random.Random(seed)
    folders = {
        name: str(write_adapter(tmp_path / name, model, KINDS[kind][2], seed=i, rank=rank))
        for i, (name, rank) in enumerate((("a", 4), ("b", 8)))
    }
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "lora": lora} if i % 2 else {"temperature": 1.0, "seed": 3, "lora": lora}
        for i, lora in enumerate((None, "a", "b", None, "a"))
    ]
    chosen = list(requests(rng, model.vocab_size, kinds, fewest=4))
    plain = []
    for prompt, params in chosen:
        name = params.lora
        plain.append(alone(model, None, prompt, params, lora={} if name is None else {name: folders[name]}))
    llm = LLM(model=model, settings=random_settings(rng, seqs=4, block_size=4), lora=folders)
    recorded = record(llm)
    for index, seq in run_at_random(rng, llm, chosen):
        compare(*plain[index], seq, recorded.get(seq.id, {}))
