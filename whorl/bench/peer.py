"""Peers: implementations of other libraries that are checked and timed next to whorl's."""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl import device as devices
from whorl.ops import Op

Function = Callable[..., Any]
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


PeersOf = Callable[[Values, bool], list[Peer]]  # the peers for an operator's arguments, and with compiled ones or not


def bind_plainly(op: Op, function: Function) -> Callable[[Values], Bound]:
    """Return the `bind` of a function that takes the operator's own arguments."""

    def bind(values: Values) -> Bound:
        values = {n: v.clone() if n in op.mutates and v is not None else v for n, v in values.items()}
        outputs = (lambda _: tensors_of([values[n] for n in op.mutates])) if op.mutates else tensors_of
        return Bound(run=lambda: function(**values), outputs=outputs)

    return bind


def compile_static(function: Function) -> Function:
    """Return the function compiled for static shapes."""
    # A backward that is timed alone runs many times on the tensors that one forward saved, so it must not donate them.
    import torch._functorch.config as aot_config

    aot_config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def tensors_of(out: Any) -> list[Tensor]:
    """Return the tensors of an output that is a tensor or a tuple; absent ones (None) are left out."""
    return [t for t in (out if isinstance(out, tuple | list) else (out,)) if t is not None]


def backward_alone(function: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Callable[[], Any]:
    """Run the forward now, and return a call of its backward through autograd."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        outs = tensors_of(function(*leaves))
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)


def forward_peers(
    functions: Mapping[str, Function],
    arguments: Callable[[Values], Sequence[Any]],
    *,
    outputs: Callable[[Any], Outputs] = tensors_of,
    select_expected: Callable[[list[Tensor]], Outputs] = list,
) -> list[Peer]:
    """Return a peer for each function, by label. arguments: what it is called with, prepared from ours."""

    def bind(function: Function, values: Values) -> Bound:
        prepared = arguments(values)
        return Bound(run=lambda: function(*prepared), outputs=outputs)

    return [
        Peer(label=label, bind=functools.partial(bind, function), select_expected=select_expected)
        for label, function in functions.items()
    ]


def backward_peers(
    functions: Mapping[str, Function],
    inputs: Callable[[Values], Sequence[Tensor]],
    grads: Callable[[Values], Sequence[Tensor]],
    *,
    constants: Callable[[Values], Sequence[Any]] = lambda values: (),
    outputs: Callable[[Any], Outputs] = tensors_of,
) -> list[Peer]:
    """Return a peer for the backward of each function, which autograd runs on a forward that is not timed.

    inputs: the first arguments, which get gradients; constants: the others; grads: the gradients of the outputs.
    """

    def bind(function: Function, values: Values) -> Bound:
        others = constants(values)
        run = backward_alone(lambda *tensors: function(*tensors, *others), inputs(values), grads(values))
        return Bound(run=run, outputs=outputs)

    return [
        Peer(label=f"{label}, backward alone", bind=functools.partial(bind, function), through_autograd=True)
        for label, function in functions.items()
    ]


def compiled_functions(functions: Mapping[str, Function], compiled: bool) -> dict[str, Function]:
    """Return the functions by label, compiled; none where that is not asked for."""
    return {f"{label}, torch.compile": compile_static(f) for label, f in functions.items()} if compiled else {}


def pick(*names: str) -> Callable[[Values], list[Any]]:
    """Return the function that takes these arguments, in this order, from ours."""
    return lambda values: [values[name] for name in names]


def liger_functions(values: Values, module: str, name: str) -> dict[str, Function]:
    """Return a class of Liger as a function by label; none where it does not run."""
    kind = liger_function(values, module, name)
    return {} if kind is None else {"Liger": kind.apply}


def liger_function(values: Values, module: str, name: str) -> Any:
    """Return a function of Liger; None where it is not installed or Triton kernels do not run."""
    device = next(v for v in values.values() if isinstance(v, Tensor)).device.type
    if devices.unavailable("triton", device) is not None or not devices.is_installed("liger_kernel"):
        return None
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name, None)
