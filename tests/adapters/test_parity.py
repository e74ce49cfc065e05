"""The references against transformers, whose code knows nothing of ours, in fp32."""

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from whorl import ops
from whorl.ops import glu, merge_mrope, qk_norm_rope, rms_norm, rope, tokens_first

B, S, HQ, HK, P = 2, 7, 4, 2, 64


def modeling(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def heads(dim: int) -> tuple[Tensor, Tensor]:
    """q and k as transformers' attention holds them: [B, H, S, D]."""
    return torch.randn(B, HQ, S, dim), torch.randn(B, HK, S, dim)


def turn(op: Any, q: Tensor, k: Tensor, *args: Any, **how: Any) -> list[Tensor]:
    return [tokens_first(x, "bhsd") for x in op(tokens_first(q, "bhsd"), tokens_first(k, "bhsd"), *args, **how)]


def table(inv_freq: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(P).float(), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), -1)


def inverse_frequencies(rotary: int, base: float = 10000.0) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, rotary, 2, dtype=torch.float) / rotary))


def embedding(cls: type, rotary: int, head_dim: int | None = None, **parameters: Any) -> Any:
    """A rotary module of transformers for a configuration reduced to what it reads."""
    head_dim = head_dim or rotary
    rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rotary / head_dim}
    config = SimpleNamespace(
        head_dim=head_dim,
        max_position_embeddings=P,
        rope_parameters=rope_parameters | parameters,
        hidden_size=HQ * head_dim,
        num_attention_heads=HQ,
    )
    return cls(config)


def assert_same(got: Any, expected: Any) -> None:
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=2e-6)  # a few roundings of values of order 4


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rope_half(name: str) -> None:
    theirs = modeling(name)
    module = embedding(getattr(theirs, f"{name.capitalize()}RotaryEmbedding"), 64)
    q, k = heads(64)
    positions = torch.randint(0, P, (B, S))
    expected = theirs.apply_rotary_pos_emb(q, k, *module(q, positions))
    assert_same(turn(rope, q, k, table(module.inv_freq), positions), expected)
    assert_same(turn(rope, *expected, table(module.inv_freq), positions, inverse=True), (q, k))


@pytest.mark.parametrize("nope", [0, 32])
def test_rope_reads_pairs_and_writes_halves(nope: int) -> None:
    """DeepSeek-V3: the rotated channels come last in each head."""
    theirs = modeling("deepseek_v3")
    module = embedding(theirs.DeepseekV3RotaryEmbedding, 64, qk_rope_head_dim=64)
    q, k = heads(nope + 64)
    positions = torch.randint(0, P, (B, S))
    turned = theirs.apply_rotary_pos_emb_interleave(q[..., nope:], k[..., nope:], *module(q, positions))
    expected = [torch.cat((x[..., :nope], t), -1) for x, t in zip((q, k), turned, strict=True)]
    how = {"style": "pairs", "out_style": "half", "where": "trailing"}
    assert_same(turn(rope, q, k, table(module.inv_freq), positions, **how), expected)


def test_rope_partial_pairs() -> None:
    theirs = modeling("glm4")
    module = embedding(theirs.Glm4RotaryEmbedding, 32, head_dim=64)
    q, k = heads(64)
    positions = torch.randint(0, P, (B, S))
    expected = theirs.apply_rotary_pos_emb(q, k, *module(q, positions))
    assert_same(turn(rope, q, k, table(module.inv_freq), positions, style="pairs"), expected)


def test_rope_partial_half() -> None:
    theirs = modeling("phi")
    module = embedding(theirs.PhiRotaryEmbedding, 24, head_dim=80)
    q, k = heads(80)
    positions = torch.randint(0, P, (B, S))
    turned = theirs.apply_rotary_pos_emb(q[..., :24], k[..., :24], *module(q, positions))
    expected = [torch.cat((t, x[..., 24:]), -1) for x, t in zip((q, k), turned, strict=True)]
    assert_same(turn(rope, q, k, table(module.inv_freq), positions), expected)


MROPE = {
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", [16, 24, 24], 128, {"layout": "chunked"}),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", [24, 20, 20], 128, {"layout": "interleaved"}),
    "qwen3_5": ("Qwen3_5TextRotaryEmbedding", [11, 11, 10], 256, {"layout": "interleaved"}),
    "glm4v": ("Glm4vTextRotaryEmbedding", [8, 12, 12], 128, {"layout": "chunked", "style": "pairs"}),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeTextRotaryEmbedding", [22, 22, 20], 128, {"layout": "hwt", "style": "pairs"}),
}


