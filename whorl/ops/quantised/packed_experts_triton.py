# mypy: allow-untyped-defs
"""`packed_experts` in Triton: token by token where there are few, else an expert's tokens together."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._hopper import gluon_reason
from .._launch_triton import launched
from .._overlap_triton import follow, overlap
from .._rows import ceil_div, power_of_2
from ..linear_triton import unit_stride
from ..moe.experts_triton import _activate, _combine, _sort_kernel, _tile_of
from .product_triton import Weight, product, weight_arguments

FEW_TOKENS = 4  # that read the weights of their experts for themselves
MODERATE_TOKENS = 256  # up to which most experts have few tokens


@triton.jit
def chosen(order_ptr, counts_ptr, E, SORTED: tl.constexpr, BLOCK_E: tl.constexpr, TOKENS: tl.constexpr):
    """This program's expert (E: none), its (token, slot) pairs [TOKENS], and which of these there are.

    SORTED: of pairs in the order of experts; else one pair, and order_ptr is the experts of pairs.
    """
    if SORTED:
        expert, at, is_pair = _tile_of(counts_ptr, E, BLOCK_E, TOKENS)
        pair = tl.load(order_ptr + at, mask=is_pair, other=0)
    else:
        is_pair = tl.arange(0, TOKENS) == 0
        pair = tl.program_id(0) + tl.zeros((TOKENS,), tl.int32)
        expert = tl.load(order_ptr + tl.program_id(0)).to(tl.int32)
    return expert, pair, is_pair


@launched
@triton.jit
def _packed_experts_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    order_ptr,
    counts_ptr,
    y_ptr,
    x_stride,
    SLOTS,
    N,
    E,
    K,
    width,
    groups,
    high,
    scales_high,
    ACTIVATE: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    FAST: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y[pair, n], of x[pair // SLOTS] and rows n of the pair's expert; ACTIVATE: silu of rows n times rows N + n.

    high, scales_high: rows of one expert's codes and scales.
    """
    follow(OVERLAP)
    expert, pair, is_pair = chosen(order_ptr, counts_ptr, E, SORTED, BLOCK_E, TOKENS)
    if expert < E:
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        x_at = x_ptr + (pair // SLOTS).to(tl.int64)[None, :] * x_stride
        entry = expert.to(tl.int64)
        group_at = entry * scales_high * groups
        first, second = product(
            x_at,
            is_pair[None, :],
            codes_ptr + entry * high * width,
            scales_ptr + group_at,
            zeros_ptr + group_at,
            rows % N,
            N,
            K,
            width,
            groups,
            ACTIVATE,
            GROUP,
            GROUP_ROWS,
            HAS_ZEROS,
            TILED,
            ROWS,
            TOKENS,
            BLOCK_K,
            CHUNK,
            EVEN,
            FAST,
            WIDEN,
        )
        y = first
        if ACTIVATE:
            y = _activate(first, second, y_ptr.dtype.element_ty)
        at = y_ptr + pair.to(tl.int64)[None, :] * N + rows[:, None]
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=is_pair[None, :] & (rows < N)[:, None])


def forward(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    rows: int,
    columns: int,
    tiled: bool,
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel() or not ids.numel():
        return y.zero_()
    x, ids = unit_stride(x), ids.contiguous()
    inner = Weight(gate_up, gate_up_scales, gate_up_zeros, rows, columns, tiled)
    outer = Weight(down, down_scales, down_zeros, rows, columns, tiled)
    hidden, parts = (
        torch.empty(ids.numel(), n, dtype=x.dtype, device=x.device) for n in (gate_up.shape[1] // 2, x.shape[1])
    )
    if len(x) <= FEW_TOKENS and x.element_size() == 2:
        _by_token(x, inner, outer, ids, hidden, parts)
    else:
        routing, sizes = by_expert(ids, len(gate_up)), plan(len(x), x.element_size())
        launch(x, inner, hidden, routing, sizes[0], slots=ids.shape[1], is_activated=True)
        launch(hidden, outer, parts, routing, sizes[1], slots=1, is_activated=False)
    _combine(parts, weights.float().contiguous(), y)
    return y


def _by_token(x: Tensor, inner: Weight, outer: Weight, ids: Tensor, hidden: Tensor, parts: Tensor) -> None:
    if gluon_reason(x.device) is None:
        from . import few_gluon_triton as few

        if few.reason(x, inner) is None and few.reason(hidden, outer) is None:
            few.experts(x, inner, ids, hidden, slots=ids.shape[1], is_activated=True)
            few.experts(hidden, outer, ids, parts, slots=1, is_activated=False)
            return
    sizes = plan(len(x), x.element_size())
    launch(x, inner, hidden, by_token(ids), sizes[0], slots=ids.shape[1], is_activated=True)
    launch(hidden, outer, parts, by_token(ids), sizes[1], slots=1, is_activated=False)


Routing = tuple[Tensor, Tensor, bool]  # order of pairs, or experts of pairs; how many each expert has; which of the two


def by_token(ids: Tensor) -> Routing:
    return ids, ids, False


def by_expert(ids: Tensor, number: int) -> Routing:
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    counts = torch.empty(number, dtype=torch.int32, device=ids.device)
    block = min(4096, power_of_2(pairs))
    _sort_kernel[(number,)](ids, order, counts, pairs, BLOCK_P=block, num_warps=4, **overlap(ids))
    return order, counts, True


def grid_of(routing: Routing, number: int, rows: int, sizes: dict[str, Any]) -> tuple[int, int]:
    """Tiles of pairs, every expert may have one that is not full, by tiles of rows."""
    pairs = routing[0].numel()
    tiles = min(pairs, ceil_div(pairs, sizes["TOKENS"]) + number) if routing[2] else pairs
    return tiles, ceil_div(rows, sizes["ROWS"])


def launch(
    x: Tensor,
    weight: Weight,
    y: Tensor,
    routing: Routing,
    sizes: dict[str, Any],
    *,
    slots: int,
    is_activated: bool,
) -> None:
    """One product. slots: of a token, where x has tokens and not pairs."""
    number, high, _ = weight.codes.shape
    _packed_experts_kernel[grid_of(routing, number, y.shape[1], sizes)](
        x,
        *weight.tensors,
        routing[0],
        routing[1],
        y,
        x.stride(0),
        slots,
        y.shape[1],
        number,
        high=high,
        scales_high=weight.scales.shape[1],
        ACTIVATE=is_activated,
        SORTED=routing[2],
        BLOCK_E=power_of_2(number),
        enable_fp_fusion=False,
        **weight_arguments(x, weight, sizes["BLOCK_K"]),
        **sizes,
        **overlap(x),
    )


def plan(count: int, element_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Of both products; see `packed_linear_triton.plan`."""
    if is_interpreting():
        sizes = {"ROWS": 32, "TOKENS": 16, "BLOCK_K": 128}
        return sizes, sizes
    if element_size == 4:
        sizes = {"ROWS": 64, "TOKENS": 16, "BLOCK_K": 128, "num_warps": 8, "num_stages": 1}
        return sizes, sizes
    if count <= MODERATE_TOKENS:
        sizes = {"ROWS": 64, "TOKENS": 16, "BLOCK_K": 128, "num_warps": 4}
        return sizes | {"num_stages": 4}, sizes | {"num_stages": 5}
    large = {"ROWS": 128, "BLOCK_K": 128, "num_warps": 8}
    return large | {"TOKENS": 64, "num_stages": 3}, large | {"TOKENS": 128, "num_stages": 3}
