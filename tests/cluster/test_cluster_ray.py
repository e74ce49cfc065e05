"""Replicas on a real Ray cluster: killed and replaced under load. Ray is not in the tests' own environment."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray_packages import environment
from ray_told import BROKEN
from serving import ALPHABET, answers, wait_until

pytestmark = pytest.mark.slow
MARK = "WHORL_TEST_CLUSTER"
LENGTH = 150  # tokens of an answer, 20 ms each


class Cluster:
    """A server in a process of its own and what it writes."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, mark: str, log: Path) -> None:
        self.process, self.url, self.mark, self.log = process, url, mark, log

    def pids(self, title: bytes = b"ray::ServeReplica:whorl") -> set[int]:
        """Of this cluster's own processes with such a title."""
        return {pid for pid in processes(self.mark) if title in _read(f"/proc/{pid}/cmdline")}

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"whorl:{name} "))

    def num_running(self) -> int:
        response = httpx.get(f"{self.url}/health", timeout=60)
        return response.json()["replicas"].get("RUNNING", 0) if response.status_code == 200 else 0


def processes(mark: str) -> list[int]:
    """Whose environment has the mark: the server, and all that Ray started for it."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if f"{MARK}={mark}".encode() in _read(f"/proc/{pid}/environ")]


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # it has ended, or is not ours
        return b""


@contextlib.contextmanager
def started(command: list[str], log: Path, port: int) -> Iterator[Cluster]:
    mark = uuid.uuid4().hex
    with log.open("wb") as output:
        marks = {MARK: mark, BROKEN: f"{log}.broken"}
        process = subprocess.Popen(command, env=environment(**marks), stdout=output, stderr=output)
    cluster = Cluster(process, f"http://127.0.0.1:{port}", mark, log)
    try:
        wait_until(lambda: process.poll() is not None or answers(cluster.url), seconds=240)
        assert process.poll() is None, log.read_text()
        yield cluster
    finally:
        for pid in [process.pid, *processes(mark)]:  # what a failed test leaves
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    port, log = free_port(), tmp_path_factory.mktemp("ray") / "log.txt"
    with started([sys.executable, str(Path(__file__).with_name("ray_two_nodes.py")), str(port)], log, port) as running:
        yield running


class Answer:
    """One request's: the text that came, its error, how often it began and ended."""

    def __init__(self, cluster: Cluster, letter: str, *, stream: bool, length: int = LENGTH) -> None:
        self.expected = "".join(ALPHABET[(ALPHABET.index(letter) + 1 + i) % 26] for i in range(length))
        self.stream, self.text, self.num_done = stream, "", 0
        self.status = 0
        self.error: dict[str, Any] | None = None
        self.headers: Any = {}
        self.failure: Exception | None = None
        # Each has a beginning of its own, of two blocks.
        body = {"prompt": uuid.uuid4().hex * 16 + letter, "temperature": 0, "max_tokens": length, "stream": stream}
        self._url, self._body = f"{cluster.url}/v1/completions", body
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=150) as response:
                self.status, self.headers = response.status_code, response.headers
                if self.stream and response.status_code == 200:
                    for line in response.iter_lines():
                        self._take(line.removeprefix("data: "))
                else:
                    message = json.loads(response.read())
                    self.error = message.get("error")
                    self.text = "" if self.error else message["choices"][0]["text"]
                    self.num_done = 1
        except Exception as error:
            self.failure = error

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.num_done += 1
        elif data:
            message = json.loads(data)
            self.error = self.error or message.get("error")
            self.text += "" if "error" in message else message["choices"][0]["text"]

    def finish(self) -> "Answer":
        self.thread.join(150)
        assert not self.thread.is_alive(), "a request hangs"
        assert self.failure is None, self.failure
        assert self.num_done == 1, "it has one end"
        return self

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.error is None and self.text == self.expected


def test_a_killed_replica(cluster: Cluster) -> None:
    wait_until(lambda: cluster.num_running() == 2, seconds=120)
    before = cluster.pids()
    assert len(before) == 2
    answers = [Answer(cluster, ALPHABET[i], stream=i % 2 == 0) for i in range(16)]
    streams = [each for each in answers if each.stream]
    wait_until(lambda: all(len(each.text) >= 3 for each in streams), seconds=100)
    busy = {each.headers["x-whorl-replica"] for each in streams}
    assert len(busy) == 2, "both have some"
    os.kill(min(before), signal.SIGKILL)
    for each in answers:
        each.finish()
    broken = [each for each in streams if not each.is_whole]
    assert 0 < len(broken) < len(streams)
    for each in broken:
        assert each.error is not None
        assert each.error["code"] == "engine_unavailable"
        assert 3 <= len(each.text) < LENGTH
        assert each.expected.startswith(each.text), "what came is the beginning of the answer, and nothing twice"
    assert len({each.headers["x-whorl-replica"] for each in broken}) == 1
    assert all(each.is_whole for each in answers if not each.stream), "nothing had gone out: another replica was asked"
    assert cluster.metric("router_replicas_lost_total") >= len(broken) + 1
    assert cluster.metric("router_retries_total") >= 1


