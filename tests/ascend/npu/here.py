"""The CPU in the place of an NPU: operators choose for its tensors as they do for an NPU's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from whorl.device import BACKENDS
from whorl.ops import OPS, _op

Fallback = tuple[str, tuple[tuple[str, str], ...]]  # an operator, and why each backend was passed over


@contextmanager
def npu_is_at_home_on(device: str) -> Iterator[None]:
    """Backends that are written for that device have no other meanwhile."""
    before = dict(BACKENDS)
    for name, backend in before.items():
        if backend.home == device:
            BACKENDS[name] = replace(backend, home="nowhere")
    BACKENDS["torch_npu"] = replace(before["torch_npu"], home=device)
    forget_choices()
    try:
        yield
    finally:
        BACKENDS.update(before)
        forget_choices()


def forget_choices() -> None:
    """Else calls of a kind that was seen before would run what ran then."""
    for op in OPS.values():
        op._on_host = None
        op._plans.clear()


@contextmanager
def cpu_is_npu() -> Iterator[list[Fallback]]:
    """Operators that fall back to plain torch meanwhile are in the list, every time that they do."""
    fallbacks: list[Fallback] = []
    host, warn = _op.HOST, _op._warn_fallback
    _op.HOST = "nowhere"  # where the reference is all there is
    _op._warn_fallback = lambda name, device, reasons: fallbacks.append((name, reasons))
    try:
        with npu_is_at_home_on("cpu"):
            yield fallbacks
    finally:
        _op.HOST, _op._warn_fallback = host, warn
