"""Sequences of a batch in the layouts of DeepSeek sparse attention: which rows are whose, and which keys they see."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from whorl.ops.indexer.bounds import full_bounds

FAR = 9223372036854775807
Part = tuple[Any, ...]  # what picks one sequence of a tensor: (batch, rows) or (rows,)
Parts = list[tuple[Part, Part]]  # of queries, and of their keys


def check_layout(name: str, layout: str, key_layout: str) -> None:
    if layout not in ("BSND", "TND") or key_layout != layout:
        raise ValueError(f"{name}: layouts are {layout!r} and {key_layout!r}, expected 'BSND' or 'TND' for both here")


def check_tokens(name: str, *tokens: int | None) -> None:
    if any(t not in (None, FAR) for t in tokens):
        raise ValueError(f"{name}: pre_tokens and next_tokens are {tokens}, expected their default {FAR}")


def check_mode(name: str, mode: int | None) -> None:
    """Of these, 3 and 0, neither looks at pre_tokens and next_tokens."""
    if mode not in (None, 0, 3):
        raise ValueError(f"{name}: sparse_mode is {mode}, expected 0 (no mask) or 3 (causal)")


def check_absorbed(name: str, key: Tensor, value: Tensor | None, block: int) -> None:
    if value is not None and value is not key and not torch.equal(value, key):
        raise ValueError(f"{name}: value differs from key; attention here is absorbed, with keys as values")
    if block != 1 or key.shape[-2] != 1:
        raise ValueError(f"{name}: sparse_block_size is {block}, key heads {key.shape[-2]}, expected 1 and 1 here")


def sequences(
    name: str,
    layout: str,
    query: Tensor,
    key: Tensor,
    query_lengths: Tensor | Sequence[int] | None,
    key_lengths: Tensor | Sequence[int] | None,
) -> Iterator[tuple[Part, Part]]:
    """What picks each sequence's queries, and its keys."""
    counts = [None if x is None else [int(n) for n in x] for x in (query_lengths, key_lengths)]
    if layout == "BSND":
        for b in range(query.shape[0]):
            sizes = [x.shape[1] if c is None else c[b] for x, c in zip((query, key), counts, strict=True)]
            yield (b, slice(0, sizes[0])), (b, slice(0, sizes[1]))
        return
    if counts[0] is None or counts[1] is None:
        raise ValueError(f"{name}: TND needs the lengths of queries and keys, cumulative")
    edges = [list(itertools.pairwise([0, *c])) for c in counts if c is not None]
    for (first, last), (first_key, last_key) in zip(*edges, strict=True):
        yield (slice(first, last),), (slice(first_key, last_key),)


def bounds(mode: int | None, queries: int, keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """sparse_mode 3, the default: causal, counted from the last query; 0: everything."""
    if mode in (None, 3):
        return None, None
    ends = torch.full((queries,), keys, dtype=torch.int32, device=device)
    return torch.zeros_like(ends), ends


def ascending(indices: Tensor, mode: int | None, num_keys: int) -> Tensor:
    """[S, K] of one sequence, sorted, -1 last, without what the mode hides."""
    indices = indices.squeeze(1) if indices.dim() == 3 else indices
    _, ends = full_bounds(len(indices), num_keys, *bounds(mode, len(indices), num_keys, indices.device), indices.device)
    kept = (indices >= 0) & (indices < ends[:, None])
    found = torch.where(kept, indices, num_keys).sort(-1).values
    return torch.where(found < num_keys, found, -1).int()


def joined(x: Tensor, rope: Tensor | None) -> Tensor:
    return x if rope is None else torch.cat((x, rope.expand(*x.shape[:-1], rope.shape[-1])), -1)


def statistics(x: Tensor) -> Tensor:
    """[B, S, N] to [B, 1, S, N], [T, N] to [1, T, N]."""
    return x.unsqueeze(-3)


def by_query(x: Tensor) -> Tensor:
    """[B, N2, S, G] to [B, S, N2 * G], [N2, T, G] to [T, N2 * G]."""
    return x.transpose(-3, -2).flatten(-2)
