"""A request on its way to a replica, and what comes back: the messages of ASGI, and one of ours behind them."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

Message = dict[str, Any]
END = "whorl.end"  # the type of the last message: {"type": END, "tokens": what the request's key is charged with}
Headers = Sequence[tuple[bytes, bytes]]
# The endpoint has looked at where a request comes from, and a replica is not asked by browsers.
_ANSWERED_FOR = (b"origin", b"host", b"x-request-id", b"content-length", b"transfer-encoding", b"connection", b"expect")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """number: of this attempt, which nothing else has. blocks: of `prompt_blocks`. request: its number to clients."""

    number: str
    request: str
    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int]
    blocks: tuple[bytes, ...] = ()

    def again(self, number: str) -> "Asked":
        return replace(self, number=number)

    def scope(self) -> dict[str, Any]:
        """As a server would hand it to an application."""
        given = [(b"host", b"replica"), (b"x-request-id", self.request.encode()), *self.headers]
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": given,
            "client": self.client,
            "server": ("replica", 0),
        }


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """What a replica is told of a request's headers."""
    return [
        (name.lower(), value)
        for name, value in headers
        if name.lower() not in _ANSWERED_FOR and not name.lower().startswith(b"sec-fetch-")
    ]


class ReplicaLost(RuntimeError):
    """A replica went away with a request of ours."""


class Replicas(Protocol):
    """What answers requests. `ask` ends with `END`; closed before, it ends the request there, too."""

    def ask(self, asked: Asked) -> AsyncGenerator[Message, None]: ...

    async def health(self) -> dict[str, int]:
        """How many replicas there are in each state, such as RUNNING."""

    async def metrics(self) -> list[tuple[str, str]]:
        """Names of replicas, and what each counts, in Prometheus's text format."""
