"""The measurements of each request of a load, and their summary.

Times are seconds of the generator's clock. The tokens of a request arrive in pieces (streamed chunks, or outputs of a
step): `arrivals` has the time and the number of tokens of each. The tokens of one piece share the wait for it, so there
is one inter-token latency for each token, and those of a request add up to the time from its first token to its last.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whorl.bench.provenance import Document
from whorl.bench.workload import Load

PERCENTILES = (50, 90, 99)
SLO_NAMES = ("ttft", "itl", "tpot", "e2e")


@dataclass(slots=True, kw_only=True)
class Record:
    """The measurements of one request.

    asked_input, asked_output: requested lengths in tokens. due: when it should have been sent. queue: seconds in the
    queue, where known. counted: how tokens were counted. failure: None, or the kind of failure; message: its text.
    """

    index: int
    asked_input: int
    asked_output: int
    due: float = 0.0
    sent: float = 0.0
    end: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    num_cached: int | None = None
    queue: float | None = None
    counted: str = "steps"
    failure: str | None = None
    message: str = ""

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.sent

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """The mean time of a token after the first; None with fewer than two tokens."""
        num_later = sum(count for _, count in self.arrivals) - 1
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / num_later if num_later > 0 else None

    def latencies(self) -> list[float]:
        """Return a latency for each token after the first.

        Tokens of one piece share the wait for it; those that come with the first token have a latency of 0.
        """
        latencies = [0.0] * (self.arrivals[0][1] - 1)
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            latencies += [(now - before) / count] * count
        return latencies

    def gaps(self) -> list[float]:
        """Return the time between pieces, however many tokens they have."""
        return [now - before for (before, _), (now, _) in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def as_dict(self) -> Document:
        """Return a line of --records; times in milliseconds, `sent` counted from the start of the load."""
        fields: Document = {
            "index": self.index,
            "failure": self.failure,
            "sent_ms": self.sent * 1e3,
            "asked_input": self.asked_input,
            "asked_output": self.asked_output,
        }
        if self.failure is not None:
            return fields | {"message": self.message}
        times = {"ttft_ms": self.ttft, "tpot_ms": self.tpot, "e2e_ms": self.e2e, "queue_ms": self.queue}
        return (
            fields
            | {"input": self.num_input, "cached": self.num_cached, "output": self.num_output}
            | {name: None if seconds is None else seconds * 1e3 for name, seconds in times.items()}
            | {"arrivals_ms": [[(at - self.sent) * 1e3, count] for at, count in self.arrivals]}
        )


def parse_slo(text: str) -> dict[str, float]:
    """Return the bounds of --slo in milliseconds, by name; raises ValueError for anything else."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            bounds[name] = float(number)
        except ValueError:
            bounds[name] = math.nan
        if name not in SLO_NAMES or not 0 < bounds[name] < math.inf:
            raise ValueError(
                f"--slo is {text}, with {part!r}, expected milliseconds of {', '.join(SLO_NAMES)}: ttft=500,itl=50"
            )
    return bounds


def is_within(record: Record, slo: Mapping[str, float]) -> bool:
    """Return whether a request kept every bound. itl is the 99th percentile of its own inter-token latencies."""
    if record.failure is not None:
        return False
    latencies = record.latencies() if "itl" in slo else []
    seconds = {
        "ttft": record.ttft,
        "tpot": record.tpot or 0.0,
        "e2e": record.e2e,
        "itl": float(np.percentile(latencies, 99)) if latencies else 0.0,
    }
    return all(seconds[name] * 1e3 <= bound for name, bound in slo.items())


def percentiles(seconds: Iterable[float | None]) -> Document | None:
    """Return mean, percentiles and maximum in milliseconds; None without values."""
    values = np.array([value for value in seconds if value is not None], dtype=np.float64) * 1e3
    if not len(values):
        return None
    shares = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(values.mean()), **shares, "max": float(values.max())}


def summarize(load: Load, records: Sequence[Record], slo: Mapping[str, float]) -> Document:
    """Return a row of the document. Latencies and tokens are those of successful requests; failures count by kind."""
    good = [record for record in records if record.failure is None]
    seconds = max((r.end for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    seconds = max(seconds, 1e-9)
    num_input, num_output = (sum(getattr(r, name) for r in good) for name in ("num_input", "num_output"))
    return {
        "load": {"kind": load.kind, "value": None if math.isinf(load.value) else load.value},
        "label": str(load),
        "num_requests": len(records),
        "num_good": len(good),
        **_failures(records),
        "seconds": seconds,
        "requests_s": len(good) / seconds,
        "input_tok_s": num_input / seconds,
        "output_tok_s": num_output / seconds,
        "input_tokens": num_input,
        "output_tokens": num_output,
        "asked_input_tokens": sum(r.asked_input for r in good),
        "asked_output_tokens": sum(r.asked_output for r in good),
        "cached_share": _cached_share(good),
        "ttft_ms": percentiles(r.ttft for r in good),
        "itl_ms": percentiles(latency for r in good for latency in r.latencies()),
        "tpot_ms": percentiles(r.tpot for r in good),
        "gap_ms": percentiles(gap for r in good for gap in r.gaps()),
        "e2e_ms": percentiles(r.e2e for r in good),
        "queue_ms": percentiles(r.queue for r in good),
        "tokens_per_piece": num_output / max(1, sum(len(r.arrivals) for r in good)),
        "counted": dict(Counter(r.counted for r in good)),
        "goodput": _goodput(records, slo, seconds) if slo else None,
    }


def _failures(records: Sequence[Record]) -> Document:
    failed = [record for record in records if record.failure is not None]
    first: dict[str, str] = {}
    for record in failed:
        first.setdefault(str(record.failure), record.message)
    return {"failures": dict(Counter(str(r.failure) for r in failed)), "failure_messages": first}


def _cached_share(good: Sequence[Record]) -> float | None:
    """Return the share of prompt tokens that were cached, over the requests for which the server reports it."""
    counts: list[Any] = [(r.num_cached, r.num_input) for r in good if r.num_cached is not None]
    return sum(cached for cached, _ in counts) / max(1, sum(size for _, size in counts)) if counts else None


def _goodput(records: Sequence[Record], slo: Mapping[str, float], seconds: float) -> Document:
    num_within = sum(is_within(record, slo) for record in records)
    share = num_within / max(1, len(records))
    return {"slo_ms": dict(slo), "num_within": num_within, "share": share, "requests_s": num_within / seconds}
