"""torch_npu as it is installed: imported on first use, its schemas probed once, every argument passed by name."""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from whorl.contracts import Installed, probe, schema_arguments


@functools.cache
def installed() -> Installed:
    torch_npu = importlib.import_module("torch_npu")
    return probe(torch_npu.__version__, schema_arguments(torch.ops))


def call(op: str, **wanted: Any) -> Any:
    """Call a torch_npu operator with the arguments that the installed version has."""
    return getattr(torch.ops.npu, op)(**installed().call_arguments(op, **wanted))


def missing(op: str, **wanted: Any) -> str | None:
    """Why the installed torch_npu cannot be called so, or None."""
    try:
        installed().call_arguments(op, **wanted)
    except RuntimeError as error:
        return str(error)
    return None


def on_host(x: Tensor) -> list[int]:
    """The numbers of a small tensor, for operators that take them as integers; waits for the device."""
    return [int(n) for n in x.tolist()]


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
