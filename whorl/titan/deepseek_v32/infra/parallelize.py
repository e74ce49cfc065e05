"""Parallelize the model: tensor, expert and context parallelism, activation checkpointing, compile, FSDP2.

The order matters: what changes modules comes before what wraps them, and FSDP2 comes last.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.dual_pipe_v import DualPipeExpertParallel, get_dual_pipe_v_flag
from torchtitan.distributed.expert_parallel import (
    BaseExpertParallel,
    DeepEPExpertParallel,
    ExpertParallel,
    ExpertTensorParallel,
    TensorParallel,
)
from torchtitan.distributed.tensor_parallel import maybe_enable_async_tp
from torchtitan.tools.logging import logger

from whorl import ops
from whorl.titan.config import settings
from whorl.titan.deepseek_v32.args import DeepSeekV32Args
from whorl.titan.deepseek_v32.model import DeepSeekV32Model
from whorl.titan.job_options import QUANTIZE
from whorl.titan.sharding import Sharding
from whorl.titan.tensor_parallel import parallelize_sharded_experts, parallelize_unsharded_experts

from .compiled import compile_blocks
from .context_parallel import ContextParallelDSA
from .sharding import shard, transformer_blocks
from .tensor_parallel import apply_tensor_parallel

# Operators that selective activation checkpointing must not count. FSDP2 records profiler marks inside a block whose
# experts are a separate unit. When the block is recomputed there are more or fewer of them, which selective
# checkpointing would report as nondeterminism.
PROFILER = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)


def parallelize_deepseek_v32(
    model: DeepSeekV32Model, parallel_dims: ParallelDims, job_config: JobConfig
) -> DeepSeekV32Model:
    """Parallelize a model or a pipeline stage on the meta device, in place; TorchTitan calls this.

    Raises ValueError when the degrees do not fit the model.
    """
    check_layout(model.model_args, parallel_dims, job_config)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if parallel_dims.tp_enabled:
        mesh = parallel_dims.get_mesh("tp")
        apply_tensor_parallel(model, mesh, loss_parallel=not job_config.parallelism.disable_loss_parallel)
        maybe_enable_async_tp(job_config, mesh)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        _parallelize_experts(model, parallel_dims, job_config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)  # torch's parallel styles create new, trainable parameters
    if parallel_dims.cp_enabled:
        balancer = job_config.parallelism.context_parallel_load_balancer
        context_parallel = ContextParallelDSA(parallel_dims.get_mesh("cp"), balancer)
        for block in transformer_blocks(model):
            context_parallel.apply(block.attention)
        logger.info(f"Context parallelism: keys are gathered from {parallel_dims.cp} ranks, load balancer {balancer}")
    compiles = job_config.compile.enable and "model" in job_config.compile.components
    if job_config.activation_checkpoint.mode != "none":
        SAC_IGNORED_OPS.update(PROFILER)
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiles,
            op_sac_save_list=costly_operators(),
            base_folder=job_config.job.dump_folder,
        )
    if compiles:
        compile_blocks(model, job_config.compile.backend, no_codegen=settings(job_config).no_codegen)
    _apply_fsdp(model, parallel_dims, job_config)
    return model


def check_layout(args: DeepSeekV32Args, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Raise ValueError unless a model of these sizes can be parallelized with these degrees."""
    length, tokens = job_config.training.seq_len, parallel_dims.seq_len_divisor
    if length % tokens:
        raise ValueError(
            f"training.seq_len is {length}, expected a multiple of {tokens}: tensor_parallel_degree "
            f"({parallel_dims.tp}) times two runs of tokens per context-parallel rank ({parallel_dims.cp})"
        )
    heads = args.n_heads
    if heads % parallel_dims.tp:
        raise ValueError(f"tensor_parallel_degree is {parallel_dims.tp}, expected a divisor of the {heads} heads")
    experts = args.moe_args.num_experts
    if experts % parallel_dims.ep:
        raise ValueError(f"expert_parallel_degree is {parallel_dims.ep}, expected a divisor of the {experts} experts")
    if job_config.parallelism.expert_parallel_comm_backend == "deepep" and (
        not parallel_dims.ep_enabled or parallel_dims.etp_enabled
    ):
        raise ValueError(
            f"DeepEP moves tokens to unsharded experts on other ranks: expert_parallel_degree is {parallel_dims.ep}, "
            f"expected above 1, and expert_tensor_parallel_degree is {parallel_dims.etp}, expected 1"
        )
    if parallel_dims.dp_replicate_enabled and not parallel_dims.fsdp_enabled:
        raise ValueError(
            f"data_parallel_replicate_degree is {parallel_dims.dp_replicate} without FSDP: the DDP of TorchTitan "
            "0.2 averages gradients that are already divided by all tokens; set data_parallel_shard_degree above 1"
        )
    quantizing = [name for name in job_config.model.converters if name.startswith(QUANTIZE)]
    if quantizing and parallel_dims.tp_enabled:
        raise ValueError(
            f"the converter {quantizing[0]} does not support tensor parallelism (tensor_parallel_degree is "
            f"{parallel_dims.tp}); remove one of them"
        )


