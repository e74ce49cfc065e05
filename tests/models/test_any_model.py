"""Models that run through transformers' own code: equal to transformers, and one arithmetic."""

from pathlib import Path
from typing import Any

import pytest
from one_sequence import PROMPT, Runner, close
from test_models import ROPES, hf_greedy, save
from test_one_arithmetic import decoded, engine, prefilled

from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import load_model
from whorl.models.any_model import AnyModel

# Odd sizes: a row ends anywhere in a vector of the CPU.
TINY = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {**TINY, "hidden_size": 96, "intermediate_size": 164}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.2}
GEMMA2 = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24, "head_dim": 16}
SHARED = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ROPE = {"rope_theta": 10000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 9, "num_hidden_layers": 4}),
    "granite": ("GraniteForCausalLM", GRANITE),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0], "tie_word_embeddings": False}),
    "cohere": ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 9, "tie_word_embeddings": False, **GEMMA2}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 9, "use_bias": True, "tie_word_embeddings": False}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**EXPERTS, **SHARED}),
    "olmoe": ("OlmoeForCausalLM", EXPERTS),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "stablelm": ("StableLmForCausalLM", {}),
    "olmo": ("OlmoForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 8}),
    "nemotron": ("NemotronForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16}),
    "opt": ("OPTForCausalLM", {"word_embed_proj_dim": 40, "ffn_dim": 51}),
    "phi": ("PhiForCausalLM", {"hidden_size": 48}),
    "granitemoe": ("GraniteMoeForCausalLM", {"num_local_experts": 4, **GRANITE}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {"hidden_size": 32, "original_max_position_embeddings": 128, "rope_parameters": {**ROPE, **ROPES["longrope"]}},
    ),
    "olmo2-dynamic": ("Olmo2ForCausalLM", {"rope_parameters": {**ROPE, **ROPES["dynamic"]}}),
}
NAMED = ("phi3", "olmo3", "granite", "smollm3", "cohere", "cohere2", "gemma2", "starcoder2", "mixtral", "qwen2_moe")
NAMED += ("olmoe",)
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in NAMED]


def config_of(name: str, sizes: dict[str, Any] = TINY) -> dict[str, Any]:
    architecture, changes = FAMILIES[name]
    wide = {key: sizes["hidden_size"] for key in ("word_embed_proj_dim",) if key in changes}
    model_type = name.partition("-")[0]
    return {"architectures": [architecture], "model_type": model_type, **sizes, **changes, **wide}


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, **{"device": "cpu", "dtype": "float32", "progress": False, **options})


@pytest.mark.parametrize("name", [*NAMED, *OTHERS])
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """40 greedy steps: the tokens are equal, and the logits of every step are close."""
    config = config_of(name)
    hf = save(tmp_path, config)
    length = 128 if name == "phi3-longrope" else None  # frequencies are those of the longest sequence
    model = load(tmp_path, max_model_len=length)
    assert isinstance(model, AnyModel)
    expected, expected_tokens = hf_greedy(hf, PROMPT, 40)
    logits, tokens = Runner(model).greedy(PROMPT, 40)
    assert hf.config.tie_word_embeddings or len(set(tokens)) > 4, "the random model says too little to compare"
    assert tokens == expected_tokens
    close(logits, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*NAMED, *OTHERS])
def test_one_arithmetic(name: str, dtype: str, tmp_path: Path) -> None:
    """Decoded among others, in chunks, alone, and sent back as a prompt: the same bits."""
    save(tmp_path, config_of(name, WIDE))
    llm = engine(load(tmp_path, dtype=dtype))
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
    prompts = [PROMPT[:n] for n in (1, 5, 12, 21)]
    outputs = llm.generate(prompts, params, progress=False)
    for output in outputs:
        assert decoded(output) == prefilled(llm, output)
    alone = engine(llm.model, max_num_seqs=1, max_num_batched_tokens=7)
    (output,) = alone.generate([prompts[3]], params, progress=False)
    assert (output.token_ids, decoded(output)) == (outputs[3].token_ids, decoded(outputs[3]))
