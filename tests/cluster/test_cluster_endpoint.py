"""The endpoint before replicas that are made up here, and a replica's own application, both without Ray."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest
from serving import told

from whorl.cluster.endpoint import ATTEMPTS, Endpoint, merge_metrics
from whorl.cluster.forwarded import END, ForwardedRequest, Message, ReplicaLost, forwarded_headers
from whorl.cluster.replica import Replica, replica_settings
from whorl.cluster.routing import Routing
from whorl.serve.key_limits import ApiKey
from whorl.serve.openai import create_app
from whorl.serve.settings import ServerSettings

CHAT = "/v1/chat/completions"
OPENING = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'


def start(kind: bytes = b"text/event-stream") -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


def body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


END_OF_STREAM = [body(b"data: [DONE]\n\n"), body(b"", more=False), {"type": END, "tokens": 7}]
WHOLE = [start(b"application/json"), body(b'{"ok":1}', more=False), {"type": END, "tokens": 7}]


class Scripted:
    """Each request gets the next script: messages, or an exception; a script that ends early breaks off."""

    def __init__(self, routing: Routing, *scripts: Sequence[Message | Exception]) -> None:
        self.routing, self.scripts = routing, list(scripts)
        self.requests: list[ForwardedRequest] = []
        self.closed = 0
        routing.set_replicas("ab")

    async def ask(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        self.requests.append(request)
        self.routing.assign(request.attempt_id, self.routing.order(request.blocks)[0], request.blocks)
        try:
            for each in self.scripts.pop(0):
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            self.closed += 1

    async def health(self) -> dict[str, int]:
        return {"RUNNING": 1, "STARTING": 1} if self.scripts else {"STARTING": 2}

    async def metrics(self) -> list[tuple[str, str]]:
        return [("a", "# TYPE x counter\nx 1.0\n")]


def endpoint(*scripts: Sequence[Message | Exception], **settings: Any) -> tuple[Endpoint, Scripted]:
    routing = Routing()
    replicas = Scripted(routing, *scripts)
    return Endpoint(replicas, ServerSettings(**settings), routing), replicas


def talk(app: Any, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await work(client)

    return asyncio.run(run())


def post(app: Any, path: str = CHAT, **options: Any) -> httpx.Response:
    arguments = {"json": {"messages": [{"role": "user", "content": "x" * 600}]}} | options
    return talk(app, lambda client: client.post(path, **arguments))


def asked_for(**said: Any) -> ForwardedRequest:
    return ForwardedRequest(
        attempt_id="1",
        request_id="1",
        method="POST",
        path="/v1/completions",
        query=b"",
        headers=[(b"content-type", b"application/json")],
        body=json.dumps(said).encode(),
        client=("-", 0),
    )


LOST = ReplicaLost("replica a was lost")


def test_an_answer_is_passed_on() -> None:
    app, replicas = endpoint([start(), body(OPENING), body(TOKEN), *END_OF_STREAM])
    headers = {"X-Request-Id": "mine", "Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
    response = post(app, headers=headers)
    assert response.content == OPENING + TOKEN + b"data: [DONE]\n\n"
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-whorl-replica"] == "a"
    (request,) = replicas.requests
    passed_on = dict(request.scope()["headers"])
    assert passed_on[b"x-request-id"] == b"mine"
    assert passed_on[b"content-type"] == b"application/json"
    assert not {b"origin", b"sec-fetch-site", b"content-length"} & set(passed_on)
    assert len(request.blocks) == 2
    assert app.routing.num_running() == {"a": 0, "b": 0}
    assert (app.routing.counts.requests, replicas.closed) == (1, 1)


@pytest.mark.parametrize("before", [[], [start()], [start(), body(OPENING)], [start(), body(OPENING + OPENING)]])
def test_a_request_of_which_nothing_went_out_is_asked_of_another(before: list[Message]) -> None:
    app, replicas = endpoint([*before, LOST], [start(), body(OPENING), body(TOKEN), *END_OF_STREAM])
    response = post(app)
    assert response.status_code == 200
    assert response.content == OPENING + TOKEN + b"data: [DONE]\n\n", "once"
    first, second = replicas.requests
    assert first.attempt_id != second.attempt_id
    assert (first.body, first.request_id) == (second.body, second.request_id)
    assert (app.num_lost, app.num_retried) == (1, 1)


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    app, replicas = endpoint([start(), body(OPENING), body(TOKEN), LOST], WHOLE)
    response = post(app)
    assert response.content.startswith(OPENING + TOKEN)
    last, done = response.text.strip().split("\n\n")[-2:]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert done == "data: [DONE]"
    assert len(replicas.requests) == 1, "it is not answered twice"
    assert app.routing.num_running() == {"a": 0, "b": 0}


def test_a_request_is_not_the_end_of_all_replicas() -> None:
    app, replicas = endpoint(*([LOST] for _ in range(9)))
    response = post(app)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert response.headers["retry-after"] == "5"
    assert len(replicas.requests) == ATTEMPTS == 2


def test_an_answer_that_breaks_off_without_a_word_is_a_lost_replica() -> None:
    app, replicas = endpoint([start(b"application/json")], WHOLE)
    assert post(app).json() == {"ok": 1}
    assert len(replicas.requests) == 2


def test_what_openings_there_are() -> None:
    events = (
        b'event: response.created\ndata: {"type":"response.created"}\n\n',
        b'event: message_start\ndata: {"type":"message_start"}\n\n',
    )
    for event in events:
        app, replicas = endpoint([start(), body(event), LOST], [start(), body(event), body(TOKEN), *END_OF_STREAM])
        assert post(app).content == event + TOKEN + b"data: [DONE]\n\n"
        assert len(replicas.requests) == 2


def test_a_client_that_leaves_ends_its_request() -> None:
    app, replicas = endpoint()
    waiting = asyncio.Event()

    async def run() -> None:
        async def ask(request: ForwardedRequest) -> AsyncGenerator[Message, None]:
            try:
                waiting.set()
                await asyncio.Event().wait()
                yield {}
            finally:
                replicas.closed += 1

        replicas.ask = ask  # type: ignore[method-assign]
        bodies = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Message:
            if bodies:
                return bodies.pop()
            await waiting.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            raise AssertionError(message)

        await asyncio.wait_for(app(asked_for().scope(), receive, send), 20)

    asyncio.run(run())
    assert replicas.closed == 1


def test_a_request_that_nobody_answers_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.cluster.endpoint._GRACE", 0.0)
    app, replicas = endpoint(timeout=0.05)

    async def ask(request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        await asyncio.Event().wait()
        yield {}

    replicas.ask = ask  # type: ignore[method-assign]
    response = post(app)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "timeout")


def test_keys_hosts_and_origins_are_looked_at_here() -> None:
    app, replicas = endpoint(WHOLE, api_key="secret", allowed_hosts=("localhost",))
    assert post(app).status_code == 401
    assert post(app, headers={"Authorization": "Bearer secret", "Host": "evil.example"}).status_code == 421
    assert post(app, headers={"Authorization": "Bearer secret", "Origin": "http://evil.example"}).status_code == 403
    assert not replicas.requests
    assert post(app, headers={"Authorization": "Bearer secret"}).json() == {"ok": 1}


def test_a_key_is_charged_what_the_replica_counted() -> None:
    key = ApiKey(key="secret", name="alice", tokens_per_minute=5)
    app, _ = endpoint(WHOLE, WHOLE, more_keys=(key,))
    headers = {"Authorization": "Bearer secret"}
    assert post(app, headers=headers).status_code == 200
    refused = post(app, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


def test_keys_do_not_share_prompts() -> None:
    app, replicas = endpoint(WHOLE, WHOLE, api_key=("one", "two"))
    for key in ("one", "two"):
        assert post(app, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    first, second = replicas.requests
    assert not set(first.blocks) & set(second.blocks)


def test_health_and_metrics() -> None:
    app, _ = endpoint([start(), body(TOKEN), *END_OF_STREAM], WHOLE)
    post(app)
    healthy = talk(app, lambda client: client.get("/health"))
    assert healthy.json() == {"status": "ok", "replicas": {"RUNNING": 1, "STARTING": 1}}
    text = talk(app, lambda client: client.get("/metrics")).text
    for line in ("whorl:router_requests_total 1", "whorl:router_prompt_blocks_total 2", 'x{replica="a"} 1.0'):
        assert line in text.splitlines()
    none, _ = endpoint()
    assert talk(none, lambda client: client.get("/health")).json()["error"]["code"] == "no_replica"


def test_metrics_of_replicas_stand_together() -> None:
    text = '# HELP y Help.\n# TYPE y gauge\ny{model_name="m"} 3\n# TYPE z counter\nz 1\n'
    assert merge_metrics([("a", text), ("b", text)]) == [
        "# HELP y Help.",
        "# TYPE y gauge",
        'y{replica="a",model_name="m"} 3',
        'y{replica="b",model_name="m"} 3',
        "# TYPE z counter",
        'z{replica="a"} 1',
        'z{replica="b"} 1',
    ]


def test_headers_that_are_not_passed_on() -> None:
    headers = [(b"Host", b"x"), (b"Sec-Fetch-Mode", b"cors"), (b"Authorization", b"Bearer k"), (b"Accept", b"*/*")]
    assert forwarded_headers(headers) == [(b"authorization", b"Bearer k"), (b"accept", b"*/*")]


# ---- a replica, with the real application over a model that says what it is told


class Direct:
    """The one replica there is, without Ray."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.charged: list[int] = []

    async def ask(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        async for message in self.replica.answer(request):
            if message["type"] == END:
                self.charged.append(message["tokens"])
            yield message

    async def health(self) -> dict[str, int]:
        await self.replica.check_health()
        return {"RUNNING": 1}

    async def metrics(self) -> list[tuple[str, str]]:
        return []


def test_a_replica_answers_as_a_server_does() -> None:
    keys = (ApiKey(key="secret", name="alice", requests_per_minute=1), ApiKey(key="other", name="bob"))
    settings = ServerSettings(names=("told",), more_keys=keys, origins=("http://page.example",))
    inner = replica_settings(settings)
    assert inner.keys == settings.keys
    assert inner.more_keys[0].requests_per_minute is None, "limits are the endpoint's"
    assert inner.origins == ()

    async def work(client: httpx.AsyncClient) -> None:
        client.headers["Authorization"] = "Bearer other"
        assert (await client.get("/health")).json()["replicas"] == {"RUNNING": 1}
        said = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
        whole = await client.post(CHAT, json=said)
        assert whole.json()["choices"][0]["message"]["content"] == "It is fine."
        assert whole.headers["x-whorl-weights"] == "3"
        streamed = await client.post(CHAT, json=said | {"stream": True})
        events = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events) == "It is fine."
        assert (await client.post(CHAT, json={"messages": 3})).status_code == 400
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "told"
        assert (await client.get("/no/such")).status_code == 404

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await work(client)
        await replica._service.stop()

    replica = Replica(lambda: create_app(told({"hello": "It is fine."}), inner), weights=3)
    replicas = Direct(replica)
    app: Any = Endpoint(replicas, settings, Routing())
    asyncio.run(run())
    assert replicas.charged[0] == replicas.charged[1] > len("It is fine."), "tokens of the prompt and the answer"


