"""Pages in 8 bits, in the layouts of DeepSeek's own kernels: latents of 656 bytes, the indexer's keys of 132.

Codes are e4m3, scales powers of two: a value, code times scale, is a bf16 number, so nothing is lost when it is
widened to bf16, and a prompt reads what a decoded token would. A latent is its codes, an fp32 scale for every 128 of
them, and the channels that turn in bf16, one behind the other. Keys of the indexer lie in planes: in each block the
codes of all its tokens, then their fp32 scales.
"""

import torch
from torch import Tensor

from .pages import store

GROUP = 128  # channels of a latent that share a scale
LARGEST, LEAST = 448.0, 1e-4  # of e4m3; and of what a scale is made of, as DeepSeek's quantiser has it
SCALE_BYTES = 4
CODES = torch.float8_e4m3fn


def latent_bytes(rank: int, rotary: int) -> int:
    """656 of 512 and 64 channels."""
    return rank + SCALE_BYTES * -(-rank // GROUP) + 2 * rotary


def index_bytes(dim: int) -> int:
    """132 of 128 channels."""
    return dim + SCALE_BYTES


def power_above(x: Tensor) -> Tensor:
    """The least power of two that is not below each positive number."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (fraction == 0.5).to(exponent.dtype))


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of x [..., D] as bytes, and fp32 scales [...]: the largest magnitude / 448, up to a power of two."""
    wide = x.float()
    largest = wide.abs().amax(-1).clamp_min(LEAST) / torch.full((), LARGEST, device=x.device)
    scales = power_above(largest)
    codes = (wide / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(CODES)
    return codes.view(torch.uint8), scales


def as_bytes(x: Tensor) -> Tensor:
    """[T, N] numbers as [T, bytes]."""
    return x.contiguous().view(torch.uint8)


def alignment_reason(cache: Tensor, first: int) -> str | None:
    """None where fp32 numbers lie on 4 bytes; first: bytes of a row, or of a block's codes, before its scales."""
    if first % 4 or any(x % 4 for x in (cache.shape[2], cache.stride(0), cache.storage_offset())):
        return f"scales are read and written 4 bytes at a time, behind {first} bytes of codes they do not lie so"
    return None


# ---- latents


def pack_latents(latent: Tensor, turned: Tensor) -> Tensor:
    """[T, latent_bytes] of latents [T, N] and the channels that turn [T, R]."""
    groups = torch.nn.functional.pad(latent, (0, -latent.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    codes, scales = rounded(groups)
    return torch.cat((codes.flatten(1)[:, : latent.shape[1]], as_bytes(scales), as_bytes(turned.bfloat16())), 1)


def unpack_latents(rows: Tensor, rank: int) -> Tensor:
    """[n, N + R] fp32 of [n, latent_bytes]."""
    groups = -(-rank // GROUP)
    codes, scales, turned = rows.split((rank, SCALE_BYTES * groups, rows.shape[1] - rank - SCALE_BYTES * groups), 1)
    factors = scales.contiguous().view(torch.float32).repeat_interleave(GROUP, 1)[:, :rank]
    latent = codes.contiguous().view(CODES).float() * factors
    return torch.cat((latent, turned.contiguous().view(torch.bfloat16).float()), 1)


# ---- the indexer's keys


def spread(x: Tensor) -> Tensor:
    """`hadamard` of fp32 rows by sums and differences alone: a row's bits do not depend on how many there are."""
    size = x.shape[-1]
    y, width = x, 1
    while width < size:
        first, second = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        width *= 2
    return y * size**-0.5


def planes(cache: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Of blocks [blocks, block size, D + 4] bytes: codes [blocks, block size, D] and scales [blocks, block size, 4]."""
    flat, size = cache.flatten(1), cache.shape[1]
    return flat[:, : size * dim].unflatten(1, (size, dim)), flat[:, size * dim :].unflatten(1, (size, SCALE_BYTES))


def store_index(k: Tensor, cache: Tensor, slots: Tensor) -> None:
    codes, scales = rounded(spread(k.float()))
    for rows, plane in zip((codes, as_bytes(scales[:, None])), planes(cache, k.shape[1]), strict=True):
        store(rows, plane, slots)


def gather_index(cache: Tensor, dim: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The codes of one sequence, [length, D] fp32, and their scales [length]."""
    blocks = cache.index_select(0, table[: -(-length // cache.shape[1])])
    codes, scales = (plane.flatten(0, 1)[:length].contiguous() for plane in planes(blocks, dim))
    return codes.view(CODES).float(), scales.view(torch.float32)[:, 0]


def round_queries(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Queries as keys are kept, in fp32 codes, and weights times their scales."""
    codes, scales = rounded(spread(q.float()))
    return codes.view(CODES).float(), weights.float() * scales
