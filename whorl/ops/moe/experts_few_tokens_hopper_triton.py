# mypy: allow-untyped-defs
"""The second product of `experts` and the sum of the choices, for one or two tokens on Hopper, in Gluon.

A program computes a few channels of all choices of a token: 8 channels of 8 choices are the 64 rows of a warpgroup
instruction (wgmma), and the inputs of the choices are its 8 columns, of which every row needs one. So the sum needs no
kernel of its own, and all of a program's weight is on its way at once, by the copy engine (TMA), before the first
product has ended. The bits are those of experts_triton.py.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._gluon_triton import barriers, begin, follow, load_block, reinterpret, sync
from .._overlap_triton import overlap
from ..few_rows_hopper_triton import copy_rows, wait_rows

TOKENS = 2  # up to here this is faster than two kernels
WIDEST = 768  # channels of `hidden` up to which a multiprocessor has room for two programs

CHOICES = gl.constexpr(8)
CHANNELS = gl.constexpr(8)  # of the result, per program
BLOCK = gl.constexpr(64)  # channels that the copy engine loads at once
GROUP = gl.constexpr(4)  # blocks that share a barrier

_TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
_SUM = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _load_weights(down, tiles, ready, ids_at, first, C: gl.constexpr, F: gl.constexpr):
    """Start loading CHANNELS rows of each choice; those of one block lie next to each other."""
    for g in gl.static_range(F // BLOCK // GROUP):
        mbarrier.expect(ready.index(g), CHOICES * CHANNELS * BLOCK * GROUP * 2)
        for choice in gl.static_range(CHOICES):
            row = gl.load(ids_at + choice).to(gl.int32) * C + first
            for i in gl.static_range(GROUP):
                block = g * GROUP + i
                load_block(down, [row, block * BLOCK], ready.index(g), tiles.index(block * CHOICES + choice))


@gluon.jit
def _combine(y, weights_at, dtype: gl.constexpr):
    """The weighted sum of the choices, in order, each rounded to `dtype` first. y: [rows, columns] of the product."""
    choice = gl.expand_dims(gl.arange(0, CHOICES * CHANNELS, gl.SliceLayout(1, _ACC)) // CHANNELS, 1)
    column = gl.expand_dims(gl.arange(0, CHOICES, gl.SliceLayout(0, _ACC)), 0)
    own = gl.sum(gl.where(choice == column, y, 0.0), 1)  # one number, and zeros
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    parts = gl.allocate_shared_memory(gl.float32, [CHOICES * CHANNELS], plain, own.to(dtype).to(gl.float32))
    sync()
    total = gl.zeros([CHANNELS], gl.float32, _SUM)
    for i in gl.static_range(CHOICES):
        weight = gl.full([CHANNELS], gl.load(weights_at + i), gl.float32, _SUM)
        total = gl.fma(parts.slice(i * CHANNELS, CHANNELS).load(_SUM), weight, total)
    return total


@gluon.jit
def _down_combine_kernel(
    hidden_ptr, down, weights_ptr, ids_ptr, y_ptr, C: gl.constexpr, F: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """CHANNELS channels of one token. ids and weights are read early: the kernel before has waited for them."""
    begin(OVERLAP)
    groups: gl.constexpr = F // BLOCK // GROUP
    dtype: gl.constexpr = down.dtype
    first, token = gl.program_id(0) * CHANNELS, gl.program_id(1).to(gl.int64)
    tiles = gl.allocate_shared_memory(dtype, [F // BLOCK * CHOICES, CHANNELS, BLOCK], _TILE)
    inputs = gl.allocate_shared_memory(dtype, [F // BLOCK, CHOICES, BLOCK], _TILE)
    ready = barriers(groups, 1)
    fence_async_shared()
    _load_weights(down, tiles, ready, ids_ptr + token * CHOICES, first, C, F)
    follow(OVERLAP)
    copy_rows(hidden_ptr + token * (CHOICES * F), inputs, F // 8, CHOICES, groups, GROUP)
    weight_blocks = reinterpret(tiles, dtype, [F // BLOCK, CHOICES * CHANNELS, BLOCK], _TILE)
    y = gl.zeros([CHOICES * CHANNELS, CHOICES], gl.float32, _ACC)
    for g in gl.static_range(groups):
        wait_rows(groups - 1 - g)
        mbarrier.wait(ready.index(g), 0)
        for i in gl.static_range(GROUP):
            x = inputs.index(g * GROUP + i).permute((1, 0))
            y = warpgroup_mma(weight_blocks.index(g * GROUP + i), x, y, is_async=True)
    total = _combine(warpgroup_mma_wait(0, [y]), weights_ptr + token * CHOICES, dtype)
    gl.store(y_ptr + token * C + first + gl.arange(0, CHANNELS, _SUM), total.to(dtype))


def fits(down: Tensor, ids: Tensor) -> bool:
    """Return whether the kernel takes these, and is faster than two."""
    (_, channels, width), (count, choices) = down.shape, ids.shape
    is_even = not channels % CHANNELS.value and not width % (BLOCK.value * GROUP.value)
    is_dense = down.element_size() == 2 and down.is_contiguous() and not down.data_ptr() & 15
    return is_even and is_dense and count <= TOKENS and choices == CHOICES.value and width <= WIDEST


def run_down_combine(hidden: Tensor, down: Tensor, weights: Tensor, ids: Tensor, y: Tensor) -> None:
    """Write to y [T, C] the weighted sum of hidden [T * K, F] times the weights of its experts, where `fits` is true.

    In a step that runs ahead (`whorl.device.ahead`), the kernel before this one must call `begin` after `follow`.
    """
    channels, width = down.shape[1:]
    _down_combine_kernel[(channels // CHANNELS.value, len(y))](
        hidden,
        TensorDescriptor.from_tensor(down.view(-1, width), [CHANNELS.value, BLOCK.value], _TILE.value),
        weights,
        ids,
        y,
        C=channels,
        F=width,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap(y),
    )
