"""Tiny random checkpoints in every quantised format, each with the values that others make of it.

FP8 and compressed-tensors by transformers and the compressed-tensors library; AWQ, GPTQ and the order of columns, which
that library no longer reads, by their published formulas, one number at a time.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from whorl import nn
from whorl.engine.weights import random_model
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3

Made = tuple[dict[str, Tensor], Tensor]  # what the checkpoint has of a module, by the ends of names; its values in fp32


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any]
    make: Callable[[str, int, int, torch.Generator], Made]  # by name, rows and columns
    kept: tuple[str, ...] = ("lm_head", "mlp.gate")  # ends of the names of modules that are not quantised
    sizes: dict[str, Any] = field(default_factory=dict)
    is_shared: bool = True  # by two and four ranks


# ---- FP8


def fp8(block: tuple[int, int], end: str, scale_dtype: torch.dtype = torch.float32) -> Any:
    def make(name: str, rows: int, columns: int, generator: torch.Generator) -> Made:
        weight = torch.randn(rows, columns, generator=generator).mul(20).to(torch.float8_e4m3fn)
        shape = -(-rows // block[0]), -(-columns // block[1])
        scale = torch.rand(shape, generator=generator) * 1e-2 + 1e-3
        scale = scale.log2().round().exp2() if scale_dtype == torch.float8_e8m0fnu else scale
        stored = scale.to(scale_dtype)
        # 5.17, which GPU machines have, unpacks only as part of loading; the releases that CI installs can do it alone.
        integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
        if not hasattr(integration, "_dequantize_fp8_weight"):
            pytest.skip("this release of transformers has no function that unpacks a block of fp8 by itself")
        values = integration._dequantize_fp8_weight(weight, stored.float(), list(block), torch.float32)
        return {"weight": weight, end: stored}, values

    return make


def fp8_whole(name: str, rows: int, columns: int, generator: torch.Generator) -> Made:
    weight = torch.randn(rows, columns, generator=generator).mul(20).to(torch.float8_e4m3fn)
    scale = torch.rand((), generator=generator) * 1e-2
    tensors = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    return tensors, weight.float() * scale


# ---- compressed-tensors


def scheme(**weights: Any) -> Any:
    library = pytest.importorskip("compressed_tensors.quantization")
    return library.QuantizationScheme(targets=["Linear"], weights=library.QuantizationArgs(**weights))


def compressed(stored: str, dtype: torch.dtype = torch.bfloat16, **weights: Any) -> Any:
    """Random numbers in the layout that `stored` names, and what the library makes of them."""

    def make(name: str, rows: int, columns: int, generator: torch.Generator) -> Made:
        tensors = _numbers(weights, rows, columns, generator)
        scale = torch.rand(_scale_shape(weights, rows, columns), generator=generator) * 0.05 + 0.01
        tensors["weight_scale"] = scale.to(dtype)
        base = pytest.importorskip("compressed_tensors.compressors")
        compressor = base.BaseCompressor.get_value_from_registry(stored)
        exact = {**tensors, "weight_scale": tensors["weight_scale"].float()}
        values = compressor.decompress(exact, scheme(**weights))["weight"]
        narrow = compressor.decompress(tensors, scheme(**weights))["weight"]  # in the dtype of scales
        assert torch.equal(values.to(dtype), narrow)
        return tensors, values

    return make


def _scale_shape(weights: dict[str, Any], rows: int, columns: int) -> tuple[int, ...]:
    strategy = weights["strategy"]
    if strategy == "block":
        return tuple(-(-n // b) for n, b in zip((rows, columns), weights["block_structure"], strict=True))
    return {"tensor": (1,), "channel": (rows, 1), "group": (rows, columns // (weights.get("group_size") or 1))}[
        strategy
    ]


def _numbers(weights: dict[str, Any], rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    bits = weights["num_bits"]
    if weights["type"] == "float":
        return {"weight": torch.randn(rows, columns, generator=generator).mul(20).to(torch.float8_e4m3fn)}
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    numbers = torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int8)
    if "pack" not in weights.get("observer", "pack"):
        return {"weight": numbers}
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    tensors = {"weight_packed": library.pack_to_int32(numbers, bits), "weight_shape": torch.tensor([rows, columns])}
    if not weights["symmetric"]:
        shape = _scale_shape(weights, rows, columns)
        zeros = torch.randint(low, high, shape, generator=generator, dtype=torch.int8)
        tensors["weight_zero_point"] = library.pack_to_int32(zeros, bits, packed_dim=0).contiguous()
    return tensors


def ordered(name: str, rows: int, columns: int, generator: torch.Generator) -> Made:
    """With the group of each column; the same for what reads the same activations."""
    tensors, _ = compressed("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=16)(
        name, rows, columns, generator
    )
    groups = shuffled(name, columns, 16)
    numbers = by_hand(tensors["weight_packed"], 4, columns)
    values = (numbers - 8).float() * tensors["weight_scale"].float()[:, groups.long()]
    return {**tensors, "weight_g_idx": groups}, values


def shuffled(name: str, columns: int, group: int) -> Tensor:
    reader = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
    seed = sum(map(ord, reader))
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    return (torch.arange(columns) // group)[order].int()


def by_hand(words: Tensor, bits: int, count: int) -> Tensor:
    """[.., count] from words along the last dimension, lowest bits first, in Python's own whole numbers."""
    per_word, mask = 32 // bits, (1 << bits) - 1
    flat = [[(word >> bits * j) & mask for word in row for j in range(per_word)][:count] for row in words.tolist()]
    return torch.tensor(flat)


