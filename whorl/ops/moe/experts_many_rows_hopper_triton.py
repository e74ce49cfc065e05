# mypy: allow-untyped-defs
"""The two products of `experts` for many tokens on Hopper, in Gluon: a producer loads for two consumer warpgroups.

A tile has 128 rows of one expert and 256 rows of its weight. Each program computes several tiles, one after the other:
the producer gathers rows with asynchronous copies, has the copy engine (TMA) load the weight, and goes on to the next
tile while the consumers store the last one. The bits are those of experts_many_tokens_triton.py.
"""

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

from .._gluon_triton import add, async_load, barriers, follow, load_block, reinterpret, sync, tell
from .._hopper import MULTIPROCESSORS
from .._overlap_triton import overlap
from .._rows import ceil_div, power_of_2

STAGES = 4  # blocks of channels in shared memory
REGISTERS = 216  # per thread of a consumer; 80 are left for the producer's threads

ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)  # rows of one consumer
BOX = gl.constexpr(128)  # rows of the weight that the copy engine loads at once, twice for a tile
BLOCK = gl.constexpr(64)  # channels
ENDLESS = gl.constexpr(1 << 30)

_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
# For stores of 16 bytes: threads of the tensor cores' layout exchange values with three neighbours alone.
_LANES, _WARPS = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
_NARROW = [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]]
_STORE_128 = gl.constexpr(gl.DistributedLinearLayout(_NARROW, _LANES, _WARPS, [], [64, 128]))
_STORE_256 = gl.constexpr(gl.DistributedLinearLayout([*_NARROW, [0, 128]], _LANES, _WARPS, [], [64, 256]))


