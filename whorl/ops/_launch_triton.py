"""Launch Triton kernels without Triton's own lookup of the compiled kernel, which takes 20 microseconds and more.

`@launched` above `@triton.jit` leaves the launch syntax `kernel[grid](...)` as it is. The first launch of a kind goes
through Triton, which compiles and checks; later launches of that kind call the compiled kernel directly. The key of a
kind distinguishes at least what Triton specialises on: every constant and option, every tensor's dtype and whether its
address is a multiple of 16 bytes, whether an integer is 1, a multiple of 16 or wider than 32 bits, and the type of
every number. An argument that the kernel names in `do_not_specialize` or `do_not_specialize_on_alignment` counts for
as little as it does for Triton. Triton settings that change compilation are not part of the key: those of the first
launch stay in effect. Of a matrix described to the copy engine the key holds the dtype, the box and its layout.

Even that key takes 6 microseconds for a kernel of twenty arguments. Where everything but the tensors follows from the
shapes, `prepare` fixes the rest once, and a launch then looks at nothing but the tensors.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.language import constexpr
from triton.runtime import driver
from triton.runtime.jit import JITFunction

Key = tuple[Any, ...]
MAX_KINDS = 1024  # kinds of launches remembered for one kernel
_NONE = (None, ())  # in place of what was compiled for a device, where nothing was
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_NUMBERS = frozenset((int, bool, type(None)))
# The code of what an argument that is no constexpr contributes to the key: {tensor} for a tensor, {integer} for an
# integer above {lowest} and below 2^31. Any other integer, a bool and None count by value.
_KIND = (
    "{tensor} if {0}.__class__ in _tensors else {integer} if {0}.__class__ is int and {lowest} < {0} < 2147483648 else "
    "float if {0}.__class__ is float else ({0}.__class__, {0}) if {0}.__class__ in _numbers else _unknown({0})"
)
_ALIGNED = {
    "tensor": "({0}.dtype, not {0}.data_ptr() & 15)",
    "integer": "('wide' if {0} & 15 else 'whole')",  # a multiple of 16 is whole
    "lowest": "1",
}
_ANY_ALIGNMENT = {"tensor": "{0}.dtype", "integer": "int", "lowest": "1"}
_ANY_VALUE = _ANY_ALIGNMENT | {"lowest": "-2147483649"}


class Compiled(NamedTuple):
    """A kernel that Triton compiled, with the arguments of its launcher."""

    kernel: Any  # kept alive, because the device code is unloaded with this object
    run: Callable[..., None]
    function: Any
    metadata: Any
    driver: Any
    device: int


Remembered = tuple[Compiled, tuple[Any, ...]]  # what a kind of launch runs, and the arguments in order


class Launched:
    """A kernel that remembers what Triton compiled for each kind of launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._describe = _describer(kernel)
        self._compiled: dict[Key, dict[int, Compiled]] = {}  # by kind and device
        self._globals: list[tuple[dict[str, Any], str, Any]] = []  # those that the kernel uses, as last compared

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def __getattr__(self, name: str) -> Any:
        """Forward every other attribute to the kernel."""
        return getattr(self.kernel, name)

    def _launch(self, grid: Any, *args: Any, **kwargs: Any) -> Any:
        return self.launch(grid, args, kwargs)[0]

    def launch(self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Remembered | None]:
        """Launch the kernel; returns Triton's compiled kernel and, where launches of this kind are remembered, how."""
        try:
            key, values = self._describe(*args, **kwargs)
            by_device = self._compiled.get(key)
        except (TypeError, AttributeError):  # arguments with no key: Triton launches them, or reports what is wrong
            return self.kernel[grid](*args, **kwargs), None
        if by_device is not None and self.is_as_compiled() and not callable(grid):
            active = driver.active
            device = active.get_current_device()
            compiled = by_device.get(device)
            if compiled is not None and compiled.driver is active:
                sizes, stream = (*grid, 1, 1)[:3], active.get_current_stream(device)
                compiled.run(*sizes, stream, compiled.function, compiled.metadata, None, None, None, *values)
                return compiled.kernel, (compiled, values)
        kernel = self.kernel[grid](*args, **kwargs)
        compiled = None if kernel is None else self._remember(key, kernel)
        return kernel, None if compiled is None else (compiled, values)

    def is_as_compiled(self) -> bool:
        """Return whether no launch hook is set and the kernel's globals are unchanged; otherwise Triton must launch."""
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        # A chain of hooks has a list of them, which may be empty; an older Triton has one hook or None.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or self.kernel.pre_run_hooks:
            return False
        used = self.kernel.used_global_vals
        if len(self._globals) == len(used):  # layouts take a microsecond each to compare: first by identity
            for where, name, value in self._globals:
                if _unwrapped(where.get(name)) is not value:
                    break
            else:
                return True
        for (name, _), (value, where) in used.items():
            # Constants are compared by their values: their own comparison makes a constant of each and of the result.
            if _unwrapped(where.get(name)) != _unwrapped(value):
                return False
        self._globals = [(where, name, _unwrapped(where.get(name))) for (name, _), (_, where) in used.items()]
        return True

    def _remember(self, key: Key, kernel: Any) -> Compiled | None:
        if kernel.metadata.target.backend != "cuda":  # other backends specialise on more than our key holds
            return None
        if len(self._compiled) >= MAX_KINDS:
            self._compiled.clear()
        active = driver.active
        device = active.get_current_device()
        compiled = Compiled(kernel, kernel.run, kernel.function, kernel.packed_metadata, active, device)
        self._compiled.setdefault(key, {})[device] = compiled
        return compiled


