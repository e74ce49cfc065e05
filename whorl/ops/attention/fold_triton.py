# mypy: allow-untyped-defs
"""Combine stored results of cuts in order, as fast as the order allows.

The chain from cut to cut is one multiplication and one FMA: the factors of AHEAD cuts are computed at once, by a scan
of their highest scores, and the results of the next AHEAD cuts are loaded meanwhile.
"""

import triton
import triton.language as tl

from .cuts_triton import rescale_factors


@triton.jit
def fold_stored(
    out_ptr, top_ptr, total_ptr, at, first, stop, channels, D: tl.constexpr, AHEAD: tl.constexpr,
    highest=float("-inf"), weight=0.0,
):  # fmt: skip
    """Return the weighted values and the sums of weights of cuts `first` to `stop` (exclusive), for these channels.

    at: the row's cut 0 in top and total, and in out in units of D numbers. highest, weight: of the row's sink. The
    bits are those of `fold`, cut by cut.
    """
    out = tl.zeros(channels.shape, tl.float32)
    total = tl.zeros(channels.shape, tl.float32) + weight
    highest = tl.zeros((), tl.float32) + highest  # a tensor, as after a cut, also where it is the default
    before, tops, totals, outs = _load(out_ptr, top_ptr, total_ptr, at, first, first, stop, channels, D, AHEAD)
    for i in range(first, stop, AHEAD):
        new, keep, add = rescale_factors(tl.maximum(tl.associative_scan(before, 0, _higher), highest), tops)
        cut_totals, cut_outs = totals, outs
        before, tops, totals, outs = _load(
            out_ptr, top_ptr, total_ptr, at, i + AHEAD, first, stop, channels, D, AHEAD
        )  # fmt: skip
        for ahead in tl.static_range(AHEAD):
            index = tl.full(channels.shape, ahead, tl.int32)
            cut_keep, cut_add = tl.gather(keep, index, 0), tl.gather(add, index, 0)
            total = tl.fma(tl.gather(cut_totals, index, 0), cut_add, total * cut_keep)
            out = tl.fma(cut_outs[ahead], cut_add, out * cut_keep)
        highest = tl.max(new, 0)
    return out, total


@triton.jit
def _load(
    out_ptr, top_ptr, total_ptr, at, i, first, stop, channels, D: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Load the results of AHEAD cuts from cut i on, and the highest score of the cut before each; none past `stop`."""
    index = i + tl.arange(0, AHEAD)
    is_real = index < stop
    before = tl.load(top_ptr + at + index - 1, mask=(index > first) & (index <= stop), other=float("-inf"))
    tops = tl.load(top_ptr + at + index, mask=is_real, other=float("-inf"))
    totals = tl.load(total_ptr + at + index, mask=is_real, other=0.0)
    outs = ()
    for ahead in tl.static_range(AHEAD):
        mask = (channels < D) & (i + ahead + tl.zeros(channels.shape, tl.int32) < stop)
        outs = outs + (tl.load(out_ptr + (at + i + ahead) * D + channels, mask=mask, other=0.0),)  # type: ignore[assignment]
    return before, tops, totals, outs


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b)
