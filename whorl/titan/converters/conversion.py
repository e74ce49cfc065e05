"""What every converter does: find its modules, compare a small one of each kind with float64, replace, and say so."""

import copy
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from whorl.judge import Verdict, judge
from whorl.ops import OPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A small module like one of the model's, and what to call it with."""

    module: nn.Module
    inputs: tuple[Tensor, ...]  # float32; rounded to the dtype of training, and differentiated
    constants: tuple[Any, ...] = ()  # after the inputs: tables and choices, as they are
    exact: Callable[..., Any] | None = None  # the answer in float64, for a module that rounds on the way


class Converter(ABC):
    """TorchTitan's ModelConverter: a class of its registry."""

    name: str
    operators: tuple[str, ...]  # that the new modules call

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        self.job_config, self.parallel_dims = job_config, parallel_dims

    @abstractmethod
    def is_candidate(self, module: nn.Module) -> bool:
        """Whether it is one of those this converter is about."""

    @abstractmethod
    def replace(self, module: nn.Module) -> None:
        """Make it ours, in place: parameters, buffers, hooks and names stay."""

    @abstractmethod
    def sample(self, module: nn.Module, generator: torch.Generator) -> Probe:
        """A small one of the same kind."""

    def refusal(self, module: nn.Module) -> str | None:
        """None, or the reason a candidate stays as it is."""
        return None

    def kind(self, module: nn.Module) -> Hashable:
        """Modules of one kind are compared once."""
        return type(module).__name__

    def convert(self, model: nn.Module) -> None:
        kinds: dict[Hashable, nn.Module] = {}
        refused: dict[str, str] = {}
        chosen = []
        for name, module in model.named_modules():
            if not self.is_candidate(module):
                continue
            if reason := self.refusal(module):
                refused[name] = reason
                continue
            chosen.append(module)
            kinds.setdefault(self.kind(module), module)
        if not chosen:
            raise ValueError(self._nothing(model, refused))
        worst = max((self._compare(module) for module in kinds.values()), default=0.0) if self._is_checked() else None
        for module in chosen:
            self.replace(module)
        self._say(len(chosen), refused, worst)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing follows a step."""
        del model

    def _is_checked(self) -> bool:
        return bool(getattr(getattr(self.job_config, "whorl", None), "check_converters", True))

    def _compare(self, module: nn.Module) -> float:
        """How many times TorchTitan's own error ours is; over twice is a ValueError."""
        device = torch.device(utils.device_type)
        dtype = TORCH_DTYPE_MAP[self.job_config.training.mixed_precision_param]
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            sample = self.sample(module, torch.Generator().manual_seed(0))
        verdict = compare(sample, self.replace, device, dtype)
        if not verdict.passed:
            raise ValueError(
                f"{self.name}: on a small {type(module).__name__} in {dtype}: {verdict.problem}. This would change "
                "what is trained; leave the converter out and report it, or set whorl.check_converters to false"
            )
        return verdict.ratio

    def _nothing(self, model: nn.Module, refused: dict[str, str]) -> str:
        found = sorted({type(module).__name__ for module in model.modules()})
        near = f" It passed over {_named(refused)}." if refused else ""
        return (
            f"{self.name} matched nothing in {type(model).__name__}, which is made of {', '.join(found)}.{near} "
            "Leave it out of model.converters"
        )

    def _say(self, count: int, refused: dict[str, str], worst: float | None) -> None:
        backends = {op: _backend(op, utils.device_type) for op in self.operators}
        by = ", ".join(f"{op} by {backend}" for op, backend in backends.items())
        error = "not compared" if worst is None else f"{worst:.2f} of the error before"
        logger.info(f"{self.name}: {count} modules, {by}; {error}")
        if refused:
            logger.warning(f"{self.name}: {len(refused)} modules stay as they are: {_named(refused)}")


def _named(refused: dict[str, str]) -> str:
    """The first of those with each reason."""
    first: dict[str, str] = {}
    for name, reason in refused.items():
        first.setdefault(reason, name)
    return "; ".join(f"{name} ({reason})" for reason, name in first.items())


def _backend(op: str, device: str) -> str:
    able = [name for name, reason in OPS[op].availability(device).items() if reason is None]
    return next((name for name in able if name != "torch"), "torch")


# ---- comparing


def compare(sample: Probe, replace: Callable[[nn.Module], None], device: torch.device, dtype: torch.dtype) -> Verdict:
    """Outputs and gradients of a module before and after, against float64."""
    theirs = _typed(sample.module, device, dtype)
    ours = copy.deepcopy(theirs)
    replace(ours)
    gold = _typed(theirs, device, torch.float64)
    call = sample.exact or (lambda module, *values: module(*values))
    inputs = [x.to(device, dtype) for x in sample.inputs]
    constants = [_moved(x, device) for x in sample.constants]
    wide = [x.double() for x in inputs], [_widened(x) for x in constants]
    return judge(
        _answers(ours, ours, inputs, constants),
        _answers(theirs, theirs, inputs, constants),
        _answers(lambda *values: call(gold, *values), gold, *wide),
    )


def _typed(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A copy; in float64 what is floating point there, buffers too."""
    return copy.deepcopy(module).to(device=device, dtype=dtype).requires_grad_(True)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


@torch.enable_grad()
def _answers(call: Callable[..., Any], module: nn.Module, inputs: list[Tensor], constants: list[Any]) -> list[Tensor]:
    """Outputs, then gradients of inputs and parameters; what flows back is the same for every dtype."""
    leaves = [x.detach().requires_grad_(True) for x in inputs]
    found = call(*leaves, *constants)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    generator = torch.Generator().manual_seed(1)
    flows = [torch.randn(out.shape, generator=generator).bfloat16().to(out) for out in outputs]
    wanted = [*leaves, *module.parameters()]
    grads = torch.autograd.grad(outputs, wanted, flows, allow_unused=True)
    return [*(out.detach() for out in outputs), *(grad for grad in grads if grad is not None)]


# ---- replacing


def become(module: nn.Module, forward: Callable[..., Any]) -> None:
    """The module's class is from now on its own with another `forward`: a class is made once for each pair."""
    module.__class__ = _derived(type(module), forward)


_classes: dict[tuple[type, Callable[..., Any]], type] = {}


def _derived(cls: type, forward: Callable[..., Any]) -> type:
    found = _classes.get((cls, forward))
    if found is None:
        found = types.new_class(f"Whorl{cls.__name__}", (cls,), {}, lambda body: body.update(forward=forward))
        found.__module__ = forward.__module__
        _classes[cls, forward] = found
    return found
