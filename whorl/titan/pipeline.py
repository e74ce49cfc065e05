"""Pipeline parallelism: TorchTitan's own, with a loss whose gradient is a mean over tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineSchedule
from torchtitan.components.loss import LossFunction
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.moe import MoE
from torchtitan.protocols.train_spec import BaseModelArgs, ParallelizeFunction

from whorl.device import HOST


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, by: Tensor | float) -> Tensor:
        ctx.by = by
        return loss.clone()  # no view: a pipeline detaches it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.by, None


class PipelineLoss:
    """The sum over a micro-batch's tokens, as TorchTitan's pipeline wants it; its gradient is that of the mean.

    TorchTitan 0.2 divides the sums by the step's number of tokens after backward, when it reports them, so that
    gradients come out larger by that number. `num_tokens` is the whole step's, over ranks and micro-batches: all labels
    of the global batch, or what a trainer that has counted them sets before each step.
    """

    def __init__(self, loss: LossFunction, num_tokens: Tensor | float) -> None:
        self.loss, self.num_tokens = loss, num_tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return _DivideGradient.apply(self.loss(*args, **kwargs), self.num_tokens)


def labels_in_step(job_config: JobConfig, parallel_dims: ParallelDims) -> int:
    training = job_config.training
    replicas = parallel_dims.dp_replicate * parallel_dims.dp_shard
    batch = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * replicas
    return int(batch * training.seq_len)


def pipeline_deepseek_v32(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
    model_args: BaseModelArgs,
    parallelize_fn: ParallelizeFunction,
    loss_fn: LossFunction,
) -> tuple[_PipelineSchedule, list[nn.Module], bool, bool]:
    parallelism = job_config.parallelism
    if device.type == HOST and parallelism.pipeline_parallel_schedule.lower() == "dualpipev":
        parallelism.pipeline_parallel_expert_parallel_overlap = False  # needs an accelerator's streams
    loss = PipelineLoss(loss_fn, labels_in_step(job_config, parallel_dims))
    built = pipeline_llm(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss)
    if splits_backward(built[0]):
        _check_split(job_config)
    for part in built[1]:
        _forget_first_counts(part)
    return built


def splits_backward(schedule: _PipelineSchedule) -> bool:
    """Whether it takes gradients of inputs and of parameters apart, as zero bubble and DualPipeV do."""
    orders = getattr(schedule, "pipeline_order", {}).values()
    kinds = {action.computation_type for order in orders for action in order if action is not None}
    return _ComputationType.BACKWARD_WEIGHT in kinds


def _check_split(job_config: JobConfig) -> None:
    """torch runs a stage's backward once for its inputs, then from each product on for its parameters."""
    name = job_config.parallelism.pipeline_parallel_schedule
    mode, compiles = job_config.activation_checkpoint.mode, job_config.compile.enable
    if mode != "none":
        raise ValueError(
            f"activation_checkpoint.mode is {mode!r} and the pipeline schedule, {name}, splits backward: each part of "
            "it would compute the layer again, and experts would be counted as often. "
            "Set the mode to none, or take 1F1B or Interleaved1F1B"
        )
    if compiles and "model" in job_config.compile.components:
        raise ValueError(
            f"compile.enable is set and the pipeline schedule, {name}, splits backward, for which torch needs a graph "
            "twice: a compiled one is gone after its first use. Compile the loss alone (compile.components), or take "
            "1F1B or Interleaved1F1B"
        )
    if job_config.parallelism.fsdp_reshard_after_forward == "always":
        raise ValueError(
            f"parallelism.fsdp_reshard_after_forward is 'always' and the pipeline schedule, {name}, splits backward: "
            "torch looks for the parameters of a stage when they are given back, and leaves out their gradients. Set "
            "it to default or never, or take 1F1B or Interleaved1F1B"
        )


def _forget_first_counts(part: nn.Module) -> None:
    """A stage finds out its shapes by a first run on whatever, whose choice of experts is not to move their biases."""

    def forget(*_: Any) -> None:
        handle.remove()
        for moe in (m for m in part.modules() if isinstance(m, MoE)):
            moe.tokens_per_expert.zero_()

    handle = part.register_forward_hook(forget)


def set_num_tokens(schedule: _PipelineSchedule, num_tokens: Tensor | float) -> None:
    """For a trainer that has counted the labels of a step: those that are ignored do not weigh."""
    loss = schedule._loss_fn
    if isinstance(loss, PipelineLoss):  # other models bring their own
        loss.num_tokens = num_tokens
