"""The memory order of packed weights, and how their values are computed.

A weight [N, K] is stored as codes, scales and, for asymmetric quantisation, zeros (zero points):
value[n, k] = (code[n, k] - zero[n // rows, k // columns]) * scale[n // rows, k // columns], in fp32, rounded once to
the dtype of the activations it is multiplied with.

8-bit codes: int8 or float8_e4m3fn, one per byte; without zeros the zero point is 0. Stored plainly, [.., N, K], or
tiled, [.., N, 64 * ceil(K / 64)]: byte 16 i + 2 p + e of a block of 64 columns is its column 8 p + 2 i + e.
4-bit codes for Nvidia: int32 [.., N, 16 * ceil(K / 128)], values 0 to 15; without zeros the zero point is 8. Always
tiled: a block of 128 columns is 16 words, and a word holds four pairs of neighbouring columns. Pair p of word 4 i + w
is columns 32 w + 8 p + 2 i and the next one; the first is in bits 4 p to 4 p + 3, the second 16 bits above it.
4-bit codes for Ascend: uint8 [.., N / 2, K], values -8 to 7 in two's complement; without zeros the zero point is 0.
Byte [n, k] holds column k of rows 2 n, in its low bits, and 2 n + 1. torch_npu reads them without a copy where memory
has the order [.., K, N / 2]: four bytes are then one of its int32 words of eight rows.

The tiled order suits tensor cores. In their matmul, threads i = 0 to 3 of a row hold columns 2 i, 2 i + 1, 2 i + 8 and
2 i + 9 of every 16 columns. In this order 16 consecutive bytes of a row are what one thread needs of a block, and one
shift and one mask extract a pair of 4-bit codes in order.
"""

import torch
from torch import Tensor

BLOCK = 128  # columns per block of 4-bit codes
WORDS = 16  # int32 words per block of 4-bit codes
BYTES = 64  # columns, and bytes, per tiled block of 8-bit codes
CHUNK = 1024  # columns that are accumulated from zero; the sums of the chunks are then added in order
MIDDLE = 8  # zero point of 4-bit codes without zeros
CODES = (torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn)
PAIRED = torch.uint8  # dtype of 4-bit codes in pairs of rows


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


def num_rows(codes: Tensor) -> int:
    """Return the rows N of the matrix, or of each matrix of a stack, that these codes store."""
    return codes.shape[-2] * (2 if codes.dtype == PAIRED else 1)


def tiled_bytes(codes: Tensor) -> Tensor:
    """Tile plain 8-bit codes [.., K] into [.., 64 * ceil(K / 64)] of the same dtype; columns past K are zeros."""
    plain = codes.view(torch.uint8)  # not every device can pad or transpose fp8
    wide = torch.nn.functional.pad(plain, (0, -codes.shape[-1] % BYTES))
    return wide.unflatten(-1, (-1, 8, 4, 2)).transpose(-3, -2).contiguous().flatten(-4).view(codes.dtype)


def plain_bytes(codes: Tensor, columns: int) -> Tensor:
    """Undo `tiled_bytes`: return plain codes [.., columns]."""
    return codes.unflatten(-1, (-1, 4, 8, 2)).transpose(-3, -2).flatten(-4)[..., :columns]


def width(dtype: torch.dtype, columns: int, tiled: bool) -> int:
    """Return the last dim of codes of this dtype for `columns` columns; tiled: whether 8-bit codes are tiled."""
    if dtype == torch.int32:
        return -(-columns // BLOCK) * WORDS
    if dtype == PAIRED:
        return columns
    return -(-columns // BYTES) * BYTES if tiled else columns


def values(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    columns: int,
    dtype: torch.dtype,
    *,
    block: tuple[int, int],
    tiled: bool,
) -> Tensor:
    """Return the values of a packed weight, [.., N, columns] in `dtype`.

    block: the rows and columns that share one scale; 0 columns mean a whole row.
    """
    if codes.dtype == torch.int32:
        numbers = unpacked_int4(codes, columns)
    elif codes.dtype == PAIRED:
        numbers = unpaired_int4(codes)
    else:
        numbers = plain_bytes(codes, columns) if tiled else codes
    wide = torch.float64 if torch.float64 in (scales.dtype, dtype) else torch.float32
    middle = MIDDLE if codes.dtype == torch.int32 else 0
    numbers = numbers.to(wide) - (middle if zeros is None else expand_blocks(zeros, numbers.shape, block).to(wide))
    return (numbers * expand_blocks(scales, numbers.shape, block).to(wide)).to(dtype)


def expand_blocks(x: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Repeat one number per block to one per element of [.., N, K]; the last block may be partial."""
    rows, columns = block[0], block[1] or shape[-1]
    if rows > 1:
        x = x.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return x.repeat_interleave(columns, -1)[..., : shape[-1]]
