"""Build TorchTitan's pipeline, with gradients of the mean loss over tokens and with FSDP2 in every schedule."""

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
    """Returns the loss unchanged and divides its gradient."""

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
    that gradients would be too large by that factor. loss: returns the sum over tokens. num_tokens: the labels of the
    whole step, over ranks and micro-batches; a trainer that counts them sets it before each step (`set_num_tokens`),
    otherwise it is the size of the global batch.
    """

    def __init__(self, loss: LossFunction, num_tokens: Tensor | float) -> None:
        self.loss, self.num_tokens = loss, num_tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return _DivideGradient.apply(self.loss(*args, **kwargs), self.num_tokens)


def labels_in_step(job_config: JobConfig, parallel_dims: ParallelDims) -> int:
    """Return the number of labels of one optimizer step, over all ranks, ignored labels included."""
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
    schedule, parts, has_first_stage, has_last_stage = pipeline_llm(
        model, parallel_dims, job_config, device, model_args, parallelize_fn, loss
    )
    if splits_backward(schedule):
        check_split(job_config)
    shard_backward(schedule, job_config)
    for part in parts:
        _reset_first_counts(part)
    return schedule, parts, has_first_stage, has_last_stage


def _reset_first_counts(part: nn.Module) -> None:
    """Reset the token counts of the experts after the first run of a stage, so that it does not change their biases.

    torch runs a stage once on arbitrary values to infer its shapes. That run has a backward, in which activation
    checkpointing routes and counts the tokens again. The counts are therefore reset when the second run begins.
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
    """Set the number of labels of the next step, as counted by a trainer: over all ranks, without ignored labels."""
    loss = schedule._loss_fn
    if isinstance(loss, PipelineLoss):  # other models have other losses
        loss.num_tokens = num_tokens
