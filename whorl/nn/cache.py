"""The paged cache: what a layer keeps for a token, and the blocks that hold it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """What one layer keeps for a token on this rank, stated before blocks are laid out."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None  # keys a query sees, itself included; None: all


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """One layer's blocks: k and v [num_blocks, block_size, HK, D]."""

    k: Tensor
    v: Tensor

    @classmethod
    def empty(
        cls, spec: CacheSpec, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> "KVCache":
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        return cls(
            k=torch.zeros(shape, dtype=dtype, device=device),
            v=torch.zeros(shape, dtype=dtype, device=device),
        )
