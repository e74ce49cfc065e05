#!/bin/bash
# Healthy: the one MRoPE section for which vllm-ascend calls npu_mrope.
vllm serve Qwen/Qwen2.5-VL-7B-Instruct --max-model-len 32768 --tensor-parallel-size 4
