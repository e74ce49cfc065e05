"""What models are made of: a step's tensors, the paged cache, and layers that know which part of a weight a rank holds.

A layer is built with the rank's share of its weights and says, as `Slot`s, where each tensor of a Hugging Face
checkpoint goes: into which view of which parameter, and which rows and columns of it. The loader needs nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from whorl import ops
from whorl.rope_config import RopeConfig
from whorl.rope_table import RopeTable, get_rope

Rows = Literal["prompt", "decode"]
Index = tuple[slice, ...]
ALL = slice(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The tensors of one forward call: T tokens of B sequences, those of a sequence side by side.

    rows: which class of kernels runs; a token's class is its role (prompt or generated), whatever runs beside it.
    max_position: highest position + 1, known on the host so that nothing waits for the device.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + offset of each token's cache entry; -1 writes none
    block_tables: Tensor  # [B, MB] int32
    query_starts: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32: keys that the last query of each sequence sees, new tokens included
    rows: Rows
    max_position: int


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


class Model(Protocol):
    """What the engine needs of a model."""

    config: Any
    vocab_size: int
    max_length: int  # longest sequence the rotary table serves

    def cache_specs(self) -> list[CacheSpec]: ...

    def forward(self, step: Step, caches: Sequence[KVCache]) -> Tensor:
        """Hidden states [T, C], final norm included; writes the tokens' keys and values into the caches."""

    def logits(self, hidden: Tensor, *, rows: Rows = "decode") -> Tensor:
        """[N, V] fp32 from hidden [N, C]."""
