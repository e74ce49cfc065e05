"""Bodies of requests: what is counted while they arrive, how they are parsed, and how much of them is in memory."""

import asyncio
import gc
import json
import logging
import os
import platform
import random
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from typing import Any

import pytest
from media_files import data_uri
from seeing import seeing
from serving import Served, serving, told, wait_until
from starlette.types import Message, Receive, Scope, Send

from whorl.serve import body as bodies
from whorl.serve.api_error import ApiError
from whorl.serve.body import BLOCK, Bodies, Body
from whorl.serve.gate import Gate
from whorl.serve.running import Running
from whorl.serve.settings import ServerSettings

PICTURE = "data:image/png;base64," + "iVBORw0KGgo/AAA+" * 1000
JSON = {"Content-Type": "application/json"}


def body(**limits: int) -> Body:
    options: dict[str, int] = {"most": 64 << 20, "most_text": 4 << 20, "most_values": bodies.MAX_VALUES}
    return Body(**options | limits, grow=lambda size, more: None)


def filled(data: bytes, *, seed: int = 0, **limits: int) -> Body:
    """A body that comes in pieces of any size."""
    rng, made, start = random.Random(seed), body(**limits), 0
    while start < len(data):
        end = start + rng.choice((1, 5, 100, BLOCK - 1, BLOCK, 3 * BLOCK))
        made.add(data[start:end], is_last=end >= len(data))
        start = end
    return made


