"""Tests for what observes an operator call: autograd, a tracer, a dispatch mode, a transform, a tensor subclass."""

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = frozenset((Tensor, torch.nn.Parameter))  # types of tensors whose calls need no dispatch
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
has_autocast = torch._C._is_any_autocast_enabled  # on whichever device type, so that no name of one is parsed


def is_watched() -> bool:
    """Return whether a tracer, a mode or a transform observes every call of this thread."""
    return (
        torch.compiler.is_compiling()  # first: torch.compile cannot trace the other tests
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transform() is not None
        or forward_ad._current_level >= 0
    )


def needs_node(tensors: list[Tensor]) -> bool:
    """Return whether a call with these tensors must go through the torch op, so that its observer sees one node.

    Otherwise the implementation is called directly, which saves tens of microseconds.
    """
    return (
        is_watched()
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        or not PLAIN.issuperset(map(type, tensors))
    )


def is_transformed() -> bool:
    """Return whether a torch.func transform or forward-mode autodiff runs, for which the torch op has no rule.

    Functionalisation does not count, since it keeps the node of the torch op.
    """
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    transform = _transform()
    return transform is not None and transform.key() != torch._C._functorch.TransformType.Functionalize


def has_dtensor(tensors: list[Tensor]) -> bool:
    """Return whether a tensor is a DTensor; compared by name, so that torch.distributed is not imported."""
    return any(type(t).__name__ == "DTensor" for t in tensors)


class ValueReads(threading.local):
    """How many times checks of this thread have read tensor values.

    The operator compares the count before and after a check. A check that reads no values depends on the kind of call
    alone, so its outcome can be cached.
    """

    count = 0


VALUE_READS = ValueReads()


def is_readable(x: Tensor) -> bool:
    """Return whether a check may read x's values: x is a real CPU tensor and nothing is traced. Counts each True."""
    if x.device.type != "cpu" or needs_node([x.detach()]):
        return False
    VALUE_READS.count += 1
    return True


def no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast is off for this device type."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
