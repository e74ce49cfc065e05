# mypy: allow-untyped-defs
"""Products of MXFP4 weights in tiles with a few tokens, in Gluon: bound by memory bandwidth, so codes are loaded early.

A warp computes 16 rows of a weight. It loads its codes straight into registers, 16 bytes per thread at a time, in the
positions that the tensor cores expect. K is one chain, as in `linear` and `experts`: the bits are those of the values.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .._codes_triton import pairs_e2m1
from .._gluon_triton import add, follow, sync
from .._overlap_triton import overlap
from .._rows import ceil_div, power_of_2

MOST_ROWS = 2  # average rows of an expert, at most: with 8 the plain tiles took two thirds of the time on an H200

_pairs = gluon.jit(pairs_e2m1.fn)
_ENDLESS = gl.constexpr(1 << 30)


@gluon.jit
def _values(words, scales):
    """Return the bf16 values [ROWS, BLOCK_K] of words [ROWS, BLOCK_K / 128, 4, 4], as in layout.py.

    scales: [ROWS, BLOCK_K / 128], the four e8m0 of a tile in an int32.
    """
    LAYOUT: gl.constexpr = words.type.layout
    w = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    w = gl.expand_dims(gl.expand_dims(gl.expand_dims(w, 0), 1), 2)
    four = gl.expand_dims(gl.expand_dims(scales, 2), 3)
    factors = ((four >> (8 * w)) & 255) * 0x00800080 + 0x3F003F00  # the bits of 2^126 times the scale, twice
    words, factors = gl.broadcast(words, factors)
    a, b, c, d, e, f, g, h = _pairs(words, factors)
    values = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    # Axes i, w, second, p % 2, p // 2, as in layout.py.
    return values.permute([0, 1, 3, 6, 5, 2, 4]).reshape([words.shape[0], words.shape[1] * 128])


@gluon.jit
def _find_tile(tile, counts_ptr, E, BLOCK_E: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Return a tile's expert (E or more: none), its first position among the sorted pairs, and the pairs from there."""
    index = gl.arange(0, BLOCK_E, gl.BlockedLayout([BLOCK_E // 32], [32], [WARPS], [0]))
    counts = gl.load(counts_ptr + index, mask=index < E, other=0)
    tiles_until = gl.associative_scan((counts + TOKENS - 1) // TOKENS, 0, add)
    rows_until = gl.associative_scan(counts, 0, add)
    is_before = tiles_until <= tile
    expert = gl.sum((is_before & (index < E)).to(gl.int32), 0)
    first = gl.max(gl.where(is_before, rows_until, 0), 0)
    end = gl.min(gl.where(is_before, _ENDLESS, rows_until), 0)
    first += (tile - gl.max(gl.where(is_before, tiles_until, 0), 0)) * TOKENS
    return expert, first, end - first


@gluon.jit
def _few_mxfp4_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    counts_ptr,
    y_ptr,
    x_stride,
    PAIRS_PER_ROW,
    N,
    E,
    K,
    width,
    groups,
    alpha,
    limit,
    IS_SINGLE: gl.constexpr,
    CLIPS: gl.constexpr,
    TOKENS: gl.constexpr,
    HIGH: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STEPS: gl.constexpr,
    BLOCK_E: gl.constexpr,
    OF_CODES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Multiply 16 * HIGH rows of an expert's weight [N, K] by up to TOKENS tokens.

    IS_SINGLE: the token of one (token, choice) pair, whose expert is order_ptr[pair]; otherwise a tile of the pairs of
    one expert, which order_ptr lists. The result goes to y[pair]. CLIPS: even rows of the weight are the gate's and odd
    ones up's; the result is the activation of `clipped_experts`.
    """
    ROWS: gl.constexpr = 16 * HIGH
    OUT: gl.constexpr = ROWS // 2 if CLIPS else ROWS
    BLOCKS: gl.constexpr = BLOCK_K // 128
    WIDE: gl.constexpr = 8 if TOKENS == 1 else TOKENS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [HIGH, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, HIGH], [1, 0])
    SMEM: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dtype: gl.constexpr = x_ptr.dtype.element_ty

    follow(OVERLAP)
    first = gl.program_id(0) * OUT
    t = gl.arange(0, TOKENS, gl.SliceLayout(1, COPY))
    column = gl.arange(0, WIDE, gl.SliceLayout(0, MMA))
    if IS_SINGLE:
        pair, to, count = gl.program_id(1) + t, gl.program_id(1) + column, 1
        expert = gl.load(order_ptr + gl.program_id(1)).to(gl.int32)
    else:
        expert, start, count = _find_tile(gl.program_id(1), counts_ptr, E, BLOCK_E, TOKENS, HIGH)
        if expert >= E:
            return
        pair = gl.load(order_ptr + start + t, mask=t < count, other=0)
        to = gl.load(order_ptr + start + column, mask=column < count, other=0)

    r = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, OF_CODES))))
    rows = first + r
    if CLIPS:
        rows = 2 * (first + r // 16 * 8 + r % 8) + r // 8 % 2
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, OF_CODES))))
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, OF_CODES))))
    w = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, OF_CODES))))
    entry = expert.to(gl.int64) * N
    row, tile = gl.expand_dims(rows % N, 1), gl.expand_dims(block, 0)
    scales_at = scales_ptr + entry * groups + row * groups + tile
    row = gl.expand_dims(gl.expand_dims(row, 2), 3)
    block = gl.expand_dims(gl.expand_dims(tile, 2), 3)
    i = gl.expand_dims(gl.expand_dims(gl.expand_dims(i, 0), 1), 3)
    w = gl.expand_dims(gl.expand_dims(gl.expand_dims(w, 0), 1), 2)
    word = block * 16 + i * 4 + w
    codes_at = codes_ptr + entry * width + row * width + word

    k = gl.expand_dims(gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY)), 0)
    x_at = gl.expand_dims(x_ptr + (pair // PAIRS_PER_ROW).to(gl.int64) * x_stride, 1) + k
    is_token = gl.expand_dims(t < count, 1)
    xs = gl.allocate_shared_memory(dtype, [TOKENS, BLOCK_K], SMEM)
    total = gl.zeros([ROWS, WIDE], gl.float32, MMA)
    codes = gl.load(codes_at, mask=word < width, other=0)
    scales = gl.load(scales_at, mask=tile < groups, other=0)
    codes_1 = gl.load(codes_at + BLOCK_K // 8, mask=word + BLOCK_K // 8 < width, other=0)
    scales_1 = gl.load(scales_at + BLOCKS, mask=tile + BLOCKS < groups, other=0)
    x = gl.load(x_at, mask=is_token & (k < K), other=0.0)
    for step in range(STEPS):
        # Codes of the step after the next one, and tokens of the next, are on their way while this step's are used.
        done, x_done = (step + 2) * BLOCK_K, (step + 1) * BLOCK_K
        codes_2 = gl.load(codes_at + done // 8, mask=word + done // 8 < width, other=0)
        scales_2 = gl.load(scales_at + done // 128, mask=tile + done // 128 < groups, other=0)
        next_x = gl.load(x_at + x_done, mask=is_token & (k + x_done < K), other=0.0)
        sync()
        xs.store(x)
        sync()
        weight = gl.convert_layout(_values(codes, scales), A, assert_trivial=True)
        operand = xs.permute((1, 0)).load(B)
        if TOKENS == 1:  # tensor cores need at least 8 columns
            operand = operand.broadcast_to([BLOCK_K, WIDE])
        total = mma_v2(weight, operand, total)
        codes, scales, codes_1, scales_1, x = codes_1, scales_1, codes_2, scales_2, next_x
    n = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    of_weight = first + n
    if CLIPS:
        of_weight = 2 * (first + n // 16 * 8 + n % 8) + n // 8 % 2
    bias = gl.load(bias_ptr + entry + of_weight, mask=of_weight < N, other=0.0).to(gl.float32)
    total = total + gl.expand_dims(bias, 1)
    if CLIPS:
        gate, up = gl.split(total.reshape([HIGH, 2, 8, WIDE]).permute([0, 2, 3, 1]))
        gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
        gate, up = gl.minimum(gate, limit), gl.minimum(gl.maximum(up, -limit), limit)
        y = (up + 1) * (gate / (1 + gl.exp(-alpha * gate)))
        _store(y_ptr, y.reshape([OUT, WIDE]), to, count, first, N // 2, TOKENS)
    else:
        _store(y_ptr, total, to, count, first, N, TOKENS)


@gluon.jit
def _store(y_ptr, y, to, count, first, width, TOKENS: gl.constexpr):
    """Store y [columns, tokens] to rows `to` of y_ptr [.., width], from column `first` on."""
    LAYOUT: gl.constexpr = y.type.layout
    n = first + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    t = gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    to = gl.convert_layout(to, gl.SliceLayout(0, LAYOUT))
    is_token = t < (1 if TOKENS == 1 else count)
    at = y_ptr + gl.expand_dims(to.to(gl.int64) * width, 0) + gl.expand_dims(n, 1)
    gl.store(at, y.to(y_ptr.dtype.element_ty), mask=gl.expand_dims(is_token, 0) & gl.expand_dims(n < width, 1))


def _layout(high: int, block: int) -> Any:
    """Return the register layout of words [16 * high, block / 128, i, w] that matches the tensor cores' operand."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [8, 0, 0, 0], *([0, n, 0, 0] for n in _powers(block // 128))]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16 * n, 0, 0, 0] for n in _powers(high)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 * high, block // 128, 4, 4])


def _powers(end: int) -> list[int]:
    return [1 << n for n in range(end.bit_length() - 1)]


def fits(x: Tensor, rows: float) -> bool:
    """Return whether the kernel takes these: tokens in bf16 of experts that have few rows, `rows` on average."""
    return x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and rows <= MOST_ROWS


def plan(*, is_single: bool) -> dict[str, int]:
    """Return the sizes of a program. is_single: it has one pair."""
    return {"TOKENS": 1 if is_single else 8, "HIGH": 2, "BLOCK_K": 256}


def launch(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor,
    y: Tensor,
    routing: tuple[Tensor, Tensor | None],
    *,
    pairs_per_row: int = 1,
    clips: tuple[float, float] | None = None,
    sizes: dict[str, int] | None = None,
) -> None:
    """Compute y[pair] from x[pair // pairs_per_row] and the weight of the pair's expert, where `fits` is true.

    codes, scales, bias: of all experts. routing: the expert of each pair and None, or the pairs sorted by expert and
    how many each expert has. clips: alpha and limit of the activation, if any. sizes: replaces `plan`.
    """
    (order, counts), (num_experts, num_rows, width) = routing, codes.shape
    scales = scales.view(torch.int32)  # the four of a tile
    pairs, is_single = len(y), counts is None
    sizes = sizes or plan(is_single=is_single)
    out = 16 * sizes["HIGH"] // (1 if clips is None else 2)
    tiles = pairs if is_single else min(pairs, ceil_div(pairs, sizes["TOKENS"]) + num_experts)
    _few_mxfp4_kernel[(ceil_div(y.shape[1], out), tiles)](
        x, codes, scales, bias, order, order if counts is None else counts, y, x.stride(0), pairs_per_row, num_rows,
        num_experts, x.shape[1], width, scales.shape[-1], *(clips or (0.0, 0.0)), IS_SINGLE=is_single,
        CLIPS=clips is not None, STEPS=ceil_div(x.shape[1], sizes["BLOCK_K"]),
        BLOCK_E=max(32, power_of_2(num_experts)), OF_CODES=_layout(sizes["HIGH"], sizes["BLOCK_K"]), **sizes,
        num_warps=sizes["HIGH"], enable_fp_fusion=False, **overlap(x),
    )  # fmt: skip
