"""The only file that says cuda, npu or cpu: what is here, which backend may run where, how to wait for it."""

import functools
import importlib.util
import os
import platform
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

BACKENDS = ("torch", "triton", "torch_npu")
DEVICES = ("cpu", "cuda", "npu")
HOST = "cpu"
HOME = {"triton": "cuda", "torch_npu": "npu"}  # the device each accelerated backend is written for


def is_interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter: on any device, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def unavailable(backend: str, device: str, *, asked: bool = False) -> str | None:
    """None when `backend` can run on tensors of `device`, else the reason it cannot.

    The interpreter is offered only when the backend was asked for by name.
    """
    if backend == "torch":
        return None
    if not is_installed(backend):
        return f"{backend} is not installed"
    home = HOME[backend]
    if device == home:
        return None
    if backend == "triton" and is_interpreting():
        return None if asked else "interpreted Triton runs only when asked for"
    return f"runs on {home}, got {device}"


def accelerator(device: str) -> ModuleType | None:
    """torch.cuda or torch.npu, or None for the CPU."""
    return None if device == "cpu" else getattr(torch, device, None)


@functools.cache
def default_device() -> str:
    """The best device of this machine."""
    for device in ("cuda", "npu"):
        module = accelerator(device)
        if module is not None and module.is_available():
            return device
    return "cpu"


def require(device: str) -> str:
    """`device` itself, or a ValueError that says what this machine has."""
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not one of {', '.join(DEVICES)}")
    module = accelerator(device)
    if device != "cpu" and (module is None or not module.is_available()):
        raise ValueError(f"device {device!r} was asked for; this machine has {default_device()!r} only")
    return device


def synchronize(device: str) -> None:
    module = accelerator(device)
    if module is not None:
        module.synchronize()


def fp64_home(device: str) -> str:
    """Where fp64 arithmetic is done for tensors of `device`: Ascend leaves most of it to the host."""
    return HOST if device == "npu" else device


def timing_event(device: str) -> Any:
    """An event to record in the stream of an accelerator; two of them give the milliseconds between."""
    module = accelerator(device)
    assert module is not None, "the CPU has no streams"
    return module.Event(enable_timing=True)


def record_graph(device: str, function: Callable[[], Any]) -> Callable[[], None] | None:
    """The replay of everything `function` launches, or None where the device records no graphs."""
    module = accelerator(device)
    graph_class = getattr(module, {"cuda": "CUDAGraph", "npu": "NPUGraph"}.get(device, ""), None)
    if module is None or graph_class is None:
        return None
    graph = graph_class()
    with module.graph(graph):
        function()
    return graph.replay


def device_name(device: str) -> str:
    module = accelerator(device)
    return platform.processor() or platform.machine() if module is None else str(module.get_device_name())


def versions() -> dict[str, str]:
    """Versions that matter in a bug report."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "torch_npu", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, counted in multiprocessors or vector cores; 4 where there is no such thing."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4
