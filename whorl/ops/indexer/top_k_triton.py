# mypy: allow-untyped-defs
"""Exact and deterministic selection of the k highest scores of a row, by radix search, without atomics.

The scores of a short row stay in registers while a threshold is built from its top bit down, in the total order of
floats, with one count per bit. A second pass over the row stores the scores above the threshold and as many equal ones
as are still missing, at positions given by a running count. A long row takes two rounds: the first reduces it to few
candidates, the second selects exactly; a row longer than one program handles is cut into pieces for the first round.
That round guesses the threshold from a sample of the row and one pass counts the scores that reach it; only when the
guess is wrong is the threshold built bit by bit, with one pass per bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from .._rows import ceil_div, power_of_2, unit_stride
from .bounds import full_bounds

# Longest piece of one program. Its counts fit 16 bits, and it is four times the largest topk, because a piece leaves
# twice topk candidates.
LONGEST = 32768
HELD = 8192  # longest row that stays in registers
PROGRAMS = 132  # multiprocessors of an H200
SAMPLE, RUN = 2048, 32  # scores in a sample, and how many of them are consecutive: one cache line


@triton.jit
def _score_at(bits):
    """Return the float at this uint32 position in the total order of floats; minus infinity for positions below it."""
    signed = bits.to(tl.int32, bitcast=True)
    score = (signed ^ tl.where(signed < 0, -2147483648, -1)).to(tl.float32, bitcast=True)
    return tl.where(bits > 8388607, score, float("-inf"))


@triton.jit
def _load(
    scores_ptr, positions_ptr, at, end, vector_end, start, stop, first, HAS_POSITIONS: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
):  # fmt: skip
    """Load the scores of the columns `at`: NaN becomes minus infinity, invisible keys become NaN."""
    inside = at < end
    scores = tl.load(scores_ptr + at, mask=at < vector_end, other=0.0)
    if IS_CHOSEN:  # positions_ptr: the indices of the first round's candidates, -1 for unused entries
        visible = inside & (tl.load(positions_ptr + at, mask=inside, other=-1) >= 0)
    elif HAS_POSITIONS:
        positions = tl.load(positions_ptr + at, mask=inside, other=0)
        visible = inside & (positions >= start) & (positions < stop)
    else:
        visible = inside & (first + at >= start)
    return tl.where(visible, tl.where(scores == scores, scores, float("-inf")), float("nan"))


@triton.jit
def _pack_counts(scores, edge):
    """Return counts to be summed: scores above the edge in the upper 16 bits, equal ones in the lower 16."""
    return ((scores > edge).to(tl.int32) << 16) | (scores == edge).to(tl.int32)


@triton.jit
def _store_chosen(
    scores, running, at, edge, missing, positions_ptr, indices_ptr, values_ptr, first, IS_CHOSEN: tl.constexpr
):  # fmt: skip
    """Store the scores above the edge and, until `missing` is used up, those equal to it.

    running: the packed counts of all columns before each score, which give its destination.
    """
    equals = running & 65535
    destination = (running >> 16) + tl.minimum(equals, missing)
    chosen = (scores > edge) | ((scores == edge) & (equals < missing))
    index = tl.load(positions_ptr + at, mask=chosen) if IS_CHOSEN else first + at
    tl.store(indices_ptr + destination, index, mask=chosen)
    tl.store(values_ptr + destination, scores, mask=chosen)


@triton.jit
def _threshold(row_scores, seen, needed, most, last_bit):
    """Build the highest threshold that at least `needed` of the row's scores reach.

    It is raised bit by bit, down to `last_bit`, and only while more than `most` scores reach it.
    """
    threshold, reached, bit = tl.zeros((), tl.uint32), seen, tl.full((), 2147483648, tl.uint32)
    while (bit > last_bit) & (reached > most):
        count = tl.sum((row_scores >= _score_at(threshold | bit)).to(tl.int32), 0)
        is_enough = count >= needed
        threshold = tl.where(is_enough, threshold | bit, threshold)
        reached = tl.where(is_enough, count, reached)
        bit = bit >> 1
    return threshold, reached


@triton.jit
def _count(
    edge, scores_ptr, positions_ptr, end, vector_end, start, stop, first, HAS_POSITIONS: tl.constexpr,
    IS_CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the scores that the query sees, those of them that reach the edge, and those above it."""
    seen, reached, above = (tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32))
    for tile in range(0, end, BLOCK):
        at = tile + tl.arange(0, BLOCK)
        scores = _load(scores_ptr, positions_ptr, at, end, vector_end, start, stop, first, HAS_POSITIONS, IS_CHOSEN)
        seen += (scores == scores).to(tl.int32)
        reached += (scores >= edge).to(tl.int32)
        above += (scores > edge).to(tl.int32)
    return tl.sum(seen, 0), tl.sum(reached, 0), tl.sum(above, 0)


