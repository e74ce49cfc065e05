"""A look before every update: are loss and gradients finite? If not, stop there and name the layer.

While all is well it costs one number read from the device for each step. TorchTitan clips gradients by their norm over
all ranks, so that one NaN anywhere makes every gradient NaN on every rank: the smallest one stands for all, and the
ranks agree without a word. Weights are still those of the step before, so the step is run again with hooks on every
module.
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

WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


TRAINER = "WhorlTrainer (`whorl train`)"


class NotFinite(RuntimeError):
    """Training met a NaN or an infinity."""


def is_finite(tensors: Iterable[object]) -> bool:
    """Of the floating-point tensors among them, this rank's part."""
    found = [local(x) for x in tensors if isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta]
    flags = [torch.isfinite(x).all() for x in found if x.numel()]
    return not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all())


def named_modules(parts: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """By the names that checkpoints use."""
    for part in parts:
        for name, module in part.named_modules():
            yield WRAPPERS.sub("", f"{name}.")[:-1] or "the model", module


def bad_weights(parts: list[nn.Module]) -> list[str]:
    """Names of the modules that have a weight or a buffer that is not finite."""
    return [
        name
        for name, module in named_modules(parts)
        if not is_finite([*module.parameters(recurse=False), *module.buffers(recurse=False)])
    ]


def bad_moments(optimizers: OptimizersContainer) -> list[str]:
    """Names of the parameters whose optimizer state is not finite; each is read once, on the device it is on."""
    names = {p: f"{name}.{key}" for name, m in named_modules(optimizers.model_parts) for key, p in _own(m)}
    found: list[tuple[str, Tensor]] = []
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            kept = optimizer.kept(parameter) if isinstance(optimizer, SwapAdamW) else state.values()
            found += [(names.get(parameter, "a parameter"), local(x)) for x in kept if isinstance(x, Tensor)]
    found = [(name, x) for name, x in found if x.is_floating_point() and x.numel()]
    if not found:
        return []
    # The least and the greatest: NaN is both where there is one, and nothing as large as the state is made.
    flags = [torch.isfinite(torch.stack(torch.aminmax(x))).all() for _, x in found]
    are_good = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return sorted({name for (name, _), is_good in zip(found, are_good, strict=True) if not is_good})


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False)


@dataclass(slots=True)
class Trace:
    """What hooks saw in one run of a step; names in the order in which modules finished."""

    order: list[str] = field(default_factory=list)
    first: str | None = None

    def see(self, name: str, inputs: Any, output: Any) -> None:
        if name not in self.order:
            self.order.append(name)
        if self.first is None and not is_finite(tree_leaves(output)):
            came = "from finite inputs" if is_finite(tree_leaves(inputs)) else self._before()
            self.first = f"the output of {name} is the first that is not finite, {came}"

    def _before(self) -> str:
        done = self.order[-2] if len(self.order) > 1 else "nothing"
        return f"and so is its input: what is computed between modules, after {done}"


