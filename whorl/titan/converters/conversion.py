"""The base of all converters: find modules, compare a small sample of each kind with float64, replace, and log.

A converter replaces modules of a model by ones that compute the same by our operators. Before it does, it builds a
small module of each kind, runs it before and after the replacement, and refuses the job if the error against float64
has grown too much; `whorl.judge` has the rule.
"""

import copy
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from whorl.judge import Verdict, judge
from whorl.ops import OPS
from whorl.titan.config import settings

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A sample to compare: a small module of the same kind as one of the model, and the arguments to call it with."""

    module: nn.Module
    inputs: tuple[Tensor, ...]  # float32; they are rounded to the dtype of training, and their gradients are compared
    constants: tuple[Any, ...] = ()  # arguments after the inputs, such as tables and counts; they are not rounded
    # (module, *inputs, *constants) -> the result, for a module that rounds even if its inputs are float64
    exact: Callable[..., Any] | None = None


class Converter(ABC, Generic[M]):
    """A TorchTitan ModelConverter that replaces modules of a class, M, by our operators."""

    name: str
    operators: tuple[str, ...]  # the operators that the new modules call

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        self.job_config, self.parallel_dims = job_config, parallel_dims

    @abstractmethod
    def is_candidate(self, module: nn.Module) -> TypeGuard[M]:
        """Return whether this converter is meant for such a module; `refusal` may still exclude it."""

    @abstractmethod
    def replace(self, module: nn.Module) -> None:
        """Replace the computation of a module in place; parameters, buffers, hooks and names stay."""

    @abstractmethod
    def sample(self, module: M, generator: torch.Generator) -> Probe:
        """Return a small module of the same kind as `module`, with random inputs, on the CPU in float32."""

    def refusal(self, module: M) -> str | None:
        """Return the reason why a candidate is not converted, or None."""
        return None

    def kind(self, module: M) -> Hashable:
        """Return a key of the module; modules with the same key are compared only once."""
        return type(module).__name__

    def convert(self, model: nn.Module) -> None:
        """Convert all modules of a model; raises ValueError if none matches or a sample is not accurate enough."""
        kinds: dict[Hashable, M] = {}
        refused: dict[str, str] = {}
        modules = []
        for name, module in model.named_modules():
            if not self.is_candidate(module):
                continue
            if reason := self.refusal(module):
                refused[name] = reason
                continue
            modules.append(module)
            kinds.setdefault(self.kind(module), module)
        if not modules:
            raise ValueError(self._no_match_message(model, refused))
        is_checked = settings(self.job_config).check_converters
        worst_ratio = max(map(self._compare, kinds.values())) if is_checked else None
        for module in modules:
            self.replace(module)
        self._log_result(len(modules), refused, worst_ratio)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing after an optimizer step."""
        del model

    def _compare(self, module: M) -> float:
        """Return the error of our module as a multiple of the original one's; raises ValueError if it is too large."""
        device = torch.device(utils.device_type)
        dtype = TORCH_DTYPE_MAP[self.job_config.training.mixed_precision_param]
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            sample = self.sample(module, torch.Generator().manual_seed(0))
        verdict = compare(sample, self.replace, device, dtype)
        if not verdict.passed:
            raise ValueError(
                f"{self.name}: on a small {type(module).__name__} in {dtype}: {verdict.problem}. This would change "
                "the training; remove the converter and report it, or set whorl.check_converters to false"
            )
        return verdict.ratio

    def _no_match_message(self, model: nn.Module, refused: dict[str, str]) -> str:
        types = sorted({type(module).__name__ for module in model.modules()})
        skipped = f" It skipped {_first_by_reason(refused)}." if refused else ""
        return (
            f"{self.name} matched nothing in {type(model).__name__}, which consists of {', '.join(types)}.{skipped} "
            "Remove it from model.converters"
        )

    def _log_result(self, count: int, refused: dict[str, str], worst_ratio: float | None) -> None:
        backends = {op: _backend(op, utils.device_type) for op in self.operators}
        operators = ", ".join(f"{op} by {backend}" for op, backend in backends.items())
        error = "not compared" if worst_ratio is None else f"the error is {worst_ratio:.2f} of the original one"
        logger.info(f"{self.name}: {count} modules, {operators}; {error}")
        if refused:
            logger.warning(f"{self.name}: {len(refused)} modules are not converted: {_first_by_reason(refused)}")


def _first_by_reason(refused: dict[str, str]) -> str:
    """Return the first module for each reason, as text."""
    first: dict[str, str] = {}
    for name, reason in refused.items():
        first.setdefault(reason, name)
    return "; ".join(f"{name} ({reason})" for reason, name in first.items())


def _backend(op: str, device: str) -> str:
    available = [name for name, reason in OPS[op].availability(device).items() if reason is None]
    return next((name for name in available if name != "torch"), "torch")


# ---- comparing


def compare(sample: Probe, replace: Callable[[nn.Module], None], device: torch.device, dtype: torch.dtype) -> Verdict:
    """Compare the outputs and gradients of a module, before and after its replacement, with those in float64.

    dtype: the dtype of parameters and inputs, that of training.
    """
    original = _typed(sample.module, device, dtype)
    converted = copy.deepcopy(original)
    replace(converted)
    gold = _typed(original, device, torch.float64)
    call = sample.exact or (lambda module, *values: module(*values))
    inputs = [x.to(device, dtype) for x in sample.inputs]
    constants = [_moved(x, device) for x in sample.constants]
    wide_arguments = [x.double() for x in inputs], [_widened(x) for x in constants]
    return judge(
        _outputs_and_gradients(converted, converted, inputs, constants),
        _outputs_and_gradients(original, original, inputs, constants),
        _outputs_and_gradients(lambda *values: call(gold, *values), gold, *wide_arguments),
    )


def _typed(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a module with parameters and buffers in a dtype, all trainable."""
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
def _outputs_and_gradients(
    call: Callable[..., Any], module: nn.Module, inputs: list[Tensor], constants: list[Any]
) -> list[Tensor]:
    """Return the outputs of `call`, then the gradients of the inputs and of the parameters of `module`.

    The gradients of the outputs are random, and exact in bfloat16, so that they are equal for every dtype.
    """
    leaves = [x.detach().requires_grad_(True) for x in inputs]
    result = call(*leaves, *constants)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    generator = torch.Generator().manual_seed(1)
    output_grads = [torch.randn(out.shape, generator=generator).bfloat16().to(out) for out in outputs]
    differentiated = [*leaves, *module.parameters()]
    grads = torch.autograd.grad(outputs, differentiated, output_grads, allow_unused=True)
    return [*(out.detach() for out in outputs), *(grad for grad in grads if grad is not None)]


# ---- replacing


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Change the class of a module to a subclass with another `forward`; modules of one class share the subclass."""
    module.__class__ = _subclass(type(module), forward)


_classes: dict[tuple[type, Callable[..., Any]], type] = {}


def _subclass(cls: type, forward: Callable[..., Any]) -> type:
    subclass = _classes.get((cls, forward))
    if subclass is None:
        subclass = types.new_class(f"Whorl{cls.__name__}", (cls,), {}, lambda body: body.update(forward=forward))
        subclass.__module__ = forward.__module__
        _classes[cls, forward] = subclass
    return subclass
