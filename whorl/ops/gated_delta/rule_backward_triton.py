# mypy: allow-untyped-defs
"""The gradient of the gated delta rule in Triton.

The kernels of the forward run again and keep the state at the start of every chunk and all deltas. A second kernel goes
through the chunks of a sequence backwards, with the gradient of the state, and a third computes what is left of every
chunk and value head side by side. The gradients of the value heads that share a key head are then added in order.
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
from . import rule_triton
from .chunks_triton import BLOCK, CHUNK, chunks_before, load_rows, locate
from .layout import CHUNK as ROWS_OF_CHUNK


@triton.jit
def _errors_of_block(
    b: tl.constexpr, dout, dstate, r1, r2, r3, k_ptr, weights_ptr, lower_ptr, sums_ptr, last, scale, first, count,
    k_stride, channels, D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return dR of block b, transposed, [BV, BLOCK], rounded. r1 to r3: those of the blocks 1 to 3 after it."""
    rows = tl.arange(0, BLOCK) + b * BLOCK
    zero = tl.zeros((dout.shape[0], BLOCK), tl.float32)
    weights = tl.load(weights_ptr + tl.arange(0, CHUNK)[:, None] * CHUNK + rows[None, :])
    k = load_rows(k_ptr, first + rows, k_stride, rows < count, channels, D)
    rest = tl.exp(last - tl.load(sums_ptr + rows))[:, None]
    moved = (rest * k.to(tl.float32)).to(k.dtype)
    d = scale * dot(dout, weights, zero, WIDEN) + dot(dstate, tl.trans(moved), zero, WIDEN)
    at = lower_ptr + tl.arange(0, BLOCK)[:, None] * CHUNK + rows[None, :]
    if b < 3:
        later = dot(r1, tl.load(at + (b + 1) * BLOCK * CHUNK), zero, WIDEN)
        if b < 2:
            later = dot(r2, tl.load(at + (b + 2) * BLOCK * CHUNK), later, WIDEN)
        if b < 1:
            later = dot(r3, tl.load(at + (b + 3) * BLOCK * CHUNK), later, WIDEN)
        d -= later
    return dot(d.to(k.dtype), tl.load(at + b * BLOCK * CHUNK), zero, WIDEN).to(k.dtype)


@triton.jit
def _state_of_block(
    b: tl.constexpr, total, errors, k_ptr, beta_ptr, sums_ptr, derrors_ptr, first, count, k_stride, beta_stride,
    errors_stride, channels, values, D: tl.constexpr, DV, WIDEN: tl.constexpr,
):  # fmt: skip
    """Store dR of block b, and add to total [BV, BLOCK_D] what it contributes to the gradient of the state."""
    rows = tl.arange(0, BLOCK) + b * BLOCK
    is_real = rows < count
    at = derrors_ptr + (first + rows).to(tl.int64)[:, None] * errors_stride + values[None, :]
    tl.store(at, tl.trans(errors), mask=is_real[:, None] & (values < DV)[None, :])
    k = load_rows(k_ptr, first + rows, k_stride, is_real, channels, D)
    beta = tl.load(beta_ptr + (first + rows).to(tl.int64) * beta_stride, mask=is_real, other=0.0)
    factor = (beta * tl.exp(tl.load(sums_ptr + rows)))[:, None]
    return dot(errors, (factor * k.to(tl.float32)).to(k.dtype), total, WIDEN)


