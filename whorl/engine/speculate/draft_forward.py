"""Forward calls of a draft model. Simpler than the engine's: its bits decide nothing, and every call is waited for."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from whorl.device import ahead, lasting, record_graph, synchronize
from whorl.device import use_graphs as wants_graphs
from whorl.engine.sequence import Sequence as Seq
from whorl.nn import Model, Step, recordable

_GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64)  # decode calls are padded to these and recorded
_STRIDE = 7919  # between the ids of tokens that only cost time: of a mixture of experts they read different weights


@dataclass(frozen=True, slots=True)
class Span:
    """`length` tokens from the sequence's first uncomputed one."""

    sequence: Seq
    length: int


class Forward:
    """A model and its caches. Calling it computes spans and gives the hidden state of each one's last token."""

    max_rows = 16  # of one sequence in a decode call

    def __init__(
        self, model: Model, *, num_blocks: int, block_size: int, max_len: int, device: str, use_graphs: bool | None
    ) -> None:
        self.model, self.block_size, self.max_len, self.device = model, block_size, max_len, device
        self.caches = [spec.empty(num_blocks, block_size, device) for spec in model.cache_specs()]
        records = wants_graphs(device, use_graphs) and recordable(model, use_graphs)
        self._graphs: dict[int, _Graph | None] = {} if records else dict.fromkeys(_GRAPH_ROWS)

    def __call__(self, spans: Sequence[Span]) -> Tensor:
        """[len(spans), C], in the order of the spans."""
        last = np.cumsum([span.length for span in spans]) - 1
        return self._run(self._lay_out(spans)).index_select(0, self._tensor(last, torch.int64))

    @torch.inference_mode()
    def cost(self, counts: Sequence[int], *, repeats: int) -> dict[int, float]:
        """Seconds of a decode call by number of rows, head included; the caches are left as they are."""
        found = {}
        for count in counts:
            step, times = self._blank(count, num_keys=1), []
            for _ in range(repeats + 1):
                synchronize(self.device)
                start = time.perf_counter()
                self.model.logits(self._run(step))
                synchronize(self.device)
                times.append(time.perf_counter() - start)
            found[count] = statistics.median(times[1:])  # the first one warms up
        return found

    def graph_rows(self, max_num_seqs: int) -> list[int]:
        """Sizes of calls that draft a token for each of up to so many sequences."""
        last = next((rows for rows in _GRAPH_ROWS if rows >= max_num_seqs), _GRAPH_ROWS[-1])
        return [rows for rows in _GRAPH_ROWS if rows <= last]

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """A call that drafts, recorded where calls are; nothing is written."""
        self.model.logits(self._run(self._blank(rows, num_keys=1)))

    @torch.inference_mode()
    def warm_up_prompt(self, length: int) -> None:
        """The tokens of one prompt; nothing is written."""
        blank = self._blank(length, num_keys=length)
        step = replace(
            blank,
            positions=torch.arange(length, device=self.device),
            block_tables=blank.block_tables[:1],
            query_starts=torch.cat([blank.query_starts[:1], blank.query_starts[-1:]]),
            context_lens=blank.context_lens[:1] * length,
        )
        self._run(step)

    def _lay_out(self, spans: Sequence[Span]) -> Step:
        tokens, positions, slots, tables = [], [], [], []
        for span in spans:
            seq, start = span.sequence, span.sequence.num_computed
            places = np.arange(start, start + span.length)
            table = np.array(seq.block_table, dtype=np.int32)
            tokens.append(np.array(seq.token_ids[start : start + span.length]))
            positions.append(places)
            slots.append(table[places // self.block_size].astype(np.int64) * self.block_size + places % self.block_size)
            tables.append(table)
        padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        ends = [span.sequence.num_computed + span.length for span in spans]
        starts = np.cumsum([0, *(span.length for span in spans)])
        return Step(
            token_ids=self._tensor(np.concatenate(tokens), torch.int64),
            positions=self._tensor(np.concatenate(positions), torch.int64),
            slots=self._tensor(np.concatenate(slots), torch.int64),
            block_tables=self._tensor(padded, torch.int32),
            query_starts=self._tensor(starts, torch.int32),
            context_lens=self._tensor(np.array(ends), torch.int32),
            max_position=max(ends),
        )

    def _tensor(self, values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return lasting(torch.as_tensor(values, dtype=dtype), self.device).to(self.device, non_blocking=True)

    def _run(self, step: Step) -> Tensor:
        rows = next((size for size in _GRAPH_ROWS if size >= len(step.token_ids)), None)
        if rows is None:
            return self.model.forward(step, self.caches)
        if rows not in self._graphs:
            self._graphs[rows] = self._record(rows)
        graph = self._graphs[rows]
        return self.model.forward(step, self.caches) if graph is None else graph(step)

    def _record(self, rows: int) -> "_Graph | None":
        graph = _Graph(self._blank(rows, num_keys=self.max_len))

        def run() -> None:
            graph.hidden = self.model.forward(graph.step, self.caches)

        with ahead():
            run()  # kernels are compiled and chosen before recording
            graph.replay = record_graph(self.device, run)
        return None if graph.replay is None else graph

    def _blank(self, rows: int, *, num_keys: int) -> Step:
        """Sequences of one token that write nothing, with block tables for `num_keys`."""
        width = -(-num_keys // self.block_size)
        zeros = torch.zeros(rows, dtype=torch.int64, device=self.device)
        return Step(
            token_ids=torch.arange(rows, device=self.device) * _STRIDE % self.model.vocab_size,
            positions=zeros,
            slots=zeros - 1,
            block_tables=torch.zeros(rows, width, dtype=torch.int32, device=self.device),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=self.device),
            context_lens=torch.ones(rows, dtype=torch.int32, device=self.device),
            max_position=num_keys,
        )


class _Graph:
    """A recorded decode call of fixed size: inputs are copied into its tensors, then everything is replayed.

    Rows past the last sequence write no keys and attend to nothing; sequences past the last have no rows.
    """

    replay: Callable[[], None] | None
    hidden: Tensor

    def __init__(self, step: Step) -> None:
        self.step = step

    def __call__(self, step: Step) -> Tensor:
        mine, rows, count = self.step, len(step.token_ids), len(step.context_lens)
        for name, padding in (("token_ids", 0), ("positions", 0), ("slots", -1)):
            getattr(mine, name)[:rows].copy_(getattr(step, name))
            getattr(mine, name)[rows:].fill_(padding)
        mine.block_tables[:count, : step.block_tables.shape[1]].copy_(step.block_tables)
        mine.query_starts[: count + 1].copy_(step.query_starts)
        mine.query_starts[count + 1 :].fill_(rows)
        mine.context_lens[:count].copy_(step.context_lens)
        mine.context_lens[count:].zero_()
        assert self.replay is not None
        self.replay()
        return self.hidden[:rows]
