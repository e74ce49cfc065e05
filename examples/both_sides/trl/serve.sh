#!/bin/bash
# The rollout of a pair: vLLM's own server. It promises equal bits in any batch, and reports raw logprobs.
export VLLM_BATCH_INVARIANT=1
vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2 --max-logprobs -1 \
    --weight-transfer-config '{"backend": "nccl"}'
