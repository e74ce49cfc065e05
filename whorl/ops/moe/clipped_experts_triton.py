# mypy: allow-untyped-defs
"""The experts of gpt-oss in Triton: (token, choice) pairs sorted by expert, multiplied in tiles.

MXFP4 weights become bf16 in registers, in the order in which plain ones are read: the bits are equal. On Hopper experts
with few rows are multiplied by the kernel of mxfp4_hopper_triton.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._codes_triton import opaque, pairs_e2m1
from .._hopper import on_hopper
from .._launch_triton import launched
from .._overlap_triton import follow, overlap
from .._rows import ceil_div, power_of_2, unit_stride
from ..linear_triton import dot
from ..quantised.product_triton import order_int4_columns, pairs_plain
from .experts_many_tokens_triton import find_tile, plan, sort_pairs
from .experts_triton import combine

FEW_ROWS, SOME_ROWS = 16, 64  # average rows of an expert up to which tiles have as many
FEW_TOKENS = 4  # up to here each token reads the weights of its experts for itself

few_tokens_on_hopper = on_hopper("whorl.ops.quantised.mxfp4_hopper_triton")


@triton.jit
def _load_weight(
    weight_ptr, scales_ptr, expert, rows, is_row, stride_e, stride, scales_stride_e, scales_stride, start, length,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return `BLOCK` columns of rows of an expert's weight, [rows, BLOCK] in DTYPE, zero past `length`."""
    IS_BF16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
    at = weight_ptr + expert.to(tl.int64) * stride_e + rows[:, None] * stride
    if scales_ptr is None:
        k = start + tl.arange(0, BLOCK)
        return tl.load(at + k[None, :], mask=is_row[:, None] & (k < length)[None, :], other=0.0)
    else:
        word = start // 8 + tl.arange(0, BLOCK // 8)
        # A word holds columns from 32 neighbouring ones, as in layout.py.
        codes = tl.load(at + word[None, :], mask=is_row[:, None] & (word < stride)[None, :], other=0)
        group = word // 16 * 4 + word % 4
        scales_at = scales_ptr + expert.to(tl.int64) * scales_stride_e + rows[:, None] * scales_stride
        mask = is_row[:, None] & (group < length // 32)[None, :]
        scales = tl.load(scales_at + group[None, :], mask=mask, other=0).to(tl.int32)
        if IS_BF16 and not WIDEN:
            a, b, c, d, e, f, g, h = pairs_e2m1(codes, scales * 0x00800080 + 0x3F003F00)
        else:
            a, b, c, d, e, f, g, h = _values(codes, scales, DTYPE)
        return opaque(order_int4_columns(a, b, c, d, e, f, g, h, codes.shape[0], BLOCK), WIDEN)


@triton.jit
def _values(words, scales, DTYPE: tl.constexpr):
    """Return the eight values of each word in DTYPE, in the order of pairs of layout.py. scales: one for each word."""
    bits = tl.where(scales == 0, 0x00400000, scales << 23)
    a, b, c, d, e, f, g, h = pairs_plain(words)
    return (
        _value(a, bits, DTYPE),
        _value(b, bits, DTYPE),
        _value(c, bits, DTYPE),
        _value(d, bits, DTYPE),
        _value(e, bits, DTYPE),
        _value(f, bits, DTYPE),
        _value(g, bits, DTYPE),
        _value(h, bits, DTYPE),
    )


@triton.jit
def _value(numbers, bits, DTYPE: tl.constexpr):
    # The three bits of a magnitude are the lowest exponent bits and the highest mantissa bit of an fp32 2^126 times
    # smaller, of which 0.5 is a denormal number.
    small = (((numbers & 8) << 28) | ((numbers & 7) << 22)).to(tl.float32, bitcast=True)
    return (small * 8.507059173023462e37 * bits.to(tl.float32, bitcast=True)).to(DTYPE)


@triton.jit
def _clip(gate, up, alpha, limit, dtype: tl.constexpr):
    """Round gate and up to `dtype`, as a separate matmul would, and return the activation, rounded to it as well."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    return ((up + 1) * (gate / (1 + tl.exp(-alpha * gate)))).to(dtype)


@launched
@triton.jit
def _gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    counts_ptr,
    hidden_ptr,
    x_stride,
    stride_e,
    stride_f,
    scales_stride_e,
    scales_stride_f,
    K,
    C,
    F,
    E,
    alpha,
    limit,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute a tile of h: rows of one expert, columns of h."""
    follow(OVERLAP)
    expert, position, is_row = find_tile(tl.program_id(0), counts_ptr, E, BLOCK_E, ROWS)
    if expert < E:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < F
        pair = tl.load(order_ptr + position, mask=is_row, other=0)
        x_at = x_ptr + (pair // K).to(tl.int64)[:, None] * x_stride
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)
            x = tl.load(x_at + c[None, :], mask=is_row[:, None] & (c < C)[None, :], other=0.0)
            gate_weight = _load_weight(
                gate_up_ptr, scales_ptr, expert, 2 * columns, is_column, stride_e, stride_f, scales_stride_e,
                scales_stride_f, start, C, BLOCK, dtype, WIDEN,
            )  # fmt: skip
            up_weight = _load_weight(
                gate_up_ptr, scales_ptr, expert, 2 * columns + 1, is_column, stride_e, stride_f, scales_stride_e,
                scales_stride_f, start, C, BLOCK, dtype, WIDEN,
            )  # fmt: skip
            gate, up = dot(x, tl.trans(gate_weight), gate, WIDEN), dot(x, tl.trans(up_weight), up, WIDEN)
        bias_at = bias_ptr + expert.to(tl.int64) * 2 * F + 2 * columns
        gate += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_at + 1, mask=is_column, other=0.0).to(tl.float32)[None, :]
        to = hidden_ptr + position.to(tl.int64)[:, None] * F + columns[None, :]
        tl.store(to, _clip(gate, up, alpha, limit, dtype), mask=is_row[:, None] & is_column[None, :])


