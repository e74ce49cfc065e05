"""Check before every update that loss and gradients are finite; if not, stop and name the layer.

The check reads one number from the device in each step. TorchTitan clips gradients by their norm over all ranks, so
that a NaN anywhere makes every gradient NaN on every rank. It is therefore enough to check one gradient, that with the
fewest elements, and all ranks agree without communication. The weights are still those of the previous step, so that
the step can be run again with hooks on every module to find the layer.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchtitan.components.optimizer import OptimizersContainer

from whorl.titan.swap_memory import local
from whorl.titan.swap_optimizer import SwapAdamW

# Parts of a module's name that activation checkpointing, torch.compile and FSDP insert.
WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


TRAINER = "WhorlTrainer (`whorl train`)"


class NotFinite(RuntimeError):
    """A loss, gradient, weight or moment is NaN or infinite."""


def is_finite(tensors: Iterable[object]) -> bool:
    """Return whether the local shards of all floating-point tensors among these objects are finite."""
    shards = [local(x) for x in tensors if isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta]
    flags = [torch.isfinite(x).all() for x in shards if x.numel()]
    return not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())


def named_modules(parts: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module for all modules of the model parts, with the names that checkpoints use."""
    for part in parts:
        for name, module in part.named_modules():
            yield WRAPPERS.sub("", f"{name}.")[:-1] or "the model", module


def bad_weights(parts: list[nn.Module]) -> list[str]:
    """Return the names of the modules with a weight or a buffer that is not finite."""
    return [
        name
        for name, module in named_modules(parts)
        if not is_finite([*module.parameters(recurse=False), *module.buffers(recurse=False)])
    ]


def bad_moments(optimizers: OptimizersContainer) -> list[str]:
    """Return the names of the parameters whose optimizer state is not finite, on this rank.

    Swapped moments are checked in host memory, in the format in which they are stored.
    """
    parts = named_modules(optimizers.model_parts)
    names = {p: f"{name}.{key}" for name, m in parts for key, p in m.named_parameters(recurse=False)}
    tensors: list[tuple[str, Tensor]] = []
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            values = optimizer.host_parts(parameter) if isinstance(optimizer, SwapAdamW) else state.values()
            tensors += [(names.get(parameter, "a parameter"), local(x)) for x in values if isinstance(x, Tensor)]
    tensors = [(name, x) for name, x in tensors if x.is_floating_point() and x.numel()]
    if not tensors:
        return []
    # The minimum and the maximum are NaN where a NaN exists, and computing them needs no memory of the state's size.
    flags = [torch.isfinite(torch.stack(torch.aminmax(x))).all() for _, x in tensors]
    are_good = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return sorted({name for (name, _), is_good in zip(tensors, are_good, strict=True) if not is_good})


@dataclass(slots=True)
class Trace:
    """What the hooks recorded in one run of a step."""

    order: list[str] = field(default_factory=list)  # names of the modules, in the order in which they finished
    first: str | None = None  # a sentence about the first output that is not finite

    def record(self, name: str, inputs: Any, output: Any) -> None:
        if name not in self.order:
            self.order.append(name)
        if self.first is None and not is_finite(tree_leaves(output)):
            origin = "from finite inputs" if is_finite(tree_leaves(inputs)) else self._before()
            self.first = f"the output of {name} is the first that is not finite, {origin}"

    def _before(self) -> str:
        previous = self.order[-2] if len(self.order) > 1 else "nothing"
        return f"and neither is its input, which is computed between modules, after {previous}"


