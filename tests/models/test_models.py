"""Models against transformers on random tiny checkpoints, and on the real small default model."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_sequence import BLOCK, PROMPT, Runner, close
from torch import Tensor

from whorl import nn
from whorl.engine import weights
from whorl.engine.gguf_header import read_metadata
from whorl.models.gemma3 import Gemma3
from whorl.models.glm4_moe import Glm4Moe
from whorl.models.gpt_oss import GptOss
from whorl.models.llama import Llama
from whorl.models.llama_config import LlamaConfig
from whorl.models.mistral import Mistral
from whorl.models.qwen2 import Qwen2
from whorl.models.qwen3 import ExpertsConfig, Qwen3, Qwen3Config
from whorl.nn import Step

transformers = pytest.importorskip("transformers")


def save(folder: Path, config: dict[str, Any], *, seed: int = 1, **options: Any) -> Any:
    """A random checkpoint of transformers, with weights large enough for tokens to differ."""
    torch.manual_seed(seed)
    values = {key: value for key, value in config.items() if key != "architectures"}
    hf_config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(hf_config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.15)
        model.tie_weights()
    model.save_pretrained(folder, **options)
    return model


def hf_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def hf_greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[Tensor, list[int]]:
    """Prefill and one token at a time through transformers' own cache."""
    cache, tokens, logits = transformers.DynamicCache(config=model.config), [], []
    todo = list(prompt)
    with torch.inference_mode():
        while len(tokens) < count:
            out = model(torch.tensor([todo]), past_key_values=cache, use_cache=True)
            logits.append(out.logits[0].float())
            tokens.append(int(logits[-1][-1].argmax()))
            todo = tokens[-1:]
    return torch.cat(logits), tokens


HALF = [1.0 + 0.1 * i for i in range(4)]
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": HALF,
        "long_factor": [3 * f for f in HALF],
        "original_max_position_embeddings": 128,
        "factor": 2.0,
    },
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"llama-{name}": Llama.tiny(rope_parameters={"rope_theta": 10000.0, **rope}) for name, rope in ROPES.items()},
    "llama-tied": Llama.tiny(tie_word_embeddings=True),
    "llama-bias": Llama.tiny(attention_bias=True, mlp_bias=True),
    "llama-one-kv-head": Llama.tiny(num_key_value_heads=1, head_dim=16),
    "llama-no-gqa": Llama.tiny(num_key_value_heads=4, rms_norm_eps=1e-3),
    "gemma3": Gemma3.tiny(),
    "gemma3-untied": Gemma3.tiny(
        tie_word_embeddings=False,
        attention_bias=True,
        num_key_value_heads=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "qwen2": Qwen2.tiny(),
    "qwen2-tied": Qwen2.tiny(tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2-window": Qwen2.tiny(use_sliding_window=True, sliding_window=9, max_window_layers=1, num_hidden_layers=3),
    "mistral": Mistral.tiny(num_key_value_heads=4),
    "mistral-tied": Mistral.tiny(tie_word_embeddings=True, head_dim=16, sliding_window=5),
    "mistral-no-window": Mistral.tiny(sliding_window=None, rope_parameters={"rope_theta": 1e6}),
    "qwen3": Qwen3.tiny(),
    "qwen3-tied-bias": Qwen3.tiny(tie_word_embeddings=True, attention_bias=True),
    "qwen3-yarn": Qwen3.tiny(rope_parameters={"rope_theta": 1e6, **ROPES["yarn"]}),
    "qwen3-window": Qwen3.tiny(use_sliding_window=True, sliding_window=9, max_window_layers=1, num_hidden_layers=3),
    "qwen3-layer-types": Qwen3.tiny(
        use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3-window-off": Qwen3.tiny(use_sliding_window=False, sliding_window=9, max_window_layers=0),
    "glm4-moe": Glm4Moe.tiny(),
    "glm4-moe-air": Glm4Moe.tiny(
        use_qk_norm=False, attention_bias=False, n_group=2, topk_group=1, routed_scaling_factor=1.0, n_shared_experts=2
    ),
    "gpt-oss": GptOss.tiny(),
    "gpt-oss-yarn": GptOss.tiny(
        swiglu_limit=0.5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={"rope_theta": 150000.0, **ROPES["yarn"], "truncate": False},
    ),
    "moe": Qwen3.tiny(**MOE, norm_topk_prob=True),
    "moe-not-normalised": Qwen3.tiny(**MOE, norm_topk_prob=False),
    "moe-default-norm": Qwen3.tiny(**MOE),
    "moe-mlp-only": Qwen3.tiny(**MOE, mlp_only_layers=[0, 2], norm_topk_prob=True),
    "moe-step-2": Qwen3.tiny(**MOE, decoder_sparse_step=2, norm_topk_prob=True),
    "moe-window": Qwen3.tiny(**MOE, use_sliding_window=True, sliding_window=9, norm_topk_prob=True),
}


SEEDS = {"glm4-moe-air": 2, "gpt-oss-yarn": 2}  # of those that repeat two tokens with the usual one
QUICK = {"llama-tied", "llama-bias", "llama-longrope", "gemma3", "qwen2", "mistral", "qwen3", "qwen3-yarn", "moe"}
QUICK |= {
    "glm4-moe",
    "gpt-oss",
    "llama-default",
    "llama-llama3",
    "llama-linear",
    "llama-yarn",
    "llama-dynamic",
    "qwen3-layer-types",
}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """64 greedy steps: the tokens are equal, and the logits of every step to 1e-5."""
    hf = save(tmp_path, VARIANTS[name], seed=SEEDS.get(name, 1))
    # transformers writes what it made of the values; a publisher's file leaves out what its classes fill in
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS[name]))
    # longrope's short factors hold to the original length, and frequencies are fixed when a model is loaded
    length = 128 if name == "llama-longrope" else None
    model = weights.load_model(tmp_path, device="cpu", dtype="float32", max_model_len=length, progress=False)
    expected, expected_tokens = hf_greedy(hf, PROMPT, 64)
    logits, tokens = Runner(model).greedy(PROMPT, 64)
    is_tied = hf.config.tie_word_embeddings  # then a random model repeats its last token
    assert is_tied or len(set(tokens)) > 4, "the random model says too little to compare"
    assert tokens == expected_tokens
    close(logits, expected)


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_long_frequencies_are_those_of_max_length(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name] | {"max_position_embeddings": 40}
    rope = dict(config["rope_parameters"])
    if name == "llama-longrope":
        rope["original_max_position_embeddings"] = 20
    hf = save(tmp_path, config | {"rope_parameters": rope})
    prompt = (PROMPT * 3)[:60]
    model = weights.load_model(tmp_path, device="cpu", dtype="float32", max_model_len=60, progress=False)
    close(Runner(model).run(prompt), hf_logits(hf, prompt))
    # a short sequence rotates by the same frequencies, whatever else runs: it equals the start of the long one
    close(Runner(model).run(prompt[:10]), hf_logits(hf, prompt)[:10])


