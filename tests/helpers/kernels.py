"""Run a test without whorl's CPU kernels, as on a machine without a compiler."""

import contextlib
from collections.abc import Iterator

from whorl.ops import OPS
from whorl.ops.cpu import library


def _forget_choices() -> None:
    for op in OPS.values():
        op._on_host = None
        op._plans.clear()


@contextlib.contextmanager
def without_cpu_kernels() -> Iterator[None]:
    """Let operators and loaders find no library inside the block."""
    outcome = library._loaded
    library._loaded = lambda: (None, "switched off by a test")  # type: ignore[assignment]
    _forget_choices()
    try:
        yield
    finally:
        library._loaded = outcome
        _forget_choices()
