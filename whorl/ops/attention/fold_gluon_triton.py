# mypy: allow-untyped-defs
"""Combine stored results of many cuts in order on Hopper, in Gluon, with the bits of fold_triton.py.

A long context leaves a chain of hundreds of cuts per head, and little else to do. Each program computes the factors of
MANY cuts at once while the results of the first ones arrive in a ring in shared memory, and walks the chain there: per
cut one load of its results, one of its three factors, and two instructions that depend on the cut before. A program
takes 20 KB, so that one of the output product, which waits for its turn with its weights, has room beside it.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from .._gluon_triton import async_load, begin, follow, reinterpret, rescale_factors, sync
from .._overlap_triton import overlap
from .cuts_triton import cut_of

FEWEST = 64  # cuts, above which this is faster than the kernel of decode_triton.py
CHANNELS = gl.constexpr(32)  # of one program, which is one warp
MANY = gl.constexpr(256)  # cuts whose factors are computed at once
PART = gl.constexpr(32)  # cuts whose results are waited for at once
PARTS = gl.constexpr(4)  # in the ring: results are asked for this many parts before their turn
UNROLLED = gl.constexpr(16)  # cuts of one turn of the loop

_ROW = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_ONE_ROW = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0]))
_CUTS = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))
_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0]))
_FACTORS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _keys_of(token, starts_ptr, lengths_ptr, B, BLOCK_B: gl.constexpr):
    """How many keys a token sees without a window, as `sequence_of` of decode_triton.py counts them."""
    index = gl.arange(0, BLOCK_B, _ROW)
    ends = gl.load(starts_ptr + 1 + index, mask=index < B, other=2147483647)
    b = gl.sum((ends <= token).to(gl.int32), 0)
    is_real = b < B
    length = gl.load(lengths_ptr + b, mask=is_real, other=0)
    stop = gl.load(starts_ptr + b + 1, mask=is_real, other=0)
    return gl.where(is_real, length - (stop - 1 - token), 0)


@gluon.jit
def _copy_part(out_at, outs, first, stop, slot, D: gl.constexpr):
    """Start copying the results of PART cuts from cut `first` on to a slot of the ring; none past `stop`."""
    k = gl.expand_dims(gl.arange(0, CHANNELS, gl.SliceLayout(0, _COPY)), 0)
    cuts = gl.expand_dims(gl.arange(0, PART, gl.SliceLayout(1, _COPY)), 1)
    slots = reinterpret(outs, gl.float32, [PARTS, PART, CHANNELS], _PLAIN)
    if first < stop:
        async_load(slots.index(slot), out_at + (first + cuts) * D + k, first + cuts < stop)
    async_copy.commit_group()


@gluon.jit
def _load_tops(top_at, total_at, i, first, stop):
    """Load the highest scores of the cuts before each of MANY cuts from i on, those of the cuts, and their sums."""
    index = i + gl.arange(0, MANY, _CUTS)
    before = gl.load(top_at + index - 1, mask=(index > first) & (index <= stop), other=float("-inf"))
    tops = gl.load(top_at + index, mask=index < stop, other=float("-inf"))
    return before, tops, gl.load(total_at + index, mask=index < stop, other=0.0)


@gluon.jit
def _higher(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _store_factors(factors, before, tops, totals, highest):
    """Store the two factors of each cut, and its sum of weights; return the highest score up to each."""
    top = gl.maximum(gl.associative_scan(before, 0, _higher), highest)
    new, keep, add = rescale_factors(top, tops)
    rows = gl.join(gl.join(keep, totals), gl.join(add, totals)).reshape([MANY, 4])
    reinterpret(factors, gl.float32, [MANY, 4], _PLAIN).store(rows)
    return new


@gluon.jit
def _row(outs, i):
    return gl.convert_layout(outs.index(i).load(_ONE_ROW).reshape([CHANNELS]), _ROW)


@gluon.jit
def _add_cut(out, total, x, row):
    """Return the sums with one more cut; x: its results; row: its row of `factors`."""
    kept, added = gl.split(row.broadcast_to([CHANNELS, 4]).reshape([CHANNELS, 2, 2]))
    keep, weights = gl.split(kept)
    add, _ = gl.split(added)
    keep, add = gl.convert_layout(keep, _ROW), gl.convert_layout(add, _ROW)
    return gl.fma(x, add, out * keep), gl.fma(gl.convert_layout(weights, _ROW), add, total * keep)


@gluon.jit
def _walk(out, total, outs, factors, slot, part, count):
    """Add `count` cuts of a part, whose results are in this slot of the ring."""
    for i in range(0, count, UNROLLED):
        for j in gl.static_range(UNROLLED):
            row = factors.index(part * PART + i + j).load(_FACTORS)
            # Past the last cut the factors change no bit, and shared memory holds anything.
            x = gl.where(i + j < count, _row(outs, slot * PART + i + j), 0.0)
            out, total = _add_cut(out, total, x, row)
    return out, total


@gluon.jit(do_not_specialize=["window", "cuts", "B"])
def _fold_many_kernel(
    out_ptr, top_ptr, total_ptr, starts_ptr, lengths_ptr, y_ptr, window, cuts, B,
    HQ: gl.constexpr, D: gl.constexpr, BLOCK_B: gl.constexpr, CUT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Combine the cuts of one token and head in order, for CHANNELS channels."""
    begin(OVERLAP)
    token, head, channel = gl.program_id(0), gl.program_id(1), gl.program_id(2) * CHANNELS
    end = _keys_of(token, starts_ptr, lengths_ptr, B, BLOCK_B)
    first = gl.maximum(end - window, 0) // CUT if window > 0 else 0
    stop = (end + CUT - 1) // CUT
    row = token.to(gl.int64) * HQ + head
    out_at, top_at, total_at = out_ptr + row * cuts * D + channel, top_ptr + row * cuts, total_ptr + row * cuts
    outs = gl.allocate_shared_memory(gl.float32, [PARTS * PART, 1, CHANNELS], _PLAIN)
    factors = gl.allocate_shared_memory(gl.float32, [MANY, 1, 4], _PLAIN)
    out, total = gl.zeros([CHANNELS], gl.float32, _ROW), gl.zeros([CHANNELS], gl.float32, _ROW)
    highest = float("-inf")
    follow(OVERLAP)
    before, tops, totals = _load_tops(top_at, total_at, first, first, stop)
    for slot in gl.static_range(PARTS):
        _copy_part(out_at, outs, first + slot * PART, stop, slot, D)
    for i in range(first, stop, MANY):
        new = _store_factors(factors, before, tops, totals, highest)
        before, tops, totals = _load_tops(top_at, total_at, i + MANY, first, stop)
        for part in range(MANY // PART):
            async_copy.wait_group(PARTS - 1)
            sync()
            count = gl.minimum(gl.maximum(stop - i - part * PART, 0), PART)
            out, total = _walk(out, total, outs, factors, part % PARTS, part, count)
            sync()
            _copy_part(out_at, outs, i + (part + PARTS) * PART, stop, part % PARTS, D)
        if i + MANY < stop:
            highest = gl.max(new, 0)
    y = gl.where(total > 0, gl.div_rn(out, gl.where(total > 0, total, 1.0)), 0.0)
    gl.store(y_ptr + row * D + channel + gl.arange(0, CHANNELS, _ROW), y.to(y_ptr.dtype.element_ty))


def fits(y: Tensor, cuts: int) -> bool:
    """Return whether the kernel takes these, and is faster than the plain one: one token. y: [T, HQ, D]."""
    return y.shape[0] == 1 and cuts > FEWEST and not y.shape[2] % CHANNELS.value


def run(stored: list[Tensor], starts: Tensor, lengths: Tensor, y: Tensor, window: int, cuts: int, block: int) -> None:
    """Write to y what the stored results of cuts combine to, where `fits` is true. block: the constant BLOCK_B."""
    tokens, heads, dim = y.shape
    _fold_many_kernel[(tokens, heads, dim // CHANNELS.value)](
        *stored, starts, lengths, y, window, cuts, lengths.shape[0],
        HQ=heads, D=dim, BLOCK_B=block, CUT=cut_of(y.dtype), num_warps=1, enable_fp_fusion=False, **overlap(y),
    )  # fmt: skip
