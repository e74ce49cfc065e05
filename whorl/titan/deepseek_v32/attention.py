"""Multi-head latent attention over keys that an indexer selects: projections, rotation, and a replaceable `core`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchtitan.models.utils import trunc_normal_

from whorl.titan.local import local
from whorl.titan.rotary import Rotary

from .args import DeepSeekV32Args
from .core import AttentionSettings, Core, SmallOps, carry

# With context parallelism: gathers (kv, k_pe, index_k, positions) from all ranks that share the sequence.
GatherKeys = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor, Tensor | None]]


def rotary_rows(cos_sin: Tensor, x: Tensor, positions: Tensor | None) -> Tensor:
    """Return the rows [B, S, R] of the rotary table `cos_sin` for the tokens of x [B, S, C].

    positions: [B or 1, S]; None: 0, 1, ... Raises ValueError when the table is not fp32 or is too short.
    """
    if cos_sin.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"DeepSeek-V3.2: the rotary table is {cos_sin.dtype}, expected float32; build the model in its dtype "
            "(training.dtype) instead of casting it"
        )
    if positions is not None:
        return cos_sin[positions].expand(x.shape[0], -1, -1)
    if x.shape[1] > cos_sin.shape[0]:
        raise ValueError(f"DeepSeek-V3.2: {x.shape[1]} tokens, expected at most {cos_sin.shape[0]} (max_seq_len)")
    return cos_sin[: x.shape[1]].expand(x.shape[0], -1, -1)


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


class Attention(nn.Module):
    """Projections, rotation and indexer of one layer around a core that has no parameters."""

    def __init__(self, args: DeepSeekV32Args) -> None:
        super().__init__()
        # Channels of a head that are not rotated, channels that are, and channels of a latent (not a process rank).
        self.nope, self.rope, self.rank = args.qk_nope_head_dim, args.qk_rope_head_dim, args.kv_lora_rank
        head = self.nope + self.rope
        self.wq_a = nn.Linear(args.dim, args.q_lora_rank, bias=False)
        self.q_norm = nn.RMSNorm(args.q_lora_rank, eps=args.norm_eps)
        self.wq_b = nn.Linear(args.q_lora_rank, args.n_heads * head, bias=False)
        self.wkv_a = nn.Linear(args.dim, self.rank + self.rope, bias=False)
        self.kv_norm = nn.RMSNorm(self.rank, eps=args.norm_eps)
        self.wkv_b = nn.Linear(self.rank, args.n_heads * (self.nope + args.v_head_dim), bias=False)
        self.wo = nn.Linear(args.n_heads * args.v_head_dim, args.dim, bias=False)
        self.rotary = Rotary("pairs")
        self.indexer = Indexer(args)
        self.core: Core = SmallOps(AttentionSettings.from_args(args))
        self.gather_keys: GatherKeys | None = None

    def forward(
        self, x: Tensor, cos_sin: Tensor, attention_masks: None = None, positions: Tensor | None = None
    ) -> Tensor:
        out = self.attend(*self.project(x, cos_sin, positions), positions)
        if self.core.settings.stage == "warmup":
            return carry(self.wo(out.detach().flatten(2)), out)
        return self.wo(out.flatten(2))

    def project(
        self, x: Tensor, cos_sin: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q_nope, q_pe [B, S, H, *], kv, k_pe [B, S, *], and queries, keys and weights of the indexer.

        kv is normalised; q_pe and k_pe are rotated. `core.py` explains the sizes.
        """
        rows = rotary_rows(cos_sin, x, positions)
        q_low = self.q_norm(self.wq_a(x))
        # With tensor parallelism only some heads are here; the projection determines their number.
        q_nope, q_pe = self.wq_b(q_low).unflatten(-1, (-1, self.nope + self.rope)).split((self.nope, self.rope), -1)
        kv, k_pe = self.wkv_a(x).split((self.rank, self.rope), -1)
        q_pe, k_pe = self.rotary(q_pe, k_pe, rows)
        return q_nope, q_pe, self.kv_norm(kv), k_pe, *self.indexer(x, q_low, rows)

    def attend(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv: Tensor,
        k_pe: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        positions: Tensor | None,
    ) -> Tensor:
        """Return the attention output [B, S, H, Dv]; context parallelism gathers the keys of all ranks first."""
        k_positions = positions
        if self.gather_keys is not None:
            kv, k_pe, index_k, k_positions = self.gather_keys(kv, k_pe, index_k, positions)
        weight = local(self.wkv_b.weight).to(q_nope.dtype)
        return self.core(q_nope, q_pe, kv, k_pe, weight, index_q, index_k, index_weights, positions, k_positions)

    def init_weights(self, init_std: float, buffer_device: torch.device | None = None) -> None:
        for linear in (self.wq_a, self.wq_b, self.wkv_a, self.wkv_b):
            trunc_normal_(linear.weight, mean=0.0, std=0.02)
        trunc_normal_(self.wo.weight, mean=0.0, std=init_std)
        for norm in (self.q_norm, self.kv_norm):
            norm.reset_parameters()
        self.indexer.init_weights()
        self.core.reset(buffer_device)
