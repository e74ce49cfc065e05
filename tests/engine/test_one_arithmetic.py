"""One arithmetic: a token's numbers are the same decoded, in a prompt, alone, in a batch and found in the cache."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from kernels import without_cpu_kernels
from one_sequence import PROMPT
from schedules import tiny

from whorl import ops
from whorl.engine.llm import LLM
from whorl.engine.output import Output
from whorl.engine.sequence import SamplingParams
from whorl.models.gemma3 import Gemma3
from whorl.models.glm4_moe import Glm4Moe
from whorl.models.gpt_oss import GptOss
from whorl.models.llama import Llama
from whorl.models.mistral import Mistral
from whorl.models.qwen2 import Qwen2
from whorl.models.qwen3 import Qwen3

MODELS: dict[str, partial[Any]] = {
    "gemma3": partial(tiny, Gemma3),
    "gemma3_bfloat16": partial(tiny, Gemma3, torch.bfloat16),
    "glm4_moe": partial(tiny, Glm4Moe),
    "glm4_moe_bfloat16": partial(tiny, Glm4Moe, torch.bfloat16),
    "gpt_oss": partial(tiny, GptOss),
    "gpt_oss_bfloat16": partial(tiny, GptOss, torch.bfloat16),
    "llama": partial(tiny, Llama),
    "mistral": partial(tiny, Mistral),
    "qwen2": partial(tiny, Qwen2),
    "qwen3": partial(tiny, Qwen3),
    "qwen3_bfloat16": partial(tiny, Qwen3, torch.bfloat16),
    "qwen3_moe": partial(tiny, Qwen3, num_experts=8),
    "qwen3_moe_bfloat16": partial(tiny, Qwen3, torch.bfloat16, num_experts=8),
}
SAMPLED = SamplingParams(max_tokens=50, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)


def engine(model: Any, **changes: Any) -> LLM:
    settings = {"device": "cpu", "num_blocks": 64, "block_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    return LLM(model=model, **{**settings, **changes})


def decoded(output: Output) -> list[float]:
    return [each.logprob for each in output.logprobs]


def prefilled(llm: LLM, output: Output) -> list[float]:
    """The same tokens, sent back as a prompt."""
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (again,) = llm.generate([output.prompt_ids + output.token_ids], scored, progress=False)
    return [each.logprob for each in again.prompt_logprobs[len(output.prompt_ids) - 1 :]]


@pytest.mark.parametrize("name", MODELS)
def test_decoded_equals_prefilled(name: str) -> None:
    llm = engine(MODELS[name]())
    outputs = llm.generate([PROMPT[:n] for n in (1, 5, 12, 21)], SAMPLED, progress=False)
    for output in outputs:
        assert len(output.token_ids) == 50
        assert decoded(output) == prefilled(llm, output)


def test_other_products_for_few_rows_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own: it sums a row alone in another order than a row among others."""
    plain = lambda x, weight, bias=None: torch.nn.functional.linear(x, weight, bias)  # noqa: E731
    monkeypatch.setattr(ops.linear, "reference", plain)
    with without_cpu_kernels():
        llm = engine(MODELS["qwen3"]())
        outputs = llm.generate([PROMPT[:5]], SAMPLED, progress=False)
        assert decoded(outputs[0]) != prefilled(llm, outputs[0])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe_bfloat16", "gpt_oss_bfloat16"])
def test_alone_and_in_a_crowd(name: str) -> None:
    model, rng = MODELS[name](), random.Random(0)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 30))] for _ in range(20)]
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
    crowd = engine(model, max_num_seqs=20, num_blocks=128).generate(prompts, params, progress=False)
    alone = engine(model, max_num_seqs=1, max_num_batched_tokens=7)
    for prompt, among in zip(prompts[::4], crowd[::4], strict=True):
        (output,) = alone.generate([prompt], params, progress=False)
        assert (output.token_ids, decoded(output)) == (among.token_ids, decoded(among))


def test_an_answer_sent_back_is_found_in_the_cache() -> None:
    """All of it but the last token, which was never computed, to the end of its block."""
    llm = engine(MODELS["qwen3"]())
    (first,) = llm.generate([PROMPT], SAMPLED, progress=False)
    history = first.prompt_ids + first.token_ids
    (again,) = llm.generate([[*history, 5, 6, 7]], SamplingParams(max_tokens=8, temperature=0), progress=False)
    assert again.num_cached == (len(history) - 1) // 8 * 8
    (fresh,) = engine(llm.model).generate(
        [[*history, 5, 6, 7]], SamplingParams(max_tokens=8, temperature=0), progress=False
    )
    assert again.token_ids == fresh.token_ids
