"""Ctrl-C at every place of the code around what ranks do together, and ranks that are stopped."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from checkpoints import write_checkpoints
from serving import byte_tokenizer, serving
from torch import distributed

from whorl.engine import launch
from whorl.engine.launch import RankGroup
from whorl.engine.llm import LLM
from whorl.models.llama import Llama

AROUND = {function.__wrapped__.__code__ for function in (launch._interrupts_wait, RankGroup.together)}  # type: ignore[attr-defined]


class Group(RankGroup):
    """A group without other ranks."""

    def __init__(self) -> None:
        self._is_closed, self._is_busy, self._failure = False, False, None
        self._turn = threading.RLock()

    def _raise_failure(self) -> None:
        pass

    def close(self, *, is_broken: bool = False, ask_to_end: Any = None) -> None:
        self._is_closed = True


def interrupt_at(place: int) -> tuple[Group, str | None]:
    """Send SIGINT before bytecode `place` of that code: the group afterwards, and the line; None if there are fewer."""
    group, count, line = Group(), 0, None

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count, line
        if frame.f_code not in AROUND:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if event == "opcode" and count == place:
            line = f"{frame.f_code.co_name}, line {frame.f_lineno}"
            os.kill(os.getpid(), signal.SIGINT)
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        with group.together():
            pass
    except KeyboardInterrupt:
        assert line is not None
    else:
        assert line is None, f"Ctrl-C is lost: {line}"
    finally:
        sys.settrace(previous)
    return group, line


def test_ctrl_c_before_or_after_what_ranks_do_together_keeps_them() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for place in range(1, 1000):
        group, line = interrupt_at(place)
        assert not group._is_closed, line
        assert not group._is_busy, line
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, line
        if line is None:
            break
    assert 30 < place < 1000  # as many bytecodes were interrupted


def test_a_second_ctrl_c_inside_ends_the_ranks() -> None:
    group = Group()
    with pytest.raises(KeyboardInterrupt), group.together():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")
    assert group._is_closed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- a rank that does not answer


def test_health_tells_of_a_rank_that_is_stopped_or_lost(tmp_path: Path) -> None:
    path = write_checkpoints(tmp_path, {"llama": Llama.tiny()})["llama"]
    options: dict[str, Any] = {"tokenizer": byte_tokenizer(), "device": "cpu", "num_blocks": 40, "tp": 2}
    with contextlib.closing(LLM(path, **options)) as llm, serving(llm) as served:
        assert llm._lead is not None
        (rank,) = llm._lead.group._processes.values()

        def health(status: int, seconds: float, says: str) -> None:
            began = time.monotonic()
            while (answer := served.http.get("/health")).status_code != status or says not in answer.text:
                assert time.monotonic() - began < seconds, answer.text
                time.sleep(0.1)

        health(200, 5, "ok")
        rank.send_signal(signal.SIGSTOP)
        health(503, 5, "rank 1 has been stopped for ")  # while nothing asks the engine for anything
        rank.send_signal(signal.SIGCONT)
        health(200, 5, "ok")
        assert served.complete("a", max_tokens=2)["usage"]["completion_tokens"] == 2
        rank.kill()
        health(503, 5, "rank 1 was killed by signal 9")
    assert not distributed.is_initialized(), "the next engine could not start"