@launched
@triton.jit
def _delta_reverse_kernel(
    dout_ptr,
    q_ptr,
    k_ptr,
    beta_ptr,
    starts_ptr,
    lower_ptr,
    weights_ptr,
    sums_ptr,
    derrors_ptr,
    dstates_ptr,
    dout_stride_t,
    dout_stride_h,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    beta_stride,
    scale,
    B,
    DV,
    HV,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BV: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute dR of one sequence and value head, and the gradients of its states after every chunk."""
    part, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1)
    values, channels, rows = part * BV + tl.arange(0, BV), tl.arange(0, BLOCK_D), tl.arange(0, CHUNK)
    dout_ptr += head * dout_stride_h
    q_ptr += head // G * q_stride_h
    k_ptr += head // G * k_stride_h
    beta_ptr += head
    derrors_ptr += head * DV
    base = chunks_before(starts_ptr, None, b, B, BLOCK_B)
    dstate = tl.zeros((BV, BLOCK_D), tl.float32)
    count_of = (stop - start + CHUNK - 1) // CHUNK
    for i in tl.range(0, count_of, disable_licm=True):  # what is moved out of the loop takes registers
        number = count_of - 1 - i
        first = start + number * CHUNK
        count = tl.minimum(stop - first, CHUNK)
        place = (base + number).to(tl.int64) * HV + head
        sums, matrix = sums_ptr + place * CHUNK, place * CHUNK * CHUNK
        operand = dstate.to(q_ptr.dtype.element_ty)
        at = dstates_ptr + (place * DV + values)[:, None] * D + channels[None, :]
        tl.store(at, operand, mask=(values < DV)[:, None] & (channels < D)[None, :])
        last = tl.load(sums + CHUNK - 1)
        dout = tl.trans(load_rows(dout_ptr, first + rows, dout_stride_t, rows < count, values, DV))
        lower, weights = lower_ptr + matrix, weights_ptr + matrix
        r3 = _errors_of_block(
            3, dout, operand, None, None, None, k_ptr, weights, lower, sums, last, scale, first, count, k_stride_t,
            channels, D, WIDEN,
        )  # fmt: skip
        r2 = _errors_of_block(
            2, dout, operand, r3, None, None, k_ptr, weights, lower, sums, last, scale, first, count, k_stride_t,
            channels, D, WIDEN,
        )  # fmt: skip
        r1 = _errors_of_block(
            1, dout, operand, r2, r3, None, k_ptr, weights, lower, sums, last, scale, first, count, k_stride_t,
            channels, D, WIDEN,
        )  # fmt: skip
        r0 = _errors_of_block(
            0, dout, operand, r1, r2, r3, k_ptr, weights, lower, sums, last, scale, first, count, k_stride_t,
            channels, D, WIDEN,
        )  # fmt: skip
        q = load_rows(q_ptr, first + rows, q_stride_t, rows < count, channels, D)
        growth = (scale * tl.exp(tl.load(sums + rows)))[:, None]
        zero = tl.zeros((BV, BLOCK_D), tl.float32)
        of_out = dot(dout, (growth * q.to(tl.float32)).to(q.dtype), zero, WIDEN)
        total = _state_of_block(
            0, zero, r0, k_ptr, beta_ptr, sums, derrors_ptr, first, count, k_stride_t, beta_stride, HV * DV, channels,
            values, D, DV, WIDEN,
        )  # fmt: skip
        total = _state_of_block(
            1, total, r1, k_ptr, beta_ptr, sums, derrors_ptr, first, count, k_stride_t, beta_stride, HV * DV, channels,
            values, D, DV, WIDEN,
        )  # fmt: skip
        total = _state_of_block(
            2, total, r2, k_ptr, beta_ptr, sums, derrors_ptr, first, count, k_stride_t, beta_stride, HV * DV, channels,
            values, D, DV, WIDEN,
        )  # fmt: skip
        total = _state_of_block(
            3, total, r3, k_ptr, beta_ptr, sums, derrors_ptr, first, count, k_stride_t, beta_stride, HV * DV, channels,
            values, D, DV, WIDEN,
        )  # fmt: skip
        dstate = tl.exp(last) * dstate + of_out - total


@launched
@triton.jit
def _delta_gradients_kernel(
    dout_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    starts_ptr,
    sums_ptr,
    states_ptr,
    dstates_ptr,
    deltas_ptr,
    derrors_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
    dout_stride_t,
    dout_stride_h,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    beta_stride,
    scale,
    B,
    DV,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BV: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute the gradients of one chunk and value head; dq and dk in fp32, to be added over the heads of a group."""
    head, c, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    b, number = locate(starts_ptr, None, c, B, BLOCK_B)
    if b >= B:
        return
    first = tl.load(starts_ptr + b) + number * CHUNK
    count = tl.minimum(tl.load(starts_ptr + b + 1) - first, CHUNK)
    rows, channels = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    is_real, is_channel = rows < count, channels < D
    tokens = (first + rows).to(tl.int64)
    place = c.to(tl.int64) * heads + head
    k = load_rows(k_ptr + head // G * k_stride_h, first + rows, k_stride_t, is_real, channels, D)
    q = load_rows(q_ptr + head // G * q_stride_h, first + rows, q_stride_t, is_real, channels, D)
    beta = tl.load(beta_ptr + head + tokens * beta_stride, mask=is_real, other=0.0)[:, None]
    sums = tl.load(sums_ptr + place * CHUNK + rows)
    last = tl.load(sums_ptr + place * CHUNK + CHUNK - 1)
    growth, rest = tl.exp(sums)[:, None], tl.exp(last - sums)[:, None]

    # One result after the other, over slices of the value channels: together they would not fit in registers.
    wide = tl.zeros((CHUNK, BLOCK_D), tl.float32)
    square = tl.zeros((CHUNK, CHUNK), tl.float32)
    dout_ptr += head * dout_stride_h
    deltas_ptr += head * DV
    derrors_ptr += head * DV
    out_deltas, error_deltas = square, square
    of_values, of_state = tl.zeros((CHUNK,), tl.float32), tl.zeros((BV,), tl.float32)
    for part in tl.range(0, DV, BV, num_stages=1):
        values = part + tl.arange(0, BV)
        d = load_rows(deltas_ptr, first + rows, heads * DV, is_real, values, DV)
        r = load_rows(derrors_ptr, first + rows, heads * DV, is_real, values, DV)
        dout = load_rows(dout_ptr, first + rows, dout_stride_t, is_real, values, DV)
        v = load_rows(v_ptr + head * v_stride_h, first + rows, v_stride_t, is_real, values, DV)
        out_deltas = dot(dout, tl.trans(d), out_deltas, WIDEN)
        error_deltas = dot(r, tl.trans(d), error_deltas, WIDEN)
        of_values += tl.sum(r.to(tl.float32) * v.to(tl.float32), 1)
        state = _state(states_ptr, place, values, channels, DV, D)
        dstate = _state(dstates_ptr, place, values, channels, DV, D)
        of_state += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        to = dv_ptr + (tokens * heads + head)[:, None] * DV + values[None, :]
        is_value = is_real[:, None] & (values < DV)[None, :]
        tl.store(to, (beta * r.to(tl.float32)).to(dv_ptr.dtype.element_ty), mask=is_value)

    is_seen, is_before = rows[None, :] <= rows[:, None], rows[None, :] < rows[:, None]
    decay = tl.where(is_seen, tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], 0.0)), 0.0)
    dweights = tl.where(is_seen, scale * out_deltas, 0.0)
    dlower = tl.where(is_before, -error_deltas, 0.0)
    products = dot(k, tl.trans(k), square, WIDEN)
    moved = decay * (dweights * dot(q, tl.trans(k), square, WIDEN) + dlower * beta * products)
    ddecays = tl.sum(moved, 1) - tl.sum(moved, 0)
    dbeta = of_values + tl.sum(dlower * decay * products, 1)
    of_queries = (decay * dweights).to(k.dtype)
    of_keys = (beta * decay * dlower).to(k.dtype)

    to = (tokens * heads + head)[:, None] * D + channels[None, :]
    mask = is_real[:, None] & is_channel[None, :]
    of_out = wide
    for part in tl.range(0, DV, BV, num_stages=1):
        values = part + tl.arange(0, BV)
        dout = load_rows(dout_ptr, first + rows, dout_stride_t, is_real, values, DV)
        of_out = dot(dout, _state(states_ptr, place, values, channels, DV, D), of_out, WIDEN)
    dq = scale * growth * of_out
    ddecays += tl.sum(dq * q.to(tl.float32), 1)
    tl.store(dq_ptr + to, dot(of_queries, k, dq, WIDEN), mask=mask)

    of_errors = wide
    for part in tl.range(0, DV, BV, num_stages=1):
        values = part + tl.arange(0, BV)
        r = load_rows(derrors_ptr, first + rows, heads * DV, is_real, values, DV)
        of_errors = dot(r, _state(states_ptr, place, values, channels, DV, D), of_errors, WIDEN)
    read = tl.sum(of_errors * k.to(tl.float32), 1)
    ddecays -= tl.sum(beta * growth, 1) * read
    dbeta -= tl.sum(growth, 1) * read
    of_deltas = wide
    for part in tl.range(0, DV, BV, num_stages=1):
        values = part + tl.arange(0, BV)
        d = load_rows(deltas_ptr, first + rows, heads * DV, is_real, values, DV)
        of_deltas = dot(d, _state(dstates_ptr, place, values, channels, DV, D), of_deltas, WIDEN)
    dk = rest * of_deltas
    of_rest = tl.sum(dk * k.to(tl.float32), 1)
    of_last = tl.exp(last) * tl.sum(of_state, 0) + tl.sum(of_rest, 0)
    ddecays += tl.where(rows == CHUNK - 1, of_last, 0.0) - of_rest
    dk = dot(tl.trans(of_queries), q, dk - beta * growth * of_errors, WIDEN)
    dk = dot(of_keys, k, dk, WIDEN)
    dk = dot(tl.trans(of_keys), k, dk, WIDEN)
    tl.store(dk_ptr + to, dk, mask=mask)
    tl.store(dg_ptr + tokens * heads + head, tl.cumsum(ddecays, 0, reverse=True), mask=is_real)
    tl.store(dbeta_ptr + tokens * heads + head, dbeta, mask=is_real)


