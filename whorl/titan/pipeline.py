"""Build TorchTitan's pipeline with a loss whose gradient is that of the mean over tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torchtitan.components.loss import LossFunction
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.moe import MoE
from torchtitan.protocols.train_spec import BaseModelArgs, ParallelizeFunction

from whorl.device import HOST

from .stage_backward import check_split, shard_backward, splits_backward


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, divisor: Tensor | float) -> Tensor:
        ctx.divisor = divisor
        return loss.clone()  # not a view, because a pipeline detaches it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.divisor, None


class PipelineLoss:
    """The sum of the losses of a micro-batch, as TorchTitan's pipeline expects; its gradient is that of the mean.

    TorchTitan 0.2 divides the sums by the number of tokens of the step only after backward, when it reports them, so
    that gradients are too large by that factor. `num_tokens` is the number for the whole step, over ranks and
    micro-batches: all labels of the global batch, or the number that a trainer counts and sets before each step.
    """

    def __init__(self, loss: LossFunction, num_tokens: Tensor | float) -> None:
        self.loss, self.num_tokens = loss, num_tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return _DivideGradient.apply(self.loss(*args, **kwargs), self.num_tokens)


def labels_in_step(job_config: JobConfig, parallel_dims: ParallelDims) -> int:
    """Return the number of labels of one optimizer step, over all ranks."""
    training = job_config.training
    replicas = parallel_dims.dp_replicate * parallel_dims.dp_shard
    batch = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * replicas
    return int(batch * training.seq_len)


def build_pipeline(
    model: nn.Module,
    parallel_dims: ParallelDims,
    job_config: JobConfig,
    device: torch.device,
    model_args: BaseModelArgs,
    parallelize_fn: ParallelizeFunction,
    loss_fn: LossFunction,
) -> tuple[_PipelineSchedule, list[nn.Module], bool, bool]:
    """Return the schedule, the model parts, and whether this rank has the first and the last stage, for `TrainSpec`."""
    parallelism = job_config.parallelism
    if device.type == HOST and parallelism.pipeline_parallel_schedule.lower() == "dualpipev":
        parallelism.pipeline_parallel_expert_parallel_overlap = False  # the overlap needs the streams of an accelerator
    loss = PipelineLoss(loss_fn, labels_in_step(job_config, parallel_dims))
    built = pipeline_llm(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss)
    if splits_backward(built[0]):
        check_split(job_config)
    shard_backward(built[0], job_config)
    for part in built[1]:
        _reset_first_counts(part)
    return built


def _reset_first_counts(part: nn.Module) -> None:
    """Reset the token counts of the experts after the first run of a stage, so that it does not change their biases.

    A stage infers its shapes by a first run on arbitrary values. That run has a backward, in which activation
    checkpointing routes and counts again, so that the counts are reset when the second run begins.
    """
    runs = 0

    def reset(*_: Any) -> None:
        nonlocal runs
        runs += 1
        if runs == 2:
            handle.remove()
            for moe in (m for m in part.modules() if isinstance(m, MoE)):
                moe.tokens_per_expert.zero_()

    handle = part.register_forward_pre_hook(reset)


def set_num_tokens(schedule: _PipelineSchedule, num_tokens: Tensor | float) -> None:
    """Set the number of labels of a step, as counted by a trainer without the ignored ones."""
    loss = schedule._loss_fn
    if isinstance(loss, PipelineLoss):  # other models have other losses
        loss.num_tokens = num_tokens
