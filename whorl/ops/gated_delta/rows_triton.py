# mypy: allow-untyped-defs
"""The gated delta rule of decoding sequences in Triton: new rows are computed from the stored ones."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting, multiprocessors

from .._launch_triton import launched
from .._rows import ceil_div, power_of_2, unit_stride
from ..linear_triton import dot
from . import rule_triton
from .chunks_triton import BLOCK, CHUNK, entry, load_rows, row_of_inverse
from .layout import CHUNK as ROWS_OF_CHUNK
from .layout import RECENT


@launched
@triton.jit
def _delta_rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    out_ptr,
    state_ptr,
    rounded_ptr,
    keys_ptr,
    deltas_ptr,
    decays_ptr,
    errors_ptr,
    inverses_ptr,
    lanes_ptr,
    starts_ptr,
    lengths_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    g_stride,
    beta_stride,
    out_stride_t,
    out_stride_h,
    state_stride,
    rounded_stride,
    keys_stride,
    deltas_stride,
    decays_stride,
    errors_stride,
    inverses_stride,
    scale,
    DV,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BV: tl.constexpr,
    RECENT: tl.constexpr,
    SKIPS_ALIGNED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute the new rows of one sequence and value head, for BV of its value channels, a block of rows at a time.

    SKIPS_ALIGNED: sequences that begin at a multiple of CHUNK are left to the kernels of prompts. What programs share,
    such as the keys of a head, all of them write, with equal values: each reads back what it has written itself.
    """
    part, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, stop = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1)
    row = tl.maximum(tl.load(lengths_ptr + b) - (stop - first), 0) % CHUNK
    if stop > first and not (SKIPS_ALIGNED and row == 0):
        lane = tl.load(lanes_ptr + b).to(tl.int64)
        values, channels = part * BV + tl.arange(0, BV), tl.arange(0, BLOCK_D)
        rows, own = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
        is_value, is_channel = values < DV, channels < D
        in_lane = (head * D + channels)[:, None] * DV + values[None, :]
        is_state = is_channel[:, None] & is_value[None, :]
        state_at = state_ptr + lane * state_stride + in_lane
        rounded_at = rounded_ptr + lane * rounded_stride + in_lane
        keys_ptr += lane * keys_stride + head // G * CHUNK * D
        deltas_ptr += lane * deltas_stride + head * CHUNK * DV
        decays_ptr += lane * decays_stride + head * CHUNK
        errors_ptr += lane * errors_stride + head * RECENT * DV
        inverses_ptr += lane * inverses_stride + head * RECENT * BLOCK
        q_ptr += head // G * q_stride_h
        k_ptr += head // G * k_stride_h
        if row == 0:
            state = tl.load(state_at, mask=is_state, other=0.0).to(rounded_ptr.dtype.element_ty)
            tl.store(rounded_at, state, mask=is_state)
        else:
            state = tl.load(rounded_at, mask=is_state, other=0.0)
        num_blocks = (row + stop - first - 1) // BLOCK - row // BLOCK + 1
        for _ in tl.range(0, num_blocks, disable_licm=True):  # what is moved out of the loop takes registers
            base = row // BLOCK * BLOCK
            count = tl.minimum(base + BLOCK - row, stop - first)
            at, token = base + own, first - row + base + own
            is_old, is_new = at < row, (at >= row) & (at < row + count)
            k = load_rows(k_ptr, token, k_stride_t, is_new, channels, D)
            q = load_rows(q_ptr, token, q_stride_t, is_new, channels, D)
            v = load_rows(v_ptr + head * v_stride_h, token, v_stride_t, is_new, values, DV).to(tl.float32)
            beta = tl.load(beta_ptr + head + token.to(tl.int64) * beta_stride, mask=is_new, other=0.0)[:, None]
            # Rows of the blocks before this one, and those of its own that are stored already.
            keys = load_rows(keys_ptr, rows, D, rows < base, channels, D)
            deltas = load_rows(deltas_ptr, rows, DV, rows < base, values, DV)
            decays = tl.load(decays_ptr + rows, mask=rows < base, other=0.0)
            own_keys = tl.where(is_new[:, None], k, load_rows(keys_ptr, at, D, is_old, channels, D))
            own_deltas = load_rows(deltas_ptr, at, DV, is_old, values, DV)
            own_decays = tl.load(decays_ptr + at, mask=is_old, other=0.0)
            errors = load_rows(errors_ptr, at % RECENT, DV, is_old, values, DV)
            inverse = load_rows(inverses_ptr, at % RECENT, BLOCK, is_old, own, BLOCK)
            total = tl.load(decays_ptr + row - 1, mask=row > 0, other=0.0)
            for i in range(row, row + count):
                total += tl.load(g_ptr + head + (first + i - row).to(tl.int64) * g_stride)
                own_decays = tl.where(at == i, total, own_decays)

            empty = tl.zeros((BLOCK, BV), tl.float32)
            growth = tl.exp(own_decays)[:, None]
            y = beta * (v - growth * dot(k, state, empty, WIDEN))
            is_seen = (rows < base)[None, :] & is_new[:, None]
            decay = _decay(own_decays, decays, is_seen)
            zero = tl.zeros((BLOCK, CHUNK), tl.float32)
            lower = (beta * (decay * dot(k, tl.trans(keys), zero, WIDEN))).to(k.dtype)
            weights = (decay * dot(q, tl.trans(keys), zero, WIDEN)).to(k.dtype)
            if base > 0:
                y -= dot(lower, deltas, empty, WIDEN)
            y = tl.where(is_old[:, None], errors, y.to(k.dtype))
            of_rows = dot(weights, deltas, empty, WIDEN)
            decay = _decay(own_decays, own_decays, (own[None, :] <= own[:, None]) & is_new[:, None])
            zero = tl.zeros((BLOCK, BLOCK), tl.float32)
            own_lower = beta * (decay * dot(k, tl.trans(own_keys), zero, WIDEN))
            own_lower = tl.where(own[None, :] < own[:, None], own_lower, 0.0)
            own_weights = (decay * dot(q, tl.trans(own_keys), zero, WIDEN)).to(k.dtype)
            for i in range(row - base, row - base + count):
                new = row_of_inverse(entry(own_lower, i, BLOCK)[None, :], inverse[None, :, :], (own == i)[None, :], 1)
                inverse = tl.where((own == i)[:, None], new, inverse)
            d = dot(inverse.to(k.dtype), y, empty, WIDEN).to(k.dtype)
            d = tl.where(is_old[:, None], own_deltas, d)
            of_rows = dot(own_weights, d, of_rows, WIDEN)
            out = scale * (growth * dot(q, state, empty, WIDEN) + of_rows)

            is_stored = is_new[:, None] & is_value[None, :]
            to = out_ptr + head * out_stride_h + token.to(tl.int64)[:, None] * out_stride_t + values[None, :]
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_stored)
            row += count
            first += count
            if row == CHUNK:
                moved = tl.zeros((BLOCK_D, BV), tl.float32)
                moved = dot(tl.trans(keys), _rest(deltas, decays, total, k.dtype), moved, WIDEN)
                moved = dot(tl.trans(own_keys), _rest(d, own_decays, total, k.dtype), moved, WIDEN)
                wide = tl.exp(total) * tl.load(state_at, mask=is_state, other=0.0) + moved
                tl.store(state_at, wide, mask=is_state)
                state = wide.to(k.dtype)
                if first < stop:
                    tl.store(rounded_at, state, mask=is_state)
                row = 0
            else:
                tl.store(deltas_ptr + at[:, None] * DV + values[None, :], d, mask=is_stored)
                tl.store(errors_ptr + (at % RECENT)[:, None] * DV + values[None, :], y, mask=is_stored)
                tl.store(decays_ptr + at, own_decays, mask=is_new)
                inverse_at = inverses_ptr + (at % RECENT)[:, None] * BLOCK + own[None, :]
                tl.store(inverse_at, inverse, mask=is_new[:, None])
                key_at = keys_ptr + at[:, None] * D + channels[None, :]
                tl.store(key_at, k, mask=is_new[:, None] & is_channel[None, :])
                if first < stop:
                    tl.debug_barrier()  # the next block reads what other threads have stored


