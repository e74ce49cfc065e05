"""What our code uses of TorchTitan, as it is in the version that our code is written for.

A name is listed when something under whorl/titan imports, extends, calls, reads or replaces it; tests check that.
"""

# Functions that we call, override or pass on: their parameters, with = after those that have a default.
SIGNATURES = {
    "torchtitan.components.checkpoint:CheckpointManager.__init__": (
        "(self, dataloader, model_parts, optimizers, lr_schedulers, states, checkpoint_config, sd_adapter,"
        " base_folder=, ft_manager=)"
    ),
    "torchtitan.components.checkpoint:CheckpointManager._create_checkpoint_id": "(self, step, folder=)",
    "torchtitan.components.checkpoint:CheckpointManager._purge_stale_checkpoints": "(self)",
    "torchtitan.components.checkpoint:CheckpointManager._should_save": "(self, curr_step, last_step=)",
    "torchtitan.components.checkpoint:CheckpointManager.close": "(self)",
    "torchtitan.components.checkpoint:CheckpointManager.dcp_load": (
        "(self, state_dict, checkpoint_id, from_hf, from_quantized)"
    ),
    "torchtitan.components.checkpoint:CheckpointManager.dcp_save": (
        "(self, state_dict, checkpoint_id, async_mode, enable_garbage_collection=, to_hf=)"
    ),
    "torchtitan.components.checkpoint:CheckpointManager.load": "(self, step=)",
    "torchtitan.components.checkpoint:CheckpointManager.save": "(self, curr_step, last_step=)",
    "torchtitan.components.dataloader:BaseDataLoader.__iter__": "(self)",
    "torchtitan.components.ft:FTManager.__init__": "(self, ft_config)",
    "torchtitan.components.loss:build_cross_entropy_loss": "(job_config, **kwargs)",
    "torchtitan.components.loss:cross_entropy_loss": "(pred, labels)",
    "torchtitan.components.lr_scheduler:build_lr_schedulers": "(optimizers, lr_scheduler_config, training_steps)",
    "torchtitan.components.metrics:BaseLogger.close": "(self)",
    "torchtitan.components.metrics:BaseLogger.log": "(self, metrics, step)",
    "torchtitan.components.metrics:LoggerContainer.add_logger": "(self, logger_instance)",
    "torchtitan.components.metrics:MetricsProcessor.__init__": "(self, job_config, parallel_dims, tag=)",
    "torchtitan.components.metrics:MetricsProcessor.log": (
        "(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=)"
    ),
    "torchtitan.components.metrics:MetricsProcessor.should_log": "(self, step)",
    "torchtitan.components.metrics:_get_metrics_rank": "(parallel_dims, job_config)",
    "torchtitan.components.metrics:build_metrics_processor": "(job_config, parallel_dims, model_args=, tag=)",
    "torchtitan.components.optimizer:OptimizersContainer.__init__": (
        "(self, model_parts, optimizer_cls, optimizer_kwargs)"
    ),
    "torchtitan.components.optimizer:build_optimizers": ("(model_parts, optimizer_config, parallel_dims, ft_manager=)"),
    "torchtitan.components.optimizer:build_optimizers_with_moe_load_balancing": (
        "(model_parts, optimizer_config, parallel_dims, ft_manager=)"
    ),
    "torchtitan.components.tokenizer:BaseTokenizer.__init__": "(self)",
    "torchtitan.components.tokenizer:BaseTokenizer.decode": "(self, *args, **kwargs)",
    "torchtitan.components.tokenizer:BaseTokenizer.encode": "(self, *args, **kwargs)",
    "torchtitan.components.tokenizer:BaseTokenizer.get_vocab_size": "(self)",
    "torchtitan.components.tokenizer:build_hf_tokenizer": "(job_config)",
    "torchtitan.config.manager:ConfigManager.parse_args": "(self, args=)",
    "torchtitan.distributed.activation_checkpoint:apply_ac": (
        "(model, ac_config, *, model_compile_enabled=, op_sac_save_list=, base_folder=)"
    ),
    "torchtitan.distributed.dual_pipe_v:DualPipeExpertParallel.__init__": "(self, inner_ep)",
    "torchtitan.distributed.dual_pipe_v:get_dual_pipe_v_flag": "(job_config, parallel_dims)",
    "torchtitan.distributed.expert_parallel:BaseExpertParallel._token_dispatch": "(self, mod, inputs, device_mesh)",
    "torchtitan.distributed.expert_parallel:DeepEPExpertParallel.__init__": "(self, score_before_experts=)",
    "torchtitan.distributed.expert_parallel:ExpertParallel._token_dispatch": "(self, mod, inputs, device_mesh)",
    "torchtitan.distributed.expert_parallel:ExpertTensorParallel._token_dispatch": "(self, mod, inputs, device_mesh)",
    "torchtitan.distributed.expert_parallel:ReordererSequenceParallel._prepare_output_fn": (
        "(self, mod, outputs, device_mesh)"
    ),
    "torchtitan.distributed.expert_parallel:TensorParallel._prepare_input_fn": "(self, mod, inputs, device_mesh)",
    "torchtitan.distributed.pipeline_parallel:pipeline_llm": (
        "(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn)"
    ),
    "torchtitan.distributed.tensor_parallel:maybe_enable_async_tp": "(job_config, tp_mesh)",
    "torchtitan.distributed:NoParallel.__init__": ("(self, *, input_layout=, output_layout=, use_local_output=)"),
    "torchtitan.distributed:NoParallel._apply": "(self, module, device_mesh)",
    "torchtitan.models.deepseek_v3.model.state_dict_adapter:DeepSeekV3StateDictAdapter.__init__": (
        "(self, model_args, hf_assets_path)"
    ),
    "torchtitan.models.deepseek_v3.model.state_dict_adapter:DeepSeekV3StateDictAdapter.from_hf": (
        "(self, hf_state_dict)"
    ),
    "torchtitan.models.deepseek_v3.model.state_dict_adapter:DeepSeekV3StateDictAdapter.get_hf_storage_reader": (
        "(self, path, from_quantized=)"
    ),
    "torchtitan.models.deepseek_v3.model.state_dict_adapter:DeepSeekV3StateDictAdapter.to_hf": "(self, state_dict)",
    "torchtitan.models.moe.kernels:generate_permute_indices": (
        "(tokens_per_expert_group, experts_per_rank, num_ranks, max_len, alignment, use_cpu=)"
    ),
    "torchtitan.models.moe.moe:FeedForward.__init__": "(self, dim, hidden_dim)",
    "torchtitan.models.moe.moe:GroupedExperts.__init__": "(self, dim, hidden_dim, num_experts, use_grouped_mm)",
    "torchtitan.models.moe.moe:MoE.__init__": "(self, moe_args, dim, hidden_dim)",
    "torchtitan.models.moe.moe:MoE.init_weights": "(self, init_std, buffer_device)",
    "torchtitan.models.moe.moe:TokenChoiceTopKRouter._debug_force_load_balance_routing": "(self, scores)",
    "torchtitan.models.moe.moe:TokenChoiceTopKRouter._get_node_limited_routing_scores": "(self, scores_for_choice)",
    "torchtitan.models.moe.moe:build_moe": "(args, dim, hidden_dim, moe_impl=)",
    "torchtitan.models.utils:trunc_normal_": "(tensor, mean=, std=, a=, b=)",
    "torchtitan.protocols.model:BaseModelArgs.get_nparams_and_flops": "(self, model, seq_len)",
    "torchtitan.protocols.model:BaseModelArgs.update_from_config": "(self, job_config, **kwargs)",
    "torchtitan.protocols.model:ModelProtocol.__init__": "(self, model_args)",
    "torchtitan.protocols.model:ModelProtocol.init_weights": "(self, buffer_device=)",
    "torchtitan.protocols.model_converter:ModelConverter.__init__": "(self, job_config, parallel_dims)",
    "torchtitan.protocols.model_converter:ModelConverter.convert": "(self, model)",
    "torchtitan.protocols.model_converter:ModelConverter.post_optimizer_hook": "(self, model)",
    "torchtitan.protocols.model_converter:register_model_converter": "(converter_cls, name)",
    "torchtitan.protocols.train_spec:get_train_spec": "(name)",
    "torchtitan.protocols.train_spec:register_train_spec": "(name, train_spec)",
    "torchtitan.tools.utils:get_device_info": "()",
    "torchtitan.tools.utils:has_cuda_capability": "(major, minor)",
    "torchtitan.train:Trainer.__init__": "(self, job_config)",
    "torchtitan.train:Trainer.close": "(self)",
    "torchtitan.train:Trainer.forward_backward_step": "(self, *, input_dict, labels, global_valid_tokens)",
    "torchtitan.train:Trainer.train": "(self)",
    "torchtitan.train:Trainer.train_step": "(self, data_iterator)",
    "torchtitan.train:main": "(trainer_class)",
}

