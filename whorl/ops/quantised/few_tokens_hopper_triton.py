# mypy: allow-untyped-defs
"""Matmuls of packed weights with a few tokens, in Gluon: bound by memory bandwidth, so codes are loaded early.

A warp computes 16 rows of a weight. It loads its codes of a chunk straight into registers, 16 bytes per thread at a
time, in the positions that the tensor cores expect: no shared memory, no shuffles. When a weight has few rows, several
warps take different chunks of K; the sums of the chunks are added in order, as in the other kernels.
"""

import functools
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .._codes_triton import duplicate_halves, pairs_bf16
from .._gluon_triton import begin, follow, sync
from .._overlap_triton import overlap
from .._rows import ceil_div, power_of_2
from .layout import CHUNK, Weight

TOKENS = 8  # the fewest columns of a tensor core matmul
ENOUGH_WARPS = 2112  # 16 on each of an H200's multiprocessors; each has 8 KB of 4-bit codes in flight
_pairs, _duplicate_halves = gluon.jit(pairs_bf16.fn), gluon.jit(duplicate_halves.fn)


@gluon.jit
def _group_pointers(
    pointers, start, K, GROUP: gl.constexpr, NUM: gl.constexpr, STEP: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return pointers [CHUNKS, ROWS, NUM] to the scales of every STEP-th column from start [CHUNKS, 1, 1] on.

    pointers: [CHUNKS, ROWS, 1], to the first scale of each row.
    """
    n = gl.expand_dims(gl.expand_dims(gl.arange(0, NUM, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))), 0), 0)
    if GROUP == 0:
        return pointers + n * 0
    else:
        return pointers + gl.minimum(start + n * STEP, K - 1) // GROUP


@gluon.jit
def _int4_values(words, scales, zeros, dtype: gl.constexpr, HAS_ZEROS: gl.constexpr, PER: gl.constexpr):
    """Return the values [CHUNKS, ROWS, BLOCK_K] in `dtype` of words [CHUNKS, ROWS, BLOCK_K / 8].

    scales: PER of them per block of 128 columns. When scales and values are bf16 codes are scaled in bf16, else in
    fp32.
    """
    IS_BF16: gl.constexpr = scales.dtype == gl.bfloat16 and dtype == gl.bfloat16
    C: gl.constexpr = words.shape[0]
    R: gl.constexpr = words.shape[1]
    B: gl.constexpr = words.shape[2] // 16
    parts = words.reshape([C, R, B, 4, PER, 4 // PER])  # i, w
    LAYOUT: gl.constexpr = parts.type.layout
    OF_SCALES: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(5, LAYOUT))
    if IS_BF16:
        factors = _duplicate_halves(scales.to(gl.int16, bitcast=True))
        factors = gl.convert_layout(factors.reshape([C, R, B, PER]), OF_SCALES)
        factors = gl.expand_dims(gl.expand_dims(factors, 3), 5)
    else:
        factors = gl.full_like(parts, 0x3F803F80)  # ones
    if HAS_ZEROS:
        zeros = _duplicate_halves(zeros.to(gl.int32) + 0x4300)
        zeros = gl.convert_layout(zeros.reshape([C, R, B, PER]), OF_SCALES)
        zeros = gl.expand_dims(gl.expand_dims(zeros, 3), 5)
    else:
        zeros = gl.full_like(parts, 0x43084308)
    _, factors = gl.broadcast(parts, factors)
    _, zeros = gl.broadcast(parts, zeros)
    a, b, c, d, e, f, g, h = _pairs(parts, zeros, factors)
    low, high = gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h))
    values = gl.join(low, high)
    if not IS_BF16:
        WIDE: gl.constexpr = gl.SliceLayout(6, gl.SliceLayout(7, gl.SliceLayout(8, values.type.layout)))
        wide = scales.to(gl.float32).reshape([C, R, B, PER])
        wide = gl.convert_layout(wide, gl.SliceLayout(3, gl.SliceLayout(5, WIDE)))
        wide = gl.expand_dims(gl.expand_dims(wide, 3), 5)
        wide = gl.expand_dims(gl.expand_dims(gl.expand_dims(wide, 6), 7), 8)
        values = (values.to(gl.float32) * wide).to(dtype)
    values = values.reshape([C, R, B, 4, 4, 2, 2, 2])  # i, w, second, p % 2, p // 2, as in layout.py
    return values.permute([0, 1, 2, 4, 7, 6, 3, 5]).reshape([C, R, B * 128])


@gluon.jit
def _byte_values(codes, scales, zeros, dtype: gl.constexpr, HAS_ZEROS: gl.constexpr):
    """Return the values [CHUNKS, ROWS, BLOCK_K] in `dtype` of as many bytes; scales: one per block of 64 columns."""
    C: gl.constexpr = codes.shape[0]
    R: gl.constexpr = codes.shape[1]
    B: gl.constexpr = codes.shape[2] // 64
    parts = codes.reshape([C, R, B, 64]).to(gl.float32)
    LAYOUT: gl.constexpr = parts.type.layout
    if HAS_ZEROS:
        zeros = gl.convert_layout(zeros.to(gl.float32), gl.SliceLayout(3, LAYOUT))
        parts = parts - gl.expand_dims(zeros, 3)
    scales = gl.convert_layout(scales.to(gl.float32), gl.SliceLayout(3, LAYOUT))
    values = (parts * gl.expand_dims(scales, 3)).to(dtype).reshape([C, R, B, 4, 4, 2, 2])  # i, m, h, e
    return values.permute([0, 1, 2, 4, 5, 3, 6]).reshape([C, R, B * 64])


@gluon.jit
def _multiply_add(
    codes,
    scales,
    zeros,
    x,
    xs,
    part,
    A: gl.constexpr,
    B: gl.constexpr,
    COLUMNS: gl.constexpr,
    PER: gl.constexpr,
    IS_INT4: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
):
    """Return part plus the product of the codes' values and x; x passes through shared memory to reach all warps."""
    sync()
    xs.store(x)
    sync()
    if IS_INT4:
        weight = _int4_values(codes, scales, zeros, x.dtype, HAS_ZEROS, PER)
    else:
        weight = _byte_values(codes, scales, zeros, x.dtype, HAS_ZEROS)
    weight = gl.convert_layout(weight, A, assert_trivial=True)
    operand = xs.permute((0, 2, 1)).load(B)
    if COLUMNS == 1:  # tensor cores need at least 8 columns
        WIDE: gl.constexpr = part.shape[2]
        _, operand = gl.broadcast(gl.zeros([x.shape[0], x.shape[2], WIDE], x.dtype, B), operand)
    return mma_v2(weight, operand, part)


@gluon.jit
def _few_packed_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    y_ptr,
    ids_ptr,
    x_stride,
    T,
    PAIRS_PER_ROW,
    N,
    high,
    scales_high,
    K,
    width,
    groups,
    HAS_BIAS: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    IS_ROUTED: gl.constexpr,
    ACTIVATE: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNKS: gl.constexpr,
    HIGH: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CHUNK: gl.constexpr,
    ROUNDS: gl.constexpr,
    IS_WHOLE: gl.constexpr,
    OF_CODES: gl.constexpr,
    IS_INT4: gl.constexpr,
    AHEAD: gl.constexpr,
    OVERLAP: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Multiply 16 * HIGH rows of a weight, CHUNKS chunks of K at a time, by up to COLUMNS tokens.

    IS_ROUTED: by the token of one (token, choice) pair, with the weight of its expert. ACTIVATE: half of the rows are
    the gate's and half the up projection's, which start N rows later. AHEAD: codes are loaded before the previous
    kernel has ended. high, scales_high: rows of one expert's codes and of its scales.
    """
    ROWS: gl.constexpr = 16 * HIGH
    OUT: gl.constexpr = ROWS // 2 if ACTIVATE else ROWS
    PER: gl.constexpr = 1 if GROUP == 0 or GROUP >= 128 else 128 // GROUP
    NUM: gl.constexpr = BLOCK_K // 128 * PER if IS_INT4 else BLOCK_K // 64
    STEP: gl.constexpr = BLOCK_K // NUM
    LENGTH: gl.constexpr = BLOCK_K // 8 if IS_INT4 else BLOCK_K
    STEPS: gl.constexpr = CHUNK // BLOCK_K
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [CHUNKS, HIGH, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [CHUNKS, 1, HIGH], [2, 1, 0])
    SMEM: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    SHOWN: gl.constexpr = 1 if COLUMNS == 1 else COLUMNS
    WIDE: gl.constexpr = 8 if COLUMNS == 1 else COLUMNS

    if IS_ROUTED:
        follow(OVERLAP)
        pair = gl.program_id(1)
        entry = gl.load(ids_ptr + pair).to(gl.int64)
    else:
        if not AHEAD:
            follow(OVERLAP)
        pair = 0
        entry = gl.to_tensor(0).to(gl.int64)
    first = gl.program_id(0) * OUT
    c = gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, OF_CODES)))
    r = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, OF_CODES)))
    rows = (first + r % OUT) % N + r // OUT * N
    code_column = gl.arange(0, LENGTH, gl.SliceLayout(0, gl.SliceLayout(0, OF_CODES)))
    chunk = gl.expand_dims(gl.expand_dims(c, 1), 2)
    row = gl.expand_dims(gl.expand_dims(rows, 0), 2)
    column = gl.expand_dims(gl.expand_dims(code_column, 0), 0)
    code_chunk = chunk * (CHUNK // 8 if IS_INT4 else CHUNK)
    codes_at = codes_ptr + (entry * high + row) * width + (code_chunk + column)
    group_row = (entry * scales_high + row // GROUP_ROWS) * groups
    scales_at, zeros_at = scales_ptr + group_row, zeros_ptr + group_row

    xc = gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    xt = gl.arange(0, SHOWN, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    xk = gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(0, COPY)))
    token = gl.expand_dims(gl.expand_dims(xt, 0), 2)
    x_column = gl.expand_dims(gl.expand_dims(xc, 1), 2) * CHUNK + gl.expand_dims(gl.expand_dims(xk, 0), 0)
    x_at = x_ptr + (pair // PAIRS_PER_ROW + token).to(gl.int64) * x_stride + x_column
    xs = gl.allocate_shared_memory(dtype, [CHUNKS, SHOWN, BLOCK_K], SMEM)
    sums = gl.allocate_shared_memory(gl.float32, [CHUNKS, ROWS, WIDE], PLAIN)

    FOLD: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 16, 2], [1, WARPS, 1], [1, 2, 0])
    total = gl.zeros([1, OUT, WIDE], gl.float32, FOLD)
    second = gl.zeros([1, OUT, WIDE], gl.float32, FOLD)
    codes = gl.load(codes_at, mask=code_chunk + column < width, other=0.0)
    scales = gl.load(_group_pointers(scales_at, chunk * CHUNK, K, GROUP, NUM, STEP, OF_CODES))
    zeros = scales
    if HAS_ZEROS:
        zeros = gl.load(_group_pointers(zeros_at, chunk * CHUNK, K, GROUP, NUM, STEP, OF_CODES))
    if AHEAD and not IS_ROUTED:
        follow(OVERLAP)
        if IS_INT4:  # with codes of 8 bits this is slower
            begin(OVERLAP)
    x = gl.load(x_at, mask=(token < T) & (x_column < K), other=0.0)
    for round in range(ROUNDS):
        part = gl.zeros([CHUNKS, ROWS, WIDE], gl.float32, MMA)
        for step in gl.static_range(STEPS):
            # Loads of the next step are issued before this step's data is used.
            after = (round + (step + 1) // STEPS) * CHUNKS * CHUNK + (step + 1) % STEPS * BLOCK_K
            code_after = after // 8 if IS_INT4 else after
            next_codes = gl.load(codes_at + code_after, mask=code_chunk + column + code_after < width, other=0.0)
            next_scales = gl.load(_group_pointers(scales_at, chunk * CHUNK + after, K, GROUP, NUM, STEP, OF_CODES))
            next_zeros = next_scales
            if HAS_ZEROS:
                next_zeros = gl.load(_group_pointers(zeros_at, chunk * CHUNK + after, K, GROUP, NUM, STEP, OF_CODES))
            next_x = gl.load(x_at + after, mask=(token < T) & (x_column + after < K), other=0.0)
            # When K ends within the round, the steps after its end contribute nothing.
            if IS_WHOLE or round * CHUNKS * CHUNK + step * BLOCK_K < K:
                part = _multiply_add(codes, scales, zeros, x, xs, part, A, B, COLUMNS, PER, IS_INT4, HAS_ZEROS)
            codes, scales, zeros, x = next_codes, next_scales, next_zeros, next_x
        sums.store(part)
        sync()
        for i in gl.static_range(CHUNKS):
            total = total + sums.slice(i, 1, 0).slice(0, OUT, 1).load(FOLD)
            if ACTIVATE:
                second = second + sums.slice(i, 1, 0).slice(OUT, OUT, 1).load(FOLD)
        sync()
    n = first + gl.arange(0, OUT, gl.SliceLayout(0, gl.SliceLayout(2, FOLD)))
    n = gl.expand_dims(gl.expand_dims(n, 0), 2)
    t = gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(0, FOLD)))
    t = gl.expand_dims(gl.expand_dims(t, 0), 0)
    if HAS_BIAS:
        total += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
    if ACTIVATE:
        gate, up = total.to(dtype).to(gl.float32), second.to(dtype).to(gl.float32)
        total = gate / (1 + gl.exp(-gate)) * up
    is_shown = t < (1 if COLUMNS == 1 else T)
    gl.store(y_ptr + (pair + t).to(gl.int64) * N + n, total.to(dtype), mask=is_shown & (n < N))


@functools.cache
def _layout(is_int4: bool, chunks: int, high: int, block: int) -> Any:
    """Return the register layout of codes [chunks, 16 * high, ..] that matches the tensor cores' left operand."""
    length = block // 8 if is_int4 else block
    run = 4 if is_int4 else 16  # elements in the 16 bytes of a thread
    registers = [[0, 0, n] for n in _powers(1, run)] + [[0, 8, 0]] + [[0, 0, n] for n in _powers(4 * run, length)]
    lanes = [[0, 0, run], [0, 0, 2 * run], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 16 * n, 0] for n in _powers(1, high)] + [[n, 0, 0] for n in _powers(1, chunks)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [chunks, 16 * high, length])


