"""What `whorl bench serve` makes of its options: a workload, whom it is sent to, and a row for each load."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from whorl.bench import serve_report
from whorl.bench.ops_report import need_plot
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.bench.serve_options import LoadOptions
from whorl.bench.serve_record import Record, parse_slo, summarize
from whorl.bench.serve_targets import Target, find_target
from whorl.bench.workload import Lengths, Load, Request, Workload, parse_sweep, read_trace
from whorl.engine.settings import EngineSettings

DEFAULT_CONCURRENCY = 8
_LATE = 0.005  # seconds behind which the generator is too slow, where they are also 5% of the time to a first token

Work = Callable[[], tuple[Document, str, bool]]  # the document, the same as text, whether all is right


def prepare(model: str | None, asked: LoadOptions, engine: EngineSettings) -> Work:
    """Refuse with ValueError what does not go together or cannot be reached; the rest is the work.

    The model is loaded, and all requests are made, before it begins.
    """
    _check(model, asked, engine)
    loads, workload = _loads(asked), _workload(asked)
    slo = parse_slo(asked.slo) if asked.slo else {}
    target = find_target(model, asked, engine, workload)
    points = [
        Point(
            load,
            workload.requests(load, target.vocab_size, point=number),
            workload.warmup(asked.warmup_requests, target.vocab_size, point=number),
        )
        for number, load in enumerate(loads)
    ]
    if empty := [point for point in points if not point.requests]:
        raise ValueError(f"bench serve: {empty[0].load}: no request in {asked.seconds:g} seconds: give it more")

    def work() -> tuple[Document, str, bool]:
        document = run(target, points, asked, slo)
        if asked.plot is not None:
            serve_report.write_plot(document, asked.plot)
        is_good = all(not row["failures"] for row in document["rows"])
        return document, serve_report.render(document), is_good

    return work


@dataclass(frozen=True, slots=True)
class Point:
    """Of a sweep."""

    load: Load
    requests: list[Request]
    warmup: list[Request]


def run(target: Target, points: Sequence[Point], asked: LoadOptions, slo: Mapping[str, float]) -> Document:
    header = target.header() | {"workload": _described(asked)}
    if asked.api_key:
        header["command"] = header["command"].replace(asked.api_key, "***")
    rows = []
    with Progress(sum(len(p.requests) + len(p.warmup) for p in points)) as progress, _records(asked.records) as write:
        for point in points:
            progress.say(f"{point.load}: warm-up")
            num_failed = _warm_up(target, point, progress)
            progress.say(str(point.load))
            found, more = target.measure(point.load, point.requests, asked.seconds, progress.advance)
            write(point.load, found)
            row = summarize(point.load, found, slo) | more | {"num_failed_warmup": num_failed}
            rows.append(row | {"warnings": _warnings(row, found, point, asked)})
    return {"header": header, "rows": rows}


def _warm_up(target: Target, point: Point, progress: Progress) -> int:
    """How many of the requests failed; a load that cannot even warm up is not worth minutes."""
    if not point.warmup:
        return 0
    count = min(len(point.warmup), point.load.concurrency or len(point.warmup))
    warmed, _ = target.measure(Load(kind="concurrency", value=count), point.warmup, None, progress.advance)
    failed = [record for record in warmed if record.failure is not None]
    if len(failed) == len(warmed):
        raise RuntimeError(f"bench serve: every warm-up request failed: {failed[0].failure}: {failed[0].message}")
    return len(failed)


@contextlib.contextmanager
def _records(path: Path | None) -> Iterator[Callable[[Load, Sequence[Record]], None]]:
    if path is None:
        yield lambda load, found: None
        return
    with path.open("w", encoding="utf-8") as file:

        def write(load: Load, found: Sequence[Record]) -> None:
            file.writelines(json.dumps({"load": str(load)} | each.as_dict()) + "\n" for each in found)
            file.flush()

        yield write


# ---- what was asked


def _check(model: str | None, asked: LoadOptions, engine: EngineSettings) -> None:
    if len([each for each in (asked.rate, asked.concurrency, asked.sweep) if each is not None]) > 1:
        raise ValueError("bench serve: --rate, --concurrency and --sweep: say one of them")
    if asked.url is not None:
        if asked.random_config is not None:
            raise ValueError(f"bench serve: --url {asked.url} and --random-config: say one of them")
        ours = EngineSettings()
        if given := [each.name for each in fields(engine) if getattr(engine, each.name) != getattr(ours, each.name)]:
            raise ValueError(f"bench serve: --url {asked.url}: the engine is the server's own, give {given[0]} to it")
    else:
        if model is not None and asked.random_config is not None:
            raise ValueError(f"bench serve: MODEL {model} and --random-config {asked.random_config}: say one of them")
        # A key may be in the environment for other commands.
        if given := [name for name in ("chat", "body") if getattr(asked, name)]:
            raise ValueError(f"bench serve: --{given[0]} is about a server: add --url")
    if asked.trace is not None:
        for name in ("input", "output", "shared_prefix"):
            if getattr(asked, name):
                raise ValueError(f"bench serve: --trace says the lengths: leave out --{name.replace('_', '-')}")
    if asked.prefixes > 1 and not asked.shared_prefix:
        raise ValueError(f"bench serve: --prefixes {asked.prefixes}: say with --shared-prefix how long they are")
    if asked.plot is not None:
        need_plot(asked.plot)
    if asked.records is not None and not asked.records.parent.is_dir():
        raise ValueError(f"--records {asked.records}: there is no folder {asked.records.parent}")


def _loads(asked: LoadOptions) -> list[Load]:
    if asked.sweep is not None:
        loads = parse_sweep(asked.sweep)
    elif asked.rate is not None:
        loads = [Load(kind="rate", value=asked.rate)]
    elif asked.concurrency is None and asked.trace is not None and read_trace(asked.trace)[0].at is not None:
        loads = [Load(kind="trace")]
    else:
        loads = [Load(kind="concurrency", value=asked.concurrency or DEFAULT_CONCURRENCY)]
    if asked.seconds is not None and any(load.kind == "rate" and math.isinf(load.value) for load in loads):
        raise ValueError("bench serve: --rate inf sends all at once: say --requests, not --seconds")
    return loads


def _workload(asked: LoadOptions) -> Workload:
    trace = () if asked.trace is None else read_trace(asked.trace)
    if trace and (asked.requests or 0) > len(trace):
        raise ValueError(f"--requests {asked.requests}: --trace {asked.trace} has {len(trace)} lines")
    return Workload(
        input=Lengths.parse(asked.input or "256", "--input"),
        output=Lengths.parse(asked.output or "64", "--output"),
        count=asked.requests,
        seconds=asked.seconds,
        shared_prefix=asked.shared_prefix,
        num_prefixes=asked.prefixes,
        seed=asked.seed,
        trace=trace,
    )


def _described(asked: LoadOptions) -> Document:
    """What the header says of the workload."""
    lengths: Document = {"input": asked.input or "256", "output": asked.output or "64"}
    if asked.trace is not None:
        lengths = {"trace": str(asked.trace)}
    shared = {"shared_prefix": asked.shared_prefix, "prefixes": asked.prefixes} if asked.shared_prefix else {}
    counts = {"requests": asked.requests, "seconds": asked.seconds, "warmup_requests": asked.warmup_requests}
    return lengths | shared | counts | {"seed": asked.seed, "ignore_eos": asked.ignore_eos}


# ---- what to be careful about


def _warnings(row: Document, records: Sequence[Record], point: Point, asked: LoadOptions) -> list[str]:
    found = []
    for kind, count in row["failures"].items():
        found.append(f"{count} of {row['num_requests']} requests failed: {kind}: {row['failure_messages'][kind]}")
    if row["num_failed_warmup"]:
        found.append(f"{row['num_failed_warmup']} of {len(point.warmup)} warm-up requests failed")
    found += _late(row)
    if num_short := sum(r.failure is None and r.num_output < r.asked_output for r in records):
        found.append(f"{num_short} answers are shorter than asked: lengths are not those of the workload")
    is_shared = asked.shared_prefix or asked.trace is not None
    if not is_shared and (row["cached_share"] or 0) > 0.02:
        found.append(
            f"{row['cached_share']:.0%} of prompt tokens were in the prefix cache, and prompts share nothing: the "
            'server has seen this workload before. Take another --seed, or --body \'{"cache_salt": "..."}\''
        )
    if asked.seconds is not None and point.load.kind == "concurrency" and len(records) == len(point.requests):
        found.append(f"all {len(records)} requests were sent before --seconds were over: say --requests with more")
    others = [how for how in row["counted"] if how not in ("steps", "running usage")]
    if others:
        found.append(f"the server does not count tokens as they come; latencies between tokens are by {others[0]}")
    return found


def _late(row: Document) -> Iterator[str]:
    """Where the generator is the bottleneck, what it measures is itself."""
    ttft = (row["ttft_ms"] or {}).get("p50", 0.0) / 1e3
    for name, what in (("send_late_ms", "sent its requests"), ("loop_late_ms", "read what came")):
        late = (row[name] or {}).get("p99", 0.0) / 1e3
        if late > max(_LATE, 0.05 * ttft):
            yield (
                f"the generator {what} up to {late * 1e3:.0f} ms late (p99): it was too slow, or had too little of a "
                "CPU; give it a machine of its own, or ask for less"
            )