# Dataclasses, and the fields that we read or write.
FIELDS = {
    "torchtitan.config.job_config:ActivationCheckpoint": "mode",
    "torchtitan.config.job_config:Checkpoint": (
        "enable folder interval last_save_model_only exclude_from_loading enable_ft_dataloader_checkpoints"
    ),
    "torchtitan.config.job_config:Comm": "mode train_timeout_seconds trace_buf_size",
    "torchtitan.config.job_config:Compile": "enable components backend",
    "torchtitan.config.job_config:Debug": "seed moe_force_load_balance",
    "torchtitan.config.job_config:Experimental": "custom_import",
    "torchtitan.config.job_config:Job": "config_file dump_folder description custom_config_module",
    "torchtitan.config.job_config:JobConfig": (
        "job metrics model optimizer lr_scheduler training parallelism checkpoint activation_checkpoint compile"
        " quantize comm memory_estimation fault_tolerance experimental validation debug"
    ),
    "torchtitan.config.job_config:Metrics": "log_freq",
    "torchtitan.config.job_config:Model": "name flavor hf_assets_path converters",
    "torchtitan.config.job_config:Optimizer": "name lr implementation early_step_in_backward",
    "torchtitan.config.job_config:Parallelism": (
        "tensor_parallel_degree pipeline_parallel_degree pipeline_parallel_schedule context_parallel_degree"
        " context_parallel_load_balancer expert_parallel_degree expert_tensor_parallel_degree"
        " expert_parallel_comm_backend fsdp_reshard_after_forward disable_loss_parallel"
        " pipeline_parallel_expert_parallel_overlap pipeline_parallel_schedule_csv enable_async_tensor_parallel"
        " context_parallel_rotate_method data_parallel_replicate_degree data_parallel_shard_degree"
    ),
    "torchtitan.config.job_config:Training": (
        "local_batch_size global_batch_size seq_len steps dtype mixed_precision_param mixed_precision_reduce"
        " enable_cpu_offload dataset dataset_path dataloader"
    ),
    "torchtitan.distributed.parallel_dims:ParallelDims": "dp_replicate dp_shard cp tp pp ep etp world_size",
    "torchtitan.models.moe.moe:MoEArgs": (
        "num_experts num_shared_experts score_func route_norm route_scale score_before_experts top_k num_expert_groups"
        " num_limited_groups use_grouped_mm load_balance_coeff _debug_force_load_balance"
    ),
    "torchtitan.protocols.train_spec:TrainSpec": (
        "model_cls model_args parallelize_fn pipelining_fn build_optimizers_fn build_lr_schedulers_fn"
        " build_dataloader_fn build_tokenizer_fn build_loss_fn build_metrics_processor_fn state_dict_adapter"
    ),
}

