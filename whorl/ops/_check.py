"""Checks of a paged cache that signatures cannot state. Values are checked only where they are `is_readable`."""

from collections.abc import Sequence

from torch import Tensor

from ._formats import FORMATS
from ._tracing import is_readable


def check_scales(name: str, k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raise ValueError unless both scales are given for a cache of codes, and none for another."""
    if (k_scale is None) != (v_scale is None):
        raise ValueError(f"{name}: one of k_scale and v_scale is given, expected both or neither")
    is_coded = k_cache.dtype in [kind for kind, _ in FORMATS.values()]
    if k_scale is not None and not is_coded:
        raise ValueError(f"{name}: k_scale is given and k_cache is {k_cache.dtype}, expected int8 or float8_e4m3fn")
    if k_scale is None and is_coded:
        raise ValueError(f"{name}: k_cache is {k_cache.dtype} and k_scale is None, expected the scales of its codes")


def check_lengths(name: str, starts: Sequence[int], contexts: Sequence[int], num_queries: int, num_keys: int) -> None:
    """Raise ValueError unless the values of query_starts [B + 1] and context_lens [B] describe a batch.

    num_queries: rows of q, which may end with padding; num_keys: the keys that one row of block_tables has room for. A
    sequence without queries reads nothing, so its context length is not checked.
    """
    ends = list(starts[1:])
    if starts[0] != 0 or ends != sorted(ends) or min(ends, default=0) < 0 or starts[-1] > num_queries:
        raise ValueError(
            f"{name}: query_starts are {list(starts)}, expected 0 first, none below the one before, and {num_queries} "
            "queries at most"
        )
    for b, (start, end, context) in enumerate(zip(starts, ends, contexts, strict=False)):
        if end > start and not end - start <= context <= num_keys:
            raise ValueError(
                f"{name}: sequence {b} has {end - start} queries and context_lens {context}; expected no more queries "
                f"than keys, and no more keys than the {num_keys} that its row of block_tables holds"
            )


def check_sequences(
    name: str, q: Tensor, cache: Tensor, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor
) -> None:
    """Raise ValueError for lengths that describe no batch, or blocks outside the cache, if all are `is_readable`."""
    if all(map(is_readable, (block_tables, query_starts, context_lens))):
        starts, contexts = query_starts.tolist(), context_lens.tolist()
        check_lengths(name, starts, contexts, len(q), block_tables.shape[1] * cache.shape[1])
        check_tables(name, block_tables, starts, contexts, cache)


def check_tables(name: str, tables: Tensor, starts: Sequence[int], contexts: Sequence[int], cache: Tensor) -> None:
    """Raise ValueError if a block that a sequence with queries reads lies outside the cache. tables: [B, MB]."""
    for b, row in enumerate(tables.tolist()):
        used = row[: -(-contexts[b] // cache.shape[1])] if starts[b + 1] > starts[b] else []
        if used and not 0 <= min(used) <= max(used) < cache.shape[0]:
            raise ValueError(f"{name}: sequence {b} has blocks {used}, expected 0 to {cache.shape[0] - 1}")
