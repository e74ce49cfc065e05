"""A selection of keys as bits: 32 keys a word, a row of words for each query."""

import torch
from torch import Tensor

WORD = 32  # keys of one word of a selection


def num_words(num_keys: int) -> int:
    return -(-num_keys // WORD)


def causal_bits(num_queries: int, num_keys: int, device: torch.device, window: int = 0) -> Tensor:
    """The bits of every key up to the query's own, the last query at the last key; of the last `window` of them."""
    ends = torch.arange(num_keys - num_queries + 1, num_keys + 1, device=device)[:, None]
    firsts = WORD * torch.arange(num_words(num_keys), device=device)
    bits = (1 << (ends - firsts).clamp(0, WORD)) - 1
    if window:
        bits = bits - ((1 << (ends - window - firsts).clamp(0, WORD)) - 1)
    return bits.int()  # keeps the lowest 32 bits


def unpack(bits: Tensor, num_keys: int) -> Tensor:
    """[T, S] bool of a few rows of a selection."""
    shifts = torch.arange(WORD, device=bits.device, dtype=torch.int32)
    return ((bits[..., None] >> shifts) & 1).bool().flatten(1)[:, :num_keys]
