"""Jobs that train and generate: which settings reach the trainer and which the rollout."""

from pathlib import Path
from typing import Any

import pytest

from whorl.doctor.build_launch import build_launch
from whorl.doctor.inputs import read_inputs
from whorl.doctor.jobs import parts
from whorl.doctor.launch import Launch

SLIME = """
MODEL_ARGS=(--num-attention-heads 32 --num-query-groups 4 --rotary-base 1000000 --moe-router-dtype fp32)
pkill -9 sglang
ray job submit -- python3 train.py --hf-checkpoint /m/Qwen3-30B-A3B ${MODEL_ARGS[@]} \\
  --tensor-model-parallel-size 4 --position-embedding-type rope \\
  --rollout-num-gpus-per-engine 8 --rollout-temperature 0.8 --rollout-top-p 0.95 \\
  --sglang-mem-fraction-static 0.7 --sglang-enable-fp32-lm-head --use-tis
"""
NEMO = """
policy:
  model_name: Qwen/Qwen3-30B-A3B
  precision: bfloat16
  dtensor_cfg: {enabled: false, tensor_parallel_size: 2}
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 4, apply_rope_fusion: true}
  generation:
    backend: vllm
    temperature: 0.8
    vllm_cfg: {tensor_parallel_size: 8, precision: fp8, max_model_len: 4096}
    sglang_cfg: {tp_size: 3}
loss_fn: {use_importance_sampling_correction: true}
"""
PRIME = """
seq_len = 8192
[model]
name = "Qwen/Qwen3-30B-A3B"
[trainer.model]
attn = "flash_attention_3"
[orchestrator]
batch_size = 512
[orchestrator.train.sampling]
temperature = 0.9
[inference.vllm]
tensor_parallel_size = 4
"""
TRL = """
accelerate launch grpo.py --model_name_or_path Qwen/Qwen3-8B --use_vllm --vllm_mode colocate --top_p 0.95 \\
  --vllm_tensor_parallel_size 2 --vllm_max_model_length 4096 --vllm_importance_sampling_correction True --bf16
"""
VERL = """
python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp actor_rollout_ref.rollout.name=sglang \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 critic.strategy=megatron
"""
# By name: file, text, frameworks of both sides, then pairs of (key, values of trainer and rollout).
JOBS: dict[str, tuple[tuple[str, str], tuple[str, str], dict[str, tuple[Any, Any]]]] = {
    "slime": (
        ("run.sh", SLIME),
        ("megatron", "sglang"),
        {
            "tensor_parallel": (4, 8),
            "temperature": (None, 0.8),
            "top_p": (None, 0.95),
            "enable_fp32_lm_head": (None, True),
            "moe_router_dtype": ("fp32", None),
            "use_tis": (True, None),
            "hf_checkpoint": ("/m/Qwen3-30B-A3B",) * 2,
        },
    ),
    "vime": (
        ("run.sh", SLIME.replace("sglang-", "vllm-")),
        ("megatron", "vllm"),
        {"tensor_parallel": (4, 8), "mem_fraction_static": (None, 0.7)},
    ),
    "nemo-rl": (
        ("grpo.yaml", NEMO),
        ("bridge", "vllm"),
        {
            "tensor_parallel": (4, 8),
            "precision": ("bfloat16", "fp8"),
            "apply_rope_fusion": (True, None),
            "temperature": (None, 0.8),
            "sequence_length": (None, 4096),
            "use_importance_sampling_correction": (True, None),
        },
    ),
    "prime-rl": (
        ("rl.toml", PRIME),
        ("hf", "vllm"),
        {
            "tensor_parallel": (None, 4),
            "attn": ("flash_attention_3", None),
            "temperature": (None, 0.9),
            "sequence_length": (8192, 8192),
            "batch_size": (None, None),
        },
    ),
    "trl": (
        ("run.sh", TRL),
        ("hf", "vllm"),
        {
            "tensor_parallel": (None, 2),
            "top_p": (0.95, 0.95),
            "vllm_importance_sampling_correction": (True, None),
            "max_model_length": (None, 4096),
        },
    ),
    "verl": (("run.sh", VERL), ("hf", "sglang"), {"tensor_parallel": (None, 2)}),
}


def launch_of(path: Path) -> Launch:
    return build_launch(read_inputs(path), framework=None, train=False, device=None)


@pytest.mark.parametrize("name", JOBS)
def test_each_side_gets_its_settings(name: str, tmp_path: Path) -> None:
    (file, text), frameworks, values = JOBS[name]
    (tmp_path / file).write_text(text)
    launch = launch_of(tmp_path / file)
    trainer, rollout = parts(launch)
    assert launch.framework == name
    assert (trainer.framework, rollout.framework) == frameworks
    assert (trainer.train, rollout.train) == (True, False)
    assert {key: (trainer.get(key), rollout.get(key)) for key in values} == values


def test_a_setting_keeps_the_name_that_the_user_wrote(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SLIME)
    _, rollout = parts(launch_of(tmp_path / "run.sh"))
    assert rollout.where("tensor_parallel") == "run.sh:6 (rollout-num-gpus-per-engine)"


def test_a_configuration_builds_on_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "base.yaml").write_text(NEMO)
    over = tmp_path / "recipes" / "over.yaml"
    over.write_text(
        "defaults: ../base.yaml\npolicy: {generation: {temperature: 0.5}, megatron_cfg: {enabled: false}}\n"
    )
    trainer, rollout = parts(launch_of(over))
    assert (trainer.framework, trainer.get("tensor_parallel")) == ("hf", 2)
    assert (rollout.get("temperature"), rollout.get("tensor_parallel")) == (0.5, 8)
    (tmp_path / "base.yaml").write_text("defaults: recipes/over.yaml\n" + NEMO)
    assert launch_of(over).framework == "nemo-rl"  # a circle ends


def test_a_base_beside_its_configuration_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "z_base.yaml").write_text(NEMO)
    (tmp_path / "a_over.yaml").write_text("defaults: z_base.yaml\npolicy: {generation: {temperature: 0.5}}\n")
    inputs = read_inputs(tmp_path)
    assert sorted(inputs.read) == ["a_over.yaml", "z_base.yaml"]
    assert launch_of(tmp_path).get("temperature") == 0.5
