"""whorl_rope: the rotation of queries and keys by `ops.rope`, in our model and in TorchTitan's.

TorchTitan's attention calls a function of its module, `apply_rotary_emb`. A converted attention has the same `forward`,
made again over globals in which that one name is ours: TorchTitan's module keeps its own.
"""

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.qwen3.model import model as qwen3

from whorl import ops
from whorl.titan.local import complex_rows, doubled_rows, local, rotate
from whorl.titan.rotary import Rotary

from .conversion import Converter, Probe, become

NAME = "apply_rotary_emb"


def _rows(table: Tensor, x: Tensor, positions: Tensor | None) -> Tensor:
    """[1 or B, S, *]: as TorchTitan's reshape_for_broadcast takes them."""
    table, positions = local(table), local(positions)
    return table[: x.shape[1]][None] if positions is None else table[positions]


def _llama3(xq: Tensor, xk: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return rotate(xq, xk, complex_rows(_rows(freqs_cis, xq, positions)), "pairs")


def _deepseek_v3(x: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Tensor:
    return rotate(x, None, complex_rows(_rows(freqs_cis, x, positions)), "pairs")[0]


def _qwen3(xq: Tensor, xk: Tensor, rope_cache: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return rotate(xq, xk, doubled_rows(_rows(rope_cache, xq, positions)), "half")


# TorchTitan's function and ours.
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    llama3.apply_rotary_emb: _llama3,
    deepseek_v3.apply_rotary_emb: _deepseek_v3,
    qwen3.apply_rotary_emb: _qwen3,
}


@functools.cache
def rebound(forward: Callable[..., Any], name: str, new: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with another meaning of one global name."""
    assert isinstance(forward, types.FunctionType)
    # A code object of its own: torch.compile keeps what it compiled by code object.
    code = forward.__code__.replace(co_name=f"{forward.__name__}_with_{new.__name__.strip('_')}")
    made = types.FunctionType(
        code, {**forward.__globals__, name: new}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    made.__module__ = forward.__module__
    return made


def _function_of(module: nn.Module) -> Callable[..., Any] | None:
    """The rotation that its forward calls."""
    forward = type(module).forward
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    return names.get(NAME) if code is not None and NAME in code.co_names else None


def _turn_ours(self: Rotary, q: Tensor, k: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    turned, turned_k = ops.rope(q, k.unsqueeze(-2), rows, style=self.style)
    return turned, turned_k.squeeze(-2)


class RopeConverter(Converter):
    name = "whorl_rope"
    operators = ("rope", "rope_backward")

    def is_candidate(self, module: nn.Module) -> bool:
        return type(module) is Rotary or _function_of(module) is not None

    def refusal(self, module: nn.Module) -> str | None:
        function = _function_of(module)
        if function is None or function in FUNCTIONS:
            return None
        if function in FUNCTIONS.values():
            return "it is converted already"
        return f"{function.__module__}.{NAME} is none that is known here"

    def kind(self, module: nn.Module) -> Hashable:
        return module.style if isinstance(module, Rotary) else _function_of(module)

    def replace(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            become(module, _turn_ours)
        elif isinstance(module, Call):
            module.function = FUNCTIONS[module.function]
        else:
            function = _function_of(module)
            assert function is not None
            become(module, rebound(type(module).forward, NAME, FUNCTIONS[function]))

    def sample(self, module: nn.Module, generator: torch.Generator) -> Probe:
        tokens, rotary = 12, 16
        q = torch.randn(2, tokens, 3, rotary, generator=generator)
        k = torch.randn(2, tokens, 1, rotary, generator=generator)
        angles = torch.rand(tokens, rotary // 2, generator=generator) * 50
        if isinstance(module, Rotary):
            rows = torch.cat((angles.cos(), angles.sin()), -1).expand(2, -1, -1)
            return Probe(module=Rotary(module.style), inputs=(q, k.squeeze(2)), constants=(rows,))
        function = _function_of(module)
        assert function is not None
        is_half = function is qwen3.apply_rotary_emb
        inputs = (q,) if function is deepseek_v3.apply_rotary_emb else (q, k)
        return Probe(
            module=Call(function),
            inputs=inputs,
            constants=(_table(angles, is_half),),
            exact=functools.partial(_exact, is_half),
        )


class Call(nn.Module):
    """A function as a module, so that it is compared like one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(*values)


def _table(angles: Tensor, is_half: bool) -> Tensor:
    if not is_half:
        return torch.polar(torch.ones_like(angles), angles)
    return torch.cat((angles.cos(), angles.cos(), angles.sin(), angles.sin()), -1)


def _exact(is_half: bool, module: nn.Module, *values: Tensor) -> tuple[Tensor, ...]:
    """TorchTitan's functions compute in float32 or less whatever they are given."""
    *heads, table = values
    turned = []
    for x in heads:
        if is_half:
            cos, _, sin, _ = table[:, None].split(x.shape[-1] // 2, -1)
            a, b = x.chunk(2, -1)
            turned.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
        else:
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            turned.append(torch.view_as_real(pairs * table[:, None]).flatten(-2))
    return tuple(turned)
