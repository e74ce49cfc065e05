"""whorl_rope: rotate queries and keys by `ops.rope`, in our models and in TorchTitan's.

TorchTitan's attention calls `apply_rotary_emb`, a global function of its Python module. A converted attention gets a
copy of its `forward` with other globals, in which only that name is ours; TorchTitan's module is not changed.
"""

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.qwen3.model import model as qwen3

from whorl import ops
from whorl.titan.local import complex_rows, doubled_rows, local, rotate
from whorl.titan.rotary import Rotary

from .conversion import Converter, Probe, replace_forward

NAME = "apply_rotary_emb"


def _table_rows(table: Tensor, x: Tensor, positions: Tensor | None) -> Tensor:
    """Return the rows of the table for the tokens of x, [1 or B, S, *], as TorchTitan's reshape_for_broadcast does."""
    table, positions = local(table), local(positions)
    return table[: x.shape[1]][None] if positions is None else table[positions]


def _llama3(xq: Tensor, xk: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return rotate(xq, xk, complex_rows(_table_rows(freqs_cis, xq, positions)), "pairs")


def _deepseek_v3(x: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Tensor:
    return rotate(x, None, complex_rows(_table_rows(freqs_cis, x, positions)), "pairs")[0]


def _qwen3(xq: Tensor, xk: Tensor, rope_cache: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return rotate(xq, xk, doubled_rows(_table_rows(rope_cache, xq, positions)), "half")


# TorchTitan's rotary functions, and our replacements with the same signatures.
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    llama3.apply_rotary_emb: _llama3,
    deepseek_v3.apply_rotary_emb: _deepseek_v3,
    qwen3.apply_rotary_emb: _qwen3,
}


@functools.cache
def with_global(forward: Callable[..., Any], name: str, new: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of `forward` in which the global `name` is `new`."""
    assert isinstance(forward, types.FunctionType)
    # The copy needs its own code object, because torch.compile caches by code object.
    code = forward.__code__.replace(co_name=f"{forward.__name__}_with_{new.__name__.strip('_')}")
    copy = types.FunctionType(
        code, {**forward.__globals__, name: new}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__module__ = forward.__module__
    return copy


def _rotary_function(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that the forward of a module calls as `apply_rotary_emb`, or None if it calls none."""
    forward = type(module).forward
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    return names.get(NAME) if code is not None and NAME in code.co_names else None


def _rotate_by_ops(self: Rotary, q: Tensor, k: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    rotated_q, rotated_k = ops.rope(q, k.unsqueeze(-2), rows, style=self.style)
    return rotated_q, rotated_k.squeeze(-2)


class RopeConverter(Converter[nn.Module]):
    """Converts our Rotary modules and the attention modules of TorchTitan."""

    name = "whorl_rope"
    operators = ("rope",)

    def is_candidate(self, module: nn.Module) -> TypeGuard[nn.Module]:
        return type(module) is Rotary or _rotary_function(module) is not None

    def refusal(self, module: nn.Module) -> str | None:
        function = _rotary_function(module)
        if function is None or function in FUNCTIONS:
            return None
        if function in FUNCTIONS.values():
            return "it is already converted"
        return f"{function.__module__}.{NAME} is unknown"

    def kind(self, module: nn.Module) -> Hashable:
        return module.style if isinstance(module, Rotary) else _rotary_function(module)

    def replace(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            replace_forward(module, _rotate_by_ops)
        elif isinstance(module, FunctionModule):
            module.function = FUNCTIONS[module.function]
        else:
            function = _rotary_function(module)
            assert function is not None
            replace_forward(module, with_global(type(module).forward, NAME, FUNCTIONS[function]))

    def sample(self, module: nn.Module, generator: torch.Generator) -> Probe:
        tokens, rotary = 12, 16
        q = torch.randn(2, tokens, 3, rotary, generator=generator)
        k = torch.randn(2, tokens, 1, rotary, generator=generator)
        angles = torch.rand(tokens, rotary // 2, generator=generator) * 50
        if isinstance(module, Rotary):
            rows = torch.cat((angles.cos(), angles.sin()), -1).expand(2, -1, -1)
            return Probe(module=Rotary(module.style), inputs=(q, k.squeeze(2)), constants=(rows,))
        function = _rotary_function(module)
        assert function is not None
        is_half = function is qwen3.apply_rotary_emb
        inputs = (q,) if function is deepseek_v3.apply_rotary_emb else (q, k)
        return Probe(
            module=FunctionModule(function),
            inputs=inputs,
            constants=(_table(angles, is_half),),
            exact=functools.partial(_exact, is_half),
        )


class FunctionModule(nn.Module):
    """Wraps a function as a module, so that it can be compared like one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


def _table(angles: Tensor, is_half: bool) -> Tensor:
    """Return the rotary table as TorchTitan has it: complex for pairs, for qwen3 cosines and sines, each twice."""
    if not is_half:
        return torch.polar(torch.ones_like(angles), angles)
    return torch.cat((angles.cos(), angles.cos(), angles.sin(), angles.sin()), -1)


def _exact(is_half: bool, module: nn.Module, *values: Tensor) -> tuple[Tensor, ...]:
    """Rotate in float64: TorchTitan's functions compute in float32 or less for any input."""
    *inputs, table = values
    rotated = []
    for x in inputs:
        if is_half:
            cos, _, sin, _ = table[:, None].split(x.shape[-1] // 2, -1)
            a, b = x.chunk(2, -1)
            rotated.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
        else:
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            rotated.append(torch.view_as_real(pairs * table[:, None]).flatten(-2))
    return tuple(rotated)
