# mypy: allow-untyped-defs
"""The rotation on NVIDIA GPUs: one pass over q and k; a table row is read once per token and shared by its heads.

A program takes a group of BLOCK_H heads, of q or of k, of BLOCK_T tokens. Both channels of a pair are read and written
by the same thread, so rotating in place is safe where the channel order does not change. Indices are 64 bits wide,
because real shapes exceed 2^31 elements.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_triton import launched, prepare
from .._rows import Strides, ceil_div, contiguous_strides, empty_like, power_of_2
from .tables import read_write_orders

Mode = Literal["forward", "backward", "in place"]
LAYOUTS = {"chunked": 0, "interleaved": 1, "hwt": 2}


@triton.jit
def channel_axes(channels, AXES: tl.constexpr, S0, S1, S2, LAYOUT: tl.constexpr):
    """Return for each pair of channels the axis that it follows: the row of positions. S0, S1, S2: sections."""
    if LAYOUT == 1:  # interleaved: h at 1, 4, ... below 3h, w at 2, 5, ... below 3w
        is_h = (channels % 3 == 1) & (channels < 3 * S1)
        is_w = (channels % 3 == 2) & (channels < 3 * S2)
        axes = tl.where(is_h, 1, tl.where(is_w, 2, 0))
    elif LAYOUT == 2:  # hwt: sections are h, w, t
        axes = tl.where(channels < S0 + S1, 1 + channels % 2, 0)
    else:  # chunked
        axes = tl.where(channels < S0, 0, tl.where(channels < S0 + S1, 1, 2))
        if AXES == 4:
            axes = tl.where(channels < S0 + S1 + S2, axes, 3)
    return axes


@triton.jit
def load_row(table_ptr, row, is_token, channels, P, HALF: tl.constexpr):
    """Load cos and sin [BLOCK_T, BLOCK_C] of table rows [BLOCK_T]; NaN for a token whose row is outside the table."""
    row = row[:, None]
    inside = (row >= 0) & (row < P)
    stray = is_token[:, None] & (inside == 0)
    mask = inside & (channels < HALF)[None, :]
    at = table_ptr + row * (2 * HALF) + channels[None, :]
    cos = tl.where(stray, float("nan"), tl.load(at, mask=mask, other=0.0))
    sin = tl.where(stray, float("nan"), tl.load(at + HALF, mask=mask, other=0.0))
    return cos, sin


@triton.jit
def load_angles(
    table_ptr,
    positions_ptr,
    tokens,
    T,
    P,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    AXES: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    LAYOUT: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Load cos and sin of these tokens, [BLOCK_T, 1, BLOCK_C] each, in fp32; INVERSE negates sin.

    AXES is 0 where the table has one row for each token, 1 where each token has one position, and otherwise the number
    of axes: then the full row of every axis is read, in wide loads, and each pair selects the row of its axis.
    """
    channels = tl.arange(0, BLOCK_C)
    is_token = tokens < T
    row = tokens
    if AXES > 0:
        row = tl.load(positions_ptr + tokens, mask=is_token, other=0).to(tl.int64)
    cos, sin = load_row(table_ptr, row, is_token, channels, P, HALF)
    if AXES > 1:
        axes = channel_axes(channels, AXES, S0, S1, S2, LAYOUT)[None, :]
        for axis in tl.static_range(1, AXES):
            row = tl.load(positions_ptr + axis * T + tokens, mask=is_token, other=0).to(tl.int64)
            axis_cos, axis_sin = load_row(table_ptr, row, is_token, channels, P, HALF)
            cos = tl.where(axes == axis, axis_cos, cos)
            sin = tl.where(axes == axis, axis_sin, sin)
    if INVERSE:
        sin = -sin
    return cos[:, None, :], sin[:, None, :]


