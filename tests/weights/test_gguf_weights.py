"""GGUF files as checkpoints, written as llama.cpp's converter lays them out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_sequence import PROMPT, close
from test_models import hf_logits, save
from test_weights import load, logits, shares

from whorl.models.gemma3 import Gemma3
from whorl.models.llama import Llama
from whorl.models.mistral import Mistral
from whorl.models.qwen2 import Qwen2
from whorl.models.qwen3 import Qwen3

gguf = pytest.importorskip("gguf")

GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "gate": "ffn_gate_inp",
    "norm": "output_norm",
    "lm_head": "output",
}


GEMMA3_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does to the q and k of Llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    arch: str,
    hf: Any,
    kind: Any = None,
    keys: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """The checkpoint of a transformers model as llama.cpp's converter lays it out."""
    config = hf.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_array("tokenizer.ggml.tokens", ["a", "\u00e9", "<s>"])
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key, value in (keys or {}).items():
        (
            writer.add_string
            if isinstance(value, str)
            else writer.add_float32
            if isinstance(value, float)
            else writer.add_uint32
        )(key, value)
    for name, tensor in hf.state_dict().items():
        for target, value in gguf_tensors(name, tensor.numpy(), config, arch).items():
            is_matrix = value.ndim > 1 and kind is not None and value.shape[-1] % 32 == 0
            if is_matrix:
                writer.add_tensor(target, gguf.quants.quantize(value, kind), raw_dtype=kind)
            else:
                writer.add_tensor(target, value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(name: str, value: np.ndarray, config: Any, arch: str) -> dict[str, np.ndarray]:
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return {}
    *rest, what, kind = name.split(".")
    layer = f"blk.{rest[2]}." if "layers" in rest else ""
    if kind == "gate_up_proj":  # transformers stacks the experts
        layer, gate_up = f"blk.{rest[2]}.", np.split(value, 2, 1)
        return {
            f"{layer}ffn_{n}_exps.weight": np.ascontiguousarray(v) for n, v in zip(("gate", "up"), gate_up, strict=True)
        }
    if what == "experts":
        return {f"blk.{rest[2]}.ffn_down_exps.weight": value}
    if arch == "llama" and what in ("q_proj", "k_proj"):
        value = permuted(value, config.num_attention_heads if what == "q_proj" else config.num_key_value_heads)
    if arch == "gemma3" and what.endswith("norm"):
        value = value + 1
    names = GGUF_NAMES | (GEMMA3_NAMES if arch == "gemma3" else {})
    return {f"{layer}{names[what]}.{kind}": np.ascontiguousarray(value)}


GGUFS = {
    "llama": ("llama", Llama.tiny()),
    "llama-tied-bias": ("llama", Llama.tiny(tie_word_embeddings=True, attention_bias=True)),
    "gemma3": ("gemma3", Gemma3.tiny(num_hidden_layers=7, sliding_window_pattern=6, query_pre_attn_scalar=16)),
    "mistral": ("llama", Mistral.tiny(head_dim=16)),
    "qwen2": ("qwen2", Qwen2.tiny()),
    "qwen3": ("qwen3", Qwen3.tiny()),
    "qwen3moe": ("qwen3moe", Qwen3.tiny(num_experts=4, norm_topk_prob=True, moe_intermediate_size=32)),
}


@pytest.mark.parametrize("name", GGUFS)
def test_gguf_equals_transformers(name: str, tmp_path: Path) -> None:
    arch, config = GGUFS[name]
    hf = save(tmp_path / "hf", config)
    windows = {f"{arch}.attention.sliding_window": config["sliding_window"]} if "sliding_window" in config else {}
    write_gguf(tmp_path / "model.gguf", arch, hf, keys=windows)
    close(logits(load(tmp_path / "model.gguf", unpack=True)), hf_logits(hf, PROMPT))
    assert torch.equal(logits(load(tmp_path, unpack=True)), logits(load(tmp_path / "model.gguf", unpack=True))), (
        "a folder with one GGUF file"
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "Q5_1", "BF16", "F16"])
def test_gguf_types(kind: str, tmp_path: Path) -> None:
    """transformers runs on the weights as the gguf package rounds them."""
    kind = gguf.GGMLQuantizationType[kind]
    hf = save(tmp_path / "hf", GGUFS["qwen3moe"][1])
    write_gguf(tmp_path / "model.gguf", "qwen3moe", hf, kind)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1 and parameter.shape[-1] % 32 == 0:
                rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(rounded.reshape(parameter.shape)))
    close(logits(load(tmp_path / "model.gguf", unpack=True)), hf_logits(hf, PROMPT))


