"""The one address in front of all replicas: an ASGI application behind the same gate as a single engine's.

A request is answered by one replica. Where that is lost before anything of its answer went out, another is asked, once;
where something went out, the answer ends with an error. So nothing is answered twice.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from whorl.serve.dialects import REQUEST_NUMBER
from whorl.serve.engine_thread import EngineError
from whorl.serve.gate import KEY_NUMBER, ApiError, Cors, Gate
from whorl.serve.key_limits import KeyUse
from whorl.serve.openai import WITH_MEDIA
from whorl.serve.running import Running
from whorl.serve.settings import ServerSettings

from .asked import END, Asked, Message, ReplicaLost, Replicas, passed_on
from .prompt_blocks import prompt_blocks
from .routing import Routing

_LOG = logging.getLogger("whorl.serve")
REPLICA = b"x-whorl-replica"  # a header: who answered
ATTEMPTS = 2  # a request that is the end of whatever reads it must not be the end of all replicas
_GRACE = 5.0  # seconds that a replica has to say itself that a request took too long
# What streams say before the first token: nothing that another replica could not say again.
_OPENING = re.compile(
    rb'data: \{.*"delta":\{"role":"assistant","content":""\}.*\}\s*'
    rb"|event: (response\.(created|in_progress)|message_start|ping)\n.*"
)
_PER_REPLICA = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (.+)$")


class Endpoint:
    """app.state.service is what `HttpServer` asks for settings and requests in progress."""

    def __init__(self, replicas: Replicas, settings: ServerSettings, routing: Routing) -> None:
        self.settings, self.routing, self.running = settings, routing, Running()
        self.uses = [KeyUse(key) for key in settings.who]
        self.num_lost = self.num_retried = 0
        self._replicas = replicas
        self.state = SimpleNamespace(service=self)
        self._app: ASGIApp = Gate(
            self._answer,
            running=self.running,
            keys=settings.keys,
            allowed_hosts=settings.allowed_hosts,
            origins=settings.origins,
            uses=self.uses,
            max_body=settings.max_body,
            body_seconds=settings.body_seconds,
            larger=dict.fromkeys(WITH_MEDIA, settings.max_media_body),  # a model of text alone refuses there
        )
        if settings.origins:
            origins = list(settings.origins)
            self._app = Cors(self._app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = {"/health": self._health, "/metrics": self._metrics}.get(scope["path"])
        if own is not None and scope["method"] == "GET":
            await (await own())(scope, receive, send)
            return
        body = (await receive()).get("body", b"")
        asking = asyncio.ensure_future(self._pass_on(scope, body, send))
        watch = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({asking, watch}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
        finally:
            for each in (asking, watch):
                each.cancel()
            await asyncio.gather(asking, watch, return_exceptions=True)

    # ---- asking replicas

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        key = scope.get(KEY_NUMBER)
        salt = "" if len(self.settings.keys) < 2 else str(key)
        asked = Asked(
            number=uuid.uuid4().hex,
            request=scope[REQUEST_NUMBER],
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"],
            headers=passed_on(scope["headers"]),
            body=body,
            client=tuple(scope.get("client") or ("-", 0)),
            blocks=prompt_blocks(body, salt) if scope["method"] == "POST" else (),
        )
        async with asyncio.timeout(self.settings.timeout + _GRACE):
            num_tokens = await self._ask(asked, send)
        if self.uses and key is not None:
            self.uses[key].charge(num_tokens)

    async def _ask(self, asked: Asked, send: Send) -> int:
        """What the request's key is charged with."""
        for attempt in range(1, ATTEMPTS + 1):
            relay = _Relay(send, self.routing, asked.number)
            try:
                return await self._ask_one(asked, relay)
            except ReplicaLost as error:
                self.num_lost += 1
                _LOG.warning("%s, with request %s", error, asked.request)
                if relay.has_sent:
                    reason = "the replica that wrote this answer was lost; what came of it is not all"
                    raise EngineError(reason) from error
                if attempt == ATTEMPTS:
                    reason = f"{ATTEMPTS} replicas were lost with this request, one after the other"
                    raise EngineError(reason) from error
                self.num_retried += 1
                asked = asked.again(uuid.uuid4().hex)
        raise AssertionError("unreachable")

    async def _ask_one(self, asked: Asked, relay: "_Relay") -> int:
        answer = self._replicas.ask(asked)
        try:
            async for message in answer:
                if message["type"] == END:
                    await relay.flush()
                    return int(message["tokens"])
                await relay.take(message)
            raise ReplicaLost("a replica broke off its answer")
        except ReplicaLost:
            if not relay.is_whole:
                raise
            await relay.flush()
            return 0
        finally:
            await answer.aclose()
            self.routing.ended(asked.number)

    # ---- the endpoint itself

    async def _health(self) -> Response:
        """200 while a replica takes requests."""
        states = await self._replicas.health()
        if not states.get("RUNNING"):
            raise ApiError(503, f"no replica is running: {states}", code="no_replica", headers={"Retry-After": "5"})
        return JSONResponse({"status": "ok", "replicas": states})

    async def _metrics(self) -> Response:
        """What each replica counts, with its name, and what is counted here."""
        found = await self._replicas.metrics()
        lines = []
        for name, kind, text, values in self._own_metrics():
            lines += [f"# HELP whorl:router_{name} {text}", f"# TYPE whorl:router_{name} {kind}"]
            lines += [f"whorl:router_{name}{labels} {value}" for labels, value in values.items()]
        text = "\n".join([*lines, *merged(found)]) + "\n"
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _own_metrics(self) -> Iterator[tuple[str, str, str, dict[str, int]]]:
        """Name, kind, help, and values by their labels."""
        counts, running = self.routing.counts, self.routing.num_running()
        yield "requests_total", "counter", "Requests whose answer began.", {"": counts.requests}
        yield "prompt_blocks_total", "counter", "Blocks of their prompts.", {"": counts.blocks}
        yield "prompt_blocks_seen_total", "counter", "Of these, sent to who had seen them.", {"": counts.blocks_seen}
        yield "replicas_lost_total", "counter", "Requests whose replica was lost.", {"": self.num_lost}
        yield "retries_total", "counter", "Of these, asked again of another.", {"": self.num_retried}
        by_replica = {f'{{replica="{name}"}}': count for name, count in running.items()}
        yield "requests_running", "gauge", "Requests in progress.", by_replica


