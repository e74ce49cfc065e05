"""How packed weights lie in memory, and what their values are.

A weight [N, K] is held as codes and scales, and, where zeros lie elsewhere than in the middle, as zeros:
value[n, k] = (code[n, k] - zero[n // rows, k // columns]) * scale[n // rows, k // columns], in fp32, rounded once to
the dtype of what it is multiplied with.

codes of 8 bits: int8 or float8_e4m3fn, one a byte; zero is 0 where there are no zeros. Plainly [.., N, K]; or tiled,
[.., N, 64 * ceil(K / 64)]: byte 16 i + 2 p + e of a block of 64 columns is column 8 p + 2 i + e of it.
codes of 4 bits: int32 [.., N, 16 * ceil(K / 128)], 0 to 15; zero is 8 where there are no zeros. They are always tiled:
a block of 128 columns is 16 words, and a word holds four pairs of neighbours. Pair p of word 4 i + w is columns
32 w + 8 p + 2 i and the next one; the first stands in bits 4 p to 4 p + 3, the second 16 bits above it.

So 16 bytes of a row are what one thread holds of a block in a product on tensor cores, where threads i = 0 to 3 of a
row have columns 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 of every 16; and of 4 bits a shift and a mask bring out a pair, in
its order.
"""

import torch
from torch import Tensor

BLOCK = 128  # columns of 4 bits
WORDS = 16  # of a block
BYTES = 64  # of a block of 8 bits
CHUNK = 1024  # columns that are summed from zero; the sums of chunks are added in their order
MIDDLE = 8  # zero of 4 bits
CODES = (torch.int32, torch.int8, torch.float8_e4m3fn)


def packed_int4(numbers: Tensor) -> Tensor:
    """codes of numbers [.., K] from 0 to 15. Columns past K are zeros' own numbers, and multiply nothing."""
    short = -numbers.shape[-1] % BLOCK
    wide = torch.nn.functional.pad(numbers.to(torch.uint8), (0, short), value=MIDDLE)
    blocks = wide.unflatten(-1, (-1, 4, 4, 4, 2)).transpose(-4, -2)  # w, p, i, e; then i, p, w, e
    pairs = blocks[..., 0] | blocks[..., 1] << 4  # a byte: pair p of word 4 i + w
    pairs = pairs.transpose(-1, -2)  # i, w, p
    low = pairs[..., 0] & 15 | (pairs[..., 1] & 15) << 4, pairs[..., 2] & 15 | (pairs[..., 3] & 15) << 4
    high = pairs[..., 0] >> 4 | pairs[..., 1] >> 4 << 4, pairs[..., 2] >> 4 | pairs[..., 3] >> 4 << 4
    return torch.stack((*low, *high), -1).contiguous().view(torch.int32).flatten(-4)


def unpacked_int4(codes: Tensor, columns: int) -> Tensor:
    """uint8 [.., columns]; the way back."""
    shape = codes.shape[:-1]
    found = codes.contiguous().view(torch.uint8).view(*shape, codes.shape[-1] // WORDS, 4, 4, 4)  # i, w, byte
    low, high = found[..., :2], found[..., 2:]
    pairs = [torch.stack((part & 15, part >> 4), -1).flatten(-2) for part in (low, high)]  # i, w, p
    numbers = torch.stack(pairs, -1).transpose(-4, -3).transpose(-3, -2)  # w, p, i, e
    return numbers.reshape(*shape, -1)[..., :columns]


def tiled_bytes(codes: Tensor) -> Tensor:
    """Of plain codes of 8 bits [.., K]; columns past K are zeros."""
    plain = codes.view(torch.uint8)  # not every device pads, or turns, fp8
    wide = torch.nn.functional.pad(plain, (0, -codes.shape[-1] % BYTES))
    return wide.unflatten(-1, (-1, 8, 4, 2)).transpose(-3, -2).contiguous().flatten(-4).view(codes.dtype)


def plain_bytes(codes: Tensor, columns: int) -> Tensor:
    """[.., columns]; the way back."""
    return codes.unflatten(-1, (-1, 4, 8, 2)).transpose(-3, -2).flatten(-4)[..., :columns]


def width(dtype: torch.dtype, columns: int, tiled: bool) -> int:
    """Numbers of `dtype` in which a row of so many columns is held."""
    if dtype == torch.int32:
        return -(-columns // BLOCK) * WORDS
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
    """[.., N, columns] in `dtype`. block: rows and columns that have one scale; 0 columns: a whole row."""
    if codes.dtype == torch.int32:
        numbers = unpacked_int4(codes, columns)
    else:
        numbers = plain_bytes(codes, columns) if tiled else codes
    wide = torch.float64 if torch.float64 in (scales.dtype, dtype) else torch.float32
    middle = MIDDLE if codes.dtype == torch.int32 else 0
    numbers = numbers.to(wide) - (middle if zeros is None else spread(zeros, numbers.shape, block).to(wide))
    return (numbers * spread(scales, numbers.shape, block).to(wide)).to(dtype)


def spread(x: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """One number for each element: of a matrix [.., N, K] in blocks, the last of which may be cut short."""
    rows, columns = block[0], block[1] or shape[-1]
    if rows > 1:
        x = x.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return x.repeat_interleave(columns, -1)[..., : shape[-1]]
