"""What a server itself says of the time that requests have waited."""

import re
from typing import TYPE_CHECKING, Any

from whorl.bench.provenance import Document

if TYPE_CHECKING:
    import httpx

_QUEUE = re.compile(r"^\w+:request_queue_time_seconds_(bucket|sum|count)\{([^}]*)\} (\S+)$", re.MULTILINE)
_EDGE = re.compile(r'le="([^"]+)"')


async def queue_of(http: "httpx.AsyncClient") -> dict[str, float]:
    """Its histogram of the time in the queue, under whorl's name or vLLM's; empty where there is none."""
    import httpx

    try:
        found = await http.get("/metrics")
    except httpx.TransportError:
        return {}
    return parse_queue(found.text) if found.status_code == 200 else {}


def parse_queue(text: str) -> dict[str, float]:
    """Counts by upper edge in seconds, and "sum" and "count"; of several labels together."""
    found: dict[str, float] = {}
    for kind, labels, value in _QUEUE.findall(text):
        edge = _EDGE.search(labels)
        name = edge[1] if kind == "bucket" and edge else kind
        found[name] = found.get(name, 0.0) + float(value)
    return found


def queue_between(before: dict[str, float], after: dict[str, float]) -> Document | None:
    """In milliseconds. The mean is exact, percentiles are the upper edges of their buckets."""
    new: dict[str, Any] = {name: value - before.get(name, 0.0) for name, value in after.items()}
    count = new.pop("count", 0.0)
    if count <= 0:
        return None
    mean = new.pop("sum", 0.0) / count
    edges = sorted((float(edge), value) for edge, value in new.items())
    found: Document = {"mean": mean * 1e3}
    for share in (50, 90, 99):
        edge = next((edge for edge, below in edges if below >= share / 100 * count), float("inf"))
        found[f"p{share}"] = edge * 1e3 if edge < float("inf") else None
    return found | {"max": None, "are_bounds": True}
