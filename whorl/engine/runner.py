"""Runs a batch: the caches, the forward calls, their logits and the tokens that these give.

State lives on the device: each sequence's last token and its block table, by lane. The host sends a call's indices in
one copy and waits for nothing, so it may prepare step n + 1 while step n runs; tokens that it has not read are taken
from the lane. Decode calls are replayed as graphs, padded to a few sizes, where the device records them: `NO_GRAPHS` in
whorl/device.py says where not, and why.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl import ops
from whorl.device import ahead, event, graph_pool, host_buffer, lasting, record_graph, synchronize
from whorl.device import use_graphs as wants_graphs
from whorl.nn import Inserted, Model, Step, recordable

from .batch import Batch, Call, Sample, Score, Size, layout
from .caches import cache_specs
from .encoder import Work
from .features import Features
from .sequence_parallel import PromptForward, Settings
from .small_copy import start_copy

_GRAPH_ROWS = (1, 2, 4, 8, *range(16, 257, 16))  # decode calls are padded to these and recorded
_GRAPH_KEYS = 1024  # of the shortest recording; longer ones see four times as many each
_NUM_STAGES = 4  # two calls a step, and the host is at most one step ahead
_STRIDE = 7919  # between the ids of tokens that only cost time
_TYPES = {"i8": torch.int64, "i4": torch.int32, "f4": torch.float32}


@dataclass(slots=True, eq=False)
class Result:
    """What became of a call, on the device: logits [S, V] and tokens [S] of its samples, hidden rows of its scores.

    Those of a recorded call are written over by the next one.
    """

    samples: list[Sample]
    logits: Tensor
    token_ids: Tensor
    scores: list[Score]
    scored: Tensor


class Runner:
    """One model, its caches and the lanes of up to `max_num_seqs` sequences on one device.

    max_rows: of one call; vocab_size: of ids from here on none is sampled; None: all may be. sp: the fields of
    `sequence_parallel.Settings`, for one rank of several; None: prompts run as anything else.
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
        max_num_seqs: int = 64,
        max_rows: int = 2048,
        vocab_size: int | None = None,
        kv_cache_dtype: str = "auto",
        sp: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.block_size, self.max_len, self.device = model, block_size, max_len, device
        self.vocab_size = vocab_size or model.vocab_size
        specs = cache_specs(model, kv_cache_dtype)
        self.caches = [spec.empty(num_blocks, block_size, device) for spec in specs]
        # The last lane is spare: rows that only fill a recorded call up belong to it.
        width = -(-max_len // block_size)
        self._tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._tables = torch.zeros(max_num_seqs + 1, width, dtype=torch.int32, device=device)
        spare = max_num_seqs
        self._padding = {"lanes": spare, "entry_lanes": spare, "sample_lanes": spare, "slots": -1}
        self._padding |= {"table_at": spare * width, "top_p": 1}
        self._inputs = _Inputs(max(max_rows, _GRAPH_ROWS[-1]), device)
        self._use_graphs = wants_graphs(device, use_graphs) and recordable(model, use_graphs)
        self._graphs: dict[tuple[int, int], _Graph | None] = {}
        self._pool = graph_pool(device) if self._use_graphs else None
        tower = getattr(model, "tower", None)
        self.features = None if tower is None else Features(tower, device)
        self.prompts = None if sp is None else PromptForward(model, device, Settings(**sp))

    def encode(self, work: Work) -> None:
        """The tower's part of a step, before `run`."""
        assert self.features is not None, "only a model with a tower is given pictures"
        self.features.drop(work.dropped)
        for job in work.jobs:
            self.features.run(job)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[Result]:
        return [self.run_call(call) for call in batch.calls(self.block_size, self._tables.shape[1])]

    @torch.inference_mode()
    def run_call(self, call: Call) -> Result:
        for lane, blocks in call.tables:
            new = lasting(torch.tensor(blocks, dtype=torch.int32), self.device)
            self._tables[lane, : len(blocks)].copy_(new, non_blocking=True)
        graph = self._graph(call)
        size = call.size if graph is None else (graph.rows,) * 3
        given = self._inputs.send(call, size, self._padding)
        if graph is None:
            width = -(-call.num_keys // self.block_size)
            how: dict[str, Any] = {"is_decode": call.is_decode, "is_dense": call.is_dense}
            how |= {} if call.axes is None else self._shown(call)
            hidden, logits, token_ids = self._compute(given, width, **how)
        else:
            graph.replay()
            count = call.size[0]
            hidden, logits, token_ids = (out[:count] for out in graph.outputs)
        return Result(call.samples, logits, token_ids, call.scores, hidden[call.score_rows] if call.scores else hidden)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states of the rows, logits and tokens of the samples: everything that a graph records.

        width: blocks of a lane that the call may read. positions: [A, T], where they have several axes.
        """
        if is_decode:  # where a row's block is new in its lane; a prompt's were sent when it was admitted
            self._tables.view(-1).index_copy_(0, given["table_at"], given["blocks"])
        tokens = given["tokens"]
        step = Step(
            token_ids=torch.where(tokens < 0, self._tokens[given["lanes"]], tokens),
            positions=given["positions"] if positions is None else positions,
            slots=given["slots"],
            block_tables=self._tables[:, :width].index_select(0, given["entry_lanes"]),
            query_starts=given["query_starts"],
            context_lens=given["context_lens"],
            max_position=min(width * self.block_size, self.max_len),
            inserted=inserted,
        )
        hidden = self._forward(step, is_decode)
        if not len(given["seeds"]):  # in the middle of prompts; not every backend takes empty tensors
            none = hidden.new_empty(0, self.model.vocab_size, dtype=torch.float32)
            return hidden, none, none.new_empty(0, dtype=torch.int64)
        logits = self.model.logits(hidden if is_dense else hidden[given["sample_rows"]])
        sampling = (given[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "places"))
        token_ids = ops.sample(logits[:, : self.vocab_size], *sampling)
        # Of a sequence with a draft it is any of its tokens; the host reads those before it goes on, and sends them.
        self._tokens.index_copy_(0, given["sample_lanes"], token_ids)
        return hidden, logits, token_ids

    def _forward(self, step: Step, is_decode: bool) -> Tensor:
        if self.prompts is not None and not is_decode and self.prompts.takes(step):
            return self.prompts(step, self.caches)
        return self.model.forward(step, self.caches)

    def _graph(self, call: Call) -> "_Graph | None":
        """The recording that fits a call; None where there is none or the call is not plain decoding."""
        if not self._use_graphs or not call.is_decode or not call.is_dense:
            return None
        rows = next((size for size in _GRAPH_ROWS if size >= call.size[0]), None)
        if rows is None or rows > self._inputs.max_rows:
            return None
        key = rows, next((keys for keys in self._graph_keys() if keys >= call.num_keys), self.max_len)
        if key not in self._graphs:
            self._graphs[key] = self._record(*key)
        return self._graphs[key]

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

    def _record(self, rows: int, keys: int) -> "_Graph | None":
        given = self._inputs.send(self._blank(rows), (rows,) * 3, self._padding)
        graph, width = _Graph(rows), -(-keys // self.block_size)

        def run() -> None:
            graph.outputs = self._compute(given, width, is_decode=True, is_dense=True)

        with ahead():
            run()  # kernels are compiled and chosen, and tables built, before recording
            synchronize(self.device)
            replay = record_graph(self.device, run, pool=self._pool)
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

    def _blank(self, rows: int) -> Call:
        """Sequences of one token in the spare lane, which write nothing."""
        ones = np.ones(rows)
        arrays = {name: np.full(rows, self._padding.get(name, 0)) for name, *_ in layout((rows,) * 3)[0]}
        arrays |= {"context_lens": ones, "query_starts": np.arange(rows + 1), "sample_rows": np.arange(rows)}
        # Different tokens: of a mixture of experts they read different weights.
        tokens = np.arange(rows) * _STRIDE % self.vocab_size
        return Call(True, arrays | {"tokens": tokens}, num_keys=1, tables=[])


class _Graph:
    """A recorded decode call of `rows` rows. Rows past the last sequence write no keys and attend to nothing."""

    replay: Callable[[], None]
    outputs: tuple[Tensor, Tensor, Tensor]  # of the recording; every replay writes them

    def __init__(self, rows: int) -> None:
        self.rows = rows


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
    """Plain decoding. Prompts and drafts have any size: what was made for theirs is not kept."""
    return size[0] == size[1] == size[2] <= _GRAPH_ROWS[-1]
