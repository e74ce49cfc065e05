"""8-bit caches in the byte order of DeepSeek's own kernels: 656 bytes per latent, 132 per key of the indexer.

Codes are e4m3 and scales are powers of two, so a value, code times scale, is exact in bf16, and prefill reads the same
values as decode. The bytes of a latent are its codes, then one fp32 scale for every 128 codes, then the rotary channels
in bf16. Keys of the indexer are stored in two planes: each block holds the codes of all its tokens, then the fp32
scales of all its tokens.
"""

import torch
from torch import Tensor

from .pages import store

GROUP = 128  # channels of a latent that share a scale
LARGEST, LEAST = 448.0, 1e-4  # the largest e4m3 number; the lower limit of the magnitude in a scale, as DeepSeek's
SCALE_BYTES = 4
CODES = torch.float8_e4m3fn


def latent_bytes(latent_dim: int, rotary: int) -> int:
    """Return the bytes of one cached latent: 656 for 512 latent and 64 rotary channels."""
    return latent_dim + SCALE_BYTES * -(-latent_dim // GROUP) + 2 * rotary


def index_bytes(dim: int) -> int:
    """Return the bytes of one cached key of the indexer: 132 for 128 channels."""
    return dim + SCALE_BYTES


def power_above(x: Tensor) -> Tensor:
    """Return, for each positive number, the smallest power of two that is not below it."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (fraction == 0.5).to(exponent.dtype))


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [..., D]: return e4m3 codes as bytes, [..., D] uint8, and fp32 scales [...].

    A scale is the largest magnitude, or 1e-4 if that is larger, divided by 448 and rounded up to a power of two.
    """
    wide = x.float()
    largest = wide.abs().amax(-1).clamp_min(LEAST) / torch.full((), LARGEST, device=x.device)
    scales = power_above(largest)
    codes = (wide / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(CODES)
    return codes.view(torch.uint8), scales


def as_bytes(x: Tensor) -> Tensor:
    """View numbers [T, N] as bytes [T, bytes]."""
    return x.contiguous().view(torch.uint8)


def alignment_reason(cache: Tensor, first: int) -> str | None:
    """Return None if the fp32 scales are aligned to 4 bytes, else why the kernel cannot access them.

    first: the bytes of a row, or of a block's codes, that precede its scales.
    """
    if first % 4 or any(x % 4 for x in (cache.shape[2], cache.stride(0), cache.storage_offset())):
        return f"needs scales aligned to 4 bytes, got scales after {first} bytes of codes"
    return None


# ---- latents


def pack_latents(latent: Tensor, rotary_channels: Tensor) -> Tensor:
    """Pack latents [T, N] and rotary channels [T, R] into bytes [T, latent_bytes(N, R)]."""
    groups = torch.nn.functional.pad(latent, (0, -latent.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    codes, scales = quantise(groups)
    return torch.cat(
        (codes.flatten(1)[:, : latent.shape[1]], as_bytes(scales), as_bytes(rotary_channels.bfloat16())), 1
    )


def unpack_latents(rows: Tensor, latent_dim: int) -> Tensor:
    """Unpack rows [n, bytes] of `pack_latents` into latents and rotary channels, [n, N + R] fp32. latent_dim: N."""
    groups = -(-latent_dim // GROUP)
    codes, scales, rotary_channels = rows.split(
        (latent_dim, SCALE_BYTES * groups, rows.shape[1] - latent_dim - SCALE_BYTES * groups), 1
    )
    factors = scales.contiguous().view(torch.float32).repeat_interleave(GROUP, 1)[:, :latent_dim]
    latent = codes.contiguous().view(CODES).float() * factors
    return torch.cat((latent, rotary_channels.contiguous().view(torch.bfloat16).float()), 1)


# ---- the indexer's keys


def hadamard_rows(x: Tensor) -> Tensor:
    """Compute `hadamard` of fp32 rows by the fast transform of sums and differences.

    Unlike the matmul of that operator's reference, it gives a row bits that do not depend on the batch.
    """
    size = x.shape[-1]
    y, width = x, 1
    while width < size:
        first, second = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        width *= 2
    return y * size**-0.5


def planes(cache: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """View a cache [blocks, block size, D + 4] of bytes as its planes: codes [blocks, block size, D] and scales.

    The scales are [blocks, block size, 4], the bytes of one fp32 number each. dim: D.
    """
    flat, size = cache.flatten(1), cache.shape[1]
    return flat[:, : size * dim].unflatten(1, (size, dim)), flat[:, size * dim :].unflatten(1, (size, SCALE_BYTES))


def store_index(k: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Transform keys k [T, D] by `hadamard_rows`, quantise them, and store them in a cache of bytes."""
    codes, scales = quantise(hadamard_rows(k.float()))
    for rows, plane in zip((codes, as_bytes(scales[:, None])), planes(cache, k.shape[1]), strict=True):
        store(rows, plane, slots)


def gather_index(cache: Tensor, dim: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the codes of one sequence, [length, D] fp32, and their scales [length]."""
    blocks = cache.index_select(0, table[: -(-length // cache.shape[1])])
    codes, scales = (plane.flatten(0, 1)[:length].contiguous() for plane in planes(blocks, dim))
    return codes.view(CODES).float(), scales.view(torch.float32)[:, 0]


def round_queries(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Transform and quantise queries q [T, HI, D] as `store_index` does keys.

    Returns their codes in fp32, and the weights [T, HI] times the scales of the queries.
    """
    codes, scales = quantise(hadamard_rows(q.float()))
    return codes.view(CODES).float(), weights.float() * scales
