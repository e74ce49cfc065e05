"""What every function of whorl.ascend does before it computes.

It refuses gradients that torch_npu does not have, calls torch_npu itself for tensors on an NPU, and elsewhere enforces
the limits that the vendor documents. On an NPU torch_npu alone checks the arguments.
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
    """Enforce or ignore the documented device limits off the NPU, from now on or inside a `with` block.

    mode: "enforce" (the default: a call that breaks a limit raises ValueError) or "ignore". The setting holds for all
    threads. Arguments without a meaning, such as an odd rotary size, stay errors. Raises ValueError for another mode.

    Example: with limits("ignore"): npu_rotary_mul(x, cos, sin)
    """

    def __init__(self, mode: Literal["enforce", "ignore"]) -> None:
        global _limits
        if mode not in ("enforce", "ignore"):
            raise ValueError(f"limits: mode is {mode!r}, expected 'enforce' or 'ignore'")
        self._previous, _limits = _limits, mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _limits
        _limits = self._previous


def enforce_limit(name: str, limit: str | None) -> None:
    """Raise ValueError if a limit is broken and limits are enforced; limit: the broken limit in words, or None."""
    if limit is not None and _limits == "enforce":
        raise ValueError(f"{name}: {limit}. The device documents this limit; whorl.ascend.limits('ignore') lifts it")


def refuse_gradient(name: str, *tensors: Tensor) -> None:
    """Raise RuntimeError if a gradient of one of the tensors is needed."""
    if needs_gradient(*tensors):
        reason = "drops it silently" if contracts.CONTRACTS[name].gradient == "silently lost" else "has none"
        raise RuntimeError(f"{name}: a gradient is needed and torch_npu {reason}; use torch.no_grad(), or whorl.ops")


def needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def is_npu(x: Tensor) -> bool:
    return x.device.type == "npu"


def call_torch_npu(name: str, *required: Any, **optional: Any) -> Any:
    """Call torch_npu's operator.

    required: passed by position as they are; optional: passed by name. One of them that the installed version lacks is
    left out if it has its default value, otherwise RuntimeError names the version that is needed.
    """
    function = getattr(importlib.import_module("torch_npu"), name)
    return function(*required, **installed().call_arguments(name, **optional))


def refuse_npu_arguments(name: str, **arguments: object) -> None:
    """Raise ValueError for every argument that is not None: these are implemented on an NPU only."""
    unsupported = [
        f"{argument}={value!r}" if isinstance(value, int | str | float) else argument
        for argument, value in arguments.items()
        if value is not None
    ]
    if unsupported:
        raise ValueError(f"{name}: {', '.join(unsupported)} is implemented on an NPU only; leave it out off the NPU")
