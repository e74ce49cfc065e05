"""What layers store between calls: entries of tokens in blocks, or a state of each running sequence in its lane.

The engine owns the blocks: it allocates, shares and reuses them, and tells a layer by slots and block tables where a
token's entry is. The layer decides what an entry is: a kind of cache is a `CacheSpec` and the class that its `empty`
returns, which the model's forward call gets for that layer.

A layer whose memory does not grow with the sequence, such as a recurrence, has a `StateSpec` instead. The engine owns
the lanes as well: it zeroes a lane when a sequence starts, saves states as snapshots, and loads one where a sequence
starts with a prefix that has it.
"""

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from whorl.device import HOST, block_size

KVFormat = Literal["fp8", "int8"]
_DTYPES: dict[KVFormat, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros for blocks. On a CPU they take memory only once they are written: most blocks never are."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != HOST or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # private: shared pages cost more
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)


class CacheSpec(Protocol):
    """What one layer stores for each token on this rank, stated before blocks are allocated.

    A spec that can store it in 8 bits also has `quantised(format)`, which returns the spec that does.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of cache entries; the model's hidden states may have another."""

    @property
    def token_bytes(self) -> int:
        """The bytes that a token takes in the cache."""

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str) -> Any:
        """Return the blocks of this layer, filled with finite numbers: attention may read past a sequence's end."""

    def step_bytes(self, num_keys: int) -> int:
        """Return the bytes that a decode step of one sequence reads and writes, with `num_keys` keys in the cache."""

    def block_size(self, device: str) -> int:
        """Return the default number of tokens per block on `device`."""

    def refusal(self, block_size: int, device: str) -> str | None:
        """Return why attention on `device` does not take blocks of `block_size` tokens; None if it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedKV:
    """The cache of ordinary attention: a key and a value for each KV head.

    dtype: with int8 or float8_e4m3fn both are stored as codes, with one fp32 scale per token and head.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # keys a query sees, itself included; None: all

    def quantised(self, format: KVFormat) -> "PagedKV":
        """Return the same spec in 8 bits."""
        return replace(self, dtype=_DTYPES[format])

    @property
    def has_scales(self) -> bool:
        return self.dtype in _DTYPES.values()

    @property
    def token_bytes(self) -> int:
        head = self.head_dim * self.dtype.itemsize + self.has_scales * torch.float32.itemsize
        return 2 * self.num_kv_heads * head

    def empty(self, num_blocks: int, block_size: int, device: torch.device | str) -> "KVCache":
        shape = (num_blocks, block_size, self.num_kv_heads, self.head_dim)
        k, v = (zeros(shape, self.dtype, device) for _ in range(2))
        if not self.has_scales:
            return KVCache(k=k, v=v)
        planes = (num_blocks, self.num_kv_heads, block_size)
        k_scale, v_scale = (zeros(planes, torch.float32, device) for _ in range(2))
        return KVCache(k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def step_bytes(self, num_keys: int) -> int:
        return (min(num_keys, self.window or num_keys) + 1) * self.token_bytes  # one more for what the new token writes

    def block_size(self, device: str) -> int:
        return block_size(device)

    def refusal(self, block_size: int, device: str) -> str | None:
        return None  # a block size that the device's kernel does not take runs by the reference, with a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """The blocks of one layer: k and v [num_blocks, block_size, HK, D].

    Caches of codes also have their scales, [num_blocks, HK, block_size] fp32. `ops.write_kv` writes both,
    `ops.paged_attention` reads them.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


_ALIGNMENT = 128  # bytes: tensor cores load a matrix from memory that begins at a multiple of this
TensorSpecs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by name


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """What one layer stores for each running sequence on this rank, however long the sequence is.

    The model's forward call gets a dict of all tensors by name, [lanes, *shape] each; those of sequence i are at
    `step.lanes[i]`. A lane is one piece of memory, so a tensor is not contiguous from lane to lane. The last lane
    is for padding; its values are unspecified.

    kind: its name in messages. grid: the multiples of it are the positions at which computation can start. In each call
    a sequence either starts at one of them or does not go past the next one.
    kept: with n tokens computed, these tensors hold all that is needed to start at token n - n % grid. A snapshot is a
    copy of them; zeros are the state before the first token.
    open: what the layer stores of the tokens since then. Zeros when a sequence starts, with or without a snapshot.
    rolls_back: whether drafted tokens may be rejected. The engine says nothing then: the next call starts at the first
    rejected position. A draft never contains the last token before a multiple of the grid, so that `kept` stays valid.
    most_rows: the most tokens of a call that starts between multiples of the grid, drafts included; None: any number.
    """

    kind: str
    grid: int
    kept: TensorSpecs
    open: TensorSpecs = field(default_factory=dict)
    rolls_back: bool = False
    most_rows: int | None = None

    @property
    def snapshot_bytes(self) -> int:
        """The bytes that a snapshot of this layer takes."""
        return sum(size for _, size in _sizes(self.kept))

    @property
    def lane_bytes(self) -> int:
        """The bytes that a running sequence takes in this layer."""
        return self.snapshot_bytes + sum(size for _, size in _sizes(self.open))

    def step_bytes(self, num_keys: int) -> int:
        """Return the bytes that a decode step of one sequence reads and writes: everything once, unless a subclass
        knows better."""
        return 2 * self.lane_bytes


class States:
    """The states of all layers, by lane, and their snapshots; a lane is one piece of memory, and so is a snapshot.

    caches: for each spec what the forward call gets.
    """

    def __init__(
        self, specs: Sequence[StateSpec], num_lanes: int, num_snapshots: int, device: torch.device | str
    ) -> None:
        num_kept = sum(spec.snapshot_bytes for spec in specs)
        self._lanes = zeros((num_lanes, sum(spec.lane_bytes for spec in specs)), torch.uint8, device)
        self._snapshots = zeros((num_snapshots, num_kept), torch.uint8, device)
        self._kept, self._open = self._lanes[:, :num_kept], self._lanes[:, num_kept:]
        self.caches: list[dict[str, Tensor]] = [{} for _ in specs]
        first = 0
        for part in ("kept", "open"):  # what is kept comes first, so that one copy takes it all
            for spec, cache in zip(specs, self.caches, strict=True):
                tensors: TensorSpecs = getattr(spec, part)
                for (name, (shape, dtype)), (used, size) in zip(tensors.items(), _sizes(tensors), strict=True):
                    flat = self._lanes[:, first : first + used].view(dtype)
                    cache[name] = flat.view(num_lanes, *shape)
                    first += size

    @property
    def num_bytes(self) -> int:
        """The bytes of all lanes and snapshots."""
        return self._lanes.nbytes + self._snapshots.nbytes

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of a snapshot."""
        return self._snapshots.shape[1]

    def snapshot(self, index: int) -> Tensor:
        """Return the bytes of a snapshot."""
        return self._snapshots[index]

    def clear(self, lane: int) -> None:
        """Zero all states of a lane."""
        self._lanes[lane].zero_()

    def load(self, lane: int, snapshot: int) -> None:
        """Set the states of a lane to those of a snapshot."""
        self._open[lane].zero_()
        self._kept[lane].copy_(self._snapshots[snapshot])

    def save(self, lane: int, snapshot: int) -> None:
        """Copy what is kept of a lane to a snapshot."""
        self._snapshots[snapshot].copy_(self._kept[lane])


def _sizes(tensors: TensorSpecs) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each tensor, without and with padding."""
    for shape, dtype in tensors.values():
        num_bytes = math.prod(shape) * dtype.itemsize
        yield num_bytes, num_bytes + -num_bytes % _ALIGNMENT