def _powers(start: int, end: int) -> list[int]:
    powers = []
    while start < end:
        powers.append(start)
        start *= 2
    return powers


def fits(x: Tensor, weight: Weight) -> bool:
    """Return whether this kernel takes these: tiled codes, and groups that a thread's loads do not cross."""
    group = weight.group(x.shape[-1])
    is_tiled = weight.is_int4 or weight.layout == "bytes_tiled"
    is_even = group in (32, 64) or group % 128 == 0 if weight.is_int4 else group % 64 == 0
    return x.element_size() == 2 and is_tiled and is_even


def linear(x: Tensor, weight: Weight, bias: Tensor | None, y: Tensor, sizes: dict[str, Any] | None = None) -> None:
    """Compute y = x @ weight.T + bias for up to 8 tokens. sizes: replaces `plan` in benchmarks."""
    count, rows = y.shape
    sizes = sizes or plan(count, rows, x.shape[1], is_int4=weight.is_int4)
    columns = 1 if count == 1 else TOKENS
    _launch(x, weight, bias, y, y, (ceil_div(rows, 16 * sizes["HIGH"]), 1), sizes, COLUMNS=columns)


def experts(
    x: Tensor,
    weight: Weight,
    ids: Tensor,
    y: Tensor,
    sizes: dict[str, Any] | None = None,
    *,
    pairs_per_row: int,
    is_activated: bool,
) -> None:
    """Compute y[pair] from x[pair // pairs_per_row] and expert ids[pair]; is_activated: then silu(gate) * up."""
    sizes = sizes or experts_plan(ids.numel(), weight.codes.shape[-2], x.shape[1], is_int4=weight.is_int4)
    out = 16 * sizes["HIGH"] // (2 if is_activated else 1)
    grid = ceil_div(y.shape[1], out), ids.numel()
    _launch(
        x,
        weight,
        None,
        y,
        ids,
        grid,
        sizes,
        COLUMNS=1,
        IS_ROUTED=True,
        ACTIVATE=is_activated,
        PAIRS_PER_ROW=pairs_per_row,
    )


