# mypy: allow-untyped-defs
"""`packed_experts` in Triton: one program per (token, choice) for few tokens, tiles of an expert's tokens for many.

Up to 8 tokens on Hopper the kernel is that of few_tokens_hopper_triton.py, where its `fits` takes both products; for
all others it is `_packed_experts_kernel`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._launch_triton import launched
from .._overlap_triton import follow, overlap
from .._rows import ceil_div, power_of_2, unit_stride
from ..moe.experts_many_tokens_triton import activate, find_tile, sort_pairs
from ..moe.experts_triton import combine
from .layout import Weight, expert_weights
from .packed_linear_triton import few_tokens_on_hopper
from .product_triton import fp32_block, product, weight_arguments

FEW_TOKENS = 8  # up to here each token reads the weights of its experts for itself in the Gluon kernel
FEWEST_TOKENS = 4  # the same in the tiled kernel
MODERATE_TOKENS = 256  # up to here most experts have few tokens


@triton.jit
def load_pairs(order_ptr, counts_ptr, E, SORTED: tl.constexpr, BLOCK_E: tl.constexpr, TOKENS: tl.constexpr):
    """Return this program's expert (E: none), its (token, choice) pairs [TOKENS], and the mask of valid ones.

    SORTED: the program takes a tile of the pairs sorted by expert, which order_ptr lists. Otherwise it takes one pair,
    and order_ptr holds the expert of each pair.
    """
    if SORTED:
        expert, at, is_pair = find_tile(tl.program_id(0), counts_ptr, E, BLOCK_E, TOKENS)
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
    PAIRS_PER_ROW,
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
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    CHAIN: tl.constexpr,
    EVEN: tl.constexpr,
    FAST: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute y[pair, n] from x[pair // PAIRS_PER_ROW] and row n of the pair's expert.

    ACTIVATE: silu of the product with row n times that with row N + n. high, scales_high: rows of one expert's codes
    and of its scales.
    """
    follow(OVERLAP)
    expert, pair, is_pair = load_pairs(order_ptr, counts_ptr, E, SORTED, BLOCK_E, TOKENS)
    if expert < E:
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        x_at = x_ptr + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * x_stride
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
            0,
            K,
            K,
            width,
            groups,
            ACTIVATE,
            GROUP,
            GROUP_ROWS,
            HAS_ZEROS,
            LAYOUT,
            ROWS,
            TOKENS,
            BLOCK_K,
            CHUNK,
            CHAIN,
            EVEN,
            FAST,
            WIDEN,
        )
        y = first
        if ACTIVATE:
            y = activate(first, second, y_ptr.dtype.element_ty)
        at = y_ptr + pair.to(tl.int64)[None, :] * N + rows[:, None]
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=is_pair[None, :] & (rows < N)[:, None])


def forward(x: Tensor, weights: Tensor, ids: Tensor, **packed: Any) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel() or not ids.numel():
        return y.zero_()
    x, ids = unit_stride(x), ids.contiguous()
    gate_up, down = expert_weights(**packed)
    num_experts, width, _ = gate_up.codes.shape
    hidden, parts = (torch.empty(ids.numel(), n, dtype=x.dtype, device=x.device) for n in (width // 2, x.shape[1]))
    if len(x) > FEW_TOKENS or not _run_few(x, gate_up, down, ids, hidden, parts):
        is_by_token = len(x) <= FEWEST_TOKENS and x.element_size() == 2
        routing = route_by_token(ids) if is_by_token else route_by_expert(ids, num_experts)
        sizes = plan(len(x)) if x.element_size() == 2 else fp32_plan(gate_up)
        launch(x, gate_up, hidden, routing, sizes[0], pairs_per_row=ids.shape[1], is_activated=True)
        launch(hidden, down, parts, routing, sizes[1], pairs_per_row=1, is_activated=False)
    combine(parts, weights.float().contiguous(), y)
    return y


def _run_few(x: Tensor, gate_up: Weight, down: Weight, ids: Tensor, hidden: Tensor, parts: Tensor) -> bool:
    """Write both matmuls of few tokens to hidden and parts by the Gluon kernel; return whether it takes them."""
    few = few_tokens_on_hopper(x, gate_up)
    if few is None or not few.fits(hidden, down):
        return False
    few.experts(x, gate_up, ids, hidden, pairs_per_row=ids.shape[1], is_activated=True)
    few.experts(hidden, down, ids, parts, pairs_per_row=1, is_activated=False)
    return True


# If the flag is set: the pairs sorted by expert, and the number of pairs of each expert. Otherwise the first tensor is
# the expert of each pair, and the second is not read.
Routing = tuple[Tensor, Tensor, bool]


def route_by_token(ids: Tensor) -> Routing:
    """Return the routing of programs that take one (token, choice) pair each."""
    return ids, ids, False


def route_by_expert(ids: Tensor, num_experts: int) -> Routing:
    """Sort the (token, choice) pairs by expert, for programs that take a tile of one expert's pairs."""
    return *sort_pairs(ids, num_experts), True


def launch_grid(routing: Routing, num_experts: int, rows: int, sizes: dict[str, Any]) -> tuple[int, int]:
    """Return tiles of pairs by tiles of rows; every expert may have one partly filled tile of pairs."""
    pairs = routing[0].numel()
    tiles = min(pairs, ceil_div(pairs, sizes["TOKENS"]) + num_experts) if routing[2] else pairs
    return tiles, ceil_div(rows, sizes["ROWS"])


def launch(
    x: Tensor,
    weight: Weight,
    y: Tensor,
    routing: Routing,
    sizes: dict[str, Any],
    *,
    pairs_per_row: int,
    is_activated: bool,
) -> None:
    """Launch one matmul. pairs_per_row: choices per token when the rows of x are tokens, 1 when they are pairs."""
    num_experts, high, _ = weight.codes.shape
    _packed_experts_kernel[launch_grid(routing, num_experts, y.shape[1], sizes)](
        x,
        *weight.tensors,
        routing[0],
        routing[1],
        y,
        x.stride(0),
        pairs_per_row,
        y.shape[1],
        num_experts,
        high=high,
        scales_high=weight.scales.shape[1],
        ACTIVATE=is_activated,
        SORTED=routing[2],
        BLOCK_E=power_of_2(num_experts),
        enable_fp_fusion=False,
        **weight_arguments(x, weight, sizes["BLOCK_K"]),
        **sizes,
        **overlap(x),
    )


def plan(count: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tile sizes of both matmuls; see `packed_linear_triton.plan`."""
    if is_interpreting():
        sizes = {"ROWS": 32, "TOKENS": 16, "BLOCK_K": 128}
        return sizes, sizes
    if count <= MODERATE_TOKENS:
        sizes = {"ROWS": 64, "TOKENS": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
        return sizes, sizes
    large = {"ROWS": 128, "BLOCK_K": 128, "num_warps": 8}
    return large | {"TOKENS": 64, "num_stages": 3}, large | {"TOKENS": 128, "num_stages": 3}


def fp32_plan(weight: Weight) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tile sizes of both matmuls in fp32, whatever the number of tokens."""
    sizes = {"TOKENS": 16, "BLOCK_K": fp32_block(weight)}
    sizes |= {"ROWS": 32} if is_interpreting() else {"ROWS": 64, "num_warps": 8, "num_stages": 1}
    return sizes, sizes
