# mypy: allow-untyped-defs
"""Kernels that follow each other closely: on Hopper the next one is launched before the last has quite ended.

A decode step is some five hundred kernels of a few microseconds each, and the gaps between them cost as much as a
tenth of the work. A kernel launched with `overlap(...)` calls `follow` before it reads what the step has computed or
writes anything.

In a recorded step of few tokens (`whorl.device.ahead`) there is more: small kernels let the programs of those behind
them start when they do themselves (`begin`), and what the step only reads - weights, block tables, lengths - is read
or asked for before `follow`. Products do not: where they did, what came behind them took their room.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from whorl.device import is_ahead, overlaps_kernels

FEW = 8  # tokens of a step whose kernels are mostly waiting


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Everything launched before this kernel is done."""
    if OVERLAP:
        cuda.gdc_wait()


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Of a small kernel, before all else. What is between this and `follow` is read ahead where a step allows it."""
    if OVERLAP == 2:
        cuda.gdc_launch_dependents()
    elif OVERLAP:
        cuda.gdc_wait()


@triton.jit
def ask(at):
    """Let the second level cache fetch the lines at these addresses."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


def overlap(x: Tensor) -> dict[str, Any]:
    """Arguments of a launch on x's device; x: [tokens, ...]."""
    if not overlaps_kernels(x.device):
        return {"OVERLAP": 0}
    return {"OVERLAP": 2 if is_ahead() and x.shape[0] <= FEW else 1, "launch_pdl": True}
