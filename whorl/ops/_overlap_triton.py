# mypy: allow-untyped-defs
"""Programmatic dependent launch (PDL): on Hopper a kernel is launched before the one before it has ended.

A decode step is some five hundred kernels of a few microseconds each, and the gaps between them cost up to a tenth of
the step. A kernel launched with `overlap(...)` calls `follow` before it reads what the step has computed or writes
anything.

A recorded graph of few tokens (`whorl.device.ahead`) goes further. Small kernels let the next kernel's programs start
at once (`begin`), and inputs that the step never writes (weights, block tables, lengths) are loaded or prefetched
before `follow`. Matrix products do not call `begin`: the programs of the next kernel would occupy their
multiprocessors.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from whorl.device import is_ahead, overlaps_kernels

FEW = 8  # tokens of a step whose kernels spend most of their time waiting


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait until every kernel launched before this one has ended (griddepcontrol.wait)."""
    if OVERLAP:
        cuda.gdc_wait()


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """The first statement of a small kernel: let the next kernel start. Loads before `follow` then run ahead.

    Unless the step runs ahead (OVERLAP 2) this waits as `follow` does.
    """
    if OVERLAP == 2:
        cuda.gdc_launch_dependents()
    elif OVERLAP:
        cuda.gdc_wait()


@triton.jit
def prefetch_lines(at):
    """Prefetch the cache lines at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


def overlap(x: Tensor) -> dict[str, Any]:
    """Return the launch arguments of PDL on x's device. x: [T, ...]; OVERLAP: 0 off, 1 wait first, 2 run ahead."""
    if not overlaps_kernels(x.device):
        return {"OVERLAP": 0}
    return {"OVERLAP": 2 if is_ahead() and x.shape[0] <= FEW else 1, "launch_pdl": True}
