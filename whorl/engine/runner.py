"""Runs a batch: the caches, the forward calls, the rows that are wanted.

Everything it returns stays on the device. The host first waits in `Sampler.accept`, where it reads the step's tokens.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whorl.device import accelerator, record_graph, synchronize
from whorl.nn import CacheSpec, KVCache, Model, Step

from .batch import Batch

_HOST_MEMORY = 1 << 30  # bytes; where memory is the machine's own, taking most of it would be rude
_SHARE = 0.9  # of an accelerator's free memory; the rest is for activations
_GRAPH_ROWS = (1, 2, 4, 8, *range(16, 257, 16))  # decode calls are padded to these and recorded


class Runner:
    """One model and its caches on one device. Decode calls are replayed as graphs where the device records them."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_len: int,
        dtype: torch.dtype,
        device: str,
        use_graphs: bool = True,
    ) -> None:
        self.model, self.block_size, self.max_len, self.device = model, block_size, max_len, device
        self.caches = [
            KVCache.empty(spec, num_blocks, block_size, dtype=dtype, device=device) for spec in model.cache_specs()
        ]
        self._graphs: dict[int, _Graph | None] = {} if use_graphs else dict.fromkeys(_GRAPH_ROWS)

    @torch.inference_mode()
    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states of the batch's samples and of its scores, in the order that `batch` lists them."""
        sampled, scored = [], []
        for call in batch.calls(self.block_size, self.device):
            hidden = self._forward(call.step)
            sampled.append(hidden[call.sample_rows])
            scored.append(hidden[call.score_rows])
        return torch.cat(sampled), torch.cat(scored)

    def _forward(self, step: Step) -> Tensor:
        rows = next((size for size in _GRAPH_ROWS if size >= len(step.token_ids)), None)
        if step.rows == "prompt" or rows is None:
            return self.model.forward(step, self.caches)
        if rows not in self._graphs:
            self._graphs[rows] = self._record(rows)
        graph = self._graphs[rows]
        return self.model.forward(step, self.caches) if graph is None else graph(step)

    def _record(self, rows: int) -> "_Graph | None":
        """None where the device records no graphs."""
        if accelerator(self.device) is None:
            return None
        graph = _Graph(self._blank(rows, num_keys=self.max_len))
        self.model.forward(graph.step, self.caches)  # kernels are compiled and chosen before recording

        def run() -> None:
            graph.hidden = self.model.forward(graph.step, self.caches)

        graph.replay = record_graph(self.device, run)
        return None if graph.replay is None else graph

    @torch.inference_mode()
    def cost(self, counts: Sequence[int], *, repeats: int = 5) -> dict[int, float]:
        """Seconds of a decode call by number of rows, head included; the caches are left as they are."""
        found = {}
        for count in counts:
            step, times = self._blank(count, num_keys=1), []
            for _ in range(repeats + 1):
                synchronize(self.device)
                start = time.perf_counter()
                self.model.logits(self._forward(step))
                synchronize(self.device)
                times.append(time.perf_counter() - start)
            found[count] = statistics.median(times[1:])  # the first one warms up
        return found

    def _blank(self, rows: int, *, num_keys: int) -> Step:
        """Sequences of one token that write nothing, with block tables for `num_keys`."""
        width = -(-num_keys // self.block_size)
        zeros = torch.zeros(rows, dtype=torch.int64, device=self.device)
        return Step(
            token_ids=zeros,
            positions=zeros.clone(),
            slots=zeros - 1,
            block_tables=torch.zeros(rows, width, dtype=torch.int32, device=self.device),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=self.device),
            context_lens=torch.ones(rows, dtype=torch.int32, device=self.device),
            rows="decode",
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


def block_bytes(specs: Sequence[CacheSpec], block_size: int, dtype: torch.dtype) -> int:
    return sum(2 * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize for spec in specs)


def cache_memory(device: str) -> int:
    """Bytes that the cache takes where nobody says how many."""
    module = accelerator(device)
    return _HOST_MEMORY if module is None else int(_SHARE * module.mem_get_info()[0])
