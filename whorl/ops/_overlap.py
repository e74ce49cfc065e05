"""Kernels that follow each other closely: on Hopper the next one is launched while the last is finishing.

A decode step is some five hundred kernels of a few microseconds each, and the gaps between them would cost as much as
a tenth of the work. A kernel launched with `overlap(...)` calls `follow` before it reads what others wrote or writes
anything. It waits first and only then lets its successor start: whoever starts may rely on all but its predecessor.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from whorl.device import overlaps_kernels


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Everything launched before this kernel is done; the next one may start."""
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def prefetch(at, OVERLAP: tl.constexpr):
    """Ask for the lines of these addresses before `follow`.

    They go no further than the second-level cache, where all writes of a kernel still running arrive too: it does not
    matter who wrote them.
    """
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


def overlap(x: Tensor) -> dict[str, Any]:
    """Arguments of a launch on x's device."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps_kernels(x.device) else {"OVERLAP": False}
