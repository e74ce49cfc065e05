# mypy: allow-untyped-defs
"""The backward for Hopper in Gluon, in two passes like the plain one: dq with P and dS, then the shares of dkv.

The first pass takes 64 heads of a token, the second all 64 or 128; 576 channels of which 512 are values.
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
from .forward_gluon_triton import (
    _COPY,
    _TILE,
    HALF,
    HEADS,
    REST,
    _load_rows,
    _producer,
    _selection_end,
)

FEW = gl.constexpr(32)  # keys per block in the first pass
KEYS = gl.constexpr(64)  # keys per block in the second pass
LOG2_E = gl.constexpr(1.4426950408889634)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_NARROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_WIDE_LEFT = gl.constexpr(gl.DotOperandLayout(0, _WIDE.value, 2))
_NARROW_LEFT = gl.constexpr(gl.DotOperandLayout(0, _NARROW.value, 2))


def _store_layout(registers: list[list[int]], lanes: list[list[int]], columns: int) -> gl.DistributedLinearLayout:
    """Return the register layout of a [64, columns] tile in four warps, 16 rows each."""
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], block_bases=[], shape=[64, columns])


# One store of a warp writes whole lines of 128 bytes of shares, or 64 bytes of a row of P and dS. In the layout of the
# tensor cores every store would touch 8 rows, with one sector or half a sector each.
_SHARE_LANES = [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]]
_SHARE_LINES = gl.constexpr(
    _store_layout([[0, 1], [0, 2], [0, 32], [0, 64], [0, 128], [4, 0], [8, 0]], _SHARE_LANES, columns=256)
)
_REST_LINES = gl.constexpr(_store_layout([[0, 1], [0, 2], [0, 32], [4, 0], [8, 0]], _SHARE_LANES, columns=64))
_SCORE_LINES = gl.constexpr(
    _store_layout([[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], columns=32)
)
_FEW_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))


@gluon.jit
def _score_gradient(
    q_nope, q_rope, dout, nope, rope, first_ready, second_ready, phase, lse, delta, scale, start, end, p_ptr, ds_ptr,
    pitch, values, LEFT_FIRST: gl.constexpr,
):  # fmt: skip
    """Return dS [heads, keys] of one block in the dtype of the keys, and store P and dS to memory."""
    first: gl.constexpr = 0 if LEFT_FIRST else 256
    second: gl.constexpr = 256 if LEFT_FIRST else 0
    s = gl.zeros([HEADS, FEW], gl.float32, _SCORES)
    dp = gl.zeros([HEADS, FEW], gl.float32, _SCORES)
    mbarrier.wait(first_ready, phase)
    fence_async_shared()
    keys = nope.slice(first, 256, 1).permute((1, 0))
    s = warpgroup_mma(q_nope.slice(first, 256, 1), keys, s, use_acc=False, is_async=True)
    mbarrier.wait(second_ready, phase)
    fence_async_shared()
    second_keys = nope.slice(second, 256, 1).permute((1, 0))
    s = warpgroup_mma(q_nope.slice(second, 256, 1), second_keys, s, is_async=True)
    s = warpgroup_mma(q_rope, rope.permute((1, 0)), s, is_async=True)
    keys = values.slice(first, 256, 1).permute((1, 0))
    second_keys = values.slice(second, 256, 1).permute((1, 0))
    dp = warpgroup_mma(dout.slice(first, 256, 1), keys, dp, use_acc=False, is_async=True)
    dp = warpgroup_mma(dout.slice(second, 256, 1), second_keys, dp, is_async=True)
    s = warpgroup_mma_wait(2, [s])
    p = gl.exp2(s * (scale * LOG2_E) - gl.expand_dims(lse, 1))
    if start + FEW > end:
        entries = start + gl.arange(0, FEW, gl.SliceLayout(0, _SCORES))
        p = gl.where(gl.expand_dims(entries < end, 0), p, 0.0)
    at = _score_offsets(start, pitch)
    gl.store(p_ptr + at, gl.convert_layout(p.to(nope.dtype), _SCORE_LINES))
    dp = warpgroup_mma_wait(0, [dp])
    ds = (p * (dp - gl.expand_dims(delta, 1)) * scale).to(nope.dtype)
    gl.store(ds_ptr + at, gl.convert_layout(ds, _SCORE_LINES))
    return ds


@gluon.jit
def _row_statistics(lse_ptr, delta_ptr):
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, _SCORES))
    return gl.load(lse_ptr + heads) * LOG2_E, gl.load(delta_ptr + heads)


@gluon.jit
def _score_offsets(start, pitch):
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, _SCORE_LINES))
    entries = gl.arange(0, FEW, gl.SliceLayout(0, _SCORE_LINES))
    return gl.expand_dims(heads * pitch + start, 1) + gl.expand_dims(entries, 0)


@gluon.jit
def _left_consumer(
    q_nope, q_rope, dout, nope, rope, shared_ds, ready, free, published, end, pairs, scale, lse_ptr, delta_ptr, p_ptr,
    ds_ptr, pitch, dq_ptr,
):  # fmt: skip
    """Compute dS of the even blocks, and the left half of dq."""
    lse, delta = _row_statistics(lse_ptr, delta_ptr)
    dq = gl.zeros([HEADS, HALF], gl.float32, _WIDE)
    for pair in range(pairs):
        phase = pair & 1
        # Zero, but unknown to the compiler, which would otherwise keep a descriptor per matmul in registers.
        zero = pair >> 20
        ds = _score_gradient(
            q_nope.index(zero), q_rope.index(zero), dout.index(zero), nope.index(zero), rope.index(zero),
            ready.index(0), ready.index(1), phase, lse, delta, scale, pair * (2 * FEW), end, p_ptr, ds_ptr,
            pitch, nope.index(pair >> 21), True,
        )  # fmt: skip
        shared_ds.index(0).store(ds)
        fence_async_shared()
        tell(published.index(0))
        dq = warpgroup_mma(gl.convert_layout(ds, _WIDE_LEFT), nope.index(zero).slice(0, HALF, 1), dq, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])
        tell(free.index(0))
        mbarrier.wait(published.index(1), phase)
        fence_async_shared()
        dq = warpgroup_mma(shared_ds.index(1), nope.index(zero + 1).slice(0, HALF, 1), dq, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])
        tell(free.index(3))
    _store_tile(dq_ptr, dq, 2 * HALF + REST, _WIDE)


@gluon.jit
def _right_consumer(
    q_nope, q_rope, dout, nope, rope, shared_ds, ready, free, published, end, pairs, scale, lse_ptr, delta_ptr, p_ptr,
    ds_ptr, pitch, dq_ptr,
):  # fmt: skip
    """Compute dS of the odd blocks, the right half of dq and its rotary channels."""
    lse, delta = _row_statistics(lse_ptr, delta_ptr)
    dq = gl.zeros([HEADS, HALF], gl.float32, _WIDE)
    dq_rest = gl.zeros([HEADS, REST], gl.float32, _NARROW)
    for pair in range(pairs):
        phase = pair & 1
        zero = pair >> 20
        ds = _score_gradient(
            q_nope.index(zero), q_rope.index(zero), dout.index(zero), nope.index(zero + 1), rope.index(zero + 1),
            ready.index(2), ready.index(3), phase, lse, delta, scale, pair * (2 * FEW) + FEW, end, p_ptr,
            ds_ptr, pitch, nope.index((pair >> 21) + 1), False,
        )  # fmt: skip
        shared_ds.index(1).store(ds)
        fence_async_shared()
        tell(published.index(1))
        dq = warpgroup_mma(
            gl.convert_layout(ds, _WIDE_LEFT), nope.index(zero + 1).slice(HALF, HALF, 1), dq, is_async=True
        )
        dq_rest = warpgroup_mma(gl.convert_layout(ds, _NARROW_LEFT), rope.index(zero + 1), dq_rest, is_async=True)
        dq, dq_rest = warpgroup_mma_wait(0, [dq, dq_rest])
        tell(free.index(2))
        mbarrier.wait(published.index(0), phase)
        fence_async_shared()
        dq = warpgroup_mma(shared_ds.index(0), nope.index(zero).slice(HALF, HALF, 1), dq, is_async=True)
        dq_rest = warpgroup_mma(shared_ds.index(0), rope.index(zero), dq_rest, is_async=True)
        dq, dq_rest = warpgroup_mma_wait(0, [dq, dq_rest])
        tell(free.index(1))
    _store_tile(dq_ptr + HALF, dq, 2 * HALF + REST, _WIDE)
    _store_tile(dq_ptr + 2 * HALF, dq_rest, 2 * HALF + REST, _NARROW)


@gluon.jit
def _store_tile(ptr, x, stride, layout: gl.constexpr):
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    gl.store(ptr + gl.expand_dims(rows * stride, 1) + gl.expand_dims(columns, 0), x.to(ptr.dtype.element_ty))


@gluon.jit
def _sparse_dq_gluon_kernel(
    q_ptr, kv_ptr, indices_ptr, lse_ptr, delta_ptr, dout_ptr, dq_ptr, p_ptr, ds_ptr, kv_stride, first, K, pitch, scale,
    H: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute dq of 64 heads of one token, and store P and dS, [tokens, H, pitch], for the second pass."""
    place = gl.program_id(1).to(gl.int64)
    row = (first + place) * H + gl.program_id(0) * HEADS
    indices_ptr += (first + place) * K
    scores = (place * H + gl.program_id(0) * HEADS) * pitch
    dtype: gl.constexpr = kv_ptr.dtype.element_ty
    q_nope = gl.allocate_shared_memory(dtype, [1, HEADS, 2 * HALF], _TILE)
    q_rope = gl.allocate_shared_memory(dtype, [1, HEADS, REST], _TILE)
    dout = gl.allocate_shared_memory(dtype, [1, HEADS, 2 * HALF], _TILE)
    nope = gl.allocate_shared_memory(dtype, [2, FEW, 2 * HALF], _TILE)
    rope = gl.allocate_shared_memory(dtype, [2, FEW, REST], _TILE)
    shared_ds = gl.allocate_shared_memory(dtype, [2, HEADS, FEW], _FEW_TILE)
    ready = barriers(4, 128)
    free = barriers(4, 1)
    published = barriers(2, 1)
    q_ptr += row * (2 * HALF + REST)
    _load_rows(q_nope.index(0), q_ptr, 2 * HALF + REST, 0, 8)
    _load_rows(q_rope.index(0), q_ptr, 2 * HALF + REST, 2 * HALF, 1)
    _load_rows(dout.index(0), dout_ptr + row * (2 * HALF), 2 * HALF, 0, 8)
    end = _selection_end(indices_ptr, K)
    pairs = (end + 2 * FEW - 1) // (2 * FEW)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    sync()
    shared = (
        q_nope, q_rope, dout, nope, rope, shared_ds, ready, free, published, end, pairs, scale, lse_ptr + row,
        delta_ptr + row, p_ptr + scores, ds_ptr + scores, pitch, dq_ptr + row * (2 * HALF + REST),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_producer, (kv_ptr, indices_ptr, kv_stride, end, pairs, nope, rope, ready, free, FEW, False)),
            (_left_consumer, shared),
            (_right_consumer, shared),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


