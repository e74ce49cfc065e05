"""Runs the engine on a thread of its own: the event loop submits prompts, and receives what each step generated.

Only this thread touches the engine. Only the event loop counts waiting requests, so their limit needs no lock.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, abc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from whorl.engine.fair_queue import has_room
from whorl.engine.sequence import FinishReason, Logprob, SamplingParams, Sequence
from whorl.media import MediaItem

from .metrics import Metrics
from .readiness import Readiness

R = TypeVar("R")
_LOG = logging.getLogger("whorl.serve")
_STOP_SECONDS = 30.0  # how long `stop` waits for the current step: one that takes longer is stuck


class Engine(Protocol):
    """The part of `whorl.engine.llm.LLM` that the server uses."""

    max_model_len: int
    vocab_size: int

    @property
    def may_step(self) -> bool: ...
    def add(
        self, prompt: abc.Sequence[int], params: SamplingParams, *, media: abc.Sequence[MediaItem] = ()
    ) -> list[Sequence]: ...
    def step(self) -> list[Any]: ...
    def abort(self, seq: Sequence) -> None: ...
    def stats(self) -> dict[str, int]: ...


class EngineError(RuntimeError):
    """The engine cannot serve: it failed, or it is shutting down."""


class QueueFull(RuntimeError):
    """Too many requests wait already; the client may try again later."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens that one step added to one sequence of a request.

    index: of the sequence within its request. num_drafted: how many of the tokens, counted from the first, were
    accepted drafts.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprob]
    finish_reason: FinishReason | None
    num_drafted: int = 0


@dataclass(eq=False)
class Job:
    """The prompts of one request and the sequences that the engine created for them.

    media: the pictures and videos of each prompt. num_sequences: of the whole request, n for each prompt. loop: the
    event loop that waits for the outputs. events: what the engine's thread has sent it. accepted: is done when the
    engine has taken or refused the prompts. has_left_queue: the request no longer counts as waiting.
    """

    prompts: abc.Sequence[abc.Sequence[int]]
    params: abc.Sequence[SamplingParams]
    media: abc.Sequence[abc.Sequence[MediaItem]]
    num_sequences: int
    loop: asyncio.AbstractEventLoop
    events: "asyncio.Queue[StepOutput | Exception]" = field(default_factory=asyncio.Queue)
    accepted: "asyncio.Future[None] | None" = None
    sequences: list[Sequence] = field(default_factory=list)
    has_left_queue: bool = False

    async def outputs(self, deadline: float) -> AsyncIterator[StepOutput]:
        """Yield the output of each step until every sequence is finished.

        deadline: on the event loop's clock. Raises TimeoutError at the deadline, and the engine's error if it fails.
        """
        num_unfinished = len(self.sequences)
        while num_unfinished:
            try:
                async with asyncio.timeout_at(deadline):
                    event = await self.events.get()
            except TimeoutError:
                raise TimeoutError("the request took longer than this server allows") from None
            if isinstance(event, Exception):
                raise event
            num_unfinished -= event.finish_reason is not None
            yield event