def test_it_is_restarted_and_used(cluster: Cluster) -> None:
    wait_until(lambda: cluster.num_running() == 2, seconds=120)
    wait_until(lambda: len(cluster.pids()) == 2, seconds=60)

    def both_answer() -> bool:
        answers = [Answer(cluster, "a", stream=False, length=20) for _ in range(6)]
        assert all(answer.finish().is_whole for answer in answers)
        return len({answer.headers["x-whorl-replica"] for answer in answers}) == 2

    wait_until(both_answer, seconds=60)  # the endpoint hears of a new replica a little later than Ray's controller


def test_a_prompt_goes_where_it_was(cluster: Cluster) -> None:
    said = {"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 4}
    where, cached = set(), []
    for _ in range(4):
        response = httpx.post(f"{cluster.url}/v1/chat/completions", json=said, timeout=60)
        where.add(response.headers["x-whorl-replica"])
        cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert len(where) == 1
    assert cached[0] == 0
    assert min(cached[1:]) > 500


def test_weights_are_replaced_under_load(cluster: Cluster) -> None:
    """Every request of that time is answered in full, by old weights or new ones; at the end by new ones alone."""
    is_over, lock, answers = threading.Event(), threading.Lock(), list[Answer]()

    def ask(number: int) -> None:
        while not is_over.is_set():
            answer = Answer(cluster, ALPHABET[number], stream=number % 2 == 0, length=40)
            with lock:
                answers.append(answer)
            answer.thread.join(150)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    cluster.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "the replicas have been replaced: weights 2" in cluster.log.read_text(), seconds=240)
    wait_until(lambda: answers[-1].headers.get("x-whorl-weights") == "2", seconds=60)
    is_over.set()
    for thread in threads:
        thread.join(150)
    assert len(answers) > 20
    for each in answers:
        assert each.finish().is_whole, (each.status, each.error, each.text)
    assert {each.headers["x-whorl-weights"] for each in answers} == {"1", "2"}
    last = [Answer(cluster, "a", stream=False, length=4).finish() for _ in range(4)]
    assert {each.headers["x-whorl-weights"] for each in last} == {"2"}


def test_weights_that_cannot_be_loaded_replace_nothing_more(cluster: Cluster) -> None:
    broken = Path(f"{cluster.log}.broken")
    broken.touch()
    cluster.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "the replicas were not replaced" in cluster.log.read_text(), seconds=240)
    answers = [Answer(cluster, "a", stream=False, length=4).finish() for _ in range(4)]
    assert all(each.is_whole for each in answers)
    assert {each.headers["x-whorl-weights"] for each in answers} == {"2"}
    broken.unlink()
    cluster.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "the replicas have been replaced: weights 4" in cluster.log.read_text(), seconds=240)
    answers = [Answer(cluster, "a", stream=False, length=4).finish() for _ in range(4)]
    assert {each.headers["x-whorl-weights"] for each in answers} == {"4"}


def test_sigterm_ends_all_of_it(cluster: Cluster) -> None:
    running = Answer(cluster, "a", stream=True)
    wait_until(lambda: len(running.text) > 2, seconds=60)
    cluster.process.send_signal(signal.SIGTERM)
    assert running.finish().is_whole, "what runs is finished"
    assert cluster.process.wait(120) == 0, cluster.log.read_text()
    wait_until(lambda: not processes(cluster.mark), seconds=60)


def listening(pids: list[int]) -> set[str]:
    """Addresses, in hexadecimal as the kernel writes them, on which these processes take connections."""
    sockets = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    addresses = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                addresses.add(words[1].partition(":")[0])
    return addresses


def test_the_command_alone_is_reachable_from_here_alone(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "whorl", "serve", "--on", "ray", "--replicas", "1", "--port", str(port)]
    with started([*command, "--max-seq", "256", "--device", "cpu"], tmp_path / "log.txt", port) as cluster:
        said = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
        response = httpx.post(f"{cluster.url}/v1/chat/completions", json=said | {"temperature": 0}, timeout=120)
        assert "Paris" in response.json()["choices"][0]["message"]["content"]
        loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
        assert listening(processes(cluster.mark)) <= loopback
        # Ray has a process of that name in any case; this is one without pages and without its interface for jobs.
        for pid in cluster.pids(b"dashboard/dashboard.py"):
            assert {b"--disable-frontend", b"--modules-to-load=UsageStatsHead"} <= set(
                _read(f"/proc/{pid}/cmdline").split(b"\0")
            )
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(120) == 0
