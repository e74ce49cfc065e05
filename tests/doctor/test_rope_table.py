"""RopeTable against transformers' rotary modules, and the promises of a shared cache."""

import copy
import importlib
import pickle
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from rope_models import DEEPSEEK, ERNIE_VL, GEMMA3, GLM4V, HUNYUAN_VL, LLAMA_3_1, PHI3, QWEN3_30B, QWEN3_VL, REAL, Real
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import whorl.rope_table
from whorl import ops
from whorl.ops.rope import table_dtype
from whorl.rope_config import RopeConfig
from whorl.rope_table import RopeTable, get_rope

QWEN3_SMALL = {"head_dim": 32, "max_position": 512}
MROPE_SMALL = {**QWEN3_SMALL, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
ROWS = 700


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whorl.rope_table, "_tables", {})


def plant(rotary: torch.nn.Module, config: RopeConfig, prefix: str) -> None:
    """Give a transformers module our frequencies: theirs agree to fp32 rounding, which a long position magnifies."""
    frequencies = torch.from_numpy(config.frequencies())
    if config.layout == "hwt":
        h, w, _ = config.sections
        frequencies = torch.cat((frequencies[: h + w].view(h, 2).T.flatten(), frequencies[h + w :]))
    for name in ("inv_freq", "original_inv_freq"):
        getattr(rotary, prefix + name).copy_(frequencies)


def half_width(x: Tensor, config: RopeConfig) -> Tensor:
    """One entry per pair of transformers' full-width cos or sin, however it was widened."""
    if x.shape[-1] == config.rotary_dim // 2:
        return x
    return x[..., ::2] if config.style == "pairs" and config.pairs_out == "pairs" else x.chunk(2, dim=-1)[0]


# transformers 5.17 doubles each HunYuanVL section and splits the full width, so that the two channels of a pair turn by
# different axes; vLLM, and the rotation itself, want one angle a pair. Tested on its own below.
COMPARABLE = [real for real in REAL if real.name != "hunyuan-ocr"]


@pytest.mark.parametrize("real", COMPARABLE, ids=lambda real: real.name)
def test_rows_equal_the_rotary_module(real: Real) -> None:
    _, rotary = real.of_transformers()
    table = get_rope(real.values, layer_type=real.layer_type, rows=ROWS)
    config = table.config
    plant(rotary, config, f"{real.layer_type}_" if real.layer_type else "")
    axes = (len(config.sections),) if config.sections else ()
    positions = torch.randint(ROWS, (*axes, 2, 11))
    arguments = (real.layer_type,) if real.layer_type else ()
    cos, sin = (half_width(x, config) for x in rotary(torch.zeros(1), positions, *arguments))
    rows = table.lookup(positions)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, torch.cat((cos, sin), dim=-1), rtol=0, atol=3e-7)


def test_xdrope_has_four_bands() -> None:
    table = get_rope(HUNYUAN_VL, rows=ROWS)
    positions = torch.randint(ROWS, (4, 9))
    angles = positions.repeat_interleave(16, dim=0).T * torch.from_numpy(table.config.frequencies())
    torch.testing.assert_close(table.lookup(positions), torch.cat((angles.cos(), angles.sin()), dim=-1))


def of_transformers(package: str, function: str = "apply_rotary_pos_emb") -> Any:
    return getattr(importlib.import_module(f"transformers.models.{package}.modeling_{package}"), function)


DEEPSEEK_V3 = {**DEEPSEEK, "model_type": "deepseek_v3"}
COHERE = {**LLAMA_3_1, "model_type": "cohere", "rope_scaling": None}
APPLIED = {
    "llama": (LLAMA_3_1, "llama", "apply_rotary_pos_emb", "cat"),
    "cohere": (COHERE, "cohere", "apply_rotary_pos_emb", "repeat"),
    "qwen3-vl": (QWEN3_VL, "qwen3_vl_moe", "apply_rotary_pos_emb", "cat"),
    "glm4v": (GLM4V, "glm4v", "apply_rotary_pos_emb", "repeat"),
    "ernie-vl": (ERNIE_VL, "ernie4_5_vl_moe", "apply_rotary_pos_emb", "repeat"),
    "deepseek-v3": (DEEPSEEK_V3, "deepseek_v3", "apply_rotary_pos_emb_interleave", "cat"),
}


