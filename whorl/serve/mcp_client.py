"""Lists and calls the tools of MCP servers by streamable HTTP: of 2026-07-28 without a session, of 2025-11-25 and older
with one.

Only the protocol's own requests are sent, to an address that was checked, and of an answer that is not the protocol's
nothing is passed on. Redirects are not followed, proxies not used. The client offers no capabilities: a server that
asks for a sample, an input or the roots is refused.
"""

import base64
import contextlib
import http.client
import ipaddress
import json
import logging
import re
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from whorl import __version__
from whorl.media import MediaError
from whorl.media.http_source import Target, connect, is_public, open_connection, resolve

_LOG = logging.getLogger("whorl.serve")
LOOPBACK = "loopback"  # in place of a URL: every server of this machine
_MODERN = "2026-07-28"  # every request stands for itself
_WITH_SESSION = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # after a handshake; the first is offered
_META = "io.modelcontextprotocol/"
_MOST_BYTES = 1 << 20  # of the answers to one request of the page
_MOST_PAGES, _MOST_TOOLS = 16, 128
_PLAIN = re.compile(r"[!-~]([ -~]*[!-~])?")  # a header's value that needs no base64
_SESSION_ID = re.compile(r"[!-~]{1,1024}")
_METHOD_NOT_FOUND = -32601

Code = Literal["mcp_failed", "mcp_refused", "mcp_session_lost"]


class McpError(Exception):
    """A server was not reached, or did not answer as the protocol says. The message is for the person at the page."""

    def __init__(self, message: str, code: Code = "mcp_failed") -> None:
        super().__init__(message)
        self.code = code


class _RpcError(McpError):
    """A server answered with an error of JSON-RPC."""


class _NotModern(McpError):
    """A server refused a request without a session."""


@dataclass(frozen=True, slots=True)
class Session:
    """How a server is spoken to. id: None: the server has no sessions, or there is none yet."""

    version: str = _MODERN
    id: str | None = None

    @classmethod
    def of(cls, version: str, session_id: str | None) -> "Session":
        """Check what the page sends back; McpError for what no server has said."""
        if version not in (_MODERN, *_WITH_SESSION) or not (session_id is None or _SESSION_ID.fullmatch(session_id)):
            raise McpError("the session is none that this server has opened", "mcp_refused")
        return cls(version, session_id)


