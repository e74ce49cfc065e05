# mypy: allow-untyped-defs
"""Attention of prompts on Hopper, in Gluon: a producer loads keys and values for two consumer warpgroups.

It takes heads of 128 channels, 64 queries per warpgroup. While one consumer computes exponentials, the other keeps the
tensor cores busy. The arithmetic is that of cuts_triton.py: the bits are equal.
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

STAGES = 2  # cuts in shared memory
REGISTERS = 208  # per thread of a consumer; 88 are left for the producer's threads

D = gl.constexpr(128)
CUT = gl.constexpr(128)
ROWS = gl.constexpr(64)  # queries of one consumer
FEW = gl.constexpr(32)  # keys that the producer loads at once
ENDLESS = gl.constexpr(1 << 30)
LN_2 = gl.constexpr(0.6931471805599453)

_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_ONES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
_ONES_STORE = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
_ROW = gl.constexpr(gl.SliceLayout(1, _OUT.value))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _OUT.value, 2))
_SUMMED = gl.constexpr(gl.DotOperandLayout(0, _SUM.value, 2))


@gluon.jit
def _copy(
    smem, ptr, table_ptr, first, length, stride_block, stride_offset, BLOCK_SIZE: gl.constexpr, HAS_TABLE: gl.constexpr
):  # fmt: skip
    """Load the keys or values of a cut, by the block table or one after the other; zero past the end of the sequence.

    They are loaded FEW at a time, because addresses fill the producer's registers.
    """
    channels = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, _COPY)), 0)
    for start in gl.static_range(0, CUT, FEW):
        keys = first + start + gl.arange(0, FEW, gl.SliceLayout(1, _COPY))
        if HAS_TABLE:
            block = gl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < length, other=0).to(gl.int64)
            at = gl.expand_dims(ptr + block * stride_block + (keys % BLOCK_SIZE) * stride_offset, 1)
        else:
            at = gl.expand_dims(ptr + keys.to(gl.int64) * stride_offset, 1)
        async_load(smem.slice(start, FEW, 0), at + channels, gl.expand_dims(keys < length, 1))


@gluon.jit
def _producer(
    k_ptr, v_ptr, table_ptr, length, begin, stop, k_block, k_offset, v_block, v_offset, ks, vs, k_ready, v_ready,
    k_free, v_free, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, HAS_TABLE: gl.constexpr,
):  # fmt: skip
    for i in range(begin, stop):
        stage = (i - begin) % STAGES
        phase = ((i - begin) // STAGES & 1) ^ 1
        mbarrier.wait(k_free.index(stage), phase)
        _copy(ks.index(stage), k_ptr, table_ptr, i * CUT, length, k_block, k_offset, BLOCK_SIZE, HAS_TABLE)
        async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
        mbarrier.wait(v_free.index(stage), phase)
        _copy(vs.index(stage), v_ptr, table_ptr, i * CUT, length, v_block, v_offset, BLOCK_SIZE, HAS_TABLE)
        async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)


@gluon.jit
def _consumer(
    q, ks, vs, ones, k_ready, v_ready, k_free, v_free, lowest, begin, num_full, stop, window, scale, y_ptr, y_stride,
    lse_ptr, count, WHICH: gl.constexpr, STAGES: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    out = gl.zeros([ROWS, D], gl.float32, _OUT)
    top = gl.full([ROWS], float("-inf"), gl.float32, _ROW)
    total = gl.zeros([ROWS], gl.float32, _ROW)
    mass = gl.zeros([ROWS], gl.float32, _ROW)
    row = WHICH * ROWS + gl.arange(0, ROWS, _ROW)
    for i in range(begin, stop):
        stage = (i - begin) % STAGES
        phase = (i - begin) // STAGES & 1
        mbarrier.wait(k_ready.index(stage), phase)
        fence_async_shared()
        scores = gl.zeros([ROWS, CUT], gl.float32, _OUT)
        scores = warpgroup_mma(q, ks.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_free.index(stage))
        if i >= num_full:
            keys = gl.expand_dims(i * CUT + gl.arange(0, CUT, gl.SliceLayout(0, _OUT)), 0)
            position = gl.expand_dims(lowest + row, 1)
            scores = gl.where((keys <= position) & (keys > position - window), scores, float("-inf"))
        cut_top = gl.max(scores, 1) * scale
        shift = gl.where(cut_top == float("-inf"), 0.0, -cut_top)
        weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(shift, 1)))
        if HAS_LSE:
            cut_mass = gl.sum(weights, 1)  # for lse, which needs more digits than 16-bit weights have
        weights = weights.to(q.dtype)
        mbarrier.wait(v_ready.index(stage), phase)
        fence_async_shared()
        cut_out = gl.zeros([ROWS, D], gl.float32, _OUT)
        cut_out = warpgroup_mma(
            gl.convert_layout(weights, _WEIGHTS), vs.index(stage), cut_out, use_acc=False, is_async=True
        )
        sums = gl.zeros([ROWS, 16], gl.float32, _SUM)
        sums = warpgroup_mma(gl.convert_layout(weights, _SUMMED), ones, sums, use_acc=False, is_async=True)
        new = gl.maximum(top, cut_top)
        shift = gl.where(new == float("-inf"), 0.0, new)
        keep = gl.exp2(top - shift)
        add = gl.exp2(cut_top - shift)
        if HAS_LSE:
            mass = gl.fma(cut_mass, add, mass * keep)
        cut_out, sums = warpgroup_mma_wait(0, [cut_out, sums])
        mbarrier.arrive(v_free.index(stage))
        total = gl.fma(gl.convert_layout(gl.max(sums, 1), _ROW), add, total * keep)
        out = gl.fma(cut_out, gl.expand_dims(add, 1), out * gl.expand_dims(keep, 1))
        top = new
    y = gl.div_rn(out, gl.expand_dims(gl.where(total > 0, total, 1.0), 1))
    channels = gl.arange(0, D, gl.SliceLayout(0, _OUT))
    at = y_ptr + gl.expand_dims(row * y_stride, 1) + gl.expand_dims(channels, 0)
    gl.store(at, y.to(y_ptr.dtype.element_ty), mask=gl.expand_dims(row < count, 1))
    if HAS_LSE:
        gl.store(lse_ptr + row * (y_stride // D), (top + gl.log2(mass)) * LN_2, mask=row < count)


@gluon.jit
def _load_queries(smem, ptr, stride, count):
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, _COPY))
    channels = gl.arange(0, D, gl.SliceLayout(0, _COPY))
    at = ptr + gl.expand_dims(rows * stride, 1) + gl.expand_dims(channels, 0)
    async_load(smem, at, gl.expand_dims(rows < count, 1))


@gluon.jit(do_not_specialize=["table_stride", "B"])
def _prompt_gluon_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, starts_ptr, lengths_ptr, y_ptr, lse_ptr, q_stride_t, q_stride_h,
    k_stride_block, k_stride_offset, k_stride_head, v_stride_block, v_stride_offset, v_stride_head, table_stride,
    scale, window, B, HQ: gl.constexpr, G: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_B: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    # The last tiles of a sequence attend to the most keys, so they start first.
    head, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    index = gl.arange(0, BLOCK_B, _VECTOR)
    starts = gl.load(starts_ptr + index, mask=index < B, other=0)
    ends = gl.load(starts_ptr + 1 + index, mask=index < B, other=0)
    tiles = (ends - starts + 2 * ROWS - 1) // (2 * ROWS)
    until = gl.associative_scan(tiles, 0, add)
    b = gl.sum(((until <= tile) & (index < B)).to(gl.int32), 0)
    if b >= B:  # the grid has room for a partly filled tile of every sequence, and a recorded call for more sequences
        return
    first = (tile - gl.sum(gl.where(index < b, tiles, 0), 0)) * (2 * ROWS)
    start = gl.load(starts_ptr + b)
    queries = gl.load(starts_ptr + b + 1) - start
    length = gl.load(lengths_ptr + b)
    lowest = length - queries + first
    count = queries - first  # queries of this tile and the tiles after it
    highest = gl.minimum(lowest + 2 * ROWS, length)
    token = (start + first).to(gl.int64)
    q_ptr += token * q_stride_t + head * q_stride_h
    y_ptr += (token * HQ + head) * D
    k_cache_ptr += head // G * k_stride_head
    v_cache_ptr += head // G * v_stride_head
    if HAS_LSE:
        lse_ptr += token * HQ + head
        k_cache_ptr += start.to(gl.int64) * k_stride_offset
        v_cache_ptr += start.to(gl.int64) * v_stride_offset
    else:
        tables_ptr += b.to(gl.int64) * table_stride
    is_endless = window == 0
    begin = gl.where(is_endless, 0, gl.maximum(lowest - window + 1, 0) // CUT)
    num_full = gl.where(is_endless, (lowest + 1) // CUT, 0)  # cuts that every query attends to in full: no mask
    window = gl.where(is_endless, ENDLESS, window)
    stop = (highest + CUT - 1) // CUT
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q0 = gl.allocate_shared_memory(dtype, [ROWS, D], _TILE)
    q1 = gl.allocate_shared_memory(dtype, [ROWS, D], _TILE)
    ks = gl.allocate_shared_memory(dtype, [STAGES, CUT, D], _TILE)
    vs = gl.allocate_shared_memory(dtype, [STAGES, CUT, D], _TILE)
    ones = gl.allocate_shared_memory(dtype, [CUT, 16], _ONES)
    ones.store(gl.full([CUT, 16], 1.0, dtype, _ONES_STORE))
    k_ready = barriers(STAGES, 128)
    v_ready = barriers(STAGES, 128)
    k_free = barriers(STAGES, 2)
    v_free = barriers(STAGES, 2)
    _load_queries(q0, q_ptr, q_stride_t, count)
    _load_queries(q1, q_ptr + ROWS * q_stride_t, q_stride_t, count - ROWS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    sync()
    gl.warp_specialize(
        [
            (
                _producer,
                (
                    k_cache_ptr, v_cache_ptr, tables_ptr, length, begin, stop, k_stride_block, k_stride_offset,
                    v_stride_block, v_stride_offset, ks, vs, k_ready, v_ready, k_free, v_free, BLOCK_SIZE, STAGES,
                    not HAS_LSE,
                ),
            ),
            (
                _consumer,
                (
                    q0, ks, vs, ones, k_ready, v_ready, k_free, v_free, lowest, begin, num_full, stop, window, scale,
                    y_ptr, HQ * D, lse_ptr, count, 0, STAGES, HAS_LSE,
                ),
            ),
            (
                _consumer,
                (
                    q1, ks, vs, ones, k_ready, v_ready, k_free, v_free, lowest, begin, num_full, stop, window, scale,
                    y_ptr, HQ * D, lse_ptr, count, 1, STAGES, HAS_LSE,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
