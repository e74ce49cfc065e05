"""Who looks at a call besides the caller: autograd, a tracer, a dispatch mode, a transform, a tensor subclass."""

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = frozenset((Tensor, torch.nn.Parameter))
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack


def is_watched() -> bool:
    """Whether someone looks at all that this thread does: a tracer, a mode, a transform."""
    return (
        torch.compiler.is_compiling()  # first: a tracer stumbles over the other questions
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transform() is not None
        or forward_ad._current_level >= 0
    )


def needs_node(tensors: list[Tensor]) -> bool:
    """Whether someone looks at a call with these tensors.

    The torch op costs tens of microseconds; otherwise the implementation is called directly.
    """
    return (
        is_watched()
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        or not PLAIN.issuperset(map(type, tensors))
    )


def is_transformed() -> bool:
    """Whether torch.func (functionalisation apart, which keeps the node) or forward mode differentiates or maps."""
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    transform = _transform()
    return transform is not None and transform.key() != torch._C._functorch.TransformType.Functionalize


def has_dtensor(tensors: list[Tensor]) -> bool:
    return any(type(t).__name__ == "DTensor" for t in tensors)


class Looks(threading.local):
    """How often checks of this thread have asked to look at values: one that has not depends on the kind of call."""

    count = 0


LOOKS = Looks()


def is_readable(x: Tensor) -> bool:
    """Whether values can be looked at here for free: a real CPU tensor, nobody tracing."""
    if x.device.type != "cpu" or needs_node([x.detach()]):
        return False
    LOOKS.count += 1
    return True


def no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
