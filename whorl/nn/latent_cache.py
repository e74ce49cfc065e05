"""The cache of latent attention: one row a token, which all heads share, and the key that an indexer finds it by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from whorl.device import block_size


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentKV:
    """width: of a latent and the key channels behind it; index_dim: of an indexer's key, 0 where there is none."""

    width: int
    dtype: torch.dtype
    index_dim: int = 0
    topk: int = 0  # keys that a token looks at, where an indexer chooses them

    @property
    def token_bytes(self) -> int:
        return (self.width + self.index_dim) * self.dtype.itemsize

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str) -> "LatentCache":
        def pages(width: int) -> Tensor:
            return torch.zeros(num_blocks, block_size, width, dtype=self.dtype, device=device)

        return LatentCache(latent=pages(self.width), index=pages(self.index_dim) if self.index_dim else None)

    def step_bytes(self, num_keys: int) -> int:
        """The indexer reads the keys of all, attention the rows of those it chose; and what the new token writes."""
        read = min(num_keys, self.topk) if self.index_dim else num_keys
        return (read * self.width + num_keys * self.index_dim) * self.dtype.itemsize + self.token_bytes

    def block_size(self, device: str) -> int:
        return block_size(device)

    def refusal(self, block_size: int, device: str) -> str | None:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentCache:
    """One layer's blocks: latent [num_blocks, block_size, width], index [num_blocks, block_size, index_dim]."""

    latent: Tensor
    index: Tensor | None
