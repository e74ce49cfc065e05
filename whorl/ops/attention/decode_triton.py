# mypy: allow-untyped-defs
"""Attention of a few tokens per sequence (decode). It uses the same cuts of the keys as prompts: the bits are equal.

With enough tokens to saturate the memory bandwidth, one program per token and key head walks all cuts from first to
last. With few tokens, several programs share the cuts (split-KV), and a second kernel combines their results in order.
"""

from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._hopper import gluon_reason
from .._launch_triton import launched
from .._overlap_triton import begin, follow, overlap, prefetch_lines
from .._rows import ceil_div, power_of_2
from .._varied import is_varied
from .cuts_triton import Scales, cut, cut_of, fold, load_cut, start_fold
from .fold_triton import fold_stored
from .prompt_triton import sequence_block

WALKERS = 256  # programs that saturate the memory bandwidth without sharing a sequence's cuts
PROGRAMS = 264  # programs that share long sequences: two for each of an H200's multiprocessors
SHORT = 1024  # total cuts up to which each cut has a program of its own
LONG = 256  # cuts of a sequence from which the results of separate cuts would take too much memory
AHEAD = 32  # cuts whose results are loaded at once when they are combined
CHANNELS = 32  # channels of a program that combines cuts


@launched
@triton.jit(do_not_specialize=["table_stride", "cuts", "B"])
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    out_ptr,
    top_ptr,
    total_ptr,
    y_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_block,
    k_stride_offset,
    k_stride_head,
    v_stride_block,
    v_stride_offset,
    v_stride_head,
    table_stride,
    scale,
    window,
    softcap,
    cuts,
    B,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CUT: tl.constexpr,
    WALKS: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute the G query heads of one token that share a key head.

    WALKS: the program combines all cuts in order and writes y. Otherwise num_programs(2) programs share the cuts, each
    takes every num_programs-th, and stores the result of each cut separately for `_fold_kernel`.
    """
    begin(OVERLAP)
    token, head = tl.program_id(0), tl.program_id(1)
    b, end = sequence_of(token, starts_ptr, lengths_ptr, B, BLOCK_B)
    first = tl.maximum(end - window, 0) if window > 0 else 0
    table = tables_ptr + b.to(tl.int64) * table_stride
    if OVERLAP == 2:
        keys = (first // CUT + tl.program_id(2)) * CUT + tl.arange(0, CUT)
        _prefetch(k_cache_ptr, table, keys, end, head, k_stride_block, k_stride_offset, k_stride_head, BLOCK_SIZE, D)
        _prefetch(v_cache_ptr, table, keys, end, head, v_stride_block, v_stride_offset, v_stride_head, BLOCK_SIZE, D)
    follow(OVERLAP)
    group = tl.arange(0, BLOCK_G)
    channels = tl.arange(0, BLOCK_D)
    q_at = q_ptr + token.to(tl.int64) * q_stride_t + (head * G + group)[:, None] * q_stride_h + channels[None, :]
    mask = (group < G)[:, None] & (channels < D)[None, :]
    q = tl.load(q_at, mask=mask, other=0.0)
    row = token.to(tl.int64) * (HK * G) + head * G + group
    top, total = start_fold(sinks_ptr, head * G + group, group < G)
    out = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for i in tl.range(first // CUT + tl.program_id(2), tl.cdiv(end, CUT), tl.num_programs(2), num_stages=STAGES):
        keys = i * CUT + tl.arange(0, CUT)
        k, v = load_cut(
            k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, table, keys, end, head, k_stride_block,
            k_stride_offset, k_stride_head, v_stride_block, v_stride_offset, v_stride_head, BLOCK_SIZE, HK, D, BLOCK_D,
            q_ptr.dtype.element_ty, WIDEN,
        )  # fmt: skip
        visible = ((keys < end) & (keys >= first))[None, :]
        cut_top, cut_total, cut_out = cut(q, k, v, visible, scale, softcap, CAPPED, WIDEN)
        if WALKS:
            top, total, out = fold(top, total, out, cut_top, cut_total, cut_out)
        else:
            at = row * cuts + i
            tl.store(top_ptr + at, cut_top, mask=group < G)
            tl.store(total_ptr + at, cut_total, mask=group < G)
            tl.store(out_ptr + at[:, None] * D + channels[None, :], cut_out, mask=mask)
    if WALKS:
        total = tl.broadcast_to(total[:, None], out.shape)
        tl.store(
            y_ptr + row[:, None] * D + channels[None, :], divided(out, total).to(y_ptr.dtype.element_ty), mask=mask
        )


@triton.jit
def _prefetch(
    ptr, table, keys, end, head, stride_block, stride_offset, stride_head, BLOCK_SIZE: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Prefetch the keys or values of a cut by cache lines of 128 bytes; for keys past the end, block 0 of the cache."""
    line: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    block = tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
    at = ptr + block * stride_block + (keys % BLOCK_SIZE) * stride_offset + head * stride_head
    for channel in tl.static_range(0, D, line):
        prefetch_lines(at + channel)


