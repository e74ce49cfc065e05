"""Backward of pipeline stages that FSDP2 shards, as one pass or split into input and weight gradients.

Split backward: when either half begins, torch takes the parameters of the stage and looks for them in the graph of the
forward, which contains the gathered parameters. If FSDP2 has resharded them since then, torch gets the shards, which
are not in the graph. It treats them as unused and silently skips their gradients. We gather the parameters first.

Resharding: torch's pipelines keep gathered parameters and unsharded gradients until the end of the step. When
parameters are to be resharded after forward, which saves memory, we reduce gradients with every micro-batch.
"""

from typing import Any, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineSchedule
from torchtitan.config import JobConfig


class Stage(Protocol):
    """The attributes of torch's pipeline stage that are used here."""

    submod: nn.Module  # the model part
    backward_maybe_with_nosync: Any  # (kind, tensors, is this the last backward of the step) -> gradients

    def perform_reduce_grad(self, grad_scale_factor: int) -> None: ...


def splits_backward(schedule: _PipelineSchedule) -> bool:
    """Return whether a schedule computes input and weight gradients separately, as zero bubble and DualPipeV do."""
    orders = getattr(schedule, "pipeline_order", {}).values()
    kinds = {action.computation_type for order in orders for action in order if action is not None}
    return _ComputationType.BACKWARD_WEIGHT in kinds


def check_split(job_config: JobConfig) -> None:
    """Raise ValueError when a job with a split backward uses activation checkpointing or compiles the model.

    torch runs a split backward of a stage once for its inputs, and then again from each matmul for its parameters.
    """
    name = job_config.parallelism.pipeline_parallel_schedule
    mode, compiles = job_config.activation_checkpoint.mode, job_config.compile.enable
    if mode != "none":
        raise ValueError(
            f"activation_checkpoint.mode is {mode!r} and the pipeline schedule, {name}, splits backward: each half "
            "would recompute the layer and count the tokens of the experts again. "
            "Set the mode to none, or use 1F1B or Interleaved1F1B"
        )
    if compiles and "model" in job_config.compile.components:
        raise ValueError(
            f"compile.enable is set and the pipeline schedule, {name}, splits backward, for which torch needs a graph "
            "twice: a compiled graph is freed after its first use. Compile only the loss (compile.components), or use "
            "1F1B or Interleaved1F1B"
        )


class ShardedBackward:
    """Replaces the method `backward_maybe_with_nosync` of a stage; called with the same arguments.

    kind: "full", or one half of a split backward, "input" or "weight". reshards: reduce gradients and free the gathered
    parameters in each call, and not only at the end of the step.
    """

    def __init__(self, stage: Stage, *, reshards: bool) -> None:
        self.stage, self.backward = stage, stage.backward_maybe_with_nosync
        self.units = [m for m in stage.submod.modules() if isinstance(m, FSDPModule)]
        self.reshards = reshards

    def __call__(self, kind: str, tensors: dict[str, Any], last_backward: bool = False) -> Any:
        if kind == "full":
            return self._unit_by_unit(tensors) if self.reshards else self.backward(kind, tensors, last_backward)
        self._gather()
        result = self.backward(kind, tensors, last_backward)
        if kind == "weight" and self.reshards:
            self.stage.perform_reduce_grad(1)
        elif kind == "weight":
            self._accumulate()
        elif self.reshards:
            for unit in self.units:
                unit.reshard()
        return result

    def _unit_by_unit(self, tensors: dict[str, Any]) -> Any:
        """Run backward as torch does, with the hooks of FSDP2 that gather, reduce and free each unit in turn."""
        root = self.units[0]
        root.set_is_last_backward(False)  # FSDP2 does not wait for the reductions: the schedule does, after the step
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)
        return stage_backward(tensors["stage_output"], tensors["output_grads"], tensors["input_values"]), None

    def _gather(self) -> None:
        """Gather the parameters of all units and wait for them."""
        handles = [unit.unshard(async_op=True) for unit in self.units]
        for handle in handles:
            assert isinstance(handle, UnshardHandle)
            handle.wait()

    def _accumulate(self) -> None:
        """Add the weight gradients to FSDP2's sums over micro-batches, in the dtype that gradients are reduced in.

        FSDP2 does this when backward leaves a unit, but that happens in the input half, before the weight gradients
        exist. Without this call, torch would add those of consecutive micro-batches in the dtype of the parameters.
        """
        for unit in self.units:
            group = unit._get_fsdp_state()._fsdp_param_group
            for parameter in [] if group is None else group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def shard_backward(schedule: Any, job_config: JobConfig) -> None:
    """Install ShardedBackward in the FSDP2 stages of a schedule if backward is split or parameters are resharded."""
    reshards = job_config.parallelism.fsdp_reshard_after_forward == "always"
    if not reshards and not splits_backward(schedule):
        return
    for stage in schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]:
        if isinstance(stage.submod, FSDPModule):
            stage.backward_maybe_with_nosync = ShardedBackward(stage, reshards=reshards)
