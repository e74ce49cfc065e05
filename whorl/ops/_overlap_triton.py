# mypy: allow-untyped-defs
"""Programmatic dependent launch (PDL): on Hopper a kernel can start before the previous one has ended.

A decode step is some five hundred kernels of a few microseconds each, and the gaps between them cost up to a tenth of
the step. A kernel launched with `overlap(...)` must call `follow` before it reads anything that the step has computed
and before it writes anything.

A recorded graph of few tokens (`whorl.device.ahead`) goes further. Small kernels let the next kernel's programs start
at once (`begin`), and inputs that the step never writes (weights, block tables, lengths) are loaded or prefetched
before `follow`. Matrix products call `begin` after `follow`, once their own loads are on their way, so that launches
are no longer part of the chain; earlier, the programs of the next kernels would occupy their multiprocessors. Those of
packed experts, of 8-bit codes and of DeepSeek's heads do not: with it they were slower.
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
    """Let the next kernel start; the first statement of a small kernel, whose loads before `follow` may then run early.

    Unless the step runs ahead (OVERLAP 2), this waits as `follow` does, so that those loads do not run early.
    """
    if OVERLAP == 2:
        cuda.gdc_launch_dependents()
    elif OVERLAP:
        cuda.gdc_wait()


@triton.jit
def prefetch_lines(at):
    """Prefetch the cache lines at the addresses `at` into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


def overlap(x: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of a launch on x's device. x: [T, ...], whose T counts the tokens of the step."""
    return overlap_options(overlap_level(x))


def overlap_level(x: Tensor) -> int:
    """Return 0 where PDL is off, 1 where a kernel waits first, and 2 where it may run ahead."""
    if not overlaps_kernels(x.device):
        return 0
    return 2 if is_ahead() and x.shape[0] <= FEW else 1


def overlap_options(level: int) -> dict[str, Any]:
    """Return the keyword arguments of a launch at this `overlap_level`."""
    return {"OVERLAP": level, "launch_pdl": True} if level else {"OVERLAP": 0}
