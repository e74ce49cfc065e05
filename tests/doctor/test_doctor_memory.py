"""What the doctor says of memory that is too small: its arithmetic against vLLM's logs and transformers' models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from whorl.doctor import check
from whorl.doctor.memory_symptoms import PHASES
from whorl.plan.model_shape import from_hugging_face
from whorl.plan.serving import cache_bytes, weight_bytes

HERE = Path(__file__).parent
GIB = 2**30
REAL: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "real_logs.yaml").read_text())
LLAMA_3_1 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
QWEN3_235B = json.loads((HERE / "models" / "qwen3_235b_a22b.json").read_text()) | {
    "vocab_size": 151936, "intermediate_size": 12288, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}  # fmt: skip


def explained(log: str, folder: Path, model: dict[str, Any] | None = LLAMA_3_1, flags: str = "") -> Any:
    """The one finding of a log beside a config.json and a script."""
    (folder / "config.json").unlink(missing_ok=True)
    if model is not None:
        (folder / "config.json").write_text(json.dumps(model))
    (folder / "serve.sh").write_text(f"vllm serve m {flags}")
    (folder / "serve.log").write_text(log)
    (finding,) = [f for f in check(folder, framework="vllm").findings if "memory" in f.code or "kv-cache" in f.code]
    return finding


# The bytes, against what others count.


def test_weights_of_llama_are_what_vllm_has_logged() -> None:
    """vllm-project/vllm#10517: "Loading model weights took 14.9888 GB", with the rotary table of 131072 rows."""
    table = 131072 * 128 * 2 / GIB
    assert weight_bytes(from_hugging_face(LLAMA_3_1, ""), tp=1) / GIB + table == pytest.approx(14.9888, rel=1e-3)


def test_cache_of_llama_is_what_vllm_has_logged() -> None:
    """vllm-project/vllm#10517: 1478 blocks of 16 tokens in 2.89 GiB."""
    assert cache_bytes(from_hugging_face(LLAMA_3_1, ""), tp=1) * 1478 * 16 / GIB == pytest.approx(2.89, abs=0.01)


def test_cache_of_sharded_heads_is_what_vllm_has_logged() -> None:
    """vllm-project/vllm#21348: Qwen3-235B-A22B on 4 ranks, 178880 tokens in 8.11 GiB of 16 bits."""
    token = cache_bytes(from_hugging_face(QWEN3_235B, ""), tp=4)
    assert token == 2 * 94 * 1 * 128 * 2
    assert token * 178880 / GIB == pytest.approx(8.11, rel=0.02)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_weights_are_those_of_transformers(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384}
    if kind == "deepseek_v3":
        sizes |= {"first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 4, "topk_group": 2}
    config = AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(p.numel() for p in model.parameters()) * 2
    assert weight_bytes(from_hugging_face(config.to_dict(), kind), tp=1) == pytest.approx(expected, rel=1e-3)


def test_latents_are_not_split_over_ranks() -> None:
    shape = from_hugging_face(json.loads((HERE / "models" / "deepseek_v32.json").read_text()) | DEEPSEEK, "")
    assert cache_bytes(shape, tp=1) == cache_bytes(shape, tp=8) == 61 * (512 + 64 + 128) * 2


DEEPSEEK = {
    "vocab_size": 129280, "intermediate_size": 18432, "first_k_dense_replace": 3, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "index_n_heads": 64,
    "index_topk": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_hidden_layers": 61, "index_head_dim": 128,
}  # fmt: skip


# The sentences.


def test_as_many_requests_as_fit(tmp_path: Path) -> None:
    log = "RuntimeError: CUDA out of memory occurred when warming up {} with 256 dummy requests."
    for what in ("sampler", "pooler (task='embed')"):
        assert explained(log.format(what), tmp_path).fix[0] == "--max-num-seqs 128 in place of 256"
    states = explained("ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (108).", tmp_path)
    assert states.expected == "at most 108 requests at once, or a larger cache"
    assert states.fix == ("--max-num-seqs 108", "or raise --gpu-memory-utilization")


def test_a_request_that_is_too_long(tmp_path: Path) -> None:
    log = (
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (3.81 GiB). Based on the available memory, the "
        "estimated maximum model length is 31200."
    )
    finding = explained("total_gpu_memory=23.58GiB gpu_memory_utilization=0.90\n" + log, tmp_path)
    assert "128 KiB a token" in finding.why
    assert "another model" not in finding.why
    assert finding.expected == "at most 31200 tokens, or 12.19 GiB more for the cache"
    assert finding.fix == (
        "--max-model-len 31200",
        "raising --gpu-memory-utilization is not enough: 1.42 of 23.58 GiB would be needed",
        "or --kv-cache-dtype fp8: 8.00 GiB, still too much",
        "or more ranks: --tensor-parallel-size",
    )
    assert "another model" in explained(log, tmp_path, QWEN3_235B).why


def test_the_share_is_counted_from_the_device(tmp_path: Path) -> None:
    finding = explained(REAL["vllm_llama31_at_29k"]["log"], tmp_path, flags="--max-model-len 29000")
    # (29000 - 23648) tokens x 128 KiB = 0.65 GiB, 0.0277 of 23.58 GiB.
    assert finding.expected == "at most 23648 tokens, or 0.65 GiB more for the cache"
    assert finding.fix[1] == "or --gpu-memory-utilization 0.93 in place of 0.9 (0.65 of 23.58 GiB more)"


def test_no_room_for_any_block(tmp_path: Path) -> None:
    log = "total_gpu_memory (14.74GiB)\nAvailable KV cache memory: -1.89 GiB\nValueError: No available memory for the "
    finding = explained(log + "cache blocks.", tmp_path)
    assert "-1.89 GiB are left" in finding.why
    assert "13.27 GiB, and the weights take 14.96 of them" in finding.why
    assert "or more ranks: --tensor-parallel-size 2" in finding.fix


def test_memory_that_others_hold(tmp_path: Path) -> None:
    log = (
        "ValueError: Free memory on device cuda:0 ({}/23.57 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 21.21 GiB)."
    )
    finding = explained(log.format("19.01"), tmp_path)
    assert finding.fix[1] == "or --gpu-memory-utilization 0.80"
    # 0.8 x 23.57 - 14.96 GiB at 128 KiB a token.
    assert re.search(r"about 319\d\d tokens", finding.why)
    assert len(explained(log.format("9.01"), tmp_path).fix) == 1
    assert explained(log.format("9.01"), tmp_path, None).fix[1] == "or --gpu-memory-utilization 0.38"


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 14.76 GiB of "
    "which 100.00 MiB is free. Of the allocated memory 9.00 GiB is allocated by PyTorch, and {loose} is reserved by "
    "PyTorch but unallocated."
)


