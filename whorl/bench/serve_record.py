"""What was measured of each request of a load, and what all of them come to.

Times are seconds of the generator's clock. A request's tokens come in pieces: `arrivals` has the moment and the number
of tokens of each. The tokens of one piece share the wait for it, so that latencies between tokens are counted by
tokens, and a request's add up to the time from its first token to its last.
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
    """One request. due: when it should have been sent; queue: seconds until the engine took it, where that is known.

    failure: its kind, None where all went well; message: what was said. counted: how tokens were told apart.
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
        """The mean of a token after the first; None where there is none."""
        num_later = sum(count for _, count in self.arrivals) - 1
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / num_later if num_later > 0 else None

    def latencies(self) -> list[float]:
        """One for each token after the first. Tokens of one piece share the wait for it; those that come together with
        the first have waited for nothing."""
        found = [0.0] * (self.arrivals[0][1] - 1)
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            found += [(now - before) / count] * count
        return found

    def gaps(self) -> list[float]:
        """Between pieces, however many tokens they bring."""
        return [now - before for (before, _), (now, _) in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def as_dict(self) -> Document:
        """A line of --records; times in milliseconds, `sent` after the start."""
        found: Document = {
            "index": self.index,
            "failure": self.failure,
            "sent_ms": self.sent * 1e3,
            "asked_input": self.asked_input,
            "asked_output": self.asked_output,
        }
        if self.failure is not None:
            return found | {"message": self.message}
        times = {"ttft_ms": self.ttft, "tpot_ms": self.tpot, "e2e_ms": self.e2e, "queue_ms": self.queue}
        return (
            found
            | {"input": self.num_input, "cached": self.num_cached, "output": self.num_output}
            | {name: None if seconds is None else seconds * 1e3 for name, seconds in times.items()}
            | {"arrivals_ms": [[(at - self.sent) * 1e3, count] for at, count in self.arrivals]}
        )


def parse_slo(text: str) -> dict[str, float]:
    """Bounds in milliseconds by name."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = math.nan
        if name not in SLO_NAMES or not 0 < found[name] < math.inf:
            raise ValueError(
                f"--slo {text}: {part!r}: expected milliseconds of {', '.join(SLO_NAMES)}: ttft=500,itl=50"
            )
    return found


def is_within(record: Record, slo: Mapping[str, float]) -> bool:
    """Whether a request kept every bound. itl: 99% of its own latencies between tokens."""
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
    """In milliseconds; None where there is nothing to tell."""
    values = np.array([value for value in seconds if value is not None], dtype=np.float64) * 1e3
    if not len(values):
        return None
    found = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(values.mean()), **found, "max": float(values.max())}


def summarize(load: Load, records: Sequence[Record], slo: Mapping[str, float]) -> Document:
    """A row of the document. Latencies and tokens are of requests that went well; failures are counted by kind."""
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
        "itl_ms": percentiles(each for r in good for each in r.latencies()),
        "tpot_ms": percentiles(r.tpot for r in good),
        "gap_ms": percentiles(each for r in good for each in r.gaps()),
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
    """Of the prompt tokens of requests whose server said it."""
    told: list[Any] = [(r.num_cached, r.num_input) for r in good if r.num_cached is not None]
    return sum(cached for cached, _ in told) / max(1, sum(size for _, size in told)) if told else None


def _goodput(records: Sequence[Record], slo: Mapping[str, float], seconds: float) -> Document:
    num_within = sum(is_within(record, slo) for record in records)
    share = num_within / max(1, len(records))
    return {"slo_ms": dict(slo), "num_within": num_within, "share": share, "requests_s": num_within / seconds}