@pytest.mark.parametrize("name", APPLIED)
@pytest.mark.parametrize("by", ["rows", "positions"])
def test_apply_rotates_as_the_model_does(name: str, by: str) -> None:
    """What follows from model_type: pairing, write order, which channels."""
    values, package, function, widening = APPLIED[name]
    table = get_rope(values, rows=ROWS)
    config = table.config
    positions = torch.randint(ROWS, (len(config.sections), 2, 7) if config.sections else (2, 7))
    q, k = torch.randn(2, 7, 4, config.head_dim), torch.randn(2, 7, 2, config.head_dim)
    rows = table.lookup(positions)
    cos, sin = (torch.cat((x, x), -1) if widening == "cat" else x.repeat_interleave(2, -1) for x in rows.chunk(2, -1))
    # transformers cuts MLA's rotary channels out itself.
    start = config.head_dim - config.rotary_dim if config.where == "trailing" else 0
    turned = of_transformers(package, function)(q[..., start:], k[..., start:], cos, sin, unsqueeze_dim=2)
    expected = [torch.cat((x[..., :start], y), dim=-1) for x, y in zip((q, k), turned, strict=True)]
    actual = table.apply(q, k, rows if by == "rows" else positions)
    torch.testing.assert_close(actual, tuple(expected), rtol=0, atol=2e-6)
    torch.testing.assert_close(table.apply(q, None, rows), (actual[0], None))
    if config.pairs_out == "pairs":
        back = table.apply(*actual, rows, inverse=True)
        torch.testing.assert_close(back, (q, k), rtol=0, atol=2e-5)


def of_phi3(positions: Tensor) -> tuple[Tensor, Tensor]:
    real = next(real for real in REAL if real.name == "phi-3-mini-128k")
    return real.of_transformers()[1](torch.zeros(1), positions)


@pytest.mark.parametrize("last", [4095, 4096, 9000])
def test_longrope_table_follows_the_sequence_length(last: int) -> None:
    positions = torch.tensor([[0, 3, 17, 100, last]])
    cos, sin = (x.chunk(2, dim=-1)[0] for x in of_phi3(positions))
    rows = get_rope(PHI3).lookup(positions)
    # 1e-6 of the frequency times the position: transformers rounds its exponents.
    torch.testing.assert_close(rows, torch.cat((cos, sin), dim=-1), rtol=0, atol=1e-6 * last)
    torch.testing.assert_close(rows[:, :4], torch.cat((cos, sin), dim=-1)[:, :4], rtol=0, atol=1e-4)


def test_longrope_short_table_ends_where_the_long_factors_begin() -> None:
    table = get_rope(PHI3)
    assert table.cos_sin("cpu").shape[0] == 4096
    assert table.cos_sin("cpu", seq_len=4097).shape[0] == 131072


def test_longrope_lengths_in_turn_do_not_mix() -> None:
    keywords = {**QWEN3_SMALL, "rope_type": "longrope", "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "attention_factor": 1.0}  # fmt: skip
    table, plain = get_rope(**keywords), get_rope(**QWEN3_SMALL)
    slow = get_rope(**QWEN3_SMALL, rope_type="linear", factor=4.0)
    for last in (63, 64, 63, 64):
        positions = torch.tensor([1, 5, last])
        expected = plain if last < 64 else slow
        torch.testing.assert_close(table.lookup(positions), expected.lookup(positions))
    torch.testing.assert_close(table.lookup(torch.tensor([1]), seq_len=65), slow.lookup(torch.tensor([1])))


@pytest.mark.parametrize("seq_len", [200, 512, 513, 900])
def test_dynamic_is_recomputed_past_the_trained_length(seq_len: int) -> None:
    from transformers import LlamaConfig

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    theirs = LlamaConfig(head_dim=32, hidden_size=64, num_attention_heads=2, max_position_embeddings=512,
                         rope_parameters=dict(rope))  # fmt: skip
    positions = torch.arange(seq_len)[None]
    cos, sin = of_transformers("llama", "LlamaRotaryEmbedding")(theirs)(torch.zeros(1), positions)
    expected = torch.cat((cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]), dim=-1)
    table = get_rope(**QWEN3_SMALL, **rope, grow=True)
    torch.testing.assert_close(table.lookup(positions), expected, rtol=0, atol=1e-6 * seq_len)
    torch.testing.assert_close(
        table.cos_sin("cpu", seq_len=seq_len)[:seq_len], expected[0], rtol=0, atol=1e-6 * seq_len
    )
    # Shorter sequences are not disturbed by a longer one before them; transformers' module keeps the longer base.
    torch.testing.assert_close(table.lookup(torch.arange(300)), get_rope(**QWEN3_SMALL).lookup(torch.arange(300)))


