"""Launching Triton kernels without looking for the compiled one anew: that takes Triton 20 microseconds and more.

`@launched` above `@triton.jit` leaves the launch as it is, `kernel[grid](...)`. The first launch of a kind goes through
Triton, which compiles and checks; the next of that kind call what it compiled. A kind tells apart at least what Triton
does: each constant and option, each tensor's dtype and whether its address is a multiple of 16 bytes, each integer's
being 1, a multiple of 16 or wider than 32 bits, each number's type. Settings of Triton that change how it compiles are
therefore those of the first launch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

Key = tuple[Any, ...]
MOST = 1024  # kinds of launches of a kernel
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_NUMBERS = frozenset((int, bool, type(None)))
_KIND = (
    "({0}.dtype, not {0}.data_ptr() & 15) if {0}.__class__ in _tensors else "
    "('wide' if {0} & 15 else 'whole') if {0}.__class__ is int and 1 < {0} < 2147483648 else "
    "float if {0}.__class__ is float else ({0}.__class__, {0}) if {0}.__class__ in _numbers else _unknown({0})"
)


class Compiled(NamedTuple):
    kernel: Any  # held, since its code is unloaded with it
    run: Callable[..., None]
    function: Any
    metadata: Any
    driver: Any


class Launched:
    """A kernel that remembers what Triton compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._describe = _describer(kernel)
        self._compiled: dict[Key, dict[int, Compiled]] = {}  # by kind and device

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of a kernel."""
        return getattr(self.kernel, name)

    def _launch(self, grid: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            key, values = self._describe(*args, **kwargs)
            found = self._compiled.get(key)
        except (TypeError, AttributeError):  # nothing of ours to launch: Triton knows it, or says what is wrong
            return self.kernel[grid](*args, **kwargs)
        if found is not None and self._is_as_compiled() and not callable(grid):
            active = driver.active
            device = active.get_current_device()
            compiled = found.get(device)
            if compiled is not None and compiled.driver is active:
                sizes, stream = (*grid, 1, 1)[:3], active.get_current_stream(device)
                compiled.run(*sizes, stream, compiled.function, compiled.metadata, None, None, None, *values)
                return compiled.kernel
        kernel = self.kernel[grid](*args, **kwargs)
        if kernel is not None:
            self._remember(key, kernel)
        return kernel

    def _is_as_compiled(self) -> bool:
        """Whether nobody watches launches, and globals are what they were: if not, Triton does what it does then."""
        runtime = knobs.runtime
        if _calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook) or self.kernel.pre_run_hooks:
            return False
        used = self.kernel.used_global_vals
        return not used or all(where.get(name) == value for (name, _), (value, where) in used.items())

    def _remember(self, key: Key, kernel: Any) -> None:
        if kernel.metadata.target.backend != "cuda":  # others tell more kinds apart
            return
        if len(self._compiled) >= MOST:
            self._compiled.clear()
        active = driver.active
        compiled = Compiled(kernel, kernel.run, kernel.function, kernel.packed_metadata, active)
        self._compiled.setdefault(key, {})[active.get_current_device()] = compiled


def launched(kernel: Any) -> Any:
    """The kernel with a memory; itself where Triton interprets it."""
    return Launched(kernel) if isinstance(kernel, JITFunction) else kernel


def _calls(hook: Any) -> Any:
    """A chain of hooks may be empty, and so may its place."""
    return getattr(hook, "calls", hook)


def _describer(kernel: Any) -> Callable[..., tuple[Key, tuple[Any, ...]]]:
    """A function made for this kernel's signature: the kind of a launch, and its arguments in the kernel's order."""
    parameters = kernel.params
    heading = ", ".join(p.name + (f"=_default_{p.name}" if p.has_default else "") for p in parameters)
    kinds = ", ".join(p.name if p.is_constexpr else _KIND.format(p.name) for p in parameters)
    text = (
        f"def describe({heading}, **_options):\n"
        f"    return ({kinds}, *_options.items()), ({', '.join(p.name for p in parameters)},)\n"
    )
    names: dict[str, Any] = {f"_default_{p.name}": p.default for p in parameters if p.has_default}
    names |= {"_tensors": _TENSORS, "_numbers": _NUMBERS, "_unknown": _unknown}
    exec(compile(text, f"<the arguments of {kernel.__name__}>", "exec"), names)
    describe: Callable[..., tuple[Key, tuple[Any, ...]]] = names["describe"]
    return describe


def _unknown(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is launched by Triton itself")
