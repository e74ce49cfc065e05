"""GGUF files as checkpoints: llama.cpp's names, metadata and head order are converted back to Hugging Face's.

Blocks are dequantised by the `gguf` package, one tensor at a time and only the rows that are read, or passed on as they
are stored.
"""

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from whorl.device import is_installed
from whorl.engine.gguf_header import Header, read_header
from whorl.models import refusal
from whorl.nn import Index

from .checkpoint import Checkpoint, Source

ARCHITECTURES = {
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
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
_VALUES_AT_ONCE = 1 << 20  # dequantised at a time: the package needs several times their memory
Array = np.ndarray[Any, Any]
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<what>\w+)\.(?P<kind>weight|bias)")


class Extent(NamedTuple):
    """Bytes of a mapped file."""

    data: mmap.mmap
    start: int
    count: int

    def release(self) -> None:
        """Tell the system that they are no longer needed. Reading them again is slower, no more."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, first, self.start + self.count - first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """A tensor as it is stored: `data` [*leading dims, bytes of a row] of blocks of `kind`, with rows in `order`.

    offset: what llama.cpp's converter has added to every number of a vector. extent: of the mapped file; its memory is
    let go of when the bytes have been read.
    """

    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    data: Array
    order: Array | None = None
    offset: float = 0.0
    extent: Extent | None = None

    def read(self, index: Index) -> Tensor:
        """Return the values of a part; of a matrix, rows are selected before they are dequantised."""
        from gguf.quants import dequantize

        rows: Any = index[0] if self.order is None else self.order[index[0]]
        if len(self.shape) == 1:
            values = dequantize(self.data, self.kind)[rows] - np.float32(self.offset)
            return torch.from_numpy(np.array(values, dtype=np.float32))
        stored, (columns,) = self.data[rows], index[1:]
        values = np.empty((len(stored), len(range(self.shape[1])[columns])), np.float32)
        step = max(_VALUES_AT_ONCE // self.shape[1], 1)
        for first in range(0, len(stored), step):
            part = np.ascontiguousarray(stored[first : first + step])
            values[first : first + step] = dequantize(part, self.kind)[:, columns]
        return torch.from_numpy(values)

    def read_packed(self, index: Index) -> Tensor:
        """Return the stored bytes of a part. index: rows, and columns in bytes."""
        rows: Any = index[0] if self.order is None else self.order[index[0]]
        stored = np.array(self.data[rows][(slice(None), *index[1:])])
        if self.extent is not None:
            self.extent.release()
        return torch.from_numpy(stored)

    def part(self, number: int) -> "Blocks":
        """Return one matrix of a stack, such as an expert."""
        data, extent = self.data[number], self.extent
        if extent is not None:
            extent = extent._replace(start=extent.start + number * data.nbytes, count=data.nbytes)
        return Blocks(shape=self.shape[1:], kind=self.kind, data=data, extent=extent)

    def in_halves(self, num_heads: int) -> "Blocks":
        """Undo the channel order of llama.cpp's Llama heads, which rotate neighbours: put even ones first, then odd."""
        order = np.arange(self.shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return replace(self, order=order)


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
    is_matrix = {name: len(blocks.shape) > 1 for name, blocks in named.items()}
    kinds = {name.removesuffix(".weight"): named[name].kind.name for name, packs in is_matrix.items() if packs}
    config = {**config, "quantization_config": {"quant_method": "gguf", "kinds": kinds}}
    sources = {name: _source(blocks, is_packed=is_matrix[name]) for name, blocks in named.items()}
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
    is_gemma = config["model_type"] == "gemma3_text"
    names = NAMES | GEMMA3_NAMES if is_gemma else NAMES
    for name, blocks in stored.items():
        if name in _FACTORS:
            continue
        match = _NAME.fullmatch(name)
        if match is None or match["what"] not in names:
            yield name, blocks
            continue
        layer = f"model.layers.{match['layer']}." if match["layer"] else ""
        target = f"{layer}{names[match['what']]}.{match['kind']}"
        if is_gemma and target.endswith("norm.weight"):
            blocks = replace(blocks, offset=1.0)
        if config["model_type"] in ("llama", "mistral") and match["what"] in ("attn_q", "attn_k"):
            heads = "num_attention_heads" if match["what"] == "attn_q" else "num_key_value_heads"
            blocks = blocks.in_halves(config[heads])
        if "{}" not in target:
            yield target, blocks
            continue
        for expert in range(blocks.shape[0]):
            yield target.format(expert), blocks.part(expert)


def _source(blocks: Blocks, *, is_packed: bool = False) -> Source:
    """Return the source of a tensor's values, or of its bytes."""
    shape, gives = (blocks.data.shape, torch.uint8) if is_packed else (blocks.shape, torch.float32)
    read = blocks.read_packed if is_packed else blocks.read
    return Source(shape=shape, dtype=blocks.kind.name, gives=gives, nbytes=blocks.data.nbytes, read=read)


def _config(path: Path, metadata: Mapping[str, Any], stored: Mapping[str, Blocks]) -> dict[str, Any]:
    """Return the metadata as the values of a config.json."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture is {arch!r}; known are {', '.join(ARCHITECTURES)}{refusal(str(arch))}")
    values = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    needed = ("block_count", "embedding_length", "attention.head_count", "context_length")
    missing = [f"{arch}.{key}" for key in needed if key not in values]
    missing += [name for name in ("token_embd.weight",) if name not in stored]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} missing")
    for key in _COUNTS:
        value = values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < (key in needed)):
            raise ValueError(f"{path}: {arch}.{key} is {str(value)[:60]}, expected one whole number for all layers")
    name, model_type = ARCHITECTURES[arch]
    if arch == "llama" and values.get("attention.sliding_window"):
        name, model_type = "MistralForCausalLM", "mistral"
    num_experts = values.get("expert_count", 0)
    if bool(num_experts) != (arch == "qwen3moe"):
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
            "norm_topk_prob": True,  # llama.cpp's qwen3moe always does
        }
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