class _Relay:
    """Passes an answer on, but keeps its head and opening back until there is more: till then it may be thrown away.

    The last message waits for what the replica counted: a client that has it closes the connection.
    """

    def __init__(self, send: Send, routing: Routing, number: str) -> None:
        self.has_sent = self.is_whole = False
        self._send, self._routing, self._number = send, routing, number
        self._kept: list[Message] = []

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            name = (self._routing.where(self._number) or "-").encode()
            message = message | {"headers": [*message["headers"], (REPLICA, name)]}
        self._kept.append(message)
        self.is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not self.is_whole and (self.has_sent or not _is_opening(message)):
            await self.flush()

    async def flush(self) -> None:
        kept, self._kept = self._kept, []
        if kept and not self.has_sent:
            self.has_sent = True
            self._routing.begun(self._number)
        for message in kept:
            await self._send(message)


def _is_opening(message: Message) -> bool:
    if message["type"] == "http.response.start":
        return True
    events = [event for event in message.get("body", b"").split(b"\n\n") if event]
    return all(_OPENING.fullmatch(event) for event in events)


def merged(found: Iterable[tuple[str, str]]) -> list[str]:
    """Texts of Prometheus's format as one: a sample says whose it is, and each family stands together."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in found:
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split()[2]
                known = heads.setdefault(family, [])
                known += [line] if line not in known else []
            elif match := _PER_REPLICA.match(line):
                metric, labels, value = match.groups()
                more = f'replica="{name}"' + (f",{labels}" if labels else "")
                samples.setdefault(family, []).append(f"{metric}{{{more}}} {value}")
    return [line for family in heads for line in (*heads[family], *samples.get(family, ()))]


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