def test_a_request_that_is_closed_leaves_nothing_behind() -> None:
    llm = told(delay=0.01)
    replica = Replica(lambda: create_app(llm, ServerSettings(names=("told",))))

    async def run() -> None:
        answer = replica.answer(asked_for(prompt="abc", stream=True, max_tokens=500, ignore_eos=True))
        async for message in answer:
            if message["type"] == "http.response.body":
                break
        await answer.aclose()
        async with asyncio.timeout(20):
            while llm.has_work or llm.pool.num_used:
                await asyncio.sleep(0.01)
        await replica._service.stop()

    asyncio.run(run())


def test_a_replica_whose_engine_failed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray replaces what is dead; a server without an engine would go on refusing."""
    ended = threading.Event()
    codes: list[int] = []
    monkeypatch.setattr("os._exit", lambda code: (codes.append(code), ended.set()))
    llm = told()
    model: Any = llm.model
    model.failure = RuntimeError("out of memory")
    replica = Replica(lambda: create_app(llm, ServerSettings(names=("told",))))

    async def run() -> None:
        await replica.check_health()
        async for message in replica.answer(asked_for(prompt="abc")):
            if message["type"] == "http.response.start":
                assert message["status"] == 503
        assert await asyncio.to_thread(ended.wait, 20)
        with pytest.raises(Exception, match="out of memory"):
            await replica.check_health()
        await replica._service.stop()

    asyncio.run(run())
    assert codes == [70]
