"""`routed_experts` in answers, in vLLM's form: the experts that transformers' router picks for every token."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import write_checkpoints
from serving import byte_tokenizer, serving
from trainer import CONFIG

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.prompt_lookup import PromptLookup

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 64, "num_hidden_layers": 3}
PROMPT = list(range(70, 95))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from whorl.models.qwen3 import Qwen3

    config = Qwen3.tiny(vocab_size=320, mlp_only_layers=[1], **EXPERTS)
    return write_checkpoints(tmp_path_factory.mktemp("moe"), {"moe": config})["moe"]


def engine(folder: Path, **changes: Any) -> LLM:
    settings = {"device": "cpu", "num_blocks": 128, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return LLM(folder, tokenizer=byte_tokenizer(), routed_experts=True, **settings | changes)  # type: ignore[arg-type]


def expected(folder: Path, token_ids: list[int]) -> np.ndarray:
    """What transformers' router picks, [T - 1, L, K], sorted by expert; 0 in the dense layer."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.zeros(len(token_ids) - 1, 3, 3, dtype=torch.int64)
    for layer in (0, 2):
        logits = []
        gate = model.model.layers[layer].mlp.gate
        gate.register_forward_hook(lambda module, inputs, out, to=logits: to.append(inputs[0] @ module.weight.T))
        with torch.no_grad():
            model(torch.tensor([token_ids[:-1]]))
        ids[:, layer] = logits[0].reshape(-1, 8).topk(3).indices.sort().values
    return ids.numpy()


def decoded(choice: dict[str, Any]) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)


def is_same(rows: Any, others: np.ndarray) -> bool:
    rows = np.sort(rows, -1)
    rows[:, 1] = 0
    return rows.shape == others.shape and bool((rows == others).all())


def test_every_route_reports_the_experts_of_prompt_and_answer(folder: Path) -> None:
    """Alone, from the prefix cache, in chunks, in a batch, in a stream and with drafts: always the same experts."""
    with serving(engine(folder)) as served:
        params = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling_params": params}
        (choice,) = served.post("/inference/v1/generate", **body)["choices"]
        rows, tokens = decoded(choice), PROMPT + choice["token_ids"]
        assert (rows.dtype, rows.shape) == (np.uint8, (len(tokens) - 1, 3, 3))
        assert is_same(rows, expected(folder, tokens))
        assert not rows[:, 1].any()
        (again,) = served.post("/inference/v1/generate", **body)["choices"]  # its prompt comes from the cache
        assert (decoded(again) == rows).all()
        late = {"token_ids": PROMPT, "sampling_params": params | {"routed_experts_prompt_start": 20}}
        assert (decoded(served.post("/inference/v1/generate", **late)["choices"][0]) == rows[20:]).all()
        both = served.complete([PROMPT, PROMPT[5:]], max_tokens=9, ignore_eos=True, routed_experts_prompt_start=1)
        first, second = (decoded(choice) for choice in both["choices"])
        assert (first == rows[1:]).all()
        assert len(second) == len(rows) - 6
        *events, _ = served.events("/v1/completions", prompt=PROMPT, max_tokens=9, temperature=0, ignore_eos=True)
        assert [("routed_experts" in event["choices"][0]) for event in events][-1]
        assert (decoded(events[-1]["choices"][0]) == rows).all()
        chat = served.chat("hello", max_tokens=4, ignore_eos=True, return_token_ids=True)
        tokens = chat["prompt_token_ids"] + chat["choices"][0]["token_ids"]
        assert is_same(decoded(chat["choices"][0]), expected(folder, tokens))
    drafting = engine(folder, speculate=PromptLookup(k=4), num_blocks=64)
    (output,) = drafting.generate(
        [PROMPT], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True), progress=False
    )
    assert output.routed_experts is not None
    assert (output.routed_experts == rows).all()


def test_a_model_without_experts_reports_none() -> None:
    from trainer import engine as dense

    with pytest.raises(ValueError, match=r"routed_experts: Qwen3 has no experts; leave the setting out"):
        dense(routed_experts=True)
    with pytest.raises(ValueError, match=r"routed_experts: sp is on"):
        dense(routed_experts=True, sp="on")
    with serving(dense()) as served:
        assert "routed_experts" not in served.complete("abc", max_tokens=2)["choices"][0]
    assert CONFIG.get("num_experts") is None
