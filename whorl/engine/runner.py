"""The runner executes a batch: it owns the KV caches, runs the forward calls and samples from their logits.

State lives on the device, by lane (lanes.py). The host sends a call's indices in one copy and does not wait, so it may
prepare step n + 1 while step n runs; tokens that the host has not read are taken from the lane. Decode calls are padded
to a few sizes and replayed as graphs if the device can record them; `NO_GRAPHS` in whorl/device.py lists those that
cannot, and why.
"""

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl import ops
from whorl.device import ahead, event, graph_pool, has_one_arithmetic, host_buffer, lasting, record_graph, synchronize
from whorl.device import use_graphs as wants_graphs
from whorl.nn import Inserted, Model, Step
from whorl.ops._varied import varied

from .batch import Batch, Call, PlacedChunk, Sample, Score, Size, field_offsets
from .caches import cache_specs
from .encoder import Work
from .features import Features
from .lanes import Lanes
from .scheduler import Chunk
from .sequence_parallel import PromptForward, SPSettings
from .small_copy import start_copy

_GRAPH_TOKENS = (1, 2, 4, 8, *range(16, 257, 16))  # decode calls are padded to these and recorded
_GRAPH_KEYS = 1024  # keys that the smallest graph attends to; each larger one has four times as many
_PROMPT_TOKENS = (16, 32, 64, 128, *range(256, 2049, 256))  # recorded calls with prompts are padded to these
_PROMPTS = 16  # most sequences of a recorded call with prompts
_LONG = 17  # tokens a sequence, on average, from which attention runs by its kernels for prompts
_NUM_STAGES = 4  # host buffers of inputs: two calls a step, and the host is at most one step ahead
_STRIDE = 7919  # between the token ids of dummy calls, so that they are different tokens
_TYPES = {"i8": torch.int64, "i4": torch.int32, "f4": torch.float32}


@dataclass(slots=True, eq=False)
class Result:
    """The outputs of a call, on the device: logits [S, V] and token ids [S] of its samples.

    hidden: hidden states [T, C] of all tokens. scored: those of `scores`, in their order; if it has none, not used.
    placed: where each chunk begins in the call. The next replay of a graph overwrites the outputs of a recorded call.
    """

    samples: list[Sample]
    logits: Tensor
    token_ids: Tensor
    scores: list[Score]
    scored: Tensor
    hidden: Tensor | None = None
    placed: list[PlacedChunk] = field(default_factory=list)