def _launch(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    y: Tensor,
    ids: Tensor,
    grid: tuple[int, int],
    sizes: dict[str, Any],
    *,
    COLUMNS: int,
    IS_ROUTED: bool = False,
    ACTIVATE: bool = False,
    PAIRS_PER_ROW: int = 1,
) -> None:
    codes, length = weight.codes, x.shape[1]
    chunks, high, block = sizes["CHUNKS"], sizes["HIGH"], sizes["BLOCK_K"]
    _few_packed_kernel[grid](
        x,
        *weight.tensors,
        y if bias is None else bias.contiguous(),
        y,
        ids,
        x.stride(0),
        len(y) if not IS_ROUTED else 1,
        PAIRS_PER_ROW,
        y.shape[1],
        codes.shape[-2],
        weight.scales.shape[-2],
        length,
        codes.shape[-1],
        weight.scales.shape[-1],
        HAS_BIAS=bias is not None,
        HAS_ZEROS=weight.zeros is not None,
        IS_ROUTED=IS_ROUTED,
        ACTIVATE=ACTIVATE,
        GROUP=weight.group(length),
        GROUP_ROWS=weight.rows,
        COLUMNS=COLUMNS,
        CHUNKS=chunks,
        HIGH=high,
        BLOCK_K=block,
        CHUNK=CHUNK,
        ROUNDS=ceil_div(length, chunks * CHUNK),
        IS_WHOLE=length % (chunks * CHUNK) == 0,
        OF_CODES=_layout(weight.is_int4, chunks, high, block),
        IS_INT4=weight.is_int4,
        AHEAD=sizes.get("AHEAD", True),
        WARPS=chunks * high,
        num_warps=chunks * high,
        enable_fp_fusion=False,
        **overlap(x),
    )