@triton.jit
def _state(states_ptr, place, values, channels, DV, D: tl.constexpr):
    """Load value channels of a chunk's state, [values, channels]."""
    at = states_ptr + (place * DV + values)[:, None] * D + channels[None, :]
    return tl.load(at, mask=(values < DV)[:, None] & (channels < D)[None, :], other=0.0)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (tokens, heads, value_dim), (key_heads, dim), count = v.shape, q.shape[1:], len(starts) - 1
    if not tokens or not count:
        empty = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta)]
        return empty[0], empty[1], empty[2], empty[3], empty[4]
    dout, q, k, v, g, beta = (unit_stride(x) for x in (dout, q, k, v, g, beta))
    starts, num_chunks = starts.contiguous(), ceil_div(tokens, ROWS_OF_CHUNK) + count
    kind: dict[str, Any] = {"dtype": q.dtype, "device": q.device}
    states, dstates = (torch.empty(num_chunks, heads, value_dim, dim, **kind) for _ in range(2))
    deltas, derrors = (torch.empty(tokens, heads, value_dim, **kind) for _ in range(2))
    lower, weights, sums = rule_triton.compute(
        q, k, v, g, beta, torch.empty_like(deltas), starts, None, {}, scale, (states, deltas)
    )
    part = min(64 if q.dtype.itemsize == 2 else 32, max(16, power_of_2(value_dim)))
    common: dict[str, Any] = {"dout_ptr": dout, "q_ptr": q, "k_ptr": k, "beta_ptr": beta, "starts_ptr": starts}
    common |= {"sums_ptr": sums, "derrors_ptr": derrors, "dstates_ptr": dstates, "beta_stride": beta.stride(0)}
    for name, x in {"dout": dout, "q": q, "k": k}.items():
        common |= {f"{name}_stride_t": x.stride(0), f"{name}_stride_h": x.stride(1)}
    common |= {"scale": scale, "B": count, "DV": value_dim, "G": heads // key_heads, "D": dim, "BV": part}
    common |= {"BLOCK_B": power_of_2(count), "BLOCK_D": max(16, power_of_2(dim)), "WIDEN": is_interpreting()}
    _delta_reverse_kernel[(ceil_div(value_dim, part), heads, count)](
        **common, lower_ptr=lower, weights_ptr=weights, HV=heads, enable_fp_fusion=False, num_warps=8
    )
    # Zeros, because no program computes padding tokens.
    dv = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    dq, dk = (torch.zeros(tokens, heads, dim, dtype=torch.float32, device=q.device) for _ in range(2))
    dg, dbeta = (torch.zeros(tokens, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    _delta_gradients_kernel[(heads, num_chunks)](
        **common | {"BV": min(part, 32)},
        v_ptr=v,
        v_stride_t=v.stride(0),
        v_stride_h=v.stride(1),
        states_ptr=states,
        deltas_ptr=deltas,
        dq_ptr=dq,
        dk_ptr=dk,
        dv_ptr=dv,
        dg_ptr=dg,
        dbeta_ptr=dbeta,
        enable_fp_fusion=False,
        num_warps=8,
    )
    dq, dk = (x.unflatten(1, (key_heads, -1)).sum(2).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta
