"""RopeConfig against transformers' own rope functions and modules, over the values of real configurations."""

import dataclasses
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_models import (
    DEEPSEEK,
    DEEPSEEK_V2,
    GEMMA3,
    GEMMA4,
    GPT_OSS,
    HUNYUAN,
    HUNYUAN_VL,
    LLAMA_3_1,
    PHI3,
    PHI3_LONG,
    PHI3_SHORT,
    QWEN3_30B,
    QWEN3_VL,
    REAL,
    YARN4,
    Real,
)
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from whorl.rope_config import RopeConfig
from whorl.rope_config.families import MODELS

# transformers raises the base to an exponent rounded to fp32: that rounding times ln(base), and a few operations.
FP32 = 2.0**-23


def close(ours: np.ndarray, theirs: Any, base: float) -> None:
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=FP32 * (4 + math.log(base)), atol=0)
    assert ours.dtype == np.float32


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_real_configuration(real: Real) -> None:
    _, rotary = real.of_transformers()
    ours = RopeConfig.from_hf(real.values, layer_type=real.layer_type)
    prefix = f"{real.layer_type}_" if real.layer_type else ""
    theirs = getattr(rotary, f"{prefix}inv_freq")
    if ours.layout == "hwt":  # Ernie's module holds the h and w frequencies apart: all even ones, then all odd ones
        h, w, _ = ours.sections
        theirs = torch.cat((theirs[: h + w].view(2, h).T.flatten(), theirs[h + w :]))
    close(ours.frequencies(), theirs, ours.base)
    assert ours.attention_factor == pytest.approx(getattr(rotary, f"{prefix}attention_scaling"), rel=1e-12)
    assert {name: getattr(ours, name) for name in real.expected} == real.expected


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_every_spelling_reads_the_same(real: Real) -> None:
    """config.json as published, the object transformers makes of it, what that object saves, and bare attributes."""
    config, _ = real.of_transformers()
    raw, *others = (
        RopeConfig.from_hf(source, layer_type=real.layer_type)
        for source in (real.values, config, config.to_dict(), SimpleNamespace(**real.values))
    )
    if raw.rope_type == "xdrope":  # transformers renames it on reading
        others = [dataclasses.replace(other, rope_type="xdrope") for other in others]
    assert all(other == raw for other in others)


def of_llama(rope: dict[str, Any], head_dim: int = 128, max_position: int = 4096) -> tuple[LlamaConfig, RopeConfig]:
    rope = {"rope_theta": 10000.0, **rope}
    config = LlamaConfig(
        head_dim=head_dim, hidden_size=512, num_attention_heads=4, max_position_embeddings=max_position,
        rope_parameters=dict(rope),
    )  # fmt: skip
    return config, RopeConfig.from_keywords(head_dim=head_dim, max_position=max_position, **rope)


TYPES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-mscale-alone": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7},
    "yarn-betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 24, "beta_slow": 2, "truncate": False},
    "yarn-theta-1e6": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
    "yarn-factor-none": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
    "yarn-empty-ramp": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 900, "beta_slow": 900},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 512},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional-factor": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    "partial-linear": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    "partial-yarn": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.25},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 1024,
                 "short_factor": [1 + 0.01 * i for i in range(64)], "long_factor": [1 + i for i in range(64)]},
    "longrope-attention-factor": {"rope_type": "longrope", "attention_factor": 1.3, "factor": 4.0,
                                  "short_factor": [1.0] * 64, "long_factor": [2.0] * 64},
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("seq_len", [None, 1, 1024, 1025, 4096, 4097, 20000])
def test_every_type_of_transformers(name: str, seq_len: int | None) -> None:
    theirs, ours = of_llama(TYPES[name])
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[ours.rope_type](theirs, "cpu", seq_len=seq_len)
    close(ours.frequencies(seq_len), frequencies, ours.base * 16)
    assert ours.attention_factor_at(seq_len) == pytest.approx(attention_factor, rel=1e-12)


def test_no_type_of_transformers_is_left_out() -> None:
    assert set(ROPE_INIT_FUNCTIONS) <= {rope["rope_type"] for rope in TYPES.values()}


@settings(max_examples=60, deadline=None)
@given(
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 192, 256]),
    base=st.floats(1e3, 1e7),
    factor=st.floats(1.0, 64.0),
    original=st.integers(256, 65536),
    truncate=st.booleans(),
    kind=st.sampled_from(["linear", "dynamic", "yarn", "llama3", "proportional"]),
    seq_len=st.none() | st.integers(1, 200000),
)
def test_random_parameters(
    head_dim: int, base: float, factor: float, original: int, truncate: bool, kind: str, seq_len: int | None
) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": base, "factor": factor}
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = original
    if kind == "yarn":
        rope["truncate"] = truncate
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs, ours = of_llama(rope, head_dim=head_dim)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=seq_len)
    # A blend of two frequencies may cancel digits that fp32 has already lost: llama3 and yarn between their bounds.
    np.testing.assert_allclose(ours.frequencies(seq_len), frequencies.numpy(), rtol=FP32 * 64, atol=0)
    assert ours.attention_factor == pytest.approx(attention_factor)


def test_longrope_switches_past_the_original_length() -> None:
    config = RopeConfig.from_hf(PHI3)
    plain = 10000.0 ** -(np.arange(0, 96, 2) / 96)
    np.testing.assert_allclose(config.frequencies(4096), plain / PHI3_SHORT, rtol=1e-6)
    np.testing.assert_allclose(config.frequencies(4097), plain / PHI3_LONG, rtol=1e-6)
    assert config.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_longrope_with_an_attention_factor_for_each_length() -> None:
    """PhiMoE names them, and transformers' module multiplies by the one the length asks for."""
    from transformers.models.phimoe.modeling_phimoe import PhimoeConfig, PhimoeRotaryEmbedding

    rope = {"rope_type": "longrope", "short_mscale": 1.243, "long_mscale": 1.271, "factor": 8.0,
            "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 64}  # fmt: skip
    values = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 512, "rope_parameters": rope}
    rotary = PhimoeRotaryEmbedding(PhimoeConfig(**values))
    ours = RopeConfig.from_hf({"model_type": "phimoe", **values})
    for seq_len in (64, 65):
        cos, _ = rotary(torch.zeros(1), torch.tensor([[0, seq_len - 1]]))
        assert ours.attention_factor_at(seq_len) == pytest.approx(float(cos[0, 0, 0]))


def test_dynamic_by_alpha_does_not_depend_on_the_length() -> None:
    config = RopeConfig.from_hf(HUNYUAN)
    assert not config.depends_on_length
    assert np.array_equal(config.frequencies(), config.frequencies(10**6))
    assert RopeConfig.from_keywords(head_dim=8, max_position=64, rope_type="dynamic", factor=2.0).depends_on_length


@pytest.mark.parametrize("values", [DEEPSEEK, DEEPSEEK_V2, {**DEEPSEEK, "model_type": "deepseek_v3"}])
def test_deepseek_softmax_scale(values: dict[str, Any]) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    config = RopeConfig.from_hf(values)
    expected = yarn_apply_mscale({"rope_type": "yarn", **values["rope_scaling"]}, 192**-0.5)
    assert 192**-0.5 * config.softmax_scale_correction == pytest.approx(expected)
    assert config.softmax_scale_correction > 1.1
    assert RopeConfig.from_hf(GPT_OSS).softmax_scale_correction == 1.0


def test_deepseek_yarn_without_mscale_all_dim() -> None:
    """vLLM: the attention factor is mscale's alone, and the softmax scale stays."""
    rope = {"rope_type": "deepseek_yarn", "factor": 40.0, "mscale": 0.707, "original_max_position_embeddings": 4096}
    config = RopeConfig.from_keywords(head_dim=64, max_position=163840, **rope)
    assert config.attention_factor == pytest.approx(0.1 * 0.707 * math.log(40) + 1)
    assert config.softmax_scale_correction == 1.0


def test_indexer_pairs_differ_between_deepseek_and_glm() -> None:
    deepseek = RopeConfig.from_hf(DEEPSEEK, layer_type="indexer")
    assert (deepseek.style, deepseek.where, deepseek.head_dim, deepseek.rotary_dim) == ("half", "leading", 128, 64)
    glm = RopeConfig.from_hf({**DEEPSEEK, "model_type": "glm_moe_dsa"}, layer_type="indexer")
    assert (glm.style, glm.pairs_out, glm.where) == ("pairs", "half", "leading")
    with pytest.raises(ValueError, match="index_head_dim"):
        RopeConfig.from_hf(LLAMA_3_1, layer_type="indexer")


