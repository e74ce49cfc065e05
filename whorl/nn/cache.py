"""The paged cache: what a layer stores for a token, and the blocks that store it.

The engine owns the blocks: it allocates, shares and reuses them, and tells a layer by slots and block tables where a
token's entry is. The layer decides what an entry is: a kind of cache is a `CacheSpec` and the class that its `empty`
returns, which the model's forward call gets for that layer.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from whorl.device import HOST, block_size

KVFormat = Literal["fp8", "int8"]
_DTYPES: dict[KVFormat, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros for blocks. On a CPU they take memory only once they are written: most blocks never are."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != HOST or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # private: shared pages cost more
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)


class CacheSpec(Protocol):
    """What one layer stores for a token on this rank, stated before blocks are allocated.

    A spec that can store it in 8 bits also has `quantised(format)`, which returns the spec that does.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of cache entries; the model's hidden states may have another."""

    @property
    def token_bytes(self) -> int:
        """The bytes that a token takes in the cache."""

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str) -> Any:
        """Return the blocks of this layer, filled with finite numbers: attention may read past a sequence's end."""

    def step_bytes(self, num_keys: int) -> int:
        """Return the bytes that a decode step of one sequence reads and writes, with `num_keys` keys in the cache."""

    def block_size(self, device: str) -> int:
        """Return the default number of tokens per block on `device`."""

    def refusal(self, block_size: int, device: str) -> str | None:
        """Return why attention on `device` does not take blocks of `block_size` tokens; None if it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedKV:
    """The cache of ordinary attention: a key and a value for each KV head.

    dtype: with int8 or float8_e4m3fn both are stored as codes, with one fp32 scale per token and head.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # keys a query sees, itself included; None: all

    def quantised(self, format: KVFormat) -> "PagedKV":
        """Return the same spec in 8 bits."""
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
        k, v = (zeros(shape, self.dtype, device) for _ in range(2))
        if not self.has_scales:
            return KVCache(k=k, v=v)
        planes = (num_blocks, self.num_kv_heads, block_size)
        k_scale, v_scale = (zeros(planes, torch.float32, device) for _ in range(2))
        return KVCache(k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def step_bytes(self, num_keys: int) -> int:
        return (min(num_keys, self.window or num_keys) + 1) * self.token_bytes  # one more for what the new token writes

    def block_size(self, device: str) -> int:
        return block_size(device)

    def refusal(self, block_size: int, device: str) -> str | None:
        return None  # a block size that the device's kernel does not take runs by the reference, with a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """The blocks of one layer: k and v [num_blocks, block_size, HK, D].

    Caches of codes also have their scales, [num_blocks, HK, block_size] fp32. `ops.write_kv` writes both,
    `ops.paged_attention` reads them.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
