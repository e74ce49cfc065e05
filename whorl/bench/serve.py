"""Turns the options of `whorl bench serve` into a workload and a target, and measures a row for each load."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from whorl.bench import serve_report
from whorl.bench.options import LoadOptions
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark
from whorl.bench.serve_record import Record, parse_slo, summarize
from whorl.bench.workload import Lengths, Load, Request, Workload, parse_sweep, read_trace
from whorl.engine import model_names
from whorl.engine.settings import EngineSettings
from whorl.files import check_output_file
from whorl.startup import starting

if TYPE_CHECKING:
    from whorl.bench.serve_client import Server
    from whorl.bench.serve_engine import EngineTarget

    Target = EngineTarget | Server

DEFAULT_CONCURRENCY = 8
_TOO_LATE = 0.005  # seconds; a generator later than this, and than 5% of the time to first token, is too slow


def benchmark(model: str | None, options: LoadOptions, engine: EngineSettings) -> Benchmark:
    """Return the benchmark, ready to run: the model is loaded and all requests are built.

    Raises ValueError for options that conflict and for a server that cannot be reached.
    """
    _check(model, options, engine)
    loads, workload = _loads(options), _workload(options)
    slo = parse_slo(options.slo) if options.slo else {}
    with starting():
        from whorl.bench import serve_client, serve_engine
    target: Target
    if options.url is None:
        target = serve_engine.EngineTarget(model, options, engine, workload)
    else:
        target = serve_client.find_server(model, options)
    points = [
        Point(
            load,
            workload.requests(load, target.vocab_size, point=number),
            workload.warmup(options.warmup_requests, target.vocab_size, point=number),
        )
        for number, load in enumerate(loads)
    ]
    if empty := [point for point in points if not point.requests]:
        raise ValueError(f"bench serve: {empty[0].load}: no request is due in --seconds {options.seconds:g}; give more")

    return Benchmark(
        run=lambda: run(target, points, options, slo),
        render=serve_report.render,
        is_good=lambda document: not any(row["failures"] for row in document["rows"]),
        draw=serve_report.write_plot,
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep: its load, its requests, and the warm-up requests before them."""

    load: Load
    requests: list[Request]
    warmup: list[Request]


def run(target: "Target", points: Sequence[Point], options: LoadOptions, slo: Mapping[str, float]) -> Document:
    """Measure all points; returns {"header": ..., "rows": [...]}."""
    header = target.header() | {"workload": _workload_header(options)}
    if options.api_key:
        header["command"] = header["command"].replace(options.api_key, "***")
    rows = []
    num_requests = sum(len(point.requests) + len(point.warmup) for point in points)
    with Progress(num_requests, lines=True) as progress, _records(options.records) as write:
        for point in points:
            progress.describe(f"{point.load}: warm-up requests")
            num_failed = _warm_up(target, point, progress)
            progress.describe(f"{point.load}: requests")
            records, more = target.measure(point.load, point.requests, options.seconds, progress.advance)
            write(point.load, records)
            row = summarize(point.load, records, slo) | more | {"num_failed_warmup": num_failed}
            rows.append(row | {"warnings": _warnings(row, records, point, options)})
    return {"header": header, "rows": rows}


def _warm_up(target: "Target", point: Point, progress: Progress) -> int:
    """Send the warm-up requests; returns how many failed. Raises RuntimeError when all did, before minutes of load."""
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
    """Yield a function that writes the records of a load to a file as JSON lines; without a path it does nothing."""
    if path is None:
        yield lambda load, records: None
        return
    with path.open("w", encoding="utf-8") as file:

        def write(load: Load, records: Sequence[Record]) -> None:
            file.writelines(json.dumps({"load": str(load)} | record.as_dict()) + "\n" for record in records)
            file.flush()

        yield write


# ---- options


def _check(model: str | None, options: LoadOptions, engine: EngineSettings) -> None:
    """Raise ValueError for options that conflict, before anything is loaded."""
    if len([value for value in (options.rate, options.concurrency, options.sweep) if value is not None]) > 1:
        raise ValueError("bench serve: give only one of --rate, --concurrency and --sweep")
    if options.url is not None:
        if options.random_config is not None:
            raise ValueError(f"bench serve: give only one of --url ({options.url}) and --random-config")
        defaults = EngineSettings()
        names = [field.name for field in fields(engine)]
        if names := [name for name in names if getattr(engine, name) != getattr(defaults, name)]:
            raise ValueError(f"bench serve: --url {options.url} has its own engine; give {names[0]} to that server")
    else:
        if model is not None and options.random_config is not None:
            raise ValueError(f"bench serve: give only one of MODEL ({model}) and --random-config")
        # --api-key is not checked: it may be in the environment for other commands.
        if names := [name for name in ("chat", "body") if getattr(options, name)]:
            raise ValueError(f"bench serve: --{names[0]} needs --url")
    if options.trace is not None:
        for name in ("input", "output", "shared_prefix"):
            if getattr(options, name):
                raise ValueError(f"bench serve: --trace gives the lengths; leave out --{name.replace('_', '-')}")
    if options.prefixes > 1 and not options.shared_prefix:
        raise ValueError(f"bench serve: --prefixes {options.prefixes} needs --shared-prefix, their length")
    if options.records is not None:
        check_output_file(options.records)
    if options.url is None and options.random_config is None:
        model_names.local_or_hub(model)


