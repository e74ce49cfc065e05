"""DeepSeek-V3.2 at full width on an NVIDIA GPU: two layers, long contexts, both kinds of cache, recorded calls."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mock_model import record
from test_one_arithmetic import decoded, prefilled
from test_one_arithmetic_gpu import kernels, sampled

from whorl import ops
from whorl.bench.random_config import PRESETS
from whorl.engine.llm import LLM
from whorl.engine.weights import random_model

pytestmark = pytest.mark.gpu

VOCABULARY = 20000
PROMPTS = (4500, 2000, 37, 1)  # tokens: past the 2048 keys that are chosen, on the way there, and few
CHANGES = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "n_routed_experts": 64}
OPS = (ops.head_linear, ops.latent_write, ops.index_write, ops.paged_indexer, ops.latent_attention)
KERNELS = {"_head_kernel", "_latent_write_kernel", "_index_write_kernel", "_paged_scores_kernel", "_latent_kernel"}
KERNELS |= {"_fp32_kernel", "_add_chunks_kernel"}


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch.manual_seed(0)
    config = PRESETS["DeepSeek-V3.2-4L"] | CHANGES
    yield random_model(config, device="cuda", dtype=torch.bfloat16, max_length=8192)
    torch.cuda.empty_cache()


def engine(model: Any, **changes: Any) -> LLM:
    settings = {"num_blocks": 2048, "max_model_len": 6000, "max_num_batched_tokens": 1000, "max_num_seqs": 8}
    return LLM(model=model, device="cuda", **{**settings, **changes})


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_decoded_equals_prefilled(model: Any, kind: str) -> None:
    """Recorded calls, then the same tokens as prompts, in chunks of two sizes: the difference is zero."""
    llm = engine(model, kv_cache_dtype=kind)
    outputs = llm.generate([tokens(n) for n in PROMPTS], sampled(100), progress=False)
    others = {"kv_cache_dtype": kind, "use_prefix_cache": False, "max_num_batched_tokens": 777}
    for scorer in (llm, engine(model, **others)):
        for output in outputs:
            assert decoded(output) == prefilled(scorer, output)


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_alone_and_in_batches(model: Any, kind: str) -> None:
    """Logits past the chosen keys, with graphs and without: programs share lists of keys here, and walk them there."""
    prompts = [tokens(2500 + 7 * i, seed=i) for i in range(40)]
    how = {"kv_cache_dtype": kind, "max_model_len": 2900, "num_blocks": 8000, "max_num_batched_tokens": 4096}
    alone: dict[int, list[torch.Tensor]] = {}
    for count, use_graphs in ((1, False), (3, True), (40, True), (40, False)):
        llm = engine(model, max_num_seqs=count, use_graphs=use_graphs, **how)
        recorded = record(llm)
        sequences = [llm.add(prompt, sampled(5))[0] for prompt in prompts[:count]]
        while llm.has_work:
            llm.step()
        for place in {0, count // 2, count - 1}:
            logits = [recorded[sequences[place].id][i] for i in range(5)]
            if place in alone:
                assert all(torch.equal(a, b) for a, b in zip(alone[place], logits, strict=True)), (count, place)
            alone.setdefault(place, logits)


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_which_kernels_ran(model: Any, kind: str) -> None:
    llm = engine(model, use_graphs=False, kv_cache_dtype=kind)
    actual = kernels(lambda: llm.generate([tokens(3000)], sampled(3), progress=False))
    expected = KERNELS | {"_latent_fold_kernel", "_top_k_kernel"} | ({"_round_kernel"} if kind == "fp8" else set())
    assert expected <= actual, expected - actual


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_which_backend_takes_full_width(op: Any) -> None:
    for case in op.bench_cases:
        if sum(case["tokens"]) <= 64:
            values = op.make(**case, dtype=torch.bfloat16, device="cuda")
            assert op.choose(**values).backend == "triton", case


@pytest.mark.parametrize("coded", [False, True])
def test_heads_and_programs_change_no_bit(coded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """16, 32 and 64 heads of a program, lists walked and shared, at full width."""
    from whorl.ops.latent import attention_triton

    case = {"queries": (2, 1), "contexts": (5000, 2100), "heads": 128, "dim": 576, "value_dim": 512, "topk": 2048}
    values = ops.latent_attention.make(**case, block=64, coded=coded, dtype=torch.bfloat16, device="cuda")
    outputs = []
    for heads, programs in ((16, 16), (32, 5), (64, 3), (64, 1), (16, 1)):
        plan = {"BLOCK_H": heads, "num_warps": 8}, programs
        monkeypatch.setattr(attention_triton, "_plan", lambda *_, plan=plan: plan)
        outputs.append(ops.latent_attention(**values, backend="triton"))
    assert all(torch.equal(outputs[0], each) for each in outputs)
