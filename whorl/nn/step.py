"""The tensors of one forward call."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The tensors of one forward call: T tokens of B sequences, those of a sequence side by side.

    max_position: highest position + 1, known on the host so that nothing waits for the device.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + offset of each token's cache entry; -1 writes none
    block_tables: Tensor  # [B, MB] int32
    query_starts: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32: keys that the last query of each sequence sees, new tokens included
    max_position: int
