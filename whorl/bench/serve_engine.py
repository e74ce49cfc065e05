"""An engine in this process as the target of a load. Requests are added between steps, as in the engine of a server."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whorl import device as devices
from whorl.bench.options import DecodeOptions, LoadOptions
from whorl.bench.progress import say
from whorl.bench.provenance import Document, provenance
from whorl.bench.serve_record import Record
from whorl.bench.workload import Load, Request, Workload
from whorl.engine.heap import keep_objects
from whorl.engine.llm import LLM
from whorl.engine.load import use_one_stream
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings
from whorl.engine.warmup import WarmUp, kind_for, shown

_SPIN = 0.001  # seconds before an arrival that are spent polling the clock instead of sleeping


class EngineTarget:
    """An engine in this process."""

    def __init__(self, model: str | None, options: LoadOptions, engine: EngineSettings, workload: Workload) -> None:
        self._name, self._options = options.random_config or model or "SmolLM2-135M-Instruct", options
        self._llm = _load_engine(model, options.random_config, engine)
        self._ids = vocabulary(self._llm)
        self.vocab_size = len(self._ids)
        longest, limit = workload.longest, self._llm.max_model_len
        if longest > limit and (workload.trace or longest < 2**31):
            raise ValueError(
                f"bench serve: requests have up to {longest} tokens, prompt and output together; sequences of this "
                f"engine have up to {limit}; give shorter --input and --output, or a larger --max-seq or --cache-memory"
            )

    def header(self) -> Document:
        """Return the header of the document."""
        llm, settings = self._llm, self._llm.settings
        about = {
            "dtype": str(llm.model.dtype).removeprefix("torch."),
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.step_tokens,
            "max_model_len": llm.max_model_len,
            "cache_tokens": llm.pool.num_blocks * llm.pool.block_size,
            "prefix_cache": settings.use_prefix_cache,
        }
        weights = "loaded" if self._options.random_config is None else "random"
        target: Document = {"target": "in process", "model": self._name, "weights": weights, "engine": about}
        return provenance(settings.device or devices.default_device()) | target

    def measure(
        self, load: Load, requests: Sequence[Request], seconds: float | None, on_end: Callable[[], None]
    ) -> tuple[list[Record], Document]:
        """Run one load; returns a record for each request, and more fields of the row."""
        keep_objects()  # as a server does; the load's own requests are many more than a server's
        before = self._llm.stats()
        more: Document = {"seconds": seconds, "ignore_eos": self._options.ignore_eos, "on_end": on_end}
        records = EngineLoad(self._llm, self._ids, load, requests, **more).run()
        after = self._llm.stats()
        counts = {name: after[name] - before[name] for name in ("num_steps", "num_preemptions")}
        # Requests are added between steps; the wait for a step counts as queue time, so none is sent late.
        return records, {"send_late_ms": None, "loop_late_ms": None, **counts}


def _load_engine(model: str | None, random_config: str | None, settings: EngineSettings) -> LLM:
    """Return an engine with the model, or with random weights of a config, warmed up as that of a server is."""
    say(f"weights of {random_config or model or 'the default model'}")
    if random_config is None:
        use_one_stream(settings)
        llm = LLM(model, settings, warm=False)
    else:
        from whorl.bench.decode_engine import DecodeSettings, load

        random_model, _ = load(DecodeSettings.resolve(None, DecodeOptions(random_config=random_config), settings))
        llm = LLM(model=random_model, settings=settings, warm=False)
    work = WarmUp(llm, kind_for(settings.warmup, llm.runner.device, is_server=True))
    for _ in shown(work.run(), say=say):
        pass
    return llm


def vocabulary(llm: LLM) -> tuple[int, ...]:
    """Return the token ids that prompts are made of: all but special tokens."""
    tokenizer: Any = llm.tokenizer
    special = frozenset() if tokenizer is None else tokenizer.special_ids | tokenizer.added_ids
    return tuple(token for token in range(llm.vocab_size) if token not in special)


class EngineLoad:
    """One load on an engine. A request that arrives during a step waits for its end; that counts as queue time.

    ids: the token ids that prompts index, from `vocabulary`. seconds: a closed loop starts no request later. on_end:
    called after each request.
    """

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
        self._waiting = list(reversed(requests))
        self._ids = np.asarray(ids)
        self._params = {
            request.index: SamplingParams(temperature=0, max_tokens=request.num_output, ignore_eos=ignore_eos)
            for request in requests
        }
        self._records: list[Record] = []
        self._running: dict[Any, Record] = {}
        self._queued: dict[Any, Record] = {}
        self._free_since: list[float] = []  # for each request that a closed loop may start now: since when
        self._start = 0.0

    def run(self) -> list[Record]:
        """Run the load to its end; returns the records in order of index."""
        self._start = time.perf_counter()
        self._free_since = [0.0] * min(self._load.concurrency or 0, len(self._waiting))
        while self._add_due() or self._running or self._wait():
            if self._running:
                self._step()
        return sorted(self._records, key=lambda record: record.index)

    def _clock(self) -> float:
        return time.perf_counter() - self._start

    def _add_due(self) -> bool:
        """Add the requests that are due to the engine; returns whether there were any."""
        before = len(self._records)
        while self._waiting and (due := self._due()) is not None:
            self._add(self._waiting.pop(), due)
        return len(self._records) > before

    def _due(self) -> float | None:
        """Return since when the next request has been due; None when it is not due yet."""
        now, at = self._clock(), self._waiting[-1].at
        if at is not None:
            return at if at <= now else None
        if self._seconds is not None and now >= self._seconds:
            self._waiting.clear()
            return None
        return self._free_since.pop() if self._free_since else None

    def _wait(self) -> bool:
        """Sleep until the next arrival; returns whether there is one."""
        if not self._waiting:
            return False
        at = self._waiting[-1].at
        if at is not None and (wait := at - self._clock() - _SPIN) > 0:
            time.sleep(wait)
        return True

    def _add(self, request: Request, due: float) -> None:
        record = Record(index=request.index, asked_input=len(request.prompt), asked_output=request.num_output)
        record.due = record.sent = due
        record.num_input = len(request.prompt)
        self._records.append(record)
        try:
            (seq,) = self._llm.add(self._ids[request.prompt].tolist(), self._params[request.index])
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
        # A sequence that has blocks, or an output already, was scheduled by this step and has left the queue.
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
            self._free_since.append(record.end)
        self._on_end()
