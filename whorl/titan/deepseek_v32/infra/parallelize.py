"""From one model to one rank's part of it: tensor, expert and context parallelism, checkpointing, compile, FSDP2.

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
from whorl.titan.deepseek_v32.args import DeepSeekV32Args
from whorl.titan.deepseek_v32.model import DeepSeekV32Model
from whorl.titan.job_options import QUANTIZE
from whorl.titan.sharding import Sharding
from whorl.titan.tensor_parallel import parallelize_sharded_experts, parallelize_unsharded_experts

from .compiled import compile_blocks
from .context_parallel import ContextParallelDSA
from .sharding import blocks_of, shard
from .tensor_parallel import share_out

# FSDP2 marks its work for the profiler also inside of a block, where its experts are a unit of their own: not the same
# number of times when the block is computed again, which selective checkpointing takes for nondeterminism.
PROFILER = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)


def parallelize_deepseek_v32(
    model: DeepSeekV32Model, parallel_dims: ParallelDims, job_config: JobConfig
) -> DeepSeekV32Model:
    """What TorchTitan calls with the model, or a stage of it, on the meta device."""
    check_layout(model.model_args, parallel_dims, job_config)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if parallel_dims.tp_enabled:
        mesh = parallel_dims.get_mesh("tp")
        share_out(model, mesh, loss_parallel=not job_config.parallelism.disable_loss_parallel)
        maybe_enable_async_tp(job_config, mesh)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        _spread_experts(model, parallel_dims, job_config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)  # torch's parallel styles make new parameters, which learn
    if parallel_dims.cp_enabled:
        balancer = job_config.parallelism.context_parallel_load_balancer
        context_parallel = ContextParallelDSA(parallel_dims.get_mesh("cp"), balancer)
        for block in blocks_of(model):
            context_parallel.apply(block.attention)
        logger.info(f"Context parallelism: keys of {parallel_dims.cp} ranks are gathered, cut by {balancer}")
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
        settings = getattr(job_config, "whorl", None)
        compile_blocks(model, job_config.compile.backend, no_codegen=getattr(settings, "no_codegen", False))
    _share_data(model, parallel_dims, job_config)
    return model


def check_layout(args: DeepSeekV32Args, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """That a model of these sizes can be shared out in this way."""
    length, tokens = job_config.training.seq_len, parallel_dims.seq_len_divisor
    if length % tokens:
        raise ValueError(
            f"training.seq_len is {length}, expected a multiple of {tokens}: tensor parallelism ({parallel_dims.tp}) "
            f"times two runs for each context-parallel rank ({parallel_dims.cp})"
        )
    heads = args.n_heads
    if heads % parallel_dims.tp:
        raise ValueError(f"{heads} heads cannot be shared out over {parallel_dims.tp} tensor-parallel ranks")
    experts = args.moe_args.num_experts
    if experts % parallel_dims.ep:
        raise ValueError(f"{experts} experts cannot be spread over {parallel_dims.ep} ranks")
    if job_config.parallelism.expert_parallel_comm_backend == "deepep" and (
        not parallel_dims.ep_enabled or parallel_dims.etp_enabled
    ):
        raise ValueError(
            f"DeepEP moves tokens to whole experts on other ranks; expert_parallel_degree is {parallel_dims.ep}, "
            f"expert_tensor_parallel_degree {parallel_dims.etp}, expected above 1 and 1"
        )
    if parallel_dims.dp_replicate_enabled and not parallel_dims.fsdp_enabled:
        raise ValueError(
            f"data_parallel_replicate_degree is {parallel_dims.dp_replicate} without shards: TorchTitan 0.2's DDP "
            "takes the mean of gradients that are already divided by all tokens; set data_parallel_shard_degree above 1"
        )
    quantizing = [name for name in job_config.model.converters if name.startswith(QUANTIZE)]
    if quantizing and parallel_dims.tp_enabled:
        raise ValueError(
            f"the converter {quantizing[0]} does not go with tensor parallelism here (tensor_parallel_degree is "
            f"{parallel_dims.tp}): leave one of them out"
        )


def costly_operators() -> set[Any]:
    """What selective activation checkpointing keeps instead of computing it again."""
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


def _spread_experts(model: DeepSeekV32Model, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    tp_mesh, ep_mesh = parallel_dims.get_optional_mesh("tp"), parallel_dims.get_optional_mesh("ep")
    cuts = ep_mesh is None or parallel_dims.etp_enabled
    overlaps = get_dual_pipe_v_flag(job_config, parallel_dims)
    for block in blocks_of(model):
        if not block.moe_enabled:
            continue
        if tp_mesh is not None:
            (parallelize_sharded_experts if cuts else parallelize_unsharded_experts)(block, tp_mesh)
        if ep_mesh is None:
            parallelize_module(block.moe.experts, tp_mesh, TensorParallel())
            continue
        mesh = parallel_dims.get_mesh(["ep", "etp"]) if cuts else ep_mesh
        style = _dispatch(block.moe, cuts, job_config)
        parallelize_module(block.moe.experts, mesh, DualPipeExpertParallel(style) if overlaps else style)


def _dispatch(moe: Any, cuts: bool, job_config: JobConfig) -> BaseExpertParallel:
    if job_config.parallelism.expert_parallel_comm_backend == "deepep":
        return DeepEPExpertParallel(score_before_experts=moe.score_before_experts)
    return ExpertTensorParallel() if cuts else ExpertParallel()


def _data_mesh(parallel_dims: ParallelDims, name: str) -> DeviceMesh | None:
    names = ["dp_replicate", name] if parallel_dims.dp_replicate_enabled else [name]
    return parallel_dims.get_optional_mesh(names)


def _share_data(model: DeepSeekV32Model, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """FSDP2 over data- and context-parallel ranks."""
    mesh = _data_mesh(parallel_dims, "fsdp")
    if mesh is None:
        return
    expert_mesh = _data_mesh(parallel_dims, "efsdp") if parallel_dims.ep_enabled else None
    shard(model, Sharding.from_config(job_config, mesh, expert_mesh))
    logger.info(f"FSDP2 over {mesh.size()} ranks, the next block's parameters prefetched in both directions")
