# mypy: allow-untyped-defs
"""The forward for Hopper in Gluon: a producer gathers keys into shared memory, two consumer warpgroups share them.

Shapes of DeepSeek-V3.2: 64 of the heads of one token, 576 channels of which 512 are values, keys in pairs of blocks of
64. docs/sparse_attention.md has a diagram of the schedule. An entry is a position in a token's row of indices.
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

from .._gluon_triton import async_load, barriers, sync, tell

HEADS = gl.constexpr(64)  # heads per program
KEYS = gl.constexpr(64)  # keys per block
HALF = gl.constexpr(256)  # value channels per consumer
REST = gl.constexpr(64)  # rotary channels, which are not part of the values
LOWEST = gl.constexpr(-1e30)
LN_2 = gl.constexpr(0.6931471805599453)

_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, _OUT.value, 2))


@gluon.jit
def _row_pointers(kv_ptr, indices_ptr, kv_stride, start, end, COUNT: gl.constexpr):
    """Return the addresses of a block's keys, and the mask of those that exist."""
    entries = start + gl.arange(0, COUNT, gl.SliceLayout(1, _COPY))
    keys = gl.load(indices_ptr + entries, mask=entries < end, other=-1)
    return gl.expand_dims(kv_ptr + gl.maximum(keys, 0).to(gl.int64) * kv_stride, 1), gl.expand_dims(keys >= 0, 1)


@gluon.jit
def _copy(smem, rows, exists, first: gl.constexpr, width: gl.constexpr):
    channels = first + gl.arange(0, width, gl.SliceLayout(0, _COPY))
    async_load(smem, rows + gl.expand_dims(channels, 0), exists)


@gluon.jit
def _copy_half(nope, rope, rows, exists, ready, free, phase, first: gl.constexpr, WITH_REST: gl.constexpr):
    """Copy half of a block's value channels once their buffer is free and, WITH_REST, the rotary channels as well."""
    mbarrier.wait(free, phase)
    _copy(nope.slice(first, HALF, 1), rows, exists, first, HALF)
    if WITH_REST:
        _copy(rope, rows, exists, 2 * HALF, REST)
    async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def _producer(
    kv_ptr, indices_ptr, kv_stride, end, pairs, nope, rope, ready, free, COUNT: gl.constexpr, REST_LAST: gl.constexpr
):
    """Copy halves of blocks in the order in which the consumers need them: even left and right, odd right and left.

    The rotary channels are copied with the right half. REST_LAST: those of the odd block come with the left half, which
    the other consumer frees last: in the forward their buffer holds the weights once the scores are computed.
    """
    for pair in range(pairs):
        phase = (pair & 1) ^ 1
        rows, exists = _row_pointers(kv_ptr, indices_ptr, kv_stride, pair * (2 * COUNT), end, COUNT)
        _copy_half(nope.index(0), rope.index(0), rows, exists, ready.index(0), free.index(0), phase, 0, False)
        _copy_half(nope.index(0), rope.index(0), rows, exists, ready.index(1), free.index(1), phase, 256, True)
        rows, exists = _row_pointers(kv_ptr, indices_ptr, kv_stride, pair * (2 * COUNT) + COUNT, end, COUNT)
        _copy_half(nope.index(1), rope.index(1), rows, exists, ready.index(2), free.index(2), phase, 256, not REST_LAST)
        _copy_half(nope.index(1), rope.index(1), rows, exists, ready.index(3), free.index(3), phase, 0, REST_LAST)


@gluon.jit
def _scores(q_nope, q_rope, nope, rope, first_ready, second_ready, phase, LEFT_FIRST: gl.constexpr):
    """Return the scores [heads, keys] of one block, using its two halves as they arrive."""
    first: gl.constexpr = 0 if LEFT_FIRST else 256
    second: gl.constexpr = 256 if LEFT_FIRST else 0
    mbarrier.wait(first_ready, phase)
    fence_async_shared()
    s = gl.zeros([HEADS, KEYS], gl.float32, _SCORES)
    s = warpgroup_mma(
        q_nope.slice(first, 256, 1), nope.slice(first, 256, 1).permute((1, 0)), s, use_acc=False, is_async=True
    )
    mbarrier.wait(second_ready, phase)
    fence_async_shared()
    s = warpgroup_mma(q_nope.slice(second, 256, 1), nope.slice(second, 256, 1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_rope, rope.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def _mask(s, start, end):
    """Set the scores of absent keys to -inf; only the last block has any."""
    if start + KEYS > end:
        entries = start + gl.arange(0, KEYS, gl.SliceLayout(0, _SCORES))
        s = gl.where(gl.expand_dims(entries < end, 0), s, float("-inf"))
    return s


@gluon.jit
def _scale_rows(out, factor):
    return out * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, _OUT)), 1)


