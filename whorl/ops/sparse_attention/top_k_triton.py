"""Exact selection of the k highest in a row, by the bits of their order: no atomics, no dependence on chance.

A row's scores become integers of the same order and stay in registers while the k-th highest is built from its top
bit down, one count a bit. A second reading writes what lies above it, and as many equals as are missing, by a running
count. Rows longer than one program holds are cut; the chosen of the pieces are chosen from again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._rows import ceil_div, power_of_2

LONGEST = 32768  # of one program: 32 scores for each of 1024 threads; counts of it fit 16 bits
MOST = LONGEST // 2  # chosen: pieces must shrink


@triton.jit
def _ordered(scores, visible):
    """uint32 in the order of the scores; 0 where not visible. -0.0 is 0.0, NaN is minus infinity."""
    scores = tl.where(scores == scores, scores, float("-inf"))
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    flipped = bits ^ tl.where(bits < 0, -1, -2147483648)
    return tl.where(visible, flipped, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _load(
    scores_ptr, positions_ptr, at, end, whole, start, stop, first, HAS_POSITIONS: tl.constexpr, IS_CHOSEN: tl.constexpr
):  # fmt: skip
    """Scores of the columns `at`, and which of them the query sees."""
    inside = at < end
    scores = tl.load(scores_ptr + at, mask=at < whole, other=0.0)
    if IS_CHOSEN:  # positions_ptr: the indices that were chosen from the pieces, -1 where there was none
        visible = inside & (tl.load(positions_ptr + at, mask=inside, other=-1) >= 0)
    elif HAS_POSITIONS:
        positions = tl.load(positions_ptr + at, mask=inside, other=0)
        visible = inside & (positions >= start) & (positions < stop)
    else:
        visible = inside & (first + at >= start) & (first + at < stop)
    return scores, visible


@triton.jit
def _top_k_kernel(
    scores_ptr,
    starts_ptr,
    ends_ptr,
    positions_ptr,
    indices_ptr,
    values_ptr,
    scores_stride,
    S,
    K,
    LENGTH,
    HAS_POSITIONS: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One piece of one row: columns [first, first + LENGTH) of the S."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, stop = tl.load(starts_ptr + row), tl.load(ends_ptr + row)
    first = piece * LENGTH
    end = tl.minimum(S - first, LENGTH)
    if not (HAS_POSITIONS or IS_CHOSEN):
        end = tl.maximum(tl.minimum(end, stop - first), 0)
    whole = tl.minimum((end + 3) // 4 * 4, S - first)  # whole vectors of 16 bytes
    scores_ptr += row * scores_stride + first
    positions_ptr += row * scores_stride + first if IS_CHOSEN else first
    indices_ptr += (row * tl.num_programs(1) + piece) * K
    values_ptr += (row * tl.num_programs(1) + piece) * K

    columns = tl.arange(0, BLOCK)
    found, visible = _load(scores_ptr, positions_ptr, columns, end, whole, start, stop, first, HAS_POSITIONS, IS_CHOSEN)
    row_bits = _ordered(found, visible)
    seen = tl.sum(visible.to(tl.int32), 0)
    wanted = tl.minimum(seen, K)
    # The largest threshold that at least `wanted` reach. A query that sees no more than K keys takes all: none needed.
    threshold, reached, bit = tl.zeros((), tl.uint32), seen, tl.full((), 2147483648, tl.uint32)
    while (bit != 0) & (reached != wanted):
        candidate = threshold | bit
        count = tl.sum((row_bits >= candidate).to(tl.int32), 0)
        is_enough = count >= wanted
        threshold = tl.where(is_enough, candidate, threshold)
        reached = tl.where(is_enough, count, reached)
        bit = bit >> 1
    missing = wanted - tl.sum((row_bits > threshold).to(tl.int32), 0)

    before = tl.zeros((), tl.int32)  # in the columns so far: above the threshold << 16 | equal to it
    for tile in range(0, end, TILE):
        at = tile + tl.arange(0, TILE)
        scores, shown = _load(scores_ptr, positions_ptr, at, end, whole, start, stop, first, HAS_POSITIONS, IS_CHOSEN)
        ordered = _ordered(scores, shown)
        above, equal = ordered > threshold, ordered == threshold
        counted = (above.to(tl.int32) << 16) | equal.to(tl.int32)
        running = before + tl.cumsum(counted, 0) - counted
        equals = running & 65535
        slot = (running >> 16) + tl.minimum(equals, missing)
        chosen = above | (equal & (equals < missing))
        index = tl.load(positions_ptr + at, mask=chosen) if IS_CHOSEN else first + at
        tl.store(indices_ptr + slot, index, mask=chosen)
        tl.store(values_ptr + slot, scores, mask=chosen)
        before += tl.sum(counted, 0)
    for tail in range(wanted // TAIL * TAIL, K, TAIL):
        left = tail + tl.arange(0, TAIL)
        is_left = (left >= wanted) & (left < K)
        tl.store(indices_ptr + left, tl.full((TAIL,), -1, tl.int32), mask=is_left)
        tl.store(values_ptr + left, tl.zeros((TAIL,), tl.float32), mask=is_left)


def select(
    scores: Tensor, starts: Tensor, ends: Tensor, key_positions: Tensor | None, indices: Tensor, values: Tensor
) -> None:
    """Write the chosen of `scores` [T, S], unit stride along S, into `indices` and `values` [T, K], contiguous."""
    num_rows, width = scores.shape
    if not indices.numel():
        return
    if not width:
        indices.fill_(-1), values.zero_()
        return
    positions, is_chosen = key_positions, False
    while True:
        pieces = ceil_div(width, LONGEST)
        if pieces == 1:
            to = (indices, values)
        else:
            to = tuple(x.new_empty(num_rows, pieces * indices.shape[1]) for x in (indices, values))
        block = max(16, power_of_2(min(width, LONGEST)))
        _top_k_kernel[(num_rows, pieces)](
            scores,
            starts,
            ends,
            ends if positions is None else positions,
            *to,
            scores.stride(0),
            width,
            indices.shape[1],
            min(width, LONGEST),
            HAS_POSITIONS=positions is not None,
            IS_CHOSEN=is_chosen,
            **_plan(block),
        )
        if pieces == 1:
            return
        (positions, scores), is_chosen = to, True
        width = scores.shape[1]


def _plan(block: int) -> dict[str, int]:
    if is_interpreting():
        return {"BLOCK": block, "TILE": min(block, 64), "TAIL": 64}
    warps = min(32, max(4, block // 1024))
    return {"BLOCK": block, "TILE": min(block, 128 * warps), "TAIL": 1024, "num_warps": warps}


def forward(
    scores: Tensor, topk: int, starts: Tensor | None, ends: Tensor | None, key_positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    from .indexer import full_bounds

    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    starts, ends = full_bounds(*scores.shape, starts, ends, scores.device)
    indices = scores.new_empty(scores.shape[0], topk, dtype=torch.int32)
    values = scores.new_empty(scores.shape[0], topk)
    key_positions = None if key_positions is None else key_positions.contiguous()
    select(scores, starts.contiguous(), ends.contiguous(), key_positions, indices, values)
    return indices, values