def test_chunks_equal_the_whole() -> None:
    model = weights.random_model(Qwen3.tiny(**MOE), device="cpu", dtype=torch.float32)
    whole = Runner(model).run(PROMPT)
    runner = Runner(model)
    parts = torch.cat([runner.run(PROMPT[:5]), runner.run(PROMPT[5:])])
    close(parts, whole)


def test_sequences_of_one_batch_do_not_mix() -> None:
    """Two sequences in one step, with their blocks interleaved, equal each alone."""
    model: Any = weights.random_model(Llama.tiny(), device="cpu", dtype=torch.float32)
    prompts = [PROMPT[:7], PROMPT[7:12]]
    tables = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    positions = [torch.arange(len(p)) for p in prompts]
    step = Step(
        token_ids=torch.tensor(prompts[0] + prompts[1]),
        positions=torch.cat(positions),
        slots=torch.cat([t.long()[p // BLOCK] * BLOCK + p % BLOCK for t, p in zip(tables, positions, strict=True)]),
        block_tables=tables,
        query_starts=torch.tensor([0, 7, 12], dtype=torch.int32),
        context_lens=torch.tensor([7, 5], dtype=torch.int32),
        max_position=7,
    )
    caches = [spec.empty(4, BLOCK, "cpu") for spec in model.cache_specs()]
    with torch.inference_mode():
        both = model.logits(model.forward(step, caches))
    close(both[:7], Runner(model).run(prompts[0]))
    close(both[7:], Runner(model).run(prompts[1]))


def test_past_max_length_is_refused() -> None:
    model = weights.random_model(Llama.tiny(), device="cpu", dtype=torch.float32, max_length=20)
    with pytest.raises(ValueError, match="position 20 is past the 20 tokens this model was loaded for"):
        Runner(model).run(PROMPT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, expected a multiple of num_key_value_heads, 3"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"known are .*LlamaForCausalLM"),
        (
            {"architectures": ["DeepseekV4ForCausalLM"]},
            r"known are .*DeepseekV4ForCausalLM needs several residual streams .*; nearest is DeepseekV32For",
        ),
        (
            {"architectures": ["Unheard"]},
            r"known are [\w, ]*\. Through transformers' code: [^.]*\. What you can do: take a model of a known arch",
        ),
        (
            {"dual_chunk_attention_config": {"chunk_size": 64, "local_size": 8}},
            "dual chunk attention is not supported",
        ),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weights.build(Llama.tiny() | change, device="meta", dtype=torch.float32)


# ---- real language

# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n" after the usual system prompt.
QUESTION = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm() -> Any:
    """The weights are unpacked: in the file's own bits tokens are rounded to 16 bits."""
    pytest.importorskip("gguf")
    return weights.load_model(device="cpu", dtype="float32", progress=False, unpack=True)


@pytest.fixture(scope="module")
def answer(smollm: Any) -> tuple[Tensor, list[int]]:
    return Runner(smollm).greedy(QUESTION, 9)


@pytest.mark.slow
def test_the_default_model_answers(answer: tuple[Tensor, list[int]]) -> None:
    words = read_metadata(weights.resolve())["tokenizer.ggml.tokens"]
    text = "".join(words[token] for token in answer[1]).replace("\u0120", " ")
    assert text == "The capital of France is Paris.<|im_end|>" + words[answer[1][-1]], text


EXPERTS = 8


def cut(name: str, source: weights.Source) -> dict[str, weights.Source]:
    """A feed-forward weight as those of 8 experts; each will be weighed 1/8, so what they give is 8 times larger."""
    match = re.fullmatch(r"(model\.layers\.\d+\.mlp\.)(gate|up|down)_proj\.weight", name)
    if match is None:
        return {name: source}
    whole = source.read((slice(None), slice(None)))
    parts = whole.chunk(EXPERTS, 1) if match[2] == "down" else whole.chunk(EXPERTS)
    scale = EXPERTS if match[2] == "down" else 1
    return {
        f"{match[1]}experts.{i}.{match[2]}_proj.weight": tensor_source(scale * part) for i, part in enumerate(parts)
    }


def tensor_source(tensor: Tensor) -> weights.Source:
    return weights.Source(
        shape=tuple(tensor.shape),
        dtype="F32",
        gives=torch.float32,
        nbytes=tensor.nbytes,
        read=lambda index: tensor[index],
    )


@pytest.mark.slow
def test_experts_cut_from_a_dense_model_equal_it(answer: tuple[Tensor, list[int]]) -> None:
    """A router of zeros gives every expert 1/8: the sum over experts is the dense layer, term by term."""
    with weights.open_checkpoint(weights.resolve()) as dense:
        sources = {n: s for name, source in dense.sources.items() for n, s in cut(name, source).items()}
        values = LlamaConfig.read(dense.config)
        count = values["num_hidden_layers"]
        router = torch.zeros(EXPERTS, values["hidden_size"])
        sources |= {f"model.layers.{i}.mlp.gate.weight": tensor_source(router) for i in range(count)}
        experts = ExpertsConfig(
            num_experts=EXPERTS,
            num_experts_per_tok=EXPERTS,
            moe_intermediate_size=values["intermediate_size"] // EXPERTS,
            norm_topk_prob=True,
            layers=tuple(range(count)),
        )
        config = Qwen3Config(**values, experts=experts, qk_norm=False)
        with torch.device("meta"):
            model = Qwen3(config)
            nn.create_parameters(model, nn.weights.ALL_DENSE, torch.float32)
        model.to_empty(device="cpu")
        weights.fill(model, replace(dense, sources=sources))
    logits, tokens = Runner(model).greedy(QUESTION, 9)
    assert tokens == answer[1]
    close(logits, answer[0])


@pytest.mark.slow
def test_the_default_model_equals_transformers(answer: tuple[Tensor, list[int]]) -> None:
    """Through transformers' own GGUF reader; its from_pretrained would also want accelerate."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(weights.resolve())
    values = load_gguf_checkpoint(path)["config"]
    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=hf)["tensors"]
    missing, surplus = hf.load_state_dict(tensors, strict=False)
    hf.tie_weights()
    assert not surplus
    assert set(missing) <= {"lm_head.weight"}
    logits, tokens = hf_greedy(hf, QUESTION, 9)
    assert tokens == answer[1]
    close(answer[0], logits)