def test_dynamic_with_mrope_past_the_trained_length() -> None:
    table = get_rope(**MROPE_SMALL, rope_type="dynamic", factor=2.0, grow=True)
    positions = torch.randint(600, (3, 9))
    positions[0, 0] = 899
    whole = table.cos_sin("cpu", seq_len=900)
    expected = whorl.rope_table.ops.merge_mrope(whole, positions, (6, 5, 5), "interleaved")
    torch.testing.assert_close(table.lookup(positions), expected)


class FirstCallCache:
    """What torch_npu's ATB operator does: cos and sin are process-wide and filled by whoever comes first."""

    rows: Tensor | None = None

    def lookup(self, table: RopeTable, positions: Tensor) -> Tensor:
        if FirstCallCache.rows is None:
            FirstCallCache.rows = table.lookup(positions)
        return FirstCallCache.rows


def test_two_tables_used_in_turn_do_not_mix() -> None:
    """Gemma-3: five local layers, one global, over and over, in one process."""
    positions = torch.randint(ROWS, (13,))
    tables = {kind: get_rope(GEMMA3, layer_type=kind, rows=ROWS) for kind in ("sliding_attention", "full_attention")}
    expected = {}
    for kind, table in tables.items():
        angles = positions.double()[:, None] * torch.from_numpy(table.config.frequencies()).double()
        expected[kind] = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    static = FirstCallCache()
    static_is_wrong = False
    for layer in range(12):
        kind = "full_attention" if layer % 6 == 5 else "sliding_attention"
        table = get_rope(GEMMA3, layer_type=kind, rows=ROWS)
        assert table is tables[kind]
        torch.testing.assert_close(table.lookup(positions), expected[kind], rtol=0, atol=1e-4)
        static_is_wrong |= not torch.allclose(static.lookup(table, positions), expected[kind], atol=1e-2)
    assert static_is_wrong


def test_equal_configurations_share_and_others_do_not() -> None:
    table = get_rope(QWEN3_30B, rows=64)
    assert get_rope(dict(QWEN3_30B), rows=64) is table
    assert get_rope(RopeConfig.from_hf(QWEN3_30B), rows=64) is table
    assert get_rope(head_dim=128, max_position=40960, rope_theta=1e6, rows=64) is table
    assert table.cos_sin("cpu") is table.cos_sin(torch.device("cpu"))
    for other in ({**QWEN3_30B, "rope_theta": 5e6}, {**QWEN3_30B, "model_type": "cohere2"}):
        assert get_rope(other, rows=64) is not table
    assert get_rope(QWEN3_30B, rows=65) is not table
    assert get_rope(QWEN3_30B, rows=64, grow=True) is not table


def test_copies_and_pickles_share_the_table() -> None:
    table = get_rope(**QWEN3_SMALL)
    model = torch.nn.Linear(2, 2)
    model.table = table
    assert copy.deepcopy(model).table is table
    assert pickle.loads(pickle.dumps(table)) is table


def test_threads_get_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []
    build = RopeTable._build

    def slow_build(self: RopeTable, *arguments: Any) -> Tensor:
        builds.append(arguments)
        time.sleep(0.05)  # long enough for every thread to arrive
        return build(self, *arguments)

    monkeypatch.setattr(RopeTable, "_build", slow_build)
    start, tables = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        table = get_rope(**QWEN3_SMALL, grow=True)
        tables.append((table, table.lookup(torch.arange(2000))))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tables) == 8
    assert len({id(table) for table, _ in tables}) == 1
    assert len(builds) == 1
    assert all(torch.equal(rows, tables[0][1]) for _, rows in tables)


def test_growth_keeps_the_bits() -> None:
    table = get_rope(**QWEN3_SMALL, grow=True)
    before = table.cos_sin("cpu")
    assert before.shape == (512, 32)
    table.lookup(torch.tensor([512]))
    after = table.cos_sin("cpu")
    assert after.shape == (1024, 32)
    assert torch.equal(after[:512], before)
    table.lookup(torch.tensor([5000]))
    assert table.cos_sin("cpu").shape[0] == 5001
    assert torch.equal(table.cos_sin("cpu")[:1024], after)