def costly_operators() -> set[Any]:
    """Return the operators whose results selective activation checkpointing saves instead of recomputing."""
    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    ours = (ops.sparse_attention, ops.masked_attention, ops.lightning_indexer)
    return {
        aten.mm.default,
        aten.max.default,
        functional.reduce_scatter_tensor.default,
        functional.all_to_all_single.default,
        torch._higher_order_ops.inductor_compiled_code,
        *(op.node for op in ours),
    }


def _parallelize_experts(model: DeepSeekV32Model, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    tp_mesh, ep_mesh = parallel_dims.get_optional_mesh("tp"), parallel_dims.get_optional_mesh("ep")
    are_sharded = ep_mesh is None or parallel_dims.etp_enabled
    overlaps = get_dual_pipe_v_flag(job_config, parallel_dims)
    for block in transformer_blocks(model):
        if not block.moe_enabled:
            continue
        if tp_mesh is not None:
            (parallelize_sharded_experts if are_sharded else parallelize_unsharded_experts)(block, tp_mesh)
        if ep_mesh is None:
            parallelize_module(block.moe.experts, tp_mesh, TensorParallel())
            continue
        mesh = parallel_dims.get_mesh(["ep", "etp"]) if are_sharded else ep_mesh
        style = _dispatch_style(block.moe, are_sharded, job_config)
        parallelize_module(block.moe.experts, mesh, DualPipeExpertParallel(style) if overlaps else style)


def _dispatch_style(moe: Any, are_sharded: bool, job_config: JobConfig) -> BaseExpertParallel:
    """Return TorchTitan's style that moves tokens to the ranks of their experts. are_sharded: experts also use ETP."""
    if job_config.parallelism.expert_parallel_comm_backend == "deepep":
        return DeepEPExpertParallel(score_before_experts=moe.score_before_experts)
    return ExpertTensorParallel() if are_sharded else ExpertParallel()


def _data_mesh(parallel_dims: ParallelDims, name: str) -> DeviceMesh | None:
    """Return the mesh dimension `name` of FSDP2, with replication in front where there are replicas (HSDP), or None."""
    names = ["dp_replicate", name] if parallel_dims.dp_replicate_enabled else [name]
    return parallel_dims.get_optional_mesh(names)


def _apply_fsdp(model: DeepSeekV32Model, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """Shard the model by FSDP2 over data- and context-parallel ranks, if there are any."""
    mesh = _data_mesh(parallel_dims, "fsdp")
    if mesh is None:
        return
    expert_mesh = _data_mesh(parallel_dims, "efsdp") if parallel_dims.ep_enabled else None
    shard(model, Sharding.from_config(job_config, mesh, expert_mesh))
    logger.info(f"FSDP2 over {mesh.size()} ranks, the next block's parameters prefetched in both directions")
