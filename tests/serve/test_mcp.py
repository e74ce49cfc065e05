"""Tools of MCP servers through `/page/mcp`: with the SDK's own servers, and what must not be reached or passed on."""

import json
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from mcp_servers import Reply, result, scripted, sdk_server
from serving import Served, serving, told

from whorl.media.http_source import Target
from whorl.serve import mcp_client
from whorl.serve.mcp_client import Line, McpClient, McpError, Session, addresses, check_servers
from whorl.serve.settings import ServerSettings

MODERN, SESSIONS = "2026-07-28", "2025-11-25"
TOOL = {"name": "weather", "description": "Tells it.", "inputSchema": {"type": "object"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(), mcp_servers=("loopback", "http://tools.example/mcp")) as running:
        yield running


def ask(served: Served, what: str, url: str, **more: Any) -> httpx.Response:
    return served.http.post(f"/page/mcp/{what}", json={"url": url, **more})


def refusal(served: Served, what: str, url: str, **more: Any) -> tuple[int, str]:
    response = ask(served, what, url, **more)
    return response.status_code, response.json()["error"]["message"]


def modern(message: dict[str, Any], headers: dict[str, str], tools: list[Any] | None = None) -> Reply:
    """A server of 2026-07-28 with one tool."""
    if message["method"] == "server/discover":
        return result(message, {"supportedVersions": [MODERN]})
    if message["method"] == "tools/list":
        return result(message, {"tools": [TOOL] if tools is None else tools})
    return result(message, {"content": [{"type": "text", "text": "sunny"}]})


# ---- with MCP's own servers


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), [("mcp", MODERN), ("mcp-sessions", SESSIONS)])
def test_the_sdks_server_is_understood(served: Served, name: str, version: str) -> None:
    with sdk_server(name) as url:
        listed = ask(served, "tools", url).json()
        assert listed["version"] == version
        assert (listed["session"] is None) == (version == MODERN)
        tools = {tool["name"]: tool for tool in listed["tools"]}
        assert tools.keys() == {"weather", "slow", "broken", "table"}
        assert tools["weather"]["description"] == "The weather in a city."
        assert tools["weather"]["parameters"]["required"] == ["city"]
        session = {"version": version, "session": listed["session"]}

        def call(tool: str, **arguments: Any) -> Any:
            return ask(served, "call", url, name=tool, arguments=arguments, **session).json()

        assert call("weather", city="Paris") == {"text": "It is sunny in Paris.", "is_error": False}
        assert call("slow", seconds=0.2) == {"text": "done", "is_error": False}
        broken = call("broken")
        assert broken["is_error"]
        assert "broken" in broken["text"]
        assert call("table")["text"]
        assert call("weather")["is_error"] or "error" in call("weather")  # an argument is missing
        if version == SESSIONS:
            lost = ask(served, "call", url, name="weather", version=version, session="0" * 32)
            assert (lost.status_code, lost.json()["error"]["code"]) == (409, "mcp_session_lost")


# ---- what is asked, and what the answer may be


