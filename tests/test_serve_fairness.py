"""A client is served in time although another sends all it can, and nothing is done for clients that left.

Each load runs in a process of its own. With `-s` the seconds are printed.
"""

import asyncio
import json
import random
import statistics
import string
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from media_files import data_uri, encoded
from PIL import Image
from serving import own_process

pytestmark = pytest.mark.slow
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
HEAVY, LONE = "heavy", "lone"
TIMES = 3.0  # of the lone client's time alone
SLACK = 3.0  # seconds: a process is started where another had to be killed, and the machine may be busy
LONGEST = 30.0
SEEING = """from dataclasses import replace
from seeing import looking
from media_files import OPTIONS
from whorl.media import Processor"""
BIG = data_uri(encoded(Image.new("RGB", (8192, 8192)), compress_level=9))


def say(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16} | options


def show(count: int) -> dict[str, Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": BIG}}] * count
    return say("", messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "\nwhat"}]}])


def shaped(number: int) -> dict[str, Any]:
    schema = {"type": "integer", "multipleOf": number}
    return say("hi", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def letters(seed: int) -> dict[str, Any]:
    return {"prompt": "".join(random.Random(seed).choices(string.ascii_letters, k=4_000_000))}


async def left(writer: asyncio.StreamWriter) -> None:
    """Close a connection once all has been sent."""
    writer.close()
    await writer.wait_closed()


class Load:
    """A running server, and what its clients measure."""

    def __init__(self, url: str) -> None:
        self.url = url

    def client(self, key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=LONGEST)

    async def seconds(self, path: str, body: dict[str, Any]) -> float:
        """How long the lone client waits for an answer."""
        async with self.client(LONE) as client:
            began = time.perf_counter()
            try:
                response = await client.post(path, json=body)
            except httpx.TimeoutException:
                return LONGEST
            assert response.status_code == 200, response.text
            return time.perf_counter() - began

    async def beside(
        self, path: str, bodies: Sequence[dict[str, Any]], heavy: Sequence[tuple[str, dict[str, Any]]], *, stay: bool
    ) -> tuple[float, set[int]]:
        """The same, the median of several, while another client has sent `heavy`; and the statuses of /health. stay: it
        waits for its answers, else it closes its connections once its requests are sent."""
        writers = await asyncio.gather(*(self.send(where, what) for where, what in heavy))
        if stay:
            await asyncio.sleep(1.0)
        else:
            await asyncio.gather(*map(left, writers))
        health = asyncio.ensure_future(self.health())
        taken = statistics.median([await self.seconds(path, body) for body in bodies])
        health.cancel()
        await asyncio.gather(health, *map(left, writers), return_exceptions=True)
        return taken, self.statuses

    async def send(self, path: str, body: dict[str, Any]) -> asyncio.StreamWriter:
        """Send a request of the other client, with little work for this process."""
        _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {HEAVY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        return writer

    async def health(self) -> None:
        self.statuses: set[int] = set()
        async with self.client(LONE) as client:
            while True:
                self.statuses.add((await client.get("/health")).status_code)
                await asyncio.sleep(0.5)

    def measure(self, name: str, path: str, lone: Callable[[int], Any], heavy: Any, *, stay: bool = True) -> None:
        """Check that the lone client waits not much longer beside the other. lone: makes its body from a number."""
        asyncio.run(self.seconds(path, lone(0)))
        alone = statistics.median(asyncio.run(self.seconds(path, lone(number))) for number in (1, 2, 3))
        beside, statuses = asyncio.run(self.beside(path, [lone(number) for number in (4, 5, 6)], heavy, stay=stay))
        print(f"\n{name}: {alone:.2f} s alone, {beside:.2f} s beside the other ({beside / alone:.1f} times)")
        assert statuses == {200}
        assert beside < TIMES * alone + SLACK


@pytest.fixture(scope="module")
def texts() -> Iterator[Load]:
    server = f"llm=default_llm(max_num_seqs=64, num_blocks=2048), api_key=('{HEAVY}', '{LONE}'), max_body=8 << 20"
    first = "from default_model import default_llm"
    with own_process(server, first=first, output=subprocess.DEVNULL) as (_, url):
        yield Load(url)


@pytest.fixture(scope="module")
def pictures() -> Iterator[Load]:
    options = "replace(OPTIONS, image=replace(OPTIONS.image, max_pixels=4096))"
    server = f"llm=looking({{'what': 'a cat'}}), processor=Processor({options}), api_key=('{HEAVY}', '{LONE}')"
    with own_process(server, first=SEEING, output=subprocess.DEVNULL) as (_, url):
        yield Load(url)


def test_many_requests_of_one_client(texts: Load) -> None:
    heavy = [(CHAT, say(f"Tell me about {number}.")) for number in range(500)]
    texts.measure("500 requests", CHAT, lambda number: say(f"Hello {number}"), heavy)


def test_many_answers_to_one_request(texts: Load) -> None:
    heavy = [(CHAT, say(f"Tell me about {number}.", n=128, temperature=1)) for number in range(8)]
    texts.measure("8 requests with n=128", CHAT, lambda number: say(f"Hi {number}"), heavy)


def test_many_schemas_whose_clients_left(texts: Load) -> None:
    heavy = [(CHAT, shaped(99400891 + number)) for number in range(60)]
    texts.measure("60 schemas", CHAT, lambda number: shaped(7 + number), heavy, stay=False)


def test_many_texts_whose_clients_left(texts: Load) -> None:
    heavy = [(TOKENIZE, letters(number)) for number in range(30)]
    texts.measure("30 texts", COMPLETIONS, lambda number: {"prompt": f"Hello {number}"}, heavy, stay=False)


@pytest.mark.parametrize(("requests", "count"), [(1, 64), (4, 16)])
def test_many_pictures(pictures: Load, requests: int, count: int) -> None:
    heavy = [(CHAT, show(count))] * requests
    pictures.measure(f"{requests} x {count} pictures", CHAT, lambda number: show(1), heavy)
