"""The load that `whorl bench serve` sends is the one asked for, and its latencies are counted as they are defined."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whorl.bench.serve_record import Record, is_within, parse_slo, percentiles, summarize
from whorl.bench.serve_stream import PIECES, RUNNING, SPREAD, Answer, EventReader
from whorl.bench.workload import Lengths, Load, Workload, parse_sweep, read_trace

AT_ONCE = Load(kind="concurrency", value=2)
VOCABULARY = 5000


def workload(**changes: Any) -> Workload:
    return Workload(**({"input": Lengths(low=5, high=9), "output": Lengths(low=3, high=3), "count": 20} | changes))


# ---- the workload


def sent(requests: list[Any]) -> list[Any]:
    return [(request.prompt.tolist(), request.num_output, request.at) for request in requests]


def test_the_same_seed_is_the_same_workload() -> None:
    load = Load(kind="rate", value=3.0)
    made = sent(workload(seed=4).requests(load, VOCABULARY))
    assert made == sent(workload(seed=4).requests(load, VOCABULARY))
    other = sent(workload(seed=5).requests(load, VOCABULARY))
    assert [at for *_, at in made] != [at for *_, at in other]
    few, many = (
        sent(workload(count=None, seconds=2.0).requests(Load(kind="concurrency", value=value), VOCABULARY))
        for value in (1, 4)
    )
    assert few == many[: len(few)], "more requests begin with the same"


def test_points_of_a_sweep_have_the_same_lengths_and_other_tokens() -> None:
    """A server that keeps prefixes knows nothing of one point's prompts from another's, or from warming up."""
    configured = workload(shared_prefix=16)
    points = [configured.requests(AT_ONCE, VOCABULARY, point=point) for point in (0, 1)]
    warm = [configured.warmup(20, VOCABULARY, point=point) for point in (0, 1)]
    assert [r.num_output for r in points[0]] == [r.num_output for r in points[1]]
    assert [len(r.prompt) for r in points[0]] == [len(r.prompt) for r in points[1]] == [len(r.prompt) for r in warm[0]]
    starts = {tuple(r.prompt[:16]) for requests in (*points, *warm) for r in requests}
    assert len(starts) == 4
    assert max(request.index for request in warm[0]) < 0


def test_lengths() -> None:
    drawn = Lengths.parse("lognormal:400,0.5,1500", "--input").draw(np.random.default_rng(0), 50000)
    assert np.median(drawn) == pytest.approx(400, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.03)
    assert drawn.min() >= 1
    assert drawn.max() == 1500
    drawn = Lengths.parse("512:1536", "--input").draw(np.random.default_rng(0), 20000)
    assert (drawn.min(), drawn.max()) == (512, 1536)
    for wrong in ("", "0", "9:5", "a", "1:2:3", "lognormal:5", "lognormal:0,1", "lognormal:5,1,2,3"):
        with pytest.raises(ValueError, match=r"--output is .*, expected tokens from 1"):
            Lengths.parse(wrong, "--output")


def test_poisson_arrivals() -> None:
    """Gaps are exponential: mean and deviation are 1/rate, and 1 - 1/e of them are below it."""
    moments = [r.at for r in workload(count=8000, input=Lengths(low=1, high=1)).requests(Load(kind="rate", value=4), 9)]
    gaps = np.diff([0.0, *moments])  # type: ignore[list-item]
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.04)
    assert gaps.std() == pytest.approx(0.25, rel=0.06)
    assert (gaps < 0.25).mean() == pytest.approx(1 - 1 / math.e, abs=0.02)
    faster = workload(count=8000, input=Lengths(low=1, high=1)).requests(Load(kind="rate", value=8), 9)
    assert faster[-1].at == pytest.approx(moments[-1] / 2), "the same pattern, faster"  # type: ignore[operator]


def test_seconds_say_how_many() -> None:
    requests = workload(count=None, seconds=100.0).requests(Load(kind="rate", value=5), VOCABULARY)
    assert 400 < len(requests) < 600
    assert requests[-1].at is not None
    assert requests[-1].at < 100
    assert all(r.at == 0 for r in workload().requests(Load(kind="rate"), VOCABULARY)), "inf: all at once"
    with pytest.raises(ValueError, match="give --requests"):
        workload(count=None, seconds=100.0).requests(Load(kind="rate", value=1e4), VOCABULARY)


def test_shared_prefixes() -> None:
    requests = workload(count=200, shared_prefix=32, num_prefixes=3).requests(AT_ONCE, VOCABULARY)
    starts = [tuple(request.prompt[:32]) for request in requests]
    assert len(set(starts)) == 3
    assert min(starts.count(start) for start in set(starts)) > 40
    assert len({tuple(request.prompt[32:]) for request in requests}) == 200
    assert {len(request.prompt) - 32 for request in requests} == {5, 6, 7, 8, 9}, "the prefix comes on top"


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 2000, "input_length": 1030, "output_length": 3, "hash_ids": [7, 8, 10], "other": 1},
        {"timestamp": 500, "input_length": 1500, "output_length": 4, "hash_ids": [7, 8, 9]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    first, second = workload(count=None, trace=read_trace(path)).requests(Load(kind="trace"), VOCABULARY)
    assert (first.at, len(first.prompt), first.num_output) == (0.5, 1500, 4)
    assert (second.at, len(second.prompt), second.num_output) == (2.0, 1030, 3)
    assert np.array_equal(first.prompt[:1024], second.prompt[:1024])
    assert not np.array_equal(first.prompt[1024:1030], second.prompt[1024:1030])
    warm = workload(trace=read_trace(path)).warmup(5, VOCABULARY)
    assert [len(request.prompt) for request in warm] == [1500, 1030], "a trace has no more"
    assert not np.array_equal(warm[0].prompt[:512], first.prompt[:512])
    for wrong in ("", "{}", '{"input_length": 0, "output_length": 1}', '{"input_length": 1.5, "output_length": 1}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="--trace"):
            read_trace(path)


def test_sweeps() -> None:
    loads = [Load(kind="concurrency", value=1), Load(kind="concurrency", value=8)]
    assert parse_sweep("1,8") == parse_sweep("concurrency=1,8") == loads
    assert parse_sweep("rate=0.5") == [Load(kind="rate", value=0.5)]
    for wrong in ("", "0", "1.5", "speed=1", "rate=", "rate=-1"):
        with pytest.raises(ValueError, match="--sweep"):
            parse_sweep(wrong)


# ---- what is counted


def record(*arrivals: tuple[float, int], sent: float = 0.0, **more: Any) -> Record:
    count = sum(number for _, number in arrivals)
    end = arrivals[-1][0] if arrivals else sent
    fields = {"index": 0, "asked_input": 10, "asked_output": count, "num_input": 10, "num_output": count}
    return Record(**(fields | {"sent": sent, "end": end, "arrivals": list(arrivals)} | more))


def test_latencies_are_counted_by_tokens() -> None:
    measured = record((1.0, 2), (1.4, 4), (1.5, 1), sent=0.5)
    assert measured.ttft == 0.5
    assert measured.latencies() == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert measured.gaps() == pytest.approx([0.4, 0.1])
    assert measured.tpot == pytest.approx(sum(measured.latencies()) / 6)


def test_a_row_says_what_numpy_says() -> None:
    rng = np.random.default_rng(1)
    records = [record(*((0.2 + float(t), 1) for t in np.cumsum(rng.exponential(size=9))), sent=0.1) for _ in range(40)]
    row = summarize(AT_ONCE, records, {})
    waits = np.concatenate([np.diff([at for at, _ in r.arrivals]) for r in records]) * 1e3
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
        assert row["itl_ms"][name] == pytest.approx(np.percentile(waits, percent))
    seconds = max(r.end for r in records) - 0.1
    assert row["output_tok_s"] == pytest.approx(40 * 9 / seconds)
    assert row["requests_s"] == pytest.approx(40 / seconds)
    assert percentiles([]) is None


def test_failures_count_in_the_time_and_nowhere_else() -> None:
    good = record((1.0, 1), (2.0, 1), num_cached=4)
    failed = record((0.5, 7), end=8.0, failure="http 500", message="oh")
    row = summarize(AT_ONCE, [good, failed, replace(failed), good], parse_slo("ttft=5000"))
    assert (row["num_requests"], row["num_good"]) == (4, 2)
    assert row["failures"] == {"http 500": 2}
    assert row["failure_messages"] == {"http 500": "oh"}
    assert row["output_tok_s"] == pytest.approx(4 / 8)
    assert row["ttft_ms"]["max"] == 1000
    assert row["cached_share"] == pytest.approx(0.4)
    assert row["goodput"]["share"] == 0.5, "of all that were sent"
    assert row["goodput"]["requests_s"] == pytest.approx(2 / 8)


def test_what_keeps_an_objective() -> None:
    measured = record((0.4, 1), (0.5, 1), (0.7, 1), sent=0.0)
    assert is_within(measured, parse_slo("ttft=400,tpot=151,itl=200,e2e=700"))
    for slo in ("ttft=399", "tpot=149", "itl=190", "e2e=699"):
        assert not is_within(measured, parse_slo(slo)), slo
    assert is_within(record((0.4, 1)), parse_slo("itl=1")), "one token has no latency between tokens"
    for wrong in ("", "ttft", "ttft=0", "speed=3", "ttft=x"):
        with pytest.raises(ValueError, match="--slo"):
            parse_slo(wrong)


# ---- streams


def events(*chunks: Any) -> bytes:
    return b"".join(
        b"data: " + (c.encode() if isinstance(c, str) else json.dumps(c).encode()) + b"\n\n" for c in chunks
    )


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_may_be_cut_anywhere(size: int, end: bytes) -> None:
    said = b': ping\n\nevent: x\ndata: {"a": 1}\n\ndata:two\ndata: lines\n\nid: 3\n\ndata: [DONE]\n\n'.replace(
        b"\n", end
    )
    reader = EventReader()
    events = [event for at in range(0, len(said), size) for event in reader.feed(said[at : at + size])]
    assert events == ['{"a": 1}', "two\nlines", "[DONE]"]


def piece(text: str, total: int | None = None, reason: str | None = None) -> dict[str, Any]:
    usage = {} if total is None else {"usage": {"completion_tokens": total, "prompt_tokens": 12}}
    return {"choices": [{"text": text, "finish_reason": reason}], **usage}


def counted(*chunks: Any) -> Record:
    answer, recorded = Answer(), Record(index=0, asked_input=5, asked_output=9)
    for at, chunk in enumerate(chunks):
        answer.take(float(at), chunk if isinstance(chunk, str) else json.dumps(chunk))
    answer.count(recorded)
    return recorded


def test_tokens_by_running_usage() -> None:
    recorded = counted(piece("a", 1), piece("bcd", 4), piece("", 4), piece("e", 5, "length"), "[DONE]")
    assert recorded.arrivals == [(0.0, 1), (1.0, 3), (3.0, 1)]
    assert (recorded.counted, recorded.num_output, recorded.num_input, recorded.failure) == (RUNNING, 5, 12, None)
    ahead = counted(
        piece("a", 2), piece("b", 2), piece("c", 3, "stop"), {"choices": [], "usage": {"completion_tokens": 4}}
    )
    assert ahead.arrivals == [(0.0, 2), (2.0, 2)], "a count that is ahead of its text, and one that the last usage adds"


def test_tokens_by_final_usage() -> None:
    last = {"choices": [], "usage": {"completion_tokens": 6, "prompt_tokens": 3}}
    recorded = counted(piece("a"), piece("bcdefg"), piece("h", reason="stop"), last)
    assert recorded.counted == SPREAD
    assert recorded.num_output == 6
    assert recorded.arrivals == [(0.0, 1), (1.0, 4), (2.0, 1)]


def test_tokens_by_pieces() -> None:
    opening = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    words = [{"choices": [{"delta": {name: "x"}}]} for name in ("reasoning_content", "content")]
    recorded = counted(opening, *words, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
    assert (recorded.counted, recorded.arrivals) == (PIECES, [(1.0, 1), (2.0, 1)]), "what opens a chat is no token"
    assert recorded.num_input == 5


def test_streams_that_fail() -> None:
    assert counted(piece("a", 1)).failure == "ended early"
    assert counted("[DONE]").failure == "no tokens"
    error = counted(piece("a", 1), {"error": {"message": "out of memory"}})
    assert (error.failure, error.message) == ("error in the stream", "out of memory")