@triton.jit
def load_pair(x_ptr, at, mask, HALF: tl.constexpr, BLOCK_C: tl.constexpr, PAIRS: tl.constexpr):
    """Load both channels of each pair, [BLOCK_T, BLOCK_H, BLOCK_C] in fp32. at, mask: [BLOCK_T, BLOCK_H]."""
    if PAIRS:  # one contiguous read, split in registers
        channels = tl.arange(0, 2 * BLOCK_C)
        both = tl.load(x_ptr + at[:, :, None] + channels, mask=mask[:, :, None] & (channels < 2 * HALF), other=0.0).to(
            tl.float32
        )
        first, second = tl.split(tl.reshape(both, (at.shape[0], at.shape[1], BLOCK_C, 2)))
    else:
        channels = tl.arange(0, BLOCK_C)
        inside = mask[:, :, None] & (channels < HALF)
        first = tl.load(x_ptr + at[:, :, None] + channels, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + at[:, :, None] + HALF + channels, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pair(y_ptr, at, mask, first, second, HALF: tl.constexpr, BLOCK_C: tl.constexpr, PAIRS: tl.constexpr):
    dtype = y_ptr.dtype.element_ty
    if PAIRS:
        channels = tl.arange(0, 2 * BLOCK_C)
        both = tl.reshape(tl.join(first, second), (at.shape[0], at.shape[1], 2 * BLOCK_C))
        tl.store(y_ptr + at[:, :, None] + channels, both.to(dtype), mask=mask[:, :, None] & (channels < 2 * HALF))
    else:
        channels = tl.arange(0, BLOCK_C)
        inside = mask[:, :, None] & (channels < HALF)
        tl.store(y_ptr + at[:, :, None] + channels, first.to(dtype), mask=inside)
        tl.store(y_ptr + at[:, :, None] + HALF + channels, second.to(dtype), mask=inside)


@triton.jit
def rotated(first, second, cos, sin):
    """Rotate both channels of each pair. FMAs are written out, so that the bits of all kernels are equal."""
    cos, sin = tl.broadcast_to(cos, first.shape), tl.broadcast_to(sin, first.shape)
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


@triton.jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    x_at,
    y_at,
    mask,
    table_ptr,
    positions_ptr,
    tokens,
    T,
    P,
    START: tl.constexpr,
    REST_START: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    READ_PAIRS: tl.constexpr,
    WRITE_PAIRS: tl.constexpr,
    INVERSE: tl.constexpr,
    AXES: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Rotate the heads at offsets x_at into those at y_at. x_at, y_at, mask: [BLOCK_T, BLOCK_H]."""
    # Heads are loaded before angles: a warp issues in order, and a table row must wait for its position.
    first, second = load_pair(x_ptr, x_at + START, mask, HALF, BLOCK_C, READ_PAIRS)
    cos, sin = load_angles(table_ptr, positions_ptr, tokens, T, P, HALF, BLOCK_C, AXES, S0, S1, S2, LAYOUT, INVERSE)
    first, second = rotated(first, second, cos, sin)
    store_pair(y_ptr, y_at + START, mask, first, second, HALF, BLOCK_C, WRITE_PAIRS)
    if REST > 0:
        channels = REST_START + tl.arange(0, BLOCK_REST)
        inside = mask[:, :, None] & (channels < REST_START + REST)
        unrotated = tl.load(x_ptr + x_at[:, :, None] + channels, mask=inside)
        tl.store(y_ptr + y_at[:, :, None] + channels, unrotated, mask=inside)


@launched
@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    table_ptr,
    positions_ptr,
    T,
    S,
    P,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    q_out_stride_b,
    q_out_stride_s,
    q_out_stride_h,
    k_out_stride_b,
    k_out_stride_s,
    k_out_stride_h,
    BATCHED: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    START: tl.constexpr,
    REST_START: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    READ_PAIRS: tl.constexpr,
    WRITE_PAIRS: tl.constexpr,
    INVERSE: tl.constexpr,
    AXES: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    q_groups: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    groups: tl.constexpr = q_groups + (HK + BLOCK_H - 1) // BLOCK_H
    # The groups of one token have adjacent program ids, so that all but the first find its table row in the cache.
    program = tl.program_id(0)
    group = program % groups
    tokens = (program // groups).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = (tokens < T)[:, None]
    if BATCHED:
        b, s = (tokens // S)[:, None], (tokens % S)[:, None]
    else:  # a 64-bit division would delay the first load
        b, s = tl.zeros_like(tokens)[:, None], tokens[:, None]
    if group < q_groups:
        heads = (group * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        x_at = b * q_stride_b + s * q_stride_s + heads * q_stride_h
        y_at = b * q_out_stride_b + s * q_out_stride_s + heads * q_out_stride_h
        _rotate_heads(
            q_ptr, q_out_ptr, x_at, y_at, is_token & (heads < HQ), table_ptr, positions_ptr, tokens, T, P,
            START, REST_START, REST, BLOCK_REST, HALF, BLOCK_C, READ_PAIRS, WRITE_PAIRS, INVERSE,
            AXES, S0, S1, S2, LAYOUT,
        )  # fmt: skip
    else:
        heads = ((group - q_groups) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        x_at = b * k_stride_b + s * k_stride_s + heads * k_stride_h
        y_at = b * k_out_stride_b + s * k_out_stride_s + heads * k_out_stride_h
        _rotate_heads(
            k_ptr, k_out_ptr, x_at, y_at, is_token & (heads < HK), table_ptr, positions_ptr, tokens, T, P,
            START, REST_START, REST, BLOCK_REST, HALF, BLOCK_C, READ_PAIRS, WRITE_PAIRS, INVERSE,
            AXES, S0, S1, S2, LAYOUT,
        )  # fmt: skip


def forward(q: Tensor, k: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Compute `rope` and `mrope`."""
    return _rotate("forward", q, k, **options)


def backward(dq: Tensor, dk: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Compute `rope_backward` and `mrope_backward`: the inverse rotation with the orders exchanged."""
    return _rotate("backward", dq, dk, **options)


def in_place(q: Tensor, k: Tensor | None, **options: Any) -> None:
    """Compute `rope_` and `mrope_`."""
    _rotate("in place", q, k, **options)


def _rotate(
    mode: Mode,
    q: Tensor,
    k: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor | None,
    style: str,
    pairs_out: str,
    where: str,
    inverse: bool,
    sections: Sequence[int] | None = None,
    layout: str = "chunked",
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k; returns new tensors or, in place, q and k themselves."""
    in_place = mode == "in place"
    q, k = _readable(q, in_place), None if k is None else _readable(k, in_place)
    q_out, k_out = _output(q, in_place), None if k is None else _output(k, in_place)
    table, index = flat_table(cos_sin, positions)
    launch = _launch(
        *(mode, q.shape, q.stride(), None if k is None else k.shape, None if k is None else k.stride(), table.shape),
        *(style, pairs_out, where, inverse, positions is not None, None if sections is None else tuple(sections)),
        layout,
    )
    if launch is not None:
        k_in, k_to = (q, q_out) if k is None or k_out is None else (k, k_out)  # HK is 0 where there is no k
        launch(q, k_in, q_out, k_to, table, index)
    return q_out, k_out


@functools.lru_cache(maxsize=1024)
def _launch(
    mode: Mode,
    q_shape: torch.Size,
    q_strides: Strides,
    k_shape: torch.Size | None,
    k_strides: Strides | None,
    table_shape: torch.Size,
    style: str,
    pairs_out: str,
    where: str,
    inverse: bool,
    has_positions: bool,
    sections: tuple[int, ...] | None,
    layout: str,
) -> Callable[..., None] | None:
    """Return the launch for tensors of these shapes and strides; None where there are no tokens."""
    tokens, in_place = q_shape[:-2].numel(), mode == "in place"
    if not tokens:
        return None
    constants, groups = _plan(
        *(mode, q_shape[-2], 0 if k_shape is None else k_shape[-2], q_shape[-1], table_shape[-1]),
        *(style, pairs_out, where, inverse, has_positions, sections, layout),
    )
    shapes = (q_shape, q_shape) if k_shape is None else (q_shape, k_shape)
    inputs = (q_strides, q_strides if k_strides is None else k_strides)
    outputs = inputs if in_place else tuple(contiguous_strides(shape) for shape in shapes)
    return prepare(
        _rope_kernel,
        (ceil_div(tokens, constants["BLOCK_T"]) * groups,),
        *(tokens, q_shape[-3], table_shape[0]),
        *(stride for strides in (*inputs, *outputs) for stride in token_strides(strides)),
        BATCHED=len(q_shape) == 4,
        **constants,
    )


@functools.lru_cache(maxsize=1024)
def _plan(
    mode: Mode,
    heads: int,
    kv_heads: int,
    dim: int,
    rotary: int,
    style: str,
    pairs_out: str,
    where: str,
    inverse: bool,
    has_positions: bool,
    sections: tuple[int, ...] | None,
    layout: str,
) -> tuple[dict[str, int], int]:
    """Return the constants that do not depend on the number of tokens, and how many programs share a token's heads."""
    orders = read_write_orders(style, pairs_out)
    read, write = orders[::-1] if mode == "backward" else orders
    unrotated = 0 if mode == "in place" else dim - rotary
    constants = {
        "HQ": heads,
        "HK": kv_heads,
        "START": 0 if where == "leading" else dim - rotary,
        "REST_START": rotary if where == "leading" else 0,
        "REST": unrotated,
        "BLOCK_REST": power_of_2(unrotated),
        "READ_PAIRS": read == "pairs",
        "WRITE_PAIRS": write == "pairs",
        "INVERSE": inverse != (mode == "backward"),
        **angle_constants(rotary, has_positions, sections, layout),
        **_blocks(heads, rotary),
    }
    return constants, sum(ceil_div(h, constants["BLOCK_H"]) for h in (heads, kv_heads))


def _readable(x: Tensor, in_place: bool) -> Tensor:
    """Return x with unit stride along the channels; in place it is x itself, whose strides `accepts` has checked."""
    return x if in_place or x.stride(-1) == 1 else x.contiguous()


def _output(x: Tensor, in_place: bool) -> Tensor:
    return x if in_place else empty_like(x)


def flat_table(cos_sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the table as contiguous [rows, R], and contiguous positions.

    Where there are no positions the second is the table again, a pointer that the kernel does not read.
    """
    table = (cos_sin if cos_sin.dim() == 2 else cos_sin.reshape(-1, cos_sin.shape[-1])).contiguous()
    return table, table if positions is None else positions.contiguous()


def angle_constants(rotary: int, has_positions: bool, sections: Sequence[int] | None, layout: str) -> dict[str, int]:
    """Return the constants of `load_angles` by name."""
    axes = 0 if not has_positions else 1 if sections is None else len(sections)
    s0, s1, s2 = (0, 0, 0) if sections is None else tuple(sections)[:3]
    names = {"HALF": rotary // 2, "BLOCK_C": power_of_2(rotary // 2), "AXES": axes, "S0": s0, "S1": s1, "S2": s2}
    return {**names, "LAYOUT": LAYOUTS[layout]}


def token_strides(strides: Strides) -> tuple[int, int, int]:
    """Return the strides of batch, sequence and head; a [T, H, D] tensor is one sequence with batch stride 0."""
    return (strides[0] if len(strides) == 4 else 0), strides[-3], strides[-2]


def _blocks(heads: int, rotary: int) -> dict[str, int]:
    """Return the block sizes: 2048 channels per program, that is two warps with four 16-byte loads per thread."""
    channels = power_of_2(rotary)
    block_h = max(1, min(power_of_2(heads), 2048 // channels))
    return {"BLOCK_T": max(1, 2048 // (block_h * channels)), "BLOCK_H": block_h, "num_warps": 2}
