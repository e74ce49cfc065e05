# mypy: allow-untyped-defs
"""The causal convolution of gated delta layers in Triton: a block of tokens and channels a program."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_triton import launched
from .._rows import ceil_div, power_of_2, unit_stride
from .layout import CHUNK as ROWS_OF_CHUNK

CHUNK = tl.constexpr(ROWS_OF_CHUNK)
TOKENS, CHANNELS = 16, 128  # of a program


@triton.jit
def _sequence_of(starts_ptr, tokens, B, BLOCK_B: tl.constexpr):
    """Return the sequence of each token, [tokens]; B for those past the last start."""
    index = tl.arange(0, BLOCK_B)
    ends = tl.load(starts_ptr + 1 + index, mask=index < B, other=2147483647)
    b = tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
    return tl.where(tokens < tl.load(starts_ptr + B), b, B)


@triton.jit
def _input(
    x_ptr, tail_ptr, inputs_ptr, token, first, row, lane, is_real, channels, is_channel, stride, tail_stride,
    ring_stride, N, RING: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Load the inputs [tokens, channels] of tokens that may lie before the call's first of their sequence.

    first: that token; row: its place in its chunk. Without lanes what lies before is zero.
    """
    is_channel, is_new = is_channel[None, :], is_real & (token >= first)
    at = x_ptr + token.to(tl.int64)[:, None] * stride + channels[None, :]
    x = tl.load(at, mask=is_new[:, None] & is_channel, other=0.0)
    if tail_ptr is not None:
        row = row + token - first
        is_stored = is_real & (token < first)
        at = inputs_ptr + lane[:, None] * ring_stride + (row % RING)[:, None] * N + channels[None, :]
        x += tl.load(at, mask=(is_stored & (row >= 0))[:, None] & is_channel, other=0.0)
        at = tail_ptr + lane[:, None] * tail_stride + (REACH + row)[:, None] * N + channels[None, :]
        x += tl.load(at, mask=(is_stored & (row < 0))[:, None] & is_channel, other=0.0)
    return x


