"""Pages of a cache in which a token has one row: what the operators on them check, gather and make for tests."""

from typing import Any

import torch
from torch import Tensor

from .._check import check_lengths, check_slots, check_tables
from .._draw import Draw, Sizes
from .._op import Values
from .._tracing import is_readable

ONE_CACHE = "takes latents and turned channels that lie in one cache"


def check_pages(name: str, cache: Tensor, dtype: torch.dtype, width: int, num_bytes: int) -> None:
    """num_bytes: of a token where pages are bytes, which is another way to keep it."""
    expected = num_bytes if cache.dtype == torch.uint8 else width
    if cache.dim() != 3 or cache.dtype not in (dtype, torch.uint8) or cache.shape[2] != expected:
        raise ValueError(
            f"{name}: cache is {list(cache.shape)} {cache.dtype}, expected [blocks, block size, {width}] {dtype} or "
            f"[blocks, block size, {num_bytes}] torch.uint8"
        )
    if cache.dtype == torch.uint8 and not (cache.stride(2) == 1 and cache.stride(1) == cache.shape[2]):
        raise ValueError(f"{name}: cache has strides {cache.stride()}: the bytes of a block must lie side by side")


def check_latents(
    name: str, cache: Tensor, turned_cache: Tensor | None, dtype: torch.dtype, sizes: tuple[int, int], num_bytes: int
) -> None:
    """sizes: channels of a latent, and those that turn, which may have a cache of their own."""
    if turned_cache is None:
        check_pages(name, cache, dtype, sum(sizes), num_bytes)
        return
    for what, pages, width in zip(("cache", "turned_cache"), (cache, turned_cache), sizes, strict=True):
        if pages.shape != (*cache.shape[:2], width) or pages.dtype != dtype:
            raise ValueError(
                f"{name}: {what} is {list(pages.shape)} {pages.dtype}, expected [blocks, block size, {width}] {dtype}, "
                "with as many blocks as the other of two caches"
            )


def check_rows(name: str, slots: Tensor, cos_sin: Tensor, count: int, cache: Tensor) -> None:
    """Slots and angles of the tokens that are written."""
    check_slots(name, slots, count, cache)
    if cos_sin.dim() != 2 or cos_sin.shape[0] != count or cos_sin.shape[1] % 2 or not cos_sin.is_floating_point():
        raise ValueError(f"{name}: cos_sin is {list(cos_sin.shape)} {cos_sin.dtype}, expected [{count}, R], R even")


def check_sequences(
    name: str, num_rows: int, cache: Tensor, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor
) -> None:
    """As `paged_attention` checks them."""
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
    """[length, D]: the rows of one sequence in the order of its tokens."""
    blocks = table[: -(-length // cache.shape[1])]
    return cache.index_select(0, blocks).flatten(0, 1)[:length]


def gather_latents(cache: Tensor, turned_cache: Tensor | None, table: Tensor, length: int) -> Tensor:
    """[length, N + R], whether they are in one cache or in two."""
    latents = gather(cache, table, length)
    return latents if turned_cache is None else torch.cat((latents, gather(turned_cache, table, length)), 1)


def store(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Row t goes to slot slots[t]; to none where that is negative."""
    slots = slots.long()
    kept = slots >= 0
    if not bool(kept.all()):
        rows, slots = rows[kept], slots[kept]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


# ---- cases


def make_pages(draw: Draw, blocks: int, block: int, width: int, coded: bool = False) -> Tensor:
    """Of a sliced case with a gap between blocks; coded: bytes, all zero."""
    if coded:
        return torch.zeros(blocks, block, width, dtype=torch.uint8, device=draw.device)
    return torch.randn(blocks, block + 2 * draw.sliced, width, **draw.kind)[:, :block]


def split_pages(pages: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The same rows in two caches: latents, and the channels that turn."""
    latents, turned = pages.split((rank, pages.shape[2] - rank), -1)
    return latents.contiguous(), turned.contiguous()


def make_slots(draw: Draw, count: int, slots: int, skipped: bool) -> Tensor:
    """In no order, some tokens without one."""
    found = torch.randperm(slots, device=draw.device)[:count]
    return torch.where(torch.arange(count, device=draw.device) % 3 == 1, -1, found) if skipped else found


def make_angles(draw: Draw, count: int, rotary: int) -> Tensor:
    angles = torch.rand(count, rotary // 2, device=draw.device, dtype=draw.wide) * 6
    return torch.cat((angles.cos(), angles.sin()), -1)


def make_sequences(draw: Draw, queries: Sizes, contexts: Sizes, block: int) -> tuple[Values, int]:
    """Block tables and lengths, and the number of blocks that the cache has."""
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