@triton.jit
def _decay(of_rows, of_columns, is_seen):
    """Return e^(G_i - G_j), zero where it is not seen."""
    return tl.where(is_seen, tl.exp(tl.where(is_seen, of_rows[:, None] - of_columns[None, :], 0.0)), 0.0)


@triton.jit
def _rest(deltas, decays, last, DTYPE: tl.constexpr):
    """Return deltas [n, BV] as they have decayed by the end of the chunk, where G is `last`."""
    return (tl.exp(last - decays)[:, None] * deltas.to(tl.float32)).to(DTYPE)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    lanes: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    most: int,
    **states: Tensor,
) -> None:
    """Compute `gated_delta_lanes`: by rows where no sequence goes past a chunk, else by chunks.

    By chunks are computed those that begin at a multiple of CHUNK; the others are then left to the kernel of rows.
    """
    count = len(lanes)
    out.zero_()
    if not len(q) or not count:
        return
    is_prompt = (most or len(q)) > ROWS_OF_CHUNK
    starts, lengths = query_starts.contiguous(), context_lens.contiguous()
    states["lanes"] = lanes.contiguous()
    if is_prompt:
        rule_triton.compute(q, k, v, g, beta, out, starts, lengths, states, scale)
    q, k, v, g, beta = (unit_stride(x) for x in (q, k, v, g, beta))
    heads, (value_heads, value_dim) = k.shape[1], v.shape[1:]
    part = _part(count * value_heads, value_dim, multiprocessors(q.device))
    strides: dict[str, Any] = {f"{name}_stride": x.stride(0) for name, x in states.items() if name != "lanes"}
    for name, x in {"q": q, "k": k, "v": v, "out": out}.items():
        strides |= {f"{name}_stride_t": x.stride(0), f"{name}_stride_h": x.stride(1)}
    _delta_rows_kernel[(ceil_div(value_dim, part), value_heads, count)](
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        g_ptr=g,
        beta_ptr=beta,
        out_ptr=out,
        starts_ptr=starts,
        lengths_ptr=lengths,
        **{f"{name}_ptr": x for name, x in states.items()},
        **strides,
        g_stride=g.stride(0),
        beta_stride=beta.stride(0),
        scale=scale,
        DV=value_dim,
        G=value_heads // heads,
        D=q.shape[2],
        BLOCK_D=max(16, power_of_2(q.shape[2])),
        BV=part,
        RECENT=RECENT,
        SKIPS_ALIGNED=is_prompt,
        WIDEN=is_interpreting(),
        enable_fp_fusion=False,
        num_warps=_warps(part),
    )


def _part(num_heads: int, value_dim: int, processors: int) -> int:
    """Return the value channels of a program: few heads are shared by several programs."""
    most = max(16, power_of_2(value_dim))
    return max(16, min(most, 32 if num_heads * ceil_div(value_dim, 64) < processors else 64))


def _warps(part: int) -> int:
    """Return the warps of a program. part: its value channels."""
    return 8
