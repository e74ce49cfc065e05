"""TorchTitan's mixture of experts with token counts that work on every device without a synchronisation."""

from typing import Any

import torch
from torch import Tensor
from torchtitan.models.moe import MoE, MoEArgs, build_moe
from torchtitan.models.moe.moe import TokenChoiceTopKRouter, TokenReorderer


def count_tokens(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen, [E] int64. chosen: expert numbers of any shape.

    torch.histc does not accept integers on a CPU, and torch.bincount synchronises with the device.
    """
    experts = torch.arange(num_experts, device=chosen.device)
    return (chosen.reshape(-1, 1) == experts).sum(0)


class Router(TokenChoiceTopKRouter):
    """TorchTitan's router with our token counts."""

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        scores = self._scores(self.gate(x).float())
        biased_scores = scores if expert_bias is None else scores + expert_bias
        if self.num_expert_groups is not None:
            biased_scores = self._get_node_limited_routing_scores(biased_scores)
        chosen = torch.topk(biased_scores, k=self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)  # the bias affects the selection, not the weights
        if self._debug_force_load_balance:
            chosen, weights = self._debug_force_load_balance_routing(scores)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.route_scale, chosen, count_tokens(chosen, self.num_experts)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.score_func == "sigmoid" else logits.softmax(-1)


class Reorderer(TokenReorderer):
    """TorchTitan's reorderer with our token counts."""

    def forward(self, top_scores: Tensor, selected_experts_indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = torch.argsort(selected_experts_indices.view(-1), stable=True)
        return top_scores.view(-1)[order], order, count_tokens(selected_experts_indices, self.num_experts)


def build_experts(args: MoEArgs, dim: int, hidden_dim: int, moe_impl: str) -> Any:
    """Return TorchTitan's MoE with our router and reorderer."""
    moe = build_moe(args=args, dim=dim, hidden_dim=hidden_dim, moe_impl=moe_impl)
    if type(moe) is MoE:
        # The parameters and settings stay; only `forward` differs.
        moe.router.__class__ = Router
        moe.reorderer.__class__ = Reorderer
    return moe
