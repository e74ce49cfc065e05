# mypy: allow-untyped-defs
"""Bidirectional attention of segments on Hopper, in Gluon: a producer loads keys and values for two warpgroups.

It takes heads of 64, 72, 80 or 128 channels. Tiles must be powers of two, so 72 channels are stored as 64 and a tail of
16: products then have 80 channels instead of 128. The unused columns of the values' tail are filled with ones, so that
their column of the result is the sum of weights; with 80 channels that tail has 32 columns. A consumer starts the score
product of a cut before it computes the exponentials of the cut before. The arithmetic is that of
bidirectional_triton.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._gluon_triton import add, async_load, barriers, sync

STAGES = {64: 3, 128: 2}  # cuts in shared memory, by the channels of the main part
# Per thread of a consumer; 72 or 40 are left for the producer's threads.
REGISTERS = {64: 216, 128: 232}

TAIL = gl.constexpr(16)  # columns of the tail of queries and keys; those of values may have more
CUT = gl.constexpr(128)
ROWS = gl.constexpr(64)  # queries of one consumer
FEW = gl.constexpr(32)  # keys that the producer loads at once

_MAIN = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_ROW = gl.constexpr(gl.SliceLayout(1, _SCORES.value))


@gluon.jit
def _copy(main, tail, ptr, ones_ptr, first, length, stride, NUM: gl.constexpr, D: gl.constexpr, HAS_ONES: gl.constexpr):
    """Load NUM tokens of a head; zero past the end of the segment, where the next segment may hold anything."""
    step: gl.constexpr = FEW if NUM > FEW else NUM
    MAIN: gl.constexpr = main.shape[1]
    channels = gl.expand_dims(gl.arange(0, MAIN, gl.SliceLayout(0, _COPY)), 0)
    for start in gl.static_range(0, NUM, step):
        rows = first + start + gl.arange(0, step, gl.SliceLayout(1, _COPY))
        at = gl.expand_dims(ptr + rows.to(gl.int64) * stride, 1) + channels
        async_load(main.slice(start, step, 0), at, gl.expand_dims(rows < length, 1))
    if D > MAIN or HAS_ONES:
        width: gl.constexpr = tail.shape[1]
        COPY_TAIL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])
        columns = gl.expand_dims(gl.arange(0, width, gl.SliceLayout(0, COPY_TAIL)), 0)
        for start in gl.static_range(0, NUM, 64):
            rows = first + start + gl.arange(0, 64, gl.SliceLayout(1, COPY_TAIL))
            at = gl.expand_dims(ptr + MAIN + rows.to(gl.int64) * stride, 1) + columns
            mask = gl.expand_dims(rows < length, 1)
            if HAS_ONES:
                at = gl.where(columns < D - MAIN, at, ones_ptr + columns % 8)
            else:
                mask = mask & (columns < D - MAIN)
            async_load(tail.slice(start, 64, 0), at, mask)


@gluon.jit
def _producer(
    k_ptr, v_ptr, ones_ptr, length, stop, k_stride, v_stride, ks, kt, vs, vt, k_ready, v_ready, k_free, v_free,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for i in range(0, stop):
        stage = i % STAGES
        phase = (i // STAGES & 1) ^ 1
        mbarrier.wait(k_free.index(stage), phase)
        _copy(ks.index(stage), kt.index(stage), k_ptr, ones_ptr, i * CUT, length, k_stride, CUT, D, False)
        async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
        mbarrier.wait(v_free.index(stage), phase)
        _copy(vs.index(stage), vt.index(stage), v_ptr, ones_ptr, i * CUT, length, v_stride, CUT, D, True)
        async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)


@gluon.jit
def _start_scores(q, qt, ks, kt, stage, D: gl.constexpr):
    """Start the score product of a cut, without waiting for it."""
    fence_async_shared()
    scores = gl.zeros([ROWS, CUT], gl.float32, _SCORES)
    scores = warpgroup_mma(q, ks.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    if q.shape[1] < D:
        scores = warpgroup_mma(qt, kt.index(stage).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _weigh(scores, top, i, num_full, length, scale, dtype: gl.constexpr):
    """The weights of a cut, the highest score so far, and the factor for the sums of the cuts before."""
    if i >= num_full:
        keys = gl.expand_dims(i * CUT + gl.arange(0, CUT, gl.SliceLayout(0, _SCORES)), 0)
        scores = gl.where(keys < length, scores, float("-inf"))
    new = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(-new, 1))).to(dtype)
    return weights, new, gl.exp2(top - new)


@gluon.jit
def _start_values(out, tail, weights, vs, vt, stage):
    """Start adding the weighted values of a cut to the sums, without waiting for it."""
    fence_async_shared()
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 2)
    WEIGHTS_TAIL: gl.constexpr = gl.DotOperandLayout(0, tail.type.layout, 2)
    out = warpgroup_mma(gl.convert_layout(weights, WEIGHTS), vs.index(stage), out, is_async=True)
    tail = warpgroup_mma(gl.convert_layout(weights, WEIGHTS_TAIL), vt.index(stage), tail, is_async=True)
    return out, tail


@gluon.jit
def _consumer(
    q, qt, ks, kt, vs, vt, k_ready, v_ready, k_free, v_free, length, num_full, stop, scale, y_ptr, y_stride, count,
    D: gl.constexpr, WHICH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    MAIN: gl.constexpr = vs.shape[2]
    WIDTH: gl.constexpr = vt.shape[2]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    OUT_TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    out = gl.zeros([ROWS, MAIN], gl.float32, OUT)
    tail = gl.zeros([ROWS, WIDTH], gl.float32, OUT_TAIL)
    top = gl.full([ROWS], float("-inf"), gl.float32, _ROW)
    if stop > 0:
        mbarrier.wait(k_ready.index(0), 0)
        scores = warpgroup_mma_wait(0, [_start_scores(q, qt, ks, kt, 0, D)])
        mbarrier.arrive(k_free.index(0))
        weights, top, keep = _weigh(scores, top, 0, num_full, length, scale, q.dtype)
        for i in range(1, stop):
            mbarrier.wait(k_ready.index(i % STAGES), i // STAGES & 1)
            scores = _start_scores(q, qt, ks, kt, i % STAGES, D)
            last = (i - 1) % STAGES
            mbarrier.wait(v_ready.index(last), (i - 1) // STAGES & 1)
            out, tail = _start_values(out, tail, weights, vs, vt, last)
            scores = warpgroup_mma_wait(2, [scores])
            mbarrier.arrive(k_free.index(i % STAGES))
            weights, top, keep = _weigh(scores, top, i, num_full, length, scale, q.dtype)
            # The values have arrived before, but ptxas moves no exponential across this wait. Without it all
            # exponentials would be computed after the products instead of while they run.
            mbarrier.wait(v_ready.index(last), (i - 1) // STAGES & 1)
            out, tail, weights = warpgroup_mma_wait(0, [out, tail, weights])
            mbarrier.arrive(v_free.index(last))
            out = out * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, OUT)), 1)
            tail = tail * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(1, OUT_TAIL)), 1)
        last = (stop - 1) % STAGES
        mbarrier.wait(v_ready.index(last), (stop - 1) // STAGES & 1)
        out, tail = _start_values(out, tail, weights, vs, vt, last)
        out, tail = warpgroup_mma_wait(0, [out, tail])
        columns = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, OUT_TAIL)), 0)
        total = gl.max(gl.where(columns >= D - MAIN, tail, 0.0), 1)
        _store(out, gl.convert_layout(total, gl.SliceLayout(1, OUT)), y_ptr, y_stride, count, WHICH, MAIN, MAIN, OUT)
        if D > MAIN:
            _store(tail, total, y_ptr + MAIN, y_stride, count, WHICH, WIDTH, D - MAIN, OUT_TAIL)


@gluon.jit
def _store(
    out, total, y_ptr, y_stride, count, WHICH: gl.constexpr, WIDTH: gl.constexpr, NUM: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store the first NUM of WIDTH channels, divided by the sum of weights."""
    row = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    channels = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    y = gl.div_rn(out, gl.expand_dims(total, 1))
    at = y_ptr + gl.expand_dims(row * y_stride, 1) + channels
    gl.store(at, y.to(y_ptr.dtype.element_ty), mask=gl.expand_dims(row < count, 1) & (channels < NUM))


