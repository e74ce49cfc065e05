"""Rows further apart than 32-bit offsets reach, read and written by interpreted kernels: no GPU, and hardly any memory.

The rows of an argument are spread over a mapping of several GB of which only the pages that hold a row ever exist.
"""

import mmap

import pytest
import torch
from torch import Tensor

from whorl.ops import OPS, Op

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

APART = 2**30  # elements: the third row begins where a signed 32-bit offset has wrapped around


def spread(x: Tensor) -> Tensor:
    """x with its rows APART from each other."""
    length = (x.shape[0] - 1) * APART + x[0].numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, length * x.element_size(), flags=flags)
    flat = torch.frombuffer(memory, dtype=x.dtype)
    far = flat.as_strided(x.shape, (APART, *x[0].contiguous().stride()))
    far.copy_(x)
    return far


def is_spreadable(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 2 and 3 <= x.shape[0] <= 8


def case_of(op: Op) -> dict:
    """Arguments of the first case that has rows to spread."""
    for case in op.cases:
        torch.manual_seed(0)
        values = op._bind((), op.make(**case, dtype=torch.float16, device="cpu"))
        reason = op.impls["triton"].accepts(**values) if op.impls["triton"].accepts else None
        if reason is None and any(is_spreadable(v) for v in values.values()):
            return values
    raise AssertionError(f"{op.name}: no case has between three and eight rows")


def answer(op: Op, values: dict) -> list[Tensor]:
    out = op(**values, backend="triton")
    outputs = [values[name] for name in op.mutates] if op.mutates else out if isinstance(out, tuple) else [out]
    return [t.clone() for t in outputs if t is not None]


KERNELS = [name for name, op in OPS.items() if "triton" in op.impls]
# Every second one in the quick tests.
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if i % 2 else []) for i, name in enumerate(KERNELS)]


@pytest.mark.parametrize("name", NAMES)
def test_rows_far_apart_are_found(name: str) -> None:
    op = OPS[name]
    values = case_of(op)
    near = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
    far = {n: spread(v) if is_spreadable(v) else v for n, v in values.items()}
    for got, expected in zip(answer(op, far), answer(op, near), strict=True):
        assert torch.equal(got, expected)
