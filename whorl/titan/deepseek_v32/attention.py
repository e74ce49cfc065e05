"""Multi-head latent attention over chosen keys: projections, rotation, and a `core` that can be replaced."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.utils import trunc_normal_

from whorl.titan.rotary import Rotary

from .args import DeepSeekV32Args
from .core import AttentionSettings, Core, SmallOps, carry
from .indexer import Indexer

# (kv, k_pe, index_k, k_positions) of this rank to those of all ranks it shares a sequence with.
GatherKeys = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor, Tensor | None]]


def rows_of(cos_sin: Tensor, x: Tensor, positions: Tensor | None) -> Tensor:
    """[B, S, R]: the table's rows for the tokens of x."""
    if cos_sin.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"DeepSeek-V3.2: the rotary table is {cos_sin.dtype}, expected float32: a model is built in its dtype "
            "(training.dtype), not cast to it"
        )
    if positions is not None:
        return cos_sin[positions].expand(x.shape[0], -1, -1)
    if x.shape[1] > cos_sin.shape[0]:
        raise ValueError(f"DeepSeek-V3.2: {x.shape[1]} tokens, the rotary table has {cos_sin.shape[0]} (max_seq_len)")
    return cos_sin[: x.shape[1]].expand(x.shape[0], -1, -1)


class Attention(nn.Module):
    def __init__(self, args: DeepSeekV32Args) -> None:
        super().__init__()
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
        self.core: Core = SmallOps(AttentionSettings.of(args))
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
        """q_nope, q_pe [B, S, H, *], kv, k_pe [B, S, *], and the indexer's three."""
        rows = rows_of(cos_sin, x, positions)
        q_low = self.q_norm(self.wq_a(x))
        # Tensor parallelism leaves some of the heads here: their number is what the projection gives.
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
        """[B, S, H, Dv]"""
        k_positions = positions
        if self.gather_keys is not None:
            kv, k_pe, index_k, k_positions = self.gather_keys(kv, k_pe, index_k, positions)
        wkv_b = self.wkv_b.weight
        local = wkv_b.to_local() if isinstance(wkv_b, DTensor) else wkv_b
        index = (index_q, index_k, index_weights)
        return self.core(q_nope, q_pe, kv, k_pe, local.to(q_nope.dtype), *index, positions, k_positions)

    def init_weights(self, init_std: float, buffer_device: torch.device | None = None) -> None:
        for linear in (self.wq_a, self.wq_b, self.wkv_a, self.wkv_b):
            trunc_normal_(linear.weight, mean=0.0, std=0.02)
        trunc_normal_(self.wo.weight, mean=0.0, std=init_std)
        for norm in (self.q_norm, self.kv_norm):
            norm.reset_parameters()
        self.indexer.init_weights()
        self.core.reset(buffer_device)
