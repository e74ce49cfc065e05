"""Context parallelism: each rank has the queries of its part of a sequence and gathers the keys of all ranks.

TorchTitan shards tokens, labels and positions before the model is called. Each rank gets one contiguous run of tokens
or, with the load balancer "headtail", two: rank r gets the r-th run from the front and the r-th from the back, so that
every rank has the same causal work. The attention only has to gather the keys of the other ranks;
`ContextParallelAttention.gather` does that. In shapes, B is the batch, S the sequence, P the number of ranks that share
it, s = S / P the tokens of a rank, and D the channels.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

BALANCERS = ("headtail", None)  # the values of parallelism.context_parallel_load_balancer that are supported


class _Gather(torch.autograd.Function):
    """Gather [B, s, D] of every rank to [B, S, D] in sequence order; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: "ContextParallelAttention") -> Tensor:
        ctx.cp = cp
        return cp._in_order(collectives.all_gather_tensor(x.contiguous()[None], 0, cp.group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        by_rank = ctx.cp._by_rank(grad)
        return collectives.reduce_scatter_tensor(by_rank, "sum", 0, ctx.cp.group)[0], None


class ContextParallelAttention(ABC):
    """Adds context parallelism to an attention module; a subclass defines at which point the module gathers its keys.

    mesh: the ranks that share a sequence. balancer: how TorchTitan sharded it, "headtail" or None. Raises ValueError
    for another balancer.
    """

    def __init__(self, mesh: DeviceMesh, balancer: str | None = "headtail") -> None:
        if balancer not in BALANCERS:
            raise ValueError(
                f"parallelism.context_parallel_load_balancer is {balancer!r}, expected 'headtail', or None for one run "
                "of tokens per rank"
            )
        self.group, self.size = mesh.get_group(), mesh.size()
        ranks = range(self.size)
        # For each rank, which of the sequence's runs it has, counted from the front.
        self._run_positions = [(r,) if balancer is None else (r, 2 * self.size - 1 - r) for r in ranks]

    @abstractmethod
    def apply(self, attention: nn.Module) -> None:
        """Make `attention` gather its keys; called once, before the model is compiled or sharded."""

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Gather each tensor [B, s, ...] of all ranks to [B, S, ...] in the order of the sequence.

        Gradients are summed over the ranks and scattered back. Tensors of one dtype share an all-gather.
        """
        gathered: list[Tensor] = list(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            indices = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            flat = [tensors[i].flatten(2) if tensors[i].ndim > 2 else tensors[i][..., None] for i in indices]
            parts = _Gather.apply(torch.cat(flat, -1), self).split([f.shape[-1] for f in flat], -1)
            for i, part in zip(indices, parts, strict=True):
                gathered[i] = part.reshape(*part.shape[:2], *tensors[i].shape[2:])
        return gathered

    def _in_order(self, gathered: Tensor) -> Tensor:
        """Reorder [P, B, s, D] by rank to [B, P s, D] in sequence order."""
        runs: dict[int, Tensor] = {}
        for positions, rank_tokens in zip(self._run_positions, gathered, strict=True):
            runs.update(zip(positions, rank_tokens.chunk(len(positions), 1), strict=True))
        return torch.cat([runs[position] for position in sorted(runs)], 1)

    def _by_rank(self, x: Tensor) -> Tensor:
        """Reorder [B, P s, D] in sequence order to [P, B, s, D] by rank."""
        runs = x.chunk(sum(map(len, self._run_positions)), 1)
        in_ranks = torch.cat([runs[position] for positions in self._run_positions for position in positions], 1)
        return in_ranks.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
