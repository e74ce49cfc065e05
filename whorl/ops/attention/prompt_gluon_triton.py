# mypy: allow-untyped-defs
"""Attention of prompts on Hopper, in Gluon: a producer loads keys and values for two consumer warpgroups.

It takes heads of 128 channels, 64 queries per warpgroup. The copy engine (TMA) fetches queries, keys and values, so
that the producer is one warp of few registers, and the consumers need no fences. A consumer starts the score product
of the next cut before it adds up the present one. While one consumer computes exponentials, the other keeps the tensor
cores busy. The arithmetic is that of cuts_triton.py: the bits are equal.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._gluon_triton import add, barriers, load_block, reinterpret, rescale_factors, sync
from .._launch_triton import launched
from .._rows import Strides, ceil_div
from .copied_cuts_gluon_triton import CUT, HALF, TILE, D, blocks_of, clear, described, load_cut
from .copied_rows import box_of

STAGES = 2  # cuts in shared memory
REGISTERS = 216  # per thread of the second consumer; the first one has 232
PRODUCER_REGISTERS = 56  # per thread of the producer, which is one warp

ROWS = gl.constexpr(64)  # queries of one consumer
ENDLESS = gl.constexpr(1 << 30)
LN_2 = gl.constexpr(0.6931471805599453)

_ONES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
_ONES_STORE = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
_VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
_ROW = gl.constexpr(gl.SliceLayout(1, _OUT.value))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _OUT.value, 2))
_SUMMED = gl.constexpr(gl.DotOperandLayout(0, _SUM.value, 2))


# ---- the producer


@gluon.jit
def _producer(
    q_rows, k_rows, v_rows, q_at, q_column, table_ptr, length, begin, stop, k_at, k_column, k_block, v_at, v_column,
    v_block, qs, ks, vs, q_ready, k_ready, v_ready, k_free, v_free, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, HAS_TABLE: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(q_ready.index(0), 2 * ROWS * D * 2)
    for which in gl.static_range(2):
        for half in gl.static_range(2):
            to = qs.index(which).slice(half * ROWS, ROWS, 0)
            load_block(q_rows, [q_at + which * ROWS, q_column + half * HALF], q_ready.index(0), to)
    for i in range(begin, stop):
        stage = (i - begin) % STAGES
        phase = ((i - begin) // STAGES & 1) ^ 1
        blocks = blocks_of(table_ptr, i * CUT, length, BLOCK_SIZE, BOX, HAS_TABLE)  # while there is no room yet
        mbarrier.wait(k_free.index(stage), phase)
        load_cut(
            k_rows, ks.index(stage), blocks, i * CUT, k_at, k_column, k_block, k_ready.index(stage), BLOCK_SIZE, BOX,
            HAS_TABLE,
        )  # fmt: skip
        mbarrier.wait(v_free.index(stage), phase)
        is_whole = i * CUT + CUT <= length
        there = v_ready.index(gl.where(is_whole, stage, STAGES))
        load_cut(
            v_rows, vs.index(stage), blocks, i * CUT, v_at, v_column, v_block, there, BLOCK_SIZE, BOX, HAS_TABLE
        )  # fmt: skip
        if not is_whole:  # the last cut of a sequence, so once at most
            mbarrier.wait(there, 0)
            clear(vs.index(stage), i * CUT, length)
            mbarrier.arrive(v_ready.index(stage))


# ---- a consumer


@gluon.jit
def _start_scores(q, ks, stage):
    """Start the score product of a cut, without waiting for it."""
    scores = gl.zeros([ROWS, CUT], gl.float32, _OUT)
    k = reinterpret(ks.index(stage), q.dtype, [CUT, D], TILE)
    return warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _start_values(weights, vs, ones, stage):
    """Start the product of a cut's weights and values, and the sums of the weights, without waiting for them."""
    out = gl.zeros([ROWS, D], gl.float32, _OUT)
    v = reinterpret(vs.index(stage), weights.dtype, [CUT, D], TILE)
    out = warpgroup_mma(gl.convert_layout(weights, _WEIGHTS), v, out, use_acc=False, is_async=True)
    sums = gl.zeros([ROWS, 16], gl.float32, _SUM)
    return out, warpgroup_mma(gl.convert_layout(weights, _SUMMED), ones, sums, use_acc=False, is_async=True)


@gluon.jit
def _weigh(scores, i, num_full, position, window, scale, dtype: gl.constexpr, HAS_LSE: gl.constexpr):
    """The highest score of a cut, its weights, and their sum before they are rounded to 16 bits, which lse needs."""
    if i >= num_full:
        keys = gl.expand_dims(i * CUT + gl.arange(0, CUT, gl.SliceLayout(0, _OUT)), 0)
        at = gl.expand_dims(position, 1)
        scores = gl.where((keys <= at) & (keys > at - window), scores, float("-inf"))
    top = gl.max(scores, 1) * scale
    shift = gl.where(top == float("-inf"), 0.0, -top)
    weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(shift, 1)))
    return top, weights.to(dtype), gl.sum(weights, 1) if HAS_LSE else top


