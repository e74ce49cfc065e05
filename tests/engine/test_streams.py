"""Commands that run an engine launch everything on one stream: a second one makes recorded graphs slower."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from whorl import device, streams
from whorl.engine import load
from whorl.engine.settings import EngineSettings
from whorl.serve.engine_thread import EngineThread


class FakeModule:
    """Like torch.cuda, with streams that are names. recorded: the streams on which graphs were recorded."""

    CUDAGraph = SimpleNamespace

    def __init__(self, current: str = "default") -> None:
        self.threads = threading.local()
        self.threads.current = current
        self.recorded: list[str | None] = []
        self.num_streams = 0

    def Stream(self) -> str:
        self.num_streams += 1
        return f"own {self.num_streams}"

    def set_stream(self, stream: str) -> None:
        self.threads.current = stream

    def current_stream(self) -> str:
        return getattr(self.threads, "current", "default")

    def is_available(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def default_stream(self) -> str:
        return "default"

    @contextlib.contextmanager
    def graph(self, graph: SimpleNamespace, *, pool: Any, stream: str | None) -> Iterator[None]:
        self.recorded.append(stream)
        graph.replay = lambda: None
        yield


@pytest.mark.parametrize(("current", "expected"), [("own", "own"), ("default", None)])
def test_graphs_are_recorded_on_the_current_stream_if_they_can_be(
    monkeypatch: pytest.MonkeyPatch, current: str, expected: str | None
) -> None:
    module, ran = FakeModule(current), []
    monkeypatch.setattr(device, "accelerator", lambda _: module)
    assert device.record_graph("cuda", lambda: ran.append(1)) is not None
    assert module.recorded == [expected]
    assert ran == [1]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """In the place of torch.cuda and torch.npu, in a process that has left no stream yet."""
    fake = FakeModule()
    for each in (device, streams):
        monkeypatch.setattr(each, "accelerator", lambda name: None if name == device.HOST else fake)
    monkeypatch.setattr(streams, "_streams", {})
    return fake


@pytest.mark.parametrize("name", ["cpu", "npu"])
def test_devices_without_graphs_keep_their_stream(module: FakeModule, name: str) -> None:
    streams.leave_default_stream(name)
    streams.carried_over()()
    assert module.current_stream() == "default"
    assert module.num_streams == 0


def test_a_process_has_one_stream(module: FakeModule) -> None:
    def on_a_thread(use: Callable[[], None]) -> str:
        seen: list[str] = []
        thread = threading.Thread(target=lambda: (use(), seen.append(module.current_stream())))
        thread.start()
        thread.join()
        return seen[0]

    assert on_a_thread(streams.carried_over()) == "default"
    streams.leave_default_stream("cuda")
    assert module.current_stream() == "own 1"
    assert on_a_thread(lambda: None) == "default"
    assert on_a_thread(streams.carried_over()) == "own 1"
    assert on_a_thread(lambda: streams.leave_default_stream("cuda")) == "own 1"


def test_a_server_steps_on_the_stream_of_the_thread_that_loaded_it(module: FakeModule) -> None:
    streams.leave_default_stream("cuda")
    seen: list[str] = []

    def warm_up(_: Callable[[], bool]) -> None:
        seen.append(module.current_stream())

    async def serve() -> None:
        readiness = SimpleNamespace(warm_up=warm_up)
        thread = EngineThread(Any, Any, readiness=readiness)  # type: ignore[arg-type]
        thread.start()
        await thread.stop()

    asyncio.run(serve())
    assert seen == ["own 1"]


@pytest.mark.parametrize(("tp", "expected"), [(None, ["cpu"]), (1, ["cpu"]), (2, [])])
def test_commands_leave_the_default_stream_with_one_rank(
    monkeypatch: pytest.MonkeyPatch, tp: int | None, expected: list[str]
) -> None:
    left: list[str | None] = []
    monkeypatch.setattr(load, "leave_default_stream", left.append)
    load.use_one_stream(EngineSettings(device="cpu", tp=tp))
    assert left == expected


@pytest.mark.gpu
def test_threads_share_one_stream() -> None:
    import torch

    seen: list[Any] = []

    def leave() -> None:
        streams.leave_default_stream("cuda")
        seen.append(torch.cuda.current_stream())
        use, inner = streams.carried_over(), []

        def follow() -> None:
            use()
            inner.append(torch.cuda.current_stream())

        other = threading.Thread(target=follow)
        other.start()
        other.join()
        seen.extend(inner)

    for _ in range(2):  # in threads, so that the stream of the other tests stays as it is
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert seen[0] != torch.cuda.default_stream()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.gpu
def test_torch_records_on_the_stream_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    recorded: list[Any] = []
    real = torch.cuda.CUDAGraph.capture_begin

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        recorded.append(torch.cuda.current_stream())
        real(self, *args, **kwargs)

    def run() -> None:
        streams.leave_default_stream("cuda")
        x = torch.zeros(8, device="cuda")
        replay = device.record_graph("cuda", lambda: x.add_(1))
        assert replay is not None
        replay()
        torch.cuda.synchronize()
        recorded.append((torch.cuda.current_stream(), x.tolist()))

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    stream, values = recorded.pop()
    assert recorded == [stream]
    assert values == [1.0] * 8
