# mypy: allow-untyped-defs
"""Matrix products of up to 8 rows on Hopper, in Gluon: the weight is loaded before the rows are ready.

With one token the time is that of a chain of dependent instructions: K is walked in order, 16 at a time, and each step
takes as long as one tensor core instruction. Every program takes 16 rows of the weight and loads all of them at once,
by the copy engine (TMA), before it waits for the previous kernel. Warpgroup instructions (wgmma), which read shared
memory, have the shortest step, about 20 cycles instead of 50, but multiply 64 rows where 16 are needed, so they are
faster where a multiprocessor has one program. Where it has more, one warp per program is faster. The bits are equal to
those of linear_triton.py, and to those of rms_norm_triton.py for the norm.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ._gluon_triton import barriers, entries_from, follow, load_block, reinterpret, row_sum, sync
from ._overlap_triton import overlap
from ._rows import ceil_div

ROWS = 8  # rows of x, at most
COLUMNS = 16  # rows of the weight that one program takes
MULTIPROCESSORS = 132
SHARED = 227 * 1024  # bytes of shared memory of a multiprocessor
GROUP = 8  # tiles of 64 channels that share one barrier

_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
_ONE_WARP = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))


@gluon.jit
def _normed(
    x_ptr, residual_ptr, norm_ptr, total_ptr, normed_ptr, eps, x_stride, residual_stride, T,
    K: gl.constexpr, HEIGHT: gl.constexpr, LAYOUT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The norm of x + residual, [HEIGHT, K]. Every program computes it; the first one stores it."""
    k = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))
    rows = gl.arange(0, HEIGHT, gl.SliceLayout(1, LAYOUT)) % T  # rows past the last one repeat the first ones
    scale = gl.expand_dims(gl.load(norm_ptr + k).to(gl.float32), 0)
    follow(OVERLAP)
    x = gl.load(x_ptr + gl.expand_dims(rows * x_stride, 1) + gl.expand_dims(k, 0)).to(gl.float32)
    x += gl.load(residual_ptr + gl.expand_dims(rows * residual_stride, 1) + gl.expand_dims(k, 0)).to(gl.float32)
    total = x.to(x_ptr.dtype.element_ty)
    x = total.to(gl.float32)
    squares = row_sum(x * x, HEIGHT, K)
    inverse = gl.div_rn(gl.full_like(squares, 1.0), gl.sqrt_rn(squares / K + eps))
    normed = x * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, LAYOUT)), 1) * scale
    normed = normed.to(x_ptr.dtype.element_ty)
    if gl.program_id(0) == 0:
        at = gl.expand_dims(rows * K, 1) + gl.expand_dims(k, 0)
        gl.store(total_ptr + at, total)
        gl.store(normed_ptr + at, normed)
    return normed


