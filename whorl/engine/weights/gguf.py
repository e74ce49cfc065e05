"""GGUF files as checkpoints: llama.cpp's names, metadata and head order are converted back to Hugging Face's.

Blocks are dequantised by the `gguf` package, one tensor at a time and only the rows that are read, or passed on as they
are stored.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whorl.device import is_installed
from whorl.engine.gguf_header import Header, read_header
from whorl.models import refusal

from . import gguf_delta
from .checkpoint import Checkpoint, Source
from .gguf_blocks import Blocks, Extent
from .gguf_delta import DeltaTensors

ARCHITECTURES = {
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    **gguf_delta.ARCHITECTURES,
}
_SPARSE = ("qwen3moe", "qwen35moe", "qwen3next")
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
}
GEMMA3_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3_27B = 62  # layers of the only size whose attention is not scaled by the head size
# Integers of the metadata that the configuration is made from.
_COUNTS = (
    *("block_count", "embedding_length", "context_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "expert_count", "expert_used_count"),
    *("expert_feed_forward_length", "rope.scaling.original_context_length", "attention.sliding_window"),
)
# Frequency divisors that llama.cpp stores as tensors; they become part of the configuration.
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<what>\w+)\.(?P<kind>weight|bias)")


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; ValueError if it is damaged or of an unknown architecture."""
    if not is_installed("gguf"):
        raise ValueError(f"{path}: reading GGUF files needs the gguf package: pip install gguf")
    header = read_header(path)
    stored = _tensors(path, header)
    config = _config(path, header.metadata, stored)
    named = dict(_named(config, stored))
    sources = {name: _source(blocks) for name, blocks in named.items()}
    return Checkpoint(path=path, config=config, sources=sources, packed=lambda: _packed(path, config, named))


def _packed(path: Path, config: dict[str, Any], named: Mapping[str, Blocks]) -> Checkpoint:
    """Return the checkpoint with matrices as they are stored, in blocks."""
    matrices = {name.removesuffix(".weight"): blocks for name, blocks in named.items() if blocks.is_matrix}
    tiles = DeltaTensors.of(config)
    settings = {
        "quant_method": "gguf",
        "kinds": {name: blocks.kind.name for name, blocks in matrices.items()},
        "tiled": [name for name, blocks in matrices.items() if blocks.columns is not None],
        "tile": [] if tiles is None else [tiles.group, tiles.value_dim],
    }
    config = {**config, "quantization_config": settings}
    sources = {name: _source(blocks, is_packed=blocks.is_matrix) for name, blocks in named.items()}
    return Checkpoint(path=path, config=config, sources=sources)


def _tensors(path: Path, header: Header) -> dict[str, Blocks]:
    """Return tensors by llama.cpp's names, as views of the mapped file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    tensors, truncated = {}, []
    for name, dims, number, offset in header.tensors:
        shape = tuple(reversed(dims))
        if number not in set(GGMLQuantizationType):
            raise ValueError(f"{path}: {name} is of type {number}, which the gguf package does not know")
        kind = GGMLQuantizationType(number)
        if 0 in shape or shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise ValueError(f"{path}: {name} is {list(shape)}, expected a whole number of {kind.name} blocks")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row = shape[-1] // block * block_bytes
        count, start = prod(shape[:-1]) * row, header.start + offset
        if start + count > len(header.data):
            truncated.append(name)
            continue
        stored = np.frombuffer(header.data, np.uint8, count, start).reshape(*shape[:-1], row)
        tensors[name] = Blocks(shape=shape, kind=kind, data=stored, extent=Extent(header.data, start, count))
    if truncated:
        raise ValueError(f"{path}: truncated, which cuts {len(truncated)} tensors: {', '.join(truncated[:8])}")
    return tensors


def _named(config: Mapping[str, Any], stored: Mapping[str, Blocks]) -> Iterator[tuple[str, Blocks]]:
    """Yield each tensor under Hugging Face's name; an unknown one keeps its own, and `check_fit` reports it."""
    is_gemma, delta = config["model_type"] == "gemma3_text", DeltaTensors.of(config)
    names = NAMES | (GEMMA3_NAMES if is_gemma else gguf_delta.NAMES if delta else {})
    for name, blocks in stored.items():
        if name in _FACTORS:
            continue
        if delta is not None and (own := delta.own(name, blocks)) is not None:
            yield from own
            continue
        match = _NAME.fullmatch(name)
        if match is None or match["what"] not in names:
            yield name, blocks
            continue
        number = match["layer"]
        layer = "" if number is None else delta.layer(number) if delta else f"model.layers.{number}."
        target = f"{layer}{names[match['what']]}.{match['kind']}"
        if (is_gemma or delta is not None) and target.endswith("norm.weight"):
            blocks = replace(blocks, change=gguf_delta.minus_one)
        if config["model_type"] in ("llama", "mistral") and match["what"] in ("attn_q", "attn_k"):
            heads = "num_attention_heads" if match["what"] == "attn_q" else "num_key_value_heads"
            blocks = blocks.in_halves(config[heads])
        yield from _of_experts(target, blocks) if "{}" in target else [(target, blocks)]