class Prepared:
    """Launches of a kernel in which everything but the tensors is fixed. Call it with the tensors."""

    def __init__(
        self, kernel: Launched, grid: tuple[int, ...], numbers: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self._kernel, self._grid, self._numbers, self._options = kernel, (*grid, 1, 1)[:3], numbers, options
        # By dtypes and device; of the arguments those that follow the tensors.
        self._compiled: dict[Key | None, dict[int, Remembered]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        key = _tensor_describer(len(tensors))(*tensors)
        by_device = self._compiled.get(key)
        if by_device is not None and self._kernel.is_as_compiled():
            active = driver.active
            device = active.get_current_device()
            compiled, rest = by_device.get(device, _NONE)
            if compiled is not None and compiled.driver is active:
                stream = active.get_current_stream(device)
                compiled.run(
                    *self._grid, stream, compiled.function, compiled.metadata, None, None, None, *tensors, *rest
                )
                return
        self._launch(key, tensors)

    def _launch(self, key: Key | None, tensors: tuple[Tensor, ...]) -> None:
        """Launch through the kernel, which tells more kinds apart, and remember what it launched."""
        _, remembered = self._kernel.launch(self._grid, (*tensors, *self._numbers), self._options)
        if remembered is not None and key is not None:
            compiled, values = remembered
            self._compiled.setdefault(key, {})[compiled.device] = compiled, values[len(tensors) :]


def prepare(kernel: Any, grid: tuple[int, ...], *numbers: float, **options: Any) -> Callable[..., None]:
    """Return a function of a launch's tensors; everything else about the launch is fixed.

    kernel: what `launched` returned, with its tensors first. numbers: the arguments after the tensors, in order.
    options: the constants by name, and Triton's own options. Cache the result by what these follow from.
    """
    if isinstance(kernel, Launched):
        return Prepared(kernel, grid, numbers, options)
    return lambda *tensors: kernel[grid](*tensors, *numbers, **options)


@functools.cache
def _tensor_describer(count: int) -> Callable[..., Key | None]:
    """Generate a function of `count` tensors that returns their dtypes.

    It returns None where one is of a subclass or its address is not a multiple of 16 bytes, as nearly all are.
    """
    names = [f"x{i}" for i in range(count)]
    plain = " and ".join(f"{name}.__class__ in _tensors" for name in names)
    address = " | ".join(f"{name}.data_ptr()" for name in names)
    dtypes = ", ".join(f"{name}.dtype" for name in names)
    text = f"lambda {', '.join(names)}: ({dtypes},) if {plain} and not ({address}) & 15 else None"
    describe: Callable[..., Key | None] = eval(text, {"_tensors": _TENSORS})
    return describe


def launched(kernel: Any) -> Any:
    """Wrap a kernel in `Launched`; under Triton's interpreter return it unchanged."""
    return Launched(kernel) if isinstance(kernel, JITFunction) else kernel


def _unwrapped(value: Any) -> Any:
    return value.value if value.__class__ is constexpr else value


def _describer(kernel: Any) -> Callable[..., tuple[Key, tuple[Any, ...]]]:
    """Generate a function with this kernel's signature that returns the key of a launch and its arguments in order."""
    parameters = kernel.params
    heading = ", ".join(p.name + (f"=_default_{p.name}" if p.has_default else "") for p in parameters)
    kinds = ", ".join(p.name if p.is_constexpr else _kind(p) for p in parameters)
    text = (
        f"def describe({heading}, **_options):\n"
        f"    return ({kinds}, *_options.items()), ({', '.join(p.name for p in parameters)},)\n"
    )
    names: dict[str, Any] = {f"_default_{p.name}": p.default for p in parameters if p.has_default}
    names |= {"_tensors": _TENSORS, "_numbers": _NUMBERS, "_unknown": _unknown}
    exec(compile(text, f"<the arguments of {kernel.__name__}>", "exec"), names)
    describe: Callable[..., tuple[Key, tuple[Any, ...]]] = names["describe"]
    return describe


def _kind(parameter: Any) -> str:
    """Return the code of what this parameter's argument contributes to the key."""
    if parameter.do_not_specialize:
        codes = _ANY_VALUE
    else:
        codes = _ANY_ALIGNMENT if parameter.do_not_specialize_on_alignment else _ALIGNED
    return _KIND.format(parameter.name, **{name: code.format(parameter.name) for name, code in codes.items()})


def _unknown(value: Any) -> Any:
    """Return the kind of a matrix that the copy engine fetches boxes of; anything else is left to Triton."""
    if value.__class__.__name__ == "TensorDescriptor":
        rounds = getattr(value, "round_f32_to_tf32", False)  # newer releases of Triton
        return (value.base.dtype, *value.block_shape, value.layout, value.padding, rounds)
    raise TypeError(f"a {type(value).__name__} is launched by Triton itself")
