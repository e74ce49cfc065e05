"""The projections of the lightning indexer."""

import torch
from torch import Tensor, nn
from torchtitan.models.utils import trunc_normal_

from whorl.titan.rotary import Rotary

from .args import DeepSeekV32Args


class Indexer(nn.Module):
    """Computes queries, keys and head weights that select keys by score = sum over heads of weight * max(0, q . k)."""

    def __init__(self, args: DeepSeekV32Args) -> None:
        super().__init__()
        self.num_heads, self.head_dim = args.index_n_heads, args.index_head_dim
        self.wq_b = nn.Linear(args.q_lora_rank, self.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(args.dim, self.num_heads, bias=False)
        self.rotary = Rotary("half")

    def forward(self, x: Tensor, q_low: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, S, HI, D], keys [B, S, D] and head weights [B, S, HI], the latter in at least fp32.

        x: [B, S, C]; q_low: [B, S, q_lora_rank], the normalised low-rank query of the attention; rows: [B, S, R], rows
        of the rotary table. x and q_low are detached: the indexer is trained by its own loss and trains nothing else.
        """
        x, q_low = x.detach(), q_low.detach()
        q = self.wq_b(q_low).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_norm(self.wk(x)).to(q.dtype)  # autocast computes a LayerNorm in fp32
        q, k = self.rotary(q, k, rows)
        weights = self.weights_proj(x)
        wide = torch.promote_types(weights.dtype, torch.float32)
        return q, k, weights.to(wide) * (self.num_heads * self.head_dim) ** -0.5

    def init_weights(self) -> None:
        for linear in (self.wq_b, self.wk, self.weights_proj):
            trunc_normal_(linear.weight, mean=0.0, std=0.02)
        self.k_norm.reset_parameters()
