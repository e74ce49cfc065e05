"""A server with the OpenAI API as the target of a load: sends the requests over httpx, at their times."""

import asyncio
import importlib.util
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from whorl import device as devices
from whorl.bench.options import LoadOptions
from whorl.bench.provenance import Document, provenance
from whorl.bench.serve_record import Record, percentiles
from whorl.bench.serve_stream import Answer, EventReader
from whorl.bench.workload import Load, Request
from whorl.extras import how_to_install

if TYPE_CHECKING:
    import httpx

# Short, common words, nearly all of which are one token.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body back "
    "information parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense nation plan college "
    "interest death experience effect use class control care field development role effort rate heart drug show leader "
    "light voice wife police mind difference period building action season paper value hope space decision term road "
    "animal support event table need court oil situation cost industry figure street image phone data picture practice "
    "piece land product doctor wall patient worker news test movie north love step model attention security"
)
WORDS = tuple(_TEXT.split())
_KEEPALIVE = 2.0  # seconds that an idle connection may be reused; servers close theirs after 5
_BEAT = 0.02  # seconds between checks of how late the event loop is
_QUEUE = re.compile(r"^\w+:request_queue_time_seconds_(bucket|sum|count)\{([^}]*)\} (\S+)$", re.MULTILINE)
_EDGE = re.compile(r'le="([^"]+)"')

Send = Callable[[Request, float], Awaitable[Record]]  # takes a request and the time it was due


