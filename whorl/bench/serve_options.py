"""What `whorl bench serve` takes about the load. No torch here."""

from dataclasses import dataclass
from pathlib import Path

from whorl.fields import check, option

ARRIVALS, LENGTHS, ASKED, FOUND = "Arrivals", "Lengths", "Requests", "What is found"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Values that cannot be are a ValueError; what does not go together is refused by `serve_command.prepare`."""

    url: str | None = option(
        None,
        "A running server with OpenAI's interface; MODEL is then its name there. Default: an engine in this process.",
        metavar="URL",
    )
    api_key: str | None = option(None, "With --url: sent as a bearer token.", metavar="KEY", env="WHORL_API_KEY")
    random_config: str | None = option(
        None, "Random weights of this shape: Qwen3-30B-A3B, Qwen3-0.6B, a config.json.", metavar="NAME|PATH"
    )
    rate: float | None = option(
        None,
        "Requests a second, at random moments (Poisson), however many are under way; inf: all at once.",
        above=0,
        panel=ARRIVALS,
    )
    concurrency: int | None = option(
        None, "Requests under way at once: one that ends is followed by the next. Default: 8.", least=1, panel=ARRIVALS
    )
    sweep: str | None = option(
        None, "One measurement each: concurrency=1,2,4,8 or rate=0.5,1,2.", metavar="NAME=N,N", panel=ARRIVALS
    )
    requests: int | None = option(
        None, "Of one measurement. Default: 64, or what --seconds takes.", least=1, panel=ARRIVALS
    )
    seconds: float | None = option(None, "No request begins later than this.", above=0, panel=ARRIVALS)
    input: str | None = option(
        None,
        "Tokens of a prompt: 512, 512:1536 (uniform), lognormal:MEDIAN,SIGMA[,MOST]. Default: 256.",
        metavar="LENGTHS",
        panel=LENGTHS,
    )
    output: str | None = option(None, "Tokens of an answer, alike. Default: 64.", metavar="LENGTHS", panel=LENGTHS)
    trace: Path | None = option(
        None,
        "Lengths of JSON lines: input_length, output_length, timestamp in ms, hash_ids of shared blocks.",
        metavar="FILE",
        panel=LENGTHS,
    )
    shared_prefix: int = option(0, "Tokens before each prompt that others have, too.", least=0, panel=LENGTHS)
    prefixes: int = option(1, "Different ones of those.", least=1, panel=LENGTHS)
    seed: int = option(0, "Of the workload: the same one, the same requests at the same times.", least=0, panel=LENGTHS)
    chat: bool = option(False, "With --url: /v1/chat/completions instead of /v1/completions.", panel=ASKED)
    body: str | None = option(
        None, 'With --url: more fields of every request: {"cache_salt": "2"}.', metavar="JSON", panel=ASKED
    )
    ignore_eos: bool = option(
        True,
        "Ask for all tokens of an answer, wherever the model would end.",
        "--ignore-eos/--no-ignore-eos",
        panel=ASKED,
    )
    warmup_requests: int = option(4, "Requests before each measurement that do not count.", least=0, panel=ARRIVALS)
    timeout: float = option(
        120.0, "With --url: seconds without a word after which a request has failed.", above=0, panel=ASKED
    )
    slo: str | None = option(
        None, "What a good request keeps, in ms: ttft=500,itl=50; also tpot, e2e.", metavar="NAME=MS,..", panel=FOUND
    )
    records: Path | None = option(
        None, "Write what was measured of each request, a line each.", metavar="FILE", panel=FOUND
    )
    plot: Path | None = option(None, "Write a chart over the load.", metavar="FILE", panel=FOUND)

    def __post_init__(self) -> None:
        check(self)
