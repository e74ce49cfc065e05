"""A selection of keys as a bit mask: 32 keys per word, one row of words per query."""

import torch
from torch import Tensor

WORD = 32  # keys per word of a bit mask


def num_words(num_keys: int) -> int:
    return -(-num_keys // WORD)


def causal_bits(num_queries: int, num_keys: int, device: torch.device, window: int = 0) -> Tensor:
    """Return the bit mask of causal attention, with the last query at the last key; window: only the last keys."""
    ends = torch.arange(num_keys - num_queries + 1, num_keys + 1, device=device)[:, None]
    firsts = WORD * torch.arange(num_words(num_keys), device=device)
    bits = (1 << (ends - firsts).clamp(0, WORD)) - 1
    if window:
        bits = bits - ((1 << (ends - window - firsts).clamp(0, WORD)) - 1)
    return bits.int()  # keeps the lowest 32 bits


def unpack(bits: Tensor, num_keys: int) -> Tensor:
    """Unpack some rows of a bit mask to bool [T, S]."""
    shifts = torch.arange(WORD, device=bits.device, dtype=torch.int32)
    return ((bits[..., None] >> shifts) & 1).bool().flatten(1)[:, :num_keys]
