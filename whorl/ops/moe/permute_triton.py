# mypy: allow-untyped-defs
"""Kernels of permute and unpermute: places come from counting each expert's (token, choice) pairs in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_triton import launched
from .._rows import ceil_div, power_of_2, unit_stride

BLOCK_C = 2048  # channels per program
DOT_ELEMENTS = 4096  # tile size, choices x channels, of the kernel that computes the gradient of probs


@triton.jit
def find_places(ids_ptr, start, P, expert, first_place, BLOCK_P: tl.constexpr):
    """Return a block of pairs, a mask of those that chose `expert`, and their places, from `first_place` on."""
    pair = start + tl.arange(0, BLOCK_P)
    is_mine = tl.load(ids_ptr + pair, mask=pair < P, other=-1) == expert
    return pair, is_mine, first_place + tl.cumsum(is_mine.to(tl.int32), 0) - 1


@launched
@triton.jit
def _places_kernel(ids_ptr, places_ptr, counts_ptr, P, BLOCK_P: tl.constexpr):
    """Place the pairs of one expert, in order, after those of all lower experts."""
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK_P,), tl.int32)
    for start in range(0, P, BLOCK_P):
        pair = start + tl.arange(0, BLOCK_P)
        before += (tl.load(ids_ptr + pair, mask=pair < P, other=expert) < expert).to(tl.int32)
    first, count = tl.sum(before, 0), 0
    for start in range(0, P, BLOCK_P):
        pair, is_mine, place = find_places(ids_ptr, start, P, expert, first + count, BLOCK_P)
        tl.store(places_ptr + pair, place, mask=is_mine)
        count += tl.sum(is_mine.to(tl.int32), 0)
    tl.store(counts_ptr + expert, count)


@launched
@triton.jit
def _gather_rows_kernel(
    x_ptr, places_ptr, probs_ptr, rows_ptr, x_stride, C, K, HAS_PROBS: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Read one token once and write a copy to the place of each of its choices."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    x = tl.load(x_ptr + token * x_stride + columns, mask=columns < C, other=0.0)
    for choice in range(K):
        row = x
        if HAS_PROBS:
            row = x.to(tl.float32) * tl.load(probs_ptr + token * K + choice).to(tl.float32)
        place = tl.load(places_ptr + token * K + choice).to(tl.int64)
        tl.store(rows_ptr + place * C + columns, row.to(rows_ptr.dtype.element_ty), mask=columns < C)


@launched
@triton.jit
def _sum_rows_kernel(
    rows_ptr, places_ptr, probs_ptr, y_ptr, rows_stride, C, K, HAS_PROBS: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Add the rows of one token's choices, in order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    y = tl.zeros((BLOCK_C,), tl.float32)
    for choice in tl.range(0, K, loop_unroll_factor=4):  # keeps four row loads in flight
        place = tl.load(places_ptr + token * K + choice).to(tl.int64)
        row = tl.load(rows_ptr + place * rows_stride + columns, mask=columns < C, other=0.0).to(tl.float32)
        if HAS_PROBS:
            row *= tl.load(probs_ptr + token * K + choice).to(tl.float32)
        y += row
    tl.store(y_ptr + token * C + columns, y.to(y_ptr.dtype.element_ty), mask=columns < C)


@launched
@triton.jit
def _dots_kernel(
    x_ptr, rows_ptr, places_ptr, dprobs_ptr, x_stride, rows_stride, C, K, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Compute the dot product of one token with the row of each of its choices."""
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BLOCK_K)
    place = tl.load(places_ptr + token * K + choice, mask=choice < K, other=0).to(tl.int64)
    rows_at = rows_ptr + place[:, None] * rows_stride
    total = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    for start in range(0, C, BLOCK_C):
        columns = start + tl.arange(0, BLOCK_C)
        x = tl.load(x_ptr + token * x_stride + columns, mask=columns < C, other=0.0).to(tl.float32)
        mask = (choice < K)[:, None] & (columns < C)[None, :]
        total += tl.load(rows_at + columns[None, :], mask=mask, other=0.0).to(tl.float32) * x[None, :]
    dprobs = tl.sum(total, 1).to(dprobs_ptr.dtype.element_ty)
    tl.store(dprobs_ptr + token * K + choice, dprobs, mask=choice < K)


