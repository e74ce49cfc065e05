# mypy: allow-untyped-defs
"""Attention over selected keys in plain Triton: gather, online softmax, and a backward in two passes.

`_sparse_dq_kernel` loops over the keys of one token, accumulates dq in registers and writes the weights P and the score
gradients dS of a few hundred tokens to memory. `_sparse_dkv_kernel` multiplies them, transposed, by q and dout, which
gives one share of dkv per (token, selected key) pair. The shares are added atomically, or stored and then summed per
key in token order by `_sparse_reduce_kernel`. An entry is a position in a token's row of indices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._rows import ceil_div
from ..linear_triton import dot

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # start of the running maximum: finite, so that rows and blocks without keys give no NaN


@triton.jit
def selection_end(indices_ptr, K, BLOCK: tl.constexpr):
    """Return one past the last selected entry of a token's row of indices."""
    end = 0
    for start in range(0, K, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        keys = tl.load(indices_ptr + entries, mask=entries < K, other=-1)
        end = tl.maximum(end, tl.max(tl.where(keys >= 0, entries + 1, 0), 0))
    return end


@triton.jit
def _gather(kv_ptr, keys, stride, first: tl.constexpr, width: tl.constexpr, BLOCK: tl.constexpr):
    """Load channels first to first + width of some keys, [keys, BLOCK]; absent keys are not read and give zeros."""
    channels = tl.arange(0, BLOCK)[None, :]
    at = kv_ptr + tl.maximum(keys, 0).to(tl.int64)[:, None] * stride + first + channels
    mask = (keys >= 0)[:, None] if width == BLOCK else (keys >= 0)[:, None] & (channels < width)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _load_rows(ptr, heads, stride_h, H: tl.constexpr, first: tl.constexpr, width: tl.constexpr, BLOCK: tl.constexpr):
    """Load channels first to first + width of some heads of one token, [heads, BLOCK]."""
    channels = tl.arange(0, BLOCK)[None, :]
    mask = (heads < H)[:, None] & (channels < width)
    return tl.load(ptr + heads[:, None] * stride_h + first + channels, mask=mask, other=0.0)


@triton.jit
def _store_rows(
    ptr, x, heads, stride_h, H: tl.constexpr, first: tl.constexpr, width: tl.constexpr, BLOCK: tl.constexpr
):
    channels = tl.arange(0, BLOCK)[None, :]
    mask = (heads < H)[:, None] & (channels < width)
    tl.store(ptr + heads[:, None] * stride_h + first + channels, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sparse_forward_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    out_ptr,
    lse_ptr,
    kv_stride,
    K,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute one token and a block of heads, looping over blocks of keys. scale includes the factor log2(e)."""
    token = tl.program_id(1).to(tl.int64)
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    q_ptr += token * (H * D)
    indices_ptr += token * K
    q = _load_rows(q_ptr, heads, D, H, 0, DV, BLOCK_DV)
    if D > DV:
        q_rest = _load_rows(q_ptr, heads, D, H, DV, D - DV, BLOCK_R)
    top = tl.full((BLOCK_H,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    out = tl.zeros((BLOCK_H, BLOCK_DV), tl.float32)
    for start in range(0, selection_end(indices_ptr, K, 1024), BLOCK_K):
        entries = start + tl.arange(0, BLOCK_K)
        keys = tl.load(indices_ptr + entries, mask=entries < K, other=-1)
        v = _gather(kv_ptr, keys, kv_stride, 0, DV, BLOCK_DV)
        scores = dot(q, tl.trans(v), tl.zeros((BLOCK_H, BLOCK_K), tl.float32), WIDEN)
        if D > DV:
            scores = dot(q_rest, tl.trans(_gather(kv_ptr, keys, kv_stride, DV, D - DV, BLOCK_R)), scores, WIDEN)
        scores = tl.where((keys >= 0)[None, :], scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        out = dot(p.to(v.dtype), v, out * shrink[:, None], WIDEN)
        top = new_top
    safe = tl.where(total > 0, total, 1.0)
    out = out * (1 / safe)[:, None]
    _store_rows(out_ptr + token * (H * DV), out, heads, DV, H, 0, DV, BLOCK_DV)
    lse = tl.where(total > 0, (top + tl.log2(safe)) * LN_2, float("-inf"))
    tl.store(lse_ptr + token * H + heads, lse, mask=heads < H)


@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, delta_ptr, num_rows, DV: tl.constexpr, HAS_DLSE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Compute delta = sum of out * dout - dlse, which is subtracted from every dP of a token and head."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_DV)[None, :]
    mask = (rows < num_rows)[:, None] & (channels < DV)
    out = tl.load(out_ptr + rows[:, None] * DV + channels, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + rows[:, None] * DV + channels, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=rows < num_rows, other=0.0)
    tl.store(delta_ptr + rows, delta, mask=rows < num_rows)


def delta_of(out: Tensor, dout: Tensor, dlse: Tensor | None, *, rows: int, block: int) -> Tensor:
    """Return the sum over channels of dout * out, less dlse, [T, H] fp32. rows, block: of one program, and channels."""
    delta = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    if delta.numel():
        tensors = out, dout, delta if dlse is None else dlse.contiguous(), delta
        sizes = {"DV": out.shape[2], "HAS_DLSE": dlse is not None, "ROWS": rows, "BLOCK_DV": block}
        delta_kernel[(ceil_div(delta.numel(), rows),)](*tensors, delta.numel(), **sizes, num_warps=4)
    return delta


@triton.jit
def _sparse_dq_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    lse_ptr,
    delta_ptr,
    dout_ptr,
    dq_ptr,
    p_ptr,
    ds_ptr,
    kv_stride,
    first,
    K,
    pitch,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute dq of one token and a block of heads, and store P and dS, [tokens, H, pitch], for the second pass."""
    place = tl.program_id(1).to(tl.int64)
    token = first + place
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < H
    indices_ptr += token * K
    q = _load_rows(q_ptr + token * (H * D), heads, D, H, 0, DV, BLOCK_DV)
    if D > DV:
        q_rest = _load_rows(q_ptr + token * (H * D), heads, D, H, DV, D - DV, BLOCK_R)
        dq_rest = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
    dout = _load_rows(dout_ptr + token * (H * DV), heads, DV, H, 0, DV, BLOCK_DV)
    delta = tl.load(delta_ptr + token * H + heads, mask=is_head, other=0.0)
    lse = tl.load(lse_ptr + token * H + heads, mask=is_head, other=0.0) * LOG2_E
    dq = tl.zeros((BLOCK_H, BLOCK_DV), tl.float32)
    for start in range(0, selection_end(indices_ptr, K, 1024), BLOCK_K):
        entries = start + tl.arange(0, BLOCK_K)
        keys = tl.load(indices_ptr + entries, mask=entries < K, other=-1)
        v = _gather(kv_ptr, keys, kv_stride, 0, DV, BLOCK_DV)
        scores = dot(q, tl.trans(v), tl.zeros((BLOCK_H, BLOCK_K), tl.float32), WIDEN)
        if D > DV:
            k_rest = _gather(kv_ptr, keys, kv_stride, DV, D - DV, BLOCK_R)
            scores = dot(q_rest, tl.trans(k_rest), scores, WIDEN)
        dp = dot(dout, tl.trans(v), tl.zeros((BLOCK_H, BLOCK_K), tl.float32), WIDEN)
        p = tl.exp2(scores * (scale * LOG2_E) - lse[:, None])
        p = tl.where((keys >= 0)[None, :], p, 0.0)
        ds = (p * (dp - delta[:, None]) * scale).to(v.dtype)
        at = (place * H + heads)[:, None] * pitch + entries[None, :]
        tl.store(p_ptr + at, p.to(v.dtype), mask=is_head[:, None])
        tl.store(ds_ptr + at, ds, mask=is_head[:, None])
        dq = dot(ds, v, dq, WIDEN)
        if D > DV:
            dq_rest = dot(ds, k_rest, dq_rest, WIDEN)
    _store_rows(dq_ptr + token * (H * D), dq, heads, D, H, 0, DV, BLOCK_DV)
    if D > DV:
        _store_rows(dq_ptr + token * (H * D), dq_rest, heads, D, H, DV, D - DV, BLOCK_R)


@triton.jit
def _sparse_dkv_kernel(
    q_ptr,
    dout_ptr,
    indices_ptr,
    p_ptr,
    ds_ptr,
    dkv_ptr,
    first,
    K,
    pitch,
    begin,
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WITH_V: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute some columns of the shares of one token: dS^T q, plus P^T dout in the columns that are values too.

    ADD: the shares are added to dkv [S, D] atomically; otherwise they are stored in dkv [tokens, K, D].
    """
    place = tl.program_id(1).to(tl.int64)
    token = first + place
    columns = begin + tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    heads = tl.arange(0, BLOCK_H)
    indices_ptr += token * K
    is_column = columns < (DV if WITH_V else D)
    mask = (heads < H)[:, None] & is_column[None, :]
    q = tl.load(q_ptr + token * (H * D) + heads[:, None] * D + columns[None, :], mask=mask, other=0.0)
    if WITH_V:
        dout = tl.load(dout_ptr + token * (H * DV) + heads[:, None] * DV + columns[None, :], mask=mask, other=0.0)
    for start in range(0, selection_end(indices_ptr, K, 1024), BLOCK_K):
        entries = start + tl.arange(0, BLOCK_K)
        keys = tl.load(indices_ptr + entries, mask=entries < K, other=-1)
        at = (place * H + heads)[:, None] * pitch + entries[None, :]
        ds = tl.load(ds_ptr + at, mask=(heads < H)[:, None], other=0.0)
        share = dot(tl.trans(ds), q, tl.zeros((BLOCK_K, BLOCK_C), tl.float32), WIDEN)
        if WITH_V:
            p = tl.load(p_ptr + at, mask=(heads < H)[:, None], other=0.0)
            share = dot(tl.trans(p), dout, share, WIDEN)
        is_stored = (keys >= 0)[:, None] & is_column[None, :]
        if ADD:
            to = dkv_ptr + tl.maximum(keys, 0).to(tl.int64)[:, None] * D + columns[None, :]
            tl.atomic_add(to, share, mask=is_stored, sem="relaxed")
        else:
            tl.store(dkv_ptr + (place * K + entries)[:, None] * D + columns[None, :], share, mask=is_stored)


@triton.jit
def _sparse_entries_kernel(indices_ptr, entries_ptr, first, S, K, BLOCK: tl.constexpr):
    """Write entries[token, key], the token's entry for the key; keys that the token did not select stay -1."""
    place = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(indices_ptr + (first + place) * K + entries, mask=entries < K, other=-1)
    tl.store(entries_ptr + place * S + keys, entries, mask=keys >= 0)


@triton.jit
def _share(shares_ptr, row, rank, i, channels, D: tl.constexpr):
    """Load the i-th share of a key; zeros past the last."""
    at = tl.sum(tl.where(rank == i, row, 0), 0).to(tl.int64) * D
    return tl.load(shares_ptr + at + channels, mask=(channels < D) & (channels * 0 + i <= tl.max(rank, 0)), other=0.0)


@triton.jit
def _sparse_reduce_kernel(
    shares_ptr, entries_ptr, dkv_ptr, tokens, S, K, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Add to dkv[key] the shares of the tokens that selected it, one by one in token order."""
    key = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK_D)
    at = dkv_ptr + key * D + channels
    total = tl.load(at, mask=channels < D, other=0.0)
    for start in range(0, tokens, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        entry = tl.load(entries_ptr + token.to(tl.int64) * S + key, mask=token < tokens, other=-1)
        is_chosen = (entry >= 0).to(tl.int32)
        rank = tl.cumsum(is_chosen, 0) * is_chosen
        row = token * K + entry
        for i in range(1, tl.sum(is_chosen, 0) + 1, 4):  # four loads in flight, added in order
            first = _share(shares_ptr, row, rank, i, channels, D)
            second = _share(shares_ptr, row, rank, i + 1, channels, D)
            third = _share(shares_ptr, row, rank, i + 2, channels, D)
            fourth = _share(shares_ptr, row, rank, i + 3, channels, D)
            total = total + first + second + third + fourth
    tl.store(at, total, mask=channels < D)
