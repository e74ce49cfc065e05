"""A client is served in time although another sends all it can, and nothing is done for clients that left.

Each load runs in a process of its own. With `-s` the seconds are printed.
"""

import asyncio
import contextlib
import functools
import json
import random
import statistics
import string
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from media_files import data_uri, encoded, lying_png, png
from PIL import Image
from seeing import seeing
from serving import own_process, serving, told, wait_until

from whorl.engine.fair_queue import has_room
from whorl.media import Limits
from whorl.serve import fair_slots
from whorl.serve.fair_slots import FairSlots
from whorl.serve.running import CURRENT_CLIENT, client_name

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


# ---- one by one


class Bell:
    """A resource whose work rings: it lasts until it is interrupted or told to end."""

    def __init__(self) -> None:
        self.ends, self.is_started, self.was_interrupted = threading.Event(), False, False

    def start(self) -> None:
        self.is_started = True

    def interrupt(self) -> None:
        self.was_interrupted = True
        self.ends.set()

    def ring(self) -> "Bell":
        assert self.ends.wait(20)
        return self


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


async def ring(slots: FairSlots[Bell], client: str) -> Bell:
    CURRENT_CLIENT.set(client)
    async with slots.slot() as slot:
        return await slot.run(Bell.ring)


def test_one_client_has_all_slots_but_one() -> None:
    async def main() -> None:
        bells = [Bell(), Bell(), Bell()]
        slots = FairSlots("bell", bells, max_queue=100)
        heavy = [asyncio.create_task(ring(slots, HEAVY)) for _ in range(5)]
        await asyncio.sleep(0)
        assert len(slots._free) == 1
        await until(lambda: bells[2].is_started)
        lone, second = (asyncio.create_task(ring(slots, LONE)) for _ in range(2))
        await asyncio.sleep(0.01)
        assert slots._free == []
        bells[0].ends.set()  # the turn is the lone client's, of which less runs than may
        await heavy[0]
        await until(lambda: not slots._free)
        assert [sum(1 for slot in slots._queue if slot.client == name) for name in (HEAVY, LONE)] == [3, 0]
        for bell in bells:
            bell.ends.set()
        await asyncio.gather(*heavy, lone, second)
        assert len(slots._free) == 3
        slots.close()

    asyncio.run(main())


def test_the_work_of_a_client_that_left_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_slots, "_KILL_SECONDS", 0.1)

    async def main() -> None:
        bell = Bell()
        slots = FairSlots("bell", [bell], max_queue=100)
        running, waiting, other = (asyncio.create_task(ring(slots, name)) for name in (HEAVY, HEAVY, LONE))
        await asyncio.sleep(0.01)
        running.cancel()
        waiting.cancel()
        await asyncio.sleep(0.01)
        assert not slots._free, "the slot is not free before the work has ended"
        assert await other is bell
        assert bell.was_interrupted
        assert waiting.cancelled()
        assert len(slots._queue) == 0
        slots.close()

    asyncio.run(main())


def test_a_worker_is_interrupted_and_its_grammar_is_not_refused_for_it() -> None:
    """The client of a schema leaves while it is compiled; the schema is still unknown, not one that was refused."""
    with serving(told(), job_seconds=60) as served:
        service = served.app.state.service
        grammars = service.preparer._grammars
        body = shaped(99400891) | {"max_tokens": 2}
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(f"{served.url}{CHAT}", json=body, timeout=0.5)
        pool = service._schemas
        wait_until(lambda: len(pool._slots._free) == 3)
        assert not grammars._proven
        assert all(worker._process is None for worker in pool.workers), "it was killed"
        answer = served.http.post(CHAT, json=shaped(7))
        assert int(answer.json()["choices"][0]["message"]["content"]) % 7 == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE, "/v1/embeddings", "/v1/responses/input_tokens"])
def test_what_waits_for_a_worker_is_cancelled_when_its_client_leaves(path: str) -> None:
    with serving(told(), pooling="lasttoken") as served:
        slots = served.app.state.service._prompts._slots
        free, slots._free = slots._free, []
        body = {"prompt": "a", "input": "a"}
        fields = {CHAT: ["messages"], COMPLETIONS: ["prompt"], TOKENIZE: ["prompt"]}.get(path, ["input"])
        content = {name: (body | say("a"))[name] for name in fields}
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(f"{served.url}{path}", json=content, timeout=0.3)
        wait_until(lambda: len(slots._queue) == 0)
        slots._free = free
        assert served.complete("a", max_tokens=3)["choices"][0]["text"] == "bcd"


def test_a_full_queue_has_room_for_each_clients_part() -> None:
    assert has_room({}, "a", 8, 8)
    assert not has_room({"a": 8}, "a", 1, 8)
    assert has_room({"a": 8}, "b", 4, 8)
    assert not has_room({"a": 8, "b": 2}, "b", 3, 8)