@launched
@triton.jit
def _down_kernel(
    hidden_ptr,
    down_ptr,
    scales_ptr,
    bias_ptr,
    order_ptr,
    counts_ptr,
    parts_ptr,
    stride_e,
    stride_c,
    scales_stride_e,
    scales_stride_c,
    C,
    F,
    E,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Read rows sorted by expert and write results in (token, choice) order."""
    follow(OVERLAP)
    expert, position, is_row = find_tile(tl.program_id(1), counts_ptr, E, BLOCK_E, ROWS)
    if expert < E:
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < C
        hidden_at = hidden_ptr + position.to(tl.int64)[:, None] * F
        part = tl.zeros((ROWS, COLUMNS), tl.float32)
        dtype: tl.constexpr = hidden_ptr.dtype.element_ty
        for start in range(0, F, BLOCK):
            f = start + tl.arange(0, BLOCK)
            hidden = tl.load(hidden_at + f[None, :], mask=is_row[:, None] & (f < F)[None, :], other=0.0)
            down = _load_weight(
                down_ptr, scales_ptr, expert, columns, is_column, stride_e, stride_c, scales_stride_e, scales_stride_c,
                start, F, BLOCK, dtype, WIDEN,
            )  # fmt: skip
            part = dot(hidden, tl.trans(down), part, WIDEN)
        part += tl.load(bias_ptr + expert.to(tl.int64) * C + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        pair = tl.load(order_ptr + position, mask=is_row, other=0).to(tl.int64)
        to = parts_ptr + pair[:, None] * C + columns[None, :]
        tl.store(to, part.to(dtype), mask=is_row[:, None] & is_column[None, :])


def experts(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_bias: Tensor,
    down: Tensor,
    down_scales: Tensor | None,
    down_bias: Tensor,
    weights: Tensor,
    ids: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if not ids.numel():
        return y.zero_()
    (num_experts, both), (pairs, choices) = gate_up_bias.shape, (ids.numel(), ids.shape[1])
    x, gate_up, down = unit_stride(x), gate_up.contiguous(), down.contiguous()
    scales = [None if s is None else s.contiguous() for s in (gate_up_scales, down_scales)]
    weights, ids = weights.float().contiguous(), ids.contiguous()
    hidden, parts = (torch.empty(pairs, n, dtype=x.dtype, device=x.device) for n in (both // 2, x.shape[1]))
    gate_up_bias, down_bias = gate_up_bias.contiguous(), down_bias.contiguous()
    stacks = (gate_up, scales[0], gate_up_bias), (down, scales[1], down_bias)
    few = None if scales[0] is None else few_tokens_on_hopper(x, pairs / num_experts)
    if few is not None:
        is_by_token = len(x) <= FEW_TOKENS
        routing = (ids, None) if is_by_token else sort_pairs(ids, num_experts)
        few.launch(x, *stacks[0], hidden, routing, pairs_per_row=choices, clips=(alpha, limit))
        few.launch(hidden, *stacks[1], parts, routing)
    else:
        _run_tiles(x, *stacks, sort_pairs(ids, num_experts), hidden, parts, choices, alpha, limit)
    combine(parts, weights, y)
    return y


_Stack = tuple[Tensor, Tensor | None, Tensor]  # weights or codes, scales, biases


def _run_tiles(
    x: Tensor,
    gate_up: _Stack,
    down: _Stack,
    routing: tuple[Tensor, Tensor],
    hidden: Tensor,
    parts: Tensor,
    choices: int,
    alpha: float,
    limit: float,
) -> None:
    """Write both products of the sorted pairs to hidden, in their order, and to parts, in that of tokens."""
    (order, counts), (pairs, width), num_experts = routing, hidden.shape, len(gate_up[0])
    tile = _plan(pairs / num_experts, x.element_size(), is_packed=gate_up[1] is not None)
    num_tiles = min(pairs, ceil_div(pairs, tile["ROWS"]) + num_experts)
    options: dict[str, Any] = {"BLOCK_E": power_of_2(num_experts), "WIDEN": is_interpreting()} | tile | overlap(x)
    options["enable_fp_fusion"] = False
    _gate_up_kernel[(num_tiles, ceil_div(width, tile["COLUMNS"]))](
        x, *gate_up, order, counts, hidden, x.stride(0), *gate_up[0].stride()[:2], *_strides(gate_up[1]), choices,
        x.shape[1], width, num_experts, alpha, limit, **options,
    )  # fmt: skip
    _down_kernel[(ceil_div(x.shape[1], tile["COLUMNS"]), num_tiles)](
        hidden, *down, order, counts, parts, *down[0].stride()[:2], *_strides(down[1]), x.shape[1], width, num_experts,
        **options,
    )  # fmt: skip


def _strides(scales: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if scales is None else tuple(scales.stride()[:2])


def _plan(rows: float, element_size: int, *, is_packed: bool) -> dict[str, int]:
    """Return the tiles of both matmuls; they affect speed alone. rows: average rows of an expert."""
    block = 128 if is_packed else 64  # codes are ordered by 128 columns
    if is_interpreting():
        return {"ROWS": 16, "COLUMNS": 32, "BLOCK": 128 if is_packed else 32}
    if element_size == 4:
        return plan(32, 32, 128 if is_packed else 32, 4, 2, "BLOCK")
    if rows <= FEW_ROWS:
        return plan(16, 32, 128, 4, 3, "BLOCK")
    if rows <= SOME_ROWS:
        return plan(64, 64, block, 4, 3, "BLOCK")
    return plan(64 if is_packed else 128, 128, block, 8, 3, "BLOCK")
