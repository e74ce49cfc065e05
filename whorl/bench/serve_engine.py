"""The same load on an engine in this process: requests are taken between steps, as a server's engine takes them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from whorl.bench.provenance import Document
from whorl.bench.serve_record import Record
from whorl.bench.workload import Load, Request
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings

_NAP = 0.001  # seconds before a moment in which the clock is watched instead of slept through


def load_engine(model: str | None, random_config: str | None, settings: EngineSettings) -> LLM:
    if random_config is None:
        return LLM(model, settings)
    from whorl.bench import decode

    made, _ = decode.load(decode.DecodeSettings.resolve(random_config=random_config, engine=settings))
    return LLM(model=made, settings=settings)


def vocabulary(llm: LLM) -> tuple[int, ...]:
    """Ids that prompts are made of: all but the special ones."""
    tokenizer: Any = llm.tokenizer
    special = frozenset() if tokenizer is None else tokenizer.special_ids | tokenizer.added_ids
    return tuple(token for token in range(llm.vocab_size) if token not in special)


class EngineLoad:
    """One measurement. A request that comes while a step runs waits for its end: that is time in the queue."""

    def __init__(
        self,
        llm: LLM,
        ids: Sequence[int],
        load: Load,
        requests: Sequence[Request],
        *,
        seconds: float | None = None,
        ignore_eos: bool = True,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._llm, self._load, self._seconds, self._on_end = llm, load, seconds, on_end
        self._left = list(reversed(requests))
        self._prompts = {request.index: [ids[place] for place in request.prompt] for request in requests}
        self._params = {
            request.index: SamplingParams(temperature=0, max_tokens=request.num_output, ignore_eos=ignore_eos)
            for request in requests
        }
        self._records: list[Record] = []
        self._running: dict[Any, Record] = {}
        self._queued: dict[Any, Record] = {}
        self._slots: list[float] = []  # when each free place of a closed loop became free
        self._start = 0.0

    def run(self) -> list[Record]:
        self._start = time.perf_counter()
        self._slots = [0.0] * min(self._load.concurrency or 0, len(self._left))
        while self._take_due() or self._running or self._wait():
            if self._running:
                self._step()
        return sorted(self._records, key=lambda record: record.index)

    def _clock(self) -> float:
        return time.perf_counter() - self._start

    def _take_due(self) -> bool:
        """Hand over what is due; whether anything was."""
        before = len(self._records)
        while self._left and (due := self._due()) is not None:
            self._add(self._left.pop(), due)
        return len(self._records) > before

    def _due(self) -> float | None:
        """Since when the next request is; None: it is not."""
        now, at = self._clock(), self._left[-1].at
        if at is not None:
            return at if at <= now else None
        if self._seconds is not None and now >= self._seconds:
            self._left.clear()
            return None
        return self._slots.pop() if self._slots else None

    def _wait(self) -> bool:
        """Until the next moment; whether there is one."""
        if not self._left:
            return False
        at = self._left[-1].at
        if at is not None and (wait := at - self._clock() - _NAP) > 0:
            time.sleep(wait)
        return True

    def _add(self, request: Request, due: float) -> None:
        record = Record(index=request.index, asked_input=len(request.prompt), asked_output=request.num_output)
        record.due = record.sent = due
        record.num_input = len(request.prompt)
        self._records.append(record)
        try:
            (seq,) = self._llm.add(self._prompts[request.index], self._params[request.index])
        except ValueError as error:
            record.failure, record.message = "refused", str(error)
            self._end(record)
            return
        self._running[seq] = self._queued[seq] = record

    def _step(self) -> None:
        began = self._clock()
        deltas = self._llm.step()
        now = self._clock()
        done = {delta.sequence for delta in deltas}
        for seq in [seq for seq in self._queued if seq.block_table or seq in done]:
            record = self._queued.pop(seq)
            record.queue = began - record.due
        for delta in deltas:
            record = self._running[delta.sequence]
            if delta.token_ids:
                record.arrivals.append((now, len(delta.token_ids)))
            if delta.finish_reason is not None:
                self._finish(delta.sequence, record)

    def _finish(self, seq: Any, record: Record) -> None:
        del self._running[seq]
        record.num_output, record.num_cached = seq.num_outputs, seq.num_cached
        if seq.error is not None:
            record.failure, record.message = "error", str(seq.error)
        self._end(record)

    def _end(self, record: Record) -> None:
        record.end = self._clock()
        if self._load.concurrency is not None:
            self._slots.append(record.end)
        self._on_end()


def about(llm: LLM) -> Document:
    """What the header says of the engine."""
    settings = llm.settings
    return {
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.step_tokens,
        "max_model_len": llm.max_model_len,
        "cache_tokens": llm.pool.num_blocks * llm.pool.block_size,
        "prefix_cache": settings.use_prefix_cache,
    }
