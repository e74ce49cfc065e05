# mypy: allow-untyped-defs
"""Exact selection of the k highest in a row, by the bits of their order: no atomics, no dependence on chance.

A short row's scores stay in registers while a threshold is built, from the top bit of its place in the order of all
floats down, one count a bit. A second reading writes what lies above it, and as many equals as are missing, by a
running count. A long row goes through twice: first only until few enough are left, then exactly; one longer than a
program takes is cut into pieces for the first round. In that round the threshold is guessed from a sample of the row
and one reading counts what reaches it; only where the guess is wrong is it built bit by bit, a reading each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._rows import ceil_div, power_of_2
from .bounds import full_bounds

LONGEST = (
    32768  # of one program: counts of it fit 16 bits; four times what may be chosen, as twice that is left of a piece
)
HELD = 8192  # longest row that is held in registers
SAMPLE, RUN = 2048, 32  # scores in a sample, and neighbours among them: a whole line of memory


@triton.jit
def _score_of(bits):
    """The float at this place of the order of all floats, as uint32; minus infinity for those below it."""
    signed = bits.to(tl.int32, bitcast=True)
    score = (signed ^ tl.where(signed < 0, -2147483648, -1)).to(tl.float32, bitcast=True)
    return tl.where(bits > 8388607, score, float("-inf"))


@triton.jit
def _load(
    scores_ptr, positions_ptr, at, end, whole, start, stop, first, HAS_POSITIONS: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
):  # fmt: skip
    """Scores of the columns `at`: minus infinity where they are NaN, NaN where the query does not see them."""
    inside = at < end
    scores = tl.load(scores_ptr + at, mask=at < whole, other=0.0)
    if IS_CHOSEN:  # positions_ptr: the indices that were left of the pieces, -1 where there was none
        visible = inside & (tl.load(positions_ptr + at, mask=inside, other=-1) >= 0)
    elif HAS_POSITIONS:
        positions = tl.load(positions_ptr + at, mask=inside, other=0)
        visible = inside & (positions >= start) & (positions < stop)
    else:
        visible = inside & (first + at >= start)
    return tl.where(visible, tl.where(scores == scores, scores, float("-inf")), float("nan"))


@triton.jit
def _counted(scores, edge):
    return ((scores > edge).to(tl.int32) << 16) | (scores == edge).to(tl.int32)


@triton.jit
def _put(
    scores, running, at, edge, missing, positions_ptr, indices_ptr, values_ptr, first, IS_CHOSEN: tl.constexpr
):  # fmt: skip
    """Write what is above the edge, and of its equals those still missing, after the `running` counts before each."""
    equals = running & 65535
    slot = (running >> 16) + tl.minimum(equals, missing)
    chosen = (scores > edge) | ((scores == edge) & (equals < missing))
    index = tl.load(positions_ptr + at, mask=chosen) if IS_CHOSEN else first + at
    tl.store(indices_ptr + slot, index, mask=chosen)
    tl.store(values_ptr + slot, scores, mask=chosen)


@triton.jit
def _threshold(held, seen, wanted, most, last_bit):
    """As high as at least `wanted` of the held reach; raised bit by bit, down to `last_bit`, while over `most` do."""
    threshold, reached, bit = tl.zeros((), tl.uint32), seen, tl.full((), 2147483648, tl.uint32)
    while (bit > last_bit) & (reached > most):
        count = tl.sum((held >= _score_of(threshold | bit)).to(tl.int32), 0)
        is_enough = count >= wanted
        threshold = tl.where(is_enough, threshold | bit, threshold)
        reached = tl.where(is_enough, count, reached)
        bit = bit >> 1
    return threshold, reached


@triton.jit
def _count(
    edge, scores_ptr, positions_ptr, end, whole, start, stop, first, HAS_POSITIONS: tl.constexpr,
    IS_CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many the query sees, of those how many reach the edge, and how many are above it."""
    seen, reached, above = (tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32))
    for tile in range(0, end, BLOCK):
        at = tile + tl.arange(0, BLOCK)
        scores = _load(scores_ptr, positions_ptr, at, end, whole, start, stop, first, HAS_POSITIONS, IS_CHOSEN)
        seen += (scores == scores).to(tl.int32)
        reached += (scores >= edge).to(tl.int32)
        above += (scores > edge).to(tl.int32)
    return tl.sum(seen, 0), tl.sum(reached, 0), tl.sum(above, 0)


