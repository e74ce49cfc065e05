# mypy: allow-untyped-defs
"""Row sums whose bits are equal in every kernel.

`tl.sum` adds in an order that follows from the compiler's layout, that is from the number of warps that share a row
and from the width of the loads. Here every step adds pairs of numbers, so that the tree of additions is fixed.
"""

import triton
import triton.language as tl


@triton.jit
def row_sum(x, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """Return the sums [ROWS] of the rows of x [ROWS, LENGTH], LENGTH a power of two.

    First neighbours are added until each run of 8 numbers is one sum; then the second half of the sums is added to the
    first half until 32 are left; then neighbours again. In the usual layout these steps add the 16 bytes of a thread,
    then its further loads and the warps, then the lanes, so no more data moves between threads than in a plain sum.
    """
    few: tl.constexpr = max(1, LENGTH // 8)
    x = _add_neighbours(x, ROWS, LENGTH, few)
    x = halves(x, ROWS, few, min(few, 32))
    return tl.reshape(_add_neighbours(x, ROWS, min(few, 32), 1), (ROWS,))


@triton.jit
def _add_neighbours(x, ROWS: tl.constexpr, LENGTH: tl.constexpr, LEFT: tl.constexpr):
    """Return [ROWS, LEFT], in which each entry is the sum of LENGTH / LEFT neighbours of x [ROWS, LENGTH]."""
    if LENGTH == LEFT:
        return x
    else:
        return _add_neighbours(tl.sum(tl.reshape(x, (ROWS, LENGTH // 2, 2)), 2), ROWS, LENGTH // 2, LEFT)


@triton.jit
def halves(x, ROWS: tl.constexpr, LENGTH: tl.constexpr, LEFT: tl.constexpr):
    """Return [ROWS, LEFT], in which entry i is the sum of entries i, i + LEFT, i + 2 LEFT, ... of x [ROWS, LENGTH]."""
    if LENGTH == LEFT:
        return x
    else:
        return halves(tl.sum(tl.reshape(x, (ROWS, 2, LENGTH // 2)), 1), ROWS, LENGTH // 2, LEFT)
