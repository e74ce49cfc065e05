"""Connections that ask for nothing, hosts that are not the server's, and what one key learns about another."""

import asyncio
import errno
import json
import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, answers, byte_tokenizer, own_process, serving, told, wait_until

from whorl.engine.tokenizer import Tokenizer
from whorl.serve import connections, openai
from whorl.serve.connections import Listener, listen, most_connections
from whorl.serve.gate import Gate
from whorl.serve.hosts import hosts_for, is_loopback
from whorl.serve.http_server import HttpServer
from whorl.serve.request_log import LogLimit
from whorl.serve.running import Running
from whorl.serve.settings import ServerSettings

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def port_of(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def rest(line: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    received = b""
    try:
        while piece := line.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    return json.loads(body)["error"]


# ---- idle ones


@pytest.mark.parametrize("sent", [b"", b"GET /hea", GET[:-2]])
def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    with serving(told(), head_seconds=0.2) as served, connect(port_of(served)) as line:
        line.sendall(sent)
        assert error_of(rest(line), 408)["code"] == "timeout"


def test_a_head_that_comes_letter_by_letter_is_closed() -> None:
    with serving(told(), head_seconds=0.3) as served, connect(port_of(served)) as line:
        line.sendall(GET)  # the second request's head counts from the end of the first
        assert b"200 OK" in line.recv(65536)
        line.settimeout(0.05)
        for _ in range(400):
            try:
                line.sendall(b"G")
                if line.recv(65536) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("it is still open")
        assert served.http.get("/health").status_code == 200


def test_a_request_in_progress_is_not_idle() -> None:
    with serving(told(delay=0.02), head_seconds=0.1) as served:
        assert len(served.complete("a", max_tokens=40)["choices"][0]["text"]) == 40


def test_what_is_not_http_is_told_in_json() -> None:
    with serving(told()) as served, connect(port_of(served)) as line:
        line.sendall(b"hello\r\n\r\n")
        assert error_of(rest(line), 400)["code"] == "invalid_http"


@pytest.fixture(scope="module")
def ambiguous() -> Iterator[Served]:
    with serving(told()) as served:
        yield served


SMUGGLED = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        "content-length: 4\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 40",
        "content-length: 4\r\ncontent-length: 40",
        "content-length: 4, 40",
        "content-length: +4",
        "content-length: 0x4",
        "content-length: -4",
        "transfer-encoding: xchunked",
        "transfer-encoding: chunked\r\ntransfer-encoding: identity",
        "transfer-encoding: chunked, identity",
        "transfer-encoding : chunked",
        "transfer-encoding\t: chunked\r\ncontent-length: 4",
        "content-length: 4\r\nhost: other",
        "content-length: 4\r\n\x00: 1",
    ],
)
def test_a_request_whose_end_is_in_doubt_is_refused_at_once(ambiguous: Served, headers: str) -> None:
    head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}\r\n\r\n"
    with connect(port_of(ambiguous)) as line:
        began = time.monotonic()
        line.sendall(head.encode() + b"0\r\n\r\n" + SMUGGLED)
        answer = rest(line)
        assert time.monotonic() - began < 1.5
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    assert error_of(answer, 400)["code"] == "invalid_http"


def test_a_body_that_is_never_sent_is_refused_at_once(ambiguous: Served) -> None:
    with connect(port_of(ambiguous)) as line:
        line.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\ntransfer-encoding: chunked\r\n\r\n")
        line.settimeout(1.5)
        assert "both Content-Length and Transfer-Encoding" in error_of(rest(line), 400)["message"]


# ---- too many


@pytest.fixture
def full() -> Iterator[tuple[Served, list[socket.socket]]]:
    with serving(told(), max_connections=4) as served, ExitStack() as stack:
        lines = [stack.enter_context(connect(port_of(served))) for _ in range(4)]
        wait_until(lambda: len(served.server.connections._all) == 4)
        yield served, lines


def test_one_more_is_refused_in_json(full: Any) -> None:
    served, _ = full
    response = served.http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "too_many_connections"


