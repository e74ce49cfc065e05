"""GGUF files that stay packed: blocks as the gguf package unpacks them, models bit for bit as unpacked ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import python_path
from kernels import without_cpu_kernels
from test_gguf_weights import GGUFS, write_gguf
from test_models import save
from test_quant_formats import load, logits, matrices

from whorl import nn
from whorl.engine import weights
from whorl.nn.weights.dense import DENSE
from whorl.nn.weights.gguf import KINDS, GgufBlocks

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_unpacked_as_the_gguf_package_does(kind: str) -> None:
    """Random bytes, so every number, scale and minimum; scales that are no numbers are left out."""
    number, own = gguf.GGMLQuantizationType[kind], KINDS[kind]
    assert gguf.GGML_QUANT_SIZES[number] == (own.values, own.num_bytes)
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (5, 7, own.row_bytes(512)), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(np.asarray(gguf.quants.dequantize(stored, number), dtype=np.float32))
    actual = own.unpack(torch.from_numpy(stored))
    assert actual.shape == expected.shape == (5, 7, 512)
    is_number = expected.isfinite()
    assert is_number.float().mean() > 0.9
    assert torch.equal(actual[is_number], expected[is_number])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", ["llama-tied-bias", "qwen3moe"])
def test_packed_models_equal_unpacked_ones(kind: str, name: str, tmp_path: Path) -> None:
    """Heads of Llama in llama.cpp's order, 3-D tensors of experts, a tied embedding; also in bf16."""
    arch, config = GGUFS[name]
    path = tmp_path / "model.gguf"
    write_gguf(path, arch, save(tmp_path / "hf", config), gguf.GGMLQuantizationType[kind])
    for dtype in ("float32", "bfloat16"):
        packed, plain = load(path, dtype=dtype), load(path, dtype=dtype, unpack=True)
        assert all(isinstance(m.format, GgufBlocks) for m in matrices(packed).values())
        assert all(m.format == DENSE for m in matrices(plain).values())
        assert torch.equal(logits(packed), logits(plain))
    bytes_of = [sum(p.nbytes for p in model.parameters()) for model in (packed, load(path, unpack=True))]
    assert bytes_of[0] < 0.6 * bytes_of[1]


def test_projections_of_several_kinds_are_one_matrix(tmp_path: Path) -> None:
    """As in Q4_K_M files, whose values of attention have more bits."""
    hf = save(tmp_path / "hf", GGUFS["qwen3"][1])
    kinds = {"attn_v": "Q8_0", "attn_q": "Q4_1", "ffn_up": "F16", "output": "Q5_0"}
    path = tmp_path / "model.gguf"
    before = gguf.GGUFWriter.add_tensor

    def add(writer: Any, name: str, value: Any, raw_dtype: Any = None) -> None:
        kind = next((gguf.GGMLQuantizationType[k] for n, k in kinds.items() if n in name and "norm" not in name), None)
        if kind is None:
            return before(writer, name, value, raw_dtype=raw_dtype)
        return before(writer, name, gguf.quants.quantize(value, kind), raw_dtype=kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        write_gguf(path, "qwen3", hf)
    model, plain = load(path), load(path, unpack=True)
    attention: Any = model.model.layers[0].self_attn.qkv_proj
    assert sorted(p.shape[-1] for p in attention.parameters()) == [20, 34, 128], "a row of 32 in Q4_1, Q8_0 and F32"
    assert torch.equal(logits(model), logits(plain))
    values = dict(attention.format.kinds)
    assert values["model.layers.0.mlp.up_proj"] == "F16"


def test_shares_of_ranks(tmp_path: Path) -> None:
    from whorl.models.llama import Llama

    hf = save(tmp_path / "hf", Llama.tiny(hidden_size=64, intermediate_size=128, head_dim=16))
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", hf, gguf.GGMLQuantizationType.Q8_0)
    whole = {name: slot.into for name, slot in nn.destinations(load(path, unpack=True)).items()}
    for rank in range(2):
        model = load(path, tp=nn.Ranks(rank=rank, size=2))
        for name, matrix in matrices(model).items():
            values = matrix.format.values(matrix)
            assert values.shape == matrix.shape
            for part in matrix.parts:
                expected = whole[f"{part.source(name)}.weight"][part.rows, part.columns]
                assert torch.equal(values[part.place], expected), part.source(name)


def test_kinds_that_are_held_unpacked_only(tmp_path: Path) -> None:
    hf = save(tmp_path / "hf", GGUFS["llama"][1])
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", hf, gguf.GGMLQuantizationType.Q8_0)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(KINDS, "Q8_0")
        with pytest.raises(ValueError, match="is of type Q8_0, which cannot stay packed; expected one of Q4_0, Q4_1"):
            load(path)
        load(path, unpack=True)


def test_memory_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", save(tmp_path / "hf", GGUFS["llama"][1]), gguf.GGMLQuantizationType.Q8_0)
    for free, expected in ((10**9, False), (1000, True)):
        monkeypatch.setattr(weights, "free_memory", lambda free=free: free)
        with without_cpu_kernels():
            held = load(path, unpack=None).lm_head
        assert isinstance(held.format, GgufBlocks) == expected


PEAK = """
import resource, sys, torch
from whorl.engine.weights import load_model
from one_sequence import PROMPT, Runner
torch.set_num_threads(1)
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_model(sys.argv[1], device="cpu", dtype="float32", progress=False, unpack=False)
Runner(model).run(PROMPT)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""


@pytest.mark.slow
def test_a_large_file_takes_little_more_than_its_size(tmp_path: Path) -> None:
    """300 MB in 4.5 bits are over 2 GB in fp32; mapped pages of the file count, too."""
    from whorl.models.qwen3 import Qwen3

    config = Qwen3.tiny(hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8)
    config |= {"num_hidden_layers": 11, "head_dim": 128, "vocab_size": 8000}
    path = tmp_path / "model.gguf"
    _write_blocks(path, config)
    size = path.stat().st_size
    assert 2.5e8 < size < 5e8
    run = [sys.executable, "-c", PEAK, str(path)]
    done = subprocess.run(
        run, capture_output=True, text=True, check=True, timeout=500, env=os.environ | {"PYTHONPATH": python_path()}
    )
    peak = int(done.stdout) * 1024
    assert peak < 2 * size + 3e8, f"{peak / 1e6:.0f} MB for a file of {size / 1e6:.0f}"


def _write_blocks(path: Path, config: dict[str, Any]) -> None:
    """Zeros in Q4_0, but for scales: nothing is quantised, which would take longer than all else."""
    writer = gguf.GGUFWriter(path, "qwen3")
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    inner, width = config["intermediate_size"], config["head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(width)
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    kind = gguf.GGMLQuantizationType.Q4_0
    matrices = {"attn_q": (heads * width, hidden), "attn_k": (kv * width, hidden), "attn_v": (kv * width, hidden)}
    matrices |= {"attn_output": (hidden, heads * width), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}
    matrices |= {"ffn_down": (hidden, inner)}
    norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": width, "attn_k_norm": width}
    every = {f"blk.{i}.{n}.weight": shape for i in range(config["num_hidden_layers"]) for n, shape in matrices.items()}
    every |= {"token_embd.weight": (config["vocab_size"], hidden), "output.weight": (config["vocab_size"], hidden)}
    for name, (rows, columns) in every.items():
        blocks = np.full((rows, columns // 32, 18), 0x77, np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=kind)
    for name, count in {
        f"blk.{i}.{n}.weight": c for i in range(config["num_hidden_layers"]) for n, c in norms.items()
    }.items():
        writer.add_tensor(name, np.ones(count, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
