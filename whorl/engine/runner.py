"""Runs a batch: the caches, the forward calls, their logits and the tokens that these give.

State lives on the device, by lane (lanes.py). The host sends a call's indices in one copy and waits for nothing, so it
may prepare step n + 1 while step n runs; tokens that it has not read are taken from the lane. Decode calls are replayed
as graphs, padded to a few sizes, where the device records them: `NO_GRAPHS` in whorl/device.py says where not, and why.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl import ops
from whorl.device import ahead, event, graph_pool, host_buffer, lasting, record_graph, synchronize
from whorl.device import use_graphs as wants_graphs
from whorl.nn import Inserted, Model, Step

from .batch import Batch, Call, Placed, Sample, Score, Size, layout
from .caches import cache_specs
from .encoder import Work
from .features import Features
from .lanes import Lanes
from .scheduler import Chunk
from .sequence_parallel import PromptForward, SPSettings
from .small_copy import start_copy

_GRAPH_ROWS = (1, 2, 4, 8, *range(16, 257, 16))  # decode calls are padded to these and recorded
_GRAPH_KEYS = 1024  # of the shortest recording; longer ones see four times as many each
_PROMPT_ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # calls with prompts are padded to these where they are recorded
_PROMPTS = 16  # sequences of such a call
_NUM_STAGES = 4  # two calls a step, and the host is at most one step ahead
_STRIDE = 7919  # between the ids of tokens that only cost time
_TYPES = {"i8": torch.int64, "i4": torch.int32, "f4": torch.float32}


@dataclass(slots=True, eq=False)
class Result:
    """What became of a call, on the device: logits [S, V] and tokens [S] of its samples, hidden rows of its scores.

    hidden: [T, C] of all rows; placed: whose they are. Those of a recorded call are written over by the next one.
    """

    samples: list[Sample]
    logits: Tensor
    token_ids: Tensor
    scores: list[Score]
    scored: Tensor
    hidden: Tensor | None = None
    placed: list[Placed] = field(default_factory=list)


class Runner:
    """One model, its caches and the lanes of up to `max_num_seqs` sequences on one device.

    max_rows: of one call; vocab_size: of ids from here on none is sampled; None: all may be. prompt_graphs: tokens of
    prompts up to which a call is recorded, too. sp: the fields of `sequence_parallel.SPSettings`, for one rank of many;
    None: prompts run as anything else. beside: a runner of the same sizes, whose lanes and block tables are these, too:
    this one's caches lie in the same blocks.
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
        max_rows: int = 2048,
        vocab_size: int | None = None,
        kv_cache_dtype: str = "auto",
        sp: dict[str, Any] | None = None,
        beside: "Runner | None" = None,
    ) -> None:
        self.model, self.block_size, self.max_len, self.device = model, block_size, max_len, device
        self.vocab_size = vocab_size or model.vocab_size
        specs = cache_specs(model, kv_cache_dtype)
        self.caches = [spec.empty(num_blocks, block_size, device) for spec in specs]
        others = None if beside is None else beside.lanes
        self.lanes: Lanes = Lanes(max_num_seqs, -(-max_len // block_size), device, others)
        spare = self.lanes.spare
        self._padding = {"lanes": spare, "entry_lanes": spare, "sample_lanes": spare, "slots": -1}
        self._padding |= {"table_at": spare * self.lanes.width, "top_p": 1}
        self._inputs = _Inputs(max(max_rows, _GRAPH_ROWS[-1]), device)
        self._use_graphs = wants_graphs(device, use_graphs)
        self._graphs: dict[tuple[int, int], _Graph | None] = {}  # of decoding, by rows and keys
        self._prompt_graphs: dict[int, _Graph | None] = {}  # by rows
        # What a graph returned holds until the next one of its pool is replayed, and a step has a call of each kind.
        self._pool, self._prompt_pool = (graph_pool(device) if self._use_graphs else None for _ in range(2))
        self._most_recorded = min(prompt_graphs, self._inputs.max_rows)
        # Where recordings find the hidden states of another model.
        channels = getattr(model, "state_size", 0)
        self._states = torch.zeros(_GRAPH_ROWS[-1], channels, dtype=model.dtype, device=device) if channels else None
        tower = getattr(model, "tower", None)
        self.features = None if tower is None else Features(tower, device)
        self.prompts = None if sp is None else PromptForward(model, device, SPSettings(**sp))

    def encode(self, work: Work) -> None:
        """The tower's part of a step, before `run`."""
        assert self.features is not None, "only a model with a tower is given pictures"
        self.features.drop(work.dropped)
        self.features.run(work.jobs)

    @torch.inference_mode()
    def run(self, batch: Batch, states: Mapping[Chunk, Tensor] | None = None) -> list[Result]:
        """states: [rows, C] of each chunk, where the model takes another's hidden states."""
        calls = batch.calls(self.block_size, self.lanes.width)
        if states is None:
            return [self.run_call(call) for call in calls]
        return [self.run_call(call, torch.cat([states[each.chunk] for each in call.placed])) for call in calls]

    def put(self, lanes: Sequence[int], token_ids: Tensor) -> None:
        """Tokens that lanes go on with, where somebody else has chosen them."""
        at = lasting(torch.tensor(lanes), self.device).to(self.device, non_blocking=True)
        self.lanes.keep(at, token_ids)

    @torch.inference_mode()
    def run_call(self, call: Call, states: Tensor | None = None) -> Result:
        for lane, blocks in call.tables:
            self.lanes.admit(lane, blocks)
        graph = self._graph(call)
        size = call.size if graph is None else graph.size
        given = self._inputs.send(call, size, self._padding)
        if graph is None:
            width = -(-call.num_keys // self.block_size)
            how: dict[str, Any] = {"is_decode": call.is_decode, "is_dense": call.is_dense}
            how |= {} if call.axes is None else self._shown(call)
            if self._states is not None:
                how["states"] = (
                    self._states.new_zeros(call.size[0], self._states.shape[1]) if states is None else states
                )
            hidden, logits, token_ids = self._compute(given, width, **how)
        else:
            if self._states is not None and states is not None:
                self._states[: len(states)].copy_(states)
            graph.replay()
            hidden, logits, token_ids = graph.outputs
            num_rows, _, num_samples = call.size
            hidden, logits, token_ids = hidden[:num_rows], logits[:num_samples], token_ids[:num_samples]
        scored = hidden[call.score_rows] if call.scores else hidden
        return Result(call.samples, logits, token_ids, call.scores, scored, hidden, call.placed)

    def _shown(self, call: Call) -> dict[str, Any]:
        """What a call with pictures has beside its indices."""
        assert call.axes is not None
        axes = lasting(torch.from_numpy(np.ascontiguousarray(call.axes)), self.device)
        inserted = None
        if call.inserts:
            assert self.features is not None
            inserted = self.features.inserted(call.inserts, call.size[0])
        return {"positions": axes.to(self.device, non_blocking=True), "inserted": inserted}

    def _compute(
        self,
        given: dict[str, Tensor],
        width: int,
        *,
        is_decode: bool,
        is_dense: bool,
        positions: Tensor | None = None,
        inserted: Inserted | None = None,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states of the rows, logits and tokens of the samples: everything that a graph records.

        width: blocks of a lane that the call may read. positions: [A, T], where they have several axes. states: of
        another model.
        """
        token_ids, block_tables = self.lanes.read(given, width, is_decode=is_decode)
        step = Step(
            token_ids=token_ids,
            positions=given["positions"] if positions is None else positions,
            slots=given["slots"],
            block_tables=block_tables,
            query_starts=given["query_starts"],
            context_lens=given["context_lens"],
            max_position=min(width * self.block_size, self.max_len),
            inserted=inserted,
            states=states,
        )
        hidden = self._forward(step, is_decode)
        if not len(given["seeds"]):  # in the middle of prompts; not every backend takes empty tensors
            none = hidden.new_empty(0, self.model.vocab_size)
            return hidden, none, none.new_empty(0, dtype=torch.int64)
        logits = self.model.logits(hidden if is_dense else hidden[given["sample_rows"]])
        sampling = (given[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "places"))
        token_ids = ops.sample(logits[:, : self.vocab_size], *sampling)
        # Of a sequence with a draft it is any of its tokens; the host reads those before it goes on, and sends them.
        self.lanes.keep(given["sample_lanes"], token_ids)
        return hidden, logits, token_ids

    def _forward(self, step: Step, is_decode: bool) -> Tensor:
        if self.prompts is not None and not is_decode and self.prompts.takes(step):
            return self.prompts(step, self.caches)
        return self.model.forward(step, self.caches)

    def _graph(self, call: Call) -> "_Graph | None":
        """The recording that fits a call; None where there is none."""
        if not self._use_graphs:
            return None
        if not call.is_decode:
            return self._prompt_graph(call)
        if not call.is_dense:
            return None
        rows = next((size for size in _GRAPH_ROWS if size >= call.size[0]), None)
        if rows is None or rows > self._inputs.max_rows:
            return None
        key = rows, next((keys for keys in self._graph_keys() if keys >= call.num_keys), self.max_len)
        if key not in self._graphs:
            with ahead():
                self._graphs[key] = self._record(self._blank(rows), (rows,) * 3, key[1], self._pool)
        return self._graphs[key]

    def _prompt_graph(self, call: Call) -> "_Graph | None":
        is_plain = call.axes is None and self.prompts is None and self._states is None
        rows = next((size for size in _PROMPT_ROWS if call.size[0] <= size <= self._most_recorded), None)
        if not is_plain or rows is None or max(call.size[1:]) > _PROMPTS:
            return None
        if rows not in self._prompt_graphs:
            size = rows, _PROMPTS, _PROMPTS
            length = min(rows, self.max_len)
            self._prompt_graphs[rows] = self._record(self._blank_prompt(length), size, self.max_len, self._prompt_pool)
        return self._prompt_graphs[rows]

    def _graph_keys(self) -> list[int]:
        """Lengths that are recorded, up to the longest sequence."""
        found = [_GRAPH_KEYS]
        while found[-1] < self.max_len:
            found.append(4 * found[-1])
        return [*found[:-1], self.max_len]

    def graph_sizes(self, max_rows: int) -> list[tuple[int, int]]:
        """Rows and keys of every recording that decode calls of up to `max_rows` rows may need; [] without graphs."""
        if not self._use_graphs:
            return []
        last = next((rows for rows in _GRAPH_ROWS if rows >= max_rows), _GRAPH_ROWS[-1])
        rows = [size for size in _GRAPH_ROWS if size <= min(last, self._inputs.max_rows)]
        return [(count, keys) for keys in self._graph_keys() for count in rows]

    def _record(self, blank: Call, size: Size, keys: int, pool: Any) -> "_Graph | None":
        """A call of this size, laid out as `blank`, which writes nothing."""
        given = self._inputs.send(blank, size, self._padding)
        graph, width = _Graph(size), -(-keys // self.block_size)
        states = None if self._states is None else self._states[: size[0]]
        how: dict[str, Any] = {"is_decode": blank.is_decode, "is_dense": blank.is_decode, "states": states}

        def run() -> None:
            graph.outputs = self._compute(given, width, **how)

        run()  # kernels are compiled and chosen, and tables built, before recording
        synchronize(self.device)
        replay = record_graph(self.device, run, pool=pool)
        if replay is None:
            return None
        graph.replay = replay
        return graph

    @torch.inference_mode()
    def cost(self, counts: Sequence[int], *, repeats: int = 5) -> dict[int, float]:
        """Seconds of a decode call by number of rows, head included; the caches are left as they are."""
        found = {}
        for count in counts:
            call, times = self._blank(count), []
            for _ in range(repeats + 1):
                synchronize(self.device)
                start = time.perf_counter()
                self.run_call(call)
                synchronize(self.device)
                times.append(time.perf_counter() - start)
            found[count] = statistics.median(times[1:])  # the first one warms up
        return found

    def warm_up(self, rows: int, keys: int) -> None:
        """A decode call of so many rows and keys, recorded where calls are; nothing is written."""
        call = self._blank(rows)
        call.num_keys = keys
        self.run_call(call)

    def warm_up_prompt(self, length: int) -> None:
        """A prompt of so many tokens, without its end; nothing is written."""
        self.run_call(self._blank_prompt(length))

    def _blank_prompt(self, length: int) -> Call:
        """One in the spare lane, which writes nothing and gives no token."""
        arrays = {name: np.full(count, self._padding.get(name, 0)) for name, _, _, count in layout((length, 1, 0))[0]}
        arrays |= {"positions": np.arange(length), "query_starts": np.array([0, length])}
        tokens = np.arange(length) * _STRIDE % self.vocab_size
        arrays |= {"tokens": tokens, "context_lens": np.array([length])}
        return Call(False, arrays, num_keys=length, tables=[])

    def _blank(self, rows: int) -> Call:
        """Sequences of one token in the spare lane, which write nothing."""
        ones = np.ones(rows)
        arrays = {name: np.full(rows, self._padding.get(name, 0)) for name, *_ in layout((rows,) * 3)[0]}
        arrays |= {"context_lens": ones, "query_starts": np.arange(rows + 1), "sample_rows": np.arange(rows)}
        # Different tokens: of a mixture of experts they read different weights.
        tokens = np.arange(rows) * _STRIDE % self.vocab_size
        return Call(True, arrays | {"tokens": tokens}, num_keys=1, tables=[])


class _Graph:
    """A recorded call of this size. Rows past the last sequence write no keys and attend to nothing."""

    replay: Callable[[], None]
    outputs: tuple[Tensor, Tensor, Tensor]  # of the recording; every replay writes them

    def __init__(self, size: Size) -> None:
        self.size = size


class _Inputs:
    """The arrays of a call, on the host and on the device, where they always lie in the same memory."""

    def __init__(self, max_rows: int, device: str) -> None:
        self.max_rows, self._device = max_rows, device
        self._num_bytes = layout((max_rows,) * 3)[1]
        self._there = torch.zeros(self._num_bytes, dtype=torch.uint8, device=device)
        self._stages = itertools.cycle([_Stage(self._num_bytes, device) for _ in range(_NUM_STAGES)])
        self._views: dict[Size, dict[str, Tensor]] = {}

    def send(self, call: Call, size: Size, padding: dict[str, int]) -> dict[str, Tensor]:
        """Write a call of up to `size` and start its way to the device."""
        if max(size) > self.max_rows:
            raise ValueError(f"a call of {max(size)} rows; the runner was made for up to {self.max_rows}")
        stage = next(self._stages)
        num_bytes = stage.write(call, size, padding)
        start_copy(stage.bytes[:num_bytes], self._there[:num_bytes])
        stage.sent = event(self._device)
        return self._tensors(size)

    def _tensors(self, size: Size) -> dict[str, Tensor]:
        found = self._views.get(size)
        if found is None:
            found = {}
            for name, kind, at, count in layout(size)[0]:
                found[name] = self._there[at : at + int(kind[1]) * count].view(_TYPES[kind])
            if _is_common(size):
                self._views[size] = found
        return found


class _Stage:
    """Bytes on the host from which a copy to the device may be under way."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.bytes = host_buffer(num_bytes, device)
        self.sent: Callable[[], None] = lambda: None
        self._array = self.bytes.numpy()
        self._views: dict[Size, dict[str, np.ndarray]] = {}

    def write(self, call: Call, size: Size, padding: dict[str, int]) -> int:
        """The number of bytes written."""
        self.sent()
        fields, num_bytes = layout(size)
        found = self._views.get(size)
        if found is None:
            found = {name: self._array[at : at + int(kind[1]) * count].view(kind) for name, kind, at, count in fields}
            if _is_common(size):
                self._views[size] = found
        call.write(found, padding)
        return num_bytes


def _is_common(size: Size) -> bool:
    """That of a recording. Other prompts and drafts have any size: what was made for theirs is not kept."""
    is_decoding = size[0] == size[1] == size[2] <= _GRAPH_ROWS[-1]
    return is_decoding or (size[0] in _PROMPT_ROWS and size[1:] == (_PROMPTS, _PROMPTS))
