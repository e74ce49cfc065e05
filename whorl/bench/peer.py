"""A peer: somebody else's way to an answer, checked and timed like ours."""

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
    """A peer with its arguments ready. `outputs` brings what `run` returns into our layout, untimed."""

    run: Callable[[], Any]
    outputs: Callable[[Any], Outputs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    label: str
    bind: Callable[[Values], Bound]
    question: Values | None = None  # arguments of ours that it answers otherwise than asked
    is_contract: bool = False  # the reference itself: what it answers is right
    through_autograd: bool = False  # a backward that torch runs on the forward's stream: no graph can record it
    answered: Callable[[list[Tensor]], Outputs] = list  # what of the right answers it gives, in its own order


def bind_plainly(op: Op, function: Callable[..., Any]) -> Callable[[Values], Bound]:
    def bind(values: Values) -> Bound:
        values = {n: v.clone() if n in op.mutates and v is not None else v for n, v in values.items()}
        outputs = (lambda _: tensors_of([values[n] for n in op.mutates])) if op.mutates else tensors_of
        return Bound(run=lambda: function(**values), outputs=outputs)

    return bind


def compile_static(function: Callable[..., Any]) -> Callable[..., Any]:
    # A backward timed alone runs many times on what one forward saved, which must then not be given away.
    import torch._functorch.config as aot_config

    aot_config.donated_buffer = False
    return torch.compile(function, dynamic=False)


def tensors_of(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, tuple | list) else (out,)) if t is not None]


def backward_alone(
    function: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> Callable[[], Any]:
    """The backward alone, through autograd; the forward runs here."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        outs = tensors_of(function(*leaves))
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)


def liger_function(values: Values, module: str, name: str) -> Any:
    """A function of Liger, or None where it is not installed or its Triton kernels do not run."""
    device = next(v for v in values.values() if isinstance(v, Tensor)).device.type
    if devices.unavailable("triton", device) is not None or not devices.is_installed("liger_kernel"):
        return None
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name, None)