@gluon.jit
def _start_cut(
    scores, vs, ones, v_ready, stage, phase, i, num_full, position, window, scale, top, mass, dtype: gl.constexpr,
    HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Weigh a cut by its scores and start the products with its values, without waiting for them."""
    cut_top, weights, cut_mass = _weigh(scores, i, num_full, position, window, scale, dtype, HAS_LSE)
    mbarrier.wait(v_ready.index(stage), phase)
    cut_out, sums = _start_values(weights, vs, ones, stage)
    top, keep, more = rescale_factors(top, cut_top)
    if HAS_LSE:
        mass = gl.fma(cut_mass, more, mass * keep)
    return cut_out, sums, top, keep, more, mass


@gluon.jit
def _fold(out, total, cut_out, sums, keep, more):
    """Add the results of a cut to those of the cuts before."""
    total = gl.fma(gl.convert_layout(gl.max(sums, 1), _ROW), more, total * keep)
    return gl.fma(cut_out, gl.expand_dims(more, 1), out * gl.expand_dims(keep, 1)), total


@gluon.jit
def _consumer(
    q, ks, vs, ones, q_ready, k_ready, v_ready, k_free, v_free, lowest, begin, num_full, stop, window, scale, y_ptr,
    y_stride, lse_ptr, count, WHICH: gl.constexpr, STAGES: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    out = gl.zeros([ROWS, D], gl.float32, _OUT)
    top = gl.full([ROWS], float("-inf"), gl.float32, _ROW)
    total = gl.zeros([ROWS], gl.float32, _ROW)
    mass = gl.zeros([ROWS], gl.float32, _ROW)
    q = reinterpret(q, q.dtype, [ROWS, D], TILE)
    row = WHICH * ROWS + gl.arange(0, ROWS, _ROW)
    position = lowest + row
    mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(k_ready.index(0), 0)
    scores = _start_scores(q, ks, 0)
    for n in range(0, stop - 1 - begin):
        stage = n % STAGES
        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_free.index(stage))
        cut_out, sums, top, keep, more, mass = _start_cut(
            scores, vs, ones, v_ready, stage, n // STAGES & 1, begin + n, num_full, position, window, scale, top, mass,
            q.dtype, HAS_LSE,
        )  # fmt: skip
        after = n + 1
        mbarrier.wait(k_ready.index(after % STAGES), after // STAGES & 1)
        cut_out, sums = warpgroup_mma_wait(0, [cut_out, sums])
        scores = _start_scores(q, ks, after % STAGES)
        mbarrier.arrive(v_free.index(stage))
        out, total = _fold(out, total, cut_out, sums, keep, more)
    n = stop - 1 - begin
    scores = warpgroup_mma_wait(0, [scores])
    cut_out, sums, top, keep, more, mass = _start_cut(
        scores, vs, ones, v_ready, n % STAGES, n // STAGES & 1, stop - 1, num_full, position, window, scale, top, mass,
        q.dtype, HAS_LSE,
    )  # fmt: skip
    cut_out, sums = warpgroup_mma_wait(0, [cut_out, sums])
    out, total = _fold(out, total, cut_out, sums, keep, more)
    y = gl.div_rn(out, gl.expand_dims(gl.where(total > 0, total, 1.0), 1))
    channels = gl.arange(0, D, gl.SliceLayout(0, _OUT))
    at = y_ptr + gl.expand_dims(row * y_stride, 1) + gl.expand_dims(channels, 0)
    gl.store(at, y.to(y_ptr.dtype.element_ty), mask=gl.expand_dims(row < count, 1))
    if HAS_LSE:
        gl.store(lse_ptr + row * (y_stride // D), (top + gl.log2(mass)) * LN_2, mask=row < count)


# ---- the kernel


@launched
@gluon.jit(
    do_not_specialize=[
        "q_head_row", "q_head_column", "k_block", "k_head_row", "k_head_column", "v_block", "v_head_row",
        "v_head_column", "table_stride", "B",
    ]
)  # fmt: skip
def _prompt_gluon_kernel(
    q_rows, k_rows, v_rows, tables_ptr, starts_ptr, lengths_ptr, y_ptr, lse_ptr, q_head_row, q_head_column, k_block,
    k_head_row, k_head_column, v_block, v_head_row, v_head_column, table_stride, scale, window, B, HQ: gl.constexpr,
    G: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, BLOCK_B: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    # The last tiles of a sequence attend to the most keys, so they start first.
    head, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    index = gl.arange(0, BLOCK_B, _VECTOR)
    starts = gl.load(starts_ptr + index, mask=index < B, other=0)
    ends = gl.load(starts_ptr + 1 + index, mask=index < B, other=0)
    lengths = gl.load(lengths_ptr + index, mask=index < B, other=0)
    tiles = (ends - starts + 2 * ROWS - 1) // (2 * ROWS)
    until = gl.associative_scan(tiles, 0, add)
    b = gl.sum(((until <= tile) & (index < B)).to(gl.int32), 0)
    if b >= B:  # the grid has room for a partly filled tile of every sequence, and a recorded call for more sequences
        return
    first = (tile - gl.sum(gl.where(index < b, tiles, 0), 0)) * (2 * ROWS)
    start = gl.sum(gl.where(index == b, starts, 0), 0)
    queries = gl.sum(gl.where(index == b, ends, 0), 0) - start
    length = gl.sum(gl.where(index == b, lengths, 0), 0)
    lowest = length - queries + first
    count = queries - first  # queries of this tile and the tiles after it
    highest = gl.minimum(lowest + 2 * ROWS, length)
    token = start + first
    y_ptr += (token.to(gl.int64) * HQ + head) * D
    k_at, v_at = head // G * k_head_row, head // G * v_head_row
    if HAS_LSE:
        lse_ptr += token.to(gl.int64) * HQ + head
        k_at, v_at = k_at + start, v_at + start
    else:
        tables_ptr += b.to(gl.int64) * table_stride
    is_endless = window == 0
    begin = gl.where(is_endless, 0, gl.maximum(lowest - window + 1, 0) // CUT)
    num_full = gl.where(is_endless, (lowest + 1) // CUT, 0)  # cuts that every query attends to in full: no mask
    window = gl.where(is_endless, ENDLESS, window)
    stop = (highest + CUT - 1) // CUT
    dtype: gl.constexpr = q_rows.dtype
    # Tiles of 128 channels lie in shared memory as two of 64, one behind the other.
    qs = gl.allocate_shared_memory(dtype, [2, 2 * ROWS, HALF], TILE)
    ks = gl.allocate_shared_memory(dtype, [STAGES, 2 * CUT, HALF], TILE)
    vs = gl.allocate_shared_memory(dtype, [STAGES, 2 * CUT, HALF], TILE)
    ones = gl.allocate_shared_memory(dtype, [CUT, 16], _ONES)
    ones.store(gl.full([CUT, 16], 1.0, dtype, _ONES_STORE))
    q_ready = barriers(1, 1)
    k_ready = barriers(STAGES, 1)
    v_ready = barriers(STAGES + 1, 1)  # the last one is the producer's own
    k_free = barriers(STAGES, 2)
    v_free = barriers(STAGES, 2)
    fence_async_shared()
    sync()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    qs.index(0), ks, vs, ones, q_ready, k_ready, v_ready, k_free, v_free, lowest, begin, num_full, stop,
                    window, scale, y_ptr, HQ * D, lse_ptr, count, 0, STAGES, HAS_LSE,
                ),
            ),
            (
                _consumer,
                (
                    qs.index(1), ks, vs, ones, q_ready, k_ready, v_ready, k_free, v_free, lowest, begin, num_full, stop,
                    window, scale, y_ptr, HQ * D, lse_ptr, count, 1, STAGES, HAS_LSE,
                ),
            ),
            (
                _producer,
                (
                    q_rows, k_rows, v_rows, head * q_head_row + token, head * q_head_column, tables_ptr, length, begin,
                    stop, k_at, head // G * k_head_column, k_block, v_at, head // G * v_head_column, v_block, qs, ks,
                    vs, q_ready, k_ready, v_ready, k_free, v_free, BLOCK_SIZE, BOX, STAGES, not HAS_LSE,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def run(
    tensors: list[Tensor],
    outputs: tuple[Tensor, Tensor],
    strides: Strides,
    scale: float,
    window: int,
    shapes: dict[str, int],
) -> None:
    """Launch the kernel with what `prompt` of prompt_triton.py takes, where `hopper_reason` is None."""
    q, k_cache, v_cache, *indices = tensors
    box = CUT.value if shapes["HAS_LSE"] else box_of(k_cache.shape[1])
    q_rows, (_, *q_apart) = described(q[None], (0, *strides[:2]), ROWS.value)
    k_rows, k_apart = described(k_cache, strides[2:5], box)
    v_rows, v_apart = described(v_cache, strides[5:8], box)
    count = indices[-1].shape[0]
    _prompt_gluon_kernel[(q.shape[1], ceil_div(q.shape[0], 2 * ROWS.value) + count)](
        q_rows, k_rows, v_rows, *indices, *outputs, *q_apart, *k_apart, *v_apart, strides[-1], scale, window, count,
        BOX=box, STAGES=STAGES, REGISTERS=REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4, **shapes,
    )  # fmt: skip
