"""Reads a torch profiler trace of decode steps: the part of a layer that each kernel belongs to, and its time.

Parts are marked on the host while the model runs eagerly. On an accelerator a kernel belongs to the part that launched
it. A replayed graph shows no launches, but runs the same kernels in the same order, so each gets the part of its
eager counterpart. On the host the time of a part is that of its mark without the marks nested in it.
"""

import bisect
import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MARK = "whorl part "  # prefix of the names of marks
STEP = "step"  # the mark around a whole step
EXPERTS, SAMPLING, INPUTS, OTHER = "experts", "sampling", "inputs", "other"
HEAD = "head"
# Parts of kernels whose mark is too coarse or missing, by a word in the name of the kernel.
_KERNELS = {
    "gate_up": "experts gate/up",
    "_down_": "experts down",
    "combine": "experts combine",
    "_sort_": "experts sort",
    "_fold_": "attention",  # a recorded step combines cuts, an eager one may have a single one
    "_draw_": SAMPLING,
    "_top_": SAMPLING,
}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Event = dict[str, Any]


class Kernel(NamedTuple):
    """A kernel. us: what it adds to the step, from the end of the previous kernel or its own start, if later."""

    name: str
    part: str
    us: float


class _Segment(NamedTuple):
    """A stretch of host time that belongs to one part."""

    start: float
    end: float
    part: str


def segments(events: Iterable[Event]) -> list[_Segment]:
    """Return the stretches of host time that are inside marks, in order, each with the part of its innermost mark."""
    marks = sorted(  # the negative duration puts a mark before those that are nested in it
        (e["ts"], -e["dur"], e["name"].removeprefix(MARK))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(MARK)
    )
    result: list[_Segment] = []
    open_marks: list[tuple[float, str]] = []  # ends and parts, the innermost last
    at = 0.0

    def until(time: float) -> None:
        nonlocal at
        if open_marks and time > at:
            result.append(_Segment(at, time, open_marks[-1][1]))
        at = max(at, time)

    for start, negative_duration, part in marks:
        while open_marks and open_marks[-1][0] <= start:
            until(open_marks[-1][0])
            open_marks.pop()
        until(start)
        at = start
        open_marks.append((start - negative_duration, part))
    while open_marks:
        until(open_marks[-1][0])
        open_marks.pop()
    return _name_unmarked(result)


def _name_unmarked(marked: Sequence[_Segment]) -> list[_Segment]:
    """Name the parts of a step outside of other marks: sampling after the head, inputs at the beginning, else other."""
    named: list[_Segment] = []
    for i, segment in enumerate(marked):
        part = segment.part
        if part == STEP:
            is_first = not named or segment.start > named[-1].end
            before = INPUTS if is_first or (i and marked[i - 1].part == STEP) else named[-1].part
            part = SAMPLING if before == HEAD else INPUTS if before == INPUTS else OTHER
        named.append(segment._replace(part=part))
    return named


def host_parts(events: Sequence[Event]) -> list[Kernel]:
    """Return the same as `kernels` for a run on the host: one entry for each stretch of a part."""
    return [Kernel(part, part, end - start) for start, end, part in segments(events)]


def num_calls(events: Sequence[Event]) -> Counter[str]:
    """Return how many torch operators each part called on the host, without operators called by operators."""
    counts: Counter[str] = Counter()
    marked = segments(events)
    starts = [segment.start for segment in marked]
    end = 0.0
    for event in sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] < end:
            continue
        end = event["ts"] + event["dur"]
        counts[_part_at(marked, starts, event["ts"])] += 1
    return counts


def kernels(events: Sequence[Event]) -> list[Kernel]:
    """Return the kernels of an accelerator in the order in which they ran, each with the part that launched it."""
    marked = segments(events)
    starts = [segment.start for segment in marked]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    result, end = [], 0.0
    for event in sorted((e for e in events if e.get("cat") in _ON_DEVICE), key=lambda e: e["ts"]):
        time = launched.get(event.get("args", {}).get("correlation"))
        part = OTHER if time is None else _part_at(marked, starts, time)
        stop = event["ts"] + event["dur"]
        result.append(Kernel(event["name"], _refined(event["name"], part), max(0.0, stop - max(end, event["ts"]))))
        end = max(end, stop)
    return result


def _part_at(marked: Sequence[_Segment], starts: Sequence[float], time: float) -> str:
    i = bisect.bisect_right(starts, time) - 1
    return marked[i].part if i >= 0 and time < marked[i].end else OTHER


def _refined(name: str, part: str) -> str:
    """Return the part of a kernel by its name where its mark is too coarse or missing, else the part of its mark."""
    if part not in (EXPERTS, OTHER, INPUTS):
        return part
    return next((known for word, known in _KERNELS.items() if word in name), part)


def with_eager_parts(replayed: Sequence[Kernel], eager: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels of a replayed graph with the parts of the eager ones, whose order is the same or nearly so."""
    names = [kernel.name for kernel in replayed], [kernel.name for kernel in eager]
    named = list(replayed)
    by_name = {kernel.name: kernel.part for kernel in eager}  # for kernels that the alignment below does not match
    for i, kernel in enumerate(named):
        named[i] = kernel._replace(part=by_name.get(kernel.name, kernel.part))
    for match in difflib.SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
        for offset in range(match.size):
            at = match.a + offset
            named[at] = named[at]._replace(part=eager[match.b + offset].part)
    return named