@dataclass(frozen=True, slots=True)
class Tools:
    """tools: name, description and parameters of each. left_out: names of those that cannot be called from here."""

    session: Session
    tools: list[dict[str, Any]]
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool returned, as text. is_error: the tool says that it failed; the model may read why."""

    text: str
    is_error: bool


def parse_url(url: str) -> Target:
    """Parse the URL of a server; McpError when it is none."""
    try:
        return Target.parse(url)
    except MediaError as error:
        raise McpError(f"{url!r:.200} is no address of an MCP server: {error}", "mcp_refused") from None


def check_servers(servers: Sequence[str], *, is_private: bool) -> None:
    """Raise ValueError when one is neither a URL nor `loopback`. is_private: only this machine reaches whorl's server,
    and no web page but its own; else others would reach every service of this machine."""
    for server in servers:
        if server != LOOPBACK:
            try:
                parse_url(server)
            except McpError as error:
                raise ValueError(f"serve: --mcp-server: {error}, or {LOOPBACK}") from None
        elif not is_private:
            raise ValueError(
                f"serve: --mcp-server {LOOPBACK} would let other machines, or web pages of others, reach every port "
                "of this one: list the URLs of servers instead, or leave out --host, --allow-origin * and "
                "--allowed-hosts *"
            )


def is_local(target: Target) -> bool:
    """Return whether a URL says that the server is on this machine."""
    try:
        return ipaddress.ip_address(target.host).is_loopback
    except ValueError:
        return target.host == "localhost"


def addresses(target: Target) -> list[str]:
    """Return the addresses of a server.

    An address stands for itself. `localhost` must be this machine, and any other name must be elsewhere on the public
    network: whoever owns it could otherwise let it mean this machine, or another one behind the same wall.
    """
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(target.host))]
    try:
        known = resolve(target.host, target.port)
    except OSError as error:
        raise McpError(f"{target.host} is not known: {error.strerror}") from None
    local = is_local(target)
    if bad := [one for one in known if not (ipaddress.ip_address(one).is_loopback if local else is_public(one))]:
        _LOG.warning("no MCP server at %s: its address is %s", target.host, bad[0])
        what = "is not at this machine" if local else "is not at a public address: list it by its address"
        raise McpError(f"{target.host} {what}", "mcp_refused")
    if not known:
        raise McpError(f"{target.host} has no address")
    return list(dict.fromkeys(known))


class Line:
    """The connections of one client. `interrupt` ends them, and is called from other threads."""

    def __init__(self) -> None:
        self._handles: list[socket.socket] = []

    def start(self) -> None:
        pass

    def interrupt(self) -> None:
        for handle in list(self._handles):
            with contextlib.suppress(OSError):
                handle.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def open(self, target: Target, address: str, deadline: float) -> Iterator[http.client.HTTPConnection]:
        """Connect to an address of a server."""
        with contextlib.ExitStack() as stack:

            def held(address: str, port: int, seconds: float) -> socket.socket:
                opened = connect(address, port, seconds)
                handle = stack.enter_context(opened.dup())  # wrapping in TLS takes over the other one
                self._handles.append(handle)
                stack.callback(self._handles.remove, handle)
                return opened

            yield stack.enter_context(open_connection(target, address, deadline, connect=held))


class McpClient:
    """Talks with one server for one request of the page.

    deadline: for all of it, on `time.monotonic`'s clock. session: what `tools` has returned before; None: it begins.
    """

    def __init__(self, url: str, line: Line, deadline: float, session: Session | None = None) -> None:
        self._target, self._line, self._deadline = parse_url(url), line, deadline
        self._addresses = addresses(self._target)
        self.session = session or Session()
        self._num_bytes = self._number = 0

    def tools(self) -> Tools:
        """Open a session, if the server has them, and list its tools. Raises McpError."""
        with self._failing():
            self._open()
            kept: list[dict[str, Any]] = []
            left_out: list[dict[str, Any]] = []
            params: dict[str, Any] = {}
            for _ in range(_MOST_PAGES):
                page = self._request("tools/list", params)
                for tool in _list(page.get("tools"), "its list of tools"):
                    can_call = "x-mcp-header" not in _json(tool)  # arguments that must be headers, too
                    (kept if can_call else left_out).append(_tool(tool))
                if len(kept) > _MOST_TOOLS:
                    raise McpError(f"it has more than {_MOST_TOOLS} tools")
                if not isinstance(cursor := page.get("nextCursor"), str):
                    return Tools(self.session, kept, [tool["name"] for tool in left_out])
                params = {"cursor": cursor}
            raise McpError(f"its list of tools has more than {_MOST_PAGES} pages")

    def call(self, name: str, arguments: Mapping[str, Any]) -> Result:
        """Call a tool. Raises McpError; with the code `mcp_session_lost`, when a new session may help."""
        with self._failing():
            result = self._request("tools/call", {"name": name, "arguments": dict(arguments)}, name)
            text = _text(result).encode("utf-8", "replace").decode()  # JSON may have half a surrogate pair
            return Result(text, result.get("isError") is True)

    # ---- the protocol

    def _open(self) -> None:
        try:
            versions = self._request("server/discover", {}).get("supportedVersions")
            if isinstance(versions, list) and _MODERN in versions:
                return
        except (_RpcError, _NotModern):
            pass  # a server with sessions; one that cannot be reached has ended this already
        self.session = Session(_WITH_SESSION[0])
        about = {"capabilities": {}, "clientInfo": {"name": "whorl", "version": __version__}}
        agreed = self._request("initialize", {"protocolVersion": _WITH_SESSION[0], **about}).get("protocolVersion")
        if agreed not in _WITH_SESSION:
            raise McpError(f"it speaks version {agreed!r:.40}; known here are {', '.join((_MODERN, *_WITH_SESSION))}")
        self.session = replace(self.session, version=agreed)
        for _ in self._post({"jsonrpc": "2.0", "method": "notifications/initialized"}):
            pass

    def _request(self, method: str, params: dict[str, Any], name: str | None = None) -> dict[str, Any]:
        """Return the result of a request; raise McpError when the answer is an error, or none."""
        self._number += 1
        message = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": self._with_meta(params)}
        with contextlib.closing(self._post(message, name)) as answers:
            for answer in answers:
                if "method" in answer:
                    self._refuse(answer)
                elif answer.get("id") == self._number:
                    return _result(answer)
        raise McpError(f"it ended its answer to {method} without a result")

    def _with_meta(self, params: dict[str, Any]) -> dict[str, Any]:
        if self.session.version != _MODERN:
            return params
        meta = {"protocolVersion": _MODERN, "clientInfo": {"name": "whorl", "version": __version__}}
        return params | {
            "_meta": {f"{_META}{key}": value for key, value in (meta | {"clientCapabilities": {}}).items()}
        }

    def _refuse(self, request: Mapping[str, Any]) -> None:
        """Answer what the server asks for in the middle of its answer: a ping, or what is not offered here."""
        if (number := request.get("id")) is None:  # a notification
            return
        is_ping = request["method"] == "ping"
        error = {"code": _METHOD_NOT_FOUND, "message": "the client has no such capability"}
        answer: dict[str, Any] = {"result": {}} if is_ping else {"error": error}
        for _ in self._post({"jsonrpc": "2.0", "id": number, **answer}):
            pass

    def _headers(self, message: Mapping[str, Any], name: str | None) -> dict[str, str]:
        headers = {
            "Host": self._target.host_header,
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",
            "User-Agent": "whorl",
            "Connection": "close",
        }
        method = message.get("method")
        if method != "initialize":
            headers["MCP-Protocol-Version"] = self.session.version
        if self.session.id is not None:
            headers["Mcp-Session-Id"] = self.session.id
        if self.session.version == _MODERN and isinstance(method, str):
            headers["Mcp-Method"] = method
            headers |= {} if name is None else {"Mcp-Name": _header(name)}
        return headers

    def _post(self, message: Mapping[str, Any], name: str | None = None) -> Generator[dict[str, Any], None, None]:
        """Send a message; yield the messages of the answer as they come."""
        with self._connected() as connection:
            connection.request("POST", self._target.path, json.dumps(message).encode(), self._headers(message, name))
            response = connection.getresponse()
            self._check(response, message.get("method"))
            if message.get("method") == "initialize" and (opened := response.headers.get("Mcp-Session-Id")):
                if not _SESSION_ID.fullmatch(opened):
                    raise McpError("the name of its session is not allowed")
                self.session = replace(self.session, id=opened)
            if "id" not in message or "method" not in message:  # it has no answer, whatever the body is
                return
            kind = response.headers.get_content_type()
            if kind == "application/json":
                yield from _messages(self._read(response))
            elif kind == "text/event-stream":
                for text in self._events(response):
                    yield from _messages(text)
            else:
                raise McpError(f"it answers with {kind:.80}: it is no MCP server")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        """Connect to the first address that takes a connection, and no other one later."""
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    opened = self._line.open(self._target, self._addresses[0], self._deadline)
                    connection = stack.enter_context(opened)
                    break
                except ConnectionError:
                    if len(self._addresses) == 1:
                        raise
                    self._addresses.pop(0)
            yield connection

    def _check(self, response: http.client.HTTPResponse, method: Any) -> None:
        """Raise McpError for a status that has no message of the protocol."""
        status = response.status
        if status < 300:
            return
        if method == "server/discover" and 400 <= status < 500 and status not in (401, 403, 429):
            raise _NotModern(f"it answers with status {status}")
        if status == 404 and self.session.id is not None:
            raise McpError("its session has ended", "mcp_session_lost")
        is_json = response.headers.get_content_type() == "application/json"
        if is_json and 400 <= status < 500 and status not in (401, 403):
            return  # an error of JSON-RPC, if it is the protocol's
        reason = {401: ": it needs a login, which the page does not have", 403: ": it does not let this server in"}
        redirects = ": it redirects, which is not followed" if status < 400 else ""
        raise McpError(f"it answers with status {status}{reason.get(status, redirects)}")

    def _read(self, response: http.client.HTTPResponse) -> str:
        return self._counted(response.read(self._left)).decode()

    def _events(self, response: http.client.HTTPResponse) -> Iterator[str]:
        """Yield the data of the events of a stream."""
        data: list[str] = []
        while line := self._counted(response.readline(self._left)):
            text = line.decode().rstrip("\r\n")
            if text.startswith("data:"):
                data.append(text.removeprefix("data:").removeprefix(" "))
            elif not text:
                if whole := "\n".join(data):
                    yield whole
                data = []

    @property
    def _left(self) -> int:
        return _MOST_BYTES + 1 - self._num_bytes

    def _counted(self, data: bytes) -> bytes:
        self._num_bytes += len(data)
        if self._num_bytes > _MOST_BYTES:
            raise McpError(f"it answers with more than {_MOST_BYTES} bytes")
        return data

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Name the server in every error, and turn those of the network into McpError."""
        where = self._target.host_header
        try:
            yield
        except McpError as error:
            raise McpError(f"{where}: {error}", error.code) from None
        except TimeoutError:
            raise McpError(f"{where}: it did not answer in time") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            _LOG.warning("MCP server at %s: %s: %s", where, type(error).__name__, ascii(str(error))[:300])
            if time.monotonic() >= self._deadline:
                raise McpError(f"{where}: it did not answer in time") from None
            is_down = isinstance(error, ConnectionRefusedError)
            raise McpError(f"{where}: {'nothing listens there' if is_down else 'the connection failed'}") from None


