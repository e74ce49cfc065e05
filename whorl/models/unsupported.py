"""Architectures that people try and that are not supported: what each needs, and the nearest supported one."""

from typing import NamedTuple


class Known(NamedTuple):
    """needs: the features that are not implemented. nearest: a supported architecture. gguf: llama.cpp's names."""

    needs: str
    nearest: str
    gguf: tuple[str, ...] = ()


_MOE = "Qwen3MoeForCausalLM"
_SHARED = "a shared expert beside the routed ones"
_PARALLEL = "attention and feed-forward side by side after one LayerNorm"
_STATE = "layers with a recurrent state in place of keys and values"

UNSUPPORTED: dict[str, Known] = {
    "CohereForCausalLM": Known(_PARALLEL, "LlamaForCausalLM", ("command-r",)),
    "Cohere2ForCausalLM": Known(_PARALLEL, "MistralForCausalLM", ("cohere2",)),
    "DeepseekV2ForCausalLM": Known("V2's routing: softmax scores in place of V3's sigmoid", "DeepseekV3ForCausalLM"),
    "FalconForCausalLM": Known(_PARALLEL, "LlamaForCausalLM", ("falcon",)),
    "GemmaForCausalLM": Known("Gemma's first form, without norms of heads", "Gemma3ForCausalLM", ("gemma",)),
    "Gemma2ForCausalLM": Known("softcaps of attention's scores and of logits", "Gemma3ForCausalLM", ("gemma2",)),
    "Gemma3ForConditionalGeneration": Known(
        "SigLIP's vision tower; the text model alone runs from a GGUF file", "Gemma3ForCausalLM"
    ),
    "Gemma3nForConditionalGeneration": Known(
        "per-layer embeddings and several residual streams", "Gemma3ForCausalLM", ("gemma3n",)
    ),
    "Gemma4ForConditionalGeneration": Known(
        "head sizes and rotation that differ between layers", "Gemma3ForCausalLM", ("gemma4",)
    ),
    "Glm4ForCausalLM": Known(
        "norms after each part and rotation of half a head", "Gemma3ForCausalLM", ("glm4", "chatglm")
    ),
    "Glm4MoeForCausalLM": Known(_SHARED, _MOE, ("glm4moe",)),
    "GPT2LMHeadModel": Known("learned positions in place of a rotation", "LlamaForCausalLM", ("gpt2",)),
    "GptOssForCausalLM": Known(
        "attention sinks, experts with biases and a clamped SwiGLU, and weights in MXFP4", _MOE, ("gpt-oss", "gptoss")
    ),
    "GraniteForCausalLM": Known(
        "factors of embeddings, residuals, attention and logits", "LlamaForCausalLM", ("granite",)
    ),
    "JambaForCausalLM": Known(_STATE, "LlamaForCausalLM", ("jamba",)),
    "Llama4ForConditionalGeneration": Known(
        f"chunked attention, layers without rotation, and {_SHARED}", _MOE, ("llama4",)
    ),
    "MambaForCausalLM": Known(_STATE, "LlamaForCausalLM", ("mamba", "mamba2")),
    "MiniMaxM2ForCausalLM": Known("norms over all heads at once", _MOE, ("minimax-m2",)),
    "Mistral3ForConditionalGeneration": Known("Pixtral's vision tower", "MistralForCausalLM", ("mistral3",)),
    "MixtralForCausalLM": Known("experts stored as w1, w2 and w3", _MOE),
    "NemotronHForCausalLM": Known(_STATE, "LlamaForCausalLM", ("nemotron_h",)),
    "Olmo2ForCausalLM": Known("norms after each part and none before", "Gemma3ForCausalLM", ("olmo2",)),
    "PhiForCausalLM": Known(_PARALLEL, "LlamaForCausalLM", ("phi2",)),
    "Phi3ForCausalLM": Known(
        "q, k and v, and gate and up, stored as one tensor each", "LlamaForCausalLM", ("phi3", "phi4")
    ),
    "PhimoeForCausalLM": Known("SparseMixer's routing and LayerNorm", _MOE, ("phimoe",)),
    "Qwen2MoeForCausalLM": Known(f"{_SHARED}, with its own gate", _MOE, ("qwen2moe",)),
    "Qwen2VLForConditionalGeneration": Known(
        "Qwen2-VL's vision tower", "Qwen3VLForConditionalGeneration", ("qwen2vl",)
    ),
    "Qwen2_5_VLForConditionalGeneration": Known(
        "a vision tower with windows", "Qwen3VLForConditionalGeneration", ("qwen2vl",)
    ),
    "Qwen3NextForCausalLM": Known(f"{_STATE} (gated delta rule), and a gate after attention", _MOE, ("qwen3next",)),
    "Qwen3_5ForConditionalGeneration": Known(
        f"{_STATE} (gated delta rule), and a gate after attention", "Qwen3VLForConditionalGeneration", ("qwen35",)
    ),
    "SmolLM3ForCausalLM": Known("layers without rotation", "LlamaForCausalLM", ("smollm3",)),
    "StableLmForCausalLM": Known("LayerNorm, and rotation of a quarter of a head", "LlamaForCausalLM", ("stablelm",)),
    "Starcoder2ForCausalLM": Known(
        "LayerNorm, and a feed-forward part without a gate", "Qwen2ForCausalLM", ("starcoder2",)
    ),
}
_BY_GGUF = {name: known for known in UNSUPPORTED.values() for name in known.gguf}
_BY_GGUF["deepseek2"] = Known("llama.cpp's layout of latent attention", "DeepseekV3ForCausalLM, from safetensors")


def refusal(name: str) -> str:
    """Return what an error that names this architecture should add, or "" if nothing is known of it.

    name: of Hugging Face or of a GGUF file.
    """
    known = UNSUPPORTED.get(name) or _BY_GGUF.get(name)
    return f". {name} needs {known.needs}; nearest is {known.nearest}" if known else ""
