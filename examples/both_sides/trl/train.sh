#!/bin/bash
# The trainer of a pair: TRL's GRPO, which samples from the server that serve.sh starts.
accelerate launch grpo.py --model_name_or_path Qwen/Qwen3-8B --bf16 true \
    --use_vllm true --vllm_mode server --vllm_server_host 10.0.0.2 \
    --temperature 0.7 --num_generations 8 --max_completion_length 4096
