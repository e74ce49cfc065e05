# mypy: allow-untyped-defs
"""What the Triton kernels of the gated delta rule share: `arithmetic.py` by chunks and by rows, and where chunks lie.

Products run on tensor cores, where the bits of a row do not depend on the tile, on which side an operand is, or on
exact zeros among its terms. Every other sum has one order, and kernels are compiled without FMA fusion.
"""

import triton
import triton.language as tl

from .layout import BLOCK as ROWS_OF_BLOCK
from .layout import CHUNK as ROWS_OF_CHUNK

CHUNK = tl.constexpr(ROWS_OF_CHUNK)
BLOCK = tl.constexpr(ROWS_OF_BLOCK)
BLOCKS = tl.constexpr(ROWS_OF_CHUNK // ROWS_OF_BLOCK)


@triton.jit
def chunks_before(starts_ptr, lengths_ptr, b, B, BLOCK_B: tl.constexpr):
    """Return the number of chunks of sequences 0 to b (exclusive) that begin at a multiple of CHUNK.

    lengths_ptr: tokens of each sequence, these included; None: every sequence begins at 0.
    """
    index = tl.arange(0, BLOCK_B)
    return tl.sum(tl.where(index < b, _chunks_of(starts_ptr, lengths_ptr, index, B), 0), 0)


@triton.jit
def locate(starts_ptr, lengths_ptr, c, B, BLOCK_B: tl.constexpr):
    """Return the sequence that chunk c belongs to, B if there is none, and the chunk's number in it."""
    index = tl.arange(0, BLOCK_B)
    counts = _chunks_of(starts_ptr, lengths_ptr, index, B)
    ends = tl.cumsum(counts, 0)
    b = tl.sum((ends <= c).to(tl.int32), 0)
    return tl.where(c < tl.sum(counts, 0), b, B), c - tl.sum(tl.where(index < b, counts, 0), 0)


@triton.jit
def _chunks_of(starts_ptr, lengths_ptr, index, B):
    counts = tl.load(starts_ptr + index + 1, mask=index < B, other=0) - tl.load(
        starts_ptr + index, mask=index < B, other=0
    )
    chunks = (counts + CHUNK - 1) // CHUNK
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + index, mask=index < B, other=0)
        chunks = tl.where((length - counts) % CHUNK == 0, chunks, 0)
    return chunks


@triton.jit
def load_rows(x_ptr, rows, stride, is_real, columns, size):
    """Load [rows, columns] of a matrix with unit stride along columns; zero where is_real is not, and past `size`."""
    at = x_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(at, mask=is_real[:, None] & (columns < size)[None, :], other=0.0)


@triton.jit
def unknown_zeros(at, M: tl.constexpr, N: tl.constexpr):
    """Return zeros [M, N] that the compiler does not see through; at: a number that is not negative.

    What is added to a product that starts from known zeros becomes its start, and the sum is rounded in another place.
    """
    return tl.zeros((M, N), tl.float32) + tl.where(at < 0, 1.0, 0.0)


@triton.jit
def decays_of(g_ptr, first, count, stride):
    """Return the sums G [CHUNK] of a chunk from its start; those after `count` rows are as the last."""
    index = tl.arange(0, CHUNK)
    total, sums = 0.0, tl.zeros((CHUNK,), tl.float32)
    for i in range(CHUNK):
        total += tl.load(g_ptr + (first + i).to(tl.int64) * stride, mask=i < count, other=0.0)
        sums = tl.where(index == i, total, sums)
    return sums


@triton.jit
def row_of_inverse(weights, inverse, is_own, N: tl.constexpr):
    """Return a row of t [N, BLOCK] from the row of L, weights [N, BLOCK], and the rows before it, [N, BLOCK, BLOCK].

    is_own: which column is the row's own, [1, BLOCK].
    """
    x = weights[:, :, None] * inverse
    x = _halve(_halve(_halve(_halve(x, N, BLOCK), N, BLOCK // 2), N, BLOCK // 4), N, BLOCK // 8)
    return is_own.to(tl.float32) - tl.reshape(x, (N, BLOCK))


@triton.jit
def _halve(x, N: tl.constexpr, ROWS: tl.constexpr):
    """Add the second half of the rows of x [N, ROWS, BLOCK] to the first."""
    return tl.sum(tl.reshape(x, (N, 2, ROWS // 2, BLOCK)), 1)


@triton.jit
def entry(x, at, N: tl.constexpr):
    """Return x[at, :] of [N, C] as [C]: exact, since all other terms are zero."""
    return tl.sum(tl.where((tl.arange(0, N) == at)[:, None], x, 0.0), 0)
