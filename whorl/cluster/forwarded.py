"""A request that the endpoint forwards to a replica, and what comes back: ASGI messages, then a message `END`."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

Message = dict[str, Any]
END = "whorl.end"  # the type of the last message: {"type": END, "tokens": what the request's key is charged with}
Headers = Sequence[tuple[bytes, bytes]]
# Headers that are not forwarded: the endpoint has checked the origin, and no browser talks to a replica.
_NOT_FORWARDED = (
    b"origin",
    b"host",
    b"x-request-id",
    b"content-length",
    b"transfer-encoding",
    b"connection",
    b"expect",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardedRequest:
    """An HTTP request for a replica.

    attempt_id: unique to this attempt. request_id: the id that clients see, the same for all attempts. blocks: from
    `prompt_blocks`.
    """

    attempt_id: str
    request_id: str
    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int]
    blocks: tuple[bytes, ...] = ()

    def retry(self, attempt_id: str) -> "ForwardedRequest":
        """Return the same request for another attempt."""
        return replace(self, attempt_id=attempt_id)

    def scope(self) -> dict[str, Any]:
        """Return the ASGI scope of the request."""
        headers = [(b"host", b"replica"), (b"x-request-id", self.request_id.encode()), *self.headers]
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
            "headers": headers,
            "client": self.client,
            "server": ("replica", 0),
        }


def forwarded_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request that are forwarded to a replica."""
    return [
        (name.lower(), value)
        for name, value in headers
        if name.lower() not in _NOT_FORWARDED and not name.lower().startswith(b"sec-fetch-")
    ]


class ReplicaLost(RuntimeError):
    """A replica died while it had the request."""


class Replicas(Protocol):
    """The replicas that answer requests."""

    def ask(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        """Yield a replica's messages, the last of which is `END`. Closing the generator aborts the request."""

    async def health(self) -> dict[str, int]:
        """Return how many replicas are in each state, such as RUNNING."""

    async def metrics(self) -> list[tuple[str, str]]:
        """Return the name of each replica and its metrics in Prometheus's text format."""