@pytest.mark.parametrize("keywords", [QWEN3_SMALL, MROPE_SMALL])
def test_a_position_past_the_table_is_an_error(keywords: dict[str, Any]) -> None:
    table = get_rope(**keywords)
    shape = (3, 4) if table.config.is_mrope else (4,)
    past = torch.zeros(shape, dtype=torch.long)
    assert table.lookup(past + 511).shape == (4, 32)
    past[..., 2] = 512
    with pytest.raises(ValueError, match="position 512 is past the table of 512 rows"):
        table.lookup(past)
    with pytest.raises(ValueError, match="position 512 is past the table of 512 rows"):
        table.apply(torch.zeros(4, 1, 32), None, past)
    with pytest.raises(ValueError, match="position 999 is past the table"):
        table.cos_sin("cpu", seq_len=1000)
    with pytest.raises(ValueError, match="positions are -1 to 0"):
        table.lookup(torch.tensor([0, -1]))
    with pytest.raises(ValueError, match=r"are 0 to 9.* below seq_len \(5\)"):
        table.lookup(torch.arange(10), seq_len=5)
    with pytest.raises(ValueError, match=r"positions is torch\.float32, expected int32 or int64"):
        table.lookup(torch.zeros(3))


def test_wrong_axes_are_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"sections \[6, 5, 5\] need positions \[3, \*tokens\] or \[T\], found \[2, 7\]"
    ):
        get_rope(**MROPE_SMALL).lookup(torch.zeros(2, 7, dtype=torch.long))


def test_get_rope_wants_one_source() -> None:
    with pytest.raises(ValueError, match=r"got both: \['head_dim'\]"):
        get_rope(QWEN3_30B, head_dim=64)
    with pytest.raises(ValueError, match="got neither"):
        get_rope()
    with pytest.raises(ValueError, match="rows is 0, expected a positive number"):
        get_rope(QWEN3_30B, rows=0)