def test_another_client_is_served_although_one_fills_the_queue() -> None:
    llm = told(max_num_seqs=2)
    with serving(llm, api_key=("heavy", "lone"), max_queue=4) as served, llm.model.held_after(0):
        threads = []
        for number in range(4):
            post = functools.partial(httpx.post, f"{served.url}{COMPLETIONS}", timeout=30)
            options = {"json": {"prompt": f"a{number}", "max_tokens": 2}, "headers": {"X-Api-Key": "heavy"}}
            threads.append(threading.Thread(target=post, kwargs=options))
            threads[-1].start()
        wait_until(lambda: served.app.state.service.engine.num_waiting == 4)
        refusal = httpx.post(f"{served.url}{COMPLETIONS}", **options)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (429, "queue_full")
        lone = threading.Thread(target=post, kwargs=options | {"headers": {"X-Api-Key": "lone"}})
        lone.start()
        wait_until(lambda: served.app.state.service.engine.num_waiting == 5)
        llm.model.may_step.set()
        for thread in (*threads, lone):
            thread.join()
        assert served.app.state.service.engine.num_waiting == 0


def test_a_request_says_whose_it_is_and_how_urgent() -> None:
    llm = told()
    added: list[Any] = []
    add = llm.scheduler.add
    llm.scheduler.add = lambda seq: added.append((seq.client, seq.priority)) or add(seq)  # type: ignore[method-assign]
    with serving(llm, api_key=("one", "two"), pooling="lasttoken") as served:
        served.complete("a", max_tokens=1, priority=3)
        served.chat("a", max_tokens=1, priority=-1)
        served.post("/v1/responses", input="a", max_output_tokens=1, priority=4)
        served.post("/inference/v1/generate", token_ids=[1], sampling_params={"max_tokens": 1}, priority=5)
        served.post("/v1/embeddings", input="a", priority=6)
        served.http.headers["Authorization"] = "Bearer two"
        served.complete("a", max_tokens=1)
    with serving(llm) as served:
        served.complete("a", max_tokens=1)
        served.http.headers["X-Forwarded-For"] = "10.0.0.7"  # as a proxy on this machine sends it
        served.complete("a", max_tokens=1)
    assert [client for client, _ in added[6:]] == ["127.0.0.1", "10.0.0.7"]
    assert added[:6] == [*(("key 0", priority) for priority in (3, -1, 4, 5, 6)), ("key 1", 0)]


@pytest.mark.parametrize(
    ("key", "address", "name"),
    [
        (1, "127.0.0.1", "key 1"),
        (None, "10.0.0.7", "10.0.0.7"),
        (None, "::ffff:10.0.0.7", "10.0.0.7"),
        (None, "2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        (None, "fe80::1%eth0", "fe80::/64"),
        (None, "-", "-"),
    ],
)
def test_the_name_of_a_client(key: int | None, address: str, name: str) -> None:
    assert client_name(key, address) == name


def test_the_pixels_of_a_request_are_bounded() -> None:
    """They are counted before any of them is decoded: the files say what they are, and hold nothing."""
    lying = {"type": "image_url", "image_url": {"url": data_uri(lying_png(1000, 1000))}}
    small = {"type": "image_url", "image_url": {"url": data_uri(png(64, 64))}}
    limits = Limits(max_pixels=1 << 20, max_request_pixels=3 << 20)
    with seeing({"what": "a cat"}, limits=limits) as served:
        text = {"type": "text", "text": "\nwhat"}
        answer = served.http.post(CHAT, json={"messages": [{"role": "user", "content": [lying] * 4 + [text]}]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "media_too_large")
        assert "have 4000000 pixels; up to 3145728 are allowed" in answer.json()["error"]["message"]
        answer = served.http.post(CHAT, json={"messages": [{"role": "user", "content": [small] * 4 + [text]}]})
        assert answer.json()["choices"][0]["message"]["content"] == "a cat"


# ---- loads


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


@pytest.mark.slow
def test_many_requests_of_one_client(texts: Load) -> None:
    heavy = [(CHAT, say(f"Tell me about {number}.")) for number in range(500)]
    texts.measure("500 requests", CHAT, lambda number: say(f"Hello {number}"), heavy)


@pytest.mark.slow
def test_many_answers_to_one_request(texts: Load) -> None:
    heavy = [(CHAT, say(f"Tell me about {number}.", n=128, temperature=1)) for number in range(8)]
    texts.measure("8 requests with n=128", CHAT, lambda number: say(f"Hi {number}"), heavy)


@pytest.mark.slow
def test_many_schemas_whose_clients_left(texts: Load) -> None:
    heavy = [(CHAT, shaped(99400891 + number)) for number in range(60)]
    texts.measure("60 schemas", CHAT, lambda number: shaped(7 + number), heavy, stay=False)


@pytest.mark.slow
def test_many_texts_whose_clients_left(texts: Load) -> None:
    heavy = [(TOKENIZE, letters(number)) for number in range(30)]
    texts.measure("30 texts", COMPLETIONS, lambda number: {"prompt": f"Hello {number}"}, heavy, stay=False)


@pytest.mark.slow
@pytest.mark.parametrize(("requests", "count"), [(1, 64), (4, 16)])
def test_many_pictures(pictures: Load, requests: int, count: int) -> None:
    heavy = [(CHAT, show(count))] * requests
    pictures.measure(f"{requests} x {count} pictures", CHAT, lambda number: show(1), heavy)
