"""A tensor of a GGUF file: blocks of numbers as they are stored, and how Hugging Face's tensor lies in them."""

import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from whorl.nn import Index

_VALUES_AT_ONCE = 1 << 20  # dequantised at a time: the package needs several times their memory
Array = np.ndarray[Any, Any]


class Extent(NamedTuple):
    """Bytes of a mapped file."""

    data: mmap.mmap
    start: int
    length: int

    def release(self) -> None:
        """Tell the system that they are no longer needed. Reading them again is slower, no more."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, first, self.start + self.length - first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """A tensor as it is stored: `data` [*leading dims, bytes of a row] of blocks of `kind`, with rows in `order`.

    order: of the tensor's rows, or of a vector's numbers, where each is stored; None: in their order. columns: likewise
    of its columns. change: undoes what llama.cpp's converter has done to every number of a vector. extent: of the
    mapped file; its memory is let go of when the bytes have been read. A tensor [C, 1, K] is stored as a matrix [C, K].
    """

    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    data: Array
    order: Array | None = None
    columns: Array | None = None
    change: Callable[[Array], Array] | None = None
    extent: Extent | None = None

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    @property
    def nbytes(self) -> int:
        """The bytes that are stored of this tensor, which may be some rows of a larger one."""
        return self.data.nbytes * self.shape[0] // len(self.data) if self.is_matrix else self.data.nbytes

    def read(self, index: Index) -> Tensor:
        """Return the values of a part; of a matrix, rows are selected before they are dequantised."""
        if len(self.shape) == 3:
            return replace(self, shape=(self.shape[0], self.shape[2])).read((index[0], index[2])).unsqueeze(1)
        from gguf.quants import dequantize

        rows: Any = index[0] if self.order is None else self.order[index[0]]
        if not self.is_matrix:
            values = np.array(dequantize(self.data, self.kind)[rows], dtype=np.float32)
            return torch.from_numpy(values if self.change is None else self.change(values))
        stored = self.data[rows]
        columns: Any = index[1] if self.columns is None else self.columns[index[1]]
        values = np.empty((len(stored), len(range(self.shape[1])[index[1]])), np.float32)
        step = max(_VALUES_AT_ONCE // self.shape[1], 1)
        for first in range(0, len(stored), step):
            part = np.ascontiguousarray(stored[first : first + step])
            values[first : first + step] = dequantize(part, self.kind)[:, columns]
        return torch.from_numpy(values)

    def read_packed(self, index: Index) -> Tensor:
        """Return the stored bytes of a part, whose columns are in the file's order. index: rows, and columns in
        bytes."""
        rows: Any = index[0] if self.order is None else self.order[index[0]]
        stored = np.array(self.data[rows][(slice(None), *index[1:])])
        if self.extent is not None:
            self.extent.release()
        return torch.from_numpy(stored)

    def part(self, number: int) -> "Blocks":
        """Return one matrix of a stack, such as an expert."""
        data, extent = self.data[number], self.extent
        if extent is not None:
            extent = extent._replace(start=extent.start + number * data.nbytes, length=data.nbytes)
        return Blocks(shape=self.shape[1:], kind=self.kind, data=data, extent=extent)

    def rows(self, order: Array) -> "Blocks":
        """Return the tensor that has these rows, each given by where it is stored."""
        return replace(self, shape=(len(order), *self.shape[1:]), order=order)

    def in_halves(self, num_heads: int) -> "Blocks":
        """Undo the channel order of llama.cpp's Llama heads, which rotate neighbours: put even ones first, then odd."""
        return self.rows(np.arange(self.shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1))