@contextmanager
def traced(parts: list[nn.Module]) -> Iterator[Trace]:
    """Give a trace that records every module that runs in this context.

    Compiled modules run in eager mode, because hooks inside a compiled module are not called.
    """
    trace, handles = Trace(), []
    for name, module in named_modules(parts):

        def record_output(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            trace.record(name, (args, kwargs), output)

        handles.append(module.register_forward_hook(record_output, with_kwargs=True))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield trace
    finally:
        for handle in handles:
            handle.remove()


def examine(parts: list[nn.Module], replay: Callable[[], None]) -> str | None:
    """Return a sentence about where the first value that is not finite appears on this rank, or None if all are finite.

    replay: runs the step again. Gradients are cleared first.
    """
    weights = bad_weights(parts)
    if weights:
        return f"weights are not finite before the step: {', '.join(weights[:4])}{', ...' if weights[4:] else ''}"
    for part in parts:
        part.zero_grad(set_to_none=True)
    with traced(parts) as trace:
        replay()
    return trace.first or _first_gradient(parts, trace.order)


def _first_gradient(parts: list[nn.Module], order: list[str]) -> str | None:
    """Return a sentence about the first module in backward order with a gradient that is not finite, or None.

    order: names of the modules in the order of forward. All modules that come later in backward get the NaN from it.
    """
    finite = {
        name: is_finite([p.grad for p in module.parameters(recurse=False)])
        for name, module in named_modules(parts)
        if any(p.grad is not None for p in module.parameters(recurse=False))
    }
    names = [name for name in reversed(order) if name in finite]
    bad = next((name for name in names if not finite[name]), None)
    if bad is None:
        return None
    after = names[names.index(bad) - 1] if names.index(bad) else "the loss"
    return (
        f"all outputs are finite, but not all gradients: in backward order the gradient of {bad} is the first that is "
        f"not, after {after}"
    )


class NaNWatch:
    """Checks before each update that the losses and the clipped gradients are finite.

    A trainer sets the public attributes. Without one, as in TorchTitan's own trainer, only gradients are checked, and
    only the forward can be run again.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts
        self.losses: list[Tensor] = []  # of the micro-batches of this step
        self.step: int | None = None
        self.replay: Callable[[], None] | None = None  # runs the step again
        self.replays_backward = False  # whether `replay` runs backward as well
        self.last_good: Callable[[], str] | None = None  # returns a sentence about the last good checkpoint
        self._batches: list[Callable[[], None]] = []  # each runs the forward of a micro-batch of this step again
        self._probe: Tensor | None = None  # the parameter whose gradient is checked

    @classmethod
    def attach(cls, optimizers: OptimizersContainer, *, can_replay: bool) -> "NaNWatch":
        """Create a watch that checks before every step of the optimizers, as their attribute `watch`, and return it.

        can_replay: the model can be run again with recorded inputs, which is not possible with pipeline stages.
        """
        watch = cls(optimizers.model_parts)
        handle = optimizers.register_step_pre_hook(lambda *_: watch.check())
        # The check runs before the hook that updates the expert biases, because a repeated step must route as before.
        optimizers._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        optimizers.watch = watch  # type: ignore[attr-defined]
        if can_replay:
            optimizers.model_parts[0].register_forward_pre_hook(watch._record_inputs, with_kwargs=True)
            watch.replay = watch._replay_forward
        return watch

    def _record_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Remember the inputs of a forward, which are token ids and positions and therefore small."""
        if not torch.is_grad_enabled():  # validation
            return
        device_type = next((x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), "cpu")
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

        def forward() -> None:
            with torch.no_grad(), torch.autocast(device_type, dtype, enabled=enabled):
                model(*args, **kwargs)

        self._batches.append(forward)

    def _replay_forward(self) -> None:
        for forward in list(self._batches):
            forward()

    def _smallest_gradient(self) -> Tensor | None:
        """Return the parameter whose gradient has the fewest elements on this rank, but not none; None without any."""
        parameters = [
            p for part in self.parts for p in part.parameters() if p.grad is not None and local(p.grad).numel()
        ]
        return min(parameters, key=lambda p: local(cast(Tensor, p.grad)).numel(), default=None)

    def check(self) -> None:
        """Raise NotFinite, with the layer where possible, when a loss or a gradient of this step is not finite."""
        if self._probe is None or self._probe.grad is None:
            self._probe = self._smallest_gradient()
        gradient = None if self._probe is None else self._probe.grad
        if is_finite([*self.losses, gradient]):
            self.losses, self._batches = [], []
            return
        prefix = "" if self.step is None else f"step {self.step}: "
        quantity = "loss" if not is_finite(self.losses) else "gradient"
        cause = (
            self._find_cause()
            if not is_finite([gradient])
            else "All gradients are finite, so that it comes from the loss function"
        )
        advice = "" if self.last_good is None else f"; {self.last_good()}"
        raise NotFinite(f"{prefix}the {quantity} is not finite. {cause}. Nothing was updated in this step{advice}")

    def _find_cause(self) -> str:
        """Run the step again on all ranks and return a text about where it becomes infinite or NaN on each."""
        if self.replay is None:
            return f"The layer is unknown: with pipeline stages only {TRAINER} can run the step again"
        self.losses = []
        local_report = examine(self.parts, self.replay)
        reports: list[str | None] = [local_report]
        if dist.is_initialized() and dist.get_world_size() > 1:
            reports = [None] * dist.get_world_size()
            dist.all_gather_object(reports, local_report)
        several = len(reports) > 1
        lines = [f"Rank {rank}: {report}" if several else report for rank, report in enumerate(reports) if report]
        if lines:
            return "; ".join(lines[:4])
        if not self.replays_backward:
            return f"All outputs are finite, so that it appears in backward, where only {TRAINER} can find the layer"
        return "When run again, the step is finite: it is not deterministic"
