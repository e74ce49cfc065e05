"""The cache of latent attention: one row a token, which all heads share, and the key that an indexer finds it by."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whorl.device import block_size, has_two_latent_caches
from whorl.ops.latent.codes import index_bytes, latent_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentKV:
    """rank: channels of a latent; turning: of the key behind it; index_dim: of an indexer's key, 0 where there is none.

    dtype: float8_e4m3fn for codes in pages of bytes, in DeepSeek's layouts; `ops.latent_write` says which.
    """

    rank: int
    turning: int
    dtype: torch.dtype
    index_dim: int = 0
    topk: int = 0  # keys that a token looks at, where an indexer chooses them

    def quantised(self, format: str) -> "LatentKV":
        """The same in 8 bits."""
        if format != "fp8":
            raise ValueError(f"latent attention keeps its cache in the model's dtype or in fp8, not in {format}")
        if self.index_dim & (self.index_dim - 1):
            raise ValueError(f"the indexer's keys have {self.index_dim} channels; fp8 takes a power of two of them")
        return replace(self, dtype=torch.float8_e4m3fn)

    @property
    def is_coded(self) -> bool:
        return self.dtype == torch.float8_e4m3fn

    @property
    def latent_bytes(self) -> int:
        """Of a token's row."""
        width = self.rank + self.turning
        return latent_bytes(self.rank, self.turning) if self.is_coded else width * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Of a token's key."""
        if not self.index_dim:
            return 0
        return index_bytes(self.index_dim) if self.is_coded else self.index_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        return self.latent_bytes + self.index_bytes

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str) -> "LatentCache":
        kind = torch.uint8 if self.is_coded else self.dtype

        def pages(num_bytes: int) -> Tensor:
            shape = (num_blocks, block_size, num_bytes // kind.itemsize)
            return torch.zeros(shape, dtype=kind, device=device)

        index = pages(self.index_bytes) if self.index_dim else None
        if self.is_coded or not has_two_latent_caches(torch.device(device).type):
            return LatentCache(latent=pages(self.latent_bytes), index=index)
        latent, turned = (pages(width * kind.itemsize) for width in (self.rank, self.turning))
        return LatentCache(latent=latent, index=index, turned=turned)

    def step_bytes(self, num_keys: int) -> int:
        """The indexer reads the keys of all, attention the rows of those it chose; and what the new token writes."""
        read = min(num_keys, self.topk) if self.index_dim else num_keys
        return read * self.latent_bytes + num_keys * self.index_bytes + self.token_bytes

    def block_size(self, device: str) -> int:
        return block_size(device)

    def refusal(self, block_size: int, device: str) -> str | None:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentCache:
    """One layer's blocks: latent [num_blocks, block_size, rank + turning], index [num_blocks, block_size, index_dim];
    of codes, bytes in place of numbers. Where a device's attention wants the turning channels in a tensor of their own,
    latent has `rank` channels and turned the others."""

    latent: Tensor
    index: Tensor | None
    turned: Tensor | None = None
