"""The queue time that a server reports in its /metrics."""

import re
from typing import TYPE_CHECKING, Any

from whorl.bench.provenance import Document

if TYPE_CHECKING:
    import httpx

_QUEUE = re.compile(r"^\w+:request_queue_time_seconds_(bucket|sum|count)\{([^}]*)\} (\S+)$", re.MULTILINE)
_EDGE = re.compile(r'le="([^"]+)"')


async def read_queue(http: "httpx.AsyncClient") -> dict[str, float]:
    """Return the server's histogram of queue time, of whorl or vLLM; empty where there is none."""
    import httpx

    try:
        response = await http.get("/metrics")
    except httpx.TransportError:
        return {}
    return parse_queue(response.text) if response.status_code == 200 else {}


def parse_queue(text: str) -> dict[str, float]:
    """Return the bucket counts by upper edge in seconds, and "sum" and "count", added up over labels."""
    histogram: dict[str, float] = {}
    for kind, labels, value in _QUEUE.findall(text):
        edge = _EDGE.search(labels)
        name = edge[1] if kind == "bucket" and edge else kind
        histogram[name] = histogram.get(name, 0.0) + float(value)
    return histogram


def queue_between(before: dict[str, float], after: dict[str, float]) -> Document | None:
    """Return the queue time between two histograms in ms; None without requests.

    The mean is exact, percentiles are the upper edges of their buckets (`are_bounds`), and the maximum is unknown.
    """
    new: dict[str, Any] = {name: value - before.get(name, 0.0) for name, value in after.items()}
    count = new.pop("count", 0.0)
    if count <= 0:
        return None
    mean = new.pop("sum", 0.0) / count
    edges = sorted((float(edge), value) for edge, value in new.items())
    summary: Document = {"mean": mean * 1e3}
    for share in (50, 90, 99):
        edge = next((edge for edge, below in edges if below >= share / 100 * count), float("inf"))
        summary[f"p{share}"] = edge * 1e3 if edge < float("inf") else None
    return summary | {"max": None, "are_bounds": True}
