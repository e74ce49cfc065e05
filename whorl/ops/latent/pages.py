"""Paged caches in which a token is one row: checks, gathers and test inputs that the operators on them share."""

import torch
from torch import Tensor

from .._draw import Draw

ONE_CACHE = "takes latents and rotary channels in one cache, got rotary_cache"


def check_pages(name: str, cache: Tensor, width: int, num_bytes: int) -> None:
    """Raise ValueError unless a token has `width` channels in the cache or, in a cache of bytes, num_bytes of codes."""
    expected = num_bytes if cache.dtype == torch.uint8 else width
    if cache.shape[2] != expected:
        raise ValueError(
            f"{name}: cache is {list(cache.shape)} {cache.dtype}, expected {[*cache.shape[:2], expected]}: {width} "
            f"channels, or {num_bytes} of torch.uint8"
        )
    if cache.dtype == torch.uint8 and not (cache.stride(2) == 1 and cache.stride(1) == cache.shape[2]):
        raise ValueError(f"{name}: cache has strides {cache.stride()}, expected the bytes of a block to be contiguous")


def check_latents(
    name: str, cache: Tensor, rotary_cache: Tensor | None, sizes: tuple[int, int], num_bytes: int
) -> None:
    """Raise ValueError unless one cache has both parts of `sizes`, or cache has the first and rotary_cache the second.

    sizes: latent channels N and rotary channels R; num_bytes: those of a token in a cache of codes, which is one cache.
    """
    if rotary_cache is not None and cache.dtype == torch.uint8:
        raise ValueError(f"{name}: cache is torch.uint8 and rotary_cache is given, expected both parts in one cache")
    check_pages(name, cache, sum(sizes) if rotary_cache is None else sizes[0], num_bytes)


def gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return the rows of one sequence in token order, [length, D]. table: its row of block_tables."""
    blocks = table[: -(-length // cache.shape[1])]
    return cache.index_select(0, blocks).flatten(0, 1)[:length]


def gather_latents(cache: Tensor, rotary_cache: Tensor | None, table: Tensor, length: int) -> Tensor:
    """Return latents and rotary channels of one sequence, [length, N + R], from one cache or from two."""
    latents = gather(cache, table, length)
    return latents if rotary_cache is None else torch.cat((latents, gather(rotary_cache, table, length)), 1)


def store(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Store row t in slot slots[t]; rows with a negative slot are not stored."""
    slots = slots.long()
    is_stored = slots >= 0
    if not bool(is_stored.all()):
        rows, slots = rows[is_stored], slots[is_stored]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


# ---- cases


def make_pages(draw: Draw, blocks: int, block: int, width: int, coded: bool = False) -> Tensor:
    """Draw a cache [blocks, block, width]; in a sliced case with gaps between blocks. coded: uint8 zeros instead."""
    if coded:
        return torch.zeros(blocks, block, width, dtype=torch.uint8, device=draw.device)
    return torch.randn(blocks, block + 2 * draw.sliced, width, **draw.kind)[:, :block]


def split_pages(pages: Tensor, latent_dim: int) -> tuple[Tensor, Tensor]:
    """Split a cache into two contiguous ones: `latent_dim` latent channels, and the rotary channels after them."""
    latents, rotary_channels = pages.split((latent_dim, pages.shape[2] - latent_dim), -1)
    return latents.contiguous(), rotary_channels.contiguous()


def make_angles(draw: Draw, count: int, rotary: int) -> Tensor:
    """Draw cos_sin, [count, rotary], of random angles."""
    angles = torch.rand(count, rotary // 2, device=draw.device, dtype=draw.wide) * 6
    return torch.cat((angles.cos(), angles.sin()), -1)
