"""The CPU in the place of an NPU: operators choose for its tensors as they do for an NPU's."""

from collections.abc import Iterator
from contextlib import contextmanager

import whorl.device
from whorl.ops import _op

Fallback = tuple[str, tuple[tuple[str, str], ...]]  # an operator, and why each backend was passed over


@contextmanager
def cpu_is_npu() -> Iterator[list[Fallback]]:
    """Operators that fall back to plain torch meanwhile are in the list, every time that they do."""
    fallbacks: list[Fallback] = []
    host, warn = _op.HOST, _op._warn_fallback
    whorl.device.HOME["torch_npu"] = "cpu"
    _op.HOST = "nowhere"  # where the reference is all there is
    _op._warn_fallback = lambda name, device, reasons: fallbacks.append((name, reasons))
    try:
        yield fallbacks
    finally:
        whorl.device.HOME["torch_npu"] = "npu"
        _op.HOST, _op._warn_fallback = host, warn
