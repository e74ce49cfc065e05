"""whorl_permute: tokens to their experts and back by `ops.permute` and `ops.unpermute`.

What the experts are given stays as it was, rows by expert and their counts, so expert parallelism's all-to-all, which
hangs on the experts, goes on as before.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE, MoEArgs, TokenReorderer

from whorl import ops

from .conversion import Converter, Probe, become


def _slots(self: TokenReorderer, top_scores: Tensor, selected_experts_indices: Tensor) -> tuple[Tensor, int, Tensor]:
    """Scores by slot, the first slot, experts by slot, in the order of tokens: sorting is the operator's.

    Where tensor-parallel ranks share the tokens, a hook cuts what comes in and adds this rank's offset to the second
    result, which it takes for indices of slots.
    """
    return top_scores.reshape(-1), 0, selected_experts_indices


def _forward(self: MoE, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    scores, ids, counts = self.router(tokens, self.expert_bias)
    with torch.no_grad():
        self.tokens_per_expert.add_(counts)
    scores, first_slot, ids = self.reorderer(scores, ids)
    first, count = first_slot // ids.shape[1], ids.shape[0]
    probs = scores.view_as(ids)
    mine = tokens if count == tokens.shape[0] else tokens[first : first + count]
    is_before = self.score_before_experts
    if not is_before and torch.is_autocast_enabled(x.device.type):
        mine = mine.to(torch.get_autocast_dtype(x.device.type))  # as the experts will: half the bytes to move
    rows, places, counts = ops.permute(mine, ids, self.experts.num_experts, probs if is_before else None)
    rows = self.experts(rows, counts.long())
    # Before the rows are collected, so that it can overlap with their way back.
    shared = self.shared_experts(tokens) if self.shared_experts is not None else None
    out = ops.unpermute(rows, places, None if is_before else probs).to(x.dtype)
    if count != tokens.shape[0]:
        out = nn.functional.pad(out, (0, 0, first, tokens.shape[0] - first - count))
    return (out if shared is None else shared + out).view(x.shape)


class PermuteConverter(Converter):
    name = "whorl_permute"
    operators = ("permute", "unpermute")

    def is_candidate(self, module: nn.Module) -> bool:
        return isinstance(module, MoE)

    def refusal(self, module: nn.Module) -> str | None:
        forward = type(module).forward
        if forward is _forward:
            return "it is converted already"
        if forward is not MoE.forward or not isinstance(module.reorderer, TokenReorderer):
            return f"{type(module).__name__} dispatches in its own way"
        return None

    def kind(self, module: nn.Module) -> Hashable:
        assert isinstance(module, MoE)
        return module.experts.num_experts, module.router.top_k, module.score_before_experts

    def replace(self, module: nn.Module) -> None:
        moe = module.moe if isinstance(module, Scored) else module
        assert isinstance(moe, MoE)
        become(moe, _forward)
        become(moe.reorderer, _slots)

    def sample(self, module: nn.Module, generator: torch.Generator) -> Probe:
        assert isinstance(module, MoE)
        count, top_k, tokens = module.experts.num_experts, module.router.top_k, 24
        args = MoEArgs(
            num_experts=count, num_shared_experts=0, top_k=top_k, score_before_experts=bool(module.score_before_experts)
        )
        small = MoE(args, dim=32, hidden_dim=8)
        ids = torch.rand(tokens, count, generator=generator).argsort(-1)[:, :top_k].contiguous()
        small.router, small.experts = Routed(ids, count), Numbered(count)
        scores = torch.rand(tokens, top_k, generator=generator) + 0.1
        x = torch.randn(2, tokens // 2, 32, generator=generator)
        return Probe(module=Scored(small), inputs=(x, scores), exact=_exact)


# ---- what a mixture of experts is compared with: a given choice, and experts by whose answer they are known


class Routed(nn.Module):
    """Chooses what it was told."""

    ids: Tensor

    def __init__(self, ids: Tensor, num_experts: int) -> None:
        super().__init__()
        self.top_k, self.num_experts = ids.shape[1], num_experts
        self.register_buffer("ids", ids)
        self.scores: Tensor | None = None

    def forward(self, x: Tensor, expert_bias: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor]:
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        ones = torch.ones_like(self.ids).flatten()
        return self.scores, self.ids, counts.scatter_add_(0, self.ids.flatten(), ones)


class Numbered(nn.Module):
    """Expert e multiplies by 1 + e / E."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        factors = 1 + torch.arange(self.num_experts, device=rows.device) / self.num_experts
        return rows * factors.repeat_interleave(counts).to(rows.dtype).unsqueeze(-1)


class Scored(nn.Module):
    """Scores are an input here, in float32 as the router makes them."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        self.moe.router.scores = scores.float()
        return self.moe(x)


def _exact(module: Any, x: Tensor, scores: Tensor) -> Tensor:
    ids, count = module.moe.router.ids, module.moe.experts.num_experts
    weights = (scores * (1 + ids / count)).sum(-1, keepdim=True)
    return x * weights.view(*x.shape[:-1], 1)
