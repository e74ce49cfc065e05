#!/bin/bash
# Two paths in one job: the actor trains with Megatron, the rollout runs vllm-ascend.
# The actor asks for MindSpeed's fused RoPE, which does not serve MRoPE.
python3 -m verl.trainer.main_ppo --config-name ppo_megatron_trainer \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct \
    +actor_rollout_ref.actor.megatron.override_transformer_config.position_embedding_type=mrope \
    +actor_rollout_ref.actor.megatron.override_transformer_config.use_fused_rotary_pos_emb=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    trainer.device=npu
