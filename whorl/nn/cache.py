"""The paged cache: what a layer keeps for a token, and the blocks that hold it.

Blocks are the engine's: it hands them out, shares and reuses them, and tells a layer by slots and block tables where a
token's entry is. What an entry holds is the layer's: a kind of cache is a `CacheSpec` and the class that its `empty`
makes, which the model's forward call gets back for that layer.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from whorl.device import block_size

KVFormat = Literal["fp8", "int8"]
_DTYPES: dict[KVFormat, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class CacheSpec(Protocol):
    """What one layer keeps for a token on this rank, stated before blocks are laid out.

    One that can keep it in 8 bits has `quantised(format)`, too, which gives the spec that does.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Of what is kept; the model's hidden states may have another."""

    @property
    def token_bytes(self) -> int:
        """That a token takes in the cache."""

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str) -> Any:
        """The blocks of this layer. Their entries are finite numbers: attention may read past a sequence's end."""

    def step_bytes(self, num_keys: int) -> int:
        """That a decode step of one sequence reads and writes, with so many keys in the cache before it."""

    def block_size(self, device: str) -> int:
        """Tokens of a block on `device`, where nobody asks for another number."""

    def refusal(self, block_size: int, device: str) -> str | None:
        """Why attention on `device` does not take blocks of so many tokens; None: it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedKV:
    """Keys and values of the same heads, side by side.

    dtype: int8 or float8_e4m3fn for codes; a scale of each token and head is then kept beside them.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # keys a query sees, itself included; None: all

    def quantised(self, format: KVFormat) -> "PagedKV":
        """The same in 8 bits."""
        return replace(self, dtype=_DTYPES[format])

    @property
    def has_scales(self) -> bool:
        return self.dtype in _DTYPES.values()

    @property
    def token_bytes(self) -> int:
        head = self.head_dim * self.dtype.itemsize + self.has_scales * torch.float32.itemsize
        return 2 * self.num_kv_heads * head

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str) -> "KVCache":
        shape = (num_blocks, block_size, self.num_kv_heads, self.head_dim)
        k, v = (torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2))
        if not self.has_scales:
            return KVCache(k=k, v=v)
        planes = (num_blocks, self.num_kv_heads, block_size)
        k_scale, v_scale = (torch.zeros(planes, dtype=torch.float32, device=device) for _ in range(2))
        return KVCache(k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def step_bytes(self, num_keys: int) -> int:
        return (min(num_keys, self.window or num_keys) + 1) * self.token_bytes  # and what the new token writes

    def block_size(self, device: str) -> int:
        return block_size(device)

    def refusal(self, block_size: int, device: str) -> str | None:
        return None  # where the device's own attention takes no such blocks, the reference runs, with a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """One layer's blocks: k and v [num_blocks, block_size, HK, D]; of codes also their scales, [num_blocks, HK,
    block_size] fp32. `ops.write_kv` and `ops.paged_attention` say what they mean."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
