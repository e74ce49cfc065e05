# mypy: allow-untyped-defs
"""Matrix products of up to 8 rows on Hopper, in Gluon: the weight is loaded before the rows are ready.

With few tokens the time is that of a chain of dependent instructions: K is walked in order, 16 at a time, and each step
takes as long as one tensor core instruction. Every program loads all of its rows of the weight at once, by the copy
engine (TMA), before it waits for the previous kernel. Warpgroup instructions (wgmma), which read shared memory, have
the shortest step, about 20 cycles instead of 50, but multiply 64 rows of the weight where 16 to 64 are needed, so they
are faster where a multiprocessor has one program. Where it has more, one warp per program is faster. One row is
normalised by every program; for more, the norm has a kernel of its own. Weights of which a multiprocessor cannot hold
its share are multiplied in few_rows_large_hopper_triton.py. The bits are equal to those of linear_triton.py, and to
those of rms_norm_triton.py for the norm.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import few_rows_large_hopper_triton
from ._gluon_triton import async_load, barriers, begin, entries_from, follow, load_block, reinterpret, row_sum, sync
from ._hopper import MULTIPROCESSORS
from ._overlap_triton import overlap
from ._rows import ceil_div
from .few_rows_large_hopper_triton import ACC, COPY, TILE, store

ROWS = 8  # rows of x, at most
ENTRY = 16  # rows of the weight that the copy engine loads at once
HIGHEST = 4  # entries of one program, at most: the rows of one instruction
SHARED = 227 * 1024  # bytes of shared memory of a multiprocessor
GROUP = 8  # tiles of 64 channels that share one barrier
ROOM = 16  # multiprocessors that a product leaves free if the next kernel is to start early: fewer would be crowded
LONG = 2048  # channels from which one row and its norm are faster by tall programs than by one warp

_ONE_WARP = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))


@gluon.jit
def _normed(
    x_ptr, residual_ptr, norm_ptr, total_ptr, normed_ptr, eps,
    K: gl.constexpr, PLUS_ONE: gl.constexpr, LAYOUT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The norm of x + residual, [1, K]. Every program computes it; the first one stores it."""
    k = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, LAYOUT)), 0)
    scale = gl.load(norm_ptr + k).to(gl.float32)
    if PLUS_ONE:
        scale = scale + 1.0
    follow(OVERLAP)
    begin(OVERLAP)
    x = gl.load(x_ptr + k).to(gl.float32) + gl.load(residual_ptr + k).to(gl.float32)
    total = x.to(x_ptr.dtype.element_ty)
    x = total.to(gl.float32)
    squares = row_sum(x * x, 1, K)
    inverse = gl.div_rn(gl.full_like(squares, 1.0), gl.sqrt_rn(squares / K + eps))
    normed = x * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, LAYOUT)), 1) * scale
    normed = normed.to(x_ptr.dtype.element_ty)
    if gl.program_id(0) == 0:
        gl.store(total_ptr + k, total)
        gl.store(normed_ptr + k, normed)
    return normed


