"""Context parallelism: every rank keeps the queries of its part of the sequence and sees the keys of all of it.

TorchTitan cuts tokens, labels and positions before the model sees them: into one run of tokens for each rank, or
("headtail") into two, the r-th from the front and the r-th from the back, so that causal work is alike everywhere.
What is left to an attention is to look at other ranks' keys, which `ContextParallelAttention` makes one call.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

BALANCERS = ("headtail", None)


class _Gather(torch.autograd.Function):
    """[B, S / P, D] of every rank to [B, S, D] in the sequence's order; backward sums and keeps the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: "ContextParallelAttention") -> Tensor:
        ctx.cp = cp
        return cp._in_order(collectives.all_gather_tensor(x.contiguous()[None], 0, cp.group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        by_rank = ctx.cp._by_rank(grad)
        return collectives.reduce_scatter_tensor(by_rank, "sum", 0, ctx.cp.group)[0], None


class ContextParallelAttention(ABC):
    """What context parallelism changes in one attention module; a subclass says where its keys are.

    mesh: the ranks that share a sequence. balancer: how TorchTitan cut it, "headtail" or None.
    """

    def __init__(self, mesh: DeviceMesh, balancer: str | None = "headtail") -> None:
        if balancer not in BALANCERS:
            raise ValueError(
                f"parallelism.context_parallel_load_balancer is {balancer!r}, expected 'headtail', or none for one run "
                "of tokens a rank"
            )
        self.group, self.size = mesh.get_group(), mesh.size()
        ranks = range(self.size)
        # By rank, the places in the sequence of the runs that it holds.
        self._held = [(r,) if balancer is None else (r, 2 * self.size - 1 - r) for r in ranks]

    @abstractmethod
    def apply(self, attention: nn.Module) -> None:
        """Make `attention` look at all keys; called once, before the model is compiled or sharded."""

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """Each [B, S / P, ...] as [B, S, ...] in the order of the sequence. Gradients are summed over the ranks and
        scattered back. Tensors of one dtype travel together."""
        whole: list[Tensor] = list(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            flat = [tensors[i].flatten(2) if tensors[i].ndim > 2 else tensors[i][..., None] for i in places]
            parts = _Gather.apply(torch.cat(flat, -1), self).split([f.shape[-1] for f in flat], -1)
            for i, part in zip(places, parts, strict=True):
                whole[i] = part.reshape(*part.shape[:2], *tensors[i].shape[2:])
        return whole

    def _in_order(self, gathered: Tensor) -> Tensor:
        """[P, B, s, D] to [B, P s, D]."""
        runs: dict[int, Tensor] = {}
        for places, held in zip(self._held, gathered, strict=True):
            runs.update(zip(places, held.chunk(len(places), 1), strict=True))
        return torch.cat([runs[place] for place in sorted(runs)], 1)

    def _by_rank(self, whole: Tensor) -> Tensor:
        """[B, P s, D] to [P, B, s, D]."""
        runs = whole.chunk(sum(map(len, self._held)), 1)
        in_ranks = torch.cat([runs[place] for places in self._held for place in places], 1)
        return in_ranks.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
