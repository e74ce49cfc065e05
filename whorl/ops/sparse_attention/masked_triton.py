# mypy: allow-untyped-defs
"""Attention under a bit mask in Triton: a block of queries loops over the key blocks from its first to its last bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._rows import ceil_div, power_of_2
from ..linear_triton import dot
from .bits import causal_bits, num_words
from .triton import LN_2, LOG2_E, LOWEST, delta_of


@triton.jit
def _selected(bits_ptr, rows, first, T, words, KEYS: tl.constexpr, TURNED: tl.constexpr):
    """Return whether each query selects key first + j, [rows, keys], or if TURNED [keys, rows].

    first is a multiple of 32. A word holds 32 keys of a query: it is loaded once per query and expanded by shifts.
    """
    axis: tl.constexpr = 0 if TURNED else 1
    keys = tl.expand_dims(tl.arange(0, KEYS), 1 - axis)
    at = bits_ptr + rows.to(tl.int64) * words + first // 32
    words_of_keys = tl.expand_dims(rows * 0, axis) + 0 * keys
    for i in tl.static_range(KEYS // 32):
        word = tl.load(at + i, mask=(rows < T) & (rows * 0 + first // 32 + i < words), other=0)
        words_of_keys = tl.where(keys // 32 == i, tl.expand_dims(word, axis) >> (keys % 32), words_of_keys)
    return (words_of_keys & 1) != 0


@triton.jit
def _extent_kernel(bits_ptr, extents_ptr, T, words, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BY_ROW: tl.constexpr):
    """Store the range of words that a block of rows uses (BY_ROW), or of rows that use a block of words."""
    block = tl.program_id(0)
    low, high = 2147483647, 0
    for start in range(0, words if BY_ROW else T, BLOCK_W if BY_ROW else BLOCK_T):
        rows = (block * BLOCK_T if BY_ROW else start) + tl.arange(0, BLOCK_T)
        columns = (start if BY_ROW else block * BLOCK_W) + tl.arange(0, BLOCK_W)
        mask = (rows < T)[:, None] & (columns < words)[None, :]
        word = tl.load(bits_ptr + rows.to(tl.int64)[:, None] * words + columns[None, :], mask=mask, other=0)
        is_used = tl.max((word != 0).to(tl.int32), 0 if BY_ROW else 1) > 0
        places = columns if BY_ROW else rows
        low = tl.minimum(low, tl.min(tl.where(is_used, places, 2147483647), 0))
        high = tl.maximum(high, tl.max(tl.where(is_used, places + 1, 0), 0))
    tl.store(extents_ptr + 2 * block, tl.minimum(low, high))
    tl.store(extents_ptr + 2 * block + 1, high)


@triton.jit
def _tile(ptr, rows, end, stride, first: tl.constexpr, width: tl.constexpr, BLOCK: tl.constexpr):
    channels = tl.arange(0, BLOCK)[None, :]
    mask = (rows < end)[:, None] & (channels < width)
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + first + channels, mask=mask, other=0.0)


@triton.jit
def _store_tile(ptr, x, rows, end, stride, first: tl.constexpr, width: tl.constexpr, BLOCK: tl.constexpr):
    channels = tl.arange(0, BLOCK)[None, :]
    mask = (rows < end)[:, None] & (channels < width)
    at = ptr + rows.to(tl.int64)[:, None] * stride + first + channels
    tl.store(at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _masked_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bits_ptr,
    extents_ptr,
    out_ptr,
    lse_ptr,
    T,
    S,
    words,
    scale,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute one head of a block of queries. Channels form two tiles, MAIN and REST. scale includes log2(e)."""
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS  # under a causal mask the last blocks are the longest
    head = tl.program_id(0)
    D: tl.constexpr = MAIN + REST
    rows = start + tl.arange(0, ROWS)
    q_ptr += head * D
    k_ptr += head // (HQ // HK) * D
    v_ptr += head // (HQ // HK) * DV
    q = _tile(q_ptr, rows, T, HQ * D, 0, MAIN, BLOCK_MAIN)
    if REST > 0:
        q_rest = _tile(q_ptr, rows, T, HQ * D, MAIN, REST, BLOCK_REST)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    low, high = tl.load(extents_ptr + 2 * (start // ROWS)), tl.load(extents_ptr + 2 * (start // ROWS) + 1)
    for first in range(low * 32 // KEYS * KEYS, high * 32, KEYS):
        keys = first + tl.arange(0, KEYS)
        k = _tile(k_ptr, keys, S, HK * D, 0, MAIN, BLOCK_MAIN)
        scores = dot(q, tl.trans(k), tl.zeros((ROWS, KEYS), tl.float32), WIDEN)
        if REST > 0:
            k_rest = _tile(k_ptr, keys, S, HK * D, MAIN, REST, BLOCK_REST)
            scores = dot(q_rest, tl.trans(k_rest), scores, WIDEN)
        scores = tl.where(_selected(bits_ptr, rows, first, T, words, KEYS, False), scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        v = _tile(v_ptr, keys, S, HK * DV, 0, DV, BLOCK_DV)
        out = dot(p.to(v.dtype), v, out * shrink[:, None], WIDEN)
        top = new_top
    safe = tl.where(total > 0, total, 1.0)
    _store_tile(out_ptr + head * DV, out / safe[:, None], rows, T, HQ * DV, 0, DV, BLOCK_DV)
    lse = tl.where(total > 0, (top + tl.log2(safe)) * LN_2, float("-inf"))
    tl.store(lse_ptr + rows.to(tl.int64) * HQ + head, lse, mask=rows < T)


@triton.jit
def _weights_and_score_gradients(
    left, left_rest, right, right_rest, dleft, dright, bits_ptr, lse_ptr, delta_ptr, rows, first, head, T, words, scale,
    HQ: tl.constexpr, REST: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return P and dS of one tile: left is q, dleft dout, right k and dright v; if TURNED, the two sides swap."""
    axis: tl.constexpr = 0 if TURNED else 1
    zeros = tl.zeros((left.shape[0], right.shape[0]), tl.float32)
    scores = dot(left, tl.trans(right), zeros, WIDEN)
    if REST > 0:
        scores = dot(left_rest, tl.trans(right_rest), scores, WIDEN)
    at = rows.to(tl.int64) * HQ + head
    lse = tl.load(lse_ptr + at, mask=rows < T, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + at, mask=rows < T, other=0.0)
    selected = _selected(bits_ptr, rows, first, T, words, KEYS, TURNED)
    p = tl.exp2(tl.where(selected, scores * (scale * LOG2_E) - tl.expand_dims(lse, axis), float("-inf")))
    dp = dot(dleft, tl.trans(dright), zeros, WIDEN)
    ds = p * (dp - tl.expand_dims(delta, axis)) * scale
    return p.to(left.dtype), ds.to(left.dtype)


@triton.jit
def _masked_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bits_ptr,
    extents_ptr,
    lse_ptr,
    delta_ptr,
    dout_ptr,
    dq_ptr,
    T,
    S,
    words,
    scale,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute dq of one head of a block of queries."""
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    head = tl.program_id(0)
    D: tl.constexpr = MAIN + REST
    rows = start + tl.arange(0, ROWS)
    k_ptr += head // (HQ // HK) * D
    v_ptr += head // (HQ // HK) * DV
    q = _tile(q_ptr + head * D, rows, T, HQ * D, 0, MAIN, BLOCK_MAIN)
    q_rest = q
    if REST > 0:
        q_rest = _tile(q_ptr + head * D, rows, T, HQ * D, MAIN, REST, BLOCK_REST)
    dout = _tile(dout_ptr + head * DV, rows, T, HQ * DV, 0, DV, BLOCK_DV)
    dq = tl.zeros((ROWS, BLOCK_MAIN), tl.float32)
    dq_rest = tl.zeros((ROWS, BLOCK_REST), tl.float32)
    low, high = tl.load(extents_ptr + 2 * (start // ROWS)), tl.load(extents_ptr + 2 * (start // ROWS) + 1)
    for first in range(low * 32 // KEYS * KEYS, high * 32, KEYS):
        keys = first + tl.arange(0, KEYS)
        k = _tile(k_ptr, keys, S, HK * D, 0, MAIN, BLOCK_MAIN)
        k_rest = k
        if REST > 0:
            k_rest = _tile(k_ptr, keys, S, HK * D, MAIN, REST, BLOCK_REST)
        v = _tile(v_ptr, keys, S, HK * DV, 0, DV, BLOCK_DV)
        _, ds = _weights_and_score_gradients(
            q, q_rest, k, k_rest, dout, v, bits_ptr, lse_ptr, delta_ptr, rows, first, head, T, words, scale, HQ, REST,
            KEYS, False, WIDEN,
        )  # fmt: skip
        dq = dot(ds, k, dq, WIDEN)
        if REST > 0:
            dq_rest = dot(ds, k_rest, dq_rest, WIDEN)
    _store_tile(dq_ptr + head * D, dq, rows, T, HQ * D, 0, MAIN, BLOCK_MAIN)
    if REST > 0:
        _store_tile(dq_ptr + head * D, dq_rest, rows, T, HQ * D, MAIN, REST, BLOCK_REST)


@triton.jit
def _masked_dkv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bits_ptr,
    extents_ptr,
    lse_ptr,
    delta_ptr,
    dout_ptr,
    dk_ptr,
    dv_ptr,
    T,
    S,
    words,
    scale,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute dk and dv of one KV head of a block of keys, adding over its query heads and all queries in order."""
    first = tl.program_id(1) * KEYS
    group = tl.program_id(0)
    D: tl.constexpr = MAIN + REST
    keys = first + tl.arange(0, KEYS)
    k = _tile(k_ptr + group * D, keys, S, HK * D, 0, MAIN, BLOCK_MAIN)
    k_rest = k
    if REST > 0:
        k_rest = _tile(k_ptr + group * D, keys, S, HK * D, MAIN, REST, BLOCK_REST)
    v = _tile(v_ptr + group * DV, keys, S, HK * DV, 0, DV, BLOCK_DV)
    dk = tl.zeros((KEYS, BLOCK_MAIN), tl.float32)
    dk_rest = tl.zeros((KEYS, BLOCK_REST), tl.float32)
    dv = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    low, high = tl.load(extents_ptr + 2 * tl.program_id(1)), tl.load(extents_ptr + 2 * tl.program_id(1) + 1)
    for head in range(group * (HQ // HK), (group + 1) * (HQ // HK)):
        for start in range(low // ROWS * ROWS, high, ROWS):
            rows = start + tl.arange(0, ROWS)
            q = _tile(q_ptr + head * D, rows, T, HQ * D, 0, MAIN, BLOCK_MAIN)
            q_rest = q
            if REST > 0:
                q_rest = _tile(q_ptr + head * D, rows, T, HQ * D, MAIN, REST, BLOCK_REST)
            dout = _tile(dout_ptr + head * DV, rows, T, HQ * DV, 0, DV, BLOCK_DV)
            p, ds = _weights_and_score_gradients(
                k, k_rest, q, q_rest, v, dout, bits_ptr, lse_ptr, delta_ptr, rows, first, head, T, words, scale, HQ,
                REST, KEYS, True, WIDEN,
            )  # fmt: skip
            dv = dot(p, dout, dv, WIDEN)
            dk = dot(ds, q, dk, WIDEN)
            if REST > 0:
                dk_rest = dot(ds, q_rest, dk_rest, WIDEN)
    _store_tile(dk_ptr + group * D, dk, keys, S, HK * D, 0, MAIN, BLOCK_MAIN)
    if REST > 0:
        _store_tile(dk_ptr + group * D, dk_rest, keys, S, HK * D, MAIN, REST, BLOCK_REST)
    _store_tile(dv_ptr + group * DV, dv, keys, S, HK * DV, 0, DV, BLOCK_DV)


@triton.jit
def _selection_kernel(indices_ptr, bits_ptr, words, K, BLOCK: tl.constexpr):
    """Set the bits of one token's keys in a row that is zero before."""
    token = tl.program_id(0).to(tl.int64)
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.load(indices_ptr + token * K + entries, mask=entries < K, other=-1)
    tl.atomic_or(bits_ptr + token * words + keys // 32, 1 << (keys % 32), mask=keys >= 0, sem="relaxed")


def selection(indices: Tensor, num_keys: int) -> Tensor:
    indices, words = indices.contiguous(), num_words(num_keys)
    bits = torch.zeros(indices.shape[0], words, dtype=torch.int32, device=indices.device)
    if indices.numel():
        grid = (indices.shape[0], ceil_div(indices.shape[1], 1024))
        _selection_kernel[grid](indices, bits, words, indices.shape[1], BLOCK=1024, num_warps=4)
    return bits


Tile = tuple[int, int, int, int]  # rows, keys, warps, stages
Plan = tuple[Tile, Tile]  # for 16-bit inputs: of common heads, and of wide ones

MOST_CHANNELS = 320  # of a key and a value, 192 and 128 of DeepSeek; with more the larger tiles need 257 KB on Hopper
FORWARD: Plan = ((128, 64, 8, 3), (128, 64, 8, 2))
DQ: Plan = ((128, 64, 8, 2), (128, 32, 8, 2))
DKV: Plan = ((32, 128, 8, 2), (32, 64, 8, 2))


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the sizes of a kernel; D is split into a power of two and the remainder, 192 into 128 and 64."""
    dim = q.shape[2]
    main = 1 << (dim.bit_length() - 1)
    return {
        "HQ": q.shape[1],
        "HK": k.shape[1],
        "MAIN": main,
        "REST": dim - main,
        "DV": v.shape[2],
        "BLOCK_MAIN": max(16, main),
        "BLOCK_REST": max(16, power_of_2(dim - main)),
        "BLOCK_DV": max(16, power_of_2(v.shape[2])),
    }


def _tiles(dtype: torch.dtype, sizes: dict[str, int], plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """Return the rows and keys of a tile, and launch options. sizes: from `_sizes`; fp32 uses small tiles."""
    channels = sizes["BLOCK_MAIN"] + sizes["BLOCK_DV"] + (sizes["BLOCK_REST"] if sizes["REST"] else 0)
    rows, keys, warps, stages = (32, 32, 4, 1) if dtype == torch.float32 else plan[channels > MOST_CHANNELS]
    return {"ROWS": rows, "KEYS": keys}, {"num_warps": warps, "num_stages": stages}


def _extents(bits: Tensor, tile: dict[str, int], *, by_row: bool) -> Tensor:
    """Return ranges [blocks, 2] int32: of words that each block of rows needs, or of rows for each block of keys."""
    width = tile["KEYS"] // 32
    blocks = ceil_div(bits.shape[0], tile["ROWS"]) if by_row else ceil_div(bits.shape[1], width)
    extents = torch.empty(blocks, 2, dtype=torch.int32, device=bits.device)
    block = {"BLOCK_T": tile["ROWS"], "BLOCK_W": 32} if by_row else {"BLOCK_T": 256, "BLOCK_W": width}
    _extent_kernel[(blocks,)](bits, extents, *bits.shape, **block, BY_ROW=by_row, num_warps=4)
    return extents


def forward(q: Tensor, k: Tensor, v: Tensor, bits: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    bits = causal_bits(q.shape[0], k.shape[0], q.device) if bits is None else bits
    q, k, v, bits = (x.contiguous() for x in (q, k, v, bits))
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if lse.numel():
        sizes = _sizes(q, k, v)
        tile, options = _tiles(q.dtype, sizes, FORWARD)
        extents = _extents(bits, tile, by_row=True)
        _masked_forward_kernel[(q.shape[1], ceil_div(q.shape[0], tile["ROWS"]))](
            q, k, v, bits, extents, out, lse, q.shape[0], k.shape[0], bits.shape[1], scale * LOG2_E.value,
            **sizes, **tile, WIDEN=is_interpreting(), **options,
        )  # fmt: skip
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor | None, dlse: Tensor | None, scale: float, **outputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dout, out, lse = (outputs[name] for name in ("dout", "out", "lse"))
    bits = causal_bits(q.shape[0], k.shape[0], q.device) if bits is None else bits
    dout, q, k, v, bits, out, lse = (x.contiguous() for x in (dout, q, k, v, bits, out, lse))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    sizes = _sizes(q, k, v)
    delta = delta_of(out, dout, dlse, rows=16, block=sizes["BLOCK_DV"])
    if delta.numel():
        tile, options = _tiles(q.dtype, sizes, DQ)
        _masked_dq_kernel[(q.shape[1], ceil_div(q.shape[0], tile["ROWS"]))](
            q, k, v, bits, _extents(bits, tile, by_row=True), lse, delta, dout, dq, q.shape[0], k.shape[0],
            bits.shape[1], scale, **sizes, **tile, WIDEN=is_interpreting(), **options,
        )  # fmt: skip
    if dk.numel():
        tile, options = _tiles(q.dtype, sizes, DKV)
        _masked_dkv_kernel[(k.shape[1], ceil_div(k.shape[0], tile["KEYS"]))](
            q, k, v, bits, _extents(bits, tile, by_row=False), lse, delta, dout, dk, dv, q.shape[0], k.shape[0],
            bits.shape[1], scale, **sizes, **tile, WIDEN=is_interpreting(), **options,
        )  # fmt: skip
    return dq, dk, dv
