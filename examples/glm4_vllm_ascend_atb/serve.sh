#!/bin/bash
# Fails with "Wrong rotaryCoeff": half of each head rotates, and ATB rotates whole heads.
vllm serve THUDM/GLM-4-9B-0414 --max-model-len 32768
