"""One arithmetic on an NVIDIA GPU: layers as large as Qwen3-30B-A3B's, long contexts, every kernel that may run."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mock_model import record
from test_one_arithmetic import decoded, prefilled
from torch.profiler import ProfilerActivity, profile

from whorl import nn
from whorl.bench.random_config import PRESETS
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import random_model
from whorl.ops import linear_library

pytestmark = pytest.mark.gpu

VOCABULARY = 20000
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": PRESETS["Qwen3-30B-A3B"],
    "qwen3": PRESETS["Qwen3-0.6B"],
    "qwen3_5_moe": PRESETS["Qwen3.5-35B-A3B"]["text_config"]
    | {"architectures": ["Qwen3_5MoeForCausalLM"], "full_attention_interval": 2},
    "llama": PRESETS["Qwen3-0.6B"] | LLAMA | {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64},
}
PROMPTS = (4100, 33, 700, 1)  # tokens
CHUNK = 1100  # tokens of a step: no multiple of a tile or of a cut of the keys
BATCHES = (2, 7, 40, 256)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    torch.manual_seed(0)
    changes = {"num_hidden_layers": 2, "vocab_size": VOCABULARY}
    yield random_model(CONFIGS[request.param] | changes, device="cuda", dtype=torch.bfloat16, max_length=8192)
    torch.cuda.empty_cache()


def engine(model: Any, **changes: Any) -> LLM:
    settings = {"num_blocks": 2048, "max_model_len": 6000, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8}
    return LLM(model=model, device="cuda", **{**settings, **changes})


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def sampled(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)


def kernels(run: Callable[[], object]) -> set[str]:
    """The names of those that ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    return {event.key for event in recorded.key_averages()}


def test_decoded_equals_prefilled(model: Any) -> None:
    llm = engine(model)
    outputs = llm.generate([tokens(n) for n in PROMPTS], sampled(200), progress=False)
    for scorer in (llm, engine(model, use_prefix_cache=False, max_num_batched_tokens=777)):
        for output in outputs:
            assert len(output.token_ids) == 200
            assert decoded(output) == prefilled(scorer, output)


def test_trainer_equals_sampler(model: Any) -> None:
    """Under autograd, the sequences packed: the difference is zero, not small."""
    outputs = engine(model).generate([tokens(n) for n in PROMPTS], sampled(200), progress=False)
    sequences = [output.prompt_ids + output.token_ids for output in outputs]
    logprobs = nn.trainable(model).logprobs(nn.pack(sequences, "cuda"))
    logprobs.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model.zero_grad()
    model.requires_grad_(False)
    parts = logprobs.detach().split([len(sequence) - 1 for sequence in sequences])
    for output, part in zip(outputs, parts, strict=True):
        assert part[len(output.prompt_ids) - 1 :].tolist() == decoded(output)


def test_alone_and_in_batches(model: Any) -> None:
    """Logits, with graphs and without, of prompts that end in different chunks."""
    prompts = [tokens(1 + 37 * i % 500, seed=i) for i in range(max(BATCHES))]
    alone: dict[int, list[torch.Tensor]] = {}
    for count in BATCHES:
        for use_graphs in (False, True):
            llm = engine(model, max_num_seqs=count, num_blocks=6000, max_model_len=520, use_graphs=use_graphs)
            sequences, logits = run(llm, prompts[:count])
            for place in range(0, count, max(1, count // 5)):
                if place not in alone:
                    single = engine(model, max_num_seqs=1, max_model_len=520, use_graphs=False, use_prefix_cache=False)
                    alone[place] = run(single, [prompts[place]])[1][0]
                assert all(torch.equal(a, b) for a, b in zip(alone[place], logits[place], strict=True)), (count, place)
            assert len(sequences) == count


def run(llm: LLM, prompts: list[list[int]]) -> tuple[list[Any], list[list[torch.Tensor]]]:
    recorded = record(llm)
    sequences = [llm.add(prompt, sampled(6))[0] for prompt in prompts]
    while llm.has_work:
        llm.step()
    return sequences, [[recorded[seq.id][i] for i in range(seq.num_outputs)] for seq in sequences]


def test_which_kernels_ran(model: Any) -> None:
    """What the tests above compare are different kernels."""
    llm = engine(model, use_graphs=False, max_num_seqs=64)
    one = kernels(lambda: llm.generate([tokens(300)], sampled(3), progress=False))
    prompt = kernels(lambda: llm.generate([tokens(3000)], sampled(1), progress=False))
    crowd = kernels(lambda: llm.generate([tokens(40, seed=i) for i in range(40)], sampled(3), progress=False))
    few = kernels(lambda: llm.generate([tokens(40, seed=i) for i in range(12)], sampled(3), progress=False))
    assert "_ring_kernel" in one
    assert "_few_kernel" in few
    assert {"_decode_kernel", "_fold_kernel"} <= one
    assert "_tile_kernel" in crowd
    if hasattr(model.config, "delta"):
        assert "_delta_rows_kernel" in one & crowd
        assert {"_delta_chunk_kernel", "_delta_state_kernel"} <= prompt
    wide = model.config.head_dim == 128  # other heads have no kernel of their own for Hopper
    assert ("_prompt_gluon_kernel" if wide else "_prompt_kernel") in prompt
    assert any(linear_library.trials().values()), "torch's product was never equal"
    if "experts" in "".join(name for name, _ in model.named_parameters()):
        assert {"_gate_up_few_kernel", "_down_combine_kernel"} <= one
        assert {"_gate_up_kernel", "_down_kernel"} <= crowd
        assert "_many_rows_kernel" in prompt
