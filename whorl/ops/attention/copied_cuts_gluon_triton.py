# mypy: allow-untyped-defs
"""Cuts of keys and values in shared memory, fetched by Hopper's copy engine (TMA), in Gluon.

A cut of 128 channels lies there as two tiles of 64, one behind the other, which is what the tensor cores read as one
tile of 128. The copy engine fetches boxes of up to 128 keys and 64 channels.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._gluon_triton import load_block, reinterpret, sync
from .._rows import Strides
from .copied_rows import apart

D = gl.constexpr(128)
HALF = gl.constexpr(64)  # channels of a box: 128 bytes
CUT = gl.constexpr(128)
FEW = gl.constexpr(8)  # keys that are cleared at once

TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_CLEAR = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


def described(x: Tensor, strides: Strides, box: int) -> tuple[TensorDescriptor, tuple[int, int, int]]:
    """Return the copy engine's description of x, of which it fetches so many rows at once, and `apart`.

    x: [blocks, tokens, heads, 128], whose `rows_reason` is None; strides: of its blocks, tokens and heads.
    """
    blocks, tokens, heads, channels = x.shape
    block, head_row, head_column = distances = apart(x.shape, strides)
    rows = (blocks - 1) * block + (heads - 1) * head_row + tokens
    shape = (rows, (heads - 1) * head_column + channels)
    return TensorDescriptor(x, shape, (strides[1], 1), [box, HALF.value], TILE.value), distances


@gluon.jit
def blocks_of(
    table_ptr, first, length, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, HAS_TABLE: gl.constexpr
):  # fmt: skip
    """The block of each box of a cut, or nothing where keys lie one after the other."""
    blocks = ()
    if HAS_TABLE:
        for at in gl.static_range(0, CUT, BOX):
            key = first + at
            block = gl.load(table_ptr + key // BLOCK_SIZE, mask=key < length, other=0)
            blocks = blocks + (block,)  # type: ignore[assignment]  # a tuple of another length
    return blocks


@gluon.jit
def load_cut(
    rows, tile, blocks, first, at_row, at_column, block_rows, ready, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
    HAS_TABLE: gl.constexpr,
):  # fmt: skip
    """Start loading the keys or values of a cut. Past the end of the sequence they are any keys or values."""
    mbarrier.expect(ready, CUT * D * 2)
    for at in gl.static_range(0, CUT, BOX):
        y = at_row + first + at
        if HAS_TABLE:
            y = at_row + blocks[at // BOX] * block_rows + (first + at) % BLOCK_SIZE
        load_block(rows, [y, at_column], ready, tile.slice(at, BOX, 0))
        load_block(rows, [y, at_column + HALF], ready, tile.slice(CUT + at, BOX, 0))


@gluon.jit
def clear(tile, first, length):
    """Set the values past the end of the sequence to zero: their weights are zero, but they may be infinite."""
    pieces = reinterpret(tile, tile.dtype, [2 * CUT // FEW, FEW, HALF], TILE)
    for i in range(0, 2 * CUT // FEW):
        keys = first + i * FEW % CUT + gl.arange(0, FEW, gl.SliceLayout(1, _CLEAR))
        values = pieces.index(i).load(_CLEAR)
        pieces.index(i).store(gl.where(gl.expand_dims(keys < length, 1), values, 0.0))
    fence_async_shared()
    sync()
