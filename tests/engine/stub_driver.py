"""A driver for Triton without a GPU: kernels are compiled for Hopper, and their launches recorded instead of run."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

# Triton's interpreter may leave its own functions in these; a compiler needs the originals.
_PLACES = (tl, tl.core, tl.math, tl.core.tensor, tl.core.dtype)
_ORIGINALS = [(place, dict(vars(place))) for place in _PLACES]


def _restore_language() -> None:
    for place, members in _ORIGINALS:
        for name, value in members.items():
            if vars(place).get(name) is not value:
                setattr(place, name, value)


class Launch(NamedTuple):
    function: Any
    grid: tuple[int, int, int]
    stream: Any
    args: tuple[Any, ...]


class Utils:
    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        return object(), object(), 32, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module: Any) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}


class StubDriver:
    def __init__(self) -> None:
        self.device, self.stream = 0, 7
        self.launches: list[Launch] = []
        self.utils = Utils()

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def run(x: int, y: int, z: int, stream: Any, function: Any, packed: Any, *hooks_and_args: Any) -> None:
            about, enter, leave, *args = hooks_and_args
            if enter is not None:
                enter(about)
            self.launches.append(Launch(function, (x, y, z), stream, tuple(args)))
            if leave is not None:
                leave(about)

        return run


@contextlib.contextmanager
def stub_driver(*kernels: Any) -> Iterator[StubDriver]:
    """In the block `kernels` are compiled and launched here, from nothing."""
    _restore_language()
    before, stub = driver._active, StubDriver()
    driver.set_active(stub)
    for kernel in kernels:
        kernel.device_caches.clear()
    try:
        yield stub
    finally:
        for kernel in kernels:
            for compiled in (c for cache in kernel.device_caches.values() for c in cache[0].values()):
                compiled.module = None  # nothing is loaded that could be unloaded
            kernel.device_caches.clear()
        driver._active = before
