"""MXFP4: numbers of 4 bits (e2m1) in blocks of 32 neighbouring columns, with a power of two (e8m0) for each block.

codes: uint8 [.., N, K / 2]; a byte holds column 2 j in its low bits and 2 j + 1 in its high ones. A number's bit 3 is
the sign; the other three say 0, 0.5, 1, 1.5, 2, 3, 4 or 6. scales: uint8 [.., N, K / 32], s for 2^(s - 127); 255 is
NaN. Every value is exact in bf16, and in fp16 where its scale fits. Triton's kernels read codes in the tiles of layout
"int4_tiled", int32 [.., N, 16 * ceil(K / 128)], with as many scales of four for each tile, up to `LARGEST`.
"""

import itertools

import torch
from torch import Tensor

from .layout import LAYOUTS, packed_int4, unpacked_int4

BLOCK = 32  # columns of a scale
LARGEST = 128  # the largest scale, 2, of codes in tiles: 2^126 times it is a number
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1(codes: Tensor) -> Tensor:
    """Return the numbers of codes uint8 [.., K / 2], fp32 [.., K]."""
    table = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)], device=codes.device)
    return table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]


def powers(scales: Tensor) -> Tensor:
    """Return the powers of two of e8m0 scales, fp32."""
    bits = (scales.int() << 23).masked_fill(scales == 0, 1 << 22)  # 2^-127 is a denormal number
    return bits.view(torch.float32).masked_fill(scales == 255, torch.nan)


def widths(columns: int) -> dict[torch.dtype, tuple[int, int]]:
    """Return the last dims of codes and scales of so many columns, by the dtype of codes: as stored, and in tiles."""
    width = LAYOUTS["int4_tiled"].width(columns)
    return {torch.uint8: (columns // 2, columns // BLOCK), torch.int32: (width, width // 4)}


def tiled(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [.., N, K / 2] in tiles, and their scales [.., N, K / 32] with zeros up to the end of a tile."""
    in_tiles = packed_int4(torch.stack((codes & 15, codes >> 4), -1).flatten(-2))
    return in_tiles, torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))


def values(codes: Tensor, scales: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    """Return the values [.., N, columns] in `dtype` of codes with their scales, as stored or in tiles."""
    if codes.dtype == torch.int32:
        numbers = unpacked_int4(codes, columns)
        codes, scales = numbers[..., ::2] | numbers[..., 1::2] << 4, scales[..., : columns // BLOCK]
    blocks = e2m1(codes).unflatten(-1, (-1, BLOCK))
    return (blocks * powers(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [.., N, K] to codes and scales, to the nearest; K must be a multiple of 32."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    top = blocks.abs().amax(-1)
    scales = (torch.frexp(top).exponent - 3 + 127).clamp(1, 254)  # frexp: 2^(exponent - 1) <= top < 2^exponent
    scaled = blocks / torch.exp2(scales.float() - 127).unsqueeze(-1)
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(NUMBERS)], device=x.device)
    numbers = torch.bucketize(scaled.abs(), middles) | (scaled.signbit().int() << 3)
    pairs = numbers.flatten(-2).unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, scales.to(torch.uint8)