@contextmanager
def traced(parts: list[nn.Module]) -> Iterator[Trace]:
    """Hooks on every module; compiled ones run uncompiled, as their hooks would not be called."""
    trace, handles = Trace(), []
    for name, module in named_modules(parts):

        def see(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            trace.see(name, (args, kwargs), output)

        handles.append(module.register_forward_hook(see, with_kwargs=True))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield trace
    finally:
        for handle in handles:
            handle.remove()


def examine(parts: list[nn.Module], replay: Callable[[], None]) -> str | None:
    """Run a step again and say where it goes wrong on this rank; None: not here."""
    weights = bad_weights(parts)
    if weights:
        return f"weights are not finite before the step, of {', '.join(weights[:4])}{', ...' if weights[4:] else ''}"
    for part in parts:
        part.zero_grad(set_to_none=True)
    with traced(parts) as trace:
        replay()
    return trace.first or _first_gradient(parts, trace.order)


def _first_gradient(parts: list[nn.Module], order: list[str]) -> str | None:
    """Backward goes from the last module to the first, and what follows a NaN has it too."""
    found = {
        name: is_finite([p.grad for p in module.parameters(recurse=False)])
        for name, module in named_modules(parts)
        if any(p.grad is not None for p in module.parameters(recurse=False))
    }
    names = [name for name in reversed(order) if name in found]
    bad = next((name for name in names if not found[name]), None)
    if bad is None:
        return None
    after = names[names.index(bad) - 1] if names.index(bad) else "the loss"
    return (
        f"all outputs are finite, but not the gradients: in backward order that of {bad} is the first that is not, "
        f"after {after}"
    )


class Watch:
    """Looks at the losses it was told of and at the clipped gradients; `replay` runs the step again."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts
        self.losses: list[Tensor] = []
        self.step: int | None = None
        self.replay: Callable[[], None] | None = None
        self.replays_backward = False
        self.last_good: Callable[[], str] | None = None  # says which checkpoint to go back to
        self._batches: list[Callable[[], None]] = []
        self._probe: Tensor | None = None

    @classmethod
    def attach(cls, optimizers: OptimizersContainer, *, can_replay: bool) -> "Watch":
        """can_replay: the one part can be run by itself, with what it was given."""
        watch = cls(optimizers.model_parts)
        handle = optimizers.register_step_pre_hook(lambda *_: watch.look())
        # Before the hook that moves the experts' biases: a step that is run again must route as it did.
        optimizers._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        optimizers.watch = watch  # type: ignore[attr-defined]
        if can_replay:
            optimizers.model_parts[0].register_forward_pre_hook(watch._keep, with_kwargs=True)
            watch.replay = watch._run_again
        return watch

    def _keep(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Token ids and positions, which are small."""
        if not torch.is_grad_enabled():  # validation
            return
        kind = next((x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), "cpu")
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def again() -> None:
            with torch.no_grad(), torch.autocast(kind, dtype, enabled=enabled):
                model(*args, **kwargs)

        self._batches.append(again)

    def _run_again(self) -> None:
        for again in list(self._batches):
            again()

    def _least(self) -> Tensor | None:
        """The parameter whose gradient is the smallest of this rank that is not empty."""
        found = [p for part in self.parts for p in part.parameters() if p.grad is not None and local(p.grad).numel()]
        return min(found, key=lambda p: local(cast(Tensor, p.grad)).numel(), default=None)

    def look(self) -> None:
        if self._probe is None or self._probe.grad is None:
            self._probe = self._least()
        least = None if self._probe is None else self._probe.grad
        if is_finite([*self.losses, least]):
            self.losses, self._batches = [], []
            return
        where = "" if self.step is None else f"step {self.step}: "
        what = "loss" if not is_finite(self.losses) else "gradient"
        cause = self._cause() if not is_finite([least]) else "the loss function made it: all gradients are finite"
        back = "" if self.last_good is None else f"; {self.last_good()}"
        raise NotFinite(f"{where}the {what} is not finite. {cause}. Nothing was updated in this step{back}")

    def _cause(self) -> str:
        if self.replay is None:
            return f"Its layer is not known: with pipeline stages {TRAINER} runs the step again"
        self.losses = []
        found = examine(self.parts, self.replay)
        reports: list[str | None] = [found]
        if dist.is_initialized() and dist.get_world_size() > 1:
            reports = [None] * dist.get_world_size()
            dist.all_gather_object(reports, found)
        several = len(reports) > 1
        told = [f"Rank {rank}: {report}" if several else report for rank, report in enumerate(reports) if report]
        if told:
            return "; ".join(told[:4])
        if not self.replays_backward:
            return f"All outputs are finite, so it is made in backward, where {TRAINER} finds the layer"
        return "Run again, the step is finite: it does not compute the same twice"
