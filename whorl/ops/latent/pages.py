"""Paged caches in which a token is one row: checks, gathers and test inputs that the operators on them share."""

from typing import Any

import torch
from torch import Tensor

from .._check import check_lengths, check_slots, check_tables
from .._draw import Draw, Sizes
from .._op import Values
from .._tracing import is_readable

ONE_CACHE = "takes latents and rotary channels in one cache, got rotary_cache"


def check_pages(name: str, cache: Tensor, dtype: torch.dtype, width: int, num_bytes: int) -> None:
    """Raise ValueError unless cache is [blocks, block size, width] in `dtype`, or uint8 codes of num_bytes a token."""
    expected = num_bytes if cache.dtype == torch.uint8 else width
    if cache.dim() != 3 or cache.dtype not in (dtype, torch.uint8) or cache.shape[2] != expected:
        raise ValueError(
            f"{name}: cache is {list(cache.shape)} {cache.dtype}, expected [blocks, block size, {width}] {dtype} or "
            f"[blocks, block size, {num_bytes}] torch.uint8"
        )
    if cache.dtype == torch.uint8 and not (cache.stride(2) == 1 and cache.stride(1) == cache.shape[2]):
        raise ValueError(f"{name}: cache has strides {cache.stride()}, expected the bytes of a block to be contiguous")


def check_latents(
    name: str, cache: Tensor, rotary_cache: Tensor | None, dtype: torch.dtype, sizes: tuple[int, int], num_bytes: int
) -> None:
    """Raise ValueError unless one cache has both parts of `sizes`, or cache has the first and rotary_cache the second.

    sizes: latent channels N and rotary channels R; num_bytes: those of a token in a cache of codes, which is one cache.
    """
    if rotary_cache is None:
        check_pages(name, cache, dtype, sum(sizes), num_bytes)
        return
    for argument, pages, width in zip(("cache", "rotary_cache"), (cache, rotary_cache), sizes, strict=True):
        if pages.shape != (*cache.shape[:2], width) or pages.dtype != dtype:
            raise ValueError(
                f"{name}: {argument} is {list(pages.shape)} {pages.dtype}, "
                f"expected [blocks, block size, {width}] {dtype}, with as many blocks as the other cache"
            )


def check_rows(name: str, slots: Tensor, cos_sin: Tensor, count: int, cache: Tensor) -> None:
    """Raise ValueError unless slots and cos_sin have one row for each of `count` tokens that are written."""
    check_slots(name, slots, count, cache)
    if cos_sin.dim() != 2 or cos_sin.shape[0] != count or cos_sin.shape[1] % 2 or not cos_sin.is_floating_point():
        raise ValueError(f"{name}: cos_sin is {list(cos_sin.shape)} {cos_sin.dtype}, expected [{count}, R], R even")


def check_sequences(
    name: str, num_rows: int, cache: Tensor, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor
) -> None:
    """Raise ValueError for block tables and lengths that `paged_attention` would refuse. num_rows: the rows of q."""
    count = len(context_lens) if context_lens.dim() == 1 else -1
    if block_tables.dim() != 2 or block_tables.shape[0] != count or query_starts.shape != (count + 1,):
        raise ValueError(
            f"{name}: block_tables is {list(block_tables.shape)}, query_starts {list(query_starts.shape)}, "
            f"context_lens {list(context_lens.shape)}, expected [B, MB], [B + 1] and [B]"
        )
    if {block_tables.dtype, query_starts.dtype, context_lens.dtype} != {torch.int32}:
        raise ValueError(f"{name}: block_tables, query_starts and context_lens must be int32")
    if all(map(is_readable, (block_tables, query_starts, context_lens))):
        starts, contexts = query_starts.tolist(), context_lens.tolist()
        check_lengths(name, starts, contexts, num_rows, block_tables.shape[1] * cache.shape[1])
        check_tables(name, block_tables, starts, contexts, cache)


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


def make_slots(draw: Draw, count: int, slots: int, skipped: bool) -> Tensor:
    """Draw `count` of `slots` slots in random order; skipped: every third token gets -1."""
    drawn = torch.randperm(slots, device=draw.device)[:count]
    return torch.where(torch.arange(count, device=draw.device) % 3 == 1, -1, drawn) if skipped else drawn


def make_angles(draw: Draw, count: int, rotary: int) -> Tensor:
    """Draw cos_sin, [count, rotary], of random angles."""
    angles = torch.rand(count, rotary // 2, device=draw.device, dtype=draw.wide) * 6
    return torch.cat((angles.cos(), angles.sin()), -1)


def make_sequences(draw: Draw, queries: Sizes, contexts: Sizes, block: int) -> tuple[Values, int]:
    """Draw block tables and lengths; return them and the number of blocks of the cache."""
    counts = [-(-c // block) for c in contexts]
    tables, free = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32), torch.randperm(sum(counts) + 3).int()
    for b, count in enumerate(counts):
        tables[b, :count], free = free[:count], free[count:]
    lengths: dict[str, Any] = {
        "block_tables": tables,
        "query_starts": torch.tensor([0, *queries]).cumsum(0).int(),
        "context_lens": torch.tensor(contexts, dtype=torch.int32),
    }
    return {name: value.to(draw.device) for name, value in lengths.items()}, sum(counts) + 3
