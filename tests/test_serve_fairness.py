"""A client is served in time although another sends all it can, and nothing is done for clients that left.

Each load runs in a process of its own. With `-s` the seconds are printed.
"""

import asyncio
import json
import random
import string
import subprocess
import time
from collections.abc import Sequence
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
SLACK = 1.0  # seconds: a process is started where another had to be killed, and the machine may be busy
LONGEST = 60.0
TEXT = f"llm=default_llm(max_num_seqs=64, num_blocks=2048), api_key=('{HEAVY}', '{LONE}')"
SMALL = "replace(OPTIONS, image=replace(OPTIONS.image, max_pixels=4096))"
PICTURES = (
    f"llm=looking({{'what': 'a cat'}}), processor=Processor({SMALL}), api_key=('{HEAVY}', '{LONE}'), "
    "max_media_body=32 << 20"
)
BIG = data_uri(encoded(Image.new("RGB", (8192, 8192)), compress_level=9))


def say(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16} | options


def show(count: int, number: int = 0) -> dict[str, Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": BIG}}] * count
    return say("", messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "\nwhat"}]}])


def shaped(number: int) -> dict[str, Any]:
    schema = {"type": "integer", "multipleOf": number}
    return say("hi", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def letters(seed: int) -> dict[str, Any]:
    return {"prompt": "".join(random.Random(seed).choices(string.ascii_letters, k=4_000_000))}


class Load:
    """A running server, and what its clients measure."""

    def __init__(self, url: str) -> None:
        self.url = url

    def client(self, key: str) -> httpx.AsyncClient:
        headers, limits = {"Authorization": f"Bearer {key}"}, httpx.Limits(max_connections=600)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=LONGEST, limits=limits)

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
        self, path: str, body: dict[str, Any], heavy: Sequence[tuple[str, dict[str, Any]]], *, stay: bool
    ) -> tuple[float, set[int]]:
        """The same while another client has sent `heavy`; and the statuses of /health meanwhile. stay: it waits for
        its answers, else it closes its connections as soon as its requests are sent."""
        async with self.client(HEAVY) as client:
            tasks = []
            if stay:
                tasks = [asyncio.ensure_future(client.post(where, json=what)) for where, what in heavy]
                await asyncio.sleep(1.0)
            else:
                await asyncio.gather(*(self.leave(where, what) for where, what in heavy))
            health = asyncio.ensure_future(self.health())
            taken = await self.seconds(path, body)
            for task in (health, *tasks):
                task.cancel()
            await asyncio.gather(health, *tasks, return_exceptions=True)
        return taken, self.statuses

    async def leave(self, path: str, body: dict[str, Any]) -> None:
        """Send a request and close the connection."""
        _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {HEAVY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def health(self) -> None:
        self.statuses: set[int] = set()
        async with self.client(LONE) as client:
            while True:
                self.statuses.add((await client.get("/health")).status_code)
                await asyncio.sleep(0.5)


def measure(name: str, server: str, first: str, lone: tuple[str, Any], heavy: Any, *, stay: bool = True) -> None:
    with own_process(server, first=first, output=subprocess.DEVNULL) as (_, url):
        load = Load(url)
        asyncio.run(load.seconds(*lone(0)))
        alone = min(asyncio.run(load.seconds(*lone(number))) for number in (1, 2, 3))
        beside, statuses = asyncio.run(load.beside(*lone(4), heavy, stay=stay))
    print(f"\n{name}: {alone:.2f} s alone, {beside:.2f} s beside the other ({beside / alone:.1f} times)", statuses)
    assert statuses == {200}
    assert beside < TIMES * alone + SLACK


DEFAULT = "from default_model import default_llm"
SEEING = (
    "from dataclasses import replace; from seeing import looking; from media_files import OPTIONS; "
    "from whorl.media import Processor"
)


def test_many_requests_of_one_client() -> None:
    heavy = [(CHAT, say(f"Tell me about {number}.")) for number in range(500)]
    measure("500 requests", TEXT, DEFAULT, lambda n: (CHAT, say(f"Hello {n}")), heavy)


def test_many_answers_to_one_request() -> None:
    heavy = [(CHAT, say(f"Tell me about {number}.", n=128, temperature=1)) for number in range(8)]
    measure("8 requests with n=128", TEXT, DEFAULT, lambda n: (CHAT, say(f"Hello {n}")), heavy)


def test_many_schemas_whose_clients_left() -> None:
    heavy = [(CHAT, shaped(99400891 + number)) for number in range(60)]
    measure("60 schemas", TEXT, DEFAULT, lambda n: (CHAT, shaped(7 + n)), heavy, stay=False)


def test_many_texts_whose_clients_left() -> None:
    heavy = [(TOKENIZE, letters(number)) for number in range(30)]
    server = f"{TEXT}, max_body=8 << 20"
    measure("30 texts", server, DEFAULT, lambda n: (COMPLETIONS, {"prompt": f"Hello {n}"}), heavy, stay=False)


@pytest.mark.parametrize(("requests", "pictures"), [(1, 64), (4, 16)])
def test_many_pictures(requests: int, pictures: int) -> None:
    heavy = [(CHAT, show(pictures))] * requests
    measure(f"{requests} x {pictures} pictures", PICTURES, SEEING, lambda n: (CHAT, show(1)), heavy)
