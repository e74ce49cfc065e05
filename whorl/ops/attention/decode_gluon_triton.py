# mypy: allow-untyped-defs
"""Attention of one token over many keys on Hopper, in Gluon: a producer keeps several cuts of the keys on their way.

It takes heads of 128 channels. One program per multiprocessor shares the cuts of a sequence with others and stores the
result of each cut for `_fold_kernel` of decode_triton.py; two consumers take the program's cuts by turns. The
arithmetic is that of cuts_triton.py: the bits are equal.
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

from .._gluon_triton import async_load, barriers, begin, follow, sync, tell
from .prompt_gluon_triton import _COPY, _ONES, _ONES_STORE, _OUT, _ROW, _SUM, _SUMMED, _TILE, _WEIGHTS, CUT, FEW, D

STAGES = 3  # cuts in shared memory
REGISTERS = 192  # per thread of a consumer; 128 are left for the producer's threads

ROWS = gl.constexpr(64)  # of an instruction; the query heads of a key head are the first of them
_VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _load_blocks(table_ptr, cut, end, BLOCK_SIZE: gl.constexpr):
    """The blocks of a cut's keys, as one vector for each of the parts in which a cut is copied."""
    blocks = ()
    for start in gl.static_range(0, CUT, FEW):
        keys = cut * CUT + start + gl.arange(0, FEW, gl.SliceLayout(1, _COPY))
        blocks = blocks + (gl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0),)
    return blocks