@gluon.jit
def _rows_from(weights, at: gl.constexpr, COLUMNS: gl.constexpr):
    """64 rows of shared memory from tile `at` on; the first COLUMNS of them are the tile's."""
    over: gl.constexpr = 64 // COLUMNS
    tiles: gl.constexpr = weights.shape[0] - over + 1
    entries = entries_from(weights, at % over, tiles)
    return reinterpret(entries, weights.dtype, [tiles // over, 64, 64], _TILE).index(at // over)


@gluon.jit
def _store(y_ptr, y, first, T, N, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    columns = gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    rows = gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))
    to = y_ptr + gl.expand_dims(rows.to(gl.int64) * N, 0) + gl.expand_dims(first + columns, 1)
    mask = gl.expand_dims((columns < COLUMNS) & (first + columns < N), 1) & gl.expand_dims(rows < T, 0)
    gl.store(to, y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _one_warp_kernel(
    x_ptr, residual_ptr, norm_ptr, weight, total_ptr, normed_ptr, y_ptr, eps, x_stride, residual_stride, T, N,
    K: gl.constexpr, COLUMNS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The norm and the product of one row, by one warp per program."""
    row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    first = gl.program_id(0) * COLUMNS
    weights = gl.allocate_shared_memory(weight.dtype, [COLUMNS, K], weight.layout)
    xs = gl.allocate_shared_memory(weight.dtype, [1, K], plain)
    bars = barriers(1, 1)
    fence_async_shared()
    if OVERLAP != 2:  # the kernel before may have written the weight
        follow(OVERLAP)
    mbarrier.expect(bars.index(0), COLUMNS * K * 2)
    load_block(weight, [first, 0], bars.index(0), weights)
    xs.store(
        _normed(
            x_ptr, residual_ptr, norm_ptr, total_ptr, normed_ptr, eps, x_stride, residual_stride, T,
            K, 1, row, OVERLAP,
        )
    )  # fmt: skip
    sync()
    mbarrier.wait(bars.index(0), 0)
    # The instruction takes 8 columns; only one of them is used.
    x = xs.permute((1, 0)).load(gl.DotOperandLayout(1, _ONE_WARP, 2)).broadcast_to([K, 8])
    y = mma_v2(weights.load(gl.DotOperandLayout(0, _ONE_WARP, 2)), x, gl.zeros([COLUMNS, 8], gl.float32, _ONE_WARP))
    _store(y_ptr, y, first, T, N, COLUMNS, _ONE_WARP)


@gluon.jit
def _warpgroup_kernel(
    x_ptr, residual_ptr, norm_ptr, weight, total_ptr, normed_ptr, y_ptr, eps, x_stride, residual_stride, T, N,
    K: gl.constexpr, COLUMNS: gl.constexpr, HEIGHT: gl.constexpr, GROUP: gl.constexpr, NORM: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """The product of up to 8 rows by warpgroup instructions, with NORM after their norm.

    The 64 weight rows of an instruction begin with the 16 of a tile; the other 48 belong to the tiles after it, and
    their results are not used.
    """
    tiles: gl.constexpr = K // 64
    groups: gl.constexpr = tiles // GROUP
    row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    dtype: gl.constexpr = weight.dtype
    first = gl.program_id(0) * COLUMNS
    weights = gl.allocate_shared_memory(dtype, [tiles + 64 // COLUMNS - 1, COLUMNS, 64], _TILE)
    xs = gl.allocate_shared_memory(dtype, [tiles, 8, 64], _TILE)
    bars = barriers(groups, 1)
    fence_async_shared()
    if OVERLAP != 2:
        follow(OVERLAP)
    for g in gl.static_range(groups):
        mbarrier.expect(bars.index(g), COLUMNS * 64 * GROUP * 2)
        into = reinterpret(entries_from(weights, g * GROUP, GROUP), dtype, [COLUMNS, 64 * GROUP], _TILE)
        load_block(weight, [first, g * GROUP * 64], bars.index(g), into)
    if NORM:
        x = _normed(
            x_ptr, residual_ptr, norm_ptr, total_ptr, normed_ptr, eps, x_stride, residual_stride, T,
            K, HEIGHT, row, OVERLAP,
        )  # fmt: skip
        reinterpret(xs, dtype, [8, K], _TILE).store(x.broadcast_to([8, K]))
    else:
        follow(OVERLAP)
        rows = gl.arange(0, HEIGHT, gl.SliceLayout(1, row)) % T
        k = gl.arange(0, 64 * GROUP, gl.SliceLayout(0, row))
        at = x_ptr + gl.expand_dims(rows.to(gl.int64) * x_stride, 1) + gl.expand_dims(k, 0)
        for g in gl.static_range(groups):
            into = reinterpret(entries_from(xs, g * GROUP, GROUP), dtype, [8, 64 * GROUP], _TILE)
            into.store(gl.load(at + g * GROUP * 64).broadcast_to([8, 64 * GROUP]))
            if HEIGHT > 1:
                sync()  # otherwise the compiler hoists all loads, and registers spill
    fence_async_shared()
    sync()
    y = gl.zeros([64, 8], gl.float32, _ACC)
    for g in gl.static_range(groups):
        mbarrier.wait(bars.index(g), 0)
        for i in gl.static_range(GROUP):
            y = warpgroup_mma(
                _rows_from(weights, g * GROUP + i, COLUMNS), xs.index(g * GROUP + i).permute((1, 0)), y, is_async=True
            )
    y = warpgroup_mma_wait(0, [y])
    _store(y_ptr, y, first, T, N, COLUMNS, _ACC)


def _programs(weight: Tensor) -> int:
    """Return the number of programs: one for every COLUMNS rows of the weight."""
    return ceil_div(weight.shape[0], COLUMNS)


def fits_warpgroup(x: Tensor, weight: Tensor, *, normed: bool = False) -> bool:
    """Return whether the warpgroup kernel takes these: every program has a multiprocessor and shared memory for itself.

    normed: the kernel also computes the norm.
    """
    (count, length), step = x.shape, 64 * GROUP
    room = length // 64 * (COLUMNS + ROWS) * 128 + (64 - COLUMNS) * 128 + 4096
    is_even = length % step == 0 and (not normed or length & (length - 1) == 0)
    return 0 < count <= ROWS and is_even and room <= SHARED and _programs(weight) <= MULTIPROCESSORS


def fits_one_warp(x: Tensor, weight: Tensor) -> bool:
    """Return whether the one-warp kernel takes these: x has one row, and shared memory has room for all programs."""
    count, length = x.shape
    is_even = 512 <= length <= 2048 and length & (length - 1) == 0
    room = length * (COLUMNS + 1) * 2 + 2048
    return count == 1 and is_even and _programs(weight) <= MULTIPROCESSORS * (SHARED // room)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, where `fits_warpgroup` is true."""
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _warpgroup(x, weight, y, (x, x, x, x, 0.0, 0), normed=False)
    return y


def norm_linear(x: Tensor, residual: Tensor, norm: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `norm_linear`, where `fits_warpgroup` or `fits_one_warp` is true; norm: the weight of the norm."""
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    norm_arguments = residual, norm, total, normed, eps, residual.stride(0)
    if fits_warpgroup(x, weight, normed=True):
        _warpgroup(x, weight, y, norm_arguments, normed=True)
    else:
        _one_warp(x, weight, y, norm_arguments)
    return y, normed, total


# residual, norm weight, total (written), normed (written), eps, stride of residual
_NormArguments = tuple[Tensor, Tensor, Tensor, Tensor, float, int]


def _one_warp(x: Tensor, weight: Tensor, y: Tensor, norm_arguments: _NormArguments) -> None:
    residual, norm, total, normed, eps, stride = norm_arguments
    _one_warp_kernel[(_programs(weight),)](
        x, residual, norm, _descriptor(weight, x.shape[1]), total, normed, y, eps, x.stride(0), stride, *y.shape,
        K=x.shape[1], COLUMNS=COLUMNS, num_warps=1, enable_fp_fusion=False, **overlap(x),
    )  # fmt: skip


def _warpgroup(x: Tensor, weight: Tensor, y: Tensor, norm_arguments: _NormArguments, *, normed: bool) -> None:
    residual, norm, total, norm_out, eps, stride = norm_arguments
    _warpgroup_kernel[(_programs(weight),)](
        x, residual, norm, _descriptor(weight, 64 * GROUP), total, norm_out, y, eps, x.stride(0), stride, *y.shape,
        K=x.shape[1], COLUMNS=COLUMNS, HEIGHT=1 if len(x) == 1 else ROWS, GROUP=GROUP, NORM=normed,
        num_warps=4, enable_fp_fusion=False, **overlap(x),
    )  # fmt: skip


def _descriptor(weight: Tensor, length: int) -> TensorDescriptor:
    """The TMA descriptor of a weight: boxes of 16 rows and `length` channels."""
    return TensorDescriptor.from_tensor(weight, [COLUMNS, length], _TILE.value)
