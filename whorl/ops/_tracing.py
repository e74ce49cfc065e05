"""Who looks at a call besides the caller: autograd, a tracer, a dispatch mode, a transform, a tensor subclass."""

import contextlib
from typing import Any

import torch
from torch import Tensor

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def needs_node(tensors: list[Tensor]) -> bool:
    """Whether someone looks.

    The torch op costs tens of microseconds; otherwise the implementation is called directly.
    """
    return (
        torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        or not _PLAIN.issuperset(map(type, tensors))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def is_transformed() -> bool:
    """Whether torch.func (functionalisation apart, which keeps the node) or forward mode differentiates or maps."""
    if torch.compiler.is_compiling():
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    transform = torch._C._functorch.peek_interpreter_stack()
    return transform is not None and transform.key() != torch._C._functorch.TransformType.Functionalize


def has_dtensor(tensors: list[Tensor]) -> bool:
    return any(type(t).__name__ == "DTensor" for t in tensors)


def is_readable(x: Tensor) -> bool:
    """Whether values can be looked at here for free: a real CPU tensor, nobody tracing."""
    return x.device.type == "cpu" and not needs_node([x.detach()])


def no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