@gluon.jit
def _rows_from(weights, entry: gl.constexpr):
    """64 rows of shared memory from an entry on; those after the tile's own belong to the tiles after it."""
    over: gl.constexpr = 64 // weights.shape[1]
    first: gl.constexpr = entry % over
    count: gl.constexpr = (weights.shape[0] - first) // over
    entries = entries_from(weights, first, count * over)
    return reinterpret(entries, weights.dtype, [count, 64, 64], TILE).index(entry // over)


@gluon.jit
def _one_warp_kernel(
    x_ptr, residual_ptr, norm_ptr, weight, total_ptr, normed_ptr, y_ptr, eps, N,
    K: gl.constexpr, COLUMNS: gl.constexpr, PLUS_ONE: gl.constexpr, OVERLAP: gl.constexpr,
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
    xs.store(_normed(x_ptr, residual_ptr, norm_ptr, total_ptr, normed_ptr, eps, K, PLUS_ONE, row, OVERLAP))
    sync()
    mbarrier.wait(bars.index(0), 0)
    # The instruction takes 8 columns; only one of them is used.
    x = xs.permute((1, 0)).load(gl.DotOperandLayout(1, _ONE_WARP, 2)).broadcast_to([K, 8])
    y = mma_v2(weights.load(gl.DotOperandLayout(0, _ONE_WARP, 2)), x, gl.zeros([COLUMNS, 8], gl.float32, _ONE_WARP))
    store(y_ptr, y, first, 1, N, COLUMNS, _ONE_WARP)


@gluon.jit
def _load_weight(
    weight, weights, bars, first,
    K: gl.constexpr, ENTRY: gl.constexpr, HIGH: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Start loading HIGH entries of every tile; entries of a tile lie next to each other."""
    if HIGH == 1:
        for g in gl.static_range(K // 64 // GROUP):
            mbarrier.expect(bars.index(g), ENTRY * 64 * GROUP * 2)
            into = reinterpret(entries_from(weights, g * GROUP, GROUP), weight.dtype, [ENTRY, 64 * GROUP], TILE)
            load_block(weight, [first, g * GROUP * 64], bars.index(g), into)
    else:
        for tile in range(K // 64):
            bar = bars.index(tile // GROUP)
            if tile % GROUP == 0:
                mbarrier.expect(bar, HIGH * ENTRY * 64 * GROUP * 2)
            for i in gl.static_range(HIGH):
                load_block(weight, [first + i * ENTRY, tile * 64], bar, weights.index(tile * HIGH + i))


@gluon.jit
def copy_rows(x_ptr, xs, x_stride, T, groups: gl.constexpr, GROUP: gl.constexpr):
    """Start copying all rows of x, one group of channels after the other.

    Rows past the last one keep what shared memory held: they are columns of the product that nobody reads.
    """
    rows = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, COPY)), 1)
    k = gl.arange(0, 64 * GROUP, gl.SliceLayout(0, COPY))
    at = x_ptr + rows * (x_stride * 8) + gl.expand_dims(k, 0)
    for g in gl.static_range(groups):
        into = reinterpret(entries_from(xs, g * GROUP, GROUP), xs.dtype, [8, 64 * GROUP], TILE)
        async_load(into, at + g * GROUP * 64, rows < T)
        async_copy.commit_group()


@gluon.jit
def wait_rows(later: gl.constexpr):
    """Wait until all groups that `copy_rows` copies but the last `later` ones are there for tensor cores to read."""
    async_copy.wait_group(later)
    fence_async_shared()
    sync()


@gluon.jit
def _warpgroup_kernel(
    x_ptr, residual_ptr, norm_ptr, weight, total_ptr, normed_ptr, y_ptr, eps, x_stride, T, N,
    K: gl.constexpr, ENTRY: gl.constexpr, HIGH: gl.constexpr, GROUP: gl.constexpr, NORM: gl.constexpr,
    PLUS_ONE: gl.constexpr, LEAVES_ROOM: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The product of up to 8 rows by warpgroup instructions. NORM: of one row, after its norm.

    The 64 weight rows of an instruction begin with those of a tile; the results of the others are not used. x_stride
    is in units of 8 channels, so that the compiler knows it to be a multiple of 16 bytes. LEAVES_ROOM: the next kernel
    may start early; after a product with a norm it always may, since that kernel is small.
    """
    tiles: gl.constexpr = K // 64
    groups: gl.constexpr = tiles // GROUP
    row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    dtype: gl.constexpr = weight.dtype
    first = gl.program_id(0) * (ENTRY * HIGH)
    weights = gl.allocate_shared_memory(dtype, [tiles * HIGH + 64 // ENTRY - HIGH, ENTRY, 64], TILE)
    xs = gl.allocate_shared_memory(dtype, [tiles, 8, 64], TILE)
    bars = barriers(groups, 1)
    fence_async_shared()
    if OVERLAP != 2:
        follow(OVERLAP)
    _load_weight(weight, weights, bars, first, K, ENTRY, HIGH, GROUP)
    if NORM:
        normed = _normed(x_ptr, residual_ptr, norm_ptr, total_ptr, normed_ptr, eps, K, PLUS_ONE, row, OVERLAP)
        reinterpret(xs, dtype, [8, K], TILE).store(normed.broadcast_to([8, K]))
        fence_async_shared()
        sync()
    else:
        follow(OVERLAP)
        if LEAVES_ROOM:
            begin(OVERLAP)
        copy_rows(x_ptr, xs, x_stride, T, groups, GROUP)
    y = gl.zeros([64, 8], gl.float32, ACC)
    for g in gl.static_range(groups):
        if not NORM:
            wait_rows(groups - 1 - g)
        mbarrier.wait(bars.index(g), 0)
        for i in gl.static_range(GROUP):
            x = xs.index(g * GROUP + i).permute((1, 0))
            y = warpgroup_mma(_rows_from(weights, (g * GROUP + i) * HIGH), x, y, is_async=True)
    y = warpgroup_mma_wait(0, [y])
    store(y_ptr, y, first, T, N, ENTRY * HIGH, ACC)


def _programs(weight: Tensor, high: int = 1) -> int:
    """Return the number of programs of `high` entries each."""
    return ceil_div(weight.shape[0], ENTRY * high)


def _height(weight: Tensor) -> int | None:
    """Return the fewest entries of a warpgroup program with which every program has a multiprocessor for itself.

    None: there is no such number, or shared memory has no room for as many.
    """
    length = weight.shape[1]
    for high in range(1, HIGHEST + 1):
        if _programs(weight, high) <= MULTIPROCESSORS:
            room = length // 64 * (ENTRY * high + ROWS) * 128 + (64 - ENTRY * high) * 128 + 1024
            return high if room <= SHARED else None
    return None


def fits_warpgroup(x: Tensor, weight: Tensor, *, normed: bool = False) -> bool:
    """Return whether the warpgroup kernel takes these. normed: the kernel also computes the norm, of one row."""
    count, length = x.shape
    is_even = length % (64 * GROUP) == 0 and (not normed or length & (length - 1) == 0)
    high = _height(weight) if is_even and 0 < count <= ROWS else None
    if high is None:
        return False
    if normed:
        return count == 1 and (high == 1 or length >= LONG)
    is_aligned = not x.data_ptr() & 15 and (count == 1 or x.stride(0) % 8 == 0)
    return is_aligned and (count > 1 or high == 1)


def fits_one_warp(x: Tensor, weight: Tensor) -> bool:
    """Return whether the one-warp kernel takes these: x has one row, and shared memory has room for all programs."""
    count, length = x.shape
    is_even = 512 <= length <= 2048 and length & (length - 1) == 0
    room = length * (ENTRY + 1) * 2 + 2048
    return count == 1 and is_even and _programs(weight) <= MULTIPROCESSORS * (SHARED // room)


def fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether `linear` takes these."""
    is_for_warpgroup = bias is None and fits_warpgroup(x, weight)
    return _can_load(x, weight) and (is_for_warpgroup or few_rows_large_hopper_triton.fits(x, weight))


def fits_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether `norm_linear` takes these."""
    return _can_load(x, weight) and (fits_warpgroup(x, weight, normed=True) or fits_one_warp(x, weight))


def _can_load(x: Tensor, weight: Tensor) -> bool:
    """Return whether the copy engine can load the weight for rows of 16 bits."""
    return x.element_size() == 2 and weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, where `fits` is true."""
    if bias is not None or not fits_warpgroup(x, weight):
        return few_rows_large_hopper_triton.linear(x, weight, None if bias is None else bias.contiguous())
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _warpgroup(x, weight, y, (x, x, x, x, 0.0, False), normed=False)
    return y


def norm_linear(
    x: Tensor, residual: Tensor, norm: Tensor, weight: Tensor, eps: float, plus_one: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `norm_linear` of one row, where `fits_norm` is true; norm: the norm's weight."""
    total, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    norm_arguments = residual, norm, total, normed, eps, plus_one
    if fits_warpgroup(x, weight, normed=True):
        _warpgroup(x, weight, y, norm_arguments, normed=True)
    else:
        _one_warp(x, weight, y, norm_arguments)
    return y, normed, total


# residual, norm weight, total (written), normed (written), eps, plus_one
_NormArguments = tuple[Tensor, Tensor, Tensor, Tensor, float, bool]


def _one_warp(x: Tensor, weight: Tensor, y: Tensor, norm_arguments: _NormArguments) -> None:
    residual, norm, total, normed, eps, plus_one = norm_arguments
    _one_warp_kernel[(_programs(weight),)](
        x, residual, norm, _descriptor(weight, x.shape[1]), total, normed, y, eps, y.shape[1],
        K=x.shape[1], COLUMNS=ENTRY, PLUS_ONE=plus_one, num_warps=1, enable_fp_fusion=False, **overlap(x),
    )  # fmt: skip


def _warpgroup(x: Tensor, weight: Tensor, y: Tensor, norm_arguments: _NormArguments, *, normed: bool) -> None:
    residual, norm, total, norm_out, eps, plus_one = norm_arguments
    high = _height(weight)
    assert high is not None, "asked of fits_warpgroup before"
    _warpgroup_kernel[(_programs(weight, high),)](
        x, residual, norm, _descriptor(weight, 64 * GROUP if high == 1 else 64), total, norm_out, y, eps,
        x.stride(0) // 8, *y.shape, K=x.shape[1], ENTRY=ENTRY, HIGH=high, GROUP=GROUP, NORM=normed,
        PLUS_ONE=plus_one, LEAVES_ROOM=_programs(weight, high) <= MULTIPROCESSORS - ROOM, num_warps=4,
        enable_fp_fusion=False, **overlap(x),
    )  # fmt: skip


def _descriptor(weight: Tensor, length: int) -> TensorDescriptor:
    """The TMA descriptor of a weight: boxes of 16 rows and `length` channels."""
    return TensorDescriptor.from_tensor(weight, [ENTRY, length], TILE.value)