@triton.jit
def convolved(
    x_ptr, weight_ptr, tail_ptr, inputs_ptr, first, count, row, lane, channels, is_channel,
    x_stride, tail_stride, ring_stride, N, ROWS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Return the convolution of `count` tokens of a sequence, [ROWS, C], and keep their inputs in the sequence's lane.

    They are all of the sequence's in this call, which does not go past the end of a chunk. first, row: the first of
    them, and its place in its chunk.
    """
    index = tl.arange(0, ROWS)
    lanes, is_real = tl.zeros((ROWS,), tl.int64) + lane, index < count
    is_stored = is_real[:, None] & is_channel[None, :]
    total = tl.zeros((ROWS, C), tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(weight_ptr + channels * W + j, mask=is_channel, other=0.0).to(tl.float32)
        x = _input(
            x_ptr, tail_ptr, inputs_ptr, first + index - (W - 1 - j), first, row, lanes, is_real, channels,
            is_channel, x_stride, tail_stride, ring_stride, N, RING, W - 1,
        )  # fmt: skip
        total += tap[None, :] * x.to(tl.float32)
        if j == W - 1:  # where the chunk ends, the tail alone is kept
            to = inputs_ptr + lane * ring_stride + ((row + index) % RING)[:, None] * N + channels[None, :]
            tl.store(to, x, mask=is_stored & (index * 0 + row + count < CHUNK)[:, None])
        if j > 0:
            to = tail_ptr + lane * tail_stride + (j - 1) * N + channels[None, :] + index[:, None] * 0
            tl.store(to, x, mask=is_stored & (row + index == CHUNK - 1)[:, None])
    return tl.div_rn(total, 1.0 + tl.exp(-total)).to(x_ptr.dtype.element_ty)


@triton.jit
def _places(starts_ptr, lengths_ptr, lanes_ptr, tokens, B, BLOCK_B: tl.constexpr):
    """Return whether tokens are of a sequence, the first token of theirs in this call, its row, and their lane."""
    b = _sequence_of(starts_ptr, tokens, B, BLOCK_B)
    is_real = b < B
    first = tl.load(starts_ptr + b, mask=is_real, other=0)
    row, lane = tl.zeros_like(first), tl.zeros_like(first).to(tl.int64)
    if lanes_ptr is not None:
        count = tl.load(starts_ptr + b + 1, mask=is_real, other=0) - first
        row = tl.maximum(tl.load(lengths_ptr + b, mask=is_real, other=0) - count, 0) % CHUNK
        lane = tl.load(lanes_ptr + b, mask=is_real, other=0).to(tl.int64)
    return is_real, first, row, lane


@launched
@triton.jit
def _conv_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    tail_ptr,
    inputs_ptr,
    lanes_ptr,
    starts_ptr,
    lengths_ptr,
    x_stride,
    y_stride,
    tail_stride,
    ring_stride,
    T,
    B,
    N,
    W: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_real, first, row, lane = _places(starts_ptr, lengths_ptr, lanes_ptr, tokens, B, BLOCK_B)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(weight_ptr + channels * W + j, mask=channels < N, other=0.0).to(tl.float32)
        x = _input(
            x_ptr, tail_ptr, inputs_ptr, tokens - (W - 1 - j), first, row, lane, is_real, channels, channels < N,
            x_stride, tail_stride, ring_stride, N, RING, W - 1,
        )  # fmt: skip
        total += tap[None, :] * x.to(tl.float32)
    y = tl.div_rn(total, 1.0 + tl.exp(-total))
    to = y_ptr + tokens.to(tl.int64)[:, None] * y_stride + channels[None, :]
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & (channels < N)[None, :])


@launched
@triton.jit
def _conv_keep_kernel(
    x_ptr,
    tail_ptr,
    inputs_ptr,
    lanes_ptr,
    starts_ptr,
    lengths_ptr,
    x_stride,
    tail_stride,
    ring_stride,
    N,
    W: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_RING: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Store the last inputs of one sequence in its lane. All are read before any is written."""
    channels, b = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(1)
    first, end = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1)
    if end > first:
        length = tl.load(lengths_ptr + b)
        start = tl.maximum(length - (end - first), 0)
        point = length // CHUNK * CHUNK
        index = tl.arange(0, BLOCK_W)
        lane = tl.load(lanes_ptr + b).to(tl.int64)
        lanes = tl.zeros((BLOCK_W,), tl.int64) + lane
        is_kept = (index < W - 1) & (tl.zeros_like(index) + start < point)
        token = first + point - start - (W - 1) + index
        kept = _input(
            x_ptr, tail_ptr, inputs_ptr, token, first, start % CHUNK, lanes, is_kept, channels, channels < N,
            x_stride, tail_stride, ring_stride, N, RING, W - 1,
        )  # fmt: skip
        tl.debug_barrier()
        to = tail_ptr + lane * tail_stride + index[:, None] * N + channels[None, :]
        tl.store(to, kept, mask=is_kept[:, None] & (channels < N)[None, :])
        position = tl.maximum(tl.maximum(start, point), length - RING) + tl.arange(0, BLOCK_RING)
        is_new = (position < length)[:, None] & (channels < N)[None, :]
        x = tl.load(
            x_ptr + (first + position - start).to(tl.int64)[:, None] * x_stride + channels[None, :], mask=is_new
        )
        to = inputs_ptr + lane * ring_stride + (position % CHUNK % RING)[:, None] * N + channels[None, :]
        tl.store(to, x, mask=is_new)