@gluon.jit
def _store_out(out_ptr, out, total, first: gl.constexpr):
    rows = gl.arange(0, HEADS, gl.SliceLayout(1, _OUT))
    columns = gl.arange(0, HALF, gl.SliceLayout(0, _OUT))
    out = _scale_rows(out, 1.0 / gl.where(total > 0, total, 1.0))
    at = out_ptr + gl.expand_dims(rows * (2 * HALF) + first, 1) + gl.expand_dims(columns, 0)
    gl.store(at, out.to(out_ptr.dtype.element_ty))


@gluon.jit
def _even_consumer(q_nope, q_rope, nope, rope, tops, totals, ready, free, published, end, pairs, scale, out_ptr):
    """Compute the scores of the even blocks, and the left half of the output."""
    top = gl.full([HEADS], LOWEST, gl.float32, gl.SliceLayout(1, _SCORES))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
    out = gl.zeros([HEADS, HALF], gl.float32, _OUT)
    for pair in range(pairs):
        phase = pair & 1
        # Zero, but unknown to the compiler, which would otherwise keep a descriptor per matmul in registers.
        zero = pair >> 20
        s = _scores(
            q_nope.index(zero), q_rope.index(zero), nope.index(zero), rope.index(zero), ready.index(0), ready.index(1),
            phase, True,
        )  # fmt: skip
        s = _mask(s, pair * (2 * KEYS), end)
        new_top = gl.maximum(top, gl.max(s, 1) * scale)
        tops.index(0).store(new_top)
        p = gl.exp2(s * scale - gl.expand_dims(new_top, 1))
        weights = p.to(nope.dtype)
        rope.index(0).store(weights)
        fence_async_shared()
        tell(published.index(0))
        shrink = gl.exp2(top - new_top)
        total = total * shrink + gl.sum(p, 1)
        out = _scale_rows(out, shrink)
        out = warpgroup_mma(gl.convert_layout(weights, _WEIGHTS), nope.index(0).slice(0, HALF, 1), out, is_async=True)
        out = warpgroup_mma_wait(0, [out])
        tell(free.index(0))
        mbarrier.wait(published.index(1), phase)
        fence_async_shared()
        top = tops.index(1).load(gl.SliceLayout(1, _SCORES))
        shrink = gl.exp2(new_top - top)
        total = total * shrink
        out = _scale_rows(out, shrink)
        out = warpgroup_mma(rope.index(1), nope.index(1).slice(0, HALF, 1), out, is_async=True)
        out = warpgroup_mma_wait(0, [out])
        tell(free.index(3))
    totals.index(0).store(total)
    tell(published.index(2))
    mbarrier.wait(published.index(3), 0)
    total += totals.index(1).load(gl.SliceLayout(1, _SCORES))
    _store_out(out_ptr, out, total, 0)


