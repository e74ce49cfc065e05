"""Queries, keys and values as the rows of a matrix, from which Hopper's copy engine (TMA) fetches boxes.

The tensors are [blocks, tokens, heads, channels]. A row is what lies between a token and the next one, so that a block
begins some rows after the block before, and a head some rows or some columns after the head before.
"""

from collections.abc import Sequence

from .._rows import Strides

FEWEST_KEYS = 8  # in a box; shared memory is swizzled 8 rows at a time
_MOST_KEYS = 128  # in a box: those of a cut


def box_of(block_size: int) -> int:
    """Return how many keys of a block are fetched at once: the largest power of two that divides it, up to a cut."""
    return min(block_size & -block_size, _MOST_KEYS)


def rows_reason(shape: Sequence[int], strides: Strides) -> str | None:
    """Return None if a tensor with these strides of blocks, tokens and heads lies in rows, else the reason."""
    (blocks, _, heads, channels), (block, row, head) = shape, strides
    if row < channels:
        return f"copies rows of {channels} channels, but tokens lie {row} elements apart"
    if blocks > 1 and block % row:
        return f"copies whole rows, but blocks lie {block} elements apart, and tokens {row}"
    if heads > 1 and head > row and head % row:
        return f"copies whole rows, but heads lie {head} elements apart, and tokens {row}"
    return None


def apart(shape: Sequence[int], strides: Strides) -> tuple[int, int, int]:
    """Return how many rows lie between blocks, and how many rows and columns between heads; `rows_reason` is None."""
    (blocks, _, heads, _), (block, row, head) = shape, strides
    rows = block // row if blocks > 1 else 0
    if heads == 1:
        return rows, 0, 0
    return (rows, head // row, 0) if head >= row else (rows, 0, head)
