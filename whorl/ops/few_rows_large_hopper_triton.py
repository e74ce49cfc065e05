# mypy: allow-untyped-defs
"""Matrix products of up to 8 rows with large weights on Hopper, in Gluon: the weight flows through a ring.

few_rows_hopper_triton.py is for weights of which each multiprocessor holds its share. Larger ones pass through a ring
in shared memory: the copy engine (TMA) fills it before the program waits for the previous kernel, and refills every
slot as soon as it has been multiplied. With more tiles than multiprocessors, a program takes several, and the ring
never runs empty between them. The bits are equal to those of linear_triton.py.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ._gluon_triton import async_load, barriers, begin, entries_from, follow, load_block, reinterpret, sync
from ._hopper import MULTIPROCESSORS
from ._overlap_triton import overlap
from ._rows import ceil_div

ROWS = 8  # rows of x, at most
TILES = 4  # tiles of 64 channels in one slot of the ring
LEAST = 64 * TILES  # channels of a weight, at least
HEIGHTS = {64: (64, 1), 48: (16, 3), 32: (32, 1), 16: (16, 1)}  # rows of a program: as boxes of the copy engine
ROOM = 205 * 1024  # bytes of shared memory of one program, which leaves 20 KB for a small kernel beside it

TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _load_weight(
    weight, weights, bars, step, first, apart,
    TURNS: gl.constexpr, BOX: gl.constexpr, HIGH: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Start loading a step's part of the weight to its slot: TILES tiles, the HIGH boxes of each side by side."""
    slot, row, channel = step % SLOTS, first + step // TURNS * apart, step % TURNS * (64 * TILES)
    bar = bars.index(slot)
    mbarrier.expect(bar, BOX * HIGH * 64 * TILES * 2)
    for tile in gl.static_range(TILES):
        for i in gl.static_range(HIGH):
            into = weights.index((slot * TILES + tile) * HIGH + i)
            load_block(weight, [row + i * BOX, channel + tile * 64], bar, into)


@gluon.jit
def _copy_rows(x_ptr, xs, x_stride, T, step, TURNS: gl.constexpr, K: gl.constexpr):
    """Start copying a step's channels of x to its slot.

    Rows past the last one, and channels past K, keep what shared memory held: nobody reads what they would give.
    """
    wide: gl.constexpr = xs.shape[2]
    rows = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, COPY)), 1)
    k = gl.expand_dims(gl.arange(0, wide, gl.SliceLayout(0, COPY)), 0)
    k += step % TURNS * wide
    async_load(xs.index(step % xs.shape[0]), x_ptr + rows * (x_stride * 8) + k, (rows < T) & (k < K))


