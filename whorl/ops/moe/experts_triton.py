# mypy: allow-untyped-defs
"""Experts in Triton: the entry, and the kernels of few tokens. All kernels give the same bits.

| regime                                | kernels of both products and of the sum                                |
|---------------------------------------|------------------------------------------------------------------------|
| 1 or 2 tokens on Hopper               | `_gate_up_few_kernel`, then one of experts_few_tokens_hopper_triton.py |
| up to 4 tokens                        | `_gate_up_few_kernel`, `_down_few_kernel`, `_combine_kernel`           |
| more than 64 rows an expert on Hopper | that of experts_many_rows_hopper_triton.py twice, `_combine_kernel`    |
| all others, and fp32                  | both of experts_many_tokens_triton.py, `_combine_kernel`               |

For few tokens there is one program per (token, choice), for many there are tiles of one expert's tokens. The kernels
for Hopper are in Gluon and run where `fits` of their module takes the tensors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._hopper import on_hopper
from .._launch_triton import launched
from .._overlap_triton import begin, follow, overlap
from .._rows import ceil_div, power_of_2, unit_stride
from ..linear_triton import dot
from .experts_many_tokens_triton import MANY_ROWS, activate, run_down, run_gate_up, sort_pairs, tile_plan

FEW_TOKENS = 4  # up to here each token reads the weights of its experts for itself

few_tokens_on_hopper = on_hopper(f"{__package__}.experts_few_tokens_hopper_triton")
many_rows_on_hopper = on_hopper(f"{__package__}.experts_many_rows_hopper_triton")


@launched
@triton.jit
def _gate_up_few_kernel(
    x_ptr,
    gate_up_ptr,
    ids_ptr,
    hidden_ptr,
    x_stride,
    stride_e,
    stride_f,
    K,
    C,
    F,
    COLUMNS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply one (token, choice) by a tile of its expert's weight.

    The weight is the left operand; the token is column 0 of a right operand padded to 16 columns.
    """
    follow(OVERLAP)
    begin(OVERLAP)  # after the wait: the next kernel reads the ids at once
    pair = tl.program_id(0)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    columns, token = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, 16)[None, :]
    x_at = x_ptr + (pair // K).to(tl.int64) * x_stride
    gate_at = gate_up_ptr + expert * stride_e + (columns % F)[:, None] * stride_f
    gate = tl.zeros((COLUMNS, 16), tl.float32)
    up = tl.zeros((COLUMNS, 16), tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        if EVEN:
            x = tl.load(x_at + c[:, None] + token * 0, mask=token == 0, other=0.0)
            gate_weight, up_weight = tl.load(gate_at + c[None, :]), tl.load(gate_at + F * stride_f + c[None, :])
        else:
            x = tl.load(x_at + c[:, None], mask=(c < C)[:, None] & (token == 0), other=0.0)
            mask = (c < C)[None, :]
            gate_weight = tl.load(gate_at + c[None, :], mask=mask, other=0.0)
            up_weight = tl.load(gate_at + F * stride_f + c[None, :], mask=mask, other=0.0)
        gate, up = dot(gate_weight, x, gate, WIDEN), dot(up_weight, x, up, WIDEN)
    to = hidden_ptr + pair.to(tl.int64) * F + columns[:, None] + token
    mask = (columns < F)[:, None] & (token == 0)
    tl.store(to, activate(gate, up, hidden_ptr.dtype.element_ty), mask=mask)


@launched
@triton.jit
def _down_few_kernel(
    hidden_ptr,
    down_ptr,
    ids_ptr,
    parts_ptr,
    stride_e,
    stride_c,
    C,
    F,
    COLUMNS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a tile of channels of one (token, choice).

    Another kernel sums the choices: all choices of a token in one program would leave multiprocessors idle.
    """
    begin(OVERLAP)
    follow(OVERLAP)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    channels, token = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, 16)[None, :]
    down_at = down_ptr + expert * stride_e + (channels % C)[:, None] * stride_c
    part = tl.zeros((COLUMNS, 16), tl.float32)
    for start in range(0, F, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)
        down = tl.load(down_at + f[None, :], mask=(f < F)[None, :], other=0.0)
        hidden = tl.load(hidden_ptr + pair * F + f[:, None], mask=(f < F)[:, None] & (token == 0), other=0.0)
        part = dot(down, hidden, part, WIDEN)
    to = parts_ptr + pair * C + channels[:, None] + token
    tl.store(to, part.to(parts_ptr.dtype.element_ty), mask=(channels < C)[:, None] & (token == 0))


@triton.jit
def _add_weighted(part, weight, y):
    """Return y + weight * part, rounded once."""
    return tl.fma(part.to(tl.float32), tl.full(part.shape, weight, tl.float32), y)


@launched
@triton.jit
def _combine_kernel(parts_ptr, weights_ptr, y_ptr, C, K: tl.constexpr, BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    follow(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    y = tl.zeros((BLOCK_C,), tl.float32)
    for choice in tl.static_range(K):  # unrolled so that all loads are issued together
        pair = token * K + choice
        part = tl.load(parts_ptr + pair * C + channels, mask=channels < C, other=0.0)
        y = _add_weighted(part, tl.load(weights_ptr + pair), y)
    tl.store(y_ptr + token * C + channels, y.to(y_ptr.dtype.element_ty), mask=channels < C)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if not ids.numel():
        return y.zero_()
    x, gate_up, down = (unit_stride(t) for t in (x, gate_up, down))
    weights, ids = weights.float().contiguous(), ids.contiguous()
    if len(x) <= FEW_TOKENS and x.element_size() == 2:
        _run_by_token(x, gate_up, down, weights, ids, y)
    else:
        _run_by_expert(x, gate_up, down, weights, ids, y)
    return y


def _run_by_token(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, y: Tensor) -> None:
    """Write `experts` of few tokens to y: every (token, choice) pair reads its expert's weights by itself."""
    pairs, (_, channels, width) = ids.numel(), down.shape
    hidden = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    gate_up_plan, down_plan = few_plan(channels, len(x))
    options = {"WIDEN": is_interpreting(), "enable_fp_fusion": False, **overlap(x)}
    _gate_up_few_kernel[(pairs, ceil_div(width, gate_up_plan["COLUMNS"]))](
        x,
        gate_up,
        ids,
        hidden,
        x.stride(0),
        *gate_up.stride()[:2],
        ids.shape[1],
        channels,
        width,
        **gate_up_plan,
        **options,
    )
    if (hopper := few_tokens_on_hopper(down, ids)) is not None:
        hopper.run_down_combine(hidden, down, weights, ids, y)
        return
    parts = torch.empty(pairs, channels, dtype=x.dtype, device=x.device)
    _down_few_kernel[(pairs, ceil_div(channels, down_plan["COLUMNS"]))](
        hidden, down, ids, parts, *down.stride()[:2], channels, width, **down_plan, **options
    )
    combine(parts, weights, y)


def few_plan(channels: int, tokens: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tile sizes of the two kernels for few tokens; they affect speed alone."""
    if is_interpreting():
        gate_up_plan, down_plan = {"COLUMNS": 16, "BLOCK_C": 32}, {"COLUMNS": 16, "BLOCK_F": 32}
    else:
        gate_up_plan = {"COLUMNS": 32, "BLOCK_C": 128, "num_warps": 2, "num_stages": 5 if tokens == 1 else 4}
        down_plan = {"COLUMNS": 128, "BLOCK_F": 64, "num_warps": 4, "num_stages": 5}
    return gate_up_plan | {"EVEN": channels % gate_up_plan["BLOCK_C"] == 0}, down_plan


def combine(parts: Tensor, weights: Tensor, y: Tensor) -> None:
    """Write to y [T, C] the weighted sum of parts [T * K, C] over each token's choices, in order."""
    block = min(1024, power_of_2(y.shape[1]))
    _combine_kernel[(y.shape[0], ceil_div(y.shape[1], block))](
        parts,
        weights,
        y,
        y.shape[1],
        K=weights.shape[1],
        BLOCK_C=block,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap(y),
    )


def _run_by_expert(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, y: Tensor) -> None:
    """Write `experts` of many tokens to y: pairs are sorted by expert and multiplied in tiles."""
    pairs, (num_experts, channels, width) = ids.numel(), down.shape
    order, counts = sort_pairs(ids, num_experts)
    hidden, parts = (torch.empty(pairs, n, dtype=x.dtype, device=x.device) for n in (width, channels))
    rows = pairs / num_experts
    if rows > MANY_ROWS and (hopper := many_rows_on_hopper(x, gate_up, down)) is not None:
        hopper.run_gate_up(x, gate_up, order, counts, hidden, ids.shape[1])
        hopper.run_down(hidden, down, order, counts, parts)
    else:
        gate_up_plan, down_plan = tile_plan(rows, x.element_size())
        run_gate_up(x, gate_up, order, counts, hidden, ids.shape[1], gate_up_plan)
        run_down(hidden, down, order, counts, parts, down_plan)
    combine(parts, weights, y)