@gluon.jit
def _score_producer(p_ptr, ds_ptr, pitch, blocks, p, ds, ready, free):
    """Copy P and dS of all heads to shared memory, a block of keys at a time."""
    heads = gl.arange(0, p.shape[1], gl.SliceLayout(1, _COPY))
    entries = gl.arange(0, KEYS, gl.SliceLayout(0, _COPY))
    at = gl.expand_dims(heads * pitch, 1) + gl.expand_dims(entries, 0)
    for block in range(blocks):
        stage = block & 1
        mbarrier.wait(free.index(stage), ((block >> 1) & 1) ^ 1)
        async_load(ds.index(stage), ds_ptr + at + block * KEYS)
        async_load(p.index(stage), p_ptr + at + block * KEYS)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)


@gluon.jit
def _share_consumer(
    q, q_rest, dout, p, ds, ready, free, indices_ptr, dkv_ptr, end, blocks, is_right, ADD: gl.constexpr,
    OWN: gl.constexpr,
):  # fmt: skip
    """Compute the shares dS^T q + P^T dout of every second block, from block OWN on, and add or store them."""
    for block in range(OWN, blocks, 2):
        zero = block >> 20  # see _left_consumer
        mbarrier.wait(ready.index(OWN), (block >> 1) & 1)
        fence_async_shared()
        share = gl.zeros([KEYS, HALF], gl.float32, _WIDE)
        ds_transposed = ds.index(zero + OWN).permute((1, 0))
        share = warpgroup_mma(ds_transposed, q.index(zero), share, use_acc=False, is_async=True)
        share = warpgroup_mma(p.index(zero + OWN).permute((1, 0)), dout.index(zero), share, is_async=True)
        if is_right:
            rope_share = gl.zeros([KEYS, REST], gl.float32, _NARROW)
            rope_share = warpgroup_mma(ds_transposed, q_rest.index(zero), rope_share, use_acc=False, is_async=True)
            rope_share = warpgroup_mma_wait(0, [rope_share])
            _store_share(dkv_ptr + HALF, indices_ptr, rope_share, block * KEYS, end, ADD, _REST_LINES)
        share = warpgroup_mma_wait(0, [share])
        tell(free.index(OWN))
        _store_share(dkv_ptr, indices_ptr, share, block * KEYS, end, ADD, _SHARE_LINES)


