"""Architectures that people try and that are not supported: what each needs, and the nearest supported one."""

from typing import NamedTuple


class Known(NamedTuple):
    """needs: the features that are not implemented. nearest: a supported architecture. gguf: llama.cpp's names."""

    needs: str
    nearest: str
    gguf: tuple[str, ...] = ()


_LLAMA, _MOE, _GEMMA = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM"
_SHARED = "a shared expert beside the routed ones"
_PARALLEL = "attention and feed-forward side by side after one LayerNorm"
_STATE = "layers with a recurrent state in place of keys and values"
_HALF = "norms after each part and rotation of half a head"
_VISION, _VISION_MOE = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"

UNSUPPORTED: dict[str, Known] = {
    "ApertusForCausalLM": Known("xIELU, a feed-forward part without a gate", _LLAMA, ("apertus",)),
    "ArceeForCausalLM": Known("a feed-forward part of squared ReLU without a gate", _LLAMA, ("arcee",)),
    "BambaForCausalLM": Known(_STATE, _LLAMA),
    "BloomForCausalLM": Known("ALiBi in place of a rotation", _LLAMA, ("bloom",)),
    "CohereForCausalLM": Known(_PARALLEL, _LLAMA, ("command-r",)),
    "Cohere2ForCausalLM": Known(_PARALLEL, "MistralForCausalLM", ("cohere2",)),
    "DeepseekV2ForCausalLM": Known("V2's routing: softmax scores in place of V3's sigmoid", "DeepseekV3ForCausalLM"),
    "DeepseekV4ForCausalLM": Known("several residual streams and compressed keys", "DeepseekV32ForCausalLM"),
    "Dots1ForCausalLM": Known(f"{_SHARED}, and V3's sigmoid routing", _MOE, ("dots1",)),
    "Ernie4_5ForCausalLM": Known("rotation of pairs", _LLAMA, ("ernie4_5",)),
    "Ernie4_5_MoeForCausalLM": Known(f"{_SHARED}, and rotation of pairs", _MOE, ("ernie4_5-moe",)),
    "Ernie4_5_VLMoeForConditionalGeneration": Known("Ernie's vision tower and experts of vision", _VISION_MOE),
    "Exaone4ForCausalLM": Known("norms after each part and none before", _GEMMA, ("exaone4",)),
    "FalconForCausalLM": Known(_PARALLEL, _LLAMA, ("falcon",)),
    "GemmaForCausalLM": Known("Gemma's first form, without norms of heads", _GEMMA, ("gemma",)),
    "Gemma2ForCausalLM": Known("softcaps of attention's scores and of logits", _GEMMA, ("gemma2",)),
    "Gemma3ForConditionalGeneration": Known(
        "SigLIP's vision tower; the text model alone runs from a GGUF file", _GEMMA
    ),
    "Gemma3nForConditionalGeneration": Known("per-layer embeddings and several residual streams", _GEMMA, ("gemma3n",)),
    "Gemma4ForConditionalGeneration": Known("head sizes and rotation that differ between layers", _GEMMA, ("gemma4",)),
    "GlmForCausalLM": Known("rotation of half a head, in pairs", _LLAMA),
    "Glm4ForCausalLM": Known(_HALF, _GEMMA, ("glm4", "chatglm")),
    "GlmOcrForConditionalGeneration": Known("GLM-OCR's vision tower", "Glm4vForConditionalGeneration"),
    "GPTJForCausalLM": Known(_PARALLEL, _LLAMA, ("gptj",)),
    "GPTNeoXForCausalLM": Known(_PARALLEL, _LLAMA, ("gptneox",)),
    "FalconH1ForCausalLM": Known(_STATE, _LLAMA, ("falcon-h1",)),
    "GPT2LMHeadModel": Known("learned positions in place of a rotation", _LLAMA, ("gpt2",)),
    "GraniteForCausalLM": Known("factors of embeddings, residuals, attention and logits", _LLAMA, ("granite",)),
    "HunYuanDenseV1ForCausalLM": Known("norms of heads after the rotation", "Qwen3ForCausalLM", ("hunyuan-dense",)),
    "HunYuanMoEV1ForCausalLM": Known(f"{_SHARED}, and norms of heads after the rotation", _MOE, ("hunyuan-moe",)),
    "InternVLForConditionalGeneration": Known("InternVL's vision tower", _VISION),
    "JambaForCausalLM": Known(_STATE, _LLAMA, ("jamba",)),
    "Lfm2ForCausalLM": Known("short convolutions in place of some attention", "Qwen3ForCausalLM", ("lfm2",)),
    "Lfm2MoeForCausalLM": Known("short convolutions in place of some attention", _MOE, ("lfm2moe",)),
    "KimiLinearForCausalLM": Known("a decay for each channel of the recurrence (KDA)", "Qwen3NextForCausalLM"),
    "Kimi_K25ForConditionalGeneration": Known("MoonViT's tower, and a tokenizer of tiktoken", "DeepseekV3ForCausalLM"),
    "LlavaForConditionalGeneration": Known("CLIP's vision tower", _VISION),
    "LongcatFlashForCausalLM": Known(
        "two attentions a layer, and experts that compute nothing", "DeepseekV3ForCausalLM"
    ),
    "Llama4ForConditionalGeneration": Known(
        f"chunked attention, layers without rotation, and {_SHARED}", _MOE, ("llama4",)
    ),
    "MambaForCausalLM": Known(_STATE, _LLAMA, ("mamba", "mamba2")),
    "MiniMaxForCausalLM": Known(_STATE, _MOE),
    "MiniMaxM2ForCausalLM": Known("norms over all heads at once", _MOE, ("minimax-m2",)),
    "Mistral3ForConditionalGeneration": Known("Pixtral's vision tower", "MistralForCausalLM", ("mistral3",)),
    "MixtralForCausalLM": Known("experts stored as w1, w2 and w3", _MOE),
    "NemotronHForCausalLM": Known(_STATE, _LLAMA, ("nemotron_h",)),
    "NemotronForCausalLM": Known("LayerNorm, squared ReLU, and rotation of half a head", _LLAMA, ("nemotron",)),
    "Olmo2ForCausalLM": Known("norms after each part and none before", _GEMMA, ("olmo2",)),
    "Olmo3ForCausalLM": Known("norms after each part and none before", _GEMMA),
    "OlmoeForCausalLM": Known("norms over all heads at once", _MOE, ("olmoe",)),
    "OPTForCausalLM": Known("learned positions in place of a rotation", _LLAMA),
    "PhiForCausalLM": Known(_PARALLEL, _LLAMA, ("phi2",)),
    "Phi3ForCausalLM": Known("q, k and v, and gate and up, stored as one tensor each", _LLAMA, ("phi3", "phi4")),
    "PhimoeForCausalLM": Known("SparseMixer's routing and LayerNorm", _MOE, ("phimoe",)),
    "Qwen2MoeForCausalLM": Known(f"{_SHARED}, with its own gate", _MOE, ("qwen2moe",)),
    "Qwen2_5OmniForConditionalGeneration": Known("towers of sound and vision, and a speaker", _VISION),
    "Qwen3OmniMoeForConditionalGeneration": Known("towers of sound and vision, and a speaker", _VISION),
    "SmolLM3ForCausalLM": Known("layers without rotation", _LLAMA, ("smollm3",)),
    "SmolVLMForConditionalGeneration": Known("SigLIP's vision tower", _VISION),
    "StableLmForCausalLM": Known("LayerNorm, and rotation of a quarter of a head", _LLAMA, ("stablelm",)),
    "Starcoder2ForCausalLM": Known(
        "LayerNorm, and a feed-forward part without a gate", "Qwen2ForCausalLM", ("starcoder2",)
    ),
}
_BY_GGUF = {name: known for known in UNSUPPORTED.values() for name in known.gguf}
_BY_GGUF["deepseek2"] = Known("llama.cpp's layout of latent attention", "DeepseekV3ForCausalLM, from safetensors")
_BY_GGUF |= dict.fromkeys(
    ("gpt-oss", "gptoss"), Known("llama.cpp's layout of experts", "GptOssForCausalLM, from safetensors")
)
_BY_GGUF["glm4moe"] = Known("llama.cpp's layout of experts", "Glm4MoeForCausalLM, from safetensors")
_BY_GGUF["qwen2vl"] = Known("a file of its own for the tower", "Qwen2VLForConditionalGeneration, from safetensors")


_NEXT = (
    ". What you can do: take a model of a known architecture, such as Qwen/Qwen3-0.6B; run this one with transformers, "
    "with whorl's operators inside (docs/adapters.md); or add it, in one file (docs/models.md, Adding a model)"
)


def refusal(name: str) -> str:
    """Return what an error that names this architecture should add: what is known of it, and what to do.

    name: of Hugging Face or of a GGUF file.
    """
    known = UNSUPPORTED.get(name) or _BY_GGUF.get(name)
    return (f". {name} needs {known.needs}; nearest is {known.nearest}" if known else "") + _NEXT