def _loads(options: LoadOptions) -> list[Load]:
    """Return the loads to measure: those of --sweep, else one."""
    if options.sweep is not None:
        loads = parse_sweep(options.sweep)
    elif options.rate is not None:
        loads = [Load(kind="rate", value=options.rate)]
    elif options.concurrency is None and options.trace is not None and read_trace(options.trace)[0].at is not None:
        loads = [Load(kind="trace")]
    else:
        loads = [Load(kind="concurrency", value=options.concurrency or DEFAULT_CONCURRENCY)]
    if options.seconds is not None and any(load.kind == "rate" and math.isinf(load.value) for load in loads):
        raise ValueError("bench serve: --rate inf sends all requests at once; give --requests, not --seconds")
    return loads


def _workload(options: LoadOptions) -> Workload:
    trace = () if options.trace is None else read_trace(options.trace)
    if trace and (options.requests or 0) > len(trace):
        raise ValueError(f"--requests is {options.requests}, but --trace {options.trace} has {len(trace)} lines")
    return Workload(
        input=Lengths.parse(options.input or "256", "--input"),
        output=Lengths.parse(options.output or "64", "--output"),
        count=options.requests,
        seconds=options.seconds,
        shared_prefix=options.shared_prefix,
        num_prefixes=options.prefixes,
        seed=options.seed,
        trace=trace,
    )


def _workload_header(options: LoadOptions) -> Document:
    """Return the fields of the header that describe the workload."""
    lengths: Document = {"input": options.input or "256", "output": options.output or "64"}
    if options.trace is not None:
        lengths = {"trace": str(options.trace)}
    shared = {"shared_prefix": options.shared_prefix, "prefixes": options.prefixes} if options.shared_prefix else {}
    counts = {"requests": options.requests, "seconds": options.seconds, "warmup_requests": options.warmup_requests}
    return lengths | shared | counts | {"seed": options.seed, "ignore_eos": options.ignore_eos}


# ---- warnings


def _warnings(row: Document, records: Sequence[Record], point: Point, options: LoadOptions) -> list[str]:
    warnings = []
    for kind, count in row["failures"].items():
        warnings.append(f"{count} of {row['num_requests']} requests failed: {kind}: {row['failure_messages'][kind]}")
    if row["num_failed_warmup"]:
        warnings.append(f"{row['num_failed_warmup']} of {len(point.warmup)} warm-up requests failed")
    warnings += _lateness_warnings(row)
    if num_short := sum(r.failure is None and r.num_output < r.asked_output for r in records):
        warnings.append(f"{num_short} outputs are shorter than requested: lengths are not those of the workload")
    is_shared = options.shared_prefix or options.trace is not None
    if not is_shared and (row["cached_share"] or 0) > 0.02:
        warnings.append(
            f"{row['cached_share']:.0%} of prompt tokens were in the prefix cache, though prompts share no prefix: the "
            'server has seen this workload before. Use another --seed, or --body \'{"cache_salt": "..."}\''
        )
    if options.seconds is not None and point.load.kind == "concurrency" and len(records) == len(point.requests):
        warnings.append(f"all {len(records)} requests were sent before --seconds were over; give more --requests")
    estimates = [method for method in row["counted"] if method not in ("steps", "running usage")]
    if estimates:
        warnings.append(f"the server reports no running usage; inter-token latencies are estimated by {estimates[0]}")
    return warnings


def _lateness_warnings(row: Document) -> Iterator[str]:
    """Yield a warning where the load generator was the bottleneck, since then it measured itself."""
    ttft = (row["ttft_ms"] or {}).get("p50", 0.0) / 1e3
    for name, action in (("send_late_ms", "sent its requests"), ("loop_late_ms", "read responses")):
        late = (row[name] or {}).get("p99", 0.0) / 1e3
        if late > max(_TOO_LATE, 0.05 * ttft):
            yield (
                f"the load generator {action} up to {late * 1e3:.0f} ms late (p99): it was too slow or had too little "
                "CPU time; run it on another machine, or reduce the load"
            )
