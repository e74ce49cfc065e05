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


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