def test_idle_ones_make_room(full: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served, lines = full
    monkeypatch.setattr(connections, "_YOUNG", 0.0)
    assert served.complete("a", max_tokens=2)["choices"][0]["text"] == "bc"
    assert rest(lines[0]) == b""  # the longest idle
    assert len(served.server.connections._all) == 4


def test_many_more_are_cut_off(full: Any) -> None:
    served, _ = full
    with ExitStack() as stack:
        more = [stack.enter_context(connect(port_of(served))) for _ in range(12)]
        wait_until(lambda: len(served.server.connections._all) == 12)
        assert rest(more[-1]) == b""


def test_as_many_as_there_are_files() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 8 <= most_connections() <= min(4096, soft)


def test_where_files_run_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (listener,) = listen("127.0.0.1", 0)
    listener.listen()
    real, failures = socket.socket.accept, [errno.EMFILE]

    def accept(self: Any) -> Any:
        if failures:
            raise OSError(failures.pop(), "Too many open files")
        return real(self)

    with listener, connect(listener.getsockname()[1]) as line:
        monkeypatch.setattr(socket.socket, "accept", accept)
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert rest(line) == b""
        assert "turned away: Too many open files" in caplog.text
        assert listener._spare is not None
        with connect(listener.getsockname()[1]) as other:
            taken, _ = listener.accept()
            taken.close()
            assert rest(other) == b""
    assert listener._spare is None


@pytest.mark.slow
def test_more_connections_than_files(tmp_path: Path) -> None:
    """140 idle ones against 128 files: others are answered, and the log stays short."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
    log = tmp_path / "log"
    with (
        log.open("wb") as out,
        ExitStack() as stack,
        own_process("llm=told()", first=few, output=out) as (process, url),
    ):
        for _ in range(140):
            stack.enter_context(connect(int(url.rsplit(":", 1)[1])))
        wait_until(lambda: answers(url))
        process.terminate()
        assert process.wait(30) == 0
    assert log.stat().st_size < 20_000
    assert b"Traceback" not in log.read_bytes()


def test_a_client_that_does_not_read_is_given_up() -> None:
    closed: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: 1", "more_body": True})
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    gate = Gate(app, ServerSettings(max_body=10, body_seconds=0.05), running=Running())
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    asyncio.run(asyncio.wait_for(gate(scope, receive, send), 20))
    assert closed == [True]


def test_logs_are_limited() -> None:
    seen: list[str] = []
    logger, handler = logging.getLogger("test.limit"), logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    limit = LogLimit(most=3, seconds=3600)
    logger.addHandler(handler)
    logger.addFilter(limit)

    def say(number: int) -> None:
        logger.error("it failed: %d", number)

    for number in range(100):
        say(number)
    logger.error("something else")
    limit._seconds = 0.0
    say(100)
    assert seen == [
        *(f"it failed: {n}" for n in range(3)),
        *("something else", "it failed: 100 (97 more like this were left out)"),
    ]


# ---- hosts


def test_a_stranger_s_name_is_refused() -> None:
    with serving(told(), allowed_hosts=hosts_for("127.0.0.1", ())) as served:
        for host in (
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[::2]:80",
            *("[::1]evil", "[::1]:80evil", "[::1].evil.example", "[::1", "[[::1]]", "::1]", "[localhost]:x"),
            *(
                "localhost:evil",
                "localhost:80@evil.example",
                "localhost:80, evil.example",
                "localhost evil",
                "localhost/",
            ),
        ):
            response = served.http.get("/v1/models", headers={"Host": host})
            assert response.status_code == 421
            assert response.json()["error"]["code"] == "unknown_host"
            assert repr(host) in response.json()["error"]["message"]
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:9", "[::1]:8000", "localhost."):
            assert served.http.get("/v1/models", headers={"Host": host}).status_code == 200
        with connect(port_of(served)) as line:
            line.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert "Host is missing" in error_of(rest(line), 421)["message"]


def test_hosts_by_address() -> None:
    own = ("localhost", "127.0.0.1", "::1")
    assert hosts_for("127.0.0.1", ()) == own
    assert hosts_for("localhost", ["api.example"]) == (*own, "api.example")
    assert hosts_for("0.0.0.0", ()) == hosts_for("127.0.0.1", ["*"]) == ("*",)
    for empty in ([""], ["box", " "]):
        with pytest.raises(ValueError, match="--allowed-hosts has an empty name"):
            hosts_for("127.0.0.1", empty)
    assert hosts_for("0.0.0.0", ["API.example."]) == (*own, "0.0.0.0", "api.example")
    assert [is_loopback(h) for h in ("127.0.0.9", "::1", "localhost", "0.0.0.0", "::", "box")] == [True] * 3 + [
        False
    ] * 3


@pytest.mark.parametrize(
    ("options", "allowed", "warns"),
    [
        ({"host": "127.0.0.1"}, ("localhost", "127.0.0.1", "::1"), False),
        ({"host": "0.0.0.0"}, ("*",), True),
        ({"host": "0.0.0.0", "api_key": "k"}, ("*",), False),
        ({"host": "localhost", "allowed_hosts": ["*"]}, ("*",), False),
    ],
)
def test_what_the_command_allows_and_warns_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: Any, allowed: Any, warns: bool
) -> None:
    settings: list[Any] = []

    def run(self: HttpServer, sockets: list[Listener]) -> None:
        settings.append(self._service.settings)
        assert all(isinstance(one, Listener) for one in sockets)
        assert len({one.getsockname()[1] for one in sockets}) == 1
        for one in sockets:
            one.close()

    monkeypatch.setattr(HttpServer, "run", run)
    assert openai.run("told", llm=told(), port=0, **options) == 0
    assert settings[0].allowed_hosts == allowed
    assert ("anybody may use it" in caplog.text) == warns


# ---- templates


def test_a_template_that_is_a_link_out_of_the_folder(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    secret.write_text("password")
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_json())
    for name in ("chat_template.jinja", "additional_chat_templates/x.jinja"):
        (folder / name).symlink_to(secret)
        with pytest.raises(ValueError, match=r"jinja: is a link to .*secret, outside of the model's folder"):
            Tokenizer.from_path(folder)
        (folder / name).unlink()
    (folder / "real.jinja").write_text("fine")
    (folder / "chat_template.jinja").symlink_to("real.jinja")
    assert Tokenizer.from_path(folder).template.sources["default"] == "fine"


def test_links_of_the_hub_s_cache(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    folder.mkdir(parents=True)
    for name, text in (("tokenizer.json", byte_tokenizer().to_json()), ("chat_template.jinja", "fine")):
        (blobs / f"digest-{name}").write_text(text)
        (folder / name).symlink_to(f"../../blobs/digest-{name}")
    assert Tokenizer.from_path(folder).template.sources["default"] == "fine"


# ---- keys


def cached(served: Served, key: str, **options: Any) -> int:
    """Of a prompt of 41 tokens, in blocks of 8."""
    headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": "the secret prompt of somebody, 41 letters", "max_tokens": 1, **options}
    response = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_keys_do_not_share_the_prefix_cache() -> None:
    with serving(told(), api_key=("one", "two")) as served:
        assert [cached(served, key) for key in ("one", "one", "two", "two", "one")] == [0, 40, 0, 40, 40]
        assert [cached(served, "two", cache_salt="x") for _ in range(2)] == [0, 40]
        assert cached(served, "one", cache_salt="x") == 0
        headers = {"Authorization": "Bearer three"}
        assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 401


def test_one_key_shares_with_itself_and_salts_separate() -> None:
    with serving(told(), api_key="one") as served:
        assert [cached(served, "one") for _ in range(2)] == [0, 40]
        assert [cached(served, "one", cache_salt="x") for _ in range(2)] == [0, 40]


def test_a_server_that_is_ready_while_it_ends() -> None:
    """Ctrl-C has closed its sockets when the warm-up is done."""
    with serving(told({})) as served:
        server = HttpServer(served.app, log_level="error")
        server._settings = replace(server._settings, port=0)
        server.listen()
        for listener in server.listeners:
            listener.close()
        server.log_ready()
        assert server.root.startswith("http://127.0.0.1:")