class EngineThread:
    """Steps the engine while it has sequences.

    max_queue: how many sequences may wait, counting those of requests that have no token yet; each client may have its
    equal part of them, see `has_room`. readiness: the warm-up
    that runs before the first request; None: no warm-up.
    """

    def __init__(
        self, llm: Engine, metrics: Metrics, *, max_queue: int = 1024, readiness: Readiness | None = None
    ) -> None:
        self.llm, self.metrics, self.max_queue = llm, metrics, max_queue
        self.readiness = readiness or Readiness()
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owners: dict[Sequence, tuple[Job, int]] = {}
        self._thread = threading.Thread(target=self._run, name="whorl-engine", daemon=True)
        from whorl.streams import carried_over  # imports torch, which the errors that this module defines do not need

        self._use_stream = carried_over()  # of the thread that loaded the model
        self._is_stopping = False
        self._refusal: str | None = None  # why new requests are refused, once the engine failed or is stopping
        self._queued: set[Sequence] = set()  # sequences that no step has computed yet
        self._waiting: Counter[str | None] = Counter()  # sequences of each client that count as waiting; none is 0
        self._step_started: float | None = None

    # ---- on the event loop

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Abort all requests and end the thread.

        Polls, because a blocking join would need a second thread, and none may be free.
        """
        self._is_stopping = True
        self._commands.put(lambda: None)
        end = time.monotonic() + _STOP_SECONDS
        while self._thread.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.01)

    async def submit(
        self,
        prompts: abc.Sequence[abc.Sequence[int]],
        params: abc.Sequence[SamplingParams],
        media: abc.Sequence[abc.Sequence[MediaItem]] | None = None,
    ) -> Job:
        """Queue all prompts of a request, or none of them.

        media: the pictures and videos of each prompt; None: the request has none. Raises ValueError when the engine
        refuses a prompt, QueueFull and EngineError for reasons that are not the request's fault.
        """
        self.check()
        num_sequences = sum(sampling.n for sampling in params)
        self.check_size(num_sequences)
        client = params[0].client
        if not has_room(self._waiting, client, num_sequences, self.max_queue):
            raise QueueFull(f"{self.num_waiting} sequences wait already; up to {self.max_queue} may")
        loop = asyncio.get_running_loop()
        media = [()] * len(prompts) if media is None else media
        job = Job(prompts, params, media, num_sequences, loop, accepted=loop.create_future())
        self._waiting[client] += num_sequences
        self._commands.put(lambda: self._add(job))
        try:
            self.check()  # a second time: a thread that ended since the first check will never take the command
            assert job.accepted is not None
            await job.accepted
        except BaseException:
            self.close(job)
            raise
        return job

    def check(self) -> None:
        """Raise EngineError or WarmingUp when the engine cannot take requests now."""
        if self.failure is not None:
            raise EngineError(f"the engine failed: {type(self.failure).__name__}: {self.failure}")
        if self._is_stopping:
            raise EngineError("the server is shutting down")
        self.readiness.check()

    def check_size(self, num_sequences: int) -> None:
        """Raise ValueError when a request has more sequences than an empty queue could take."""
        if num_sequences > self.max_queue:
            raise ValueError(f"{num_sequences} sequences in one request: the queue has room for {self.max_queue}")

    def close(self, job: Job) -> None:
        """End a request, finished or not; its KV blocks are freed soon after. Calling it again has no effect."""
        self._leave_queue(job)
        self._commands.put(lambda: self._abort(job))

    @property
    def num_waiting(self) -> int:
        """Number of sequences of requests that have no token yet."""
        return self._waiting.total()

    def when_idle(self, work: Callable[[], None]) -> None:
        """Run `work` on the engine's thread, but drop it if the engine has sequences when its turn comes."""

        def command() -> None:
            if not self._owners and self._refusal is None:
                work()

        self._commands.put(command)

    async def on_engine(self, work: Callable[[], R]) -> R:
        """Run `work` on the engine's thread, between two steps, and return its result or raise its error."""
        self.check()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[R] = loop.create_future()

        def command() -> None:
            try:
                if self._refusal is not None:
                    raise EngineError(self._refusal)
                result = work()
            except BaseException as error:
                self._call(loop, _settle, outcome, error)
            else:
                self._call(loop, _settle, outcome, None, result)

        self._commands.put(command)
        self.check()  # a second time: see `submit`
        return await outcome

    def stalled_for(self) -> float:
        """Seconds for which the current step has run; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.perf_counter() - started

    def _leave_queue(self, job: Job) -> None:
        """Stop counting a request's sequences as waiting."""
        if not job.has_left_queue:
            job.has_left_queue = True
            client = job.params[0].client
            self._waiting[client] -= job.num_sequences
            if not self._waiting[client]:
                del self._waiting[client]

    def _deliver(self, outputs: list[tuple[Job, StepOutput | Exception]]) -> None:
        """Pass the outputs of a step, or errors, to the requests that wait for them."""
        for job, output in outputs:
            self._leave_queue(job)
            job.events.put_nowait(output)

    # ---- on the thread

    def _run(self) -> None:
        """Warm up, then run commands and steps until `stop`; at the end, or when the engine fails, refuse requests."""
        self._use_stream()
        try:
            self.readiness.warm_up(lambda: self._is_stopping)
            while not self._is_stopping:
                self._take_commands()
                if self._owners and self.llm.may_step:
                    started = self._step_started = time.perf_counter()
                    deltas = self.llm.step()
                    self._step_started = None
                    self._record_admissions(started, deltas)
                    self._publish(deltas)
        except BaseException as error:
            _LOG.exception("the engine failed")
            self.failure = error
            self._refuse_all(f"the engine failed: {type(error).__name__}: {error}")
            self.on_failure()
        else:
            self._refuse_all("the server is shutting down")

    def _take_commands(self) -> None:
        """Run all pending commands; block for the first one when there is nothing to step."""
        is_idle = not self._owners or not self.llm.may_step
        while True:
            try:
                self._commands.get(block=is_idle)()
            except queue.Empty:
                return
            is_idle = False

    def _add(self, job: Job) -> None:
        """Add a request's prompts to the engine, all or none, and settle `job.accepted`."""
        assert job.accepted is not None
        if self._refusal is not None:
            self._call(job.loop, _settle, job.accepted, EngineError(self._refusal))
            return
        if job.accepted.cancelled():
            return
        try:
            for prompt, params, media in zip(job.prompts, job.params, job.media, strict=True):
                job.sequences += self.llm.add(prompt, params, media=media)
        # The error concerns this request alone, as no step has run. A panic of a Rust library is not an Exception.
        except BaseException as error:
            self._abort(job)
            self._call(job.loop, _settle, job.accepted, error)
            return
        finally:
            job.media = ()  # the engine has copied what it needs, and patches are large
        for index, seq in enumerate(job.sequences):
            self._owners[seq] = job, index
            self._queued.add(seq)
        self._call(job.loop, _settle, job.accepted, None)

    def _abort(self, job: Job) -> None:
        """Abort those of a request's sequences that are not finished."""
        if self.failure is not None:  # the state of a failed engine is unknown, so it is not called any more
            return
        for seq in job.sequences:
            self._queued.discard(seq)
            if self._owners.pop(seq, None) is not None:
                self.metrics.finished(seq, FinishReason.ABORT)
            self.llm.abort(seq)

    def _record_admissions(self, started: float, deltas: abc.Sequence[Any]) -> None:
        """Record the sequences that a step computed for the first time. started: when that step began."""
        stepped = {delta.sequence for delta in deltas}
        for seq in [seq for seq in self._queued if seq.block_table or seq in stepped]:
            self._queued.remove(seq)
            seq.timings.admitted = started
            self.metrics.admitted(seq, started)

    def _publish(self, deltas: abc.Sequence[Any]) -> None:
        """Record the deltas of a step in the metrics and send them to the event loops of their requests."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, StepOutput | Exception]]] = {}
        for delta in deltas:
            seq = delta.sequence
            owner = self._owners.get(seq)
            if owner is None:
                continue
            job, index = owner
            if seq.params.on_update == "restart":
                if delta.finish_reason is None:  # what it has said may still be taken back
                    continue
                delta = delta._replace(token_ids=seq.output_ids, text=seq.text.value)
            end = seq.num_outputs
            logprobs = seq.logprobs[end - len(delta.token_ids) : end] if seq.logprobs else []
            output: StepOutput | Exception = StepOutput(
                index, delta.text, delta.token_ids, logprobs, delta.finish_reason, delta.num_drafted
            )
            if seq.error is not None:
                output = seq.error
            by_loop.setdefault(job.loop, []).append((job, output))
            self.metrics.progressed(seq, len(delta.token_ids))
            if delta.finish_reason is not None:
                del self._owners[seq]
                self.metrics.finished(seq, delta.finish_reason)
        for loop, outputs in by_loop.items():
            self._call(loop, self._deliver, outputs)

    def _refuse_all(self, reason: str) -> None:
        """Send an EngineError to all running requests and to those whose command is still in the queue."""
        self._refusal, self._step_started = reason, None
        jobs = {job for job, _ in self._owners.values()}
        for job in jobs:
            self._abort(job)
            self._call(job.loop, self._deliver, [(job, EngineError(reason))])
        while not self._commands.empty():
            self._commands.get()()

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on an event loop, unless it is closed."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)


def _settle(future: "asyncio.Future[Any]", error: BaseException | None, result: Any = None) -> None:
    """Set the result of a future, or the error, unless it was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