@gluon.jit
def _store_share(dkv_ptr, indices_ptr, share, start, end, ADD: gl.constexpr, layout: gl.constexpr):
    share = gl.convert_layout(share, layout)
    entries = start + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    columns = gl.expand_dims(gl.arange(0, share.shape[1], gl.SliceLayout(0, layout)), 0)
    keys = gl.load(indices_ptr + entries, mask=entries < end, other=-1)
    exists = gl.expand_dims(keys >= 0, 1)
    rows = gl.maximum(keys, 0) if ADD else entries
    at = dkv_ptr + gl.expand_dims(rows.to(gl.int64) * (2 * HALF + REST), 1) + columns
    if ADD:
        gl.atomic_add(at, share, mask=exists, sem="relaxed")
    else:
        gl.store(at, share, mask=exists)


@gluon.jit
def _load_heads(smem, ptr, stride):
    heads = gl.arange(0, smem.shape[0], gl.SliceLayout(1, _COPY))
    columns = gl.arange(0, smem.shape[1], gl.SliceLayout(0, _COPY))
    async_load(smem, ptr + gl.expand_dims(heads * stride, 1) + gl.expand_dims(columns, 0))


@gluon.jit
def _sparse_dkv_gluon_kernel(
    q_ptr, dout_ptr, indices_ptr, p_ptr, ds_ptr, dkv_ptr, first, K, pitch, H: gl.constexpr, ADD: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute half of the columns of one token's shares: the left half, or the right half and the rotary channels.

    ADD: the shares are added to dkv [S, D] atomically; otherwise they are stored in dkv [tokens, K, D].
    """
    is_right = gl.program_id(0)
    place = gl.program_id(1).to(gl.int64)
    token = first + place
    D: gl.constexpr = 2 * HALF + REST
    indices_ptr += token * K
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q = gl.allocate_shared_memory(dtype, [1, H, HALF], _TILE)
    q_rest = gl.allocate_shared_memory(dtype, [1, H, REST], _TILE)
    dout = gl.allocate_shared_memory(dtype, [1, H, HALF], _TILE)
    p = gl.allocate_shared_memory(dtype, [2, H, KEYS], _TILE)
    ds = gl.allocate_shared_memory(dtype, [2, H, KEYS], _TILE)
    ready = barriers(2, 128)
    free = barriers(2, 1)
    _load_heads(q.index(0), q_ptr + token * (H * D) + is_right * HALF, D)
    _load_heads(q_rest.index(0), q_ptr + token * (H * D) + 2 * HALF, D)
    _load_heads(dout.index(0), dout_ptr + token * (H * 2 * HALF) + is_right * HALF, 2 * HALF)
    end = _selection_end(indices_ptr, K)
    blocks = (end + KEYS - 1) // KEYS
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    sync()
    scores = place * H * pitch
    dkv_ptr += is_right * HALF
    if not ADD:
        dkv_ptr += place * K * D
    gl.warp_specialize(
        [
            (_score_producer, (p_ptr + scores, ds_ptr + scores, pitch, blocks, p, ds, ready, free)),
            (
                _share_consumer,
                (q, q_rest, dout, p, ds, ready, free, indices_ptr, dkv_ptr, end, blocks, is_right, ADD, 0),
            ),
            (
                _share_consumer,
                (q, q_rest, dout, p, ds, ready, free, indices_ptr, dkv_ptr, end, blocks, is_right, ADD, 1),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )
