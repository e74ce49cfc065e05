"""The HTTP endpoint in front of all replicas: an ASGI application behind the same `Gate` as a single engine's.

One replica answers a request. If it is lost before any part of its answer was sent, the request is forwarded once more,
to another replica; if some part was sent, the answer ends with an error. So no client gets two answers.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from whorl.serve.api_error import ApiError
from whorl.serve.dialects import REQUEST_ID
from whorl.serve.engine_thread import EngineError
from whorl.serve.gate import KEY_INDEX, Cors, Gate
from whorl.serve.key_limits import KeyUse
from whorl.serve.running import Running
from whorl.serve.schema_parts import MAX_IDS
from whorl.serve.settings import ServerSettings

from .forwarded import END, ForwardedRequest, Message, ReplicaLost, Replicas, forwarded_headers, prompt_blocks
from .routing import Routing

_LOG = logging.getLogger("whorl.serve")
REPLICA = b"x-whorl-replica"  # a response header: which replica answered
ATTEMPTS = 2  # not more: a request that crashes every replica must not crash all of them
_GRACE = 5.0  # seconds beyond the timeout, in which the replica itself can report that a request took too long
# Events that streams send before the first token. Another replica can send them again, so they are held back.
_OPENING = re.compile(
    rb'data: \{.*"delta":\{"role":"assistant","content":""\}.*\}\s*'
    rb"|event: (response\.(created|in_progress)|message_start|ping)\n.*"
)
# A line of Prometheus's text format: the metric's name, its labels, its value.
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (.+)$")


class Endpoint:
    """Forwards requests to replicas. It is its own `state.service`, from which `HttpServer` reads the settings."""

    def __init__(self, replicas: Replicas, settings: ServerSettings, routing: Routing) -> None:
        self.settings, self.routing, self.running = settings, routing, Running()
        self.uses = [KeyUse(key) for key in settings.all_keys]
        self.num_lost = self.num_retried = 0
        self._replicas = replicas
        self.state = SimpleNamespace(service=self)
        self._app: ASGIApp = Gate(
            self._answer,
            settings,
            running=self.running,
            uses=self.uses,
            max_values=MAX_IDS,  # a replica knows how many its model takes
            takes_media=True,  # a text-only model refuses media itself
        )
        if settings.origins:
            self._app = Cors(self._app, settings.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has passed the gate, which cancels this when the client disconnects."""
        handler = {"/health": self._health, "/metrics": self._metrics}.get(scope["path"])
        if handler is not None and scope["method"] == "GET":
            await (await handler())(scope, receive, send)
            return
        body = (await receive()).get("body", b"")
        await self._forward(scope, body, send)

    # ---- forwarding to replicas

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Forward a request within the time limit, then charge its API key."""
        key = scope.get(KEY_INDEX)
        salt = "" if len(self.settings.keys) < 2 else str(key)
        request = ForwardedRequest(
            attempt_id=uuid.uuid4().hex,
            request_id=scope[REQUEST_ID],
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"],
            headers=forwarded_headers(scope["headers"]),
            body=body,
            client=tuple(scope.get("client") or ("-", 0)),
            blocks=prompt_blocks(body, salt) if scope["method"] == "POST" else (),
        )
        async with asyncio.timeout(self.settings.timeout + _GRACE):
            num_tokens = await self._ask(request, send)
        if self.uses and key is not None:
            self.uses[key].charge(num_tokens)

    async def _ask(self, request: ForwardedRequest, send: Send) -> int:
        """Forward a request, again if its replica is lost; return the tokens that its API key is charged with."""
        for attempt in range(1, ATTEMPTS + 1):
            relay = _Relay(send, self.routing, request.attempt_id)
            try:
                return await self._ask_once(request, relay)
            except ReplicaLost as error:
                self.num_lost += 1
                _LOG.warning("%s, with request %s", error, request.request_id)
                if relay.has_sent:
                    reason = "the replica that wrote this answer was lost; the answer is incomplete"
                    raise EngineError(reason) from error
                if attempt == ATTEMPTS:
                    reason = f"{ATTEMPTS} replicas were lost with this request, one after the other"
                    raise EngineError(reason) from error
                self.num_retried += 1
                request = request.retry(uuid.uuid4().hex)
        raise AssertionError("unreachable")

    async def _ask_once(self, request: ForwardedRequest, relay: "_Relay") -> int:
        """Relay one replica's answer; return its tokens, 0 if the replica was lost after the last message.

        Raises ReplicaLost if it was lost before.
        """
        answer = self._replicas.ask(request)
        try:
            async for message in answer:
                if message["type"] == END:
                    await relay.flush()
                    return int(message["tokens"])
                await relay.add(message)
            raise ReplicaLost("a replica broke off its answer")
        except ReplicaLost:
            if not relay.is_complete:
                raise
            await relay.flush()
            return 0
        finally:
            await answer.aclose()
            self.routing.finish(request.attempt_id)

    # ---- the endpoint's own routes

    async def _health(self) -> Response:
        """Return 200 while at least one replica takes requests."""
        states = await self._replicas.health()
        if not states.get("RUNNING"):
            raise ApiError(503, f"no replica is running: {states}", code="no_replica", headers={"Retry-After": "5"})
        return JSONResponse({"status": "ok", "replicas": states})

    async def _metrics(self) -> Response:
        """Return the metrics of each replica, labelled with its name, and those of the endpoint."""
        replica_metrics = await self._replicas.metrics()
        lines = []
        for name, kind, text, values in self._router_metrics():
            lines += [f"# HELP whorl:router_{name} {text}", f"# TYPE whorl:router_{name} {kind}"]
            lines += [f"whorl:router_{name}{labels} {value}" for labels, value in values.items()]
        text = "\n".join([*lines, *merge_metrics(replica_metrics)]) + "\n"
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _router_metrics(self) -> Iterator[tuple[str, str, str, dict[str, int]]]:
        """Yield name, kind, help text, and values by labels of each metric."""
        counts, running = self.routing.counts, self.routing.num_running()
        yield "requests_total", "counter", "Requests whose answer began.", {"": counts.requests}
        yield "prompt_blocks_total", "counter", "Blocks of their prompts.", {"": counts.blocks}
        yield "prompt_blocks_seen_total", "counter", "Of these, seen before by the replica.", {"": counts.blocks_seen}
        yield "replicas_lost_total", "counter", "Requests whose replica was lost.", {"": self.num_lost}
        yield "retries_total", "counter", "Of these, sent to another replica.", {"": self.num_retried}
        by_replica = {f'{{replica="{name}"}}': count for name, count in running.items()}
        yield "requests_running", "gauge", "Requests in progress.", by_replica


class _Relay:
    """Passes an answer on to the client. Until the first token it holds back the headers and the opening events, so
    that the answer can still be discarded.

    The last message is held back until `END`, which has the token count: a client that has the last message may close
    the connection.
    """

    def __init__(self, send: Send, routing: Routing, attempt_id: str) -> None:
        self.has_sent = self.is_complete = False
        self._send, self._routing, self._attempt_id = send, routing, attempt_id
        self._pending: list[Message] = []

    async def add(self, message: Message) -> None:
        """Take a message of the replica and send it, or hold it back."""
        if message["type"] == "http.response.start":
            name = (self._routing.replica_of(self._attempt_id) or "-").encode()
            message = message | {"headers": [*message["headers"], (REPLICA, name)]}
        self._pending.append(message)
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not self.is_complete and (self.has_sent or not _is_opening(message)):
            await self.flush()

    async def flush(self) -> None:
        """Send what is held back."""
        messages, self._pending = self._pending, []
        if messages and not self.has_sent:
            self.has_sent = True
            self._routing.mark_begun(self._attempt_id)
        for message in messages:
            await self._send(message)


def _is_opening(message: Message) -> bool:
    if message["type"] == "http.response.start":
        return True
    events = [event for event in message.get("body", b"").split(b"\n\n") if event]
    return all(_OPENING.fullmatch(event) for event in events)


def merge_metrics(replica_metrics: Iterable[tuple[str, str]]) -> list[str]:
    """Merge texts in Prometheus's format: add the replica's name to each sample and group the samples by family.

    replica_metrics: pairs of a replica's name and its text. Returns the lines of the merged text.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in replica_metrics:
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split()[2]
                known = heads.setdefault(family, [])
                known += [line] if line not in known else []
            elif match := _SAMPLE.match(line):
                metric, labels, value = match.groups()
                all_labels = f'replica="{name}"' + (f",{labels}" if labels else "")
                samples.setdefault(family, []).append(f"{metric}{{{all_labels}}} {value}")
    return [line for family in heads for line in (*heads[family], *samples.get(family, ()))]