def permute(x: Tensor, ids: Tensor, num_experts: int, probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    pairs = ids.numel()
    places = torch.empty(ids.shape, dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    block = min(8192, power_of_2(pairs))
    _places_kernel[(num_experts,)](ids.contiguous(), places, counts, pairs, BLOCK_P=block, num_warps=8)
    return gather_rows(x, places, probs), places, counts


def gather_rows(x: Tensor, places: Tensor, probs: Tensor | None) -> Tensor:
    """Return rows [T * K, C]: a copy of token t in row places[t, j], times probs[t, j] if there are probs."""
    x, places = unit_stride(x), places.contiguous()
    channels, top_k = x.shape[1], places.shape[1]
    rows = torch.empty(places.numel(), channels, dtype=x.dtype, device=x.device)
    if rows.numel():
        _gather_rows_kernel[_grid(places, channels)](
            x,
            places,
            _probs_or_placeholder(probs, x),
            rows,
            x.stride(0),
            channels,
            top_k,
            **_launch_options(probs, channels),
        )
    return rows


def sum_rows(rows: Tensor, places: Tensor, probs: Tensor | None) -> Tensor:
    """Return y [T, C], the sum over j of rows[places[t, j]], times probs[t, j] if there are probs."""
    rows, places = unit_stride(rows), places.contiguous()
    channels, top_k = rows.shape[1], places.shape[1]
    y = torch.empty(places.shape[0], channels, dtype=rows.dtype, device=rows.device)
    if y.numel():
        _sum_rows_kernel[_grid(places, channels)](
            rows,
            places,
            _probs_or_placeholder(probs, rows),
            y,
            rows.stride(0),
            channels,
            top_k,
            **_launch_options(probs, channels),
        )
    return y


def permute_backward(
    drows: Tensor, places: Tensor, x: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    dx = sum_rows(drows, places, probs)
    return dx, None if probs is None or x is None else _dots(x, drows, places, probs.dtype)


def unpermute_backward(dy: Tensor, rows: Tensor, places: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return gather_rows(dy, places, probs), None if probs is None else _dots(dy, rows, places, probs.dtype)


def _dots(x: Tensor, rows: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dot products of x[t] and rows[places[t, j]], [T, K]: the gradient of probs."""
    x, rows, places = unit_stride(x), unit_stride(rows), places.contiguous()
    (count, channels), top_k = x.shape, places.shape[1]
    dprobs = torch.empty(count, top_k, dtype=dtype, device=x.device)
    if dprobs.numel():
        block_k = power_of_2(top_k)
        block_c = min(power_of_2(channels), max(16, DOT_ELEMENTS // block_k))
        _dots_kernel[(count,)](
            x,
            rows,
            places,
            dprobs,
            x.stride(0),
            rows.stride(0),
            channels,
            top_k,
            BLOCK_K=block_k,
            BLOCK_C=block_c,
            num_warps=4,
        )
    return dprobs


def _grid(places: Tensor, channels: int) -> tuple[int, int]:
    return places.shape[0], ceil_div(channels, min(BLOCK_C, power_of_2(channels)))


def _probs_or_placeholder(probs: Tensor | None, other: Tensor) -> Tensor:
    """Return probs, or `other` as a valid pointer that the kernel does not read when HAS_PROBS is false."""
    return other if probs is None else probs.contiguous()


def _launch_options(probs: Tensor | None, channels: int) -> dict[str, int | bool]:
    return {"HAS_PROBS": probs is not None, "BLOCK_C": min(BLOCK_C, power_of_2(channels)), "num_warps": 4}
