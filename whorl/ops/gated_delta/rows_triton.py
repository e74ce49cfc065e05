# mypy: allow-untyped-defs
"""The gated delta rule of decoding sequences in Triton: new rows are computed from the stored ones.

A program has a sequence and a value head. It takes up to ROWS new rows of a block at a time, all that it computes of
them in one tile of 16 rows for the tensor cores: the first half of the tile is of keys, the second of queries.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._launch_triton import launched
from .._overlap_triton import begin, follow
from .._rows import power_of_2, unit_stride
from ..linear_triton import dot
from . import rule_triton
from .chunks_triton import BLOCK, BLOCKS, CHUNK, entry, load_rows, row_of_inverse, unknown_zeros
from .heads_triton import gated, inverse_norm
from .layout import CHUNK as ROWS_OF_CHUNK
from .layout import RECENT

HALF = tl.constexpr(8)  # rows of a tile that are of keys


@triton.jit
def _places(starts_ptr, lengths_ptr, lanes_ptr, b):
    """Return the first token of a sequence in this call, the one after its last, its first position, and its lane."""
    first, stop = tl.load(starts_ptr + b), tl.load(starts_ptr + b + 1)
    start = tl.maximum(tl.load(lengths_ptr + b) - (stop - first), 0)
    return first, stop, start, tl.load(lanes_ptr + b).to(tl.int64)


@triton.jit
def _passes(row, count, ROWS: tl.constexpr):
    """Return how often up to ROWS rows of one block are taken to compute rows `row` to row + count (exclusive)."""
    first = tl.minimum(count, BLOCK - row % BLOCK)
    rest = count - first
    return (first + ROWS - 1) // ROWS + rest // BLOCK * (BLOCK // ROWS) + (rest % BLOCK + ROWS - 1) // ROWS


@triton.jit
def _tile(x, y, count, ROWS: tl.constexpr, C: tl.constexpr):
    """Return [16, C]: x [ROWS, C], then y from row HALF on; zero after `count` rows of each."""
    rows, half = tl.arange(0, HALF)[None, :, None], tl.arange(0, 2)[:, None, None]
    both = tl.where(half == 0, tl.broadcast_to(x, (HALF, C))[None, :, :], tl.broadcast_to(y, (HALF, C))[None, :, :])
    return tl.reshape(tl.where(rows < count, both, 0.0), (2 * HALF, C)).to(x.dtype)


@triton.jit
def _part(x, i: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr):
    """Return the rows of keys (0) or queries (1) of a tile [16, C], [ROWS, C]."""
    if ROWS == 1:
        return entry(x, i * HALF, 2 * HALF)[None, :]
    else:
        half = tl.arange(0, 2)[:, None, None]
        return tl.sum(tl.where(half == i, tl.reshape(x, (2, HALF, C)), 0.0), 0)


@triton.jit
def _both(x, ROWS: tl.constexpr):
    """Return what belongs to both halves of a tile, [16], of x [ROWS]."""
    half = tl.zeros((2, 1), x.dtype)
    return tl.reshape(half + tl.broadcast_to(x, (HALF,))[None, :], (2 * HALF,))


@triton.jit
def _load_state(state_at, rounded_at, row, is_state, DTYPE: tl.constexpr):
    """Return the state at the chunk's start, rounded; where the chunk begins, it is rounded and stored first."""
    if row == 0:
        state = tl.load(state_at, mask=is_state, other=0.0).to(DTYPE)
        tl.store(rounded_at, state, mask=is_state)
    else:
        state = tl.load(rounded_at, mask=is_state, other=0.0)
    return state