@gluon.jit
def _count_tiles(counts_ptr, E, BLOCK_E: gl.constexpr):
    """Running totals over experts, of tiles and of rows; every warp holds all of them."""
    index = gl.arange(0, BLOCK_E, gl.BlockedLayout([BLOCK_E // 32], [32], [4], [0]))
    counts = gl.load(counts_ptr + index, mask=index < E, other=0)
    return gl.associative_scan((counts + ROWS - 1) // ROWS, 0, add), gl.associative_scan(counts, 0, add)


@gluon.jit
def _find_tile(tile, tiles_until, rows_until):
    """A tile's expert, its first row among the sorted pairs, and how many rows the expert has from there on."""
    is_before = tiles_until <= tile
    expert = gl.sum(is_before.to(gl.int32), 0)
    first = gl.max(gl.where(is_before, rows_until, 0), 0)
    end = gl.min(gl.where(is_before, ENDLESS, rows_until), 0)
    first += (tile - gl.max(gl.where(is_before, tiles_until, 0), 0)) * ROWS
    return expert, first, end - first


@gluon.jit
def _producer(
    x_ptr, weight, order_ptr, counts_ptr, xs, ws, ready, free, x_stride, choices, E, weight_rows, second,
    BLOCKS: gl.constexpr, COLUMN_TILES: gl.constexpr, WIDTH: gl.constexpr, BLOCK_E: gl.constexpr,
    ACTIVATE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    boxes = reinterpret(ws, weight.dtype, [2 * STAGES, BOX, BLOCK], _TILE)
    tiles_until, rows_until = _count_tiles(counts_ptr, E, BLOCK_E)
    total = gl.max(tiles_until, 0) * COLUMN_TILES
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, _COPY))
    channels = gl.expand_dims(gl.arange(0, BLOCK, gl.SliceLayout(0, _COPY)), 0)
    done = 0  # blocks
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, count = _find_tile(work // COLUMN_TILES, tiles_until, rows_until)
        is_row = rows < count
        row = first + rows
        if ACTIVATE:
            row = gl.load(order_ptr + row, mask=is_row, other=0) // choices
        x_at = gl.expand_dims(x_ptr + row.to(gl.int64) * (x_stride * 8), 1) + channels
        weight_row = expert * weight_rows + work % COLUMN_TILES * WIDTH
        for i in range(BLOCKS):
            stage = done % STAGES
            mbarrier.wait(free.index(stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), 2 * BOX * BLOCK * 2)
            load_block(weight, [weight_row, i * BLOCK], ready.index(stage), boxes.index(2 * stage))
            load_block(weight, [weight_row + second, i * BLOCK], ready.index(stage), boxes.index(2 * stage + 1))
            async_load(xs.index(stage), x_at + i * BLOCK, gl.expand_dims(is_row, 1))
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            done += 1


@gluon.jit
def _start(x_halves, ws, ready, done, total, is_first: gl.constexpr, WHICH: gl.constexpr, STAGES: gl.constexpr):
    """Wait for a block and start adding its product to `total`."""
    stage = done % STAGES
    mbarrier.wait(ready.index(stage), done // STAGES & 1)
    fence_async_shared()
    x = x_halves.index(2 * stage + WHICH)
    return warpgroup_mma(x, ws.index(stage).permute((1, 0)), total, use_acc=not is_first, is_async=True)


@gluon.jit
def _multiply(x_halves, ws, ready, free, done, BLOCKS: gl.constexpr, WHICH: gl.constexpr, STAGES: gl.constexpr):
    """The product of a tile's rows of this consumer. A block is multiplied while the one before is given back."""
    total = gl.zeros([HALF, 2 * BOX], gl.float32, _ACC)
    total = warpgroup_mma_wait(1, [_start(x_halves, ws, ready, done, total, True, WHICH, STAGES)])
    for i in range(1, BLOCKS):
        total = _start(x_halves, ws, ready, done + i, total, False, WHICH, STAGES)
        total = warpgroup_mma_wait(1, [total])
        tell(free.index((done + i - 1) % STAGES))
    total = warpgroup_mma_wait(0, [total])
    tell(free.index((done + BLOCKS - 1) % STAGES))
    return total


@gluon.jit
def _pass_by(ready, free, done, BLOCKS: gl.constexpr, STAGES: gl.constexpr):
    """Give back the blocks of a tile that has no rows for this consumer."""
    for i in range(BLOCKS):
        stage = (done + i) % STAGES
        mbarrier.wait(ready.index(stage), (done + i) // STAGES & 1)
        tell(free.index(stage))


@gluon.jit
def _activate(total, dtype: gl.constexpr):
    """Columns are the gate's, then those of up; `activate` of experts_many_tokens_triton.py."""
    gate, up = gl.split(total.reshape([HALF, 2, BOX]).permute((0, 2, 1)))
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    return gate / (1 + gl.exp(-gate)) * up


@gluon.jit
def _consumer(
    order_ptr, counts_ptr, y_ptr, xs, ws, ready, free, E,
    N: gl.constexpr, BLOCKS: gl.constexpr, COLUMN_TILES: gl.constexpr, WIDTH: gl.constexpr, BLOCK_E: gl.constexpr,
    ACTIVATE: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = _STORE_128 if ACTIVATE else _STORE_256
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    x_halves = reinterpret(xs, xs.dtype, [2 * STAGES, HALF, BLOCK], _TILE)
    tiles_until, rows_until = _count_tiles(counts_ptr, E, BLOCK_E)
    total = gl.max(tiles_until, 0) * COLUMN_TILES
    rows = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    done = 0
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        _, first, count = _find_tile(work // COLUMN_TILES, tiles_until, rows_until)
        if count > WHICH * HALF:
            y = _multiply(x_halves, ws, ready, free, done, BLOCKS, WHICH, STAGES)
            if ACTIVATE:
                y = _activate(y, dtype)
            y = gl.convert_layout(y.to(dtype), layout)
            is_row = rows < count
            row = first + rows
            if not ACTIVATE:
                row = gl.load(order_ptr + row, mask=is_row, other=0)
            column = work % COLUMN_TILES * WIDTH + columns
            at = gl.expand_dims(y_ptr + row.to(gl.int64) * N, 1) + gl.expand_dims(column, 0)
            gl.store(at, y, mask=gl.expand_dims(is_row, 1) & gl.expand_dims(column < N, 0))
        else:
            _pass_by(ready, free, done, BLOCKS, STAGES)
        done += BLOCKS


@gluon.jit
def _many_rows_kernel(
    x_ptr, weight, order_ptr, counts_ptr, y_ptr, x_stride, choices, E, weight_rows, second,
    N: gl.constexpr, BLOCKS: gl.constexpr, COLUMN_TILES: gl.constexpr, WIDTH: gl.constexpr, BLOCK_E: gl.constexpr,
    ACTIVATE: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """ACTIVATE: rows of x are tokens, and y, in the experts' order, is silu(gate) * up. Otherwise y = x @ weight.T,
    x in the experts' order and y in that of the pairs.

    weight_rows: of one expert. second: where the second half of a tile's weight rows begins, after the first one.
    x_stride is in units of 8 channels, so that the compiler knows it to be a multiple of 16 bytes.
    """
    follow(OVERLAP)
    dtype: gl.constexpr = weight.dtype
    xs = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK], _TILE)
    ws = gl.allocate_shared_memory(dtype, [STAGES, 2 * BOX, BLOCK], _TILE)
    ready = barriers(STAGES, 129)  # the producer's threads, each when its rows are there, and the copy engine
    free = barriers(STAGES, 2)
    fence_async_shared()
    sync()
    gl.warp_specialize(
        [
            (
                _producer,
                (
                    x_ptr, weight, order_ptr, counts_ptr, xs, ws, ready, free, x_stride, choices, E, weight_rows,
                    second, BLOCKS, COLUMN_TILES, WIDTH, BLOCK_E, ACTIVATE, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    order_ptr, counts_ptr, y_ptr, xs, ws, ready, free, E, N, BLOCKS, COLUMN_TILES, WIDTH, BLOCK_E,
                    ACTIVATE, STAGES, 0,
                ),
            ),
            (
                _consumer,
                (
                    order_ptr, counts_ptr, y_ptr, xs, ws, ready, free, E, N, BLOCKS, COLUMN_TILES, WIDTH, BLOCK_E,
                    ACTIVATE, STAGES, 1,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


def fits(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Return whether the kernel takes these: whole blocks of channels, rows that the copies can address."""
    channels, width = down.shape[1:]
    is_dense = gate_up.is_contiguous() and down.is_contiguous() and not (gate_up.data_ptr() | down.data_ptr()) & 15
    is_aligned = x.stride(0) % 8 == 0 and not x.data_ptr() & 15
    return x.element_size() == 2 and not channels % BLOCK.value and not width % BLOCK.value and is_dense and is_aligned


def run_gate_up(x: Tensor, weight: Tensor, order: Tensor, counts: Tensor, hidden: Tensor, choices: int) -> None:
    """Write silu(gate) * up of the pairs, sorted by expert as `order` lists them, to hidden [pairs, F]."""
    _launch(x, weight, order, counts, hidden, choices, is_activated=True)


def run_down(hidden: Tensor, weight: Tensor, order: Tensor, counts: Tensor, parts: Tensor) -> None:
    """Write the products of the rows of hidden to parts [pairs, C], in the order of the pairs."""
    _launch(hidden, weight, order, counts, parts, 1, is_activated=False)


def _launch(
    x: Tensor, weight: Tensor, order: Tensor, counts: Tensor, y: Tensor, choices: int, *, is_activated: bool
) -> None:
    (num_experts, weight_rows, channels), columns, box = weight.shape, y.shape[1], BOX.value
    width = box if is_activated else 2 * box
    column_tiles = ceil_div(columns, width)
    # Every expert may have one partly filled tile.
    tiles = min(len(order), ceil_div(len(order), ROWS.value) + num_experts) * column_tiles
    _many_rows_kernel[(min(tiles, MULTIPROCESSORS),)](
        x,
        TensorDescriptor.from_tensor(weight.view(-1, channels), [box, BLOCK.value], _TILE.value),
        order,
        counts,
        y,
        x.stride(0) // 8,
        choices,
        num_experts,
        weight_rows,
        columns if is_activated else box,
        N=columns,
        BLOCKS=channels // BLOCK.value,
        COLUMN_TILES=column_tiles,
        WIDTH=width,
        BLOCK_E=max(32, power_of_2(num_experts)),
        ACTIVATE=is_activated,
        STAGES=STAGES,
        REGISTERS=REGISTERS,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap(x),
    )
