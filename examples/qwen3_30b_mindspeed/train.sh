#!/bin/bash
# Healthy: plain RoPE through MindSpeed's fused operator.
export HCCL_ALGO=level0:ring

torchrun --nproc_per_node 16 pretrain_gpt.py \
    --position-embedding-type rope \
    --use-fused-rotary-pos-emb \
    --rotary-base 1000000 \
    --num-query-groups 4 \
    --tensor-model-parallel-size 4 \
    --micro-batch-size 1 \
    --seq-length 4096 \
    --max-position-embeddings 40960 \
    --bf16
