"""The vendor contracts: data, version drift, MRoPE sections and device limits, without torch."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whorl import contracts
from whorl.contracts import CONTRACTS, call_arguments, probe


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


def test_in_place_arguments_are_parameters() -> None:
    for contract in CONTRACTS.values():
        assert set(contract.in_place) <= {p.name for p in contract.parameters}


# Drift.

MROPE_2_9 = ["positions", "query", "key", "cos_sin_cache", "head_size", "mrope_section", "rotary_mode"]


def test_a_default_that_an_old_schema_lacks_is_left_out() -> None:
    wanted = {"rotary_mode": "half", "cache_mode": "default"}
    assert call_arguments("npu_mrope", MROPE_2_9, **wanted) == {"rotary_mode": "half"}
    assert call_arguments("npu_mrope", [*MROPE_2_9, "cache_mode"], **wanted) == wanted


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
    installed = probe(version, {"npu_swiglu": ["input", "dim"]})
    assert installed.call_arguments("npu_swiglu", dim=-1) == {"dim": -1}
    with pytest.raises(RuntimeError, match=f"torch_npu {version.split('+')[0]}.* has no npu_mrope"):
        installed.call_arguments("npu_mrope")


@pytest.mark.parametrize("version", ["2.8.0", "2.14.0", "3.0.0"])
def test_probe_refuses_other_versions(version: str) -> None:
    with pytest.raises(RuntimeError, match=rf"torch_npu {version} is not supported\. Supported: 2\.9, "):
        probe(version, {})


def test_release_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="expected MAJOR"):
        contracts.release("two.three")


def test_schema_arguments_reads_what_is_registered() -> None:
    arguments = [SimpleNamespace(name="input"), SimpleNamespace(name="dim")]
    packet = SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=arguments)))
    found = contracts.schema_arguments(SimpleNamespace(npu=SimpleNamespace(npu_swiglu=packet), atb=SimpleNamespace()))
    assert found == {"npu_swiglu": ("input", "dim")}


# MRoPE sections.

SECTIONS = [[24, 20, 20], [11, 11, 10], [16, 24, 24], [8, 12, 12], [22, 22, 20], [24, 22, 18]]


@pytest.mark.parametrize("sections", SECTIONS)
def test_interleaved_axes_are_transformers(sections: list[int]) -> None:
    """With positions t=0, h=1, w=2 the sine of each channel tells which axis transformers gave it."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    half = sum(sections)
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    config = Qwen3VLTextConfig(head_dim=2 * half, rope_parameters=parameters)
    rotary = Qwen3VLTextRotaryEmbedding(config)
    _, sin = rotary(torch.zeros(1), torch.arange(3).view(3, 1, 1))
    choices = (torch.arange(3.0)[:, None] * rotary.inv_freq).sin()
    axes = (choices - sin[0, 0, :half]).abs().argmin(0)
    assert contracts.interleaved_axes(sections) == tuple(axes.tolist())


@pytest.mark.parametrize("sections", SECTIONS)
def test_where_the_formulas_differ(sections: list[int]) -> None:
    assert contracts.interleaved_formulas_differ(sections) == (sections in ([22, 22, 20], [24, 22, 18]))


@given(st.tuples(*[st.integers(0, 40)] * 3))
def test_vendor_sections_give_the_vendors_channels(sections: tuple[int, int, int]) -> None:
    rewritten = contracts.vendor_sections(sections)
    assert contracts.interleaved_axes(rewritten) == contracts.interleaved_axes(sections, "vendor")
    assert contracts.interleaved_range_reason(rewritten) is None


@given(st.tuples(*[st.integers(0, 40)] * 3))
def test_range_reason_is_whether_sections_are_honoured(sections: tuple[int, int, int]) -> None:
    axes = contracts.interleaved_axes(sections)
    honoured = (axes.count(1), axes.count(2)) == (sections[1], sections[2])
    assert (contracts.interleaved_range_reason(sections) is None) == honoured


def test_range_reason_says_what_is_missing() -> None:
    assert contracts.interleaved_range_reason([16, 24, 24]) == "h=24 needs channel 70, there are 64"
    assert "3 sections" in str(contracts.interleaved_range_reason([16, 16, 16, 16]))


# Limits: for each function arguments that fit, and single changes that break a documented limit.

ROTARY: dict[str, Any] = {"shape": (2, 4, 8, 128), "cos_shape": (1, 1, 8, 128), "dtype": "bfloat16"}
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

FIT = [
    ("rotary_mul", ROTARY),
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
]
BREAK = [
    ("rotary_mul", ROTARY | {"dtype": "float64"}, "float16, bfloat16, float32, got float64"),
    ("rotary_mul", ROTARY | {"rotary_mode": "interleaved"}, "'interleave', got 'interleaved'"),
    ("rotary_mul", ROTARY | {"shape": (8, 4, 128)}, "4-D"),
    ("rotary_mul", ROTARY | {"shape": (2, 4, 8, 896), "cos_shape": (1, 1, 8, 896)}, "below 896, got 896"),
    ("rotary_mul", ROTARY | {"shape": (2, 4, 8, 63), "cos_shape": (1, 1, 8, 63)}, "even"),
    ("rotary_mul", ROTARY | {"cos_shape": (1, 1, 8, 64)}, "full head size 128, got 64"),
    ("rotary_mul", ROTARY | {"cos_shape": (1, 4, 8, 128)}, "does not broadcast"),
    ("rotary_mul", ROTARY | {"layout": "TND"}, "layout must be"),
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
    ("mrope", MROPE | {"sections": None, "cache_mode": "default"}, "plain RoPE takes positions [T]"),
    ("mrope", MROPE | {"sections": [16, 20, 20]}, "sum to 56, half the rotary size is 64"),
    ("mrope", MROPE | {"positions_shape": (4, 7)}, "positions must be [3, T]"),
    ("mrope", MROPE | {"sections": [22, 22, 20]}, "not documented"),
    ("mrope", MROPE | {"sections": [16] * 4, "positions_shape": (4, 7)}, "four sections take cache_mode 'default'"),
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
    ("add_rms_norm", NORM | {"x2_shape": (3, 4, 1)}, "one shape"),
    ("add_rms_norm", NORM | {"gamma_dtype": "float32"}, "must be bfloat16, got float32"),
    ("add_rms_norm", NORM | {"shape": (0, 64)}, "empty"),
    ("swiglu", SWIGLU | {"dtype": "int8"}, "got int8"),
    ("swiglu", SWIGLU | {"shape": (3, 63)}, "even, got 63"),
    ("swiglu", SWIGLU | {"shape": (0, 64)}, "empty"),
    ("swiglu", SWIGLU | {"dim": 2}, "dim 2"),
    ("swiglu", SWIGLU | {"contiguous": False}, "contiguous"),
]


@pytest.mark.parametrize(("name", "arguments"), FIT)
def test_what_fits(name: str, arguments: dict[str, Any]) -> None:
    assert getattr(contracts, f"{name}_limit")(**arguments) is None


@pytest.mark.parametrize(("name", "arguments", "says"), BREAK)
def test_what_breaks_a_limit(name: str, arguments: dict[str, Any], says: str) -> None:
    assert says in str(getattr(contracts, f"{name}_limit")(**arguments))
