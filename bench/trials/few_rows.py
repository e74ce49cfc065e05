"""Products of few rows whose whole weight tile is asked for before the wait."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

async_copy_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
sync = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _wait(OVERLAP: gl.constexpr):
    if OVERLAP:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _trigger(EARLY: gl.constexpr):
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _ask(tile, ptr, stride, N, first, start, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, COPY: gl.constexpr):
    rows = first + gl.arange(0, COLUMNS, gl.SliceLayout(1, COPY))
    k = start + gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))
    at = ptr + gl.expand_dims((rows % N).to(gl.int64) * stride, 1) + gl.expand_dims(k, 0)
    async_copy_load(tile, at)
    async_copy.commit_group()


@gluon.jit
def _neighbours(x, ROWS: gl.constexpr, LENGTH: gl.constexpr, LEFT: gl.constexpr):
    if LENGTH == LEFT:
        return x
    else:
        return _neighbours(gl.sum(x.reshape([ROWS, LENGTH // 2, 2]), 2), ROWS, LENGTH // 2, LEFT)


@gluon.jit
def _halves(x, ROWS: gl.constexpr, LENGTH: gl.constexpr, LEFT: gl.constexpr):
    if LENGTH == LEFT:
        return x
    else:
        return _halves(gl.sum(x.reshape([ROWS, 2, LENGTH // 2]), 1), ROWS, LENGTH // 2, LEFT)


@gluon.jit
def _row_sum(x, ROWS: gl.constexpr, LENGTH: gl.constexpr):
    x = _neighbours(x, ROWS, LENGTH, LENGTH // 8)
    x = _halves(x, ROWS, LENGTH // 8, 32)
    return _neighbours(x, ROWS, 32, 1).reshape([ROWS])


@gluon.jit
def norm_linear_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    y_ptr,
    eps,
    weight_stride,
    N,
    K: gl.constexpr,
    T: gl.constexpr,
    BLOCK_K: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
    OVERLAP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """linear(norm(x + residual)); every program takes the norm for itself, and the first one writes it down."""
    TILES: gl.constexpr = K // BLOCK_K
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    SMEM: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    first = gl.program_id(0) * 16
    weights = gl.allocate_shared_memory(dtype, [TILES, 16, BLOCK_K], SMEM)
    ROWS: gl.constexpr = 1 if T == 1 else 8  # with the first ones again behind the last
    xs = gl.allocate_shared_memory(dtype, [ROWS, K], SMEM)
    _trigger(EARLY)
    if not AHEAD:
        _wait(OVERLAP)
    for i in gl.static_range(TILES):
        _ask(weights.index(i), weight_ptr, weight_stride, N, first, i * BLOCK_K, 16, BLOCK_K, COPY)
    k = gl.arange(0, K, gl.SliceLayout(0, ROW))
    scale = gl.expand_dims(gl.load(norm_ptr + k).to(gl.float32), 0)
    if AHEAD:
        _wait(OVERLAP)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, ROW)) % T
    at = gl.expand_dims(rows * K, 1) + gl.expand_dims(k, 0)
    x = gl.load(x_ptr + at).to(gl.float32) + gl.load(residual_ptr + at).to(gl.float32)
    total = x.to(dtype)
    x = total.to(gl.float32)
    squares = _row_sum(x * x, ROWS, K)
    inverse = gl.div_rn(gl.full_like(squares, 1.0), gl.sqrt_rn(squares / K + eps))
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, ROW))
    normed = (x * gl.expand_dims(inverse, 1) * scale).to(dtype)
    if gl.program_id(0) == 0:
        gl.store(total_ptr + at, total)
        gl.store(normed_ptr + at, normed)
    xs.store(normed)
    y = gl.zeros([16, 8], gl.float32, MMA)
    for i in gl.static_range(TILES):
        async_copy.wait_group(TILES - i - 1)
        sync()
        tile = xs.slice(i * BLOCK_K, BLOCK_K, 1)
        if ROWS == 1:
            x = tile.permute((1, 0)).load(B) + gl.zeros([BLOCK_K, 8], dtype, B)  # tensor cores take no fewer columns
        else:
            x = tile.permute((1, 0)).load(B)
        y = mma_v2(weights.index(i).load(A), x, y)
    columns = first + gl.arange(0, 16, gl.SliceLayout(1, MMA))
    tokens = gl.arange(0, 8, gl.SliceLayout(0, MMA))
    to = y_ptr + gl.expand_dims(tokens.to(gl.int64) * N, 0) + gl.expand_dims(columns, 1)
    gl.store(to, y.to(y_ptr.dtype.element_ty), mask=gl.expand_dims(tokens < T, 0) & gl.expand_dims(columns < N, 1))


@gluon.jit
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    weight_stride,
    T,
    N,
    K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
    OVERLAP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Some rows of the weight; all of their K that shared memory holds is asked for before the wait."""
    TILES: gl.constexpr = K // BLOCK_K
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1] if COLUMNS >= 16 * WARPS else [1, WARPS], [16, 8])
    COPY: gl.constexpr = (
        gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
        if BLOCK_K >= 256
        else gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    )
    SMEM: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    first = gl.program_id(0) * COLUMNS
    weights = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, BLOCK_K], SMEM)
    xs = gl.allocate_shared_memory(dtype, [ROWS, K], SMEM)
    _trigger(EARLY)
    if not AHEAD:
        _wait(OVERLAP)
    for i in gl.static_range(STAGES):
        _ask(weights.index(i), weight_ptr, weight_stride, N, first, i * BLOCK_K, COLUMNS, BLOCK_K, COPY)
    if AHEAD:
        _wait(OVERLAP)
    XCOPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, XCOPY))
    k = gl.arange(0, K, gl.SliceLayout(0, XCOPY))
    at = x_ptr + gl.expand_dims(rows.to(gl.int64) * x_stride, 1) + gl.expand_dims(k, 0)
    xs.store(gl.load(at, mask=gl.expand_dims(rows < T, 1) & (gl.expand_dims(k, 0) < K), other=0.0))
    total = gl.zeros([COLUMNS, ROWS], gl.float32, MMA)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for i in gl.static_range(TILES):
        async_copy.wait_group(min(STAGES, TILES - i) - 1)
        sync()
        w = weights.index(i % STAGES).load(A)
        x = xs.slice(i * BLOCK_K, BLOCK_K, 1).permute((1, 0)).load(B)
        total = mma_v2(w, x, total)
        if i + STAGES < TILES:
            sync()
            _ask(
                weights.index(i % STAGES),
                weight_ptr,
                weight_stride,
                N,
                first,
                (i + STAGES) * BLOCK_K,
                COLUMNS,
                BLOCK_K,
                COPY,
            )
    columns = first + gl.arange(0, COLUMNS, gl.SliceLayout(1, MMA))
    tokens = gl.arange(0, ROWS, gl.SliceLayout(0, MMA))
    if HAS_BIAS:
        total += gl.expand_dims(gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32), 1)
    to = y_ptr + gl.expand_dims(tokens.to(gl.int64) * N, 0) + gl.expand_dims(columns, 1)
    gl.store(to, total.to(y_ptr.dtype.element_ty), mask=gl.expand_dims(tokens < T, 0) & gl.expand_dims(columns < N, 1))