def test_rope_interleave_off() -> None:
    config = RopeConfig.from_hf({**DEEPSEEK, "model_type": "deepseek_v3", "rope_interleave": False})
    assert (config.style, config.pairs_out, config.where) == ("half", "pairs", "trailing")


OLD_GPTJ = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64, "n_positions": 2048}
CHATGLM = {"model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128,
           "seq_length": 131072, "rope_ratio": 500}  # fmt: skip
NEOX = {"model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64, "rotary_pct": 0.25,
        "rotary_emb_base": 10000, "max_position_embeddings": 2048}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (OLD_GPTJ, {"head_dim": 256, "rotary_dim": 64, "style": "pairs", "max_position": 2048}),
        (CHATGLM, {"head_dim": 128, "rotary_dim": 64, "style": "pairs", "base": 5e6}),
        (NEOX, {"head_dim": 96, "rotary_dim": 24, "style": "half"}),
        ({**NEOX, "rotary_pct": None}, {"rotary_dim": 24}),
    ],
)
def test_old_names(values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = RopeConfig.from_hf(values)
    assert {name: getattr(config, name) for name in expected} == expected


def test_defaults_of_model_types_follow_transformers() -> None:
    """Where a config.json leaves the base or the partial factor out, both of us must fill in the same."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    wrong = {}
    for name, model in MODELS.items():
        known = f"{name}_text" if f"{name}_text" in CONFIG_MAPPING else name
        if known not in CONFIG_MAPPING:  # chatglm, kimi_k2, ernie4_5_moe_vl: remote code
            continue
        config_class = CONFIG_MAPPING[known]
        base = getattr(config_class, "default_theta", None)
        base = base["global"] if isinstance(base, dict) else base
        config = config_class()
        rope = getattr(config, "rope_parameters", None) or {}
        partial = rope.get("partial_rotary_factor", 1.0)
        if base is not None and base != model.base:
            wrong[name] = (base, model.base)
        if model.partial is not None and partial != model.partial:
            wrong[name] = (partial, model.partial)
    assert wrong == {}


def test_mrope_is_keyed_on_sections_not_on_the_type() -> None:
    config = RopeConfig.from_hf(QWEN3_VL)
    assert config.rope_type == "default"
    assert config.is_mrope
    assert not RopeConfig.from_hf(QWEN3_30B).is_mrope
    with_yarn = RopeConfig.from_keywords(head_dim=128, max_position=40960, mrope_section=[24, 20, 20],
                                         mrope_interleaved=True, **YARN4)  # fmt: skip
    assert (with_yarn.rope_type, with_yarn.layout) == ("yarn", "interleaved")


def test_xdrope_raises_the_base() -> None:
    config = RopeConfig.from_hf(HUNYUAN_VL)
    base = 10000.0 * 1000.0 ** (128 / 126)
    np.testing.assert_allclose(config.frequencies(), base ** -(np.arange(0, 128, 2) / 128), rtol=1e-6)


def test_dual_chunk_positions() -> None:
    """Chunks of 16 with a local window of 4: keys count modulo 12, queries by how far the chunk lies back."""
    config = RopeConfig.from_hf(
        {**QWEN3_30B, "dual_chunk_attention_config": {"chunk_size": 16, "local_size": 4, "original_max_position": 9}}
    )
    positions = np.arange(40)
    actual = config.dual_chunk_positions(positions)
    local = positions % 12
    assert np.array_equal(actual.intra, local)
    assert np.array_equal(actual.succ, np.minimum(local + 12, 16))
    assert np.array_equal(actual.inter, np.full(40, 16))
    assert np.array_equal(actual.succ_critical, local + 12)
    assert np.array_equal(actual.inter_critical, local + 16)
    tensors = config.dual_chunk_positions(torch.arange(40))
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(actual, tensors, strict=True))
    assert max(int(each.max()) for each in actual) < config.table_rows == 28


def keywords(**changes: Any) -> dict[str, Any]:
    return {"head_dim": 64, "max_position": 4096, **changes}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (keywords(rope_type="spiral"), r"rope_type 'spiral' is unknown; known are \['default', 'linear'"),
        (keywords(rope_type="axial"), "rope_type 'axial' is unknown"),
        (keywords(rotary_dim=33), "rotary_dim must be even and at most head_dim 64, found 33"),
        (keywords(rotary_dim=66), "rotary_dim must be even and at most head_dim 64, found 66"),
        (keywords(head_dim=0), "head_dim must be a positive integer, found 0"),
        (keywords(max_position=None), "max_position must be a positive integer, found None"),
        (keywords(partial_rotary_factor=1.5), r"partial_rotary_factor must be in \(0, 1\], found 1.5"),
        (keywords(partial_rotary_factor=0.5, rotary_dim=16), "rotary_dim 16 disagrees with partial_rotary_factor 0.5"),
        (keywords(mrope_section=[16, 24, 24]), "sum is 64, rotary pairs .* are 32"),
        (keywords(mrope_section=[16, 16]), "expected 3 or 4 counts"),
        (keywords(mrope_section=[8, 12, 12], mrope_interleaved=True), "stride 3 runs past the 32 rotary pairs"),
        (keywords(mrope_section=[8, 8, 8, 8], mrope_interleaved=True), "exactly 3 axes, found 4"),
        (keywords(mrope_section=[10, 11, 11], layout="hwt"), "h and w alternate"),
        (keywords(mrope_section=[8, 12, 12], layout="spiral"), "layout 'spiral' is unknown"),
        (keywords(layout="chunked"), "layout 'chunked' without sections"),
        (keywords(style="interleave"), "style 'interleave' is unknown"),
        (keywords(rope_type="linear"), r"rope_type 'linear' needs \['factor'\], found \['rope_type'\]"),
        (keywords(rope_type="dynamic"), "needs .'factor or alpha'."),
        (keywords(rope_type="llama3", factor=8.0), "needs .'low_freq_factor', 'high_freq_factor'."),
        (keywords(rope_type="xdrope", alpha=10.0), "needs .'xdrope_section'."),
        (keywords(rope_type="longrope", short_factor=[1.0], long_factor=[1.0] * 32), "short_factor .* 32, found 1"),
        (keywords(rope_type="llama3", factor=8.0, low_freq_factor=4, high_freq_factor=1), "found 4.0 and 1.0"),
        (keywords(rope_type="yarn", type="linear", factor=2.0), "rope_type 'yarn' and type 'linear' disagree"),
        (keywords(base=0.5), "base must be above 1"),
        (keywords(rope_type="linear", factor=0.0), "factor above 0, found base 10000.0, factor 0.0"),
        (keywords(chunk_size=8, local_size=8), "0 < local_size < chunk_size, found 8 and 8"),
        (keywords(chunk_size=8, local_size=2, rope_type="linear", factor=2.0), "'default', found .* 'linear'"),
        (keywords(scale=2), r"unknown keywords \['scale'\]"),
    ],
)  # fmt: skip
def test_wrong_keywords_say_found_and_expected(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_keywords(**wrong)


@pytest.mark.parametrize(
    ("values", "layer_type", "message"),
    [
        ({"model_type": "llama", "max_position_embeddings": 8}, None, "needs hidden_size or n_embd, found"),
        ({"head_dim": 64}, None, "needs max_position_embeddings or n_positions"),
        (GEMMA3, None, "pass layer_type='sliding_attention' or 'full_attention', found None"),
        (GEMMA4, None, r"has \['full_attention', 'sliding_attention'\].* found None"),
        (GEMMA4, "chunked_attention", "found 'chunked_attention'"),
        ({**GEMMA4, "rope_parameters": {"full_attention": None, "a": {}}}, "full_attention", "no rotary embedding"),
        ({**LLAMA_3_1, "rope_parameters": {"factor": 2.0}}, None, r"disagree in \['factor'\]: \[2.0\] and \[8.0\]"),
        ({"head_dim": 64, "max_position_embeddings": 8, "dual_chunk_attention_config": {}}, None, "'chunk_size'"),
        ({"hidden_size": 100, "num_attention_heads": 3, "max_position_embeddings": 8}, None, "100 is not a multiple"),
        (7, None, "expected a mapping or a configuration object, found int"),
    ],
)
def test_wrong_configurations_say_found_and_expected(values: Any, layer_type: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(values, layer_type=layer_type)


def test_an_unused_key_is_not_swallowed() -> None:
    with pytest.warns(UserWarning, match=r"\['finetuned'\]"):
        RopeConfig.from_hf({**QWEN3_30B, "rope_scaling": {**YARN4, "finetuned": True}})


def test_frozen_and_hashable() -> None:
    config = RopeConfig.from_hf(PHI3)
    assert hash(config) == hash(RopeConfig.from_hf(PHI3))
    with pytest.raises(AttributeError):
        config.base = 1.0  # type: ignore[misc]


def test_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import whorl.rope_config; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