def need_httpx() -> None:
    """Raise ValueError when httpx is not installed."""
    if importlib.util.find_spec("httpx") is None:
        raise ValueError(f"bench serve --url needs httpx: {how_to_install('bench')}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A server and the form of its requests.

    more: fields to add to every request. vocabulary: token ids that prompts are made of; None: prompts are words.
    has_running_usage: the server reports in every chunk how many tokens there are so far. about: its version.
    """

    options: LoadOptions
    model: str
    more: Document = field(default_factory=dict)
    vocabulary: tuple[int, ...] | None = None
    has_running_usage: bool = True
    about: str = ""

    @property
    def url(self) -> str:
        return (self.options.url or "").rstrip("/").removesuffix("/v1")

    @property
    def vocab_size(self) -> int:
        return len(WORDS) if self.vocabulary is None else len(self.vocabulary)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.options.chat else "/v1/completions"

    def body(self, request: Request) -> bytes:
        """Return the body of a request; all bodies are built before the clock starts."""
        options: Document = {"include_usage": True}
        if self.has_running_usage:
            options["continuous_usage_stats"] = True
        fields: Document = {"model": self.model, "stream": True, "stream_options": options, "temperature": 0}
        fields["max_tokens"] = request.num_output
        if self.options.ignore_eos:
            fields["ignore_eos"] = True
        if self.vocabulary is None:
            text = " ".join(WORDS[place] for place in request.prompt)
            fields |= {"messages": [{"role": "user", "content": text}]} if self.options.chat else {"prompt": text}
        else:
            fields["prompt"] = [self.vocabulary[place] for place in request.prompt]
        return json.dumps(fields | self.more).encode()

    def client(self) -> "httpx.AsyncClient":
        import httpx

        headers = {"Content-Type": "application/json"}
        if self.options.api_key is not None:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE)
        timeout = httpx.Timeout(self.options.timeout, pool=None)
        return httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=timeout)

    def header(self) -> Document:
        """Return the header of the document."""
        prompts = "token ids of common words" if self.vocabulary else "words of about one token each"
        about = {"target": f"{self.url}{self.path}", "model": self.model, "server_version": self.about}
        return provenance(devices.HOST) | about | {"prompts": prompts, "body": self.more}

    def measure(
        self, load: Load, requests: Sequence[Request], seconds: float | None, on_end: Callable[[], None]
    ) -> tuple[list[Record], Document]:
        """Run one load; returns a record for each request, and more fields of the row."""
        return asyncio.run(_measure(self, load, requests, seconds, on_end))


def find_server(model: str | None, options: LoadOptions) -> Server:
    """Return the server of --url; raises ValueError when httpx is missing or nobody answers."""
    need_httpx()
    return asyncio.run(_find(Server(options=options, model=model or "", more=_body(options.body))))


def _body(text: str | None) -> Document:
    try:
        fields: Any = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"--body is {text}, expected JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"--body is {text}, expected a JSON object")
    return fields


async def _find(server: Server) -> Server:
    """Return the server with what it reports: its model, its token ids, and whether it has running usage.

    Raises ValueError when the server cannot be reached or refuses a request.
    """
    import httpx

    async with server.client() as http:
        try:
            listed = await http.get("/v1/models")
            version = await http.get("/version")
        except httpx.TransportError as error:
            raise ValueError(f"--url {server.url}: {error or type(error).__name__}; is the server running?") from error
        if not server.model:
            try:
                server = replace(server, model=str(_json_object(listed)["data"][0]["id"]))
            except (KeyError, IndexError, TypeError):
                reply = f"{listed.status_code} {_error_message(listed)}"
                raise ValueError(f"--url {server.url}: GET /v1/models names no model ({reply}); give MODEL") from None
        about = str(_json_object(version).get("version", ""))
        server = replace(server, about=about, vocabulary=await _vocabulary(http, server))
        return await _probe(http, server)


def _json_object(response: "httpx.Response") -> Document:
    """Return the JSON object of a successful response; {} for any other response."""
    try:
        document = response.json() if response.status_code == 200 else {}
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


async def _vocabulary(http: "httpx.AsyncClient", server: Server) -> tuple[int, ...] | None:
    """Return the token ids of common words by the server's /tokenize; None for chat or where there is no such route."""
    if server.options.chat:
        return None
    body = {"model": server.model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    tokens = set(_json_object(await http.post("/tokenize", json=body)).get("tokens", ()))
    is_plain = len(tokens) > 1 and all(isinstance(token, int) for token in tokens)
    return tuple(sorted(tokens)) if is_plain else None


async def _probe(http: "httpx.AsyncClient", server: Server) -> Server:
    """Send one short request, so that a refusal is known before the load.

    It is sent again without running usage, which a server need not support. Everything else must be accepted, since it
    changes the outputs.
    """
    import numpy as np

    tiny = Request(index=0, prompt=np.arange(min(4, server.vocab_size), dtype=np.int32), num_output=2)
    records = []
    for variant in (server, replace(server, has_running_usage=False)):
        record = await send(http, variant, variant.body(tiny), Record(index=0, asked_input=4, asked_output=2), 0.0)
        if record.failure is None:
            return variant
        records.append(record)
        if record.failure != "http 400":
            break
    problem = f"--url {server.url}{server.path}: {records[0].failure}: {records[0].message}"
    hint = " If the server does not support ignore_eos, add --no-ignore-eos." if "ignore_eos" in problem else ""
    raise ValueError(problem + hint)


async def send(http: "httpx.AsyncClient", server: Server, body: bytes, record: Record, start: float) -> Record:
    """Send one request and read its response to the end. start: the zero of the record's times."""
    import httpx

    answer, events = Answer(), EventReader()
    record.sent = time.perf_counter() - start
    try:
        async with http.stream("POST", server.path, content=body) as response:
            if response.status_code != 200:
                await response.aread()
                record.failure, record.message = f"http {response.status_code}", _error_message(response)
            else:
                async for data in response.aiter_raw():
                    now = time.perf_counter() - start
                    for event in events.feed(data):
                        answer.take(now, event)
    except httpx.ConnectError as error:
        record.failure, record.message = "no connection", str(error)
    except httpx.TimeoutException:
        record.failure, record.message = "timeout", f"no data for {server.options.timeout:g} s"
    except httpx.TransportError as error:
        record.failure, record.message = "dropped", str(error) or type(error).__name__
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        record.failure, record.message = "not understood", f"{type(error).__name__}: {error}"
    record.end = time.perf_counter() - start
    if record.failure is None:
        answer.count(record)
    return record


def _error_message(response: "httpx.Response") -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or response.reason_phrase


# ---- arrivals


async def send_open(requests: Sequence[Request], send_one: Send, clock: Callable[[], float]) -> list[Record]:
    """Send each request at its time, however many are in flight (an open loop)."""
    tasks = []
    for request in requests:
        assert request.at is not None
        if (wait := request.at - clock()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(send_one(request, request.at)))
    return list(await asyncio.gather(*tasks))


async def send_closed(
    requests: Sequence[Request], count: int, seconds: float | None, send_one: Send, clock: Callable[[], float]
) -> list[Record]:
    """Keep `count` requests in flight until none is left or `seconds` are over (a closed loop)."""
    waiting, records = iter(requests), list[Record]()

    async def one_after_another() -> None:
        due = clock()
        for request in waiting:
            records.append(await send_one(request, due))
            due = clock()
            if seconds is not None and due >= seconds:
                return

    await asyncio.gather(*(one_after_another() for _ in range(min(count, len(requests)))))
    return sorted(records, key=lambda record: record.index)


async def _measure(
    server: Server, load: Load, requests: Sequence[Request], seconds: float | None, on_end: Callable[[], None]
) -> tuple[list[Record], Document]:
    bodies = {request.index: server.body(request) for request in requests}
    async with server.client() as http:
        before = await _read_queue(http)
        lateness: list[float] = []
        beat = asyncio.ensure_future(_watch_loop(lateness))
        start = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - start

        async def send_one(request: Request, due: float) -> Record:
            record = Record(
                index=request.index, asked_input=len(request.prompt), asked_output=request.num_output, due=due
            )
            sent = await send(http, server, bodies[request.index], record, start)
            on_end()
            return sent

        try:
            if load.concurrency is None:
                records = await send_open(requests, send_one, clock)
            else:
                records = await send_closed(requests, load.concurrency, seconds, send_one, clock)
        finally:
            beat.cancel()
        after = await _read_queue(http)
    return records, {
        "send_late_ms": percentiles(record.sent - record.due for record in records),
        "loop_late_ms": percentiles(lateness),
        "queue_ms": _queue_between(before, after),
    }


async def _watch_loop(lateness: list[float]) -> None:
    """Append how late the event loop wakes up, which is how late it may see data from the server."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_BEAT)
        lateness.append(time.perf_counter() - before - _BEAT)


# ---- the server's own queue


async def _read_queue(http: "httpx.AsyncClient") -> dict[str, float]:
    """Return the server's histogram of queue time, of whorl or vLLM; empty where there is none."""
    import httpx

    try:
        response = await http.get("/metrics")
    except httpx.TransportError:
        return {}
    return _parse_queue(response.text) if response.status_code == 200 else {}


def _parse_queue(text: str) -> dict[str, float]:
    """Return the bucket counts by upper edge in seconds, and "sum" and "count", added up over labels."""
    histogram: dict[str, float] = {}
    for kind, labels, value in _QUEUE.findall(text):
        edge = _EDGE.search(labels)
        name = edge[1] if kind == "bucket" and edge else kind
        histogram[name] = histogram.get(name, 0.0) + float(value)
    return histogram


def _queue_between(before: dict[str, float], after: dict[str, float]) -> Document | None:
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
