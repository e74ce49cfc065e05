# mypy: allow-untyped-defs
"""The Triton kernel of small_copy.py."""

import triton
import triton.language as tl
from torch import Tensor

from whorl.ops._launch_triton import launched
from whorl.ops._rows import ceil_div

BLOCK = 2048


@launched
@triton.jit
def _copy_kernel(source_ptr, to_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(source_ptr + at, mask=at < count), mask=at < count)


def copy(source: Tensor, to: Tensor) -> None:
    """Copy the bytes of `source` to `to`."""
    count = source.numel()
    _copy_kernel[(ceil_div(count, BLOCK),)](source, to, count, BLOCK=BLOCK, num_warps=4)
