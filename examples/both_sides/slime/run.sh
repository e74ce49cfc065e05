#!/bin/bash
# One job: Megatron trains in bf16, SGLang generates with the FP8 checkpoint, and nothing corrects the difference.
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/qwen3-30B-A3B.sh"
ROLLOUT_ARGS=(
   --prompt-data dapo-math-17k.jsonl --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 8192 --rollout-temperature 1
)
PERF_ARGS=(--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7)
ray job submit --runtime-env-json='{"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' -- python3 train.py \
   --hf-checkpoint /models/Qwen3-30B-A3B-FP8 --ref-load /models/Qwen3-30B-A3B_torch_dist \
   --advantage-estimator grpo --attention-backend flash \
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]} ${SGLANG_ARGS[@]}
