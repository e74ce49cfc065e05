# mypy: allow-untyped-defs
"""Sums along a row with one answer, whatever kernel they are taken in.

The order in which `tl.sum` adds is that of the compiler's layout: of how many warps share a row and how wide it is
read. The sum of two numbers has one answer, so the tree is written out, two by two.
"""

import triton
import triton.language as tl


@triton.jit
def row_sum(x, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """[ROWS] of [ROWS, LENGTH], a power of two: runs of 8 two by two, then the runs' sums by halves until 32 are left,
    those two by two.

    That is a thread's 16 bytes, its further reads and the warps, then the lanes, in the usual layout: none of it moves
    data between threads that a plain sum would not.
    """
    few: tl.constexpr = max(1, LENGTH // 8)
    x = _neighbours(x, ROWS, LENGTH, few)
    x = halves(x, ROWS, few, min(few, 32))
    return tl.reshape(_neighbours(x, ROWS, min(few, 32), 1), (ROWS,))


@triton.jit
def _neighbours(x, ROWS: tl.constexpr, LENGTH: tl.constexpr, LEFT: tl.constexpr):
    """[ROWS, LEFT]: each adds LENGTH / LEFT neighbours."""
    if LENGTH == LEFT:
        return x
    else:
        return _neighbours(tl.sum(tl.reshape(x, (ROWS, LENGTH // 2, 2)), 2), ROWS, LENGTH // 2, LEFT)


@triton.jit
def halves(x, ROWS: tl.constexpr, LENGTH: tl.constexpr, LEFT: tl.constexpr):
    """[ROWS, LEFT]: each adds what is LEFT apart."""
    if LENGTH == LEFT:
        return x
    else:
        return halves(tl.sum(tl.reshape(x, (ROWS, 2, LENGTH // 2)), 1), ROWS, LENGTH // 2, LEFT)
