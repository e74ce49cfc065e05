#!/bin/bash
# The same launch, mended: the mrope branch, its sections, and both fusion switches off.
export HCCL_ALGO=level0:ring
TP=4

torchrun --nproc_per_node 8 finetune_qwen3_vl.py \
    --hf-path Qwen/Qwen3-VL-8B-Instruct \
    --tensor-model-parallel-size ${TP} \
    --micro-batch-size 1 \
    --seq-length 8192 \
    --max-position-embeddings 262144 \
    --position-embedding-type mrope \
    --mrope-section 24 20 20 \
    --no-rope-fusion \
    --bf16
