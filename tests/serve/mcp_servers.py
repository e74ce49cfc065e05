"""MCP servers for tests: of MCP's own SDK in an environment of its own, and scripted ones that misbehave."""

import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from client_environments import PROGRAMS, environment
from package_index import clean_environment
from serving import wait_until


@contextlib.contextmanager
def sdk_server(name: str, port: int = 0) -> Iterator[str]:
    """The URL of a server that has the tools of `clients/mcp_tools.py`. name: of its environment."""
    folder = environment(name)
    with socket.create_server(("127.0.0.1", port)) as free:
        port = free.getsockname()[1]
    command = [str(folder / "python"), str(PROGRAMS / "mcp_tools.py"), str(port)]
    process = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: process.poll() is not None or _listens(port), seconds=120)
        assert process.poll() is None, "it ended by itself"
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class Reply:
    """What a scripted server answers: a message of JSON-RPC, or anything else."""

    def __init__(self, body: Any = None, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        self.body = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.status, self.headers = status, {"Content-Type": kind} | headers


Answer = Callable[[dict[str, Any], dict[str, str]], Reply]


def result(message: dict[str, Any], value: dict[str, Any], **headers: str) -> Reply:
    return Reply({"jsonrpc": "2.0", "id": message["id"], "result": value}, **headers)


@contextlib.contextmanager
def scripted(answer: Answer) -> Iterator[tuple[str, list[tuple[dict[str, Any], dict[str, str]]]]]:
    """A server that answers each message as `answer` says, its URL, and the messages with their headers."""
    received: list[tuple[dict[str, Any], dict[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            received.append((message, headers))
            reply = answer(message, headers)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may leave in the middle
                self.wfile.write(reply.body)

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/mcp", received
    finally:
        server.shutdown()
        server.server_close()
