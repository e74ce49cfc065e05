"""Runs a batch: the caches, the forward calls, the rows that are wanted. Everything it returns stays on the device."""

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from whorl.device import accelerator, synchronize
from whorl.nn import CacheSpec, KVCache, Model, Step

from .batch import Batch

_HOST_MEMORY = 1 << 30  # bytes; where memory is the machine's own, taking most of it would be rude
_SHARE = 0.9  # of an accelerator's free memory; the rest is for activations


class Runner:
    """One model and its caches on one device.

    `_forward` is the only way into the model: recording a graph for a shape, and replaying it, belongs there.
    """

    def __init__(
        self, model: Model, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.model, self.block_size, self.device = model, block_size, torch.device(device)
        self.caches = [
            KVCache.empty(spec, num_blocks, block_size, dtype=dtype, device=device) for spec in model.cache_specs()
        ]

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
        return self.model.forward(step, self.caches)

    @torch.inference_mode()
    def cost(self, counts: Sequence[int], *, repeats: int = 5) -> dict[int, float]:
        """Seconds of a decode step of one sequence by number of rows, head included; caches are left as they are."""
        found = {}
        for count in counts:
            step = self._blank(count)
            times = []
            for _ in range(repeats + 1):
                synchronize(self.device.type)
                start = time.perf_counter()
                self.model.logits(self._forward(step))
                synchronize(self.device.type)
                times.append(time.perf_counter() - start)
            found[count] = statistics.median(times[1:])  # the first one warms up
        return found

    def _blank(self, count: int) -> Step:
        """`count` rows that write nothing: one sequence at the start of the cache."""
        width = -(-count // self.block_size)
        arange = torch.arange(count, device=self.device)
        return Step(
            token_ids=torch.zeros_like(arange),
            positions=arange,
            slots=torch.full_like(arange, -1),
            block_tables=torch.zeros(1, width, dtype=torch.int32, device=self.device),
            query_starts=torch.tensor([0, count], dtype=torch.int32, device=self.device),
            context_lens=torch.tensor([count], dtype=torch.int32, device=self.device),
            rows="decode",
            max_position=count,
        )


def block_bytes(specs: Sequence[CacheSpec], block_size: int, dtype: torch.dtype) -> int:
    return sum(2 * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize for spec in specs)


def cache_memory(device: str) -> int:
    """Bytes that the cache takes where nobody says how many."""
    module = accelerator(device)
    return _HOST_MEMORY if module is None else int(_SHARE * module.mem_get_info()[0])