@triton.jit
def _sampled_threshold(
    scores_ptr, positions_ptr, end, whole, start, stop, first, K, most, HAS_POSITIONS: tl.constexpr,
    IS_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A threshold that between K and `most` reach, or more of which no more than `most` are above it."""
    columns = tl.arange(0, BLOCK)
    step = tl.cdiv(tl.cdiv(end, BLOCK // RUN), RUN) * RUN
    spread = columns // RUN * step + columns % RUN
    sample = _load(scores_ptr, positions_ptr, spread, end, whole, start, stop, first, HAS_POSITIONS, IS_CHOSEN)
    sampled = tl.sum((sample == sample).to(tl.int32), 0)
    # Between K and `most`, which is 2 K: a sample is off by a few in a hundred. Sixteen bits are fine enough.
    share = tl.sum((spread < end).to(tl.int32), 0) / tl.maximum(end, 1).to(tl.float32)
    aim = tl.minimum((K * 1.4 * share).to(tl.int32) + 1, sampled)
    threshold, _unused = _threshold(sample, sampled, aim, aim + aim // 8, 32768)
    seen, reached, above = _count(
        _score_of(threshold), scores_ptr, positions_ptr, end, whole, start, stop, first, HAS_POSITIONS, IS_CHOSEN, BLOCK
    )  # fmt: skip
    wanted = tl.minimum(seen, K)
    if (reached < wanted) | (above > most):
        threshold, bit = tl.zeros((), tl.uint32), tl.full((), 2147483648, tl.uint32)
        seen, reached, above = _count(
            _score_of(threshold), scores_ptr, positions_ptr, end, whole, start, stop, first, HAS_POSITIONS,
            IS_CHOSEN, BLOCK,
        )  # fmt: skip
        while (bit != 0) & (reached > most):
            higher = threshold | bit
            seen, count, over = _count(
                _score_of(higher), scores_ptr, positions_ptr, end, whole, start, stop, first, HAS_POSITIONS,
                IS_CHOSEN, BLOCK,
            )  # fmt: skip
            is_enough = count >= wanted
            threshold, reached = tl.where(is_enough, higher, threshold), tl.where(is_enough, count, reached)
            above = tl.where(is_enough, over, above)
            bit = bit >> 1
    return threshold, reached, wanted, above


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
    SLOTS,
    LENGTH,
    HAS_POSITIONS: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One piece of one row, columns [first, first + LENGTH) of the S: at least its K highest, at most SLOTS."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, stop = tl.load(starts_ptr + row), tl.load(ends_ptr + row)
    first = piece * LENGTH
    end = tl.minimum(S - first, LENGTH)
    if not (HAS_POSITIONS or IS_CHOSEN):
        end = tl.maximum(tl.minimum(end, stop - first), 0)
    whole = tl.minimum((end + 3) // 4 * 4, S - first)  # whole vectors of 16 bytes
    scores_ptr += row * scores_stride + first
    positions_ptr += row * scores_stride + first if IS_CHOSEN else first
    indices_ptr += (row * tl.num_programs(1) + piece) * SLOTS
    values_ptr += (row * tl.num_programs(1) + piece) * SLOTS

    if IS_SAMPLED:
        threshold, reached, wanted, above = _sampled_threshold(
            scores_ptr, positions_ptr, end, whole, start, stop, first, K, SLOTS, HAS_POSITIONS, IS_CHOSEN, BLOCK, RUN
        )  # fmt: skip
    else:
        columns = tl.arange(0, BLOCK)
        held = _load(scores_ptr, positions_ptr, columns, end, whole, start, stop, first, HAS_POSITIONS, IS_CHOSEN)
        seen = tl.sum((held == held).to(tl.int32), 0)
        wanted = tl.minimum(seen, K)
        threshold, reached = _threshold(held, seen, wanted, SLOTS, 0)
        above = tl.sum((held > _score_of(threshold)).to(tl.int32), 0)
    edge = _score_of(threshold)
    taken = tl.where(reached > SLOTS, tl.maximum(wanted, above), reached)
    missing = taken - above

    # Four neighbours lie in one thread, LANES of those in a warp: a line, counted without a barrier. Each of the four
    # is stored as a tensor of its own: as one tensor they would be moved between threads first.
    lanes = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    four = tl.arange(0, ROWS)[:, None] * (4 * LANES) + tl.arange(0, 4 * LANES)[None, :]
    before = tl.zeros((), tl.int32)  # in the columns so far: above the edge << 16 | equal to it
    for tile in range(0, end, ROWS * LANES * 4):
        scores = _load(
            scores_ptr, positions_ptr, tile + four, end, whole, start, stop, first, HAS_POSITIONS, IS_CHOSEN
        )  # fmt: skip
        even, odd = tl.split(tl.reshape(scores, (ROWS, LANES, 2, 2)))
        score_0, score_2 = tl.split(even)
        score_1, score_3 = tl.split(odd)
        count_0, count_1, count_2 = _counted(score_0, edge), _counted(score_1, edge), _counted(score_2, edge)
        in_lane = count_0 + count_1 + count_2 + _counted(score_3, edge)
        in_line = tl.sum(in_lane, 1)
        running = tl.cumsum(in_lane, 1) - in_lane + (before + tl.cumsum(in_line, 0) - in_line)[:, None]
        at = tile + lanes * 4
        _put(score_0, running, at, edge, missing, positions_ptr, indices_ptr, values_ptr, first, IS_CHOSEN)
        running += count_0
        _put(score_1, running, at + 1, edge, missing, positions_ptr, indices_ptr, values_ptr, first, IS_CHOSEN)
        running += count_1
        _put(score_2, running, at + 2, edge, missing, positions_ptr, indices_ptr, values_ptr, first, IS_CHOSEN)
        running += count_2
        _put(score_3, running, at + 3, edge, missing, positions_ptr, indices_ptr, values_ptr, first, IS_CHOSEN)
        before += tl.sum(in_line, 0)
    for tail in range(taken // TAIL * TAIL, SLOTS, TAIL):
        left = tail + tl.arange(0, TAIL)
        is_left = (left >= taken) & (left < SLOTS)
        tl.store(indices_ptr + left, tl.full((TAIL,), -1, tl.int32), mask=is_left)
        tl.store(values_ptr + left, tl.zeros((TAIL,), tl.float32), mask=is_left)


def select(
    scores: Tensor, starts: Tensor, ends: Tensor, key_positions: Tensor | None, indices: Tensor, values: Tensor
) -> None:
    """Write the chosen of `scores` [T, S], unit stride along S, into `indices` and `values` [T, K], contiguous."""
    if not indices.numel():
        return
    if not scores.shape[1]:
        indices.fill_(-1)
        values.zero_()
        return
    topk, positions, is_chosen = indices.shape[1], key_positions, False
    slots = 2 * max(topk, 256)
    while scores.shape[1] > max(slots, min(LONGEST, HELD, 4 * slots)):
        pieces = ceil_div(scores.shape[1], LONGEST)
        shape = (scores.shape[0], pieces * slots)
        left, left_scores = indices.new_empty(shape), values.new_empty(shape)
        _launch(scores, starts, ends, positions, left, left_scores, topk, pieces, is_chosen)
        positions, scores, is_chosen = left, left_scores, True
    _launch(scores, starts, ends, positions, indices, values, topk, 1, is_chosen)


def _launch(
    scores: Tensor,
    starts: Tensor,
    ends: Tensor,
    positions: Tensor | None,
    indices: Tensor,
    values: Tensor,
    topk: int,
    pieces: int,
    is_chosen: bool,
) -> None:
    width, slots = scores.shape[1], indices.shape[1] // pieces
    _top_k_kernel[(scores.shape[0], pieces)](
        scores,
        starts,
        ends,
        ends if positions is None else positions,
        indices,
        values,
        scores.stride(0),
        width,
        topk,
        slots,
        min(width, LONGEST),
        HAS_POSITIONS=positions is not None,
        IS_CHOSEN=is_chosen,
        RUN=RUN,
        **_plan(max(16, power_of_2(min(width, LONGEST))), is_exact=slots == topk),
    )


def _plan(block: int, is_exact: bool) -> dict[str, int]:
    is_sampled = block > HELD and not is_exact
    block = SAMPLE if is_sampled else block
    if is_interpreting():
        return {"IS_SAMPLED": is_sampled, "BLOCK": block, "ROWS": 4 if block <= 256 else 32, "LANES": 4, "TAIL": 64}
    warps = 16 if block > HELD else 4
    return {"IS_SAMPLED": is_sampled, "BLOCK": block, "ROWS": 16, "LANES": 32, "TAIL": 1024, "num_warps": warps}


def forward(
    scores: Tensor, topk: int, starts: Tensor | None, ends: Tensor | None, key_positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    starts, ends = full_bounds(scores.shape[0], scores.shape[1], starts, ends, scores.device)
    indices = scores.new_empty(scores.shape[0], topk, dtype=torch.int32)
    values = scores.new_empty(scores.shape[0], topk)
    key_positions = None if key_positions is None else key_positions.contiguous()
    select(scores, starts.contiguous(), ends.contiguous(), key_positions, indices, values)
    return indices, values
