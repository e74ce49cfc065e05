"""A selection of keys as a bit mask [T, ceil(S / 32)] int32: bit j % 32 of word j // 32 is key j."""

import torch
from torch import Tensor

WORD = 32  # keys per word of a bit mask


def num_words(num_keys: int) -> int:
    """Return the words of one row of a bit mask."""
    return -(-num_keys // WORD)


def causal_bits(num_queries: int, num_keys: int, device: torch.device, window: int = 0) -> Tensor:
    """Return the bit mask of causal attention, with the last query at the last key.

    window: how many of the last keys a query sees, its own included; 0 means all.
    """
    ends = torch.arange(num_keys - num_queries + 1, num_keys + 1, device=device)[:, None]
    firsts = WORD * torch.arange(num_words(num_keys), device=device)
    bits = (1 << (ends - firsts).clamp(0, WORD)) - 1
    if window:
        bits = bits - ((1 << (ends - window - firsts).clamp(0, WORD)) - 1)
    return bits.int()  # keeps the lowest 32 bits


def unpack(bits: Tensor, num_keys: int) -> Tensor:
    """Unpack rows of a bit mask, [T, words], to bool [T, num_keys]."""
    shifts = torch.arange(WORD, device=bits.device, dtype=torch.int32)
    return ((bits[..., None] >> shifts) & 1).bool().flatten(1)[:, :num_keys]