# Classes, and the attributes that their methods set on self and our code reads.
ATTRIBUTES = {
    "torchtitan.components.checkpoint:CheckpointManager": (
        "enable initial_load_path keep_latest_k pg purge_queue sd_adapter stager states"
    ),
    "torchtitan.components.metrics:MetricsProcessor": (
        "device_memory_monitor gpu_peak_flops job_config logger model_parts parallel_dims"
    ),
    "torchtitan.models.moe.moe:TokenChoiceTopKRouter": (
        "_debug_force_load_balance gate num_expert_groups num_experts route_norm route_scale score_func top_k"
    ),
    "torchtitan.models.moe.moe:TokenReorderer": "num_experts",
    "torchtitan.models.deepseek_v3.model.state_dict_adapter:DeepSeekV3StateDictAdapter": "model_args",
    "torchtitan.train:Trainer": (
        "checkpointer dataloader job_config lr_schedulers metrics_processor model_args model_parts optimizers"
        " parallel_dims pp_schedule"
        " step tokenizer train_spec"
    ),
}

CONSTANTS = {
    "torchtitan.components.checkpoint:DATALOADER": "dataloader",
    "torchtitan.components.checkpoint:LR_SCHEDULER": "lr_scheduler",
    "torchtitan.components.checkpoint:MODEL": "model",
    "torchtitan.components.checkpoint:OPTIMIZER": "optimizer",
    "torchtitan.components.checkpoint:TRAIN_STATE": "train_state",
    "torchtitan.components.loss:IGNORE_INDEX": -100,
}