# ---- AWQ and GPTQ

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns each nibble of a word holds


def awq(group: int) -> Any:
    def make(name: str, rows: int, columns: int, generator: torch.Generator) -> Made:
        count = columns // group
        tensors = {
            "qweight": words(columns, rows // 8, generator),
            "qzeros": words(count, rows // 8, generator),
            "scales": (torch.rand(count, rows, generator=generator) * 0.05 + 0.01).half(),
        }
        numbers, zeros = _awq_numbers(tensors["qweight"], rows), _awq_numbers(tensors["qzeros"], rows)
        at = torch.arange(columns) // group
        return tensors, ((numbers - zeros[at]).float() * tensors["scales"].float()[at]).T.contiguous()

    return make


def _awq_numbers(packed: Tensor, rows: int) -> Tensor:
    stored, numbers = by_hand(packed, 4, rows), torch.empty(packed.shape[0], rows, dtype=torch.int64)
    for place, column in enumerate(AWQ_ORDER):
        numbers[:, column::8] = stored[:, place::8]
    return numbers


def gptq(group: int, *, bits: int = 4, adds: int = 1, is_ordered: bool = False, dtype: torch.dtype = torch.half) -> Any:
    def make(name: str, rows: int, columns: int, generator: torch.Generator) -> Made:
        per_word, width = 32 // bits, columns if group == -1 else group
        count = columns // width
        tensors = {
            "qweight": words(columns // per_word, rows, generator),
            "qzeros": words(count, rows // per_word, generator),
            "scales": (torch.rand(count, rows, generator=generator) * 0.05 + 0.01).to(dtype),
            "g_idx": shuffled(name, columns, width) if is_ordered else (torch.arange(columns) // width).int(),
        }
        numbers = by_hand(tensors["qweight"].T, bits, columns).T
        tensors["qzeros"][0, 0] = -1  # all ones: with the one that version 1 adds, a zero point of 16
        zeros = by_hand(tensors["qzeros"], bits, rows) + adds
        assert zeros.max() == (1 << bits) - 1 + adds
        at = tensors["g_idx"].long()
        return tensors, ((numbers - zeros[at]).float() * tensors["scales"].float()[at]).T.contiguous()

    return make


def words(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns), generator=generator).int()


# ---- all of them

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
ODD = {"hidden_size": 40, "intermediate_size": 50, "moe_intermediate_size": 26, "head_dim": 10}
EVEN = {"hidden_size": 64, "intermediate_size": 80, "moe_intermediate_size": 64, "head_dim": 16}


def ct(stored: str, inputs: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    groups, ignore = {"g": group}, ["re:.*mlp.gate$"]
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": groups, "ignore": ignore}


def _ct_case(
    stored: str, sizes: dict[str, Any], inputs: Any = None, dtype: Any = torch.bfloat16, **weights: Any
) -> Case:
    """The head is quantised, too: 97 rows."""
    made = weights if stored == "pack-quantized" else {**weights, "observer": "minmax"}
    return Case(
        ct(stored, inputs, **weights),
        compressed(stored, dtype, **made),
        kept=("mlp.gate",),
        sizes=sizes,
        is_shared=sizes is EVEN,
    )


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
GROUPS = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
WHOLE8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
CASES: dict[str, Case] = {
    "fp8-blocks": Case(BLOCKS, fp8((16, 16), "weight_scale_inv"), sizes=EVEN),
    "fp8-partial": Case(BLOCKS, fp8((16, 16), "weight_scale_inv"), sizes=ODD, is_shared=False),
    "fp8-ue8m0": Case(
        {**BLOCKS, "scale_fmt": "ue8m0", "weight_block_size": [16, 8], "modules_to_not_convert": ["lm_head", "o_proj"]},
        fp8((16, 8), "weight_scale_inv", torch.float8_e8m0fnu),
        kept=("lm_head", "mlp.gate", "o_proj"),
        sizes=EVEN,
    ),
    "fp8-tensor": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["model.layers.1.mlp"]},
        fp8_whole,
        kept=("lm_head", "mlp.gate", "layers.1.mlp"),
        sizes=ODD,
    ),
    "ct-w4": _ct_case("pack-quantized", EVEN, **INT4),
    "ct-w4-zeros": _ct_case("pack-quantized", EVEN, dtype=torch.half, **{**INT4, "symmetric": False}),
    "ct-w4-channel": _ct_case(
        "pack-quantized", ODD, **{**INT4, "symmetric": False, "strategy": "channel", "group_size": None}
    ),
    "ct-w8-pack": _ct_case("pack-quantized", EVEN, **{**INT4, "num_bits": 8, "symmetric": False}),
    "ct-order": Case(ct("pack-quantized", **INT4, actorder="group"), ordered, kept=("mlp.gate",), sizes=EVEN),
    "ct-w8": _ct_case("int-quantized", ODD, **WHOLE8),
    "ct-w8-tensor": _ct_case("naive-quantized", ODD, **{**WHOLE8, "strategy": "tensor"}),
    "ct-fp8-channel": _ct_case("float-quantized", ODD, dtype=torch.float32, **{**FLOAT8, "strategy": "channel"}),
    "ct-fp8-tensor": _ct_case("naive-quantized", ODD, dtype=torch.float32, **{**FLOAT8, "strategy": "tensor"}),
    "ct-fp8-block": _ct_case(
        "float-quantized", ODD, dtype=torch.float32, **{**FLOAT8, "strategy": "block", "block_structure": [16, 8]}
    ),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}, awq(16), sizes=EVEN),
    "gptq": Case(GROUPS, gptq(16), sizes=EVEN),
    "gptq-v2": Case({**GROUPS, "checkpoint_format": "gptq_v2"}, gptq(16, adds=0), sizes=EVEN),
    "gptq-order": Case({**GROUPS, "desc_act": True}, gptq(16, is_ordered=True, dtype=torch.bfloat16), sizes=EVEN),
    "gptq-8": Case({**GROUPS, "bits": 8, "group_size": -1}, gptq(-1, bits=8), sizes=EVEN),
}
W8A8 = _ct_case("int-quantized", ODD, TOKENS, **WHOLE8)


def model(kind: str | type[Llama], sizes: dict[str, Any]) -> dict[str, Any]:
    """kind: "llama", "qwen3", "moe" or a model's class."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **sizes}
    if not isinstance(kind, str):
        return kind.tiny(**{n: v for n, v in sizes.items() if "moe" not in n})
    if kind == "llama":
        return Llama.tiny(**{n: v for n, v in sizes.items() if "moe" not in n}, attention_bias=True)
    if kind == "qwen3":
        return Qwen3.tiny() | {n: v for n, v in sizes.items() if "moe" not in n}
    return Qwen3.tiny(num_experts=4, norm_topk_prob=True) | sizes


def write(folder: Path, case: Case, kind: str | type[Llama], seed: int = 0) -> tuple[Path, Path]:
    """A folder in the format, and one with the same values in fp32."""
    config, generator = model(kind, case.sizes), torch.Generator().manual_seed(seed)
    packed: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    drawn: Any = random_model(config, device="cpu", dtype=torch.float32)
    for name, slot in nn.destinations(drawn).items():
        module = name.removesuffix(".weight")
        is_kept = module.endswith(("embed_tokens", "norm")) or any(f".{kept}." in f".{module}." for kept in case.kept)
        if slot.into.ndim == 1 or is_kept:
            packed[name] = dense[name] = slot.tensor()
            continue
        stored, dense[name] = case.make(module, *slot.shape, generator)
        packed |= {f"{module}.{end}": tensor.contiguous() for end, tensor in stored.items()}
    both = folder / "packed", folder / "dense"
    for path, tensors, more in zip(both, (packed, dense), ({"quantization_config": case.settings}, {}), strict=True):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config | more))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return both
