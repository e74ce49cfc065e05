"""Pipeline schedules that take gradients of inputs and of parameters apart, on stages that FSDP2 shards.

torch asks a stage for its parameters as either part begins and looks for them in the graph of the forward, which has
those that FSDP2 had gathered. Where it has given them back since, what a stage answers are the shards, which no graph
has seen: torch takes them for unused, and their gradients are left out without a word.
"""

from typing import Any, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineSchedule
from torchtitan.config import JobConfig


class Stage(Protocol):
    """What we use of torch's."""

    submod: nn.Module
    backward_maybe_with_nosync: Any


def splits_backward(schedule: _PipelineSchedule) -> bool:
    """Whether it takes gradients of inputs and of parameters apart, as zero bubble and DualPipeV do."""
    orders = getattr(schedule, "pipeline_order", {}).values()
    kinds = {action.computation_type for order in orders for action in order if action is not None}
    return _ComputationType.BACKWARD_WEIGHT in kinds


def check_split(job_config: JobConfig) -> None:
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


class GatheredBackward:
    """In place of a stage's `backward_maybe_with_nosync`, where torch has full, input and weight gradients computed.

    gives_back: also free parameters after each of them, as FSDP2 does after the forward.
    """

    def __init__(self, stage: Stage, *, gives_back: bool) -> None:
        self.backward = stage.backward_maybe_with_nosync
        self.units = [m for m in stage.submod.modules() if isinstance(m, FSDPModule)]
        self.gives_back = gives_back

    def __call__(self, kind: str, *args: Any, **more: Any) -> Any:
        if kind != "full":  # where FSDP2's own hooks gather one unit after another
            self._gather()
        answer = self.backward(kind, *args, **more)
        if kind == "weight":
            self._add_up()
        if self.gives_back:
            for unit in self.units:
                unit.reshard()
        return answer

    def _gather(self) -> None:
        handles = [unit.unshard(async_op=True) for unit in self.units]
        for handle in handles:
            assert isinstance(handle, UnshardHandle)
            handle.wait()

    def _add_up(self) -> None:
        """Into sums of the dtype gradients are reduced in.

        FSDP2 does so when backward leaves a unit, which is in the part for the inputs: torch would add what several
        parts for the parameters give in a row in the dtype of the parameters.
        """
        for unit in self.units:
            group = unit._get_fsdp_state()._fsdp_param_group
            for parameter in [] if group is None else group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def gather_for_split(schedule: Any, job_config: JobConfig) -> None:
    """For each stage of a schedule that splits backward; stages that FSDP2 does not shard have nothing to gather."""
    gives_back = job_config.parallelism.fsdp_reshard_after_forward == "always"
    for stage in schedule._stages:
        if isinstance(stage.submod, FSDPModule):
            stage.backward_maybe_with_nosync = GatheredBackward(stage, gives_back=gives_back)
