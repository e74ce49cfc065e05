"""The layouts of packed weights, and how their values are computed.

A weight [N, K] is stored as codes, scales and, for asymmetric quantisation, zeros (zero points):
value[n, k] = (number[n, k] - zero[n // rows, k // columns]) * scale[n // rows, k // columns], in fp32, rounded once to
the dtype of the activations it is multiplied with. A layout says which numbers the codes hold, and where. It has a
name in `LAYOUTS`, which travels with the codes: their dtype says nothing of it.

bytes: int8 or float8_e4m3fn [.., N, K], one number per byte; without zeros the zero point is 0.
bytes_tiled: the same numbers, [.., N, 64 * ceil(K / 64)]: byte 16 i + 2 p + e of a block of 64 columns is its column
8 p + 2 i + e.
int4_tiled: int32 [.., N, 16 * ceil(K / 128)], numbers from 0 to 15; without zeros the zero point is 8. A block of 128
columns is 16 words, and a word holds four pairs of neighbouring columns. Pair p of word 4 i + w is columns
32 w + 8 p + 2 i and the next one; the first is in bits 4 p to 4 p + 3, the second 16 bits above it.
int4_paired: uint8 [.., N / 2, K], numbers from -8 to 7 in two's complement; without zeros the zero point is 0. Byte
[n, k] holds column k of rows 2 n, in its low bits, and 2 n + 1. torch_npu reads them without a copy where memory has
the order [.., K, N / 2]: four bytes are then one of its int32 words of eight rows.

The tiled layouts suit tensor cores. In their matmul, threads i = 0 to 3 of a row hold columns 2 i, 2 i + 1, 2 i + 8 and
2 i + 9 of every 16 columns. In this order 16 consecutive bytes of a row are what one thread needs of a block, and one
shift and one mask extract a pair of 4-bit codes in order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 128  # columns per block of 4-bit codes
WORDS = 16  # int32 words per block of 4-bit codes
BYTES = 64  # columns, and bytes, per tiled block of 8-bit codes
CHUNK = 1024  # columns that are accumulated from zero; the sums of the chunks are then added in order
MIDDLE = 8  # zero point of numbers from 0 to 15 without zeros
Pick = slice | Tensor  # which rows of a matrix, or which matrices of a stack


def packed_int4(numbers: Tensor) -> Tensor:
    """Pack numbers [.., K] from 0 to 15 into int32 codes [.., 16 * ceil(K / 128)].

    Columns past K are 8, the zero point of codes without zeros, so that they contribute nothing. The letters in the
    comments below are those of the module's docstring; e is 0 or 1 within a pair.
    """
    padding = -numbers.shape[-1] % BLOCK
    wide = torch.nn.functional.pad(numbers.to(torch.uint8), (0, padding), value=MIDDLE)
    blocks = wide.unflatten(-1, (-1, 4, 4, 4, 2)).transpose(-4, -2)  # w, p, i, e; then i, p, w, e
    pairs = blocks[..., 0] | blocks[..., 1] << 4  # a byte: pair p of word 4 i + w
    pairs = pairs.transpose(-1, -2)  # i, w, p
    low = pairs[..., 0] & 15 | (pairs[..., 1] & 15) << 4, pairs[..., 2] & 15 | (pairs[..., 3] & 15) << 4
    high = pairs[..., 0] >> 4 | pairs[..., 1] >> 4 << 4, pairs[..., 2] >> 4 | pairs[..., 3] >> 4 << 4
    return torch.stack((*low, *high), -1).contiguous().view(torch.int32).flatten(-4)


def unpacked_int4(codes: Tensor, columns: int) -> Tensor:
    """Unpack the codes of `packed_int4` into numbers, uint8 [.., columns]."""
    shape = codes.shape[:-1]
    as_bytes = codes.contiguous().view(torch.uint8).view(*shape, codes.shape[-1] // WORDS, 4, 4, 4)  # i, w, byte
    low, high = as_bytes[..., :2], as_bytes[..., 2:]
    pairs = [torch.stack((part & 15, part >> 4), -1).flatten(-2) for part in (low, high)]  # i, w, p
    numbers = torch.stack(pairs, -1).transpose(-4, -3).transpose(-3, -2)  # w, p, i, e
    return numbers.reshape(*shape, -1)[..., :columns]


def paired_int4(numbers: Tensor) -> Tensor:
    """Pack numbers [.., N, K] from 0 to 15, N even, into bytes [.., N / 2, K] that hold them minus 8.

    The result is a view of memory in the order [.., K, N / 2].
    """
    nibbles = numbers.to(torch.uint8).mT.contiguous() ^ MIDDLE  # minus 8 in two's complement
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).mT


def unpaired_int4(codes: Tensor) -> Tensor:
    """Unpack the bytes of `paired_int4` into int8 numbers from -8 to 7, [.., N, K]."""
    nibbles = torch.stack((codes & 15, codes >> 4), -2).flatten(-3, -2)
    return (nibbles ^ MIDDLE).view(torch.int8) - MIDDLE


def unpaired_rows(codes: Tensor, rows: Tensor) -> Tensor:
    """Unpack these rows of bytes [N / 2, K] into int8 numbers, [len(rows), K]."""
    nibbles = codes[rows // 2] >> (rows % 2 * 4).to(torch.uint8).unsqueeze(-1) & 15
    return (nibbles ^ MIDDLE).view(torch.int8) - MIDDLE


def tiled_bytes(codes: Tensor) -> Tensor:
    """Tile plain 8-bit codes [.., K] into [.., 64 * ceil(K / 64)] of the same dtype; columns past K are zeros."""
    plain = codes.view(torch.uint8)  # not every device can pad or transpose fp8
    wide = torch.nn.functional.pad(plain, (0, -codes.shape[-1] % BYTES))
    return wide.unflatten(-1, (-1, 8, 4, 2)).transpose(-3, -2).contiguous().flatten(-4).view(codes.dtype)


def plain_bytes(codes: Tensor, columns: int) -> Tensor:
    """Undo `tiled_bytes`: return plain codes [.., columns]."""
    return codes.unflatten(-1, (-1, 4, 8, 2)).transpose(-3, -2).flatten(-4)[..., :columns]


def _pick_entries(codes: Tensor, pick: Pick) -> Tensor:
    """Return codes[pick]. They are indexed as bytes, because not every device can index fp8."""
    return codes.view(torch.uint8)[pick].view(codes.dtype)


def _pick_paired(codes: Tensor, pick: Pick) -> Tensor:
    """Unpack some rows of a matrix [N / 2, K], or some matrices of a stack."""
    if codes.dim() > 2:
        return unpaired_int4(codes[pick])
    return unpaired_rows(codes, torch.arange(2 * codes.shape[-2], device=codes.device)[pick])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How codes hold the numbers of a weight [.., N, K].

    dtypes: of the codes. width: from K to the last dim of the codes. unpack: from codes and K to the numbers
    [.., N, K]. rows: how many rows of the weight one row of codes holds. middle: the zero point of weights without
    zeros. pick: from codes, an index of rows of a matrix, or of matrices of a stack, and K to their numbers; by default
    the codes with this index are unpacked.
    """

    dtypes: tuple[torch.dtype, ...]
    width: Callable[[int], int]
    unpack: Callable[[Tensor, int], Tensor]
    rows: int = 1
    middle: int = 0
    pick: Callable[[Tensor, Pick], Tensor] | None = None

    def num_rows(self, codes: Tensor) -> int:
        """Return the rows N of the matrix, or of each matrix of a stack, that these codes store."""
        return self.rows * codes.shape[-2]

    def picked(self, codes: Tensor, pick: Pick, columns: int) -> Tensor:
        """Return the numbers of some rows of a matrix, or of some matrices of a stack."""
        return self.unpack(_pick_entries(codes, pick), columns) if self.pick is None else self.pick(codes, pick)


