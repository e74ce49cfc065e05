"""Adapters over ranks: each has its shard of an update, and they load it together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from lora_files import write_adapter
from mock_model import ByteTokenizer, record
from one_sequence import close

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import load_model
from whorl.models.qwen3 import Qwen3

PROMPT = [(7 * i + 3) % 89 + 1 for i in range(13)]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head")
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "dense": ({}, LINEAR, {"lora_bias": True}),
    "experts": ({"num_experts": 4}, ("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_logits_of_one(kind: str, tmp_path: Path) -> None:
    """Of an adapter that is there from the start, of one that comes later, and of the prompt's scores."""
    changes, kinds, fields = KINDS[kind]
    (path,) = write_checkpoints(tmp_path, {"m": Qwen3.tiny(hidden_size=96, intermediate_size=160, **changes)}).values()
    model = load_model(path, device="cpu", dtype="float32", progress=False)
    folders = [write_adapter(tmp_path / name, model, kinds, seed=i, **fields) for i, name in enumerate("ab")]
    options: dict[str, Any] = {"tokenizer": ByteTokenizer(), "device": "cpu", "block_size": 4, "num_blocks": 64}
    options |= {"lora": {"a": str(folders[0])}, "max_num_seqs": 4, "dtype": "float32"}
    results = []
    for ranks in (1, 2):
        llm = LLM(path, tp=ranks, **options)
        try:
            results.append(_results(llm, folders[1]))
        finally:
            llm.close()
    for one, two in zip(*results, strict=True):
        close(two, one, 1e-4)


def _results(llm: LLM, later: Path) -> list[torch.Tensor]:
    """First logits of the base, of `a` and of `b`, alone and together, and the scores of a prompt."""
    recorded = record(llm)
    llm.load_lora("b", later)
    runs = [["a"], [None], ["b"], ["b", "a", None]]
    by_name: dict[str | None, list[torch.Tensor]] = {}
    for names in runs:
        sequences = [
            llm.add(PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, lora=n, prompt_logprobs=0))[0]
            for n in names
        ]
        while llm.has_work:
            llm.step()
        for name, seq in zip(names, sequences, strict=True):
            scores = torch.tensor([each.logprob for each in seq.prompt_logprobs])
            logits = torch.stack([recorded[seq.id][i] for i in range(3)])
            by_name.setdefault(name, []).append(torch.cat([scores, logits.flatten()]))
    for name, (alone, together) in by_name.items():
        assert torch.equal(alone, together), f"{name}: others change its bits"
    assert not torch.equal(by_name["a"][0], by_name["b"][0])
    return [by_name[name][0][: len(PROMPT) - 1 + 97] for name in (None, "a", "b")]