@gluon.jit
def _rows_of(weights, slot, tile: gl.constexpr, HIGH: gl.constexpr, TILES: gl.constexpr):
    """64 rows of shared memory from a tile's first one on; those after the tile's own are not used."""
    over: gl.constexpr = 64 // weights.shape[1]
    first: gl.constexpr = tile * HIGH % over
    count: gl.constexpr = (weights.shape[0] - first) // over
    rows = reinterpret(entries_from(weights, first, count * over), weights.dtype, [count, 64, 64], TILE)
    return rows.index(slot * (TILES * HIGH // over) + tile * HIGH // over)


@gluon.jit
def _multiply(weights, xs, y, slot, HIGH: gl.constexpr, TILES: gl.constexpr, COUNT: gl.constexpr):
    """Return y with the product of a slot's first COUNT tiles added."""
    tiles_of_x = reinterpret(xs, xs.dtype, [xs.shape[0] * TILES, 8, 64], TILE)
    for tile in gl.static_range(COUNT):
        x = tiles_of_x.index(slot * TILES + tile).permute((1, 0))
        y = warpgroup_mma(_rows_of(weights, slot, tile, HIGH, TILES), x, y, is_async=True)
    return warpgroup_mma_wait(0, [y])


@gluon.jit
def store(y_ptr, y, first, T, N, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, bias_ptr=None):
    """Store y plus the bias, [columns, rows], to [T, N]; COLUMNS from column `first` on and T rows are real."""
    columns = gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    rows = gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))
    to = y_ptr + gl.expand_dims(rows.to(gl.int64) * N, 0) + gl.expand_dims(first + columns, 1)
    is_column = (columns < COLUMNS) & (first + columns < N)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + first + columns, mask=is_column, other=0.0).to(gl.float32)
        y = y + gl.expand_dims(bias, 1)
    mask = gl.expand_dims(is_column, 1) & gl.expand_dims(rows < T, 0)
    gl.store(to, y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _ring_kernel(
    x_ptr, weight, bias_ptr, y_ptr, x_stride, T, N,
    K: gl.constexpr, BOX: gl.constexpr, HIGH: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Multiply up to 8 rows by every num_programs-th block of BOX * HIGH rows of the weight.

    The last turn of a block may have fewer tiles than the others; the copy engine writes zeros for those past K.
    x_stride is in units of 8 channels, so that the compiler knows it to be a multiple of 16 bytes.
    """
    height: gl.constexpr = BOX * HIGH
    turns: gl.constexpr = (K // 64 + TILES - 1) // TILES
    last: gl.constexpr = K // 64 - (turns - 1) * TILES
    first, apart = gl.program_id(0) * height, gl.num_programs(0) * height
    steps = (N - first + apart - 1) // apart * turns
    weights = gl.allocate_shared_memory(weight.dtype, [SLOTS * TILES * HIGH + 64 // BOX - HIGH, BOX, 64], TILE)
    xs = gl.allocate_shared_memory(weight.dtype, [SLOTS, 8, 64 * TILES], TILE)
    bars = barriers(SLOTS, 1)
    fence_async_shared()
    if OVERLAP != 2:  # the kernel before may have written the weight
        follow(OVERLAP)
    for step in range(gl.minimum(steps, SLOTS)):
        _load_weight(weight, weights, bars, step, first, apart, turns, BOX, HIGH, TILES, SLOTS)
    follow(OVERLAP)
    begin(OVERLAP)
    for step in gl.static_range(SLOTS):
        if step < steps:
            _copy_rows(x_ptr, xs, x_stride, T, step, turns, K)
        async_copy.commit_group()
    done = 0
    for row in range(first, N, apart):
        y = gl.zeros([64, 8], gl.float32, ACC)
        for turn in range(turns):
            async_copy.wait_group(SLOTS - 2)
            fence_async_shared()
            sync()
            new = done + SLOTS - 1  # takes the slot of the step before, which all warps have multiplied
            if (done > 0) & (new < steps):
                _load_weight(weight, weights, bars, new, first, apart, turns, BOX, HIGH, TILES, SLOTS)
                _copy_rows(x_ptr, xs, x_stride, T, new, turns, K)
            async_copy.commit_group()
            mbarrier.wait(bars.index(done % SLOTS), done // SLOTS & 1)
            if last == TILES:
                y = _multiply(weights, xs, y, done % SLOTS, HIGH, TILES, TILES)
            else:
                if turn < turns - 1:
                    y = _multiply(weights, xs, y, done % SLOTS, HIGH, TILES, TILES)
                else:
                    y = _multiply(weights, xs, y, done % SLOTS, HIGH, TILES, last)
            done += 1
        store(y_ptr, y, row, T, N, height, ACC, bias_ptr)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel takes these: few rows of a weight that leaves no multiprocessor without work, or whose
    length the other kernels for Hopper do not take."""
    count, length = x.shape
    is_aligned = not x.data_ptr() & 15 and (count == 1 or x.stride(0) % 8 == 0)
    is_apt = weight.shape[0] * 2 > MULTIPROCESSORS * min(HEIGHTS) or length % 512 != 0
    return is_aligned and 0 < count <= ROWS and length % 64 == 0 and length >= LEAST and is_apt


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, where `fits` is true."""
    columns, length = weight.shape
    height = _height(columns)
    box, high = HEIGHTS[height]
    y = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
    _ring_kernel[(min(ceil_div(columns, height), MULTIPROCESSORS),)](
        x, TensorDescriptor.from_tensor(weight, [box, 64], TILE.value), bias, y, x.stride(0) // 8, *y.shape,
        K=length, BOX=box, HIGH=high, TILES=TILES, SLOTS=_slots(height), num_warps=4, enable_fp_fusion=False,
        **overlap(x),
    )  # fmt: skip
    return y


def _height(columns: int) -> int:
    """Return the rows of the weight that a program takes at once: those with which the busiest one has least to do."""
    return min(HEIGHTS, key=lambda height: ceil_div(ceil_div(columns, height), MULTIPROCESSORS) * height)


def _slots(height: int) -> int:
    """Return how many slots of the ring shared memory has room for."""
    return (ROOM - (64 - height) * 128 - 1024) // (TILES * 128 * (height + ROWS))