_BYTES = (torch.int8, torch.float8_e4m3fn)
# By name. Kernels state which of them they read; the reference reads all.
LAYOUTS = {
    "bytes": Layout(dtypes=_BYTES, width=lambda columns: columns, unpack=lambda codes, columns: codes),
    "bytes_tiled": Layout(dtypes=_BYTES, width=lambda columns: -(-columns // BYTES) * BYTES, unpack=plain_bytes),
    "int4_tiled": Layout(
        dtypes=(torch.int32,),
        width=lambda columns: -(-columns // BLOCK) * WORDS,
        unpack=unpacked_int4,
        middle=MIDDLE,
    ),
    "int4_paired": Layout(
        dtypes=(torch.uint8,),
        width=lambda columns: columns,
        unpack=lambda codes, columns: unpaired_int4(codes),
        rows=2,
        pick=_pick_paired,
    ),
}


def find(name: str) -> Layout:
    """Return the layout of this name. Raises ValueError if there is none."""
    if name not in LAYOUTS:
        raise ValueError(f"layout is {name!r}, expected one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def values(
    numbers: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype, *, block: tuple[int, int], middle: int
) -> Tensor:
    """Return the values [.., N, K] of a weight in `dtype`.

    numbers: [.., N, K], as its layout unpacks them. block: the rows and columns that share one scale; 0 columns mean a
    whole row. middle: the zero point without zeros.
    """
    wide = torch.float64 if torch.float64 in (scales.dtype, dtype) else torch.float32
    numbers = numbers.to(wide) - (middle if zeros is None else expand_blocks(zeros, numbers.shape, block).to(wide))
    return (numbers * expand_blocks(scales, numbers.shape, block).to(wide)).to(dtype)


def expand_blocks(x: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Repeat one number per block to one per element of [.., N, K]; the last block may be partial."""
    rows, columns = block[0], block[1] or shape[-1]
    if rows > 1:
        x = x.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return x.repeat_interleave(columns, -1)[..., : shape[-1]]


class Weight(NamedTuple):
    """A packed weight, or a stack of them, as the operators receive it."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    rows: int  # rows per scale
    columns: int  # columns per scale; 0: all
    layout: str

    @property
    def is_int4(self) -> bool:
        return self.layout == "int4_tiled"

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and zeros for a kernel; without zeros the third is a placeholder that is not read."""
        scales = self.scales.contiguous()
        return self.codes.contiguous(), scales, scales if self.zeros is None else self.zeros.contiguous()

    def group(self, length: int) -> int:
        """Return the columns per scale of a weight with `length` columns; 0: all of them."""
        return 0 if self.columns >= length else self.columns


def expert_weights(*, rows: int, columns: int, layout: str, **tensors: Any) -> tuple[Weight, Weight]:
    """Return gate_up and down of `packed_experts`, from its arguments."""
    gate_up, down = (
        Weight(tensors[name], tensors[f"{name}_scales"], tensors[f"{name}_zeros"], rows, columns, layout)
        for name in ("gate_up", "down")
    )
    return gate_up, down
