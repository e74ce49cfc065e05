"""GGUF files of Qwen3.5 and Qwen3-Next, as llama.cpp's converter lays them out, from Hugging Face's tensors."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "mtp.fc.weight": "blk.{next}.nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "blk.{next}.nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "blk.{next}.nextn.hnorm.weight",
    "mtp.norm.weight": "blk.{next}.nextn.shared_head_norm.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    **{f"self_attn.{n}_proj.weight": f"attn_{n}.weight" for n in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{n}_norm.weight": f"attn_{n}_norm.weight" for n in "qk"},
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    **{f"mlp.{n}_proj.weight": f"ffn_{n}.weight" for n in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{n}_proj.weight": f"ffn_{n}_shexp.weight" for n in ("gate", "up", "down")},
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
ALWAYS_F32 = ("ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_dt", "norm")


def tiled(x: Array, dim: int, config: Mapping[str, Any], width: int) -> Array:
    """Put the first value head of every key head first, then the second ones."""
    heads = config["linear_num_key_heads"]
    shape = x.shape
    x = x.reshape(*shape[:dim], heads, -1, width, *shape[dim + 1 :])
    return np.ascontiguousarray(x.swapaxes(dim, dim + 1)).reshape(shape)


def in_tiles(name: str, x: Array, config: Mapping[str, Any]) -> Array:
    """Order the value heads of a tensor as files of qwen35 have them."""
    width = config["linear_value_head_dim"]
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate((x[:keys], tiled(x[keys:], 0, config, width)))
    if name.endswith("in_proj_z.weight"):
        return tiled(x, 0, config, width)
    if name.endswith("out_proj.weight"):
        return tiled(x, 1, config, width)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return tiled(x, 0, config, 1)
    return x


def of_next(name: str, x: Array, config: Mapping[str, Any]) -> dict[str, Array]:
    """Separate the rows of in_proj_qkvz, which are by key head."""
    heads, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    q, k, v, z = np.split(x.reshape(heads, -1, x.shape[1]), np.cumsum([dim, dim, values]), 1)
    flat = [part.reshape(-1, x.shape[1]) for part in (q, k, v, z)]
    return {f"{name}attn_qkv.weight": np.concatenate(flat[:3]), f"{name}attn_gate.weight": flat[3]}


def converted(
    tensors: Mapping[str, Array], config: Mapping[str, Any], arch: str, *, is_old: bool = False, fuses: bool = False
) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a file. is_old: qwen3next's projections by key head; fuses: gate and up in one stack."""
    layers = config["num_hidden_layers"]
    for name, x in tensors.items():
        if name in NAMES:
            yield NAMES[name].format(next=layers), x + 1 if name.endswith("norm.weight") or "_norm_" in name else x
            continue
        match = re.fullmatch(r"(model|mtp)\.layers\.(\d+)\.(.*)", name)
        assert match is not None, name
        number, what = int(match[2]) + (layers if match[1] == "mtp" else 0), match[3]
        block = f"blk.{number}."
        if what.endswith("norm.weight") and what != "linear_attn.norm.weight":
            x = x + 1
        if arch != "qwen3next":
            x = in_tiles(what, x, config)
        if what == "linear_attn.A_log":
            x = -np.exp(x)
        if what == "linear_attn.conv1d.weight":
            x = x.squeeze()
        if what == "linear_attn.in_proj_qkvz.weight":
            yield from [(f"{block}ssm_in.weight", x)] if is_old else of_next(block, x, config).items()
        elif what == "mlp.experts.gate_up_proj" and fuses:
            yield f"{block}ffn_gate_up_exps.weight", x
        elif what == "mlp.experts.gate_up_proj":
            gate, up = np.split(x, 2, 1)
            yield f"{block}ffn_gate_exps.weight", gate
            yield f"{block}ffn_up_exps.weight", up
        else:
            yield f"{block}{LAYER_NAMES[what]}", x


def write(
    path: Path,
    arch: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Array],
    kind: str = "F32",
    **options: bool,
) -> None:
    """Write a file. kind: of matrices. options: of `converted`."""
    writer, number = gguf.GGUFWriter(path, arch), gguf.GGMLQuantizationType[kind]
    predicted = config.get("mtp_num_hidden_layers", 0)
    rope, dim = config["rope_parameters"], config["head_dim"]
    writer.add_block_count(config["num_hidden_layers"] + predicted)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(dim * rope["partial_rotary_factor"]))
    if arch != "qwen3next":
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_ssm_conv_kernel(config.get("linear_conv_kernel_dim", 4))
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["full_attention_interval"])
    if predicted:
        writer.add_nextn_predict_layers(predicted)
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    _add_tokenizer(writer, config["vocab_size"])
    for name, x in converted(tensors, config, arch, **options):
        x = np.ascontiguousarray(x, dtype=np.float32)
        is_packed = x.ndim > 1 and kind != "F32" and not any(part in name for part in ALWAYS_F32)
        if is_packed and x.shape[-1] % gguf.GGML_QUANT_SIZES[number][0] == 0:
            writer.add_tensor(name, quantized(x, number), raw_dtype=number)
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, size: int) -> None:
    """Tokens of ASCII letters: llama.cpp needs a vocabulary, and reports no token that ends inside a character."""
    tokens = [chr(code) for code in range(33, 127)][: size - 1]
    tokens += [f"<{i}>" for i in range(size - 1 - len(tokens))] + ["<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (size - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(size - 1)


def quantized(x: Array, number: Any) -> Array:
    """Quantize as the gguf package does, and to Q4_K, which it only reads: 8 sub-blocks of 32 with 6-bit scales."""
    if number != gguf.GGMLQuantizationType.Q4_K:
        stored: Array = gguf.quants.quantize(x, number)
        return stored
    parts = x.reshape(-1, 8, 32)
    low = np.minimum(parts.min(2), 0)
    steps = (parts.max(2) - low) / 15
    d, dmin = ((top.max(1, keepdims=True) / 63).astype(np.float16) for top in (steps, -low))
    scale, minimum = (
        np.clip(np.rint(top / np.maximum(unit.astype(np.float32), 1e-12)), 0, 63).astype(np.uint8)
        for top, unit in ((steps, d), (-low, dmin))
    )
    step, shift = ((unit.astype(np.float32) * n)[..., None] for unit, n in ((d, scale), (dmin, minimum)))
    codes = np.clip(np.rint((parts + shift) / np.maximum(step, 1e-12)), 0, 15).astype(np.uint8)
    first, second = slice(0, 4), slice(4, 8)
    high = [(n[:, second] >> 4) << 6 for n in (scale, minimum)]
    mixed = (scale[:, second] & 15) | ((minimum[:, second] & 15) << 4)
    scales = np.concatenate((scale[:, first] | high[0], minimum[:, first] | high[1], mixed), 1)
    nibbles = (codes[:, 0::2] | (codes[:, 1::2] << 4)).reshape(-1, 128)
    blocks = np.concatenate((d.view(np.uint8), dmin.view(np.uint8), scales, nibbles), 1)
    return blocks.reshape(*x.shape[:-1], -1)