@triton.jit
def sequence_of(token, starts_ptr, lengths_ptr, B, BLOCK_B: tl.constexpr):
    """Return the sequence of a token, and how many keys it sees without a window: 0 for a token past the last one."""
    index = tl.arange(0, BLOCK_B)
    ends = tl.load(starts_ptr + 1 + index, mask=index < B, other=2147483647)
    b = tl.sum((ends <= token).to(tl.int32), 0)
    is_real = b < B
    length, stop = tl.load(lengths_ptr + b, mask=is_real, other=0), tl.load(starts_ptr + b + 1, mask=is_real, other=0)
    return b, tl.where(is_real, length - (stop - 1 - token), 0)


@triton.jit
def divided(out, total):
    """Return out / total, and zero where total is 0 because there were no keys."""
    return tl.where(total > 0, tl.div_rn(out, tl.where(total > 0, total, 1.0)), 0.0)


@launched
@triton.jit(do_not_specialize=["cuts", "B"])
def _fold_kernel(
    out_ptr,
    top_ptr,
    total_ptr,
    starts_ptr,
    lengths_ptr,
    sinks_ptr,
    y_ptr,
    window,
    cuts,
    B,
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CUT: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Combine the cuts of one token and head in order, for BLOCK_D channels, loading AHEAD cuts at once."""
    begin(OVERLAP)
    token, head = tl.program_id(0), tl.program_id(1)
    _, end = sequence_of(token, starts_ptr, lengths_ptr, B, BLOCK_B)
    first = tl.maximum(end - window, 0) if window > 0 else 0
    channels = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = token.to(tl.int64) * HQ + head
    highest, weight = start_fold(sinks_ptr, head, True)
    follow(OVERLAP)
    out, total = fold_stored(
        out_ptr, top_ptr, total_ptr, row * cuts, first // CUT, tl.cdiv(end, CUT), channels, D, AHEAD, highest, weight
    )  # fmt: skip
    tl.store(y_ptr + row * D + channels, divided(out, total).to(y_ptr.dtype.element_ty), mask=channels < D)


def decode(
    tensors: list[Tensor],
    scales: Scales,
    strides: tuple[int, ...],
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention of few queries per sequence; the arguments are those of `prompt`, without lse."""
    q, k_cache, _, tables, starts, lengths = tensors
    tokens, heads, dim = q.shape
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not y.numel():
        return y
    size, count = cut_of(q.dtype), lengths.shape[0]
    block_size, kv_heads = k_cache.shape[1:3]
    cuts = max(1, ceil_div(tables.shape[1] * block_size, size))
    plan, programs = _plan(tokens * kv_heads, cuts, is_coded=scales[0] is not None)
    walks = programs == 1
    scratch = (0,) if walks else (tokens, heads, cuts)
    out = torch.empty(*scratch, dim, dtype=torch.float32, device=q.device)
    top, total = (torch.empty(scratch, dtype=torch.float32, device=q.device) for _ in range(2))
    _decode_kernel[(tokens, kv_heads, programs)](
        *tensors,
        *scales,
        sinks,
        out,
        top,
        total,
        y,
        *strides,
        scale,
        window,
        softcap,
        cuts,
        count,
        HK=kv_heads,
        G=heads // kv_heads,
        D=dim,
        BLOCK_SIZE=block_size,
        BLOCK_B=block_of_sequences(count),
        BLOCK_G=max(16, power_of_2(heads // kv_heads)),
        BLOCK_D=max(16, power_of_2(dim)),
        CUT=size,
        WALKS=walks,
        CAPPED=softcap > 0,
        WIDEN=is_interpreting(),
        enable_fp_fusion=False,
        **plan,
        **overlap(q),
    )
    if not walks:
        _fold_cuts([out, top, total], starts, lengths, sinks, y, window, cuts)
    return y


def _fold_cuts(
    stored: list[Tensor], starts: Tensor, lengths: Tensor, sinks: Tensor | None, y: Tensor, window: int, cuts: int
) -> None:
    """Write to y what the stored results of cuts combine to. stored: out, top and total, [T, HQ, cuts] and channels."""
    tokens, heads, dim = y.shape
    block = block_of_sequences(lengths.shape[0])
    if sinks is None and (hopper := _fold_many(y)) is not None and hopper.fits(y, cuts):
        hopper.run(stored, starts, lengths, y, window, cuts, block)
        return
    _fold_kernel[(tokens, heads, ceil_div(dim, CHANNELS))](
        *stored,
        starts,
        lengths,
        sinks,
        y,
        window,
        cuts,
        lengths.shape[0],
        HQ=heads,
        D=dim,
        BLOCK_B=block,
        BLOCK_D=CHANNELS,
        CUT=cut_of(y.dtype),
        AHEAD=AHEAD if is_varied() else min(AHEAD, power_of_2(cuts)),
        num_warps=1,
        enable_fp_fusion=False,
        **overlap(y),
    )


def _fold_many(y: Tensor) -> ModuleType | None:
    """Return the Hopper kernel that combines many cuts, or None where this device has none."""
    if y.element_size() != 2 or gluon_reason(y.device) is not None:
        return None
    from . import fold_gluon_triton

    return fold_gluon_triton


def block_of_sequences(count: int) -> int:
    """Return the constant BLOCK_B; a recorded step of one sequence has a kernel of its own.

    It is never between 1 and 32: some lanes of a warp would count a token's sequences, and the compiler would not know
    that the others have the same number. Combining the 256 cuts of each of 4 sequences took 42 us on an H200 then, not
    the 7 us that it takes.
    """
    return 1 if count == 1 and not is_varied() else sequence_block(count)


def _plan(heads: int, cuts: int, *, is_coded: bool) -> tuple[dict[str, int], int]:
    """Return launch constants, and how many programs share the cuts of one token and key head.

    heads: key heads of all tokens together; cuts: the most that a sequence may have. One program walks all cuts.
    is_coded: the cache is quantised; converting codes takes long, and smaller programs do it side by side.
    """
    constants = {"STAGES": 1, "num_warps": 4} if is_coded else {"STAGES": 3, "num_warps": 8}
    if cuts == 1 and heads < WALKERS and not is_varied():  # nothing to load ahead: room for the next kernel's weights
        return constants | {"STAGES": 1}, 1
    if cuts == 1 or heads >= (WALKERS if cuts <= LONG else WALKERS // 2):
        return constants | {"num_warps": 4}, 1
    if heads * cuts <= SHORT and not is_varied():  # without a software pipeline the first cut is ready sooner
        return constants | {"STAGES": 1}, cuts
    programs = PROGRAMS * 3 // 2 if is_coded else PROGRAMS
    return constants, min(cuts, max(2, programs // heads))
