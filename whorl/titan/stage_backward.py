"""The backward of pipeline stages that FSDP2 shards: whole, or with gradients of inputs and of parameters apart.

Of parts: torch asks a stage for its parameters as either begins and looks for them in the graph of the forward, which
has those that FSDP2 had gathered. Where it has given them back since, what a stage answers are the shards, which no
graph has seen: torch takes them for unused, and their gradients are left out without a word.

Of giving back: torch's pipelines keep what backward has gathered, and gradients unsharded, to the end of the step.
Where parameters are to be given back after forward, which is to save memory, we reduce with every micro-batch.
"""

from typing import Any, Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineSchedule
from torchtitan.config import JobConfig


class Stage(Protocol):
    """What we use of torch's."""

    submod: nn.Module
    backward_maybe_with_nosync: Any

    def perform_reduce_grad(self, grad_scale_factor: int) -> None: ...


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


class ShardedBackward:
    """In place of a stage's `backward_maybe_with_nosync`, where torch has full, input and weight gradients computed.

    gives_back: reduce gradients and free parameters in each of them.
    """

    def __init__(self, stage: Stage, *, gives_back: bool) -> None:
        self.stage, self.backward = stage, stage.backward_maybe_with_nosync
        self.units = [m for m in stage.submod.modules() if isinstance(m, FSDPModule)]
        self.gives_back = gives_back

    def __call__(self, kind: str, given: dict[str, Any], last_backward: bool = False) -> Any:
        if kind == "full":
            return self._unit_by_unit(given) if self.gives_back else self.backward(kind, given, last_backward)
        self._gather()
        answer = self.backward(kind, given, last_backward)
        if kind == "weight" and self.gives_back:
            self.stage.perform_reduce_grad(1)
        elif kind == "weight":
            self._add_up()
        elif self.gives_back:
            for unit in self.units:
                unit.reshard()
        return answer

    def _unit_by_unit(self, given: dict[str, Any]) -> Any:
        """As torch does it, but for FSDP2's hooks, which gather, reduce and free a unit as backward passes it."""
        root = self.units[0]
        root.set_is_last_backward(False)  # there is nothing to wait for: the schedule does at the end
        root.set_reshard_after_backward(True)
        root.set_requires_gradient_sync(True)
        return stage_backward(given["stage_output"], given["output_grads"], given["input_values"]), None

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


def shard_backward(schedule: Any, job_config: JobConfig) -> None:
    """For each stage that FSDP2 shards, where torch's backward alone does not do: of parts, or of giving back."""
    gives_back = job_config.parallelism.fsdp_reshard_after_forward == "always"
    if not gives_back and not splits_backward(schedule):
        return
    for stage in schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]:
        if isinstance(stage.submod, FSDPModule):
            stage.backward_maybe_with_nosync = ShardedBackward(stage, gives_back=gives_back)