@launched
@triton.jit
def _conv_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    partial_ptr,
    starts_ptr,
    dy_stride,
    x_stride,
    T,
    B,
    N,
    W: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute dx of a block of tokens, and their share of dweight, [W, N]."""
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    b = _sequence_of(starts_ptr, tokens, B, BLOCK_B)
    is_real, is_channel = b < B, channels < N
    first = tl.load(starts_ptr + b, mask=is_real, other=0)
    end = tl.load(starts_ptr + b + 1, mask=is_real, other=0)
    dx = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for i in tl.static_range(W):  # what reaches token t through the sum of token t + i
        other = tokens + i
        is_other = is_real & (other < end)
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        for j in tl.static_range(W):
            tap = tl.load(weight_ptr + channels * W + j, mask=is_channel, other=0.0).to(tl.float32)
            x = _input(
                x_ptr,
                None,
                None,
                other - (W - 1 - j),
                first,
                0,
                0,
                is_other,
                channels,
                is_channel,
                x_stride,
                0,
                0,
                N,
                1,
                W - 1,
            )
            total += tap[None, :] * x.to(tl.float32)
        share = tl.div_rn(1.0, 1.0 + tl.exp(-total))
        at = dy_ptr + other.to(tl.int64)[:, None] * dy_stride + channels[None, :]
        grad = tl.load(at, mask=is_other[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
        grad *= share * (1.0 + total * (1.0 - share))
        tap = tl.load(weight_ptr + channels * W + W - 1 - i, mask=is_channel, other=0.0).to(tl.float32)
        dx += tap[None, :] * grad
        if i == 0:
            for j in tl.static_range(W):
                x = _input(
                    x_ptr,
                    None,
                    None,
                    tokens - (W - 1 - j),
                    first,
                    0,
                    0,
                    is_real,
                    channels,
                    is_channel,
                    x_stride,
                    0,
                    0,
                    N,
                    1,
                    W - 1,
                )
                share_of_tap = tl.sum(grad * x.to(tl.float32), 0)
                to = partial_ptr + (tl.program_id(1).to(tl.int64) * W + j) * N + channels
                tl.store(to, share_of_tap, mask=is_channel)
    to = dx_ptr + tokens.to(tl.int64)[:, None] * N + channels[None, :]
    tl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & is_channel[None, :])


def forward(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(starts) == 1:
        return y.zero_()
    _convolve(x, weight, y, starts.contiguous(), {}, 1)
    return y


def _convolve(x: Tensor, weight: Tensor, y: Tensor, starts: Tensor, states: dict[str, Tensor], ring: int) -> None:
    """Compute y. states: tail, inputs, lanes and lengths by name; empty: sequences begin at 0."""
    tokens, channels = x.shape
    if not x.numel():
        return
    x, weight = unit_stride(x), weight.contiguous()
    named: dict[str, Any] = {f"{name}_ptr": states.get(name) for name in ("tail", "inputs", "lanes", "lengths")}
    named |= (
        {"tail_stride": states["tail"].stride(0), "ring_stride": states["inputs"].stride(0)}
        if states
        else {
            "tail_stride": 0,
            "ring_stride": 0,
        }
    )
    block = min(CHANNELS, power_of_2(channels))
    _conv_kernel[(ceil_div(channels, block), ceil_div(tokens, TOKENS))](
        x_ptr=x,
        weight_ptr=weight,
        y_ptr=y,
        starts_ptr=starts,
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        T=tokens,
        B=len(starts) - 1,
        N=channels,
        W=weight.shape[1],
        RING=ring,
        BLOCK_B=power_of_2(len(starts) - 1),
        TOKENS=TOKENS,
        CHANNELS=block,
        **named,
        enable_fp_fusion=False,
        num_warps=4,
    )


def lanes(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    tail: Tensor,
    inputs: Tensor,
    lanes: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
) -> None:
    ring, count = inputs.shape[1], len(lanes)
    if not count or not x.numel():
        y.zero_()
        return
    starts, lengths = query_starts.contiguous(), context_lens.contiguous()
    states = {"tail": tail, "inputs": inputs, "lanes": lanes.contiguous(), "lengths": lengths}
    _convolve(x, weight, y, starts, states, ring)
    x, width, channels = unit_stride(x), weight.shape[1], x.shape[1]
    block = min(CHANNELS, power_of_2(channels))
    _conv_keep_kernel[(ceil_div(channels, block), count)](
        x,
        tail,
        inputs,
        states["lanes"],
        starts,
        lengths,
        x.stride(0),
        tail.stride(0),
        inputs.stride(0),
        channels,
        W=width,
        RING=ring,
        BLOCK_W=power_of_2(max(1, width - 1)),
        BLOCK_RING=power_of_2(ring),
        CHANNELS=block,
        enable_fp_fusion=False,
        num_warps=4,
    )


def backward(dy: Tensor, x: Tensor, weight: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    (tokens, channels), width = x.shape, weight.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel() or len(starts) == 1:
        return dx.zero_(), torch.zeros_like(weight, memory_format=torch.contiguous_format)
    dy, x, weight = unit_stride(dy), unit_stride(x), weight.contiguous()
    programs, block = ceil_div(tokens, TOKENS), min(CHANNELS, power_of_2(channels))
    partial = torch.empty(programs, width, channels, dtype=torch.float32, device=x.device)
    _conv_backward_kernel[(ceil_div(channels, block), programs)](
        dy,
        x,
        weight,
        dx,
        partial,
        starts.contiguous(),
        dy.stride(0),
        x.stride(0),
        tokens,
        len(starts) - 1,
        channels,
        W=width,
        BLOCK_B=power_of_2(len(starts) - 1),
        TOKENS=TOKENS,
        CHANNELS=block,
        enable_fp_fusion=False,
        num_warps=4,
    )
    return dx, partial.sum(0).t().to(weight.dtype).contiguous()