@triton.jit
def _sampled_threshold(
    scores_ptr, positions_ptr, end, vector_end, start, stop, first, K, most, HAS_POSITIONS: tl.constexpr,
    IS_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Return a threshold that K to `most` scores reach, or more if at most `most` are strictly above it."""
    columns = tl.arange(0, BLOCK)
    step = tl.cdiv(tl.cdiv(end, BLOCK // RUN), RUN) * RUN
    sample_columns = columns // RUN * step + columns % RUN
    sample = _load(
        scores_ptr, positions_ptr, sample_columns, end, vector_end, start, stop, first, HAS_POSITIONS, IS_CHOSEN
    )
    sampled = tl.sum((sample == sample).to(tl.int32), 0)
    # Aim between K and `most`, which is 2 K: a sample is off by a few percent. A threshold of 16 bits is fine enough.
    share = tl.sum((sample_columns < end).to(tl.int32), 0) / tl.maximum(end, 1).to(tl.float32)
    aim = tl.minimum((K * 1.4 * share).to(tl.int32) + 1, sampled)
    threshold, _unused = _threshold(sample, sampled, aim, aim + aim // 8, 32768)
    seen, reached, above = _count(
        _score_at(threshold), scores_ptr, positions_ptr, end, vector_end, start, stop, first, HAS_POSITIONS, IS_CHOSEN,
        BLOCK,
    )  # fmt: skip
    needed = tl.minimum(seen, K)
    if (reached < needed) | (above > most):
        threshold, bit = tl.zeros((), tl.uint32), tl.full((), 2147483648, tl.uint32)
        seen, reached, above = _count(
            _score_at(threshold), scores_ptr, positions_ptr, end, vector_end, start, stop, first, HAS_POSITIONS,
            IS_CHOSEN, BLOCK,
        )  # fmt: skip
        while (bit != 0) & (reached > most):
            higher = threshold | bit
            seen, count, over = _count(
                _score_at(higher), scores_ptr, positions_ptr, end, vector_end, start, stop, first, HAS_POSITIONS,
                IS_CHOSEN, BLOCK,
            )  # fmt: skip
            is_enough = count >= needed
            threshold, reached = tl.where(is_enough, higher, threshold), tl.where(is_enough, count, reached)
            above = tl.where(is_enough, over, above)
            bit = bit >> 1
    return threshold, reached, needed, above


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
    CAPACITY,
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
    """Select at least the K highest, at most CAPACITY, of one piece of a row: columns [first, first + LENGTH)."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, stop = tl.load(starts_ptr + row), tl.load(ends_ptr + row)
    first = piece * LENGTH
    end = tl.minimum(S - first, LENGTH)
    if not (HAS_POSITIONS or IS_CHOSEN):
        end = tl.maximum(tl.minimum(end, stop - first), 0)
    vector_end = tl.minimum((end + 3) // 4 * 4, S - first)  # rounded up to vectors of 16 bytes
    scores_ptr += row * scores_stride + first
    positions_ptr += row * scores_stride + first if IS_CHOSEN else first
    indices_ptr += (row * tl.num_programs(1) + piece) * CAPACITY
    values_ptr += (row * tl.num_programs(1) + piece) * CAPACITY

    if IS_SAMPLED:
        threshold, reached, needed, above = _sampled_threshold(
            scores_ptr, positions_ptr, end, vector_end, start, stop, first, K, CAPACITY, HAS_POSITIONS, IS_CHOSEN,
            BLOCK, RUN,
        )  # fmt: skip
    else:
        columns = tl.arange(0, BLOCK)
        row_scores = _load(
            scores_ptr, positions_ptr, columns, end, vector_end, start, stop, first, HAS_POSITIONS, IS_CHOSEN
        )
        seen = tl.sum((row_scores == row_scores).to(tl.int32), 0)
        needed = tl.minimum(seen, K)
        threshold, reached = _threshold(row_scores, seen, needed, CAPACITY, 0)
        above = tl.sum((row_scores > _score_at(threshold)).to(tl.int32), 0)
    edge = _score_at(threshold)
    num_chosen = tl.where(reached > CAPACITY, tl.maximum(needed, above), reached)
    missing = num_chosen - above

    # A thread holds four neighbouring scores, a warp LANES such groups: one line, counted without a barrier. Each of
    # the four is stored as a separate tensor: as one tensor they would first be moved between threads.
    lanes = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    four = tl.arange(0, ROWS)[:, None] * (4 * LANES) + tl.arange(0, 4 * LANES)[None, :]
    before = tl.zeros((), tl.int32)  # packed counts of the columns so far
    for tile in range(0, end, ROWS * LANES * 4):
        scores = _load(
            scores_ptr, positions_ptr, tile + four, end, vector_end, start, stop, first, HAS_POSITIONS, IS_CHOSEN
        )  # fmt: skip
        even, odd = tl.split(tl.reshape(scores, (ROWS, LANES, 2, 2)))
        score_0, score_2 = tl.split(even)
        score_1, score_3 = tl.split(odd)
        count_0, count_1, count_2 = (
            _pack_counts(score_0, edge),
            _pack_counts(score_1, edge),
            _pack_counts(score_2, edge),
        )
        in_lane = count_0 + count_1 + count_2 + _pack_counts(score_3, edge)
        in_line = tl.sum(in_lane, 1)
        running = tl.cumsum(in_lane, 1) - in_lane + (before + tl.cumsum(in_line, 0) - in_line)[:, None]
        at = tile + lanes * 4
        _store_chosen(score_0, running, at, edge, missing, positions_ptr, indices_ptr, values_ptr, first, IS_CHOSEN)
        running += count_0
        _store_chosen(score_1, running, at + 1, edge, missing, positions_ptr, indices_ptr, values_ptr, first, IS_CHOSEN)
        running += count_1
        _store_chosen(score_2, running, at + 2, edge, missing, positions_ptr, indices_ptr, values_ptr, first, IS_CHOSEN)
        running += count_2
        _store_chosen(score_3, running, at + 3, edge, missing, positions_ptr, indices_ptr, values_ptr, first, IS_CHOSEN)
        before += tl.sum(in_line, 0)
    for tail in range(num_chosen // TAIL * TAIL, CAPACITY, TAIL):
        unused = tail + tl.arange(0, TAIL)
        is_unused = (unused >= num_chosen) & (unused < CAPACITY)
        tl.store(indices_ptr + unused, tl.full((TAIL,), -1, tl.int32), mask=is_unused)
        tl.store(values_ptr + unused, tl.zeros((TAIL,), tl.float32), mask=is_unused)


def select(
    scores: Tensor, starts: Tensor, ends: Tensor, key_positions: Tensor | None, indices: Tensor, values: Tensor
) -> None:
    """Select from `scores` [T, S], unit stride along S, into `indices` and `values` [T, K], contiguous."""
    if not indices.numel():
        return
    if not scores.shape[1]:
        indices.fill_(-1)
        values.zero_()
        return
    topk, positions, is_chosen = indices.shape[1], key_positions, False
    while True:
        piece, capacity, most = _round_sizes(scores.shape[0], scores.shape[1], topk)
        if scores.shape[1] <= most:
            break
        pieces = ceil_div(scores.shape[1], piece)
        shape = (scores.shape[0], pieces * capacity)
        candidates, candidate_scores = indices.new_empty(shape), values.new_empty(shape)
        _launch(scores, starts, ends, positions, candidates, candidate_scores, topk, piece, is_chosen)
        positions, scores, is_chosen = candidates, candidate_scores, True
    _launch(scores, starts, ends, positions, indices, values, topk, scores.shape[1], is_chosen)


def _round_sizes(rows: int, width: int, topk: int) -> tuple[int, int, int]:
    """Return the length of a round's pieces, the candidates that each leaves, and the longest row of the last round.

    With few rows pieces are as short as fits the registers: more programs share a row, and each selects exactly.
    """
    if rows * ceil_div(width, LONGEST) < PROGRAMS and 4 * topk <= HELD:
        return HELD, topk, HELD
    capacity = 2 * max(topk, 256)
    return LONGEST, capacity, max(capacity, min(LONGEST, HELD, 4 * capacity))


def _launch(
    scores: Tensor,
    starts: Tensor,
    ends: Tensor,
    positions: Tensor | None,
    indices: Tensor,
    values: Tensor,
    topk: int,
    piece: int,
    is_chosen: bool,
) -> None:
    """Select candidates from every piece of the rows, or from whole rows if a piece is a row."""
    width = scores.shape[1]
    pieces = ceil_div(width, piece)
    capacity = indices.shape[1] // pieces
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
        capacity,
        min(width, piece),
        HAS_POSITIONS=positions is not None,
        IS_CHOSEN=is_chosen,
        RUN=RUN,
        **_plan(max(16, power_of_2(min(width, piece))), is_exact=capacity == topk),
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
    scores = unit_stride(scores)
    starts, ends = full_bounds(scores.shape[0], scores.shape[1], starts, ends, scores.device)
    indices = scores.new_empty(scores.shape[0], topk, dtype=torch.int32)
    values = scores.new_empty(scores.shape[0], topk)
    key_positions = None if key_positions is None else key_positions.contiguous()
    select(scores, starts.contiguous(), ends.contiguous(), key_positions, indices, values)
    return indices, values