@gluon.jit
def _odd_consumer(
    q_nope, q_rope, nope, rope, tops, totals, ready, free, published, end, pairs, scale, out_ptr, lse_ptr
):
    """Compute the scores of the odd blocks, and the right half of the output."""
    top = gl.full([HEADS], LOWEST, gl.float32, gl.SliceLayout(1, _SCORES))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, _SCORES))
    out = gl.zeros([HEADS, HALF], gl.float32, _OUT)
    for pair in range(pairs):
        phase = pair & 1
        zero = pair >> 20
        s = _scores(
            q_nope.index(zero), q_rope.index(zero), nope.index(zero + 1), rope.index(zero + 1), ready.index(2),
            ready.index(3), phase, False,
        )  # fmt: skip
        s = _mask(s, pair * (2 * KEYS) + KEYS, end)
        block_top = gl.max(s, 1) * scale
        mbarrier.wait(published.index(0), phase)
        fence_async_shared()
        even_top = tops.index(0).load(gl.SliceLayout(1, _SCORES))
        out = _scale_rows(out, gl.exp2(top - even_top))
        out = warpgroup_mma(rope.index(0), nope.index(0).slice(HALF, HALF, 1), out, is_async=True)
        new_top = gl.maximum(even_top, block_top)
        tops.index(1).store(new_top)
        p = gl.exp2(s * scale - gl.expand_dims(new_top, 1))
        weights = p.to(nope.dtype)
        rope.index(1).store(weights)
        fence_async_shared()
        tell(published.index(1))
        total = total * gl.exp2(top - new_top) + gl.sum(p, 1)
        out = warpgroup_mma_wait(0, [out])
        tell(free.index(1))
        out = _scale_rows(out, gl.exp2(even_top - new_top))
        out = warpgroup_mma(
            gl.convert_layout(weights, _WEIGHTS), nope.index(1).slice(HALF, HALF, 1), out, is_async=True
        )
        out = warpgroup_mma_wait(0, [out])
        tell(free.index(2))
        top = new_top
    totals.index(1).store(total)
    tell(published.index(3))
    mbarrier.wait(published.index(2), 0)
    total += totals.index(0).load(gl.SliceLayout(1, _SCORES))
    _store_out(out_ptr, out, total, HALF)
    lse = gl.where(total > 0, (top + gl.log2(total)) * LN_2, float("-inf"))
    gl.store(lse_ptr + gl.arange(0, HEADS, gl.SliceLayout(1, _SCORES)), lse)


@gluon.jit
def _load_rows(smem, ptr, stride, first: gl.constexpr, tiles: gl.constexpr):
    """Load tiles of 64 channels of 64 heads into shared memory."""
    rows = gl.arange(0, HEADS, gl.SliceLayout(1, _COPY))
    channels = gl.arange(0, 64, gl.SliceLayout(0, _COPY))
    at = ptr + gl.expand_dims(rows * stride, 1) + gl.expand_dims(channels, 0)
    for i in gl.static_range(tiles):
        async_load(smem.slice(64 * i, 64, 1), at + (first + 64 * i))


@gluon.jit
def _selection_end(indices_ptr, K):
    """Return one past the last selected entry of a token's row of indices."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    end = 0
    for start in range(0, K, 2048):
        entries = start + gl.arange(0, 2048, layout)
        keys = gl.load(indices_ptr + entries, mask=entries < K, other=-1)
        end = gl.maximum(end, gl.max(gl.where(keys >= 0, entries + 1, 0), 0))
    return end


@gluon.jit
def _sparse_forward_gluon_kernel(
    q_ptr, kv_ptr, indices_ptr, out_ptr, lse_ptr, kv_stride, K, scale, H: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    row = gl.program_id(1).to(gl.int64) * H + gl.program_id(0) * HEADS
    indices_ptr += gl.program_id(1).to(gl.int64) * K
    q_ptr += row * (2 * HALF + REST)
    out_ptr += row * (2 * HALF)
    dtype: gl.constexpr = kv_ptr.dtype.element_ty
    q_nope = gl.allocate_shared_memory(dtype, [1, HEADS, 2 * HALF], _TILE)
    q_rope = gl.allocate_shared_memory(dtype, [1, HEADS, REST], _TILE)
    nope = gl.allocate_shared_memory(dtype, [2, KEYS, 2 * HALF], _TILE)
    rope = gl.allocate_shared_memory(dtype, [2, KEYS, REST], _TILE)
    tops = gl.allocate_shared_memory(gl.float32, [2, HEADS], _VECTOR)
    totals = gl.allocate_shared_memory(gl.float32, [2, HEADS], _VECTOR)
    ready = barriers(4, 128)
    free = barriers(4, 1)
    published = barriers(4, 1)
    _load_rows(q_nope.index(0), q_ptr, 2 * HALF + REST, 0, 8)
    _load_rows(q_rope.index(0), q_ptr, 2 * HALF + REST, 512, 1)
    end = _selection_end(indices_ptr, K)
    pairs = (end + 2 * KEYS - 1) // (2 * KEYS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    sync()
    shared = (q_nope, q_rope, nope, rope, tops, totals, ready, free, published, end, pairs, scale, out_ptr)
    gl.warp_specialize(
        [
            (_producer, (kv_ptr, indices_ptr, kv_stride, end, pairs, nope, rope, ready, free, KEYS, True)),
            (_even_consumer, shared),
            (_odd_consumer, shared + (lse_ptr + row,)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )
