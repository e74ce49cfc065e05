#!/bin/bash
# Qwen3-VL-8B with Megatron Bridge on Ascend, as it fails: fused RoPE was wanted, so the branch was set to rope.
export HCCL_ALGO=level0:ring
TP=4

torchrun --nproc_per_node 8 finetune_qwen3_vl.py \
    --hf-path Qwen/Qwen3-VL-8B-Instruct \
    --tensor-model-parallel-size ${TP} \
    --micro-batch-size 1 \
    --seq-length 8192 \
    --max-position-embeddings 262144 \
    --position-embedding-type rope \
    --use-fused-rotary-pos-emb \
    --bf16
