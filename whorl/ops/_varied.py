"""Whether the sizes of calls vary from call to call, so that launchers should choose kernels that suit all sizes."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_is_varied: ContextVar[bool] = ContextVar("is_varied", default=False)


@contextlib.contextmanager
def varied() -> Iterator[None]:
    """Let launches inside use kernels that suit all sizes, not those that are compiled for this one. Bits are equal.

    The engine runs steps that it does not record in it: they may have any size, and are served by so few kernels that
    its warm-up compiles all of them.
    """
    token = _is_varied.set(True)
    try:
        yield
    finally:
        _is_varied.reset(token)


def is_varied() -> bool:
    """Return whether the kernels launched now belong to calls inside `varied`."""
    return _is_varied.get()
