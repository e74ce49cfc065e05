"""Matrices of 4 to 8 bits as GGUF stores them, and their products with tokens that are rounded to 16 or 8 bits.

A token is rounded in blocks of 32 channels: code = round(x * 127 / top), with top the largest magnitude of the block,
and scale = top / 127. With 16 bits a second code holds what is left, in steps of 1/254, so that the error is at most
top / 64516. Codes are multiplied and added as integers, exactly; y is the sum of scale * token's scale * integer over
the blocks, in their order, by fp32 fmas. So the bits of a row depend on the row and the matrix alone: not on other
rows, threads or the processor's instruction set.
"""

from collections.abc import Sequence
from ctypes import POINTER, addressof, byref, pointer
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .library import Matrix, Norm, Packing, Segment, Stack, address, library, plain, use_threads
from .memory import zeros

PANEL = 16  # rows that are interleaved
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # as library.cpp numbers them
SUPER = ("Q4_K", "Q5_K", "Q6_K")  # types with blocks of 256 values; others have 32


def columns_per_block(kind: str) -> int:
    """Return the values of a block of a GGUF type."""
    return 256 if kind in SUPER else 32


def packing_of(kind: str) -> Packing:
    """Return how a GGUF type is stored in panels."""
    packing = Packing()
    library().whorl_cpu_packing(KINDS.index(kind), byref(packing))
    return packing


class Rows(NamedTuple):
    """Rows of a matrix that have one GGUF type. panels: uint8 [bytes]."""

    kind: str
    rows: int
    panels: Tensor


def interleave(kind: str, blocks: Tensor, columns: int) -> Rows:
    """Interleave rows of GGUF blocks, uint8 [rows, bytes of a row], in panels of PANEL rows."""
    rows, packing = blocks.shape[0], packing_of(kind)
    size = library().whorl_cpu_panel_bytes(packing.bits, packing.scales, packing.has_minima, columns)
    panels = zeros(-(-rows // PANEL) * size)
    blocks = blocks.contiguous()
    use_threads()
    library().whorl_cpu_pack(KINDS.index(kind), blocks.data_ptr(), rows, columns, panels.data_ptr())
    return Rows(kind, rows, panels)


def trim() -> None:
    """Return memory that is free, between tensors that are not, to the system."""
    library().whorl_cpu_trim()


class PackedMatrix:
    """A matrix [N, K] whose rows are those of `parts`, one below the other. shape: N and K.

    token_bits: what tokens are rounded to. 8 takes about two thirds of the time; the result is then that of llama.cpp.
    """

    def __init__(self, parts: Sequence[Rows], columns: int, token_bits: Literal[8, 16] = 16) -> None:
        self.parts, self.shape = tuple(parts), (sum(part.rows for part in parts), columns)
        segments, first = [], 0
        for part in self.parts:
            segments.append(Segment(part.panels.data_ptr(), part.rows, first, packing_of(part.kind)))
            first += part.rows
        self._segments = (Segment * len(segments))(*segments)
        self.matrix = Matrix(self._segments, len(segments), columns, token_bits // 8)
        self._at = byref(self.matrix)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias in x's dtype; x: [T, K]."""
        x32 = plain(x)
        y = torch.empty(x32.shape[0], self.shape[0])
        bias = None if bias is None else plain(bias)
        use_threads()
        library().whorl_cpu_linear_packed(
            self._at, x32.data_ptr(), len(y), x32.stride(0), y.data_ptr(), self.shape[0], address(bias)
        )
        return y if x.dtype == torch.float32 else y.to(x.dtype)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, norm: Norm, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the product of n = norm(h) with W, then n, then h = x + residual; all in fp32, as x must be."""
        count, width = x.shape
        y, normed = torch.empty(count, self.shape[0]), torch.empty(count, width)
        total = x if residual is None else torch.empty(count, width)
        use_threads()
        library().whorl_cpu_norm(
            *(x.data_ptr(), address(residual), norm.weight, norm.eps, norm.plus_one, count, width),
            *(normed.data_ptr(), None if residual is None else total.data_ptr()),
            *(self._at, y.data_ptr(), self.shape[0], address(bias)),
        )
        return y, normed, total

    def values(self, rows: Tensor | None = None) -> Tensor:
        """Return the values of some rows, or of all, in fp32."""
        count = self.shape[0] if rows is None else rows.numel()
        if rows is not None:
            rows = rows.long().contiguous()
            if count and not 0 <= int(rows.min()) <= int(rows.max()) < self.shape[0]:
                raise ValueError(f"rows from {int(rows.min())} to {int(rows.max())} of a matrix with {self.shape[0]}")
        out = torch.empty(count, self.shape[1])
        use_threads()
        library().whorl_cpu_unpack(self._at, address(rows), count, out.data_ptr())
        return out


class PackedStack:
    """The matrices of a layer's experts, of equal shapes. shape: of one."""

    def __init__(self, matrices: Sequence[PackedMatrix]) -> None:
        self.shape = matrices[0].shape
        self._matrices = (POINTER(Matrix) * len(matrices))(*(pointer(each.matrix) for each in matrices))
        self._kept = matrices
        self.stack = Stack(packed=addressof(self._matrices), columns=self.shape[1])

    def __len__(self) -> int:
        return len(self._kept)
