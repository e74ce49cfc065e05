"""Commands that run an engine launch everything on one stream: a second one makes recorded graphs slower."""

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from whorl import device, streams
from whorl.engine import load
from whorl.engine.settings import EngineSettings


class FakeModule:
    """Like torch.cuda, with streams that are names. recorded: the streams on which graphs were recorded."""

    CUDAGraph = SimpleNamespace

    def __init__(self, current: str) -> None:
        self.current = current
        self.recorded: list[str | None] = []

    def current_stream(self) -> str:
        return self.current

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


def test_devices_without_graphs_keep_their_stream() -> None:
    streams.leave_default_stream("cpu")
    assert streams._streams == {}
    streams.carried_over()()


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
def test_an_engine_records_on_the_stream_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
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
