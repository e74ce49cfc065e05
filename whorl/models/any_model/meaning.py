"""Which layer of whorl means the same as a module of transformers: found by computing both on random numbers."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl import ops

_RELATIVE, _ABSOLUTE = 2e-5, 1e-6  # fp32 with another order of sums
_ROWS = (1.0, 1e-3, 30.0)  # sizes of rows: eps shows with small ones


def twin(module: Any, **shapes: tuple[int, ...]) -> Any:
    """Return a copy of a module on the host, with random parameters in fp32. shapes: of those that get others."""
    generator = torch.Generator().manual_seed(0)
    twin = copy.copy(module)
    twin._parameters = {
        name: None
        if each is None
        else nn.Parameter(torch.randn(shapes.get(name, tuple(each.shape)), generator=generator), requires_grad=False)
        for name, each in module._parameters.items()
    }
    return twin


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _output(module: Any, *inputs: Tensor) -> Tensor | None:
    """Return what a module computes in fp32 on the host; None if it does not take these, or returns something else."""
    try:
        with torch.device("cpu"), torch.no_grad():
            y = module(*inputs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError):
        return None
    return y if isinstance(y, Tensor) else None


def _is_equal(actual: Tensor | None, expected: Tensor) -> bool:
    return (
        actual is not None
        and actual.shape == expected.shape
        and torch.allclose(actual, expected, rtol=_RELATIVE, atol=_ABSOLUTE)
    )


def _epsilons(module: nn.Module) -> Iterator[float]:
    yield from (each for each in vars(module).values() if isinstance(each, float) and 0 < each < 0.01)


class NormForm(NamedTuple):
    """What a norm computes: `OwnLayerNorm` where it is centered, else `OwnRMSNorm`, with these arguments."""

    eps: float
    plus_one: bool
    is_centered: bool


def norm(module: nn.Module) -> NormForm | None:
    """Return the form of a norm of whorl's that means the same as a module, or None."""
    weight = module._parameters.get("weight")
    if weight is None or set(module._parameters) - {"weight", "bias"} or module._modules:
        return None
    copied = twin(module)
    w, b = copied._parameters["weight"], copied._parameters.get("bias")
    x = torch.stack([size * _random(5, *weight.shape) for size in _ROWS])
    y = _output(copied, x)
    for eps in _epsilons(module):
        if b is None and weight.dim() == 1:
            for plus_one in (False, True):
                if _is_equal(y, ops.rms_norm(x, w, eps, plus_one=plus_one)):
                    return NormForm(eps, plus_one, is_centered=False)
        normed = F.layer_norm(x, x.shape[-1:], None, None, eps)
        for plus_one in (False, True):
            expected = normed * (w + plus_one)
            if _is_equal(y, expected if b is None else expected + b):
                return NormForm(eps, plus_one, is_centered=True)
    return None


def linear(module: nn.Module) -> str | None:
    """Return "plain" if a module multiplies by its weight [N, K] as `OwnLinear` does, "transposed" for [K, N]; None if
    it does neither."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or set(module._parameters) - {"weight", "bias"} or module._modules:
        return None
    if type(module) is nn.Linear:
        return "plain"
    if max(weight.shape) > 1 << 15:
        return None
    copied = twin(module)
    w, b = copied._parameters["weight"], copied._parameters.get("bias")
    for name, matrix in (("plain", w), ("transposed", w.t())):
        if b is not None and b.shape != matrix.shape[:1]:
            continue
        x = _random(2, 3, matrix.shape[1]) * matrix.shape[1] ** -0.5
        if _is_equal(_output(copied, x), F.linear(x, matrix, b)):
            return name
    return None


def embedding_factor(module: nn.Embedding) -> float | None:
    """Return the factor by which an embedding multiplies its rows; None if it does something else."""
    if type(module) is nn.Embedding:
        return 1.0
    size, width = module.weight.shape
    copied = twin(module, weight=(min(size, 64), width))
    ids = torch.arange(1, min(size, 64))
    y, rows = _output(copied, ids), copied._parameters["weight"][1:]
    if y is None or y.shape != rows.shape:
        return None
    factor = float((y.double() * rows.double()).sum() / rows.double().square().sum())
    return factor if _is_equal(y, rows * factor) else None


def is_swiglu(module: Any) -> bool:
    """Return whether a module's experts compute `ops.experts` with stacks gate_up_proj and down_proj."""
    names = ("gate_up_proj", "down_proj")
    stacks = [module._parameters.get(name) for name in names]
    if set(module._parameters) - set(names) or any(stack is None or stack.dim() != 3 for stack in stacks):
        return False
    num, inner, width = stacks[0].shape[0], 4, 8
    copied = twin(module, gate_up_proj=(num, 2 * inner, width), down_proj=(num, width, inner))
    copied.config = copy.deepcopy(module.config)
    copied.config._experts_implementation = "eager"
    x, choices = _random(6, width), min(2, num)
    weights = _random(6, choices).abs()
    ids = torch.stack([torch.randperm(num, generator=torch.Generator().manual_seed(i))[:choices] for i in range(6)])
    expected = ops.experts(x, *(copied._parameters[name] for name in names), weights, ids)
    return _is_equal(_output(copied, x, ids, weights), expected)
