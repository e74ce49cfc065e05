# mypy: allow-untyped-defs
"""The rotation on NVIDIA GPUs: one pass over q and k; a table row is read once per token and shared by its heads.

A program takes a group of BLOCK_H heads, of q or of k, of BLOCK_T tokens. Both channels of a pair are read and written
by the same thread, so rotating in place is safe where the channel order does not change. Indices are 64 bits wide,
because real shapes exceed 2^31 elements.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_triton import launched, prepare
from .._rows import Strides, ceil_div, contiguous_strides, empty_like, power_of_2


@triton.jit
def load_angles(
    table_ptr,
    positions_ptr,
    tokens,
    T,
    P,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Load cos and sin of these tokens, [BLOCK_T, 1, BLOCK_C] each, in fp32; INVERSE negates sin.

    The table has one row for each token, or is looked up where HAS_POSITIONS. A token whose row is outside the table is
    NaN.
    """
    channels = tl.arange(0, BLOCK_C)
    is_token = tokens < T
    row = tokens
    if HAS_POSITIONS:
        row = tl.load(positions_ptr + tokens, mask=is_token, other=0).to(tl.int64)
    row = row[:, None]
    inside = (row >= 0) & (row < P)
    stray = is_token[:, None] & (inside == 0)
    mask = inside & (channels < HALF)[None, :]
    at = table_ptr + row * (2 * HALF) + channels[None, :]
    cos = tl.where(stray, float("nan"), tl.load(at, mask=mask, other=0.0))
    sin = tl.where(stray, float("nan"), tl.load(at + HALF, mask=mask, other=0.0))
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
    HAS_POSITIONS: tl.constexpr,
):
    """Rotate the heads at offsets x_at into those at y_at. x_at, y_at, mask: [BLOCK_T, BLOCK_H]."""
    # Heads are loaded before angles: a warp issues in order, and a table row must wait for its position.
    first, second = load_pair(x_ptr, x_at + START, mask, HALF, BLOCK_C, READ_PAIRS)
    cos, sin = load_angles(table_ptr, positions_ptr, tokens, T, P, HALF, BLOCK_C, HAS_POSITIONS, INVERSE)
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
    HAS_POSITIONS: tl.constexpr,
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
            HAS_POSITIONS,
        )  # fmt: skip
    else:
        heads = ((group - q_groups) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
        x_at = b * k_stride_b + s * k_stride_s + heads * k_stride_h
        y_at = b * k_out_stride_b + s * k_out_stride_s + heads * k_out_stride_h
        _rotate_heads(
            k_ptr, k_out_ptr, x_at, y_at, is_token & (heads < HK), table_ptr, positions_ptr, tokens, T, P,
            START, REST_START, REST, BLOCK_REST, HALF, BLOCK_C, READ_PAIRS, WRITE_PAIRS, INVERSE,
            HAS_POSITIONS,
        )  # fmt: skip


def forward(q: Tensor, k: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
    return _rotate(q, k, in_place=False, **options)


def in_place(q: Tensor, k: Tensor | None, **options: Any) -> None:
    _rotate(q, k, in_place=True, **options)


def _rotate(
    q: Tensor,
    k: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor | None,
    style: str,
    out_style: str | None,
    where: str,
    inverse: bool,
    *,
    in_place: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k; returns new tensors or, in place, q and k themselves."""
    q, k = _readable(q, in_place), None if k is None else _readable(k, in_place)
    q_out, k_out = _output(q, in_place), None if k is None else _output(k, in_place)
    table, index = flat_table(cos_sin, positions)
    launch = _launch(
        *(q.shape, q.stride(), None if k is None else k.shape, None if k is None else k.stride(), table.shape),
        *(in_place, positions is not None, style, out_style, where, inverse),
    )
    if launch is not None:
        k_in, k_to = (q, q_out) if k is None or k_out is None else (k, k_out)  # HK is 0 where there is no k
        launch(q, k_in, q_out, k_to, table, index)
    return q_out, k_out


@functools.lru_cache(maxsize=1024)
def _launch(
    q_shape: torch.Size,
    q_strides: Strides,
    k_shape: torch.Size | None,
    k_strides: Strides | None,
    table_shape: torch.Size,
    in_place: bool,
    *options: Any,
) -> Callable[..., None] | None:
    """Return the launch for tensors of these shapes and strides; None where there are no tokens.

    options: the others of `_plan`, in its order.
    """
    tokens, kv_heads = q_shape[:-2].numel(), 0 if k_shape is None else k_shape[-2]
    if not tokens:
        return None
    constants, groups = _plan(q_shape[-2], kv_heads, q_shape[-1], table_shape[-1], in_place, *options)
    shapes = (q_shape, q_shape if k_shape is None else k_shape)
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
    heads: int,
    kv_heads: int,
    dim: int,
    rotary: int,
    in_place: bool,
    has_positions: bool,
    style: str,
    out_style: str | None,
    where: str,
    inverse: bool,
) -> tuple[dict[str, int], int]:
    """Return the constants that do not depend on the number of tokens, and how many programs share a token's heads."""
    unrotated = 0 if in_place else dim - rotary
    constants = {
        "HQ": heads,
        "HK": kv_heads,
        "START": 0 if where == "leading" else dim - rotary,
        "REST_START": rotary if where == "leading" else 0,
        "REST": unrotated,
        "BLOCK_REST": power_of_2(unrotated),
        "READ_PAIRS": style == "pairs",
        "WRITE_PAIRS": (out_style or style) == "pairs",
        "INVERSE": inverse,
        **angle_constants(rotary, has_positions),
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


def angle_constants(rotary: int, has_positions: bool) -> dict[str, int]:
    """Return the constants of `load_angles` by name."""
    return {"HALF": rotary // 2, "BLOCK_C": power_of_2(rotary // 2), "HAS_POSITIONS": has_positions}


def token_strides(strides: Strides) -> tuple[int, int, int]:
    """Return the strides of batch, sequence and head; a [T, H, D] tensor is one sequence with batch stride 0."""
    return (strides[0] if len(strides) == 4 else 0), strides[-3], strides[-2]


def _blocks(heads: int, rotary: int) -> dict[str, int]:
    """Return the block sizes: 2048 channels per program, that is two warps with four 16-byte loads per thread."""
    channels = power_of_2(rotary)
    block_h = max(1, min(power_of_2(heads), 2048 // channels))
    return {"BLOCK_T": max(1, 2048 // (block_h * channels)), "BLOCK_H": block_h, "num_warps": 2}
