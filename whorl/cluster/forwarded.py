"""A request that the endpoint forwards to a replica, with digests of its prompt, and what comes back: ASGI messages,
then a message `END`."""

import hashlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
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

BLOCK = 256  # characters, about 64 tokens of English
MOST_BLOCKS = 4096  # of one prompt; the text after them does not influence the routing
_BYTES = 8
# Fields of a request's body, in the order in which chat templates write them.
_BEFORE, _TURNS = ("tools", "system", "instructions"), ("messages", "input", "prompt", "token_ids")


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


def prompt_blocks(body: bytes, salt: str = "") -> tuple[bytes, ...]:
    """Return a chain of digests of the beginning of a request's prompt, which shows how much two prompts share.

    A digest stands for a block of characters and everything before it, as a key of the prefix cache stands for a block
    of tokens. This needs only the request's body, no tokenizer; the shared length that it finds is short by less than a
    block. The chain is () for a body without a prompt.

    salt: prompts share a prefix cache, and so digests, only with the same salt.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # the replica reports the error
        return ()
    if not isinstance(request, dict):
        return ()
    cache_salt = request.get("cache_salt")
    return tuple(_chain(_text(request), f"{salt} {cache_salt or ''}"))


def _text(request: Mapping[str, Any]) -> str:
    """Return the prompt as text, such that a longer conversation begins with the text of the shorter one."""
    parts = [_as_text(request[name]) for name in _BEFORE if request.get(name) is not None]
    for name in _TURNS:
        turns = request.get(name)
        if isinstance(turns, list):
            parts += [_as_text(turn) for turn in turns[: MOST_BLOCKS * BLOCK]]
        elif isinstance(turns, str):
            parts.append(turns)
    return "\n".join(parts)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _chain(text: str, salt: str) -> Iterator[bytes]:
    """Yield the digests of full blocks only: the incomplete last block is where the next turn differs."""
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest()
    for start in range(0, min(len(text) // BLOCK, MOST_BLOCKS) * BLOCK, BLOCK):
        block = text[start : start + BLOCK].encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(digest + block, digest_size=_BYTES).digest()
        yield digest
