"""What DeepSeek's sparse operators share: splitting a batch into sequences, visible keys, and checks of arguments."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from whorl.ops.indexer.bounds import full_bounds

from .calling import Misfit

FAR = 9223372036854775807  # the default of pre_tokens and next_tokens: no window
LAYOUTS = ("BSND", "TND")
MODES = {0: "no mask", 3: "causal"}  # the values of sparse_mode, which both ignore pre_tokens and next_tokens
SequenceIndex = tuple[Any, ...]  # indexes one sequence of a tensor: (batch, tokens) or (tokens,)
SequenceIndices = list[tuple[SequenceIndex, SequenceIndex]]  # of the queries, and of their keys


def check_layout(layout: str, key_layout: str) -> None:
    if layout not in LAYOUTS or key_layout != layout:
        raise Misfit(f"layouts are {layout!r} and {key_layout!r}, expected 'BSND' or 'TND' for both off the NPU")


def check_absorbed(key: Tensor, value: Tensor | None, block: int) -> None:
    """Raise ValueError unless value is key or None, key has one head and sparse_block_size (`block`) is 1."""
    if value is not None and value is not key and not torch.equal(value, key):
        raise Misfit("value differs from key, expected the same tensor or None: absorbed attention uses keys as values")
    if block != 1 or key.shape[-2] != 1:
        raise Misfit(f"sparse_block_size is {block} and key has {key.shape[-2]} heads, expected 1 and 1 off the NPU")


def split_sequences(
    layout: str | None,
    query: Tensor,
    key: Tensor,
    query_lengths: Tensor | Sequence[int] | None,
    key_lengths: Tensor | Sequence[int] | None,
) -> Iterator[tuple[SequenceIndex, SequenceIndex]]:
    """Yield the indices of each sequence's queries and of its keys; lengths are per sequence, in TND cumulative."""
    counts = [None if x is None else [int(n) for n in x] for x in (query_lengths, key_lengths)]
    if layout == "BSND":
        for b in range(query.shape[0]):
            sizes = [x.shape[1] if c is None else c[b] for x, c in zip((query, key), counts, strict=True)]
            yield (b, slice(0, sizes[0])), (b, slice(0, sizes[1]))
        return
    if counts[0] is None or counts[1] is None:
        raise Misfit("TND needs the lengths of queries and of keys, cumulative")
    spans = [list(itertools.pairwise([0, *c])) for c in counts if c is not None]
    for (start, end), (key_start, key_end) in zip(*spans, strict=True):
        yield (slice(start, end),), (slice(key_start, key_end),)


def key_bounds(mode: int | None, queries: int, keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the first key that each query sees and the end of its keys, int32 [queries] each.

    sparse_mode 0: every key. sparse_mode 3, the default: (None, None), which `whorl.ops` reads as causal with the last
    query aligned at the last key.
    """
    if mode in (None, 3):
        return None, None
    ends = torch.full((queries,), keys, dtype=torch.int32, device=device)
    return torch.zeros_like(ends), ends


def sort_indices(indices: Tensor, mode: int | None, num_keys: int) -> Tensor:
    """Return the key indices of one sequence, int32 [S, K], sorted, with -1 at the end for keys that the mode hides."""
    indices = indices.squeeze(1) if indices.dim() == 3 else indices
    _, ends = full_bounds(
        len(indices), num_keys, *key_bounds(mode, len(indices), num_keys, indices.device), indices.device
    )
    is_visible = (indices >= 0) & (indices < ends[:, None])
    ascending = torch.where(is_visible, indices, num_keys).sort(-1).values
    return torch.where(ascending < num_keys, ascending, -1).int()


def join_rope(x: Tensor, rope: Tensor | None) -> Tensor:
    """Concatenate x and its rotary part along the channels."""
    return x if rope is None else torch.cat((x, rope.expand(*x.shape[:-1], rope.shape[-1])), -1)


def to_statistics_order(x: Tensor) -> Tensor:
    """Return the softmax's statistics in torch_npu's order: [B, S, N] to [B, 1, S, N], [T, N] to [1, T, N]."""
    return x.unsqueeze(-3)


def to_query_order(x: Tensor) -> Tensor:
    """Return torch_npu's statistics by query: [B, N2, S, G] to [B, S, N2 * G], [N2, T, G] to [T, N2 * G]."""
    return x.transpose(-3, -2).flatten(-2)
