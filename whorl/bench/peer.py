"""Peers: implementations of other libraries that are checked and timed next to whorl's."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl import device as devices
from whorl.ops import Op

Values = dict[str, Any]
Outputs = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A peer with its arguments prepared. outputs: converts what `run` returns to our shapes, untimed."""

    run: Callable[[], Any]
    outputs: Callable[[Any], Outputs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another implementation of an operator. bind: prepares its arguments from ours."""

    label: str
    bind: Callable[[Values], Bound]
    is_contract: bool = False  # it is the reference itself, whose output needs no check
    through_autograd: bool = False  # torch runs the backward on the forward's stream, so no graph can record it
    select_expected: Callable[[list[Tensor]], Outputs] = list  # selects the expected outputs that it returns


def bind_plainly(op: Op, function: Callable[..., Any]) -> Callable[[Values], Bound]:
    """Return the `bind` of a function that takes the operator's own arguments."""

    def bind(values: Values) -> Bound:
        values = {n: v.clone() if n in op.mutates and v is not None else v for n, v in values.items()}
        outputs = (lambda _: tensors_of([values[n] for n in op.mutates])) if op.mutates else tensors_of
        return Bound(run=lambda: function(**values), outputs=outputs)

    return bind


def compile_static(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled for static shapes."""
    # A backward that is timed alone runs many times on the tensors that one forward saved, so it must not donate them.
    import torch._functorch.config as aot_config

    aot_config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def tensors_of(out: Any) -> list[Tensor]:
    """Return the tensors of an output that is a tensor or a tuple; absent ones (None) are left out."""
    return [t for t in (out if isinstance(out, tuple | list) else (out,)) if t is not None]


def backward_alone(
    function: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> Callable[[], Any]:
    """Run the forward now, and return a call of its backward through autograd."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        outs = tensors_of(function(*leaves))
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)


def functions_of(
    values: Values,
    compiled: bool,
    *,
    eager: dict[str, Callable[..., Any]],
    compile_too: dict[str, Callable[..., Any]],
    liger: tuple[str, str] | None = None,
) -> dict[str, Callable[..., Any]]:
    """Return the functions of other libraries by label: eager ones, compiled ones if asked for, and Liger's."""
    functions = dict(eager)
    if compiled:
        functions |= {f"{label}, torch.compile": compile_static(function) for label, function in compile_too.items()}
    if liger is not None and (function := liger_function(values, *liger)) is not None:
        functions["Liger"] = function.apply
    return functions


def liger_function(values: Values, module: str, name: str) -> Any:
    """Return a function of Liger; None where it is not installed or Triton kernels do not run."""
    device = next(v for v in values.values() if isinstance(v, Tensor)).device.type
    if devices.unavailable("triton", device) is not None or not devices.is_installed("liger_kernel"):
        return None
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name, None)
