"""The CPU in the place of an NPU: operators choose for its tensors as they do for an NPU's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from whorl.device import BACKENDS
from whorl.ops import _op

Fallback = tuple[str, tuple[tuple[str, str], ...]]  # an operator, and why each backend was passed over


@contextmanager
def npu_is_at_home_on(device: str) -> Iterator[None]:
    npu = BACKENDS["torch_npu"]
    BACKENDS["torch_npu"] = replace(npu, home=device)
    try:
        yield
    finally:
        BACKENDS["torch_npu"] = npu


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
