"""whorl_permute: dispatch tokens to their experts and combine them by `ops.permute` and `ops.unpermute`.

The inputs of the experts are unchanged: tokens sorted by expert, and the counts. So the all-to-all of expert
parallelism, which is a hook of the experts, works as before.
"""

from collections.abc import Hashable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE, MoEArgs, TokenReorderer

from whorl import ops

from .conversion import Converter, Probe, replace_forward


def _keep_token_order(
    self: TokenReorderer, top_scores: Tensor, selected_experts_indices: Tensor
) -> tuple[Tensor, int, Tensor]:
    """Leave choices in token order, where TokenReorderer.forward sorts them by expert: `ops.permute` sorts later.

    Return the scores of all choices [T * K], the number of the first choice, 0, and the experts [T, K]. The second
    result exists for a hook of TorchTitan. Where tensor-parallel ranks share the tokens, that hook takes only this
    rank's tokens of the inputs and adds their offset to the second result, which in TorchTitan are the numbers of the
    choices. `_forward` gets the offset of this rank that way.
    """
    return top_scores.reshape(-1), 0, selected_experts_indices


def _forward(self: MoE, x: Tensor) -> Tensor:
    """Compute what MoE.forward does, by our operators: x [B, S, C] -> [B, S, C]."""
    tokens = x.reshape(-1, x.shape[-1])
    scores, ids, counts = self.router(tokens, self.expert_bias)
    with torch.no_grad():
        self.tokens_per_expert.add_(counts)
    scores, first_choice, ids = self.reorderer(scores, ids)
    first_token, count = first_choice // ids.shape[1], ids.shape[0]  # the tokens of this rank
    probs = scores.view_as(ids)
    local_tokens = tokens if count == tokens.shape[0] else tokens[first_token : first_token + count]
    scores_first = self.score_before_experts
    if not scores_first and torch.is_autocast_enabled(x.device.type):
        # The experts would cast the tokens anyway; casting here halves the bytes to move.
        local_tokens = local_tokens.to(torch.get_autocast_dtype(x.device.type))
    rows, places, counts = ops.permute(local_tokens, ids, self.experts.num_experts, probs if scores_first else None)
    rows = self.experts(rows, counts.long())
    # Computed before the tokens are combined, so that it can overlap with their all-to-all.
    shared = self.shared_experts(tokens) if self.shared_experts is not None else None
    out = ops.unpermute(rows, places, None if scores_first else probs).to(x.dtype)
    if count != tokens.shape[0]:
        out = nn.functional.pad(out, (0, 0, first_token, tokens.shape[0] - first_token - count))
    return (out if shared is None else shared + out).view(x.shape)


class PermuteConverter(Converter[MoE]):
    """Converts TorchTitan's MoE."""

    name = "whorl_permute"
    operators = ("permute", "unpermute")

    def is_candidate(self, module: nn.Module) -> TypeGuard[MoE]:
        return isinstance(module, MoE)

    def refusal(self, module: MoE) -> str | None:
        forward = type(module).forward
        if forward is _forward:
            return "it is already converted"
        if forward is not MoE.forward or not isinstance(module.reorderer, TokenReorderer):
            return f"{type(module).__name__} has another dispatch"
        return None

    def kind(self, module: MoE) -> Hashable:
        return module.experts.num_experts, module.router.top_k, module.score_before_experts

    def replace(self, module: nn.Module) -> None:
        moe = module.moe if isinstance(module, MoEWithScores) else module
        assert isinstance(moe, MoE)
        replace_forward(moe, _forward)
        replace_forward(moe.reorderer, _keep_token_order)

    def sample(self, module: MoE, generator: torch.Generator) -> Probe:
        count, top_k, tokens = module.experts.num_experts, module.router.top_k, 24
        args = MoEArgs(
            num_experts=count, num_shared_experts=0, top_k=top_k, score_before_experts=bool(module.score_before_experts)
        )
        small = MoE(args, dim=32, hidden_dim=8)
        ids = torch.rand(tokens, count, generator=generator).argsort(-1)[:, :top_k].contiguous()
        small.router, small.experts = FixedRouter(ids, count), ScalingExperts(count)
        scores = torch.rand(tokens, top_k, generator=generator) + 0.1
        x = torch.randn(2, tokens // 2, 32, generator=generator)
        return Probe(module=MoEWithScores(small), inputs=(x, scores), exact=_exact)


# ---- modules of the comparison: a router with a fixed choice, and experts with known results


class FixedRouter(nn.Module):
    """A router that always chooses the experts `ids`."""

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


class ScalingExperts(nn.Module):
    """Experts of which expert e multiplies its tokens by 1 + e / E."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        factors = 1 + torch.arange(self.num_experts, device=rows.device) / self.num_experts
        return rows * factors.repeat_interleave(counts).to(rows.dtype).unsqueeze(-1)


class MoEWithScores(nn.Module):
    """An MoE that takes the router scores as an input; they become float32, as from the router."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        self.moe.router.scores = scores.float()
        return self.moe(x)


def _exact(module: Any, x: Tensor, scores: Tensor) -> Tensor:
    """Compute what MoEWithScores does directly: each token times the sum of its scores times the experts' factors."""
    ids, count = module.moe.router.ids, module.moe.experts.num_experts
    weights = (scores * (1 + ids / count)).sum(-1, keepdim=True)
    return x * weights.view(*x.shape[:-1], 1)
