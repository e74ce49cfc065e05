"""The body of a request: counted while it arrives, parsed when it is whole.

The event loop parses bodies, and nothing can interrupt that: what would take long is refused before, by what is counted
here. The text of pictures, which may be fifteen times as long as everything else, is kept away from the parser.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from whorl.engine.heap import give_back

from .api_error import ApiError

if TYPE_CHECKING:
    from fastapi.routing import APIRoute

BODY = "whorl.body"  # in a request's scope: its `Body`
MAX_VALUES = 2**18
MAX_NESTED = 2**16  # lists, objects and fields of objects: each takes ten times as long as a number
MAX_DIGITS = 64  # reading a number takes the square of its digits
BLOCK = 4096
_ESCAPE = len(r"\u00e9")  # the longest escape
# A block without quotes and control characters. PHP writes every slash of a picture as \/.
_PLAIN = re.compile(rb"[ !#-\[\]-~]*+(?:\\/[ !#-\[\]-~]*+)*+")
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LARGE = 1 << 20  # bytes of a body whose memory is given back
_SHOWN = 24  # characters that an error shows of the body


class Bodies:
    """The bodies of all requests in progress.

    most: how many bytes they may have together. most_values: how many numbers, texts and the like one may have.
    """

    def __init__(self, most: int, most_values: int = MAX_VALUES) -> None:
        self._most, self._most_values, self._num_bytes, self._count = most, most_values, 0, 0

    @contextmanager
    def body(self, *, most: int, most_text: int) -> Iterator["Body"]:
        """Yield the body of one request, which counts until the block is left. most, most_text: see `Body`."""
        body = Body(most=most, most_text=most_text, most_values=self._most_values, grow=self._grow)
        self._count += 1
        try:
            yield body
        finally:
            self._count -= 1
            self._num_bytes -= body.size
            body.forget()

    def _grow(self, size: int, more: int) -> None:
        """Count `more` bytes of a body that then has `size`; refuse it if it has more than its share of too many."""
        self._num_bytes += more
        if self._num_bytes > self._most and size > self._most // self._count:
            message = f"the requests in progress have {self._num_bytes} bytes; up to {self._most} are allowed"
            raise ApiError(429, f"{message}. Try again later.", code="queue_full", headers={"Retry-After": "1"})


class Body:
    """One request's body. Raises ApiError 413 or 400 as soon as it is too large or would take long to parse.

    most: bytes in all. most_text: bytes without long strings of printable ASCII, as pictures in base64 are.
    most_values: numbers, texts and the like. grow: told the new size and the number of bytes that came.
    """

    def __init__(self, *, most: int, most_text: int, most_values: int, grow: Callable[[int, int], None]) -> None:
        self.size = 0
        self._most, self._most_text, self._most_values, self._grow = most, most_text, most_values, grow
        self._pending = bytearray()  # less than a block
        self._blocks: list[bytes | str] = []  # those that are kept away from the parser are decoded
        self._is_in_string = self._is_taken = False
        self._num_text = self._num_values = self._num_nested = 0

    def check_size(self, size: int) -> None:
        """Raise ApiError 413 for a body of more bytes than are allowed."""
        if size > self._most:
            raise ApiError(413, f"the body has {size} bytes; up to {self._most} are allowed", code="body_too_large")

    def add(self, data: bytes, *, is_last: bool) -> None:
        """Take the next bytes."""
        self.size += len(data)
        self._grow(self.size, len(data))
        self.check_size(self.size)
        self._pending += data
        while len(self._pending) >= BLOCK:
            self._take(self._block_size())
        if is_last and self._pending:
            self._take(len(self._pending))

    def _block_size(self) -> int:
        """Return how many of the pending bytes are the next block: an escape, \\n or \\u00e9, is not cut apart."""
        last = self._pending.rfind(b"\\", BLOCK - _ESCAPE + 1, BLOCK)
        is_escape = (last + 1 - len(self._pending[: last + 1].rstrip(b"\\"))) % 2 == 1
        return last if is_escape and (last == BLOCK - 1 or self._pending[last + 1 : last + 2] == b"u") else BLOCK

    def _take(self, count: int) -> None:
        block = bytes(self._pending[:count])
        del self._pending[:count]
        if self._is_in_string and _PLAIN.fullmatch(block):
            self._blocks.append(block.decode().replace("\\/", "/"))
        else:
            self._blocks.append(block)
            self._count(block)

    def _count(self, block: bytes) -> None:
        """Count what of a block the parser will see."""
        texts = block.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(texts[self._is_in_string :: 2])
        self._is_in_string ^= len(texts) % 2 == 0
        self._num_text += len(block)
        self._num_values += outside.count(b",")
        self._num_nested += sum(map(outside.count, (b"[", b"{", b":")))
        if b"0" * (MAX_DIGITS + 1) in outside.translate(_DIGITS):
            raise ApiError(400, f"the body has a number of more than {MAX_DIGITS} digits", code="invalid_json")
        for actual, most, things in (
            (self._num_text, self._most_text, "bytes beside pictures"),
            (self._num_values, self._most_values, "values, such as token ids"),
            (self._num_nested, MAX_NESTED, "lists, objects and fields of objects"),
        ):
            if actual > most:
                raise ApiError(413, f"the body has more than {most} {things}", code="body_too_large")

    def raw(self) -> bytes:
        """Return the body, which is forgotten here. Slashes of pictures may be written as / in place of \\/."""
        return b"".join(block if isinstance(block, bytes) else block.encode() for block in self._release())

    def replay(self, receive: Receive) -> Receive:
        """Return a `receive` that gives the body, unless it is taken, then what the client sends next: its end."""

        async def replayed() -> Message:
            if self._is_taken:
                return await receive()
            return {"type": "http.request", "body": self.raw(), "more_body": False}

        return replayed

    def parse(self) -> dict[str, Any]:
        """Return the JSON object of the body, which is forgotten here. Raises ApiError 400 where it is none."""
        if not self.size:
            raise _not_json("is empty, expected a JSON object")
        # With a number it stands for text that is kept apart. No client can guess it, and no escape goes on with it.
        mark = f"~{secrets.token_hex(16)}"
        pieces: list[bytes] = []
        apart: list[list[str]] = []
        for is_apart, run in groupby(self._release(), key=lambda block: isinstance(block, str)):
            if is_apart:
                pieces.append(f"{mark}{len(apart):08}".encode())
                apart.append(list(run))  # type: ignore[arg-type]
            else:
                pieces += run  # type: ignore[arg-type]
        try:
            text = b"".join(pieces).decode("utf-8-sig")
            value = json.loads(text)
            value = _put_back(value, mark, apart) if apart else value
        except json.JSONDecodeError as error:
            raise _not_json(f"is not JSON: {_where(error, mark, apart)}") from None
        except UnicodeDecodeError as error:
            raise _not_json(f"is not UTF-8: it has the byte {error.object[error.start]:#04x}") from None
        except RecursionError:
            raise _not_json("has too many lists or objects in each other") from None
        finally:
            del apart, pieces
            self.forget()
        if not isinstance(value, dict):
            raise _not_json(f"is {text[:_SHOWN]!r}, expected a JSON object")
        return value

    def forget(self) -> None:
        """Drop what is left of the body, and give back the memory of a large one."""
        self._release()
        if self.size > _LARGE:
            give_back()

    def _release(self) -> list[bytes | str]:
        blocks, self._blocks, self._is_taken = self._blocks, [], True
        return blocks


def _not_json(problem: str) -> ApiError:
    return ApiError(400, f"the body {problem}", code="invalid_json")


def _put_back(value: Any, mark: str, apart: Sequence[Sequence[str]]) -> Any:
    """Return the value with the texts that were kept apart in place of their marks."""
    if isinstance(value, str):
        first, *others = value.split(mark)
        pieces = [piece for other in others for piece in (*apart[int(other[:8])], other[8:])]
        return "".join([first, *pieces]) if others else value
    if isinstance(value, list):
        return [_put_back(item, mark, apart) if isinstance(item, str | list | dict) else item for item in value]
    if isinstance(value, dict):
        return {_put_back(name, mark, apart): _put_back(item, mark, apart) for name, item in value.items()}
    return value


def _where(error: json.JSONDecodeError, mark: str, apart: Sequence[Sequence[str]]) -> str:
    """Say what the parser expected, where, and what is there. Text that was kept apart has no lines."""
    numbers = [int(part[:8]) for part in error.doc[: error.pos].rpartition("\n")[2].split(mark)[1:]]
    column = error.colno + sum(sum(map(len, apart[number])) - len(mark) - 8 for number in numbers)
    rest = error.doc[error.pos :][:_SHOWN].partition(mark)[0]
    return f"{error.msg} at line {error.lineno}, column {column}, where {repr(rest) if rest else 'the end'} is"


class _ParsedRequest(Request):
    """A request whose body is parsed by its `Body`."""

    async def body(self) -> bytes:
        # FastAPI asks whether there is one; `Body.parse` says so when there is none, unless `Gate` lets it be empty.
        return b"{}" if self.scope[BODY].size or "content-type" in self.headers else b""

    async def json(self) -> Any:
        return self.scope[BODY].parse()


def json_route() -> "type[APIRoute]":
    """Return a class of routes whose requests are `_ParsedRequest`s."""
    from fastapi.routing import APIRoute

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Any:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                return await handler(_ParsedRequest(request.scope, request.receive))

            return handle

    return JsonRoute
