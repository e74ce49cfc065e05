# mypy: allow-untyped-defs
"""Row sums whose bits are equal in every kernel.

`tl.sum` adds in an order that follows from the compiler's layout: how many warps share a row, and how wide the loads
are. Here the tree of additions is written out, two numbers at a time, so the order is fixed.
"""

import triton
import triton.language as tl


@triton.jit
def row_sum(x, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """Sums [ROWS] along x [ROWS, LENGTH], LENGTH a power of two.

    Runs of 8 are added as neighbours, their sums by halves until 32 are left, and those as neighbours. In the usual
    layout these are the 16 bytes of a thread, then its further loads and the warps, then the lanes, so no more data
    moves between threads than in a plain sum.
    """
    few: tl.constexpr = max(1, LENGTH // 8)
    x = _add_neighbours(x, ROWS, LENGTH, few)
    x = halves(x, ROWS, few, min(few, 32))
    return tl.reshape(_add_neighbours(x, ROWS, min(few, 32), 1), (ROWS,))


@triton.jit
def _add_neighbours(x, ROWS: tl.constexpr, LENGTH: tl.constexpr, LEFT: tl.constexpr):
    """[ROWS, LEFT]: each entry is the sum of LENGTH / LEFT neighbours."""
    if LENGTH == LEFT:
        return x
    else:
        return _add_neighbours(tl.sum(tl.reshape(x, (ROWS, LENGTH // 2, 2)), 2), ROWS, LENGTH // 2, LEFT)


@triton.jit
def halves(x, ROWS: tl.constexpr, LENGTH: tl.constexpr, LEFT: tl.constexpr):
    """[ROWS, LEFT]: each entry is the sum of the entries that lie LEFT apart."""
    if LENGTH == LEFT:
        return x
    else:
        return halves(tl.sum(tl.reshape(x, (ROWS, 2, LENGTH // 2)), 1), ROWS, LENGTH // 2, LEFT)
