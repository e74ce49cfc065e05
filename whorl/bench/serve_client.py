"""Requests of a load to a server with OpenAI's interface, over httpx, and when they are sent."""

import asyncio
import importlib.util
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from whorl.bench.provenance import Document
from whorl.bench.serve_queue import queue_between, queue_of
from whorl.bench.serve_record import Record
from whorl.bench.serve_stream import Answer, EventReader
from whorl.bench.workload import Load, Request

if TYPE_CHECKING:
    import httpx

# Short and common, so that a tokenizer has one token for nearly each of them.
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
_KEPT = 2.0  # seconds that an idle connection is used again: servers close theirs after 5
_BEAT = 0.02  # seconds between looks at how late the event loop is

Send = Callable[[Request, float], Awaitable[Record]]  # a request and when it was due


def need_httpx() -> None:
    if importlib.util.find_spec("httpx") is None:
        raise ValueError("bench serve --url needs httpx: pip install 'whorl[bench]'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Where requests go and what they say. vocabulary: token ids that the server knows, or None: words are sent.

    has_running_usage: every chunk says how many tokens there are so far.
    """

    url: str
    model: str
    api_key: str | None = None
    is_chat: bool = False
    ignore_eos: bool = True
    more: Document = field(default_factory=dict)
    timeout: float = 120.0
    vocabulary: tuple[int, ...] | None = None
    has_running_usage: bool = True
    about: str = ""

    @property
    def vocab_size(self) -> int:
        return len(WORDS) if self.vocabulary is None else len(self.vocabulary)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, request: Request) -> bytes:
        """As it is sent: made before the clock starts."""
        options: Document = {"include_usage": True}
        if self.has_running_usage:
            options["continuous_usage_stats"] = True
        said: Document = {"model": self.model, "stream": True, "stream_options": options, "temperature": 0}
        said["max_tokens"] = request.num_output
        if self.ignore_eos:
            said["ignore_eos"] = True
        if self.vocabulary is None:
            text = " ".join(WORDS[place] for place in request.prompt)
            said |= {"messages": [{"role": "user", "content": text}]} if self.is_chat else {"prompt": text}
        else:
            said["prompt"] = [self.vocabulary[place] for place in request.prompt]
        return json.dumps(said | self.more).encode()

    def client(self) -> "httpx.AsyncClient":
        import httpx

        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEPT)
        timeout = httpx.Timeout(self.timeout, pool=None)
        return httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=timeout)


async def find(server: Server) -> Server:
    """The server as it is: its model's name, token ids it knows, whether it counts tokens as they come.

    ValueError: nobody is there, or a request is refused.
    """
    import httpx

    async with server.client() as http:
        try:
            listed = await http.get("/v1/models")
            version = await http.get("/version")
        except httpx.TransportError as error:
            raise ValueError(f"--url {server.url}: {error or type(error).__name__}: is the server up?") from error
        if not server.model:
            try:
                server = replace(server, model=str(_object(listed)["data"][0]["id"]))
            except (KeyError, IndexError, TypeError):
                said = f"{listed.status_code} {_said(listed)}"
                raise ValueError(f"--url {server.url}: GET /v1/models names no model, give MODEL: {said}") from None
        about = str(_object(version).get("version", ""))
        server = replace(server, about=about, vocabulary=await _vocabulary(http, server))
        return await _probe(http, server)


def _object(response: "httpx.Response") -> Document:
    """What a successful answer says in JSON; nothing where it says none."""
    try:
        found = response.json() if response.status_code == 200 else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def _vocabulary(http: "httpx.AsyncClient", server: Server) -> tuple[int, ...] | None:
    """Token ids of common words, from the server's own tokenizer; None where it does not tell, or takes text alone."""
    if server.is_chat:
        return None
    body = {"model": server.model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    found = set(_object(await http.post("/tokenize", json=body)).get("tokens", ()))
    is_plain = len(found) > 1 and all(isinstance(token, int) for token in found)
    return tuple(sorted(found)) if is_plain else None


async def _probe(http: "httpx.AsyncClient", server: Server) -> Server:
    """One short request, so that what is refused is known before the load. What a server need not know may be missing:
    tokens counted as they come. What changes the answers may not."""
    import numpy as np

    tiny = Request(index=0, prompt=np.arange(min(4, server.vocab_size), dtype=np.int32), num_output=2)
    records = []
    for each in (server, replace(server, has_running_usage=False)):
        record = await send(http, each, each.body(tiny), Record(index=0, asked_input=4, asked_output=2), 0.0)
        if record.failure is None:
            return each
        records.append(record)
        if record.failure != "http 400":
            break
    said = f"--url {server.url}{server.path}: {records[0].failure}: {records[0].message}"
    hint = " A server that does not know ignore_eos needs --no-ignore-eos." if "ignore_eos" in said else ""
    raise ValueError(said + hint)


async def send(http: "httpx.AsyncClient", server: Server, body: bytes, record: Record, start: float) -> Record:
    """One request, from its bytes to its last byte. start: of the clock that the record's times are on."""
    import httpx

    answer, events = Answer(), EventReader()
    record.sent = time.perf_counter() - start
    try:
        async with http.stream("POST", server.path, content=body) as response:
            if response.status_code != 200:
                await response.aread()
                record.failure, record.message = f"http {response.status_code}", _said(response)
            else:
                async for data in response.aiter_raw():
                    now = time.perf_counter() - start
                    for event in events.feed(data):
                        answer.take(now, event)
    except httpx.ConnectError as error:
        record.failure, record.message = "no connection", str(error)
    except httpx.TimeoutException:
        record.failure, record.message = "timeout", f"nothing came for {server.timeout:g} s"
    except httpx.TransportError as error:
        record.failure, record.message = "dropped", str(error) or type(error).__name__
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        record.failure, record.message = "not understood", f"{type(error).__name__}: {error}"
    record.end = time.perf_counter() - start
    if record.failure is None:
        answer.count(record)
    return record


def _said(response: "httpx.Response") -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or response.reason_phrase


# ---- when they are sent


async def send_open(requests: Sequence[Request], send_one: Send, clock: Callable[[], float]) -> list[Record]:
    """Each at its moment, however many are under way."""
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
    """`count` at once, each followed by the next until there is none or the time is over."""
    left, found = iter(requests), list[Record]()

    async def one_after_another() -> None:
        due = clock()
        for request in left:
            found.append(await send_one(request, due))
            due = clock()
            if seconds is not None and due >= seconds:
                return

    await asyncio.gather(*(one_after_another() for _ in range(min(count, len(requests)))))
    return sorted(found, key=lambda record: record.index)


async def measure(
    server: Server,
    load: Load,
    requests: Sequence[Request],
    seconds: float | None,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[list[Record], Document]:
    """What came of each request, and what the document says of the generator and the server's own queue."""
    bodies = {request.index: server.body(request) for request in requests}
    async with server.client() as http:
        before = await queue_of(http)
        lateness: list[float] = []
        beat = asyncio.ensure_future(_watch_loop(lateness))
        start = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - start

        async def send_one(request: Request, due: float) -> Record:
            record = Record(
                index=request.index, asked_input=len(request.prompt), asked_output=request.num_output, due=due
            )
            found = await send(http, server, bodies[request.index], record, start)
            on_end()
            return found

        try:
            if load.concurrency is None:
                records = await send_open(requests, send_one, clock)
            else:
                records = await send_closed(requests, load.concurrency, seconds, send_one, clock)
        finally:
            beat.cancel()
        after = await queue_of(http)
    return records, {"loop_late": lateness, "queue": queue_between(before, after)}


async def _watch_loop(lateness: list[float]) -> None:
    """How late the event loop comes back: as late it sees what the server sends."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_BEAT)
        lateness.append(time.perf_counter() - before - _BEAT)