def test_gguf_shares_of_ranks(tmp_path: Path) -> None:
    hf = save(tmp_path / "hf", GGUFS["llama"][1])
    write_gguf(tmp_path / "model.gguf", "llama", hf, gguf.GGMLQuantizationType.Q8_0)
    whole = dict(load(tmp_path / "model.gguf", unpack=True).named_parameters())
    first, second = (dict(model.named_parameters()) for model in shares(tmp_path / "model.gguf", 2))
    name = "model.layers.1.self_attn.qkv_proj.weight"
    q, k, v = whole[name].split([32, 16, 16])
    assert torch.equal(first[name], torch.cat([q[:16], k[:8], v[:8]]))
    assert torch.equal(second[name], torch.cat([q[16:], k[8:], v[8:]]))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(torch.cat([first[name], second[name]], 1), whole[name])


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_k_quants(kind: str) -> None:
    from whorl.engine.weights.gguf import Blocks

    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    data = np.random.default_rng(0).integers(0, 60, (6, 512 // block * size), dtype=np.uint8)
    expected = gguf.quants.dequantize(data, number)
    part = Blocks(shape=(6, 512), kind=number, data=data).read((slice(2, 4), slice(100, 300)))
    assert torch.equal(part, torch.from_numpy(expected[2:4, 100:300].copy()))


def test_gguf_rope_factors_are_llama3_s(tmp_path: Path) -> None:
    """llama.cpp stores what llama3 does to each frequency as a tensor."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
    hf = save(tmp_path / "hf", Llama.tiny(rope_parameters=rope))
    plain = 1 / 10000.0 ** (np.arange(0, 8, 2) / 8)
    factors = (plain / hf.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors[-1] > 7
    keys = {"llama.rope.scaling.original_context_length": 64}  # which must not scale attention
    write_gguf(tmp_path / "model.gguf", "llama", hf, keys=keys, extra={"rope_freqs.weight": factors})
    close(logits(load(tmp_path / "model.gguf", unpack=True)), hf_logits(hf, PROMPT))


def test_gguf_says_of_gemma3_what_llama_cpp_takes_for_granted() -> None:
    """Of the 4B and the 27B model, whose positions are stretched in global layers alone."""
    from whorl.engine.weights.gguf import _gemma3

    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    sizes = {"hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128, "rope_parameters": rope}
    small, large = (_gemma3({"attention.sliding_window": 1024}, sizes | {"num_hidden_layers": n}) for n in (34, 62))
    assert (small["query_pre_attn_scalar"], large["query_pre_attn_scalar"]) == (128, 168)
    config = Gemma3.tiny(**sizes, num_hidden_layers=12) | _gemma3({}, sizes | {"num_hidden_layers": 12})
    parsed = Gemma3.config_class.from_hf(config)
    assert (parsed.rope.rope_type, parsed.rope.factor, parsed.rope.base) == ("linear", 8.0, 1e6)
    assert (parsed.local_rope.rope_type, parsed.local_rope.base) == ("default", 1e4)
    named = _gemma3({"attention.sliding_window_pattern": [True, False]}, sizes | {"num_hidden_layers": 2})
    assert named["layer_types"] == ["sliding_attention", "full_attention"]


def test_gguf_yarn(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    hf = save(tmp_path / "hf", Qwen3.tiny(rope_parameters=rope))
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    write_gguf(tmp_path / "model.gguf", "qwen3", hf, keys={f"qwen3.rope.scaling.{k}": v for k, v in keys.items()})
    close(logits(load(tmp_path / "model.gguf", unpack=True)), hf_logits(hf, PROMPT))


def test_gguf_files_that_are_refused(tmp_path: Path) -> None:
    hf = save(tmp_path / "hf", Llama.tiny())
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", hf, extra={"blk.0.odd.weight": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match=r"1 not part of the model: blk\.0\.odd\.weight"):
        load(path)
    write_gguf(path, "llama", hf)
    path.write_bytes(path.read_bytes()[:-600])
    with pytest.raises(ValueError, match=r"truncated, which cuts 1 tensors: output\.weight"):
        load(path)
    write_gguf(path, "gemma", hf)
    with pytest.raises(
        ValueError,
        match=r"architecture is 'gemma'; known are .*llama, .*qwen3next\. gemma needs .*; nearest is Gemma3.*or add it",
    ):
        load(path)
    write_gguf(path, "llama", hf, keys={"llama.expert_count": 8})
    with pytest.raises(ValueError, match="llama with 8 experts is not supported"):
        load(path)
    write_gguf(path, "llama", hf)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match="the GGUF header is cut off or damaged"):
        load(path)
    path.write_bytes(b"GGML rather than GGUF")
    with pytest.raises(ValueError, match="not a GGUF file"):
        load(path)
