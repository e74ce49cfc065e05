"""Whether the Gluon kernels for Hopper can run on a device."""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from whorl.device import compute_capability, is_installed, is_interpreting

HOPPER = (9, 0)
MULTIPROCESSORS = 132  # of an H100 or H200 as cards are sold; another number costs speed alone


def gluon_reason(device: torch.device) -> str | None:
    """Return None if the Gluon kernels can run, else the reason that the plain Triton kernels run instead."""
    if compute_capability(device) != HOPPER:
        return f"written for Hopper, got {device}"
    if is_interpreting():
        return "Triton's interpreter cannot run Gluon"
    return None if is_installed("triton.experimental.gluon") else "this Triton has no Gluon"


def on_hopper(module: str, fits: str = "fits") -> Callable[..., ModuleType | None]:
    """Return a function that returns this module of Gluon kernels, or None where other kernels must run.

    It takes the arguments of the module's function `fits`, which says whether the kernels take them; the first is a
    tensor on the device. The module is imported on the first device that can run it.
    """
    load = functools.cache(lambda: importlib.import_module(module))

    def choose(x: Tensor, *others: Any) -> ModuleType | None:
        if gluon_reason(x.device) is not None:
            return None
        kernels = load()
        return kernels if getattr(kernels, fits)(x, *others) else None

    return choose
