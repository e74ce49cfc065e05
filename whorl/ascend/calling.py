"""What every name here does before it computes: missing gradients, torch_npu itself on an NPU, and elsewhere limits.

On an NPU the vendor decides what a call may ask for: no limit and no check of ours stands before torch_npu.
"""

import importlib
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from whorl import contracts
from whorl.ops._torch_npu import installed

_limits = "enforce"


class limits:
    """Whether documented device limits are errors off the NPU: `limits("ignore")` from here on, or in a `with` block.

    One setting for all threads. What has no meaning, such as an odd width, stays an error.
    """

    def __init__(self, mode: Literal["enforce", "ignore"]) -> None:
        global _limits
        if mode not in ("enforce", "ignore"):
            raise ValueError(f"limits: mode is {mode!r}, expected 'enforce' or 'ignore'")
        self._before, _limits = _limits, mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _limits
        _limits = self._before


def refuse(name: str, limit: str | None) -> None:
    if limit is not None and _limits == "enforce":
        raise ValueError(f"{name}: {limit}. The device documents this limit; whorl.ascend.limits('ignore') lifts it")


def refuse_gradient(name: str, *tensors: Tensor) -> None:
    if needs_gradient(*tensors):
        lost = "drops it silently" if contracts.CONTRACTS[name].gradient == "silently lost" else "has none"
        raise RuntimeError(f"{name}: a gradient is needed and torch_npu {lost}; use torch.no_grad(), or whorl.ops")


def needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def is_npu(x: Tensor) -> bool:
    return x.device.type == "npu"


def call_torch_npu(name: str, *required: Any, **optional: Any) -> Any:
    function = getattr(importlib.import_module("torch_npu"), name)
    return function(*required, **installed().call_arguments(name, **optional))


def refuse_arguments(name: str, **given: object) -> None:
    """What is None is not asked for; what is not has a meaning on the NPU alone."""
    asked = [
        f"{what}={value!r}" if isinstance(value, int | str | float) else what
        for what, value in given.items()
        if value is not None
    ]
    if asked:
        raise ValueError(f"{name}: {', '.join(asked)} has a meaning on an NPU only; here it is not implemented")