# Names that only have to exist.
NAMES = [
    "torchtitan.components.checkpoint:AsyncMode",
    "torchtitan.components.loss:LossFunction",
    "torchtitan.config:TORCH_DTYPE_MAP",
    "torchtitan.experiments:_supported_experiments",
    "torchtitan.models:_supported_models",
    "torchtitan.protocols.model_converter:_registry_model_converter_cls",
    "torchtitan.protocols.train_spec:ParallelizeFunction",
    "torchtitan.protocols.train_spec:_extra_train_specs",
    "torchtitan.tools.logging:logger",
    "torchtitan.tools.utils:GarbageCollection.collect",
    "torchtitan.tools.utils:device_module",
    "torchtitan.tools.utils:device_type",
]

# Functions that we reimplement, by the hash of their source: when one changes, our version has to be reviewed.
SOURCES = {
    "torchtitan.components.checkpoint:CheckpointManager.dcp_load": "cfff5db492fa",
    "torchtitan.components.checkpoint:CheckpointManager.dcp_save": "a78bf5cedc1c",
    "torchtitan.components.checkpoint:CheckpointManager._purge_stale_checkpoints": "fdc0bb37bc45",
    "torchtitan.components.metrics:_get_metrics_rank": "48f8e522d285",
    "torchtitan.distributed.expert_parallel:ReordererSequenceParallel._prepare_inputput_fn": "26f12e079e1c",
    "torchtitan.distributed.expert_parallel:ReordererSequenceParallel._prepare_output_fn": "3464b11be000",
    "torchtitan.distributed.utils:set_pg_timeouts": "65f94ee186ab",
    "torchtitan.models.deepseek_v3.model.model:apply_rotary_emb": "6760666751d6",
    "torchtitan.models.llama3.infra.parallelize:disable_fsdp_gradient_division": "914b85aad05a",
    "torchtitan.models.llama3.model.model:apply_rotary_emb": "a69af3f6bb0b",
    "torchtitan.models.llama3.model.model:reshape_for_broadcast": "2ee151c733b9",
    "torchtitan.models.moe.moe:GroupedExperts.forward": "be10ac05c5bb",
    "torchtitan.models.moe.moe:MoE.forward": "f2da2bc6241e",
    "torchtitan.models.moe.moe:TokenChoiceTopKRouter.forward": "8237e1d975a3",
    "torchtitan.models.moe.moe:TokenReorderer.forward": "98638ac3c0ab",
    "torchtitan.models.moe.moe:_run_experts_for_loop": "d99be8eed6ff",
    "torchtitan.models.moe.moe:_run_experts_grouped_mm": "bd52075f0694",
    "torchtitan.models.moe.utils:_permute": "54b197ce6d4e",
    "torchtitan.models.moe.utils:_unpermute": "2dcb40e31ed6",
    "torchtitan.models.qwen3.model.model:apply_rotary_emb": "7ab08d9a7f2a",
    "torchtitan.train:Trainer.forward_backward_step": "e3b64975a493",
}