def plan(count: int, rows: int, length: int, *, is_int4: bool) -> dict[str, Any]:
    """Return sizes for `linear`: more chunks in parallel until there are enough warps to saturate memory bandwidth."""
    needed_chunks = power_of_2(ceil_div(ENOUGH_WARPS, ceil_div(rows, 16)))
    most = 8 if count == 1 and not is_int4 else 4
    chunks = min(most, needed_chunks, power_of_2(ceil_div(length, CHUNK)))
    return {"CHUNKS": chunks, "HIGH": 1, "BLOCK_K": 512 if is_int4 and count == 1 else 256}


def experts_plan(pairs: int, rows: int, length: int, *, is_int4: bool) -> dict[str, Any]:
    """Return sizes for `experts`. pairs: of a token and an expert; rows: of one expert's weight.

    Codes of 8 bits take all chunks of K in parallel, codes of 4 bits only while there would be too few warps.
    """
    chunks = min(4, power_of_2(ceil_div(length, CHUNK)))
    if is_int4:
        chunks = min(chunks, power_of_2(max(1, ENOUGH_WARPS * 3 // 4 // (pairs * ceil_div(rows, 16)))))
    return {"CHUNKS": chunks, "HIGH": 2, "BLOCK_K": 512 if is_int4 else 256}