@pytest.mark.parametrize("name", MROPE)
def test_mrope(name: str) -> None:
    cls, sections, dim, how = MROPE[name]
    theirs = modeling(name)
    rotary = 2 * sum(sections)
    module = embedding(getattr(theirs, cls), rotary, head_dim=dim, mrope_section=sections)
    q, k = heads(dim)
    positions = torch.randint(0, P, (3, B, S))
    expected = theirs.apply_rotary_pos_emb(q, k, *module(q, positions))
    tables = table(inverse_frequencies(rotary))
    rows = merge_mrope(tables, positions, sections, how["layout"])
    assert_same(turn(rope, q, k, rows, style=how.get("style", "half")), expected)


@pytest.mark.parametrize("sections", [[26, 20, 18], [28, 16, 20]])
def test_interleaved_axes_end_where_transformers_ends_them(sections: list[int]) -> None:
    """W is bounded by three times its own section, which shows where H and W differ."""
    theirs = modeling("qwen3_vl")
    module = embedding(theirs.Qwen3VLTextRotaryEmbedding, 2 * sum(sections), mrope_section=sections)
    q, k = heads(2 * sum(sections))
    positions = torch.randint(0, P, (3, B, S))
    expected = theirs.apply_rotary_pos_emb(q, k, *module(q, positions))
    rows = merge_mrope(table(module.inv_freq), positions, sections, "interleaved")
    assert_same(turn(rope, q, k, rows), expected)


def test_rms_norm() -> None:
    module = modeling("qwen3").Qwen3RMSNorm(96, eps=1e-5)
    module.weight.data.normal_()
    x = torch.randn(5, 96)
    assert_same([rms_norm(x, module.weight, 1e-5)], [module(x)])
    residual = torch.randn(5, 96)
    y, total = ops.add_rms_norm(x, residual, module.weight, 1e-5)
    assert_same([y, total], [module(x + residual), x + residual])


def test_rms_norm_of_one_plus_the_weight() -> None:
    module = modeling("gemma").GemmaRMSNorm(96)
    module.weight.data.normal_()
    x = torch.randn(5, 96)
    assert_same([rms_norm(x, module.weight, plus_one=True)], [module(x)])


def test_swiglu() -> None:
    config = SimpleNamespace(hidden_size=32, intermediate_size=48, hidden_act="silu")
    module = modeling("qwen3").Qwen3MLP(config)
    x = torch.randn(5, 32)
    both = torch.cat((module.gate_proj(x), module.up_proj(x)), -1)
    assert_same([module.down_proj(glu(both))], [module(x)])


def test_geglu() -> None:
    config = SimpleNamespace(hidden_size=32, intermediate_size=48, hidden_activation="gelu_pytorch_tanh")
    module = modeling("gemma3").Gemma3MLP(config)
    x = torch.randn(5, 32)
    both = torch.cat((module.gate_proj(x), module.up_proj(x)), -1)
    assert_same([module.down_proj(glu(both, activation="gelu_tanh"))], [module(x)])


def test_swiglu_interleaved() -> None:
    """gpt-oss' order of channels; its clamp, its factor and its up + 1 are taken out."""
    both = torch.randn(5, 64)
    plain = SimpleNamespace(alpha=1.0, limit=float("inf"))
    shifted = both - torch.tensor([0.0, 1.0]).repeat(32)
    expected = modeling("gpt_oss").GptOssExperts._apply_gate(plain, shifted)
    assert_same([glu(both, interleaved=True)], [expected])


def test_qk_norm_rope() -> None:
    """What Qwen3's attention hands to its attention function."""
    theirs = modeling("qwen3")
    from transformers import Qwen3Config
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = Qwen3Config(
        hidden_size=32,
        num_attention_heads=HQ,
        num_key_value_heads=HK,
        head_dim=16,
        rms_norm_eps=1e-5,
        num_hidden_layers=1,
    )
    config._attn_implementation = "recorded"
    seen: list[Tensor] = []

    def record(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        seen.extend((q, k, v))
        return q.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("recorded", record)
    attention = theirs.Qwen3Attention(config, 0)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data.normal_()
    module = theirs.Qwen3RotaryEmbedding(config)
    x, positions = torch.randn(B, S, 32), torch.randint(0, P, (B, S))
    attention(x, module(x, positions), None)

    qkv = torch.cat([p(x) for p in (attention.q_proj, attention.k_proj, attention.v_proj)], -1)
    weights = attention.q_norm.weight, attention.k_norm.weight
    got = qk_norm_rope(
        qkv, *weights, table(module.inv_freq), positions, num_heads=HQ, num_kv_heads=HK, eps=config.rms_norm_eps
    )
    assert_same([tokens_first(x, "bhsd") for x in got], seen)
