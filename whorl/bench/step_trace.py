"""What a torch profiler's trace says of decode steps: which part of a layer each kernel is of, and how long it ran.

Parts are marked on the host while the model runs eagerly. On an accelerator a kernel belongs to the part in which it
was launched. A replayed graph has no launches of its own, but the same kernels in the same order: each takes the part
of its counterpart. On the host a part's time is that of its mark without the marks inside of it.
"""

import bisect
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MARK = "whorl part "  # what the names of marks begin with
STEP = "step"  # the mark around all
EXPERTS, SAMPLING, INPUTS, OTHER = "experts", "sampling", "inputs", "other"
HEAD = "head"
# Kernels of a mark that says too little, or of none, by a word of their names.
_KERNELS = {
    "gate_up": "experts gate/up",
    "_down_": "experts down",
    "combine": "experts combine",
    "_sort_": "experts sort",
    "_draw_": SAMPLING,
    "_top_": SAMPLING,
}
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Event = dict[str, Any]


class Kernel(NamedTuple):
    """us: from the end of the one before it, or from its own start where that is later: what it adds to the step."""

    name: str
    part: str
    us: float


class _Segment(NamedTuple):
    start: float
    end: float
    part: str


def segments(events: Iterable[Event]) -> list[_Segment]:
    """Time on the host by its innermost mark, in order."""
    marks = sorted(
        (e["ts"], -e["dur"], e["name"].removeprefix(MARK))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(MARK)
    )
    found: list[_Segment] = []
    open_marks: list[tuple[float, str]] = []  # ends and parts, the innermost last
    at = 0.0

    def until(time: float) -> None:
        nonlocal at
        if open_marks and time > at:
            found.append(_Segment(at, time, open_marks[-1][1]))
        at = max(at, time)

    for start, negative, part in marks:
        while open_marks and open_marks[-1][0] <= start:
            until(open_marks[-1][0])
            open_marks.pop()
        until(start)
        at = start
        open_marks.append((start - negative, part))
    while open_marks:
        until(open_marks[-1][0])
        open_marks.pop()
    return _around(found)


def _around(found: Sequence[_Segment]) -> list[_Segment]:
    """What a step does outside of all other marks: behind the head it samples, before anything it makes inputs."""
    named: list[_Segment] = []
    for i, each in enumerate(found):
        part = each.part
        if part == STEP:
            is_first = not named or each.start > named[-1].end
            before = INPUTS if is_first or (i and found[i - 1].part == STEP) else named[-1].part
            part = SAMPLING if before == HEAD else INPUTS if before == INPUTS else OTHER
        named.append(each._replace(part=part))
    return named


def host_parts(events: Sequence[Event]) -> list[Kernel]:
    """As `kernels`, of a run on the host: one entry for each stretch of a part."""
    return [Kernel(part, part, end - start) for start, end, part in segments(events)]


def num_calls(events: Sequence[Event]) -> dict[str, int]:
    """Operators of torch that each part called on the host, without those that they called themselves."""
    found: dict[str, int] = {}
    pieces = segments(events)
    starts = [piece.start for piece in pieces]
    end = 0.0
    for event in sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] < end:
            continue
        end = event["ts"] + event["dur"]
        part = _part_at(pieces, starts, event["ts"])
        found[part] = found.get(part, 0) + 1
    return found


def kernels(events: Sequence[Event]) -> list[Kernel]:
    """Those of a device in the order in which they ran, each with the part that launched it."""
    pieces = segments(events)
    starts = [piece.start for piece in pieces]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found, end = [], 0.0
    for event in sorted((e for e in events if e.get("cat") in _ON_DEVICE), key=lambda e: e["ts"]):
        time = launched.get(event.get("args", {}).get("correlation"))
        part = OTHER if time is None else _part_at(pieces, starts, time)
        stop = event["ts"] + event["dur"]
        found.append(Kernel(event["name"], _refined(event["name"], part), max(0.0, stop - max(end, event["ts"]))))
        end = max(end, stop)
    return found


def _part_at(pieces: Sequence[_Segment], starts: Sequence[float], time: float) -> str:
    i = bisect.bisect_right(starts, time) - 1
    return pieces[i].part if i >= 0 and time < pieces[i].end else OTHER


def _refined(name: str, part: str) -> str:
    if part not in (EXPERTS, OTHER, INPUTS):
        return part
    return next((known for word, known in _KERNELS.items() if word in name), part)


def as_launched(replayed: Sequence[Kernel], eager: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of a graph with the parts of those that were launched one by one; alike in order, or nearly."""
    names = [kernel.name for kernel in replayed], [kernel.name for kernel in eager]
    found = list(replayed)
    by_name = {kernel.name: kernel.part for kernel in eager}
    for i, kernel in enumerate(found):
        found[i] = kernel._replace(part=by_name.get(kernel.name, kernel.part))
    for match in difflib.SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
        for offset in range(match.size):
            at = match.a + offset
            found[at] = found[at]._replace(part=eager[match.b + offset].part)
    return found