def _header(text: str) -> str:
    """Return a text as the value of a header."""
    if _PLAIN.fullmatch(text) and not text.startswith("=?base64?"):
        return text
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="


def _messages(text: str) -> list[dict[str, Any]]:
    """Return the messages of a text: one, or several in a list, as the version of 2025-03-26 has them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise McpError("its answer is no JSON") from None
    messages = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) and one.get("jsonrpc") == "2.0" for one in messages):
        raise McpError("it answers with JSON that is no JSON-RPC: it is no MCP server")
    return messages


def _json(value: Any) -> str:
    """Write what a server has sent as JSON; McpError where that is not possible for all of it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError):
        raise McpError("one of its tools has numbers or characters that JSON cannot have, or is too deep") from None
    return text


def _result(answer: Mapping[str, Any]) -> dict[str, Any]:
    error, result = answer.get("error"), answer.get("result")
    if isinstance(error, dict):
        raise _RpcError(f"{error.get('message')!s:.1000}")
    if not isinstance(result, dict):
        raise McpError("it answers without a result")
    if result.get("resultType", "complete") != "complete":
        raise McpError("the tool asks for more input, which the page cannot send")
    return result


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise McpError(f"{what} is no list")
    return value


def _tool(value: Any) -> dict[str, Any]:
    """Return what the model is told of a tool."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise McpError("one of its tools has no name")
    parameters = value.get("inputSchema")
    if not isinstance(parameters, dict):
        raise McpError(f"its tool {value['name']!r:.200} has no schema")
    description = value.get("description") or value.get("title")
    shown = {"description": description} if isinstance(description, str) else {}
    return {"name": value["name"], **shown, "parameters": parameters}


def _text(result: Mapping[str, Any]) -> str:
    """Return the contents of a result as text; of what is none, what it is."""
    blocks = _list(result.get("content", []), "the content of the result")
    if not blocks and "structuredContent" in result:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(_block_text(block) for block in blocks if isinstance(block, dict))


def _block_text(block: Mapping[str, Any]) -> str:
    kind, inner = block.get("type"), block.get("resource")
    source = inner if kind == "resource" and isinstance(inner, dict) else block
    if isinstance(text := source.get("text"), str):
        return text
    if kind == "resource_link":
        return f"{block.get('name')}: {block.get('uri')}"
    return f"({kind} of type {source.get('mimeType')}: only texts are passed on)"
