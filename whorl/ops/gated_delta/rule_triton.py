# mypy: allow-untyped-defs
"""The gated delta rule of prompts and packed sequences in Triton: two kernels.

The first computes, for all chunks and heads side by side, what does not depend on the state: the matrices L, t and P.
The second goes through the chunks of one sequence, for a slice of a head's value channels. It holds the state
transposed, [DV, D]: then every result of a product is an operand of the next as it lies in registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._launch_triton import launched
from .._rows import ceil_div, power_of_2, unit_stride
from ..linear_triton import dot
from .chunks_triton import BLOCK, BLOCKS, CHUNK, chunks_before, decays_of, load_rows, locate, row_of_inverse
from .layout import CHUNK as ROWS_OF_CHUNK
from .layout import RECENT

LANES = ("state", "rounded", "keys", "deltas", "decays", "errors", "inverses")


@launched
@triton.jit
def _delta_chunk_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    starts_ptr,
    lengths_ptr,
    lanes_ptr,
    lower_ptr,
    weights_ptr,
    sums_ptr,
    keys_ptr,
    decays_ptr,
    inverses_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    g_stride,
    beta_stride,
    keys_stride,
    decays_stride,
    inverses_stride,
    B,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RECENT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute L outside blocks and t inside, and P, both [CHUNK, CHUNK], and G of one chunk and value head.

    With lanes, rows of a chunk that stays open are stored in the lane of its sequence.
    """
    head, c = tl.program_id(0), tl.program_id(1)
    b, number = locate(starts_ptr, lengths_ptr, c, B, BLOCK_B)
    if b >= B:
        return
    first = tl.load(starts_ptr + b) + number * CHUNK
    count = tl.minimum(tl.load(starts_ptr + b + 1) - first, CHUNK)
    rows, channels = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    is_real = rows < count
    k = load_rows(k_ptr + head // G * k_stride_h, first + rows, k_stride_t, is_real, channels, D)
    q = load_rows(q_ptr + head // G * q_stride_h, first + rows, q_stride_t, is_real, channels, D)
    beta = tl.load(beta_ptr + head + (first + rows).to(tl.int64) * beta_stride, mask=is_real, other=0.0)
    sums = decays_of(g_ptr + head, first, count, g_stride)
    zero = tl.zeros((CHUNK, CHUNK), tl.float32)
    is_seen = rows[None, :] <= rows[:, None]
    decay = tl.where(is_seen, tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], 0.0)), 0.0)
    lower = beta[:, None] * (decay * dot(k, tl.trans(k), zero, WIDEN))
    lower = tl.where(rows[None, :] < rows[:, None], lower, 0.0)
    weights = (decay * dot(q, tl.trans(k), zero, WIDEN)).to(q.dtype)

    blocks, own = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    by_block = tl.reshape(lower, (BLOCKS, BLOCK, BLOCKS, BLOCK))
    is_inside = blocks[:, None, None, None] == blocks[None, None, :, None]
    inside = tl.sum(tl.where(is_inside, by_block, 0.0), 2)
    inverse = tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32)
    for i in range(BLOCK):
        is_row = (own == i)[None, :, None]
        row = row_of_inverse(tl.sum(tl.where(is_row, inside, 0.0), 1), inverse, (own == i)[None, :], BLOCKS)
        inverse = tl.where(is_row, row[:, None, :], inverse)
    lower = tl.reshape(tl.where(is_inside, inverse[:, :, None, :], by_block), (CHUNK, CHUNK)).to(q.dtype)

    place = (c.to(tl.int64) * tl.num_programs(0) + head) * CHUNK
    matrix = (place + rows)[:, None] * CHUNK + rows[None, :]
    tl.store(lower_ptr + matrix, lower)
    tl.store(weights_ptr + matrix, weights)
    tl.store(sums_ptr + place + rows, sums)
    if lanes_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if count < CHUNK:
            lane = tl.load(lanes_ptr + b).to(tl.int64)
            tl.store(decays_ptr + lane * decays_stride + head * CHUNK + rows, sums, mask=is_real)
            if head % G == 0:
                at = keys_ptr + lane * keys_stride + (head // G * CHUNK + rows)[:, None] * D + channels[None, :]
                tl.store(at, k, mask=is_real[:, None] & (channels < D)[None, :])
            row = blocks[:, None, None] * BLOCK + own[None, :, None]
            is_recent = (row < count) & (row >= (count - 1) // BLOCK * BLOCK - (RECENT - BLOCK))
            at = inverses_ptr + lane * inverses_stride + (head * RECENT + row % RECENT) * BLOCK + own[None, None, :]
            tl.store(at, inverse, mask=is_recent)


@triton.jit
def _tile(x_ptr, first, rows, count, stride, columns, size, FULL: tl.constexpr):
    """Load rows of a chunk; FULL: it has all its rows, and the columns are all of a head's."""
    if FULL:
        return tl.load(x_ptr + (first + rows).to(tl.int64)[:, None] * stride + columns[None, :])
    return load_rows(x_ptr, first + rows, stride, rows < count, columns, size)


@triton.jit
def _block(
    b: tl.constexpr, state, d0, d1, d2, k, v_ptr, beta_ptr, lower_ptr, sums_ptr, first, count, v_stride, beta_stride,
    values, DV, FULL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return y and d of block b of a chunk, [BV, BLOCK] in the operands' dtype. d0 to d2: d of the blocks before it."""
    rows = tl.arange(0, BLOCK) + b * BLOCK
    v = tl.trans(_tile(v_ptr, first, rows, count, v_stride, values, DV, FULL)).to(tl.float32)
    beta = tl.load(beta_ptr + (first + rows).to(tl.int64) * beta_stride, mask=rows < count, other=0.0)[None, :]
    growth = tl.exp(tl.load(sums_ptr + rows))[None, :]
    zero = tl.zeros((state.shape[0], BLOCK), tl.float32)
    y = beta * (v - growth * dot(state, tl.trans(k), zero, WIDEN))
    at = lower_ptr + rows[:, None] * CHUNK + tl.arange(0, BLOCK)[None, :]
    if b > 0:
        earlier = dot(d0, tl.trans(tl.load(at)), zero, WIDEN)
        if b > 1:
            earlier = dot(d1, tl.trans(tl.load(at + BLOCK)), earlier, WIDEN)
        if b > 2:
            earlier = dot(d2, tl.trans(tl.load(at + 2 * BLOCK)), earlier, WIDEN)
        y -= earlier
    y = y.to(state.dtype)
    return y, dot(y, tl.trans(tl.load(at + b * BLOCK)), zero, WIDEN).to(state.dtype)


@triton.jit
def _weighted(total, d, weights_ptr, b: tl.constexpr, WIDEN: tl.constexpr):
    """Add what block b contributes to the outputs of a chunk, [BV, CHUNK]."""
    at = weights_ptr + tl.arange(0, CHUNK)[:, None] * CHUNK + b * BLOCK + tl.arange(0, BLOCK)[None, :]
    return dot(d, tl.trans(tl.load(at)), total, WIDEN)


@triton.jit
def _added(total, d, k, sums_ptr, last, b: tl.constexpr, WIDEN: tl.constexpr):
    """Add what block b contributes to the state after a chunk, [BV, BLOCK_D]."""
    rest = tl.exp(last - tl.load(sums_ptr + b * BLOCK + tl.arange(0, BLOCK)))[None, :]
    return dot((rest * d.to(tl.float32)).to(d.dtype), k, total, WIDEN)


@triton.jit
def _chunk(
    state, q_ptr, k_ptr, v_ptr, beta_ptr, out_ptr, lower_ptr, weights_ptr, sums_ptr, first, count, q_stride, k_stride,
    v_stride, beta_stride, out_stride, scale, channels, values, D: tl.constexpr, DV, FULL: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute a chunk; return the state after it, if it is a whole one, and y and d of its blocks."""
    operand, rows = state.to(q_ptr.dtype.element_ty), tl.arange(0, BLOCK)
    k0 = _tile(k_ptr, first, rows, count, k_stride, channels, D, FULL)
    k1 = _tile(k_ptr, first, rows + BLOCK, count, k_stride, channels, D, FULL)
    k2 = _tile(k_ptr, first, rows + 2 * BLOCK, count, k_stride, channels, D, FULL)
    k3 = _tile(k_ptr, first, rows + 3 * BLOCK, count, k_stride, channels, D, FULL)
    y0, d0 = _block(
        0, operand, None, None, None, k0, v_ptr, beta_ptr, lower_ptr, sums_ptr, first, count, v_stride, beta_stride,
        values, DV, FULL, WIDEN,
    )  # fmt: skip
    y1, d1 = _block(
        1, operand, d0, None, None, k1, v_ptr, beta_ptr, lower_ptr, sums_ptr, first, count, v_stride, beta_stride,
        values, DV, FULL, WIDEN,
    )  # fmt: skip
    y2, d2 = _block(
        2, operand, d0, d1, None, k2, v_ptr, beta_ptr, lower_ptr, sums_ptr, first, count, v_stride, beta_stride,
        values, DV, FULL, WIDEN,
    )  # fmt: skip
    y3, d3 = _block(
        3, operand, d0, d1, d2, k3, v_ptr, beta_ptr, lower_ptr, sums_ptr, first, count, v_stride, beta_stride,
        values, DV, FULL, WIDEN,
    )  # fmt: skip
    rows = tl.arange(0, CHUNK)
    q = _tile(q_ptr, first, rows, count, q_stride, channels, D, FULL)
    zero = tl.zeros((state.shape[0], CHUNK), tl.float32)
    of_state = dot(operand, tl.trans(q), zero, WIDEN)
    of_rows = _weighted(zero, d0, weights_ptr, 0, WIDEN)
    of_rows = _weighted(of_rows, d1, weights_ptr, 1, WIDEN)
    of_rows = _weighted(of_rows, d2, weights_ptr, 2, WIDEN)
    of_rows = _weighted(of_rows, d3, weights_ptr, 3, WIDEN)
    out = tl.trans(scale * (tl.exp(tl.load(sums_ptr + rows))[None, :] * of_state + of_rows))
    at = out_ptr + (first + rows).to(tl.int64)[:, None] * out_stride + values[None, :]
    is_real = None if FULL else (rows < count)[:, None] & (values < DV)[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=is_real)
    last = tl.load(sums_ptr + CHUNK - 1)
    total = _added(tl.zeros(state.shape, tl.float32), d0, k0, sums_ptr, last, 0, WIDEN)
    total = _added(total, d1, k1, sums_ptr, last, 1, WIDEN)
    total = _added(total, d2, k2, sums_ptr, last, 2, WIDEN)
    total = _added(total, d3, k3, sums_ptr, last, 3, WIDEN)
    return tl.exp(last) * state + total, operand, y0, y1, y2, y3, d0, d1, d2, d3


@triton.jit
def _keep_rows(lane_ptr, x, b: tl.constexpr, first, count, ROWS: tl.constexpr, values, DV):
    """Store block b's rows of x [BV, BLOCK], from row `first` to `count`, in a lane's [ROWS, DV]."""
    rows = tl.arange(0, BLOCK) + b * BLOCK
    at = lane_ptr + (rows % ROWS)[None, :] * DV + values[:, None]
    tl.store(at, x, mask=((rows >= first) & (rows < count))[None, :] & (values < DV)[:, None])


@triton.jit
def _keep_all(
    states_ptr, deltas_ptr, state, d0, d1, d2, d3, first, count, stride, channels, values, D: tl.constexpr, DV
):  # fmt: skip
    """Store the state at the start of a chunk, [DV, D], and the chunk's deltas, at its tokens."""
    is_value = values < DV
    at = states_ptr + values[:, None] * D + channels[None, :]
    tl.store(at, state, mask=is_value[:, None] & (channels < D)[None, :])
    rows = tl.arange(0, BLOCK)
    at = deltas_ptr + (first + rows).to(tl.int64)[None, :] * stride + values[:, None]
    tl.store(at, d0, mask=(rows < count)[None, :] & is_value[:, None])
    tl.store(at + BLOCK * stride, d1, mask=(rows + BLOCK < count)[None, :] & is_value[:, None])
    tl.store(at + 2 * BLOCK * stride, d2, mask=(rows + 2 * BLOCK < count)[None, :] & is_value[:, None])
    tl.store(at + 3 * BLOCK * stride, d3, mask=(rows + 3 * BLOCK < count)[None, :] & is_value[:, None])


@launched
@triton.jit
def _delta_state_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    starts_ptr,
    lengths_ptr,
    lanes_ptr,
    lower_ptr,
    weights_ptr,
    sums_ptr,
    out_ptr,
    state_ptr,
    rounded_ptr,
    deltas_ptr,
    errors_ptr,
    states_ptr,
    all_deltas_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    beta_stride,
    out_stride_t,
    out_stride_h,
    state_stride,
    rounded_stride,
    deltas_stride,
    errors_stride,
    scale,
    B,
    DV,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BV: tl.constexpr,
    RECENT: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute out of one sequence and value head, for BV of its value channels; with lanes, keep what they hold.

    states_ptr, all_deltas_ptr: for a backward, where the state at the start of every chunk and all deltas are stored.
    """
    part, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1)
    is_aligned = stop > start
    if lengths_ptr is not None:
        is_aligned = is_aligned & ((tl.load(lengths_ptr + b) - (stop - start)) % CHUNK == 0)
    if is_aligned:
        values, channels = part * BV + tl.arange(0, BV), tl.arange(0, BLOCK_D)
        q_ptr += head // G * q_stride_h
        k_ptr += head // G * k_stride_h
        v_ptr += head * v_stride_h
        out_ptr += head * out_stride_h
        beta_ptr += head
        place = chunks_before(starts_ptr, lengths_ptr, b, B, BLOCK_B).to(tl.int64) * tl.num_programs(1) + head
        state = tl.zeros((BV, BLOCK_D), tl.float32)
        is_value = (values < DV)[:, None] & (channels < D)[None, :]
        if lanes_ptr is not None:
            lane = tl.load(lanes_ptr + b).to(tl.int64)
            in_lane = (head * D + channels)[None, :] * DV + values[:, None]
            state = tl.load(state_ptr + lane * state_stride + in_lane, mask=is_value, other=0.0)
        end = start + (stop - start) // CHUNK * CHUNK
        for first in tl.range(start, end, CHUNK, num_stages=STAGES, disable_licm=STAGES == 1):
            state, operand, _, _, _, _, d0, d1, d2, d3 = _chunk(
                state, q_ptr, k_ptr, v_ptr, beta_ptr, out_ptr, lower_ptr + place * CHUNK * CHUNK,
                weights_ptr + place * CHUNK * CHUNK, sums_ptr + place * CHUNK, first, CHUNK, q_stride_t, k_stride_t,
                v_stride_t, beta_stride, out_stride_t, scale, channels, values, D, DV, EVEN, WIDEN,
            )  # fmt: skip
            if states_ptr is not None:
                _keep_all(
                    states_ptr + place * DV * D, all_deltas_ptr + head * DV, operand, d0, d1, d2, d3, first, CHUNK,
                    tl.num_programs(1) * DV, channels, values, D, DV,
                )  # fmt: skip
            place += tl.num_programs(1)
        if lanes_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled)
            if end > start:
                tl.store(state_ptr + lane * state_stride + in_lane, state, mask=is_value)
        if stop > end:
            count = stop - end
            _, operand, y0, y1, y2, y3, d0, d1, d2, d3 = _chunk(
                state, q_ptr, k_ptr, v_ptr, beta_ptr, out_ptr, lower_ptr + place * CHUNK * CHUNK,
                weights_ptr + place * CHUNK * CHUNK, sums_ptr + place * CHUNK, end, count, q_stride_t, k_stride_t,
                v_stride_t, beta_stride, out_stride_t, scale, channels, values, D, DV, False, WIDEN,
            )  # fmt: skip
            if states_ptr is not None:
                _keep_all(
                    states_ptr + place * DV * D, all_deltas_ptr + head * DV, operand, d0, d1, d2, d3, end, count,
                    tl.num_programs(1) * DV, channels, values, D, DV,
                )  # fmt: skip
            if lanes_ptr is not None:
                tl.store(rounded_ptr + lane * rounded_stride + in_lane, operand, mask=is_value)
                to = deltas_ptr + lane * deltas_stride + head * CHUNK * DV
                _keep_rows(to, d0, 0, 0, count, CHUNK, values, DV)
                _keep_rows(to, d1, 1, 0, count, CHUNK, values, DV)
                _keep_rows(to, d2, 2, 0, count, CHUNK, values, DV)
                _keep_rows(to, d3, 3, 0, count, CHUNK, values, DV)
                to = errors_ptr + lane * errors_stride + head * RECENT * DV
                recent = (count - 1) // BLOCK * BLOCK - (RECENT - BLOCK)
                _keep_rows(to, y0, 0, recent, count, RECENT, values, DV)
                _keep_rows(to, y1, 1, recent, count, RECENT, values, DV)
                _keep_rows(to, y2, 2, recent, count, RECENT, values, DV)
                _keep_rows(to, y3, 3, recent, count, RECENT, values, DV)


def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor, scale: float) -> Tensor:
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    if v.numel() and len(starts) > 1:
        compute(q, k, v, g, beta, out, starts.contiguous(), None, {}, scale)
    return out


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    starts: Tensor,
    lengths: Tensor | None,
    states: dict[str, Tensor],
    scale: float,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sequences that begin at a multiple of CHUNK, of which there is one at least, with tokens.

    states: by name, `LANES` and lanes; empty: none. kept: for a backward, where the states at the starts of chunks
    [chunks, HV, DV, D] and all deltas [T, HV, DV] are stored. Returns L and t, P and G of all chunks, as the first
    kernel stores them.
    """
    q, k, v, g, beta = (unit_stride(x) for x in (q, k, v, g, beta))
    (tokens, heads, value_dim), (key_heads, dim), count = v.shape, q.shape[1:], len(starts) - 1
    num_chunks = ceil_div(tokens, ROWS_OF_CHUNK) + count
    kind: dict[str, Any] = {"dtype": q.dtype, "device": q.device}
    lower, weights = (torch.empty(num_chunks, heads, ROWS_OF_CHUNK, ROWS_OF_CHUNK, **kind) for _ in range(2))
    sums = torch.empty(num_chunks, heads, ROWS_OF_CHUNK, dtype=torch.float32, device=q.device)
    of_lane = {name: states.get(name) for name in ("lanes", *LANES)}
    strides = {f"{name}_stride": 0 if x is None else x.stride(0) for name, x in of_lane.items() if name != "lanes"}
    pointers = {f"{name}_ptr": x for name, x in of_lane.items()}

    def named(*names: str) -> dict[str, Any]:
        return {f"{n}_ptr": pointers[f"{n}_ptr"] for n in names} | {
            f"{n}_stride": strides[f"{n}_stride"] for n in names
        }

    constants: dict[str, Any] = {
        "G": heads // key_heads,
        "D": dim,
        "BLOCK_B": power_of_2(count),
        "BLOCK_D": max(16, power_of_2(dim)),
        "RECENT": RECENT,
        "WIDEN": is_interpreting(),
        "enable_fp_fusion": False,
    }
    common: dict[str, Any] = {"starts_ptr": starts, "lengths_ptr": lengths, "lanes_ptr": of_lane["lanes"], "B": count}
    common |= {"lower_ptr": lower, "weights_ptr": weights, "sums_ptr": sums, "q_ptr": q, "k_ptr": k, "beta_ptr": beta}
    common |= {"q_stride_t": q.stride(0), "q_stride_h": q.stride(1), "k_stride_t": k.stride(0)}
    common |= {"k_stride_h": k.stride(1), "beta_stride": beta.stride(0), **constants}
    _delta_chunk_kernel[(heads, num_chunks)](
        **common, g_ptr=g, g_stride=g.stride(0), **named("keys", "decays", "inverses"), num_warps=4
    )
    plan = _plan(value_dim, q.dtype, keeps=kept is not None)
    part = plan["BV"]
    _delta_state_kernel[(ceil_div(value_dim, part), heads, count)](
        **common,
        v_ptr=v,
        v_stride_t=v.stride(0),
        v_stride_h=v.stride(1),
        out_ptr=out,
        out_stride_t=out.stride(0),
        out_stride_h=out.stride(1),
        scale=scale,
        DV=value_dim,
        EVEN=value_dim % part == 0 and dim == constants["BLOCK_D"],
        **plan,
        states_ptr=None if kept is None else kept[0],
        all_deltas_ptr=None if kept is None else kept[1],
        **named("state", "rounded", "deltas", "errors"),
    )
    return lower, weights, sums


def _plan(value_dim: int, dtype: torch.dtype, *, keeps: bool) -> dict[str, int]:
    """Return the constants of the state's kernel: the value channels of a program, its stages and warps.

    keeps: it stores what a backward needs, and has no registers left for loads in advance.
    """
    part = min(64 if dtype.itemsize == 2 else 32, max(16, power_of_2(value_dim)))
    return {"BV": part, "STAGES": 1 if keeps else 2, "num_warps": 4}