def _of_experts(name: str, stack: Blocks) -> Iterator[tuple[str, Blocks]]:
    """Yield the matrices of a stack. name: theirs, with the expert's number left out."""
    for expert in range(stack.shape[0]):
        blocks, rows = stack.part(expert), stack.shape[1] // 2
        if not name.endswith("gate_up_proj.weight"):
            yield name.format(expert), blocks
            continue
        for part, first in (("gate_proj", 0), ("up_proj", rows)):
            yield name.format(expert).replace("gate_up_proj", part), blocks.rows(np.arange(first, first + rows))


def _source(blocks: Blocks, *, is_packed: bool = False) -> Source:
    """Return the source of a tensor's values, or of its bytes."""
    shape, gives, read = blocks.shape, torch.float32, blocks.read
    if is_packed:
        shape, gives, read = (shape[0], blocks.data.shape[-1]), torch.uint8, blocks.read_packed
    return Source(shape=shape, dtype=blocks.kind.name, gives=gives, nbytes=blocks.nbytes, read=read)


def _config(path: Path, metadata: Mapping[str, Any], stored: Mapping[str, Blocks]) -> dict[str, Any]:
    """Return the metadata as the values of a config.json."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture is {arch!r}; known are {', '.join(ARCHITECTURES)}{refusal(str(arch))}")
    values = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    needed: tuple[str, ...] = ("block_count", "embedding_length", "attention.head_count", "context_length")
    is_delta = arch in gguf_delta.ARCHITECTURES
    needed += gguf_delta.NEEDED if is_delta else ()
    missing = [f"{arch}.{key}" for key in needed if key not in values]
    missing += [name for name in ("token_embd.weight",) if name not in stored]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} missing")
    for key in (*_COUNTS, *(gguf_delta.COUNTS if is_delta else ())):
        value = values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < (key in needed)):
            raise ValueError(f"{path}: {arch}.{key} is {str(value)[:60]}, expected one whole number for all layers")
    name, model_type = ARCHITECTURES[arch]
    if arch == "llama" and values.get("attention.sliding_window"):
        name, model_type = "MistralForCausalLM", "mistral"
    num_experts = values.get("expert_count", 0)
    if bool(num_experts) != (arch in _SPARSE):
        raise ValueError(f"{path}: {arch} with {num_experts} experts is not supported")
    heads = values["attention.head_count"]
    config = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": stored["token_embd.weight"].shape[0],
        "hidden_size": values["embedding_length"],
        "intermediate_size": values.get("feed_forward_length") or values.get("expert_feed_forward_length"),
        "num_hidden_layers": values["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": values.get("attention.key_length", values["embedding_length"] // heads),
        "rms_norm_eps": values.get("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": values["context_length"],
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "rope_parameters": _rope(values, stored),
    }
    if arch == "gemma3":
        config |= _gemma3(values, config)
    if model_type == "mistral":
        config["sliding_window"] = values["attention.sliding_window"]
    if num_experts:
        config |= {
            "num_experts": num_experts,
            "num_experts_per_tok": values.get("expert_used_count"),
            "moe_intermediate_size": values.get("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp always does
        }
    if is_delta:
        config |= gguf_delta.config_values(values, config["rope_parameters"], arch)
    return config


def _gemma3(values: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of Gemma 3; what llama.cpp's converter leaves out are constants in its loader."""
    is_largest = config["num_hidden_layers"] == _GEMMA3_27B
    local = {"rope_type": "default", "rope_theta": values.get("rope.freq_base_swa", 10000.0)}
    config_values = {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_largest
        else config["head_dim"],
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": values.get("final_logit_softcapping"),
    }
    if (window := values.get("attention.sliding_window")) is not None:
        config_values["sliding_window"] = window
    if isinstance(every := values.get("attention.sliding_window_pattern"), list):
        config_values["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in every]
    elif every is not None:
        config_values["sliding_window_pattern"] = every
    return config_values


def _rope(values: Mapping[str, Any], stored: Mapping[str, Blocks]) -> dict[str, Any]:
    """Return `rope_parameters` of a config.json, from the metadata and the stored divisors."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": values.get("rope.freq_base", 10000.0)}
    kind = values.get("rope.scaling.type", "none")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": values.get("rope.scaling.factor", 1.0)}
    if original := values.get("rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = original
    if (factor := values.get("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = factor
    short, long = ("rope_freqs.weight",) * 2 if _FACTORS[0] in stored else _FACTORS[1:]
    if short in stored and long in stored:
        # The file has Llama 3.1's smoothing as one divisor for each channel, which is the form of longrope's factors.
        factors = {"short_factor": short, "long_factor": long}
        rope |= {key: stored[name].read((slice(None),)).tolist() for key, name in factors.items()}
        rope |= {"rope_type": "longrope"} | ({"attention_factor": 1.0} if short == long else {})
    return rope