def values(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 6)
    if kind < 4:
        letters = rng.choice(["ab/+", '"\\', 'a\\"\n\t/', "\u00e9\u6f22\U0001f600", "{}[],:1"])
        return "".join(rng.choice(letters) for _ in range(rng.choice((0, 3, 40, 2 * BLOCK, 5 * BLOCK + 7))))
    if kind < 6:
        return rng.choice([None, True, 12, -1.5e3])
    if kind == 6:
        return [values(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {f"{i}{'k' * rng.choice((1, 3 * BLOCK))}": values(rng, depth + 1) for i in range(rng.randrange(5))}


@pytest.mark.parametrize("seed", range(30))
def test_what_is_parsed_is_what_json_says(seed: int) -> None:
    rng = random.Random(seed)
    value = {"a": values(rng), "b": PICTURE, "c": [values(rng)]}
    data = json.dumps(value, ensure_ascii=seed % 2 == 0, indent=rng.choice((None, 2))).encode()
    data = data.replace(b"/", b"\\/") if seed % 3 == 0 else data
    data = b"\xef\xbb\xbf" + data if seed % 5 == 0 else data
    parsed = filled(data, seed=seed)
    assert any(isinstance(block, str) for block in parsed._blocks), "nothing was kept apart"
    assert parsed.parse() == value
    assert json.loads(filled(data, seed=seed).raw()) == value


@pytest.mark.parametrize("escape", ["\\u00e9", "\\ud83d\\ude00", "\\\\u00e9", "\\\\\\u00e9", "\\n", "\\/"])
def test_an_escape_where_two_blocks_meet(escape: str) -> None:
    """The text behind it is kept apart, so that an escape cut in two would take its end from what stands for it."""
    for cut in range(len(escape) + 1):
        data = '{"a":"'.ljust(BLOCK - cut, "x") + escape + "y" * 2 * BLOCK + '"}'
        assert filled(data.encode()).parse() == json.loads(data), cut


def test_an_escape_that_never_ends_is_no_json() -> None:
    data = '{"a":"'.ljust(BLOCK - 4, "x") + "\\u00" + "\\/" * 2 * BLOCK + '"}'
    with pytest.raises(ApiError, match="is not JSON"):
        filled(data.encode()).parse()


def test_the_last_of_two_fields_of_one_name_counts() -> None:
    data = '{"a": "' + "x" * 3 * BLOCK + '", "b": "' + "y" * 3 * BLOCK + '", "a": "' + "z" * 3 * BLOCK + '"}'
    assert filled(data.encode()).parse() == {"a": "z" * 3 * BLOCK, "b": "y" * 3 * BLOCK}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the body is empty, expected a JSON object"),
        (b'{"a": 1,\n "b" 2}', "is not JSON: Expecting ':' delimiter at line 2, column 6, where '2}' is"),
        (b'{"a": ', "is not JSON: Expecting value at line 1, column 7, where the end is"),
        (b"{'a': 1}", "enclosed in double quotes at line 1, column 2, where \"'a': 1}\" is"),
        (b'{"a": "' + b"x" * 3 * BLOCK + b'", b: 1}', f"line 1, column {7 + 3 * BLOCK + 4}, where 'b: 1}}' is"),
        (b'{"a": "' + b"x" * 3 * BLOCK + b'",\n b: 1}', "line 2, column 2, where 'b: 1}' is"),
        (b'{"a": "' + b"x" * 3 * BLOCK, "Unterminated string starting at at line 1, column 7"),
        (b'{"a": "' + b"x" * 3 * BLOCK + b'\n"}', "Invalid control character at at line 1"),
        (b'{"a": "\xff"}', "is not UTF-8: it has the byte 0xff"),
        (b"[1, 2]", "the body is '[1, 2]', expected a JSON object"),
        (b"null", "the body is 'null', expected a JSON object"),
        (b'{"a":' * 5000, "too many lists or objects in each other"),
        (b'{"a":' + b"1" * 65 + b"}", "a number of more than 64 digits"),
        ('{"\u2222": [[], 1]}'.encode("utf-16"), "is not UTF-8"),
    ],
)
def test_what_is_no_json_is_told_with_its_place(data: bytes, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        filled(data).parse()
    assert says in caught.value.message
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


MANY = 20 << 20
COSTLY = {
    "lists": b'{"a":[' + b"[]," * MANY,
    "objects": b'{"a":[' + b"{}," * MANY,
    "deep": b"[" * MANY,
    "fields": b"{" + b'"":1,' * MANY,
    "parts": b'{"a":[' + b'{"type":"text","text":"a"},' * (MANY // 10),
    "ids": b'{"a":[' + b"1," * MANY,
    "texts": b'{"a":[' + b'"",' * MANY,
    "digits": b'{"a":[' + (b"1" * 4000 + b",") * (MANY // 4000),
    "text": b'{"a":"' + "\u00e9".encode() * MANY,
    "escapes": b'{"a":"' + b"\\n" * MANY,
    "quotes": b'{"a":"' + b'\\"' * MANY,
    "spaces": b" " * MANY,
}


@pytest.mark.parametrize("kind", COSTLY)
def test_what_takes_long_to_parse_is_refused_while_it_arrives(kind: str) -> None:
    """By construction, not by a clock: of tens of megabytes at most five are taken, and the parser never runs."""
    costly, size = body(), 1 << 16
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=r"more than (65536 lists|262144 values|4194304 bytes|64 digits)"):  # noqa: PT012
            for start in range(0, MANY, size):
                costly.add(COSTLY[kind][start : start + size], is_last=False)
        assert costly.size < 5 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_picture_is_in_memory_a_few_times_at_most() -> None:
    data = json.dumps({"url": "A" * (40 << 20)}).encode()
    tracemalloc.start()
    try:
        parsed = filled(data).parse()
        assert len(parsed["url"]) == 40 << 20
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data)
        del parsed
        assert tracemalloc.get_traced_memory()[0] < 1 << 20, "something of the body is kept"
    finally:
        tracemalloc.stop()


MEMORY = """
import sys
from test_serve_bodies import body

def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

data = b'{"url": "' + b"A" * (16 << 20) + b'"}'
bodies, size, before = [body() for _ in range(16)], 1 << 16, peak()
for start in range(0, len(data), size):
    for each in bodies:
        each.add(data[start : start + size], is_last=start + size >= len(data))
texts = [each.parse() for each in bodies]
print((peak() - before) / (len(bodies) * len(data)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library gives back what it likes")
def test_pictures_that_arrive_together_are_in_memory_once() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEMORY]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert float(ended.stdout) < 1.5, "the gaps that blocks leave are not used"


def test_bodies_together_have_a_limit_and_small_ones_pass() -> None:
    held = Bodies(100)
    limits = {"most": 90, "most_text": 90}
    with held.body(**limits) as first, held.body(**limits) as second:
        first.add(b"x" * 80, is_last=False)
        second.add(b"x" * 15, is_last=False)
        with held.body(**limits) as small:
            small.add(b"x" * 30, is_last=True)  # more than 100 in all, but no more than a third
        with pytest.raises(ApiError, match="up to 100 are allowed") as caught:
            second.add(b"x" * 50, is_last=True)
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
    with held.body(**limits) as alone:
        alone.add(b"x" * 90, is_last=True)
    assert held._num_bytes == held._count == 0


def test_many_large_bodies_at_once() -> None:
    most = 0

    async def all_at_once() -> list[int]:
        waiting = asyncio.Event()
        statuses: list[int] = []

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal most
            most = max(most, gate._bodies._num_bytes)
            await waiting.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        gate = Gate(answer, ServerSettings(max_body=1 << 20, body_seconds=9, max_bodies=4 << 20), running=Running())

        async def client() -> None:
            pieces = [b"x" * 50_000] * 20

            async def receive() -> Message:
                await asyncio.sleep(0)
                piece = pieces.pop() if pieces else b""
                return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

            async def send(message: Message) -> None:
                statuses.extend([message["status"]] if "status" in message else [])

            headers = [(b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "http_version": "1.1"}
            await gate(scope, receive, send)

        tasks = [asyncio.create_task(client()) for _ in range(30)]
        while sum(status == 429 for status in statuses) < 26:
            await asyncio.sleep(0.01)
        waiting.set()
        await asyncio.gather(*tasks)
        return statuses

    statuses = asyncio.run(asyncio.wait_for(all_at_once(), 20))
    assert sorted(statuses) == [200] * 4 + [429] * 26
    assert most <= 5 << 20


# ---- over HTTP


def open_request(served: Served, size: int) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=20)
    lines = "POST /tokenize HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {size}"
    line.sendall("\r\n".join([*lines, "", ""]).encode())
    return line


@pytest.mark.parametrize("sent", [0.5, 1.0])
def test_the_body_of_a_client_that_left_is_not_parsed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sent: float
) -> None:
    caplog.set_level(logging.INFO, "whorl.serve.access")
    parsed: list[int] = []
    monkeypatch.setattr(Body, "parse", lambda self: parsed.append(self.size) or {})
    data = json.dumps({"prompt": "a" * (1 << 20)}).encode()
    with serving(told()) as served:
        blocked = threading.Event()

        def block() -> None:  # until the whole of what follows has come, as other work may
            blocked.set()
            time.sleep(0.5)

        loop = served.server.servers[0].get_loop()
        with open_request(served, len(data)) as line:
            loop.call_soon_threadsafe(block)
            blocked.wait(10)
            line.sendall(data[: int(sent * len(data))])
        wait_until(lambda: "the client closed the connection" in caplog.text)
        assert not parsed


def test_bodies_over_http() -> None:
    with serving(told()) as served:
        for data, says in (
            (b"", "the body is empty"),
            (b'{"prompt": "a" "b"}', "the body is not JSON: Expecting ',' delimiter at line 1, column 16, where '"),
            (b"[1]", "the body is '[1]', expected a JSON object"),
            (b'{"prompt": ' + b"[" * 70_000, "the body has more than 65536 lists, objects and fields of objects"),
        ):
            answer = served.http.post("/v1/completions", content=data, headers=JSON)
            assert says in answer.json()["error"]["message"]
        slashes = json.dumps({"prompt": "a/b" * 9000}).replace("/", "\\/").encode()
        answer = served.http.post("/tokenize", content=slashes, headers=JSON)
        assert answer.json()["count"] == 27_000


def test_a_body_that_was_not_taken_is_given_on() -> None:
    """As the endpoint in front of replicas does it; afterwards the client's end comes through."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def all_messages() -> list[Message]:
        replayed = filled(b'{"a": 1}').replay(receive)
        return [await replayed(), await replayed()]

    first, second = asyncio.run(all_messages())
    assert (first["body"], first["more_body"], second["type"]) == (b'{"a": 1}', False, "http.disconnect")


def test_a_refused_picture_is_not_kept_in_a_cycle_of_its_error() -> None:
    """The garbage collector counts objects, not their bytes: it could let gigabytes of such pictures add up."""
    url = data_uri(b"\x89PNG\r\n\x1a\n" + bytes(1 << 16))
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with seeing() as served:
        answer = served.http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.json()["error"]["code"] == "invalid_media"
        wait_until(lambda: served.app.state.service.engine.num_waiting == 0)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            served.http.post("/v1/chat/completions", json={"messages": messages})
            time.sleep(0.5)  # the tasks of the request end after its answer
            gc.collect()
            assert not [kept for kept in gc.garbage if isinstance(kept, BaseException)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