@triton.jit
def _flush(
    state_ptr, lane, keys, deltas, d, decays, last, values, D: tl.constexpr, DV, BLOCK_D: tl.constexpr,
    BV: tl.constexpr, STEP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Take the rows of a full chunk into the state, STEP key channels at a time. d: deltas of the last block; last: G
    of the last row."""
    blocks, parts = tl.arange(0, BLOCKS)[:, None, None], tl.arange(0, BLOCK_D // STEP)[None, :, None]
    deltas = tl.where(blocks == BLOCKS - 1, d[None, :, :], tl.reshape(deltas, (BLOCKS, BLOCK, BV)))
    deltas = tl.reshape(deltas, (CHUNK, BV))
    deltas = (tl.exp(last - decays)[:, None] * deltas.to(tl.float32)).to(deltas.dtype)
    for c in tl.range(0, BLOCK_D // STEP, disable_licm=True):
        of_part = tl.sum(tl.where(parts == c, tl.reshape(keys, (CHUNK, BLOCK_D // STEP, STEP)), 0.0), 1)
        moved = dot(tl.trans(of_part.to(keys.dtype)), deltas, unknown_zeros(lane, STEP, BV), WIDEN)
        channels = c * STEP + tl.arange(0, STEP)
        at = state_ptr + channels[:, None] * DV + values[None, :]
        is_state = (channels < D)[:, None] & (values < DV)[None, :]
        tl.store(at, tl.exp(last) * tl.load(at, mask=is_state, other=0.0) + moved, mask=is_state)


@launched
@triton.jit
def _delta_rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    gate_ptr,
    norm_ptr,
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
    gate_stride_t,
    gate_stride_h,
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
    eps,
    T,
    B,
    DV,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BV: tl.constexpr,
    RECENT: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SKIPS_ALIGNED: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute the new rows of one sequence and value head, up to ROWS of a block at a time.

    gate_ptr: None, or what the result is normalized for and multiplied by; then out of padding is written, too.
    SKIPS_ALIGNED: sequences that begin at a multiple of CHUNK are left to the kernels of prompts. What programs share,
    such as the keys of a head, all of them write, with equal values: each reads back what it has written itself.
    """
    begin(OVERLAP)
    head, sequence = tl.program_id(0), tl.program_id(1)
    first, stop, start, lane = _places(starts_ptr, lengths_ptr, lanes_ptr, sequence)
    values, channels = tl.arange(0, BV), tl.arange(0, BLOCK_D)
    is_value, is_channel = values < DV, channels < D
    rows, own, index = tl.arange(0, CHUNK), tl.arange(0, BLOCK), tl.arange(0, ROWS)
    out_ptr += head * out_stride_h
    row = start % CHUNK
    if stop > first and not (SKIPS_ALIGNED and row == 0):
        key_head = head // G
        DTYPE: tl.constexpr = rounded_ptr.dtype.element_ty
        in_lane = channels[:, None] * DV + values[None, :]
        is_state = is_channel[:, None] & is_value[None, :]
        state_ptr += lane * state_stride + head * D * DV
        rounded_ptr += lane * rounded_stride + head * D * DV
        keys_ptr += lane * keys_stride + key_head * CHUNK * D
        deltas_ptr += lane * deltas_stride + head * CHUNK * DV
        decays_ptr += lane * decays_stride + head * CHUNK
        errors_ptr += lane * errors_stride + head * RECENT * DV
        inverses_ptr += lane * inverses_stride + head * RECENT * BLOCK
        for _ in tl.range(0, 1 if ROWS == 1 else _passes(row, stop - first, ROWS), disable_licm=True):
            base = row // BLOCK * BLOCK
            count = 1 if ROWS == 1 else tl.minimum(tl.minimum(base + BLOCK - row, stop - first), ROWS)
            token, is_new = first + index, index < count
            at = base + own
            is_old = at < row
            # What is stored: of the rows before this block deltas, of all rows before the new ones keys and decays.
            state = _load_state(state_ptr + in_lane, rounded_ptr + in_lane, row, is_state, DTYPE)
            keys = load_rows(keys_ptr, rows, D, rows < row, channels, D)
            deltas = load_rows(deltas_ptr, rows, DV, rows < base, values, DV)
            own_deltas = load_rows(deltas_ptr, at, DV, is_old, values, DV)
            errors = load_rows(errors_ptr, at % RECENT, DV, is_old, values, DV)
            inverse = load_rows(inverses_ptr, at % RECENT, BLOCK, is_old, own, BLOCK)
            decays = tl.load(decays_ptr + rows, mask=rows < row, other=0.0)
            total = tl.load(decays_ptr + row - 1, mask=row > 0, other=0.0)
            follow(OVERLAP)
            k = load_rows(k_ptr + key_head * k_stride_h, token, k_stride_t, is_new, channels, D)
            q = load_rows(q_ptr + key_head * q_stride_h, token, q_stride_t, is_new, channels, D)
            v = load_rows(v_ptr + head * v_stride_h, token, v_stride_t, is_new, values, DV)
            g = tl.load(g_ptr + head + token.to(tl.int64) * g_stride, mask=is_new, other=0.0)
            beta = tl.load(beta_ptr + head + token.to(tl.int64) * beta_stride, mask=is_new, other=0.0)
            sums = tl.zeros((ROWS,), tl.float32)
            for i in range(1 if ROWS == 1 else count):
                total += tl.sum(tl.where(index == i, g, 0.0), 0)
                sums = tl.where(index == i, total, sums)
                decays = tl.where(rows == row + i, total, decays)
                keys = tl.where((rows == row + i)[:, None], entry(k, i, ROWS).to(DTYPE)[None, :], keys)

            kq = _tile(k, q, count, ROWS, BLOCK_D)
            of_state = dot(kq, state, tl.zeros((2 * HALF, BV), tl.float32), WIDEN)
            products = dot(kq, tl.trans(keys), tl.zeros((2 * HALF, CHUNK), tl.float32), WIDEN)
            growth, line = _both(tl.exp(sums), ROWS), tl.arange(0, 2 * HALF)
            # L and P: a row sees the rows up to its own. L's own entry is taken out below.
            is_seen = (rows[None, :] <= (row + line % HALF)[:, None]) & (line % HALF < count)[:, None]
            decay = tl.exp(tl.where(is_seen, _both(sums, ROWS)[:, None] - decays[None, :], 0.0))
            share = tl.where(line < HALF, _both(beta, ROWS), 1.0)[:, None]
            products = share * (tl.where(is_seen, decay, 0.0) * products)
            earlier = tl.where((rows < base)[None, :], products, 0.0).to(DTYPE)
            of_rows = dot(earlier, deltas, tl.zeros((2 * HALF, BV), tl.float32), WIDEN)
            blocks = tl.reshape(products, (2 * HALF, BLOCKS, BLOCK))
            mine = tl.sum(tl.where((tl.arange(0, BLOCKS) == base // BLOCK)[None, :, None], blocks, 0.0), 1)

            y = beta[:, None] * (v.to(tl.float32) - tl.exp(sums)[:, None] * _part(of_state, 0, ROWS, BV))
            y = (y - _part(of_rows, 0, ROWS, BV)).to(DTYPE)
            lower = tl.where(own[None, :] < (row - base + line % HALF)[:, None], mine, 0.0)
            for i in range(1 if ROWS == 1 else count):
                is_row = own == row - base + i
                errors = tl.where(is_row[:, None], entry(y, i, ROWS).to(DTYPE)[None, :], errors)
                new = row_of_inverse(entry(lower, i, 2 * HALF)[None, :], inverse[None, :, :], is_row[None, :], 1)
                inverse = tl.where(is_row[:, None], new, inverse)
            d = dot(inverse.to(DTYPE), errors, tl.zeros((BLOCK, BV), tl.float32), WIDEN).to(DTYPE)
            d = tl.where(is_old[:, None], own_deltas, d)
            of_rows = dot(mine.to(DTYPE), d, of_rows, WIDEN)
            out = _part(scale * (growth[:, None] * of_state + of_rows), 1, ROWS, BV).to(out_ptr.dtype.element_ty)

            is_stored = is_new[:, None] & is_value[None, :]
            if gate_ptr is not None:
                wide = out.to(tl.float32)
                wide *= inverse_norm(wide, eps, DV, True, ROWS, BV)
                norm = tl.load(norm_ptr + values, mask=is_value, other=0.0).to(tl.float32)[None, :]
                gate = load_rows(gate_ptr + head * gate_stride_h, token, gate_stride_t, is_new, values, DV)
                out = gated(wide * norm, gate.to(tl.float32), True).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + token.to(tl.int64)[:, None] * out_stride_t + values[None, :], out, mask=is_stored)
            row += count
            first += count
            if row == CHUNK:  # no call goes on from there
                _flush(state_ptr, lane, keys, deltas, d, decays, total, values, D, DV, BLOCK_D, BV, STEP, WIDEN)
            else:
                is_now = (at >= row - count) & (at < row)
                is_kept = is_now[:, None] & is_value[None, :]
                tl.store(deltas_ptr + at[:, None] * DV + values[None, :], d, mask=is_kept)
                tl.store(errors_ptr + (at % RECENT)[:, None] * DV + values[None, :], errors, mask=is_kept)
                tl.store(decays_ptr + rows, decays, mask=(rows >= row - count) & (rows < row))
                inverse_at = inverses_ptr + (at % RECENT)[:, None] * BLOCK + own[None, :]
                tl.store(inverse_at, inverse, mask=is_now[:, None])
                key_at = keys_ptr + (row - count + index)[:, None] * D + channels[None, :]
                tl.store(key_at, k, mask=is_new[:, None] & is_channel[None, :])
                if first < stop:
                    tl.debug_barrier()  # the next rows read what other threads have stored
    if gate_ptr is not None:  # padding
        follow(OVERLAP)
        for idle in tl.range(tl.load(starts_ptr + B) + sequence, T, B):
            empty = tl.zeros((BV,), out_ptr.dtype.element_ty)
            tl.store(out_ptr + idle * out_stride_t + values, empty, mask=is_value)


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
    out.zero_()
    if not len(q) or not len(lanes):
        return
    is_prompt = (most or len(q)) > ROWS_OF_CHUNK
    starts, lengths = query_starts.contiguous(), context_lens.contiguous()
    states["lanes"] = lanes.contiguous()
    if is_prompt:
        rule_triton.compute(q, k, v, g, beta, out, starts, lengths, states, scale)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    inputs = {name: unit_stride(x) for name, x in inputs.items()}
    launch(inputs, out, states, starts, lengths, scale, most, SKIPS_ALIGNED=is_prompt, OVERLAP=0)


def launch(
    inputs: dict[str, Tensor],
    out: Tensor,
    states: dict[str, Tensor],
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    most: int,
    *,
    gated_by: tuple[Tensor, Tensor, float] | None = None,
    **options: Any,
) -> None:
    """Launch the kernel. inputs: q, k, v, g and beta; states: `LANES` and lanes, by name. gated_by: the gate of the
    result, the weight and the eps of its norm. options: constants and options of the launch."""
    gate, norm, eps = gated_by or (None, None, 0.0)
    arguments: dict[str, Any] = {"gate_ptr": gate, "norm_ptr": norm, "gate_stride_t": 0, "gate_stride_h": 0}
    for name, x in {**inputs, "gate": gate, "out": out}.items():
        if x is not None:
            strides = (f"{name}_stride",) if x.dim() == 2 else (f"{name}_stride_t", f"{name}_stride_h")
            arguments |= {f"{name}_ptr": x, **dict(zip(strides, x.stride(), strict=False))}
    for name in rule_triton.LANES:
        arguments |= {f"{name}_ptr": states[name], f"{name}_stride": states[name].stride(0)}
    (heads, value_dim), (key_heads, dim), count = out.shape[1:], inputs["k"].shape[1:], len(states["lanes"])
    block = max(16, power_of_2(dim))
    _delta_rows_kernel[(heads, count)](
        **arguments,
        lanes_ptr=states["lanes"],
        starts_ptr=starts,
        lengths_ptr=lengths,
        scale=scale,
        eps=eps,
        T=len(out),
        B=count,
        DV=value_dim,
        G=heads // key_heads,
        D=dim,
        BLOCK_D=block,
        BV=max(16, power_of_2(value_dim)),
        RECENT=RECENT,
        STEP=min(32, block),
        WIDEN=is_interpreting(),
        enable_fp_fusion=False,
        **_plan(most),
        **({"SKIPS_ALIGNED": False} | options),
    )


def _plan(most: int) -> dict[str, int]:
    """Return the rows of a pass and the warps of a program. most: the most new tokens of a sequence; 0: not known."""
    return {"ROWS": 1 if most == 1 else 8, "num_warps": 8}
