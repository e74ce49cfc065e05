"""The options of `whorl bench serve` that describe the load. This module needs no torch."""

from dataclasses import dataclass
from pathlib import Path

from whorl.fields import check, option

ARRIVALS, LENGTHS, REQUESTS, RESULTS = "Arrivals", "Lengths", "Requests", "Results"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """The load. Raises ValueError for values out of range; `serve_command.build_benchmark` checks for conflicts."""

    url: str | None = option(
        None,
        "A running server with the OpenAI API; MODEL is then the name it serves. Default: an engine in this process.",
        metavar="URL",
    )
    api_key: str | None = option(None, "With --url: sent as a bearer token.", metavar="KEY", env="WHORL_API_KEY")
    random_config: str | None = option(
        None, "Random weights of this shape: Qwen3-30B-A3B, Qwen3-0.6B, a config.json.", metavar="NAME|PATH"
    )
    rate: float | None = option(
        None,
        "Requests per second at random times (Poisson), however many are in flight; inf: all at once.",
        above=0,
        panel=ARRIVALS,
    )
    concurrency: int | None = option(
        None, "Requests in flight at once: each that ends is followed by the next. Default: 8.", least=1, panel=ARRIVALS
    )
    sweep: str | None = option(
        None, "Measure each of several loads: concurrency=1,2,4,8 or rate=0.5,1,2.", metavar="NAME=N,N", panel=ARRIVALS
    )
    requests: int | None = option(
        None, "Number of requests per load. Default: 64, or as many as fit --seconds.", least=1, panel=ARRIVALS
    )
    seconds: float | None = option(None, "Start no request after this many seconds.", above=0, panel=ARRIVALS)
    input: str | None = option(
        None,
        "Tokens of a prompt: 512, 512:1536 (uniform), lognormal:MEDIAN,SIGMA[,MOST]. Default: 256.",
        metavar="LENGTHS",
        panel=LENGTHS,
    )
    output: str | None = option(
        None, "Tokens of an output, in the same form. Default: 64.", metavar="LENGTHS", panel=LENGTHS
    )
    trace: Path | None = option(
        None,
        "Read lengths from JSON lines: input_length, output_length, timestamp in ms, hash_ids of shared blocks.",
        metavar="FILE",
        panel=LENGTHS,
    )
    shared_prefix: int = option(0, "Tokens of a prefix that prompts share, before each prompt.", least=0, panel=LENGTHS)
    prefixes: int = option(1, "Number of different shared prefixes.", least=1, panel=LENGTHS)
    seed: int = option(
        0, "Seed of the workload; the same seed gives the same requests at the same times.", least=0, panel=LENGTHS
    )
    chat: bool = option(False, "With --url: use /v1/chat/completions instead of /v1/completions.", panel=REQUESTS)
    body: str | None = option(
        None, 'With --url: fields to add to every request: {"cache_salt": "2"}.', metavar="JSON", panel=REQUESTS
    )
    ignore_eos: bool = option(
        True,
        "Generate all requested tokens, even after the model ends its output.",
        "--ignore-eos/--no-ignore-eos",
        panel=REQUESTS,
    )
    warmup_requests: int = option(4, "Requests before each load that are not counted.", least=0, panel=ARRIVALS)
    timeout: float = option(
        120.0, "With --url: seconds without data after which a request has failed.", above=0, panel=REQUESTS
    )
    slo: str | None = option(
        None,
        "Latency bounds of a good request, in ms: ttft=500,itl=50; also tpot, e2e.",
        metavar="NAME=MS,..",
        panel=RESULTS,
    )
    records: Path | None = option(
        None, "Write the measurements of each request as JSON lines.", metavar="FILE", panel=RESULTS
    )
    plot: Path | None = option(
        None, "Write a chart of latency and throughput against the load.", metavar="FILE", panel=RESULTS
    )

    def __post_init__(self) -> None:
        check(self)
