"""Launches drawn at random end in a report or in BadInput, and right launches of both sides give no alarm."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from whorl.doctor import BadInput, Report, check, check_pair

HERE = Path(__file__).parent
MODELS = sorted((HERE / "models").glob("*.json"))
LAUNCHES = 500

# What starts each framework; flags of the side that it is, and of others, are drawn beside it.
COMMANDS = [
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=sglang",
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.rollout.name=vllm",
    "python3 train.py --rollout-num-gpus-per-engine 4 --sglang-mem-fraction-static 0.7",
    "python3 train.py --rollout-num-gpus-per-engine 4 --vllm-gpu-memory-utilization 0.7",
    "trl grpo --use_vllm --vllm_mode colocate",
    "VLLM_BATCH_INVARIANT=1 vllm serve m",
    "sglang serve --model-path m",
    "torchrun pretrain_gpt.py --position-embedding-type rope",
    "whorl serve m",
    "deepspeed train.py --seed 1",
]
KEYS = [
    "tensor-model-parallel-size", "context-parallel-size", "rotary-base", "rotary-percent", "apply-rope-fusion",
    "moe-router-dtype", "quantization", "kv-cache-dtype", "attention-backend", "hf-overrides", "compilation-config",
    "additional-config", "speculative-config", "sglang-chunked-prefill-size", "vllm_top_p", "temperature", "top_p",
    "batch-invariant-mode", "true-on-policy-mode", "zero_train_gen_mismatch", "logprobs-mode", "dtype", "w_bit",
    "megatron-to-hf-mode", "hf-checkpoint", "rope-scaling-factor", "use-rope-scaling", "enable-lora",
    "flash_attn_version",
    "actor_rollout_ref.rollout.dtype", "actor_rollout_ref.actor.router_replay.mode", "fp8_cfg.enabled",
]  # fmt: skip
VALUES = [
    "1", "2", "-1", "0.5", "true", "false", "none", "auto", "fp8", "fp32", "bfloat16", "'{}'", "'[1, 2]'", "$TP", "''",
    "'{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0}}'", "'{\"cudagraph_mode\": 1}'",
    "/m/Qwen3-8B-FP8", "m4",
]  # fmt: skip


def drawn_launch(draw: random.Random) -> str:
    """Return a script of one framework with up to eight flags, of any meaning and any type."""
    flags = [f"--{draw.choice(KEYS)} {draw.choice(['', *VALUES])}" for _ in range(draw.randrange(9))]
    overrides = [f"{draw.choice(KEYS)}={draw.choice(VALUES)}" for _ in range(draw.randrange(3))]
    return " ".join([draw.choice(COMMANDS), *flags, *overrides])


def test_any_launch_ends_in_a_report(tmp_path: Path) -> None:
    draw = random.Random(43)
    compared = 0
    for number in range(LAUNCHES):
        script, model = tmp_path / f"{number}.sh", draw.choice([None, *MODELS])
        script.write_text(drawn_launch(draw))
        assert isinstance(check(script, device=draw.choice([None, "npu"])), Report)
        other = tmp_path / f"{number}_rollout.sh"
        other.write_text(drawn_launch(draw))
        try:
            report = check_pair(script, draw.choice([None, other]), model=model)
        except BadInput:
            continue  # two launches that are no pair; test_sides.py reads the messages
        compared += 1
        json.dumps(report.to_dict())
        assert report.sides
    assert compared > LAUNCHES / 3


# Both sides as their frameworks run them: no alarm for any model of transformers that both sides know.
RIGHT: dict[str, str] = {
    "verl": "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp "
    "actor_rollout_ref.rollout.name=vllm",
    "slime": "python3 train.py --hf-checkpoint m --megatron-to-hf-mode bridge --rollout-num-gpus-per-engine 1 "
    "--tensor-model-parallel-size 1 --sglang-mem-fraction-static 0.7",
    "trl": "trl grpo --model_name_or_path m --use_vllm --vllm_mode colocate",
}
FAMILIES = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen2_vl",
    "qwen3_vl",
    "gemma2",
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v32",
    "gpt_oss",
    "olmo2",
    "smollm3",
    "phi3",
]


@pytest.mark.parametrize("job", RIGHT)
def test_right_pairs_give_no_alarm(job: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    (tmp_path / "run.sh").write_text(RIGHT[job])
    alarms: dict[str, Any] = {}
    for name in FAMILIES:
        (tmp_path / "config.json").write_text(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
        report = check_pair(tmp_path / "run.sh", model=tmp_path / "config.json")
        alarms[name] = [(f.code, f.found) for f in report.findings if f.severity != "note"]
    assert {name: findings for name, findings in alarms.items() if findings} == {}