@pytest.mark.parametrize(
    "function", ["load_weights", "capture_model", "profile_run", "initialize_kv_cache", "backward"]
)
def test_when_it_happened_decides_the_fix(function: str, tmp_path: Path) -> None:
    frame = f'Traceback (most recent call last):\n  File "/a/b.py", line 3, in {function}\n    x()\n'
    finding = explained(frame + OOM.format(tried="20.00 MiB", loose="20.00 MiB"), tmp_path, None)
    when, fix = next(phase[1:] for phase in PHASES if re.search(phase[0], function))
    assert f"It ran out {when}." in finding.why
    assert finding.fix == fix


def test_fragments_weights_and_large_tensors_are_told_apart(tmp_path: Path) -> None:
    plain = explained(OOM.format(tried="20.00 MiB", loose="20.00 MiB"), tmp_path, None)
    assert "5.64 GiB were held outside torch" in plain.why
    fragmented = explained(OOM.format(tried="20.00 MiB", loose="5.00 GiB"), tmp_path, None)
    assert "fragments" in fragmented.why
    assert fragmented.fix[0] == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    large = explained(OOM.format(tried="3.00 GiB", loose="20.00 MiB"), tmp_path, None)
    assert "So large a tensor" in large.why
    with_weights = explained(OOM.format(tried="20.00 MiB", loose="20.00 MiB"), tmp_path)
    assert "The weights alone do not fit." in with_weights.why
    assert with_weights.fix[0] == "--tensor-parallel-size 2"
    sharded = explained(OOM.format(tried="20.00 MiB", loose="20.00 MiB"), tmp_path, flags="-tp 2")
    assert "7.48 GiB on each of 2 ranks" in sharded.why
    assert "alone do not fit" not in sharded.why


def test_an_npu_s_allocator_has_its_own_variable(tmp_path: Path) -> None:
    log = "RuntimeError: NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB "
    log += "already allocated; 10.24 GiB current active; 19.52 MiB free; 14.65 GiB reserved in total by PyTorch)"
    finding = explained(log, tmp_path, None)
    assert finding.fix[0] == "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"
    assert "46.30 GiB were held outside" in finding.why


@pytest.mark.parametrize(
    ("config", "weight"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.515625),
        ({"quant_method": "mxfp4"}, 0.53125),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, 1.0),
    ],
)
def test_quantised_weights_are_counted_as_stored(config: dict[str, Any], weight: float, tmp_path: Path) -> None:
    finding = explained("RuntimeError: CUDA out of memory.", tmp_path, LLAMA_3_1 | {"quantization_config": config})
    expected = weight_bytes(from_hugging_face(LLAMA_3_1, ""), 1, weight) / GIB
    assert f"the weights take {expected:.2f} GiB" in finding.why