@gluon.jit
def _copy(smem, ptr, blocks, cut, end, stride_block, stride_offset, BLOCK_SIZE: gl.constexpr):
    """Copy the keys or values of a cut; zero past the end of the sequence."""
    channels = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, _COPY)), 0)
    for i in gl.static_range(CUT // FEW):
        keys = cut * CUT + i * FEW + gl.arange(0, FEW, gl.SliceLayout(1, _COPY))
        at = ptr + blocks[i].to(gl.int64) * stride_block + (keys % BLOCK_SIZE) * stride_offset
        async_load(smem.slice(i * FEW, FEW, 0), gl.expand_dims(at, 1) + channels, gl.expand_dims(keys < end, 1))


@gluon.jit
def _producer(
    k_ptr, v_ptr, table_ptr, end, begin_at, stop, step, k_block, k_offset, v_block, v_offset, ks, vs, k_ready, v_ready,
    k_free, v_free, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    next_blocks = _load_blocks(table_ptr, begin_at, end, BLOCK_SIZE)
    for i in range(begin_at, stop, step):
        blocks = next_blocks
        next_blocks = _load_blocks(table_ptr, i + step, end, BLOCK_SIZE)  # they are there when the next cut begins
        if (i + 2) * CUT > end:  # a step that runs ahead has yet to write these keys
            follow(OVERLAP)
        done = (i - begin_at) // step
        stage = done % STAGES
        phase = (done // STAGES & 1) ^ 1
        mbarrier.wait(k_free.index(stage), phase)
        _copy(ks.index(stage), k_ptr, blocks, i, end, k_block, k_offset, BLOCK_SIZE)
        async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
        mbarrier.wait(v_free.index(stage), phase)
        _copy(vs.index(stage), v_ptr, blocks, i, end, v_block, v_offset, BLOCK_SIZE)
        async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)


@gluon.jit
def _consumer(
    q_ptr, q_stride, q, ks, vs, ones, q_ready, k_ready, v_ready, k_free, v_free, first, end, begin_at, stop, step,
    scale, out_ptr, top_ptr, total_ptr, row_at, cuts,
    G: gl.constexpr, WHICH: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Compute every other cut of the program's, from the first (WHICH 0) or the second one on."""
    if WHICH == 0:
        follow(OVERLAP)
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, _COPY))
        channels = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, _COPY)), 0)
        async_load(q, q_ptr + gl.expand_dims(rows * q_stride, 1) + channels, gl.expand_dims(rows < G, 1))
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        tell(q_ready.index(0))
    mbarrier.wait(q_ready.index(0), 0)
    row = gl.arange(0, ROWS, _ROW)
    out_channels = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, _OUT)), 0)
    for i in range(begin_at + WHICH * step, stop, 2 * step):
        done = (i - begin_at) // step
        stage = done % STAGES
        phase = done // STAGES & 1
        mbarrier.wait(k_ready.index(stage), phase)
        fence_async_shared()
        scores = gl.zeros([ROWS, CUT], gl.float32, _OUT)
        scores = warpgroup_mma(q, ks.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        tell(k_free.index(stage))
        if (i * CUT < first) | ((i + 1) * CUT > end):
            keys = gl.expand_dims(i * CUT + gl.arange(0, CUT, gl.SliceLayout(0, _OUT)), 0)
            scores = gl.where((keys < end) & (keys >= first), scores, float("-inf"))
        top = gl.max(scores, 1) * scale
        shift = gl.where(top == float("-inf"), 0.0, -top)
        weights = gl.exp2(gl.fma(scores, scale, gl.expand_dims(shift, 1))).to(q.dtype)
        mbarrier.wait(v_ready.index(stage), phase)
        fence_async_shared()
        out = gl.zeros([ROWS, D], gl.float32, _OUT)
        out = warpgroup_mma(gl.convert_layout(weights, _WEIGHTS), vs.index(stage), out, use_acc=False, is_async=True)
        sums = gl.zeros([ROWS, 16], gl.float32, _SUM)
        sums = warpgroup_mma(gl.convert_layout(weights, _SUMMED), ones, sums, use_acc=False, is_async=True)
        out, sums = warpgroup_mma_wait(0, [out, sums])
        tell(v_free.index(stage))
        at = (row_at + row) * cuts + i
        gl.store(top_ptr + at, top, mask=row < G)
        gl.store(total_ptr + at, gl.convert_layout(gl.max(sums, 1), _ROW), mask=row < G)
        gl.store(out_ptr + gl.expand_dims(at * D, 1) + out_channels, out, mask=gl.expand_dims(row < G, 1))


@gluon.jit(do_not_specialize=["table_stride", "cuts", "B"])
def _decode_gluon_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, tables_ptr, starts_ptr, lengths_ptr, out_ptr, top_ptr, total_ptr, q_stride_t,
    q_stride_h, k_stride_block, k_stride_offset, k_stride_head, v_stride_block, v_stride_offset, v_stride_head,
    table_stride, scale, window, cuts, B,
    HK: gl.constexpr, G: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_B: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """As `_decode_kernel`, where num_programs(2) programs share the cuts of a token and key head."""
    begin(OVERLAP)
    if OVERLAP != 2:
        follow(OVERLAP)
    token, head = gl.program_id(0), gl.program_id(1)
    index = gl.arange(0, BLOCK_B, _VECTOR)
    ends = gl.load(starts_ptr + 1 + index, mask=index < B, other=2147483647)
    b = gl.sum((ends <= token).to(gl.int32), 0)
    if b >= B:  # a token past the last one, in a recorded call
        follow(OVERLAP)  # or a later kernel could start before this step's earlier ones have ended
        return
    end = gl.load(lengths_ptr + b) - (gl.load(starts_ptr + b + 1) - 1 - token)
    first = 0
    if window > 0:
        first = gl.maximum(end - window, 0)
    begin_at = first // CUT + gl.program_id(2)
    stop = (end + CUT - 1) // CUT
    row_at = token.to(gl.int64) * (HK * G) + head * G
    q_ptr += token.to(gl.int64) * q_stride_t + head * G * q_stride_h
    k_cache_ptr += head * k_stride_head
    v_cache_ptr += head * v_stride_head
    tables_ptr += b.to(gl.int64) * table_stride
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q = gl.allocate_shared_memory(dtype, [ROWS, D], _TILE)
    ks = gl.allocate_shared_memory(dtype, [STAGES, CUT, D], _TILE)
    vs = gl.allocate_shared_memory(dtype, [STAGES, CUT, D], _TILE)
    ones = gl.allocate_shared_memory(dtype, [CUT, 16], _ONES)
    ones.store(gl.full([CUT, 16], 1.0, dtype, _ONES_STORE))
    q_ready = barriers(1, 1)
    k_ready = barriers(STAGES, 128)
    v_ready = barriers(STAGES, 128)
    k_free = barriers(STAGES, 1)
    v_free = barriers(STAGES, 1)
    fence_async_shared()
    sync()
    step = gl.num_programs(2)
    gl.warp_specialize(
        [
            (
                _producer,
                (
                    k_cache_ptr, v_cache_ptr, tables_ptr, end, begin_at, stop, step, k_stride_block, k_stride_offset,
                    v_stride_block, v_stride_offset, ks, vs, k_ready, v_ready, k_free, v_free, BLOCK_SIZE, STAGES,
                    OVERLAP,
                ),
            ),
            (
                _consumer,
                (
                    q_ptr, q_stride_h, q, ks, vs, ones, q_ready, k_ready, v_ready, k_free, v_free, first, end, begin_at,
                    stop, step, scale, out_ptr, top_ptr, total_ptr, row_at, cuts, G, 0, STAGES, OVERLAP,
                ),
            ),
            (
                _consumer,
                (
                    q_ptr, q_stride_h, q, ks, vs, ones, q_ready, k_ready, v_ready, k_free, v_free, first, end, begin_at,
                    stop, step, scale, out_ptr, top_ptr, total_ptr, row_at, cuts, G, 1, STAGES, OVERLAP,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