def test_what_is_sent(served: Served) -> None:
    """Every request of 2026-07-28 says its version, twice; nothing of the page's request goes along."""
    with scripted(modern) as (url, received):
        listed = ask(served, "tools", url).json()
        assert listed == {
            "version": MODERN,
            "session": None,
            "tools": [{"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}],
            "left_out": [],
        }
        called = ask(served, "call", url, name="weather \u00fc", arguments={"a": 1}, version=MODERN)
        assert called.json() == {"text": "sunny", "is_error": False}
    discovered, _, (message, headers) = received
    assert discovered[0]["method"] == headers["mcp-method"].replace("tools/call", "server/discover")
    assert message["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == MODERN
    assert message["params"] | {"_meta": None} == {"name": "weather \u00fc", "arguments": {"a": 1}, "_meta": None}
    assert headers["mcp-name"] == "=?base64?d2VhdGhlciDDvA==?="
    assert headers["host"] == url.split("/")[2]
    assert headers.keys() == {
        *("host", "content-type", "content-length", "accept", "accept-encoding", "user-agent", "connection"),
        *("mcp-protocol-version", "mcp-method", "mcp-name"),
    }


def test_a_server_with_sessions(served: Served) -> None:
    """The handshake, a stream with a ping and a request in it, pages of tools, and one call."""
    asks = [
        {"jsonrpc": "2.0", "method": "notifications/message", "params": {}},
        {"jsonrpc": "2.0", "id": "p", "method": "ping"},
        {"jsonrpc": "2.0", "id": 7, "method": "sampling/createMessage", "params": {}},
    ]

    def answer(message: dict[str, Any], headers: dict[str, str]) -> Reply:
        method = message.get("method")
        if method == "server/discover":
            return Reply({"jsonrpc": "2.0", "id": "server-error", "error": {"code": -32600, "message": "no"}}, 400)
        if method == "initialize":
            return result(message, {"protocolVersion": "2025-06-18"}, Mcp_Session_Id="one")
        if method is None or "id" not in message:
            return Reply(status=202)
        assert headers["mcp-session-id"] == "one"
        assert headers["mcp-protocol-version"] == "2025-06-18"
        if method == "tools/list":
            is_first = "cursor" not in message["params"]
            return result(message, {"tools": [TOOL] if is_first else [], "nextCursor": "2" if is_first else None})
        done = {"jsonrpc": "2.0", "id": message["id"], "result": {"content": [{"type": "text", "text": "a\nb"}]}}
        events = "".join(f"event: message\r\ndata: {json.dumps(one)}\r\n\r\n" for one in [*asks, done])
        return Reply(f": hello\nid: 0\ndata:\n\n{events}".encode(), kind="text/event-stream; charset=utf-8")

    with scripted(answer) as (url, received):
        listed = ask(served, "tools", url).json()
        assert (listed["version"], listed["session"], len(listed["tools"])) == ("2025-06-18", "one", 1)
        called = ask(served, "call", url, name="weather", version="2025-06-18", session="one").json()
        assert called == {"text": "a\nb", "is_error": False}
    methods = [message.get("method") for message, _ in received]
    assert methods[:5] == ["server/discover", "initialize", "notifications/initialized", "tools/list", "tools/list"]
    replies = {message["id"]: message for message, _ in received if "method" not in message}
    assert replies["p"]["result"] == {}
    assert replies[7]["error"]["code"] == -32601


@pytest.mark.parametrize("status", [200, 202, 204])
def test_a_notification_has_no_answer(served: Served, status: int) -> None:
    """Servers say so with several statuses; MCP's own clients take them all."""

    def answer(message: dict[str, Any], headers: dict[str, str]) -> Reply:
        if message["method"] == "server/discover":
            return Reply(status=404)
        if message["method"] == "initialize":
            return result(message, {"protocolVersion": SESSIONS})
        if message["method"] == "notifications/initialized":
            return Reply(status=status)
        return result(message, {"tools": [TOOL]})

    with scripted(answer) as (url, _):
        assert len(ask(served, "tools", url).json()["tools"]) == 1


def contents(*blocks: Any, **more: Any) -> Any:
    return lambda message, headers: result(message, {"content": list(blocks), **more})


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (contents({"type": "text", "text": "a"}, {"type": "text", "text": "b"}), "a\nb"),
        (contents({"type": "text", "text": "half \ud83d"}), "half ?"),
        (contents(structuredContent={"rows": [1]}), '{"rows": [1]}'),
        (contents({"type": "resource", "resource": {"uri": "x:", "text": "inside"}}), "inside"),
        (contents({"type": "resource_link", "uri": "https://e.org", "name": "page"}), "page: https://e.org"),
        (contents({"type": "image", "mimeType": "image/png", "data": "AA=="}), "(image of type image/png: only texts"),
    ],
)
def test_a_result_is_text(served: Served, answer: Any, text: str) -> None:
    with scripted(answer) as (url, _):
        assert ask(served, "call", url, name="x", version=MODERN).json()["text"].startswith(text)


def endless(message: dict[str, Any], headers: dict[str, str]) -> Reply:
    return Reply(b"data: " + b"x" * (2 << 20), kind="text/event-stream")


def deep(message: dict[str, Any], headers: dict[str, str]) -> Reply:
    return Reply(b"[" * 200_000)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda *_: Reply(status=302, Location="http://127.0.0.1:1/"), "redirects, which is not followed"),
        (lambda *_: Reply(b"<html>secret</html>", kind="text/html"), "it answers with text/html: it is no MCP server"),
        (lambda *_: Reply({"secret": "value"}), "JSON that is no JSON-RPC"),
        (lambda *_: Reply(b"secret"), "its answer is no JSON"),
        (lambda *_: Reply(status=401), "it needs a login"),
        (lambda *_: Reply(b"secret", status=500), "it answers with status 500"),
        (lambda *_: Reply({"jsonrpc": "2.0", "id": 99, "result": {"content": []}}), "without a result"),
        (lambda message, _: result(message, {"resultType": "input_required"}), "asks for more input"),
        (lambda message, _: Reply({"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "no tool"}}), "no tool"),
        (endless, "more than 1048576 bytes"),
        (deep, "its answer is no JSON"),
    ],
)
def test_nothing_else_is_passed_on(served: Served, answer: Any, why: str) -> None:
    with scripted(answer) as (url, _):
        status, message = refusal(served, "call", url, name="x", version=MODERN)
    assert status == 502
    assert why in message
    assert "secret" not in message
    assert message.startswith(url.split("/")[2])


def test_lists_have_limits(served: Served) -> None:
    many = [TOOL | {"name": f"t{i}"} for i in range(200)]
    for tools, why in (
        (many, "more than 128 tools"),
        ([{"name": "x"}], "has no schema"),
        ([1], "has no name"),
        ([TOOL | {"inputSchema": {"maximum": math.inf}}], "that JSON cannot have"),
        ([TOOL | {"description": "half \ud83d"}], "that JSON cannot have"),
    ):
        with scripted(lambda message, headers, tools=tools: modern(message, headers, tools)) as (url, _):
            status, message = refusal(served, "tools", url)
            assert (status, why in message) == (502, True), message

    def paged(message: dict[str, Any], headers: dict[str, str]) -> Reply:
        is_list = message["method"] == "tools/list"
        return result(message, {"tools": [], "nextCursor": "on"}) if is_list else modern(message, headers)

    with scripted(paged) as (url, _):
        assert "more than 16 pages" in refusal(served, "tools", url)[1]
    with_headers = TOOL | {"inputSchema": {"type": "object", "properties": {"a": {"x-mcp-header": "A"}}}}
    with scripted(lambda message, headers: modern(message, headers, [with_headers])) as (url, _):
        listed = ask(served, "tools", url).json()
        assert (listed["tools"], listed["left_out"]) == ([], ["weather"])


def test_time_is_limited() -> None:
    """The whole of it, not each read: a server that sends a byte now and then ends, too."""
    held = threading.Event()

    def answer(message: dict[str, Any], headers: dict[str, str]) -> Reply:
        held.wait(20)
        return modern(message, headers)

    with scripted(answer) as (url, _):
        began = time.monotonic()
        with pytest.raises(McpError, match="did not answer in time"):
            McpClient(url, Line(), time.monotonic() + 0.5, Session(MODERN)).call("x", {})
        assert time.monotonic() - began < 10
        line = Line()
        threading.Timer(0.5, line.interrupt).start()  # as when the page closes the connection
        with pytest.raises(McpError, match="connection failed"):
            McpClient(url, line, time.monotonic() + 60, Session(MODERN)).call("x", {})
        held.set()


# ---- where it goes


def test_without_the_option_nothing_is_asked() -> None:
    with serving(told()) as off, scripted(modern) as (url, received):
        assert off.http.get("/page/about").json()["mcp"] == {"urls": [], "loopback": False}
        for what, more in (("tools", {}), ("call", {"name": "x", "version": MODERN})):
            status, message = refusal(off, what, url, **more)
            assert status == 403
            assert "MCP servers are off: start the server with --mcp-server" in message
        assert received == []


def test_only_what_is_listed() -> None:
    with scripted(modern) as (url, received), serving(told(), mcp_servers=(url,)) as listed:
        assert listed.http.get("/page/about").json()["mcp"] == {"urls": [url], "loopback": False}
        assert ask(listed, "tools", url).status_code == 200
        count = len(received)
        port = url.split(":")[2].split("/")[0]
        for other in (f"http://localhost:{port}/mcp", f"{url}/", url.replace("/mcp", "/other"), "loopback"):
            status, message = refusal(listed, "tools", other)
            assert (status, "is not a server of --mcp-server" in message) == (403, True)
        assert len(received) == count


@pytest.mark.parametrize(
    "url",
    [
        *("http://10.0.0.1/mcp", "http://169.254.169.254/latest", "http://0.0.0.0/", "http://2130706433/"),
        *("http://127.1:80/", "http://localhost.evil.org/", "http://127.0.0.1.evil.org/", "http://evil.localhost/"),
        *("file:///etc/passwd", "http://user@127.0.0.1/", "http://127.0.0.1\\@evil.org/", "gopher://127.0.0.1/", "x"),
        *("http://[::ffff:10.0.0.1]/", "http://127.0.0.1:0/", "http://127.0.0.1:99999/", "http://0x7f.1/"),
    ],
)
def test_loopback_is_this_machine_alone(served: Served, url: str) -> None:
    assert refusal(served, "tools", url)[0] == 403


def test_names_do_not_move(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """localhost is this machine, and a listed name is elsewhere on the public network, whatever the resolver says."""
    known: dict[str, list[str]] = {}
    monkeypatch.setattr(mcp_client, "resolve", lambda host, port: known[host])
    for host, answers, is_fine in (
        ("localhost", ["127.0.0.1", "::1"], True),
        ("localhost", ["127.0.0.1", "10.1.2.3"], False),
        ("localhost", ["93.184.215.14"], False),
        ("tools.example", ["93.184.215.14"], True),
        ("tools.example", ["93.184.215.14", "127.0.0.1"], False),
        ("tools.example", ["10.0.0.5"], False),
        ("tools.example", ["169.254.169.254"], False),
        ("tools.example", ["::ffff:127.0.0.1"], False),
        ("tools.example", ["fd00::1"], False),
    ):
        known[host] = answers
        target = Target.parse(f"http://{host}/mcp")
        if is_fine:
            assert addresses(target) == answers
        else:
            with pytest.raises(McpError, match="is not at"):
                addresses(target)
    known["tools.example"] = ["10.0.0.5"]
    status, message = refusal(served, "tools", "http://tools.example/mcp")
    assert (status, "tools.example is not at a public address: list it by its address" in message) == (403, True)


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    with scripted(modern) as (url, _), scripted(modern) as (proxy, passed):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        assert ask(served, "tools", url).status_code == 200
        assert passed == []


def test_what_the_page_sends_back_is_checked(served: Served) -> None:
    with scripted(modern) as (url, received):
        for more in ({"version": "1"}, {"version": SESSIONS, "session": "a\r\nX: y"}, {"version": "", "session": "a"}):
            status, message = refusal(served, "call", url, name="x", **more)
            assert (status, message) == (403, "the session is none that this server has opened")
        assert ask(served, "call", url, name="", version=MODERN).status_code == 400
        assert ask(served, "call", url, name="x", version=MODERN, headers={"a": "b"}).status_code == 400
        assert received == []


def test_pages_of_others_cannot_use_it(served: Served) -> None:
    with scripted(modern) as (url, received):
        headers = {"Origin": "http://evil.org"}
        assert served.http.post("/page/mcp/tools", json={"url": url}, headers=headers).status_code == 403
        form = {"Content-Type": "text/plain"}
        assert served.http.post("/page/mcp/tools", content=json.dumps({"url": url}), headers=form).status_code == 415
        assert received == []


def test_the_option_is_checked() -> None:
    for reached in ({"host": "0.0.0.0"}, {"origins": ("*",)}, {"allowed_hosts": ("*",)}):
        with pytest.raises(ValueError, match="loopback would let other machines, or web pages of others, reach every"):
            ServerSettings(mcp_servers=("loopback",), **reached)  # type: ignore[arg-type]
    ServerSettings(mcp_servers=("loopback",), origins=("http://localhost:3000",))
    ServerSettings(host="0.0.0.0", mcp_servers=("https://tools.example/mcp",))
    with pytest.raises(ValueError, match="'tools' is no address of an MCP server"):
        check_servers(["tools"], is_private=True)
    with pytest.raises(ValueError, match="--compare-with is 'http://a/b'"):
        ServerSettings(compare_with=("http://a/b",))
