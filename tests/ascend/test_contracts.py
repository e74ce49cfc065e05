"""The vendor contracts: data, version drift and device limits, without torch."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from whorl import contracts
from whorl.contracts import CONTRACTS, Contract, call_arguments, check_installed


def test_importing_needs_no_torch() -> None:
    code = "import sys, whorl.contracts; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_parse_schema() -> None:
    parameters, returns = contracts.parse_schema(
        "(Tensor(a!) x, int[]? sizes=None, *, str mode='half', float eps=1e-06) -> (Tensor, Tensor(a!))"
    )
    assert [(p.name, p.type, p.default, p.keyword_only) for p in parameters] == [
        ("x", "Tensor", contracts.REQUIRED, False),
        ("sizes", "int[]?", None, False),
        ("mode", "str", "half", True),
        ("eps", "float", 1e-6, True),
    ]
    assert returns == ("Tensor", "Tensor")


def test_parameters_added_later_know_their_release() -> None:
    contract = Contract("op(Tensor x, int a=0, int b=0) -> Tensor", added={"2.11": "a b"})
    assert [p.since for p in contract.parameters] == ["2.9", "2.11", "2.11"]
    with pytest.raises(ValueError, match="c added later, but not in the schema op"):
        _ = Contract("op(Tensor x) -> Tensor", added={"2.11": "c"}).parameters


def test_in_place_arguments_are_parameters() -> None:
    for contract in CONTRACTS.values():
        assert set(contract.in_place) <= {p.name for p in contract.parameters}


# Drift.

MROPE_2_9 = ["positions", "query", "key", "cos_sin_cache", "head_size", "mrope_section", "rotary_mode"]


def test_a_default_that_an_old_schema_lacks_is_left_out() -> None:
    requested = {"rotary_mode": "half", "cache_mode": "default"}
    assert call_arguments("npu_mrope", MROPE_2_9, **requested) == {"rotary_mode": "half"}
    assert call_arguments("npu_mrope", [*MROPE_2_9, "cache_mode"], **requested) == requested


def test_a_wish_that_an_old_schema_lacks_names_the_version() -> None:
    with pytest.raises(RuntimeError, match=r"npu_mrope: cache_mode='interleave' needs torch_npu 2\.10"):
        call_arguments("npu_mrope", MROPE_2_9, cache_mode="interleave")
    with pytest.raises(RuntimeError, match=r"npu_rotary_mul: rotate needs torch_npu 2\.10"):
        call_arguments("npu_rotary_mul", ["input", "r1", "r2", "rotary_mode"], rotate=torch.eye(2))


def test_defaults_are_passed_because_they_differ_between_versions() -> None:
    names = [p.name for p in CONTRACTS["npu_apply_rotary_pos_emb"].parameters]
    assert call_arguments("npu_apply_rotary_pos_emb", names, layout="BSND") == {"layout": "BSND"}


def test_an_unknown_argument_is_an_error() -> None:
    with pytest.raises(TypeError, match="no parameter 'layout'"):
        call_arguments("npu_rms_norm", ["input", "gamma", "epsilon"], layout="BSND")


@pytest.mark.parametrize("version", ["2.9.0", "2.10.0.post7", "2.13.0+git1a2b"])
def test_probe_takes_supported_versions(version: str) -> None:
    installed = check_installed(version, {"npu_swiglu": ["input", "dim"]})
    assert installed.call_arguments("npu_swiglu", dim=-1) == {"dim": -1}
    with pytest.raises(RuntimeError, match=f"torch_npu {version.split('+')[0]}.* has no npu_mrope"):
        installed.call_arguments("npu_mrope")


@pytest.mark.parametrize("version", ["2.8.0", "2.14.0", "3.0.0"])
def test_probe_refuses_other_versions(version: str) -> None:
    with pytest.raises(RuntimeError, match=rf"torch_npu {version} is not supported\. Supported: 2\.9, "):
        check_installed(version, {})


def test_release_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="expected MAJOR"):
        contracts.release("two.three")


def test_schema_arguments_reads_what_is_registered() -> None:
    arguments = [SimpleNamespace(name="input"), SimpleNamespace(name="dim")]
    packet = SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=arguments)))
    names = contracts.schema_arguments(SimpleNamespace(npu=SimpleNamespace(npu_swiglu=packet), atb=SimpleNamespace()))
    assert names == {"npu_swiglu": ("input", "dim")}


# Limits: for each function arguments that fit, and single changes that break a documented limit.

ROTARY: dict[str, Any] = {"shape": (2, 4, 8, 128), "cos_shape": (1, 1, 8, 128), "dtype": "bfloat16"}
TND: dict[str, Any] = {"shape": (8, 4, 128), "cos_shape": (8, 1, 128), "dtype": "bfloat16"}
MROPE: dict[str, Any] = {
    "query_shape": (7, 512),
    "key_shape": (7, 128),
    "positions_shape": (3, 7),
    "rotary_dim": 128,
    "head_size": 128,
    "dtype": "bfloat16",
    "table_dtype": "bfloat16",
    "sections": [24, 20, 20],
    "cache_mode": "interleave",
}
PLAIN = MROPE | {"positions_shape": (7,), "sections": None, "cache_mode": "default"}
INTERLEAVE: dict[str, Any] = {
    "shape": (2, 4, 8, 64),
    "cos_shape": (2, 1, 8, 64),
    "dtype": "float16",
    "table_dtype": "float16",
}
APPLY: dict[str, Any] = {
    "query_shape": (2, 8, 4, 128),
    "key_shape": (2, 8, 1, 128),
    "cos_shape": (2, 8, 1, 128),
    "dtype": "float32",
    "table_dtype": "float32",
}
ATB: dict[str, Any] = {
    "query_shape": (7, 512),
    "key_shape": (7, 128),
    "positions_shape": (7,),
    "rotary_dim": 128,
    "head_size": 128,
    "dtype": "float16",
}
NORM: dict[str, Any] = {"shape": (3, 4, 64), "gamma_shape": (64,), "dtype": "bfloat16", "gamma_dtype": "bfloat16"}
SWIGLU: dict[str, Any] = {"shape": (3, 64), "dtype": "float32"}
LINEAR: dict[str, Any] = {"shape": (3, 64), "weight_shape": (5, 64), "dtype": "bfloat16"}
GROUPED: dict[str, Any] = {
    "shapes": [(12, 64)],
    "weight_shapes": [(4, 64, 32)],
    "dtype": "bfloat16",
    "weight_dtype": "bfloat16",
    "groups": 4,
    "split_item": 2,
    "group_type": 0,
    "group_list_type": 1,
}
GATING: dict[str, Any] = {"shape": (3, 64), "dtype": "float32"}
ROUTING: dict[str, Any] = {"shape": (3, 64), "dtype": "float16", "ids_dtype": "int32", "expert_num": 8}
FINALIZE: dict[str, Any] = {"shape": (12, 64), "dtype": "float32", "scales_dtype": "float32"}
PERMUTE: dict[str, Any] = {"shape": (3, 64), "dtype": "bfloat16", "top_k": 2}
SCATTER: dict[str, Any] = {
    "key_shape": (3, 2, 64),
    "cache_shape": (9, 16, 2, 64),
    "dtype": "bfloat16",
    "cache_dtype": "bfloat16",
}
ATTENTION: dict[str, Any] = {
    "num_heads": 32,
    "num_kv_heads": 4,
    "head_size": 128,
    "dtype": "bfloat16",
    "input_layout": "TND",
    "batch": 3,
    "queries": 7,
    "block_size": 128,
    "sparse_mode": 3,
    "mask_shape": (2048, 2048),
}
DECODE = ATTENTION | {
    "input_layout": "BSND",
    "queries": 1,
    "block_size": 16,
    "head_size": 64,
    "sparse_mode": 0,
    "mask_shape": None,
}
FILTER: dict[str, Any] = {"shape": (3, 2000), "dtype": "float32"}
QUANT: dict[str, Any] = {"shape": (3, 64), "dtype": "float16"}

INT8: dict[str, Any] = {"shape": (3, 64), "weight_shape": (64, 48), "dtype": "int8", "output_dtype": "bfloat16"}
WEIGHT_INT8 = {"shape": (3, 64), "weight_shape": (64, 48), "dtype": "bfloat16", "weight_dtype": "int8"}
WEIGHT_INT8 |= {"scale_dtype": "bfloat16"}
INT8_GROUPS: dict[str, Any] = {"weight_shape": (4, 64, 48), "dtype": "int8", "scale_dtype": "bfloat16"}
INT8_GROUPS |= {"output_dtype": "bfloat16"}
SCALED_GROUPS: dict[str, Any] = {"weight_shape": (4, 64, 48), "dtype": "float16", "weight_dtype": "int8"}
SCALED_GROUPS |= {"scale_dtype": "float16"}
INT4_GROUPS = SCALED_GROUPS | {"weight_dtype": "int4", "group": 16}

FIT = [
    ("quant_matmul", INT8),
    ("weight_quant_matmul", WEIGHT_INT8),
    ("weight_quant_matmul", WEIGHT_INT8 | {"group": 32}),
    ("weight_quant_matmul", WEIGHT_INT8 | {"group": 32, "weight_dtype": "int4"}),
    ("quant_grouped_matmul", INT8_GROUPS),
    ("quant_grouped_matmul", INT8_GROUPS | {"output_dtype": "float16", "scale_dtype": "float32"}),
    ("antiquant_grouped_matmul", SCALED_GROUPS),
    ("antiquant_grouped_matmul", SCALED_GROUPS | {"symmetric": False}),
    ("antiquant_grouped_matmul", INT4_GROUPS),
    ("antiquant_grouped_matmul", INT4_GROUPS | {"group": 0, "symmetric": False}),
    ("rotary_mul", ROTARY),
    ("rotary_mul", TND),
    ("rotary_mul", TND | {"rotary_mode": "interleave", "layout": "TND"}),
    ("rotary_mul", TND | {"cos_shape": (8, 4, 128)}),
    ("rotary_mul", ROTARY | {"cos_shape": (2, 1, 8, 128)}),
    ("rotary_mul", ROTARY | {"cos_shape": (2, 4, 8, 128), "layout": "BNSD"}),
    ("rotary_mul", ROTARY | {"cos_shape": (1, 4, 1, 128), "layout": "BSND", "rotary_mode": "interleave"}),
    ("rotary_mul", ROTARY | {"cos_shape": (2, 1, 1, 128), "layout": "SBND"}),
    ("rotary_mul", ROTARY | {"shape": (1, 100_000, 8, 128), "cos_shape": (1, 100_000, 1, 128)}),
    ("rotary_position_embedding", ROTARY | {"mode": 1}),
    ("mrope", MROPE),
    ("mrope", PLAIN),
    ("mrope", PLAIN | {"sections": [0, 0, 0], "rotary_mode": "interleave", "rotary_dim": 64}),
    ("mrope", PLAIN | {"rotary_dim": 48, "head_size": 64, "dtype": "float32", "table_dtype": "float32"}),
    ("mrope", MROPE | {"sections": [16] * 4, "positions_shape": (4, 7), "cache_mode": "default"}),
    ("interleave_rope", INTERLEAVE),
    ("interleave_rope", INTERLEAVE | {"cos_shape": (2, 1, 1, 64)}),
    ("apply_rotary_pos_emb", APPLY),
    ("rotary_embedding", ATB),
    ("rms_norm", NORM),
    ("rms_norm", NORM | {"gamma_shape": (4, 64), "gamma_dtype": "float32"}),
    ("add_rms_norm", NORM),
    ("swiglu", SWIGLU),
    ("swiglu", SWIGLU | {"shape": (64, 3), "dim": 0}),
    ("linear", LINEAR),
    ("linear", LINEAR | {"bias_dtype": "bfloat16"}),
    ("grouped_matmul", GROUPED),
    ("grouped_matmul", GROUPED | {"groups": 1, "group_list_type": 0, "weight_shapes": [(1, 64, 32)]}),
    ("grouped_matmul", GROUPED | {"groups": None, "group_type": -1, "split_item": 0}),
    ("grouped_matmul", GROUPED | {"groups": None, "weight_shapes": [(64, 32)] * 2, "shapes": [(6, 64)] * 2}),
    ("moe_gating_top_k_softmax", GATING | {"k": 8}),
    ("moe_gating_top_k", GATING | {"bias_dtype": "float32", "group_count": 8}),
    ("moe_init_routing", ROUTING),
    ("moe_init_routing", ROUTING | {"quant_mode": 1, "expert_tokens_num_type": 2}),
    ("moe_init_routing", ROUTING | {"quant_mode": 0, "drop_pad_mode": 1, "expert_capacity": 2}),
    ("moe_finalize_routing", FINALIZE | {"drop_pad_mode": 2}),
    ("moe_token_permute", PERMUTE),
    ("scatter_pa_kv_cache", SCATTER),
    ("fused_infer_attention", ATTENTION),
    ("fused_infer_attention", ATTENTION | {"head_size": 192, "value_size": 128, "block_size": 0}),
    ("fused_infer_attention", ATTENTION | {"block_size": 1024}),
    ("fused_infer_attention", DECODE),
    ("fused_infer_attention", DECODE | {"sparse_mode": 3}),
    ("fused_infer_attention", DECODE | {"queries": 4, "block_size": 256, "mask_shape": (3, 1, 4, 512)}),
    ("top_k_top_p", FILTER),
    ("top_k_top_p", FILTER | {"top_k": 1024}),
    ("dynamic_quant", QUANT),
    ("dynamic_quant", QUANT | {"format": "quint4x2"}),
]
BREAK = [
    ("quant_matmul", INT8 | {"dtype": "int32"}, "int8, got int32"),
    ("quant_matmul", INT8 | {"output_dtype": "float32"}, "got float32"),
    ("quant_matmul", INT8 | {"shape": (0, 64)}, "empty"),
    ("quant_matmul", INT8 | {"weight_shape": (64, 65536)}, "at most 65535"),
    ("weight_quant_matmul", WEIGHT_INT8 | {"dtype": "float32"}, "got float32"),
    ("weight_quant_matmul", WEIGHT_INT8 | {"weight_dtype": "uint8"}, "int8, int4, got uint8"),
    ("weight_quant_matmul", WEIGHT_INT8 | {"weight_dtype": "int4", "weight_shape": (64, 44)}, "multiple of 8"),
    ("weight_quant_matmul", WEIGHT_INT8 | {"scale_dtype": "float32"}, "x's dtype bfloat16"),
    ("weight_quant_matmul", WEIGHT_INT8 | {"group": 24}, "multiple of 32 below K = 64, got 24"),
    ("weight_quant_matmul", WEIGHT_INT8 | {"group": 64}, "below K = 64, got 64"),
    ("weight_quant_matmul", WEIGHT_INT8 | {"shape": (3, 1, 64)}, "must be 2-D"),
    ("quant_grouped_matmul", INT8_GROUPS | {"dtype": "bfloat16"}, "int8, got bfloat16"),
    ("quant_grouped_matmul", INT8_GROUPS | {"scale_dtype": "float32"}, "bfloat16 for a result in bfloat16"),
    ("quant_grouped_matmul", INT8_GROUPS | {"output_dtype": "float32"}, "got float32"),
    ("quant_grouped_matmul", INT8_GROUPS | {"weight_shape": (1, 64, 48)}, "2 to 1024 groups"),
    ("antiquant_grouped_matmul", SCALED_GROUPS | {"group": 32}, "got groups of 32"),
    ("antiquant_grouped_matmul", SCALED_GROUPS | {"weight_dtype": "int32"}, "int8, int4, got int32"),
    ("antiquant_grouped_matmul", INT4_GROUPS | {"group": 24}, "multiple of the group, got 64 and 24"),
    ("antiquant_grouped_matmul", INT4_GROUPS | {"symmetric": False}, "must be symmetric"),
    ("antiquant_grouped_matmul", INT4_GROUPS | {"weight_shape": (4, 64, 44)}, "multiple of 8 for int4, got 44"),
    ("antiquant_grouped_matmul", SCALED_GROUPS | {"scale_dtype": "bfloat16"}, "x's dtype float16"),
    ("antiquant_grouped_matmul", SCALED_GROUPS | {"weight_shape": (4, 64, 65536)}, "below 65536"),
    ("rotary_mul", ROTARY | {"dtype": "float64"}, "float16, bfloat16, float32, got float64"),
    ("rotary_mul", ROTARY | {"rotary_mode": "interleaved"}, "'interleave', got 'interleaved'"),
    ("rotary_mul", ROTARY | {"shape": (8, 4, 128)}, "4-D"),
    ("rotary_mul", ROTARY | {"shape": (2, 4, 8, 896), "cos_shape": (1, 1, 8, 896)}, "below 896, got 896"),
    ("rotary_mul", ROTARY | {"shape": (2, 4, 8, 63), "cos_shape": (1, 1, 8, 63)}, "even"),
    ("rotary_mul", ROTARY | {"cos_shape": (1, 1, 8, 64)}, "full head size 128, got 64"),
    ("rotary_mul", ROTARY | {"cos_shape": (1, 4, 8, 128)}, "does not broadcast"),
    ("rotary_mul", ROTARY | {"layout": "NTD"}, "layout must be"),
    ("rotary_mul", ROTARY | {"layout": "TND"}, "TND must be 3-D"),
    ("rotary_mul", TND | {"layout": "BSND"}, "BSND must be 4-D"),
    ("rotary_mul", TND | {"cos_shape": (1, 1, 128)}, "cos has 1 positions, input 8"),
    ("rotary_mul", TND | {"shape": (8, 1000, 128)}, "N=1000"),
    ("rotary_mul", TND | {"cos_shape": (8, 4, 128), "rotary_mode": "interleave"}, "one cos row per position"),
    ("rotary_mul", ROTARY | {"shape": (1000, 4, 8, 128), "layout": "BNSD"}, "below 1000, got B=1000"),
    ("rotary_mul", ROTARY | {"shape": (2, 1000, 8, 128), "layout": "BNSD"}, "N=1000"),
    ("rotary_mul", ROTARY | {"cos_shape": (2, 1, 8, 128), "rotary_mode": "interleave"}, "one cos row per position"),
    ("rotary_mul", ROTARY | {"shape": (50, 20, 8, 128), "rotary_mode": "interleave", "layout": "BNSD"}, "< 1000"),
    (
        "rotary_mul",
        ROTARY | {"shape": (50, 21, 8, 128), "table_needs_grad": True, "layout": "BNSD"},
        "<= 1024, got 1050",
    ),
    ("rotary_position_embedding", ROTARY | {"mode": 2}, "mode must be 0 (half) or 1"),
    ("mrope", MROPE | {"dtype": "float64"}, "got float64"),
    ("mrope", MROPE | {"table_dtype": "float32"}, "query's dtype bfloat16, got float32"),
    ("mrope", MROPE | {"query_shape": (7, 4, 128)}, "2-D"),
    ("mrope", PLAIN | {"rotary_dim": 48}, "multiples of 32"),
    ("mrope", PLAIN | {"rotary_dim": 160}, "larger than head_size 128"),
    ("mrope", MROPE | {"key_shape": (7, 100)}, "not multiples of head_size"),
    ("mrope", MROPE | {"rotary_mode": "interleaved"}, "got 'interleaved'"),
    ("mrope", MROPE | {"cache_mode": "chunked"}, "got 'chunked'"),
    ("mrope", MROPE | {"key_shape": (8, 128)}, "7, 8 and 7 tokens"),
    ("mrope", PLAIN | {"cache_mode": "interleave"}, "plain RoPE"),
    ("mrope", MROPE | {"sections": None, "cache_mode": "default"}, "plain RoPE needs positions [T]"),
    ("mrope", MROPE | {"sections": [16, 20, 20]}, "sum to 56, half the rotary size is 64"),
    ("mrope", MROPE | {"positions_shape": (4, 7)}, "positions must be [3, T]"),
    ("mrope", MROPE | {"sections": [22, 22, 20]}, "not documented"),
    ("mrope", MROPE | {"sections": [16] * 4, "positions_shape": (4, 7)}, "four sections need cache_mode 'default'"),
    ("interleave_rope", INTERLEAVE | {"dtype": "float32"}, "got float32"),
    ("interleave_rope", INTERLEAVE | {"table_dtype": "float32"}, "x's dtype"),
    ("interleave_rope", INTERLEAVE | {"shape": (2, 4, 8, 128)}, "[B, N, S, 64]"),
    ("interleave_rope", INTERLEAVE | {"cos_shape": (1, 1, 8, 64)}, "[2, 1, 8 or 1, 64]"),
    ("interleave_rope", INTERLEAVE | {"contiguous": False}, "contiguous"),
    ("apply_rotary_pos_emb", APPLY | {"dtype": "int8"}, "got int8"),
    ("apply_rotary_pos_emb", APPLY | {"table_dtype": "bfloat16"}, "query's dtype"),
    ("apply_rotary_pos_emb", APPLY | {"layout": "BSH"}, "'BSND' or 'TND', got 'BSH'"),
    ("apply_rotary_pos_emb", APPLY | {"rotary_mode": "interleave"}, "must be 'half'"),
    ("apply_rotary_pos_emb", APPLY | {"layout": "TND"}, "3-D"),
    ("apply_rotary_pos_emb", APPLY | {"key_shape": (2, 8, 0, 128)}, "empty"),
    ("apply_rotary_pos_emb", APPLY | {"query_shape": (2, 8, 4, 96)}, "64 or 128"),
    ("apply_rotary_pos_emb", APPLY | {"cos_shape": (1, 8, 1, 128)}, "no broadcast"),
    ("rotary_embedding", ATB | {"dtype": "float32"}, "got float32"),
    ("rotary_embedding", ATB | {"positions_shape": (3, 7)}, "1-D"),
    ("rotary_embedding", ATB | {"key_shape": (6, 128)}, "7, 6 and 7 tokens"),
    ("rotary_embedding", ATB | {"rotary_dim": 64}, "partial rotary"),
    ("rms_norm", NORM | {"dtype": "float64", "gamma_dtype": "float64"}, "got float64"),
    ("rms_norm", NORM | {"gamma_dtype": "float16"}, "bfloat16 or float32, got float16"),
    ("rms_norm", NORM | {"gamma_shape": (4,)}, "trailing dimensions"),
    ("rms_norm", NORM | {"gamma_shape": ()}, "trailing dimensions"),
    ("rms_norm", NORM | {"gamma_shape": (2, 3, 4, 64)}, "trailing dimensions"),
    ("add_rms_norm", NORM | {"dtype": "int8"}, "got int8"),
    ("add_rms_norm", NORM | {"x2_shape": (3, 4, 1)}, "the same shape"),
    ("add_rms_norm", NORM | {"gamma_dtype": "float32"}, "must be bfloat16, got float32"),
    ("add_rms_norm", NORM | {"shape": (0, 64)}, "empty"),
    ("swiglu", SWIGLU | {"dtype": "int8"}, "got int8"),
    ("swiglu", SWIGLU | {"shape": (3, 63)}, "even, got 63"),
    ("swiglu", SWIGLU | {"shape": (0, 64)}, "empty"),
    ("swiglu", SWIGLU | {"dim": 2}, "dim 2"),
    ("swiglu", SWIGLU | {"contiguous": False}, "contiguous"),
    ("linear", LINEAR | {"dtype": "float64"}, "got float64"),
    ("linear", LINEAR | {"shape": (2, 3, 64)}, "2-D"),
    ("linear", LINEAR | {"bias_dtype": "float32"}, "bfloat16, got float32"),
    ("grouped_matmul", GROUPED | {"dtype": "int8"}, "got int8"),
    ("grouped_matmul", GROUPED | {"weight_dtype": "float32"}, "x's dtype"),
    ("grouped_matmul", GROUPED | {"shapes": [(1, 64)] * 129}, "at most 128 tensors"),
    ("grouped_matmul", GROUPED | {"weight_shapes": [(4, 64, 65536)]}, "below 65536"),
    ("grouped_matmul", GROUPED | {"act_type": 5}, "act_type"),
    ("grouped_matmul", GROUPED | {"group_type": 1}, "-1, 0 or 2, got 1"),
    ("grouped_matmul", GROUPED | {"split_item": 0}, "got 0 and 0"),
    ("grouped_matmul", GROUPED | {"group_type": -1, "split_item": 0}, "no group_list"),
    ("grouped_matmul", GROUPED | {"groups": None}, "group_list is needed"),
    ("grouped_matmul", GROUPED | {"groups": 1025}, "1024 groups"),
    ("grouped_matmul", GROUPED | {"groups": 1}, "more than one"),
    ("moe_gating_top_k_softmax", GATING | {"k": 1, "dtype": "float64"}, "got float64"),
    ("moe_gating_top_k_softmax", GATING | {"k": 1, "shape": (4,)}, "2-D or 3-D"),
    ("moe_gating_top_k_softmax", GATING | {"k": 1025}, "at most 1024"),
    ("moe_gating_top_k_softmax", GATING | {"k": 1, "shape": (0, 4)}, "empty"),
    ("moe_gating_top_k", GATING | {"dtype": "int8"}, "got int8"),
    ("moe_gating_top_k", GATING | {"shape": (2, 3, 64)}, "2-D"),
    ("moe_gating_top_k", GATING | {"bias_dtype": "float16"}, "x's dtype"),
    ("moe_gating_top_k", GATING | {"shape": (3, 2049)}, "2048 experts"),
    ("moe_gating_top_k", GATING | {"group_count": 32}, "more than two experts, got 2"),
    ("moe_gating_top_k", GATING | {"shape": (3, 1320), "group_count": 40}, "rounded up to 32"),
    ("moe_gating_top_k", GATING | {"renorm": 1}, "renorm"),
    ("moe_gating_top_k", GATING | {"shape": (0, 64)}, "empty"),
    ("moe_init_routing", ROUTING | {"dtype": "float64"}, "got float64"),
    ("moe_init_routing", ROUTING | {"ids_dtype": "int64"}, "int32, got int64"),
    ("moe_init_routing", ROUTING | {"expert_num": -1}, "0 to 10240"),
    ("moe_init_routing", ROUTING | {"expert_num": 6000, "expert_tokens_num_type": 2}, "0 to 5120"),
    ("moe_init_routing", ROUTING | {"drop_pad_mode": 2}, "drop_pad_mode must be 0 or 1"),
    ("moe_init_routing", ROUTING | {"drop_pad_mode": 1}, "expert_capacity must be 1 to 3 (the rows of x)"),
    (
        "moe_init_routing",
        ROUTING | {"drop_pad_mode": 1, "expert_capacity": 2, "active_expert_range": [0, 4]},
        "needs all experts",
    ),
    ("moe_init_routing", ROUTING | {"active_expert_range": [4, 9]}, "within the 8 experts"),
    ("moe_init_routing", ROUTING | {"expert_tokens_num_type": 3}, "must be 0, 1 or 2"),
    ("moe_init_routing", ROUTING | {"quant_mode": 2}, "quant_mode"),
    ("moe_init_routing", ROUTING | {"quant_mode": 1, "dtype": "int8"}, "not int8"),
    ("moe_finalize_routing", FINALIZE | {"dtype": "int8"}, "got int8"),
    ("moe_finalize_routing", FINALIZE | {"dtype": "bfloat16"}, "dtype bfloat16, got float32"),
    ("moe_finalize_routing", FINALIZE | {"index_dtype": "int64"}, "int32"),
    ("moe_finalize_routing", FINALIZE | {"drop_pad_mode": 4}, "0 to 3"),
    ("moe_finalize_routing", FINALIZE | {"has_skips": (False, True)}, "as skip1"),
    ("moe_finalize_routing", FINALIZE | {"shape": (0, 64)}, "empty"),
    ("moe_token_permute", PERMUTE | {"dtype": "int8"}, "got int8"),
    ("moe_token_permute", PERMUTE | {"top_k": 513}, "at most 512"),
    ("moe_token_permute", PERMUTE | {"shape": (0, 64)}, "empty"),
    ("scatter_pa_kv_cache", SCATTER | {"dtype": "float64"}, "got float64"),
    ("scatter_pa_kv_cache", SCATTER | {"cache_dtype": "int8"}, "the same dtype"),
    ("scatter_pa_kv_cache", SCATTER | {"cache_shape": (9, 2, 16, 64)}, "[blocks, block size, N, D]"),
    ("scatter_pa_kv_cache", SCATTER | {"key_shape": (0, 2, 64)}, "empty"),
    ("scatter_pa_kv_cache", SCATTER | {"contiguous": False}, "contiguous"),
    ("fused_infer_attention", ATTENTION | {"dtype": "float32"}, "got float32"),
    ("fused_infer_attention", ATTENTION | {"contiguous": False}, "contiguous"),
    ("fused_infer_attention", DECODE | {"head_size": 528}, "up to 512"),
    ("fused_infer_attention", DECODE | {"head_size": 40}, "multiple of 16"),
    ("fused_infer_attention", DECODE | {"num_heads": 260, "num_kv_heads": 65}, "heads must be at most 256"),
    ("fused_infer_attention", DECODE | {"num_heads": 130, "num_kv_heads": 2}, "64 for each"),
    ("fused_infer_attention", DECODE | {"num_heads": 256, "num_kv_heads": 256, "head_size": 256}, "65536"),
    ("fused_infer_attention", DECODE | {"queries": 2, "block_size": 64}, "with more than one query, got 64"),
    ("fused_infer_attention", ATTENTION | {"block_size": 24}, "multiple of 16 up to 1024 in TND"),
    ("fused_infer_attention", ATTENTION | {"value_size": 64}, "values of 128 or 192, got 128 and 64"),
    ("fused_infer_attention", DECODE | {"value_size": 32}, "values of the keys' head size 64, got 32"),
    ("fused_infer_attention", DECODE | {"block_size": 24}, "multiple of 16"),
    ("fused_infer_attention", DECODE | {"block_size": 1024}, "up to 512"),
    ("fused_infer_attention", DECODE | {"sparse_mode": 9}, "0 to 4"),
    ("fused_infer_attention", ATTENTION | {"mask_shape": None}, "needs an atten_mask"),
    ("fused_infer_attention", ATTENTION | {"mask_shape": (7, 512)}, "2048 x 2048"),
    ("fused_infer_attention", ATTENTION | {"head_size": 64}, "heads of 128, or of 192"),
    ("fused_infer_attention", ATTENTION | {"batch": 5000}, "4096 sequences"),
    ("fused_infer_attention", ATTENTION | {"sparse_mode": 0, "mask_shape": (7, 512)}, "without a mask"),
    ("top_k_top_p", FILTER | {"dtype": "float64"}, "got float64"),
    ("top_k_top_p", FILTER | {"shape": (3,)}, "2-D"),
    ("top_k_top_p", FILTER | {"top_k": 1025}, "1 to 1024"),
    ("top_k_top_p", FILTER | {"top_k": 0}, "1 to 1024"),
    ("top_k_top_p", FILTER | {"shape": (0, 8)}, "empty"),
    ("dynamic_quant", QUANT | {"dtype": "float32"}, "got float32"),
    ("dynamic_quant", QUANT | {"format": "fp8"}, "int8 or quint4x2"),
    ("dynamic_quant", QUANT | {"format": "quint4x2", "shape": (3, 60)}, "multiple of 8"),
    ("dynamic_quant", QUANT | {"shape": (64,)}, "two dimensions"),
    ("dynamic_quant", QUANT | {"shape": (0, 64)}, "empty"),
]


@pytest.mark.parametrize("name", [name for name in contracts.__all__ if name.endswith("_limit")])
def test_a_limit_names_the_document_it_follows(name: str) -> None:
    assert re.search(r"20\d\d", getattr(contracts, name).__doc__), f"{name}: of which year is this?"


@pytest.mark.parametrize(("name", "arguments"), FIT)
def test_what_fits(name: str, arguments: dict[str, Any]) -> None:
    assert getattr(contracts, f"{name}_limit")(**arguments) is None


@pytest.mark.parametrize(("name", "arguments", "says"), BREAK)
def test_what_breaks_a_limit(name: str, arguments: dict[str, Any], says: str) -> None:
    assert says in str(getattr(contracts, f"{name}_limit")(**arguments))
