"""The cache of latent attention (MLA): per token one latent and one rotated key, which all heads share.

Where the model has an indexer, the cache also has the indexer's key of the token.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whorl.device import block_size, has_two_latent_caches
from whorl.ops.latent.codes import index_bytes, latent_bytes

from .cache import zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentKV:
    """What latent attention stores for a token.

    latent_dim: channels of the latent (kv_lora_rank); rotary_dim: channels of the rotated key, which are stored after
    the latent (qk_rope_head_dim); index_dim: channels of the indexer's key, 0 without an indexer. dtype: float8_e4m3fn
    stores codes and scales as bytes in DeepSeek's layouts; see `ops.latent_write`.
    """

    latent_dim: int
    rotary_dim: int
    dtype: torch.dtype
    index_dim: int = 0
    topk: int = 0  # keys that a token attends to, where an indexer, of this layer or another, selects them

    def quantised(self, format: str) -> "LatentKV":
        """Return the same spec in 8 bits; raises ValueError for a format other than "fp8"."""
        if format != "fp8":
            raise ValueError(
                f"kv_cache_dtype is {format}, and latent attention stores its cache in the model's dtype or in fp8"
            )
        if self.index_dim & (self.index_dim - 1):
            raise ValueError(f"the indexer's keys have {self.index_dim} channels; an fp8 cache needs a power of two")
        return replace(self, dtype=torch.float8_e4m3fn)

    @property
    def is_coded(self) -> bool:
        """Whether the blocks hold bytes, codes and their scales, instead of numbers of `dtype`."""
        return self.dtype == torch.float8_e4m3fn

    @property
    def latent_bytes(self) -> int:
        """The bytes of a token's latent and rotated key."""
        width = self.latent_dim + self.rotary_dim
        return latent_bytes(self.latent_dim, self.rotary_dim) if self.is_coded else width * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """The bytes of a token's key of the indexer."""
        if not self.index_dim:
            return 0
        return index_bytes(self.index_dim) if self.is_coded else self.index_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        return self.latent_bytes + self.index_bytes

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str) -> "LatentCache":
        dtype = torch.uint8 if self.is_coded else self.dtype

        def blocks(num_bytes: int) -> Tensor:
            shape = (num_blocks, block_size, num_bytes // dtype.itemsize)
            return zeros(shape, dtype, device)

        index = blocks(self.index_bytes) if self.index_dim else None
        if self.is_coded or not has_two_latent_caches(torch.device(device).type):
            return LatentCache(latent=blocks(self.latent_bytes), index=index)
        latent, rotary = (blocks(width * dtype.itemsize) for width in (self.latent_dim, self.rotary_dim))
        return LatentCache(latent=latent, index=index, rotary=rotary)

    def step_bytes(self, num_keys: int) -> int:
        """Return the bytes that a decode step of one sequence reads and writes.

        The indexer reads its keys of all tokens, attention the latents of the selected ones; the new token is written.
        """
        read = min(num_keys, self.topk or num_keys)
        return read * self.latent_bytes + num_keys * self.index_bytes + self.token_bytes

    def block_size(self, device: str) -> int:
        return block_size(device)

    def refusal(self, block_size: int, device: str) -> str | None:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentCache:
    """The blocks of one layer.

    latent: [num_blocks, block_size, latent_dim + rotary_dim]; index: [num_blocks, block_size, index_dim], None without
    an indexer. Caches of codes have uint8 bytes in place of these channels. Where a device's attention takes the
    rotated key as a separate tensor, latent has `latent_dim` channels and rotary [num_blocks, block_size, rotary_dim]
    has the others.
    """

    latent: Tensor
    index: Tensor | None
    rotary: Tensor | None = None