class Runner:
    """One model, its caches and the lanes of up to `max_num_seqs` sequences on one device.

    max_tokens: the most tokens of one call. vocab_size: only ids below it are sampled; None: the model's.
    prompt_graphs: calls with prompts of up to so many tokens are recorded as well. sp: the fields of
    `sequence_parallel.SPSettings`, with several ranks; None: prompts run without sequence parallelism.
    share_tables_with: a runner of the same sizes whose block tables this runner uses, because its caches lie in the
    same blocks.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_len: int,
        device: str,
        use_graphs: bool | None = None,
        prompt_graphs: int = 0,
        max_num_seqs: int = 64,
        max_tokens: int = 2048,
        vocab_size: int | None = None,
        kv_cache_dtype: str = "auto",
        sp: dict[str, Any] | None = None,
        share_tables_with: "Runner | None" = None,
    ) -> None:
        self.model, self.block_size, self.max_len, self.device = model, block_size, max_len, device
        self.vocab_size = vocab_size or model.vocab_size
        specs = cache_specs(model, kv_cache_dtype)
        self.caches = [spec.empty(num_blocks, block_size, device) for spec in specs]
        other_lanes = None if share_tables_with is None else share_tables_with.lanes
        self.lanes: Lanes = Lanes(max_num_seqs, -(-max_len // block_size), device, other_lanes)
        spare = self.lanes.spare
        self._padding = {"lanes": spare, "entry_lanes": spare, "sample_lanes": spare, "slots": -1}
        self._padding |= {"table_at": spare * self.lanes.width, "top_p": 1}
        self._inputs = _Inputs(max(max_tokens, _GRAPH_TOKENS[-1]), device)
        self._use_graphs = wants_graphs(device, use_graphs)
        self._graphs: dict[tuple[int, int], _Graph | None] = {}  # decode calls, by tokens and keys
        self._prompt_graphs: dict[int, _Graph | None] = {}  # calls with prompts, by tokens
        # The outputs of a graph are valid until the next graph of its pool is replayed, and a step may have both kinds.
        self._pool, self._prompt_pool = (graph_pool(device) if self._use_graphs else None for _ in range(2))
        self._max_recorded = min(prompt_graphs, self._inputs.max_tokens)
        # The fixed memory where graphs read the target model's hidden states.
        channels = getattr(model, "state_size", 0)
        self._states = torch.zeros(_GRAPH_TOKENS[-1], channels, dtype=model.dtype, device=device) if channels else None
        tower = getattr(model, "tower", None)
        self.features = None if tower is None else Features(tower, device)
        self.prompts = None if sp is None else PromptForward(model, device, SPSettings(**sp))

    def encode(self, work: Work) -> None:
        """Run the vision tower's part of a step, before `run`."""
        assert self.features is not None, "images reach only a model with a vision tower"
        self.features.drop(work.dropped)
        self.features.run(work.jobs)

    @torch.inference_mode()
    def run(self, batch: Batch, states: Mapping[Chunk, Tensor] | None = None) -> list[Result]:
        """Run the calls of a batch. states: the target's hidden states [T, C] by chunk, if the model takes them."""
        calls = batch.calls(self.block_size, self.lanes.width, is_joined=self._joins(batch))
        if states is None:
            return [self.run_call(call) for call in calls]
        return [self.run_call(call, torch.cat([states[placed.chunk] for placed in call.placed])) for call in calls]

    @property
    def _is_plain(self) -> bool:
        """Whether calls need neither the hidden states of another model nor sequence parallelism."""
        return self._states is None and self.prompts is None

    def _joins(self, batch: Batch) -> bool:
        """Return whether prompts and decoding sequences run in one call, which reads the weights once for both.

        The bits are those of two calls, except on Ascend. Prompts that a graph replays are a call of their own.
        """
        is_plain = self._is_plain and not batch.has_images
        num_recorded = self._recorded_tokens(batch.num_prompt_tokens, batch.num_prompts)
        is_recorded = num_recorded is not None and not batch.is_eager
        has_room = batch.num_tokens <= self._inputs.max_tokens
        return is_plain and has_room and not is_recorded and has_one_arithmetic(self.device)

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """Run calls without graphs in this context, so that hooks of the model's modules are called."""
        use_graphs, self._use_graphs = self._use_graphs, False
        try:
            yield
        finally:
            self._use_graphs = use_graphs

    def put(self, lanes: Sequence[int], token_ids: Tensor) -> None:
        """Set the last token of each lane to token_ids [N], for tokens that were sampled outside of this runner."""
        at = lasting(torch.tensor(lanes), self.device).to(self.device, non_blocking=True)
        self.lanes.keep(at, token_ids)

    @torch.inference_mode()
    def run_call(self, call: Call, states: Tensor | None = None) -> Result:
        """Run one call, as a graph if one fits. states: as for `run`, of all tokens of the call."""
        for lane, blocks in call.tables:
            self.lanes.admit(lane, blocks)
        graph = self._graph(call)
        size = call.size if graph is None else graph.size
        inputs = self._inputs.send(call, size, self._padding)
        if graph is None:
            width = -(-call.num_keys // self.block_size)
            options: dict[str, Any] = {"is_decode": call.is_decode, "is_dense": call.is_dense}
            options["decoding_from"] = call.decoding_from
            options |= {} if call.axes is None else self._image_inputs(call)
            if self._states is not None:
                options["states"] = (
                    self._states.new_zeros(call.size[0], self._states.shape[1]) if states is None else states
                )
            with varied():
                hidden, logits, token_ids = self._compute(inputs, width, **options)
        else:
            if self._states is not None and states is not None:
                self._states[: len(states)].copy_(states)
            graph.replay()
            hidden, logits, token_ids = graph.outputs
            num_tokens, _, num_samples = call.size
            hidden, logits, token_ids = hidden[:num_tokens], logits[:num_samples], token_ids[:num_samples]
        scored = hidden[call.score_indices] if call.scores else hidden
        return Result(call.samples, logits, token_ids, call.scores, scored, hidden, call.placed)

    def _image_inputs(self, call: Call) -> dict[str, Any]:
        """Return the inputs of a call with images that are not among its arrays."""
        assert call.axes is not None
        axes = lasting(torch.from_numpy(np.ascontiguousarray(call.axes)), self.device)
        inserted = None
        if call.inserts:
            assert self.features is not None
            inserted = self.features.inserted(call.inserts, call.size[0])
        return {"positions": axes.to(self.device, non_blocking=True), "inserted": inserted}

    def _compute(
        self,
        inputs: dict[str, Tensor],
        width: int,
        *,
        is_decode: bool,
        is_dense: bool,
        decoding_from: tuple[int, int] | None = None,
        positions: Tensor | None = None,
        inserted: Inserted | None = None,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states of all tokens, logits and token ids of the samples. A graph records all of this.

        width: blocks of a lane that the call may read. decoding_from: as in `Step`. positions: [A, T], if they have
        several axes. states: the target model's hidden states.
        """
        if decoding_from is not None:
            self.lanes.write_blocks(inputs)
        token_ids, block_tables = self.lanes.read(inputs, width, is_decode=is_decode)
        step = Step(
            token_ids=token_ids,
            positions=inputs["positions"] if positions is None else positions,
            slots=inputs["slots"],
            block_tables=block_tables,
            query_starts=inputs["query_starts"],
            context_lens=inputs["context_lens"],
            max_position=min(width * self.block_size, self.max_len),
            inserted=inserted,
            states=states,
            decoding_from=decoding_from,
        )
        hidden = self._forward(step, is_decode)
        if not len(inputs["seeds"]):  # no prompt ends in this call; not every backend takes empty tensors
            no_logits = hidden.new_empty(0, self.model.vocab_size)
            return hidden, no_logits, no_logits.new_empty(0, dtype=torch.int64)
        logits = self.model.logits(hidden if is_dense else hidden[inputs["sample_indices"]])
        sampling = (inputs[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "places"))
        token_ids = ops.sample(logits[:, : self.vocab_size], *sampling)
        # A sequence with a draft has several samples in one lane, and any of them may be stored. That is harmless: the
        # host reads them all before the next step and sends the accepted one with it.
        self.lanes.keep(inputs["sample_lanes"], token_ids)
        return hidden, logits, token_ids

    def _forward(self, step: Step, is_decode: bool) -> Tensor:
        """Return hidden states [T, C]; prompts may run with sequence parallelism."""
        if self.prompts is not None and not is_decode and self.prompts.takes(step):
            return self.prompts(step, self.caches)
        return self.model.forward(step, self.caches)

    def _graph(self, call: Call) -> "_Graph | None":
        """Return the graph that fits a call, recorded if it is new; None if the call is not to be replayed."""
        if not self._use_graphs or call.is_eager:
            return None
        if not call.is_decode:
            return self._prompt_graph(call)
        if not call.is_dense:
            return None
        num_tokens = next((size for size in _GRAPH_TOKENS if size >= call.size[0]), None)
        if num_tokens is None or num_tokens > self._inputs.max_tokens:
            return None
        key = num_tokens, next((keys for keys in self._graph_keys() if keys >= call.num_keys), self.max_len)
        if key not in self._graphs:
            with ahead():
                self._graphs[key] = self._record(self._dummy_decode(num_tokens), (num_tokens,) * 3, key[1], self._pool)
        return self._graphs[key]

    def _prompt_graph(self, call: Call) -> "_Graph | None":
        """As `_graph`, for a call with prompts, without images or hidden states."""
        is_plain = self._is_plain and call.axes is None and call.decoding_from is None
        num_tokens = self._recorded_tokens(call.size[0], call.num_prompts)
        if not is_plain or num_tokens is None:
            return None
        if num_tokens not in self._prompt_graphs:
            size = num_tokens, _most_prompts(num_tokens), _most_prompts(num_tokens)
            dummy = self._dummy_prompt(min(num_tokens, self.max_len))
            self._prompt_graphs[num_tokens] = self._record(dummy, size, self.max_len, self._prompt_pool)
        return self._prompt_graphs[num_tokens]

    def _recorded_tokens(self, num_tokens: int, num_prompts: int) -> int | None:
        """Return the size of the graph for prompts of so many tokens together; None if they are not recorded."""
        if not self._use_graphs:
            return None
        sizes = (size for size in _PROMPT_TOKENS if num_tokens <= size <= self._max_recorded)
        return next((size for size in sizes if num_prompts <= _most_prompts(size)), None)

    def _graph_keys(self) -> list[int]:
        """Return the numbers of keys that graphs are recorded for, up to the longest sequence."""
        sizes = [_GRAPH_KEYS]
        while sizes[-1] < self.max_len:
            sizes.append(4 * sizes[-1])
        return [*sizes[:-1], self.max_len]

    def graph_sizes(self, max_tokens: int) -> list[tuple[int, int]]:
        """Return tokens and keys of all graphs that decode calls of up to `max_tokens` may need; [] without graphs."""
        if not self._use_graphs:
            return []
        largest = next((size for size in _GRAPH_TOKENS if size >= max_tokens), _GRAPH_TOKENS[-1])
        counts = [size for size in _GRAPH_TOKENS if size <= min(largest, self._inputs.max_tokens)]
        return [(count, keys) for keys in self._graph_keys() for count in counts]

    def prompt_graph_sizes(self) -> list[tuple[int, int]]:
        """Return the most tokens and sequences of all graphs for calls with prompts, smallest first; [] without any."""
        has_graphs = self._use_graphs and self._is_plain
        return [(size, _most_prompts(size)) for size in _PROMPT_TOKENS if has_graphs and size <= self._max_recorded]

    def _record(self, dummy: Call, size: Size, keys: int, pool: Any) -> "_Graph | None":
        """Record a call of this size that may read up to `keys` tokens of a lane; None if the device cannot record it.

        dummy: the call whose indices are used while recording; it writes nothing to the caches. pool: the graph's
        memory pool.
        """
        inputs = self._inputs.send(dummy, size, self._padding)
        graph, width = _Graph(size), -(-keys // self.block_size)
        states = None if self._states is None else self._states[: size[0]]
        options: dict[str, Any] = {"is_decode": dummy.is_decode, "is_dense": dummy.is_decode, "states": states}

        def run() -> None:
            graph.outputs = self._compute(inputs, width, **options)

        run()  # compiles and selects kernels and builds tables, none of which may happen while recording
        synchronize(self.device)
        with _uncollected():
            replay = record_graph(self.device, run, pool=pool)
        if replay is None:
            return None
        graph.replay = replay
        return graph

    @torch.inference_mode()
    def cost(self, counts: Sequence[int], *, repeats: int = 5) -> dict[int, float]:
        """Return the seconds of a decode call, logits included, by number of tokens. The caches are not changed."""
        medians = {}
        for count in counts:
            call, times = self._dummy_decode(count), []
            for _ in range(repeats + 1):
                synchronize(self.device)
                start = time.perf_counter()
                self.run_call(call)
                synchronize(self.device)
                times.append(time.perf_counter() - start)
            medians[count] = statistics.median(times[1:])  # the first call warms up
        return medians

    def warm_up(self, num_tokens: int, keys: int) -> None:
        """Run a dummy decode call of this size, and record it if decode calls are recorded. Nothing is written."""
        call = self._dummy_decode(num_tokens)
        call.num_keys = keys
        self.run_call(call)

    def warm_up_prompt(self, length: int) -> None:
        """Run a dummy prompt of `length` tokens; nothing is sampled or written."""
        self.run_call(self._dummy_prompt(length))

    def _dummy_prompt(self, length: int) -> Call:
        """Return a call with a prompt in the spare lane, which writes nothing and samples no token."""
        fields = field_offsets((length, 1, 0))[0]
        arrays = {name: np.full(count, self._padding.get(name, 0)) for name, _, _, count in fields}
        arrays |= {"positions": np.arange(length), "query_starts": np.array([0, length])}
        tokens = np.arange(length) * _STRIDE % self.vocab_size
        arrays |= {"tokens": tokens, "context_lens": np.array([length])}
        return Call(1, arrays, num_keys=length, tables=[])

    def _dummy_decode(self, count: int) -> Call:
        """Return a call with `count` sequences of one token in the spare lane, which write nothing."""
        ones = np.ones(count)
        arrays = {name: np.full(count, self._padding.get(name, 0)) for name, *_ in field_offsets((count,) * 3)[0]}
        arrays |= {"context_lens": ones, "query_starts": np.arange(count + 1), "sample_indices": np.arange(count)}
        # Different tokens, so that a mixture of experts reads different weights.
        tokens = np.arange(count) * _STRIDE % self.vocab_size
        return Call(0, arrays | {"tokens": tokens}, num_keys=1, tables=[])


def _most_prompts(num_tokens: int) -> int:
    """Return the most sequences of a recorded call of so many tokens: few enough for the kernels for prompts, because
    those for decoding would read a long cached prefix for every token."""
    return max(1, min(_PROMPTS, num_tokens // _LONG))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from running: it may free the graphs and the memory of an engine that is gone, which
    is not allowed while a device records."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Graph:
    """A recorded call of this size. Padding tokens after the last sequence write no keys and attend to nothing."""

    replay: Callable[[], None]
    outputs: tuple[Tensor, Tensor, Tensor]  # every replay writes to these tensors

    def __init__(self, size: Size) -> None:
        self.size = size


class _Inputs:
    """The arrays of calls on the host and on the device, where their memory never moves, as graphs require."""

    def __init__(self, max_tokens: int, device: str) -> None:
        self.max_tokens, self._device = max_tokens, device
        self._num_bytes = field_offsets((max_tokens,) * 3)[1]
        self._on_device = torch.zeros(self._num_bytes, dtype=torch.uint8, device=device)
        self._stages = itertools.cycle([_Stage(self._num_bytes, device) for _ in range(_NUM_STAGES)])
        self._views: dict[Size, dict[str, Tensor]] = {}

    def send(self, call: Call, size: Size, padding: dict[str, int]) -> dict[str, Tensor]:
        """Write a call padded to `size` and start the copy to the device; return the tensors there."""
        if max(size) > self.max_tokens:
            raise ValueError(f"Runner: a call has {max(size)} tokens, expected at most {self.max_tokens} (max_tokens)")
        stage = next(self._stages)
        num_bytes = stage.write(call, size, padding)
        start_copy(stage.bytes[:num_bytes], self._on_device[:num_bytes])
        stage.sent = event(self._device)
        return self._tensors(size)

    def _tensors(self, size: Size) -> dict[str, Tensor]:
        """Return the arrays of a call of this size, as views of the buffer on the device."""
        views = self._views.get(size)
        if views is None:
            views = {}
            for name, kind, start, count in field_offsets(size)[0]:
                views[name] = self._on_device[start : start + int(kind[1]) * count].view(_TYPES[kind])
            if _is_graph_size(size):
                self._views[size] = views
        return views


class _Stage:
    """A host buffer from which a copy to the device may be in progress."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.bytes = host_buffer(num_bytes, device)
        self.sent: Callable[[], None] = lambda: None
        self._array = self.bytes.numpy()
        self._views: dict[Size, dict[str, np.ndarray]] = {}

    def write(self, call: Call, size: Size, padding: dict[str, int]) -> int:
        """Wait until the buffer is free, write the call into it and return the number of bytes."""
        self.sent()
        fields, num_bytes = field_offsets(size)
        views = self._views.get(size)
        if views is None:
            views = {}
            for name, kind, start, count in fields:
                views[name] = self._array[start : start + int(kind[1]) * count].view(kind)
            if _is_graph_size(size):
                self._views[size] = views
        call.write(views, padding)
        return num_bytes


def _is_graph_size(size: Size) -> bool:
    """Return whether graphs have this size. Views are kept for these only: other calls may have any size."""
    is_decoding = size[0] == size[1] == size[2] <= _GRAPH_TOKENS[-1]
    return is_decoding or (size[0] in _PROMPT_TOKENS and size[1:] == (_PROMPTS, _PROMPTS))