@gluon.jit
def gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    ids_ptr,
    hidden_ptr,
    x_stride,
    stride_e,
    stride_f,
    SLOTS,
    F,
    C: gl.constexpr,
    BLOCK_C: gl.constexpr,
    STAGES: gl.constexpr,
    TRIGGER: gl.constexpr,
    OVERLAP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """One (token, slot), 16 rows of its expert's gate and up."""
    TILES: gl.constexpr = C // BLOCK_C
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    COPY: gl.constexpr = (
        gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
        if BLOCK_C >= 256
        else gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    )
    SMEM: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    XCOPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    gates = gl.allocate_shared_memory(dtype, [STAGES, 16, BLOCK_C], SMEM)
    ups = gl.allocate_shared_memory(dtype, [STAGES, 16, BLOCK_C], SMEM)
    xs = gl.allocate_shared_memory(dtype, [8, C], SMEM)
    _wait(OVERLAP)
    _trigger(TRIGGER)
    pair = gl.program_id(0)
    first = gl.program_id(1) * 16
    expert = gl.load(ids_ptr + pair).to(gl.int64)
    rows = gl.arange(0, 8, gl.SliceLayout(1, XCOPY))
    c = gl.arange(0, C, gl.SliceLayout(0, XCOPY))
    at = x_ptr + (pair // SLOTS).to(gl.int64) * x_stride + gl.expand_dims(rows * 0, 1) + gl.expand_dims(c, 0)
    x = gl.load(at, mask=gl.expand_dims(rows == 0, 1) & (gl.expand_dims(c, 0) < C), other=0.0)
    gate_ptr = gate_up_ptr + expert * stride_e
    up_ptr = gate_ptr + F.to(gl.int64) * stride_f
    for i in gl.static_range(STAGES):
        _ask2(gates.index(i), ups.index(i), gate_ptr, up_ptr, stride_f, F, first, i * BLOCK_C, BLOCK_C, COPY)
    xs.store(x)
    gate = gl.zeros([16, 8], gl.float32, MMA)
    up = gl.zeros([16, 8], gl.float32, MMA)
    for i in gl.static_range(TILES):
        async_copy.wait_group(min(STAGES, TILES - i) - 1)
        sync()
        b = xs.slice(i * BLOCK_C, BLOCK_C, 1).permute((1, 0)).load(B)
        gate = mma_v2(gates.index(i % STAGES).load(A), b, gate)
        up = mma_v2(ups.index(i % STAGES).load(A), b, up)
        if i + STAGES < TILES:
            sync()
            _ask2(
                gates.index(i % STAGES),
                ups.index(i % STAGES),
                gate_ptr,
                up_ptr,
                stride_f,
                F,
                first,
                (i + STAGES) * BLOCK_C,
                BLOCK_C,
                COPY,
            )
    gate = gate.to(dtype).to(gl.float32)
    up = up.to(dtype).to(gl.float32)
    hidden = (gate / (1 + gl.exp(-gate)) * up).to(dtype)
    f = first + gl.arange(0, 16, gl.SliceLayout(1, MMA))
    token = gl.arange(0, 8, gl.SliceLayout(0, MMA))
    to = hidden_ptr + pair.to(gl.int64) * F + gl.expand_dims(f, 1) + gl.expand_dims(token, 0)
    gl.store(to, hidden, mask=gl.expand_dims(token == 0, 0) & gl.expand_dims(f < F, 1))


@gluon.jit
def _ask2(gate, up, gate_ptr, up_ptr, stride, F, first, start, BLOCK_C: gl.constexpr, COPY: gl.constexpr):
    rows = first + gl.arange(0, 16, gl.SliceLayout(1, COPY))
    k = start + gl.arange(0, BLOCK_C, gl.SliceLayout(0, COPY))
    at = gl.expand_dims((rows % F) * stride, 1) + gl.expand_dims(k, 0)
    async_copy_load(gate, gate_ptr + at)
    async_copy_load(up, up_ptr + at)
    async_copy.commit_group()


@gluon.jit
def _ask_down(tile, down_ptr, offsets, start, BLOCK_F: gl.constexpr, COPY: gl.constexpr):
    f = start + gl.arange(0, BLOCK_F, gl.SliceLayout(0, COPY))
    async_copy_load(tile, down_ptr + gl.expand_dims(offsets, 1) + gl.expand_dims(f, 0))
    async_copy.commit_group()


@gluon.jit
def down_kernel(
    hidden_ptr,
    down_ptr,
    ids_ptr,
    weights_ptr,
    y_ptr,
    stride_e,
    stride_c,
    C,
    F: gl.constexpr,
    SLOTS: gl.constexpr,
    BLOCK_F: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """16 channels of one token: a warp a slot. Column s of the product is slot s's hidden state, and so a warp's own
    column is what its expert gives; the others come for nothing."""
    WARPS: gl.constexpr = SLOTS
    ROWS: gl.constexpr = SLOTS * 16
    TILES: gl.constexpr = F // BLOCK_F
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    COPY: gl.constexpr = (
        gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
        if BLOCK_F == 128
        else gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    )
    SMEM: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    dtype: gl.constexpr = hidden_ptr.dtype.element_ty
    downs = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_F], SMEM)
    xs = gl.allocate_shared_memory(dtype, [TILES, 8, BLOCK_F], SMEM)
    results = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _trigger(EARLY)
    if not AHEAD:
        _wait(OVERLAP)
    token = gl.program_id(0)
    first = gl.program_id(1) * 16
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    expert = gl.load(ids_ptr + token * SLOTS + rows // 16).to(gl.int64)
    offsets = expert * stride_e + ((first + rows % 16) % C) * stride_c
    for i in gl.static_range(STAGES):
        _ask_down(downs.index(i), down_ptr, offsets, i * BLOCK_F, BLOCK_F, COPY)
    if AHEAD:
        _wait(OVERLAP)
    XCOPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, WARPS // 8], [1, 0])
    slot = gl.arange(0, 8, gl.SliceLayout(1, XCOPY))
    f = gl.arange(0, BLOCK_F, gl.SliceLayout(0, XCOPY))
    at = hidden_ptr + gl.expand_dims((token * SLOTS + slot).to(gl.int64) * F, 1) + gl.expand_dims(f, 0)
    for i in gl.static_range(TILES):
        xs.index(i).store(
            gl.load(at + i * BLOCK_F, mask=gl.expand_dims(slot < SLOTS, 1) & (gl.expand_dims(f, 0) < F), other=0.0)
        )
    total = gl.zeros([ROWS, 8], gl.float32, MMA)
    for i in gl.static_range(TILES):
        async_copy.wait_group(min(STAGES, TILES - i) - 1)
        sync()
        total = mma_v2(downs.index(i % STAGES).load(A), xs.index(i).permute((1, 0)).load(B), total)
        if i + STAGES < TILES:
            sync()
            _ask_down(downs.index(i % STAGES), down_ptr, offsets, (i + STAGES) * BLOCK_F, BLOCK_F, COPY)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    column = gl.arange(0, 8, gl.SliceLayout(0, MMA))
    own = gl.where(gl.expand_dims(row // 16, 1) == gl.expand_dims(column, 0), total.to(dtype).to(gl.float32), 0.0)
    results.store(gl.sum(own, 1))
    sync()
    VECTOR: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    channels = gl.arange(0, 16, VECTOR)
    y = gl.zeros([16], gl.float32, VECTOR)
    for s in gl.static_range(SLOTS):
        part = results.slice(s * 16, 16, 0).load(VECTOR)
        y = gl.fma(part, gl.load(weights_ptr + token * SLOTS + s), y)
    gl.store(y_ptr + token.to(gl.int64) * C + first + channels, y.to(y_ptr.dtype.element_ty), mask=first + channels < C)