@gluon.jit
def _bidirectional_gluon_kernel(
    q_ptr, k_ptr, v_ptr, starts_ptr, ones_ptr, y_ptr, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t,
    v_stride_h, scale, B, H: gl.constexpr, D: gl.constexpr, MAIN: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_B: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Two consumers of ROWS queries each, of one head of one segment.

    Strides are in units of 8 channels, so that the compiler knows that they are multiples of 16 bytes. MAIN, WIDTH:
    channels of the main part, columns of the values' tail.
    """
    OF_TAIL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    OF_VALUES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * WIDTH, element_bitwidth=16, rank=2)
    head, tile = gl.program_id(0), gl.program_id(1)
    index = gl.arange(0, BLOCK_B, _VECTOR)
    starts = gl.load(starts_ptr + index, mask=index < B, other=0)
    ends = gl.load(starts_ptr + 1 + index, mask=index < B, other=0)
    tiles = (ends - starts + 2 * ROWS - 1) // (2 * ROWS)
    until = gl.associative_scan(tiles, 0, add)
    b = gl.sum(((until <= tile) & (index < B)).to(gl.int32), 0)
    is_real = b < B
    first = (tile - gl.sum(gl.where(index < b, tiles, 0), 0)) * (2 * ROWS)
    start = gl.load(starts_ptr + b, mask=is_real, other=0)
    length = gl.load(starts_ptr + b + 1, mask=is_real, other=0) - start
    count = length - first  # tokens of this tile and the tiles after it; below 1 where the tile has no segment
    stop = gl.where(is_real, (length + CUT - 1) // CUT, 0)
    num_full = length // CUT  # cuts that lie entirely inside the segment, and need no mask
    begin = start.to(gl.int64)
    token = (start + first).to(gl.int64)
    q_stride, k_stride, v_stride = q_stride_t * 8, k_stride_t * 8, v_stride_t * 8
    q_ptr += token * q_stride + head * (q_stride_h * 8)
    k_ptr += begin * k_stride + head * (k_stride_h * 8)
    v_ptr += begin * v_stride + head * (v_stride_h * 8)
    y_ptr += (token * H + head) * D
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q0 = gl.allocate_shared_memory(dtype, [ROWS, MAIN], _MAIN)
    q1 = gl.allocate_shared_memory(dtype, [ROWS, MAIN], _MAIN)
    qt0 = gl.allocate_shared_memory(dtype, [ROWS, TAIL], OF_TAIL)
    qt1 = gl.allocate_shared_memory(dtype, [ROWS, TAIL], OF_TAIL)
    ks = gl.allocate_shared_memory(dtype, [STAGES, CUT, MAIN], _MAIN)
    kt = gl.allocate_shared_memory(dtype, [STAGES, CUT, TAIL], OF_TAIL)
    vs = gl.allocate_shared_memory(dtype, [STAGES, CUT, MAIN], _MAIN)
    vt = gl.allocate_shared_memory(dtype, [STAGES, CUT, WIDTH], OF_VALUES)
    k_ready = barriers(STAGES, 128)
    v_ready = barriers(STAGES, 128)
    k_free = barriers(STAGES, 2)
    v_free = barriers(STAGES, 2)
    _copy(q0, qt0, q_ptr, ones_ptr, 0, count, q_stride, ROWS, D, False)
    _copy(q1, qt1, q_ptr, ones_ptr, ROWS, count, q_stride, ROWS, D, False)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    sync()
    gl.warp_specialize(
        [
            (
                _producer,
                (
                    k_ptr, v_ptr, ones_ptr, length, stop, k_stride, v_stride, ks, kt, vs, vt, k_ready, v_ready,
                    k_free, v_free, D, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    q0, qt0, ks, kt, vs, vt, k_ready, v_ready, k_free, v_free, length, num_full, stop, scale, y_ptr,
                    H * D, count, D, 0, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    q1, qt1, ks, kt, vs, vt, k_ready, v_ready, k_free, v_free, length, num_full, stop, scale, y_ptr,
                    H * D, count, D, 1, STAGES,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