@pytest.mark.parametrize("layout", ["chunked", "interleaved", "hwt"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_text_positions_need_no_axes(layout: str, dtype: torch.dtype) -> None:
    sections = [6, 6, 4] if layout == "hwt" else [6, 5, 5]
    table = get_rope(**QWEN3_SMALL, mrope_section=sections, layout=layout)
    positions = torch.arange(20, dtype=dtype)
    assert torch.equal(table.lookup(positions), table.lookup(positions.expand(3, -1)))
    assert torch.equal(table.lookup(positions), get_rope(**QWEN3_SMALL).lookup(positions))
    q = torch.randn(20, 2, 32)
    torch.testing.assert_close(table.apply(q, None, positions), table.apply(q, None, table.lookup(positions)))


def test_no_tokens() -> None:
    assert get_rope(**QWEN3_SMALL).lookup(torch.zeros(0, dtype=torch.long)).shape == (0, 32)
    assert get_rope(**MROPE_SMALL).lookup(torch.zeros(3, 0, dtype=torch.long)).shape == (0, 32)


def test_angles_are_fp32_whatever_surrounds_them() -> None:
    """128k positions, base 1e6: angles in bf16 would be wrong by 2 (any cos at all)."""
    config = RopeConfig.from_keywords(head_dim=128, max_position=131072, rope_theta=1e6)
    positions = torch.arange(131072 - 64, 131072)
    exact = np.outer(positions.numpy(), 1e6 ** -(np.arange(0, 128, 2) / 128))
    expected = torch.from_numpy(np.concatenate((np.cos(exact), np.sin(exact)), axis=1)).float()

    def rows() -> Tensor:
        whorl.rope_table._tables.clear()
        table = get_rope(config)
        model = torch.nn.Linear(2, 2)
        model.table = table
        model.to(torch.bfloat16)
        rows = table.lookup(positions)
        assert rows.dtype == table.cos_sin("cpu").dtype == torch.float32
        return rows

    plain = rows()
    # Angles near 2^17 are rounded to 2^-8, after a frequency rounded to 2^-24 of itself: 0.004 + 0.008.
    torch.testing.assert_close(plain, expected, rtol=0, atol=0.016)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rows(), plain)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(rows(), plain)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_table_made_in_inference_mode_can_train() -> None:
    table = get_rope(**QWEN3_SMALL)
    with torch.inference_mode():
        table.lookup(torch.arange(5))
    assert not table.cos_sin("cpu").is_inference()
    q = torch.randn(5, 2, 32, requires_grad=True)
    turned, _ = table.apply(q, None, torch.arange(5))
    turned.square().sum().backward()
    assert q.grad is not None
    torch.testing.assert_close(q.grad, 2 * q.detach())  # a rotation keeps the norm


def test_a_fake_table_is_never_kept() -> None:
    table = get_rope(**QWEN3_SMALL)
    with FakeTensorMode():
        assert table.lookup(torch.zeros(4, dtype=torch.long)).shape == (4, 32)
    assert type(table.cos_sin("cpu")) is Tensor
    assert torch.equal(table.lookup(torch.zeros(1, dtype=torch.long))[0, :16], torch.ones(16))


@pytest.mark.parametrize("keywords", [QWEN3_SMALL, MROPE_SMALL])
def test_lookup_compiles_without_a_break(keywords: dict[str, Any]) -> None:
    table = get_rope(**keywords)
    positions = torch.randint(512, (3, 9)) if table.config.is_mrope else torch.randint(512, (9,))
    table.cos_sin("cpu")
    compiled = torch.compile(lambda positions: table.lookup(positions) * 2, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(positions), table.lookup(positions) * 2)


def test_dual_chunk_rows() -> None:
    table = get_rope(head_dim=32, max_position=4096, chunk_size=64, local_size=16)
    positions = torch.randint(4096, (2, 21))
    plain = get_rope(**QWEN3_SMALL).cos_sin("cpu")
    places = table.config.dual_chunk_positions(positions)
    for rows, place in zip(table.lookup_dual_chunk(positions), places, strict=True):
        assert torch.equal(rows, plain[place])
    with pytest.raises(ValueError, match="past the table of 112 rows"):
        table.lookup(torch.tensor([4095]))
    with pytest.raises(ValueError, match="no dual chunk positions"):
        get_rope(**QWEN3_SMALL).lookup_dual_chunk(positions)


def test_dual_chunk_keeps_near_distances() -> None:
    """Rotation by query and key positions gives the true distance inside a chunk and, unclamped, to the one before."""
    config = RopeConfig.from_keywords(head_dim=32, max_position=512, chunk_size=64, local_size=16)
    place = config.dual_chunk_positions(torch.arange(512))
    chunk = torch.arange(512) // 48
    distance = torch.arange(512)[:, None] - torch.arange(512)
    apart = chunk[:, None] - chunk
    distances = place.intra[:, None] - place.intra
    assert torch.equal(distances[apart == 0], distance[apart == 0])
    before = place.succ_critical[:, None] - place.intra
    assert torch.equal(before[apart == 1], distance[apart == 1])
    # Clamped, a key in the local window keeps its distance and no distance reaches past the chunk.
    clamped = place.succ[:, None] - place.intra
    near = (apart == 1) & (distance <= 16)
    assert torch.equal(clamped[near], distance[near])
    assert int(clamped[apart == 1].max()) <= 64


def test_a_table_of_16_bits_is_rounded_once() -> None:
    table = get_rope(head_dim=16, rotary_dim=16, max_position=8, base=500.0, grow=True)
    wide, half = table.cos_sin(), table.cos_sin(dtype=torch.bfloat16)
    assert torch.equal(half, wide.bfloat16())
    assert table.cos_sin(dtype=torch.bfloat16) is half
    assert table.cos_sin(dtype=torch.float16).dtype == torch.float16
    assert table.cos_sin() is wide
    longer = table.cos_sin(seq_len=40, dtype=torch.bfloat16)
    assert torch.equal(longer, table.cos_sin(seq_len=40).bfloat16())
    assert longer.shape[0] >= 40
    with torch.inference_mode():
        assert not table.cos_sin(seq_len=90, dtype=torch.bfloat16).is_inference()


def test_only_a_device_that_wants_it_gets_a_rounded_table() -> None:
    assert table_dtype("cpu", torch.bfloat16) == table_dtype("cuda", torch.float16) == torch.float32
    assert table_dtype("cpu", torch.float32) == torch.float32
    q, k = torch.randn(5, 2, 16).bfloat16(), torch.randn(5, 1, 16).bfloat16()
    table, positions = get_rope(head_dim=16, rotary_dim=16, max_position=8), torch.arange(5)
    assert torch.equal(table.apply(q, k, positions)[0], ops.rope(q, k, table.cos_sin(), positions)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operators_take_a_table_of_qs_dtype(dtype: torch.dtype) -> None:
    """The numbers are those of the rounded table, in fp32."""
    q, k = torch.randn(5, 2, 16, dtype=dtype), torch.randn(5, 1, 16, dtype=dtype)
    cos_sin, positions = torch.randn(8, 16).to(dtype), torch.arange(5)
    expected = ops.rope(q, k, cos_sin.float(), positions)
    for got, right in zip(ops.rope(q, k, cos_sin, positions), expected, strict=True):
        assert torch.equal(got, right)
    with pytest.raises(ValueError, match=r"cos_sin is .* torch.float16, expected .* torch.float32 or torch.bfloat16"):
        ops.rope(q.bfloat16(), k.bfloat16(), cos_sin.half(), positions)
