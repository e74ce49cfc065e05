"""A server that streams as OpenAI's does, on a real port, and does to each request what its script says."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Script = Callable[[dict[str, Any]], "Sequence[Act]"]


@dataclass(frozen=True)
class Act:
    """Wait, then send a piece. status: instead of a stream. then: "drop" the connection, or "stall" for ever."""

    wait: float = 0.0
    num_tokens: int = 0
    text: str = "x"
    status: int = 200
    then: str = ""


@dataclass
class Fake:
    """usage: "running" with every piece, "final" behind the last, or None."""

    script: Script
    usage: str | None = "running"
    num_cached: int | None = None
    has_tokenizer: bool = True
    refuses: tuple[str, ...] = ()
    metrics: list[str] = field(default_factory=list)  # what /metrics says, one after another
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next((int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")), 0)
        body = json.loads(await reader.readexactly(size) or b"{}")
        path = head.split()[1]
        if path == "/v1/models":
            return await _whole(writer, 200, {"data": [{"id": "fake"}]})
        if path == "/tokenize" and self.has_tokenizer:
            return await _whole(writer, 200, {"tokens": list(range(100, 150))})
        if path == "/metrics" and self.metrics:
            return await _whole(writer, 200, self.metrics.pop(0))
        if not path.endswith("/completions"):
            return await _whole(writer, 404, {"error": {"message": "no such endpoint"}})
        for name in self.refuses:
            if name in body or name in body["stream_options"]:
                return await _whole(writer, 400, {"error": {"message": f"what is {name}?"}})
        self.bodies.append(body)
        self.headers.append(head)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self._stream(writer, body, is_chat="chat" in path)
        finally:
            self.num_open -= 1

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool) -> bool:
        acts = self.script(body)
        if acts[0].status != 200:
            return await _whole(writer, acts[0].status, {"error": {"message": "go away"}})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if is_chat:
            await self._chunk(writer, [{"delta": {"role": "assistant", "content": ""}}], 0)
        total = 0
        for act in acts:
            await asyncio.sleep(act.wait)
            total += act.num_tokens
            if act.num_tokens:
                choice = {"delta": {"content": act.text}} if is_chat else {"text": act.text}
                await self._chunk(writer, [choice | {"finish_reason": None}], total)
            if act.then == "drop":
                writer.transport.abort()
                return False
            if act.then == "stall":
                await asyncio.sleep(3600)
        await self._chunk(writer, [{"text": "", "delta": {}, "finish_reason": "length"}], total)
        if self.usage is not None:
            await self._chunk(writer, [], total)
        await _send(writer, b": a comment\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _chunk(self, writer: asyncio.StreamWriter, choices: list[Any], total: int) -> None:
        chunk: dict[str, Any] = {"choices": choices}
        if self.usage == "running" or (self.usage == "final" and not choices):
            details = {} if self.num_cached is None else {"prompt_tokens_details": {"cached_tokens": self.num_cached}}
            chunk["usage"] = {"prompt_tokens": 10, "completion_tokens": total, **details}
        await _send(writer, f"data: {json.dumps(chunk)}\n\n".encode())


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def _whole(writer: asyncio.StreamWriter, status: int, said: Any) -> bool:
    data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
    writer.write(f"HTTP/1.1 {status} so\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return True


@contextlib.contextmanager
def faking(script: Script, **options: Any) -> Iterator[Fake]:
    """It runs on a thread of its own."""
    fake = Fake(script, **options)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.handle, "127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(_end(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        server.close()
        loop.close()


async def _end() -> None:
    """Of what stalls, too."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
